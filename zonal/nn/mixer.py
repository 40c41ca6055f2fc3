"""The interface of token mixers, the layers of a block in which tokens read other tokens."""

import abc
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zonal.algebra.named import in_use
from zonal.algebra.operator import Operator
from zonal.algebra.prior import Decay, composed, relation
from zonal.attention import attention
from zonal.errors import ArgumentError
from zonal.memory import Criterion, Decoder, Memory, Reading
from zonal.names import known_names
from zonal.nn.convolution import ShortConvolution
from zonal.nn.initialise import Draws
from zonal.nn.memory import LayerDecoder, LayerMemory, Past, load_memories
from zonal.nn.positions import check_masks
from zonal.stretch import active
from zonal.typed import check_tensors


class Inputs(NamedTuple):
    """What a call of a layer is given besides its tokens, as in ``TokenMixer.forward``."""

    before: Past | None = None
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    path: str = "auto"
    action_mask: Tensor | None = None
    mass: Tensor | None = None

    @property
    def tail(self) -> Tensor | None:
        """The last inputs of the short convolution before this call."""
        return None if self.before is None else self.before.tail

    def after(
        self,
        absorbed: Memory | Decoder | None,
        tail: Tensor | None,
        tokens: int,
        carried: Mapping[str, Tensor] | None = None,
    ) -> Past | None:
        """The past with ``tokens`` more tokens; None for a call without a past."""
        if self.before is None or absorbed is None:
            return None
        return self.before.advance(absorbed, tail, tokens, self.key_padding_mask, carried)


class TokenMixer(nn.Module, abc.ABC):
    """A layer x (B, T, dim) -> y (B, T, dim) in which tokens read other tokens. Blocks, models, memories and files use
    only this interface.

    dim: size of x and y.
    operator: the operator that reads the past.
    output: the projection to y.
    convolution: the short convolution, or None.
    causal: whether no token sees a later one. Only causal layers have a memory.
    dropout: the share of weights that are set to zero in training.
    """

    dim: int
    operator: Operator
    output: nn.Linear
    convolution: ShortConvolution | None
    causal: bool = True
    dropout: float = 0.0
    merges: bool = False
    """Whether the layer can read merged tokens; its ``forward`` then takes a mass."""
    carries: tuple[str, ...] = ()
    """Names of the tensors that its memories carry in addition to keys and values."""
    splits: bool = False
    """Whether the layer continues across the borders of stretches in sequence parallelism."""
    parts_beside: int = 0
    """The number of memories after the first, in a layer of several parts."""

    def __init_subclass__(cls) -> None:
        known_names(cls)

    @property
    def chooses(self) -> bool:
        """Whether the layer can read a token without storing it; its ``forward`` then takes an action_mask."""
        return False

    @abc.abstractmethod
    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights except those of the operator."""

    @abc.abstractmethod
    def learned(self) -> dict[str, Any]:
        """Learned quantities of interest, as plain lists."""

    @abc.abstractmethod
    def _empty(self, batch: int, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        """``empty_memory`` of a given type and device."""

    @abc.abstractmethod
    def _mix(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Past | None]:
        """``forward`` of checked x, in which padding is zero: y, and the past after x where there is one before."""

    def _cross(
        self, x: Tensor, context: Tensor | Memory, context_padding_mask: Tensor | None, inputs: Inputs
    ) -> Tensor:
        """``forward`` of checked x with a context."""
        raise self._refused(
            "context (cross-attention) is for nn.Attention, whose keys and values can come from other tokens. Leave it "
            "out, or add a layer of Attention that reads it."
        )

    def _report(self, x: Tensor, inputs: Inputs, report: Criterion) -> Reading:
        """What the memory before checked x says of the queries of x."""
        raise self._refused("report (verdicts) is for layers of Attention, whose memories hold keys. Leave it out.")

    def empty_memory(
        self, batch: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> LayerMemory:
        """The memory of ``batch`` sequences before their first token. Defaults: the dtype and device of the layer."""
        weight = self.output.weight
        return self._empty(batch, dtype or weight.dtype, weight.device if device is None else torch.device(device))

    @known_names
    def forward(
        self,
        x: Tensor,
        memory: Past | None = None,
        *,
        return_memory: bool = False,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
        action_mask: Tensor | None = None,
        mass: Tensor | None = None,
        context: Tensor | Memory | None = None,
        context_padding_mask: Tensor | None = None,
        report: bool | Criterion = False,
    ) -> Tensor | tuple[Tensor, Past] | tuple[Tensor, Past, Reading]:
        """Apply the layer.

        Args:
            x: (B, T, dim), one token or more.
            memory: the past before x. The result is then a pair. The memory is not changed.
            return_memory: also return a memory if none is given.
            key_padding_mask: bool (B, T), True for a real token. Padded tokens are set to zero, also as queries.
            cu_seqlens: (N + 1,) offsets of N documents packed into one row (B = 1). Not with a memory.
            path: the execution path of ``zonal.attention``.
            action_mask: bool (B, T). A token with False reads but is not stored. Only for ridge and Koopman read-outs
                of the plain product, and for mixtures with one (``chooses``).
            mass: (B, T), at least 0: the number of equal tokens that each token stands for (see ``zonal.nn.Merged``),
                with 0 for padding. Only for bidirectional layers of ``Attention`` without positions.
            context: (B, S, context_dim), the tokens whose keys and values are read in place of those of x, all of them
                by every token of x; or the memory of ``Attention.context_memory``. Only for layers of ``Attention``.
            context_padding_mask: bool (B, S), True for a real token of the context.

            report: with a criterion (True: the default one), also return what the memory before x says of the queries
                of x (``Memory.read``). Only for layers of ``Attention``, with a memory that has evidence.

        Returns: y (B, T, dim), or (y, memory) if a memory is given or asked for, or (y, memory, reading).

        Raises:
            ArgumentError: shapes, masks or the memory do not fit the layer, or it has no use for an argument.
        """
        if active() is not None:
            given = (memory, mass, context, context_padding_mask)
            self._check_splits(return_memory or report is not False or any(x is not None for x in given))
        if context is not None or context_padding_mask is not None:
            others = (memory, cu_seqlens, action_mask, mass)
            if context is None or return_memory or report is not False or any(other is not None for other in others):
                raise self._refused(
                    "context_padding_mask comes with a context, and beside these two a call takes key_padding_mask "
                    "(of x) and path. The layer keeps nothing of x: leave memory, return_memory, cu_seqlens, "
                    "action_mask, mass and report out."
                )
            self._before(x, None, False, key_padding_mask, None)
            x = x if key_padding_mask is None else real(x, key_padding_mask)
            inputs = Inputs(key_padding_mask=key_padding_mask, path=path)
            return self._cross(x, context, context_padding_mask, inputs)
        before = self._before(x, memory, return_memory, key_padding_mask, cu_seqlens)
        if action_mask is not None or mass is not None:
            self._check_uses(action_mask, mass)
        x = x if key_padding_mask is None else real(x, key_padding_mask)
        inputs = Inputs(before, key_padding_mask, cu_seqlens, path, action_mask, mass)
        reading = None if report is False else self._report(x, inputs, Criterion() if report is True else report)
        y, after = self._mix(x, inputs)
        if after is None:
            return y
        return (y, after) if reading is None else (y, after, reading)

    def reads(self, tokens: int) -> Tensor:
        """The inputs on which each output may depend, bool (T, T), for ``tokens`` real tokens of one document. This is
        a layer of ``zonal.influence``.

        It is an upper bound. The convolution and neighbourhoods of queries, keys and values are included.
        """
        operator = self.operator
        seen = relation(operator.prior, tokens, causal=self.causal, include_self=operator.tags.includes_self)
        itself = torch.eye(tokens, dtype=torch.bool)
        past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if operator.tags.couples:  # by the masses of the others
            seen = torch.ones_like(seen)
        if any(isinstance(prior, Decay) and prior.gated for prior in operator.prior):  # by the decays in between
            seen = seen | (seen.cumsum(1) > 0) & past
        chart = itself
        if self.convolution is not None:
            chart = past & ~past.tril(-self.convolution.width)
        if operator.score.deaths:
            chart = chart | composed(past, chart)
        return composed(seen | itself, chart)

    def memory_bytes(self, length: int) -> int:
        """Bytes of the memory of one sequence after ``length`` tokens without padding."""
        memory = self.empty_memory(1)
        memories = [part.memory for part in (memory, *memory.others)]
        return memory.nbytes + sum(each.bytes_at(length) - each.nbytes for each in memories)

    def load_memory(self, path: str | os.PathLike[str]) -> LayerMemory:
        """The memory that ``LayerMemory.save`` wrote, on the device of the layer.

        Raises:
            FileFormatError: the file is missing, damaged, or belongs to another kind of layer.
        """
        return load_memories(path, [self.empty_memory(1)])[0]

    def _before(
        self,
        x: Tensor,
        memory: Past | None,
        return_memory: bool,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Past | None:
        """The past to continue from: the given memory, an empty one if a memory is to be returned, or None.

        Raises ArgumentError for inputs that do not fit.
        """
        check_tensors(f"nn.{type(self).__name__}", {"x": x})
        shape = x.shape
        if len(shape) != 3 or shape[2] != self.dim or shape[1] == 0:
            raise self._refused(f"x must be (batch, tokens >= 1, {self.dim}), received {tuple(shape)}.")
        batch, length, _ = shape
        if key_padding_mask is not None or cu_seqlens is not None:
            check_masks(f"nn.{type(self).__name__}", batch, length, key_padding_mask, cu_seqlens)
        if memory is None and return_memory:
            memory = self.empty_memory(batch, x.dtype, x.device)
        if memory is None:
            return None
        if cu_seqlens is not None:
            raise self._refused("packed documents (cu_seqlens) start afresh and take no memory. Pass one of the two.")
        if not isinstance(memory, Past):
            raise self._refused(
                f"memory must be what the layer returned or its empty_memory(), received {type(memory).__name__}. "
                "A memory of a context is passed as context, any other zonal.Memory to zonal.attention."
            )
        if not self.causal:
            raise self._refused("a memory holds the past of a causal layer; this one was made with causal=False.")
        if memory.batch != batch:
            raise self._refused(f"the memory holds {memory.batch} sequences, x has batch {batch}.")
        if (memory.tail is None) != (self.convolution is None):
            raise self._refused(
                "the memory comes from a layer with another convolution. Make it with this layer's empty_memory()."
            )
        if memory.carried.keys() != set(self.carries) or len(memory.others) != self.parts_beside:
            raise self._refused(
                "the memory comes from another kind of layer. Make it with this layer's empty_memory()."
            )
        # torch.export hands out proxies of modules, which are not the modules
        if memory.operator is not in_use(self.operator) and not torch.compiler.is_exporting():
            raise self._refused(
                "the memory was made by another layer or model, or went through pickle. Make it with this layer's "
                "empty_memory(); save() and load_memory() carry one to another process."
            )
        return memory

    def _refused(self, text: str) -> ArgumentError:
        return ArgumentError(f"nn.{type(self).__name__}: {text}")

    def _check_splits(self, further: bool) -> None:
        """Raise ArgumentError for what sequence parallelism does not split over ranks. further: of the arguments."""
        if not self.splits or self.operator.score.deaths:
            raise self._refused(
                "the layer hands on more than keys, values and a convolution's tail, which sequence_parallel does not "
                "split over ranks. Use nn.Attention without neighbourhoods, nn.Mamba2 or mixtures of them."
            )
        if further:
            raise self._refused(
                "within sequence_parallel the past is in other ranks. Leave memory, return_memory, mass, context and "
                "report out (use_cache=False in transformers)."
            )

    def _check_uses(self, action_mask: Tensor | None, mass: Tensor | None) -> None:
        """Raise ArgumentError for arguments that this kind of layer has no use for."""
        if mass is not None and not self.merges:
            raise self._refused("mass (of merged tokens) is for layers of Attention. Merge nothing before it.")
        if action_mask is not None and not self.chooses:
            raise self._refused(
                "action_mask is for layers that can read a token without storing it (ridge and Koopman read-outs of "
                "the plain product). Leave it out, or hide tokens with key_padding_mask."
            )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: Inputs,
        *,
        log_decay: Tensor | None = None,
        key_bias: Tensor | None = None,
        key_gate: Tensor | None = None,
        query_mass: Tensor | None = None,
        key_mass: Tensor | None = None,
    ) -> tuple[Tensor, Memory | Decoder | None]:
        """What the operator reads, (B, H, T, P), and what it has absorbed, None without a past."""
        before, mask = inputs.before, inputs.key_padding_mask
        dropout = self.dropout if self.training else 0.0
        if isinstance(before, LayerDecoder):
            if dropout:
                raise self._refused(
                    f"a decoder sets no weights to zero, and the layer trains with dropout={dropout}. Call eval() "
                    "first."
                )
            y = before.decoder.step(
                q, k, v, key_padding_mask=mask, log_decay=log_decay, key_bias=key_bias,
                action_mask=inputs.action_mask, key_gate=key_gate,
            )  # fmt: skip
            return y, before.decoder
        result = attention(
            q, k, v, self.operator, causal=self.causal, key_padding_mask=mask, cu_seqlens=inputs.cu_seqlens,
            memory=None if before is None else before.memory, path=inputs.path, log_decay=log_decay,
            key_bias=key_bias, action_mask=inputs.action_mask, key_gate=key_gate, query_mass=query_mass,
            key_mass=key_mass, dropout=dropout,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result, None)


def real(x: Tensor, key_padding_mask: Tensor) -> Tensor:
    """x with zeros for padding: whatever it held, NaN included, is then in no product, here or in the gradients."""
    return x.masked_fill(~key_padding_mask.unsqueeze(-1), 0)


__all__ = ["Inputs", "TokenMixer", "real"]
