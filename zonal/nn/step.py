"""Reading a prompt and decoding as functions of tensors, which ``torch.export`` and ``torch.compile`` trace."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zonal.algebra import Operator
from zonal.errors import ArgumentError
from zonal.memory import KeyValues, Memory, WindowedSums
from zonal.memory.form import Form
from zonal.nn.memory import LayerMemory, placed
from zonal.nn.mixer import TokenMixer
from zonal.store import under

State = dict[str, Tensor]
"""The tensors that a step hands to the next one, by name."""

_TOKEN_AXES = {"k": 2, "v": 2, "mask": 1, "log_decay": 2, "key_bias": 2}
_FOR_SUBTRACT = ("seam", "border")


class _Kind(NamedTuple):
    """The properties of a memory that are not tensors."""

    memory: type[Memory]
    operator: Operator
    form: Form
    grows: bool
    others: "tuple[_Kind, ...]"

    @classmethod
    def of(cls, layer: LayerMemory) -> "_Kind":
        held = layer.memory
        grows = isinstance(held, KeyValues) and held.reach is None
        return cls(type(held), held.operator, held.form, grows, tuple(cls.of(other) for other in layer.others))


class DecodeStep(nn.Module):
    """One step of a layer as a function of tensors, (x, state) -> (y, state).

    It computes ``layer(x, memory)`` in torch on the streaming path, and changes nothing in place:

        step = nn.DecodeStep(layer, memory)
        state = step.state(memory)
        program = torch.export.export(step, (x, state), dynamic_shapes=step.dynamic_shapes(state))
        y, state = program.module()(x, state)
        memory = step.memory(state)

    The state of a memory of sums has a constant size. Keys and values grow by the tokens of x; with a window they
    have the size of the window from the start, and missing tokens are masked. Ridge and Koopman read-outs solve at each
    step, in O(r³) for keys of r numbers; a decoder, which updates its inverse, takes O(r²).

    Args:
        layer: a causal layer.
        memory: a memory of the layer. Memories of sums may be empty. Keys and values of an exported step need at least
            two tokens, because ``torch.export`` treats sizes 0 and 1 as constants.

    Raises:
        ArgumentError: the memory belongs to another layer, has named spans, or waits for whole chunks.
    """

    def __init__(self, layer: TokenMixer, memory: LayerMemory) -> None:
        super().__init__()
        self.layer = layer
        _check(layer, memory)
        self._kind = _Kind.of(memory)

    def state(self, memory: LayerMemory) -> State:
        """The tensors of a memory of the layer, for any number of sequences."""
        _check(self.layer, memory)
        return tensors_of(memory)

    def memory(self, state: State) -> LayerMemory:
        """The memory of a state. Its count leaves out padding that all sequences have."""
        return _memory(state, self._kind, None)._each(lambda layer: placed(layer, layer.reached()))

    def past(self, state: State) -> LayerMemory:
        """The memory of a state for ``layer(x, past)`` in a traced function. It does not know its number of tokens."""
        return _memory(state, self._kind, 1)

    def dynamic_shapes(self, state: State) -> tuple[None, dict[str, Any]]:
        """The ``dynamic_shapes`` argument of ``torch.export.export`` for (x, state): two kept tokens or more."""
        return None, _growing(state, self._kind, torch.export.Dim("tokens", min=2))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Take one step.

        Args:
            x: (B, T, dim), one new token or more. Tracing fixes T.
            state: the result of ``state``, or of the previous step.

        Returns: y (B, T, dim) and the state after these tokens.

        Raises:
            ArgumentError: the state does not hold the tensors of the memory.
        """
        y, memory = self.layer(x, self.past(state), path="streaming")
        after = tensors_of(memory)
        if after.keys() != state.keys():
            raise ArgumentError(
                f"nn.DecodeStep: the state must hold {', '.join(sorted(after))}; received {', '.join(sorted(state))}. "
                "Make it with state(memory), of a memory that has read at least one token."
            )
        return y, after


class Prefill(nn.Module):
    """The first tokens of a layer as a function of tensors, x -> (y, state), for any number of tokens.

    It computes ``layer(x, return_memory=True)`` in torch on the dense path, in time and memory quadratic in the number
    of tokens. The state is what ``DecodeStep`` continues from:

        prefill = nn.Prefill(layer)
        length = torch.export.Dim("tokens", min=3)
        with zonal.portable():
            program = torch.export.export(prefill, (x,), dynamic_shapes=({1: length},))
        y, state = program.module()(x)

    Args:
        layer: a causal layer.

    Raises:
        ArgumentError: the layer has no memory, or one that waits for whole chunks.
    """

    def __init__(self, layer: TokenMixer) -> None:
        super().__init__()
        if not layer.causal:
            raise ArgumentError(
                "nn.Prefill: a causal layer is required, because others have no memory. Export the layer itself."
            )
        _check(layer, layer.empty_memory(1))
        self.layer = layer

    def empty(self, batch: int, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        """The memory before the first token, for ``layer(x, memory, path="dense")`` in a traced function. One with a
        window has its size from the start, and missing tokens are masked.
        """
        memory = self.layer.empty_memory(batch, dtype, device)
        return _memory(tensors_of(memory), _Kind.of(memory), 0)

    def forward(self, x: Tensor) -> tuple[Tensor, State]:
        """x (B, T, dim) -> y (B, T, dim) and the state after it. Tracing fixes B."""
        y, memory = self.layer(x, self.empty(x.shape[0], x.dtype, x.device), path="dense")
        return y, tensors_of(memory)


def _check(layer: TokenMixer, memory: LayerMemory) -> None:
    if not isinstance(memory, LayerMemory) or memory.operator is not layer.operator:
        raise ArgumentError(
            "nn.DecodeStep: a memory of the layer is required. Make it with its empty_memory(), or end a decoder with "
            "value()."
        )
    for one in (memory, *memory.others):
        if one.memory.parts:
            raise ArgumentError(
                "nn.DecodeStep: the memory has named spans, whose number is no tensor. Take memory.unnamed()."
            )
        if one.memory.chunk is not None:
            raise ArgumentError(
                f"nn.DecodeStep: operator {one.operator.name!r} waits for whole chunks, so that a step depends on the "
                "number of tokens before it and is not one graph. Use memory.decoder()."
            )


def tensors_of(layer: LayerMemory) -> State:
    """The tensors of a memory of a layer, by name; unchecked, for functions that are traced."""
    held = layer.memory
    if isinstance(held, KeyValues | WindowedSums) and held.reach is not None:
        whole = held.preceded(held.reach - held.tokens.length)
        named = whole.tensors() | whole.tokens.with_mask().named()
    else:
        named = {name: x for name, x in held.tensors().items() if not name.startswith(_FOR_SUBTRACT)}
    if "padding" in named:  # the number of tokens is an int, that of real tokens a tensor
        named["real"] = held.count - named.pop("padding")
    found = {f"memory.{name}": x for name, x in named.items()}
    found |= {f"carried.{name}": x for name, x in layer.carried.items()}
    found |= {"position": layer.reached()} | ({} if layer.tail is None else {"tail": layer.tail})
    for index, other in enumerate(layer.others):
        found |= {f"others.{index}.{name}": x for name, x in tensors_of(other).items()}
    return {name: x.contiguous() for name, x in found.items()}


def _memory(state: State, kind: _Kind, count: int | None) -> LayerMemory:
    """count: how many tokens memories of sums shall have, padding included; None = the most real ones."""
    named, position = under(state, "memory."), state["position"]
    if "real" in named:
        real = named.pop("real")
        count = int(real.max()) if count is None else count
        named["padding"] = count - real
        held = count
    else:
        held = named["k"].shape[2]
    form = kind.form._replace(batch=position.shape[0], device=position.device)
    memory = kind.memory.restored(kind.operator, form, held, named, {})
    others = tuple(_memory(under(state, f"others.{i}."), one, count) for i, one in enumerate(kind.others))
    return LayerMemory(memory, state.get("tail"), 0, -position, under(state, "carried."), others)


def _growing(state: State, kind: _Kind, tokens: Any) -> dict[str, Any]:
    axes = {f"memory.{name}": axis for name, axis in _TOKEN_AXES.items()} if kind.grows else {}
    found = {name: {axes[name]: tokens} if name in axes else None for name in state if not name.startswith("others.")}
    for index, other in enumerate(kind.others):
        start = f"others.{index}."
        found |= {start + name: axis for name, axis in _growing(under(state, start), other, tokens).items()}
    return found


__all__ = ["DecodeStep", "Prefill", "State", "tensors_of"]
