"""A causal language model as two functions of tensors, and as programs of ``torch.export``."""

from collections.abc import Iterable
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from zonal.errors import ArgumentError
from zonal.kernels.native import portable
from zonal.models.causal_lm import CausalLM
from zonal.models.memory import ModelMemory
from zonal.nn import Block, DecodeStep, LayerMemory
from zonal.nn.memory import Past
from zonal.nn.step import Prefill, State, tensors_of
from zonal.store import under

SHORTEST = 3
"""The least tokens of a prompt. ``torch.export`` takes sizes 0 and 1 for constants, and SKA reads the steps from key to
key.
"""


class ModelPrefill(nn.Module):
    """A prompt as a function of tensors: tokens (B, T) -> logits (B, V) after the last token, and the state.

    It computes ``model.prefill(tokens)`` in torch on the dense path, in time and memory quadratic in T.

    Raises: ArgumentError for a model whose operators wait for whole chunks.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model
        self._parts = tuple(Prefill(block.attention) for block in _blocks(model))

    def forward(self, tokens: Tensor) -> tuple[Tensor, State]:
        """Read a prompt. Tracing fixes B."""
        like = self.model.embedding.weight
        before = [part.empty(tokens.shape[0], like.dtype, like.device) for part in self._parts]
        logits, after = self.model.read_on(tokens, before, None, "dense", last_only=True)
        return logits[:, -1], _named(map(_tensors, after))


class ModelStep(nn.Module):
    """A decoding step of a model as a function of tensors: (tokens (B, T), state) -> (logits (B, V), state).

    It computes ``model.step(tokens, memory)`` in torch on the streaming path, and changes nothing in place. The state
    holds the tensors of all layers by name; ``nn.DecodeStep`` says how it grows.

    Args:
        model: the model.
        memory: a memory of it.

    Raises: ArgumentError for a memory of another model, with named spans, or that waits for whole chunks.
    """

    def __init__(self, model: CausalLM, memory: ModelMemory) -> None:
        super().__init__()
        if len(memory.layers) != len(model.blocks):
            raise ArgumentError(
                f"models.ModelStep: the memory holds {len(memory.layers)} layers, the model has {len(model.blocks)}. "
                "Make it with the model's prefill() or empty_memory()."
            )
        self.model = model
        layers = zip(_blocks(model), memory.layers, strict=True)
        self._steps = tuple(DecodeStep(block.attention, layer) for block, layer in layers)

    def state(self, memory: ModelMemory) -> State:
        """The tensors of a memory of the model."""
        return _named(step.state(layer) for step, layer in zip(self._steps, memory.layers, strict=True))

    def memory(self, state: State) -> ModelMemory:
        """The memory of a state."""
        layers = tuple(step.memory(under(state, _name(index, ""))) for index, step in enumerate(self._steps))
        return ModelMemory(layers, self.model.empty_memory(1).origin)

    def dynamic_shapes(self, state: State) -> tuple[None, dict[str, object]]:
        """The ``dynamic_shapes`` argument of ``torch.export.export`` for (tokens, state): two kept tokens or more."""
        found: dict[str, object] = {}
        for index, step in enumerate(self._steps):
            shapes = step.dynamic_shapes(under(state, _name(index, "")))[1]
            found |= {_name(index, name): shape for name, shape in shapes.items()}
        return None, found

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one token or more. Tracing fixes B and T."""
        before = [step.past(under(state, _name(index, ""))) for index, step in enumerate(self._steps)]
        logits, after = self.model.read_on(tokens, before, None, "streaming", last_only=True)
        return logits[:, -1], _named(map(_tensors, after))


class Programs(NamedTuple):
    """The programs of a model.

    prefill: tokens (B, T) -> (logits (B, V), state). step: (tokens (B, 1), state) -> (logits (B, V), state).
    """

    prefill: ExportedProgram
    step: ExportedProgram


def export(model: CausalLM, *, batch: int = 1, shortest: int = SHORTEST, longest: int = 4096) -> Programs:
    """The programs of a model, with operators of torch alone: they run without this library.

        programs = zonal.models.export(model)
        logits, state = programs.prefill.module()(tokens)
        logits, state = programs.step.module()(logits.argmax(-1)[:, None], state)

    ``torch.export.save`` and ``load`` write and read each of them.

    Args:
        model: a model. Its weights are in the programs.
        batch: number of sequences B, which the programs fix.
        shortest, longest: the least and the most tokens of a prompt. ``local_global(window=w)`` needs more than w.

    Raises:
        ArgumentError: sizes are out of range, the operators wait for whole chunks, the model is no ``CausalLM``, or the
            computation of an operator depends on the number of tokens (docs/export.md).
    """
    whole = all(isinstance(size, Integral) for size in (batch, shortest, longest))
    if not whole or batch < 1 or not SHORTEST <= shortest < longest:
        raise ArgumentError(
            f"models.export: whole numbers, batch >= 1 and {SHORTEST} <= shortest < longest are required, "
            f"received batch={batch!r}, shortest={shortest!r}, longest={longest!r}."
        )
    prompt = ModelPrefill(model)
    tokens = torch.zeros(batch, shortest + 1, dtype=torch.int64, device=model.embedding.weight.device)
    from torch._dynamo.exc import UserError  # the compiler, which export loads

    with portable(), torch.no_grad():
        _, memory = model.prefill(tokens)
        step = ModelStep(model, memory)
        state = step.state(memory)
        shapes = ({1: Dim("tokens", min=shortest, max=longest)},)
        try:
            return Programs(
                torch.export.export(prompt, (tokens,), dynamic_shapes=shapes),
                torch.export.export(step, (tokens[:, :1], state), dynamic_shapes=step.dynamic_shapes(state)),
            )
        except UserError as error:
            raise ArgumentError(
                f"models.export: one program does not hold for all prompts of {shortest} to {longest} tokens. Give a "
                "shortest prompt that is longer than every window of local_global, and leave out the operators that "
                "docs/export.md lists as not exported: their computation depends on the number of tokens."
            ) from error


def _blocks(model: CausalLM) -> list[Block]:
    if not isinstance(model, CausalLM):
        raise ArgumentError(
            f"models.export: a zonal.models.CausalLM is required, received {type(model).__name__}. Encoders and models "
            "of transformers are not exported here: export their layers (docs/export.md)."
        )
    return [block for block in model.blocks if isinstance(block, Block)]


def _name(index: int, name: str) -> str:
    return f"layers.{index}.{name}"


def _tensors(layer: Past) -> State:
    assert isinstance(layer, LayerMemory)
    return tensors_of(layer)


def _named(states: Iterable[State]) -> State:
    """The state of a model from those of its layers."""
    return {_name(index, name): x for index, state in enumerate(states) for name, x in state.items()}


__all__ = ["ModelPrefill", "ModelStep", "Programs", "export"]
