"""The common parts of MesaNet, Gated KalmaNet and Gated DeltaNet: projections, convolution, gates and read-out around
one matrix per head.
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError, PathError
from zonal.memory import DecayedSums
from zonal.memory.sums import carried
from zonal.memory.tokens import Tokens
from zonal.nn.convolution import ShortConvolution
from zonal.nn.fading import RESET
from zonal.nn.initialise import Draws
from zonal.nn.memory import LayerMemory, Past
from zonal.nn.mixer import Inputs, TokenMixer
from zonal.nn.norm import RMSNorm, accumulation_dtype
from zonal.nn.recurrence import Sizes, ssd

_BLOCK = 64


class Step(NamedTuple):
    """What the recurrence of a layer is given: q, k (B, H, T, N), v (B, H, T, P), how strongly each token is written
    (B, H, T, 1), log decays (B, H, T), the inputs of all gates (B, H, T) each, the matrix before the first token, and
    the tokens of a block.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    log_decay: Tensor
    raw: Sequence[Tensor]
    state: Tensor
    size: int


class Mixed(NamedTuple):
    """y (B, H, T, P), the matrix after the last token, and the key and the value whose product each token has added to
    it.
    """

    y: Tensor
    state: Tensor
    keys: Tensor
    values: Tensor


class FastWeights(TokenMixer):
    """A token mixer that keeps one matrix per head, fades it, and writes to it at each token.

    [q, k, v, z, …] = W_I x. q and k (and v if ``convolves_values``) pass a causal depthwise convolution and SiLU; q and
    k are then divided by their norms. The output y (P numbers per head) is normed per head with one gain of size P,
    multiplied by SiLU(z) if ``gated``, and projected by W_O. There are expand · dim / head_dim heads, each with its own
    keys.

    The matrices are a ``zonal.Memory`` of sums that fade. All paths compute the same recurrence in blocks: of 64 tokens
    ("auto", "chunked"), of one token ("streaming"), or of all tokens ("dense").
    """

    convolves_values: ClassVar[bool] = True
    gates: ClassVar[int] = 2
    """Inputs of the gates, per token and head."""
    solves: ClassVar[bool] = False
    """Whether queries are solved with the sum of k k^T, which then stands in the matrix before that of k v^T."""

    def __init__(
        self, dim: int, state: int, head_dim: int, expand: int, conv: int, norm_eps: float, gated: bool
    ) -> None:
        super().__init__()
        self.sizes = Sizes(f"nn.{type(self).__name__}", dim, state, head_dim, expand, 1)
        self.dim, self.operator, self.gated = dim, ssd(), gated
        heads, inner = self.sizes.heads, self.sizes.inner
        self.parts = (2 * heads * state + inner, inner if gated else 0, self.gates * heads)
        self.input = nn.Linear(dim, sum(self.parts), bias=False)
        self.convolution: ShortConvolution = ShortConvolution(
            2 * heads * state + (inner if self.convolves_values else 0), conv, "silu"
        )
        self.norm = RMSNorm(head_dim, norm_eps)
        self.output = nn.Linear(inner, dim, bias=False)

    @property
    def columns(self) -> int:
        """Number of columns of the matrix of a head; it has ``state`` rows."""
        return self.sizes.head_dim + (self.sizes.state if self.solves else 0)

    # --- what a layer provides --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _reset_gates(self, draws: Draws) -> None:
        """Start what is the layer's own."""

    @abc.abstractmethod
    def _gates(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """From ``gates`` numbers per token and head, each (B, H, T): log decay <= 0 and how strongly a token is
        written, 0 … 1.
        """

    @abc.abstractmethod
    def _recur(self, step: Step) -> Mixed:
        """The recurrence in blocks."""

    # --- what they share --------------------------------------------------------------------------------------------

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights."""
        draws.linear_(self.input, "input")
        draws.linear_(self.output, "output", output=True)
        self.convolution.reset_parameters(draws.child("convolution"))
        self.norm.reset_parameters()
        self._reset_gates(draws)

    def _empty(self, batch: int, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        sums = self.sizes.empty_memory(self.operator, batch, dtype, device, self.columns)
        return LayerMemory(sums, self.convolution.empty_tail(batch, dtype, device))

    def _mix(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Past | None]:
        before, key_padding_mask, cu_seqlens, path = inputs[:4]
        size = self._block(path, x.shape[1])
        mixed, gate, raw = self.input(x).split(self.parts, dim=2)
        # the recurrence runs in float32 or better
        dtype = accumulation_dtype(gate.dtype)
        state = self._state(before, x.shape[0], dtype)
        passed, values = mixed.split([self.convolution.dim, mixed.shape[2] - self.convolution.dim], dim=2)
        passed, tail = self.convolution(passed, inputs.tail, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        with torch.autocast(x.device.type, enabled=False):
            passed = torch.cat([passed, values], 2) if values.shape[2] else passed
            q, k, v = self._by_head(passed.to(dtype))
            gates = raw.to(dtype).unflatten(2, (self.gates, -1)).permute(2, 0, 3, 1).unbind(0)
            log_decay, write = self._gates(gates)
            log_decay = log_decay.double()
            if key_padding_mask is not None:  # a padded token neither fades the past nor is written
                log_decay, write = log_decay * key_padding_mask[:, None], write * key_padding_mask[:, None]
            if cu_seqlens is not None:  # nothing is left at the first token of a document
                log_decay = log_decay.index_fill(2, cu_seqlens[:-1].to(x.device, torch.int64), RESET)
            mixed = self._recur(Step(q, k, v, write.unsqueeze(-1), log_decay, gates, state, size))
            y = self.norm(mixed.y).transpose(1, 2).flatten(2)
            y = y * F.silu(gate.to(dtype)) if self.gated else y
        y = self.output(y.to(gate.dtype))
        if before is None:
            return y, None
        held, written = before.memory, Tokens(mixed.keys, mixed.values, key_padding_mask, log_decay)
        assert isinstance(held, DecayedSums)
        absorbed = held.recorded(carried(held, mixed.state, written), written)
        return y, inputs.after(absorbed, tail, x.shape[1])

    def _block(self, path: str, length: int) -> int:
        sizes = {"auto": _BLOCK, "chunked": _BLOCK, "streaming": 1, "dense": length}
        if path not in sizes:
            known = path in ("tiled", "sparse")
            error = PathError if known else ArgumentError
            raise error(
                f"nn.{type(self).__name__}: path must be one of {', '.join(sizes)}, received {path!r}. "
                "Pass path='auto'."
            )
        return min(sizes[path], length)

    def _by_head(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.sizes
        keys = sizes.heads * sizes.state
        q, k, v = mixed.split([keys, keys, sizes.inner], dim=2)
        q, k = (
            F.normalize(part.unflatten(2, (sizes.heads, sizes.state)), dim=-1, eps=1e-6).transpose(1, 2)
            for part in (q, k)
        )
        return q, k, v.unflatten(2, (sizes.heads, sizes.head_dim)).transpose(1, 2)

    def _state(self, before: Past | None, batch: int, dtype: torch.dtype) -> Tensor:
        wanted = (self.sizes.heads, self.sizes.state, self.columns)
        if before is None:
            return torch.zeros(batch, *wanted, dtype=dtype, device=self.input.weight.device)
        held, form = before.memory, before.memory.form
        if not isinstance(held, DecayedSums) or (form.heads, form.key_dim, form.value_dim) != wanted:
            raise ArgumentError(
                f"nn.{type(self).__name__}: the memory comes from another kind of layer. Make it with this "
                "layer's empty_memory()."
            )
        return held.state.to(dtype)

    @torch.no_grad()
    def learned(self) -> dict[str, Any]:
        """rates: the factor by which each head fades its matrix over one token, with gate inputs of 0."""
        zero = self.norm.weight.new_zeros(self.gates, 1, self.sizes.heads, 1)
        return {"rates": self._gates(zero.unbind(0))[0].exp().flatten().tolist()}

    def extra_repr(self) -> str:
        return str(self.sizes)


__all__ = ["FastWeights", "Mixed", "Step"]
