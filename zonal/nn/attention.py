"""The attention layer: projections around any operator."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from zonal import mechanisms
from zonal.algebra.operator import Operator
from zonal.attention import attention
from zonal.errors import ArgumentError
from zonal.memory import Memory
from zonal.nn.convolution import ShortConvolution
from zonal.nn.initialise import Draws
from zonal.nn.koopman import CGLift
from zonal.nn.memory import LayerMemory
from zonal.nn.mixer import TokenMixer
from zonal.nn.norm import RMSNorm
from zonal.nn.positions import document_positions
from zonal.nn.rotary import Rotary

ReadoutNorm = Literal["auto", "head", "concat"]


class Attention(TokenMixer):
    """y = W_O · norm(A(W_Q c, W_K c, W_V c)), with c = x or its short convolution and A any operator.

    Args:
        dim: size of x and y.
        heads: H query heads.
        operator: an Operator, or a spec such as "sko" or "ska(power=1)"; the layer keeps its own copy, one parameter row a head. With
            rewa(shared_witness=True) one map makes queries and keys.
        kv_heads: key and value heads, a divisor of ``heads``; None = ``heads``.
        head_dim: size of v of one head, and of q and k unless ``qk_dim`` is given; None = dim / heads.
        qk_dim: size of q and k of one head; None = what the operator asks for, or head_dim.
        rotary: rotary positions on q and k; a ``Rotary`` is shared with whoever else holds it.
        qk_norm: RMSNorm on q and on k, per head, one gain of size qk_dim each.
        readout_norm: RMSNorm on what the operator returns: "head" over each head with one gain shared by the heads, "concat"
            over all heads at once, None for none; "auto" takes what the operator declares.
        readout_eps: ε of that norm.
        conv: width of the short convolution of x before the projections; 0 = none.
        cg_lift: size r of queries and keys after a ``CGLift`` (behind norms and rotary positions); None = no lift.
        bias: biases in the four projections.
        causal: each token sees itself and the past, or the past alone where the operator says so.

    Raises: ArgumentError for sizes that do not fit; unknown operators list the valid names.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        operator: Operator | str,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_dim: int | None = None,
        rotary: bool | Rotary = False,
        qk_norm: bool = False,
        readout_norm: ReadoutNorm | None = "auto",
        readout_eps: float = 1e-6,
        conv: int = 0,
        cg_lift: int | None = None,
        bias: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        if dim < 1 or heads < 1:
            raise ArgumentError(f"nn.Attention: required dim >= 1 and heads >= 1, received dim={dim}, heads={heads}.")
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ArgumentError(f"nn.Attention: kv_heads must divide heads={heads}, received kv_heads={kv_heads}.")
        if head_dim is None:
            if dim % heads:
                raise ArgumentError(f"nn.Attention: dim={dim} is not a multiple of heads={heads}. Choose another number of heads or pass head_dim.")
            head_dim = dim // heads
        if head_dim < 1:
            raise ArgumentError(f"nn.Attention: head_dim must be at least 1, received {head_dim}.")
        if readout_norm not in ("auto", "head", "concat", None):
            raise ArgumentError(f"nn.Attention: readout_norm must be 'auto', 'head', 'concat' or None, received {readout_norm!r}.")
        if conv < 0 or conv == 1:
            raise ArgumentError(f"nn.Attention: conv must be 0 (none) or a width of at least 2, received {conv}.")

        self.dim, self.heads, self.kv_heads, self.head_dim, self.causal = dim, heads, kv_heads, head_dim, causal
        resolved = mechanisms.resolve(operator) if isinstance(operator, str) else operator
        if qk_dim is None:
            qk_dim = resolved.qk_dim if resolved.qk_dim is not None else head_dim
        if qk_dim < 1:
            raise ArgumentError(f"nn.Attention: qk_dim must be at least 1, received {qk_dim}.")
        self.qk_dim = qk_dim
        self.lift = None if cg_lift is None else CGLift(qk_dim, cg_lift)
        self.key_dim = qk_dim if cg_lift is None else cg_lift
        self.operator: Operator = resolved.for_heads(heads, kv_heads, dim=self.key_dim)
        self.readout_norm: str | None = self.operator.readout if readout_norm == "auto" else readout_norm

        one_map = self.operator.score.one_map
        if one_map and kv_heads != heads:
            raise ArgumentError(f"nn.Attention: one map for queries and keys (shared_witness) needs kv_heads = heads = {heads}, received kv_heads={kv_heads}.")
        self.query = nn.Linear(dim, heads * qk_dim, bias=bias)
        self.key = self.query if one_map else nn.Linear(dim, kv_heads * qk_dim, bias=bias)
        self.value = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.output = nn.Linear(heads * head_dim, dim, bias=bias)
        if isinstance(rotary, Rotary) and rotary.head_dim != qk_dim:  # shared with layers whose queries have another size
            rotary = Rotary(qk_dim, rotary.base)
        self.rotary: Rotary | None = rotary if isinstance(rotary, Rotary) else Rotary(qk_dim) if rotary else None
        self.convolution = ShortConvolution(dim, conv) if conv else None
        self.query_norm = RMSNorm(qk_dim) if qk_norm else None
        self.key_norm = self.query_norm if one_map else RMSNorm(qk_dim) if qk_norm else None
        if self.readout_norm == "head":
            self.readout: RMSNorm | None = RMSNorm(head_dim, readout_eps)
        elif self.readout_norm == "concat":
            self.readout = RMSNorm(heads * head_dim, readout_eps)
        else:
            self.readout = None
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights but the operator's own, which keep the values it declares.

        An operator with ``layer_init = "zero_output"`` starts with orthogonal queries and keys, head by head, and
        writes nothing: W_O = 0.
        """
        for name, linear in (("query", self.query), ("key", self.key), ("value", self.value), ("output", self.output)):
            draws.normal_(linear.weight, f"{name}.weight", output=name == "output")
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.operator.layer_init == "zero_output":
            draws.orthogonal_(self.query.weight, "query.weight", self.heads)
            draws.orthogonal_(self.key.weight, "key.weight", self.kv_heads)
            nn.init.zeros_(self.output.weight)
        if self.convolution is not None:
            self.convolution.reset_parameters(draws.child("convolution"))
        if self.lift is not None:  # μ starts at the mean of |k_j|² for inputs of unit size
            self.lift.reset_parameters(draws.child("lift"), mean=2.0 if self.key_norm is not None else 2 * self.dim * draws.std**2)
        for norm in (self.query_norm, self.key_norm, self.readout):
            if norm is not None:
                norm.reset_parameters()

    def empty_memory(self, batch: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LayerMemory:
        """The memory of ``batch`` sequences that have not begun; dtype and device default to the layer's."""
        dtype = dtype or self.query.weight.dtype
        device = torch.device(device) if device is not None else self.query.weight.device
        return LayerMemory(
            memory=Memory.empty(self.operator, batch, self.kv_heads, self.key_dim, self.head_dim, dtype, device),
            tail=None if self.convolution is None else self.convolution.empty_tail(batch, dtype, device),
        )

    def learned(self) -> dict[str, Any]:
        """What the operator has learned, in plain lists."""
        return self.operator.learned()

    def forward(
        self,
        x: Tensor,
        memory: LayerMemory | None = None,
        *,
        return_memory: bool = False,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
    ) -> Tensor | tuple[Tensor, LayerMemory]:
        """Attend. Arguments, result and errors are those of ``TokenMixer.forward``."""
        memory = self._before(x, memory, return_memory, key_padding_mask, cu_seqlens)
        length = x.shape[1]
        tail = None
        inner = x
        if self.convolution is not None:
            inner, tail = self.convolution(
                x, None if memory is None else memory.tail, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens
            )
        q = self._split(self.query(inner), self.heads)
        k = self._split(self.key(inner), self.kv_heads)
        v = self._split(self.value(inner), self.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            positions = self._positions(length, memory, key_padding_mask, cu_seqlens)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        if self.lift is not None:
            q, k = self.lift(q), self.lift(k)

        if memory is None:
            y = attention(q, k, v, self.operator, causal=self.causal, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, path=path)
            return self._read_out(y)
        result = attention(q, k, v, self.operator, causal=self.causal, key_padding_mask=key_padding_mask, memory=memory.memory, path=path)
        assert isinstance(result, tuple)  # a pair, since a memory was given
        y, absorbed = result
        return self._read_out(y), memory.advance(absorbed, tail, length, key_padding_mask)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """(B, T, heads · d) -> (B, heads, T, d)."""
        return x.unflatten(2, (heads, -1)).transpose(1, 2)

    def _positions(
        self, length: int, memory: LayerMemory | None, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor | int:
        """Positions count real tokens only, so that padding shifts nothing."""
        start = 0 if memory is None else memory.position
        if cu_seqlens is not None:
            return document_positions(cu_seqlens, length)
        if key_padding_mask is not None:
            within = key_padding_mask.cumsum(dim=1) - 1
            return within.clamp(min=0) + (start[:, None] if isinstance(start, Tensor) else start)
        if isinstance(start, Tensor):
            return start[:, None] + torch.arange(length, device=start.device)
        return start

    def _read_out(self, y: Tensor) -> Tensor:
        """(B, H, T, P) -> (B, T, dim)."""
        y = y.transpose(1, 2)
        if self.readout_norm == "head" and self.readout is not None:
            y = self.readout(y)
        y = y.flatten(2)
        if self.readout_norm == "concat" and self.readout is not None:
            y = self.readout(y)
        return self.output(y)

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, qk_dim={self.qk_dim}, readout_norm={self.readout_norm}"
