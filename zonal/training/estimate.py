"""What a step of a run on many GPUs would take, for runs that cannot be made here: memory, operations, traffic, time.

Parameters and messages are counted from the shapes of the model, operations from the shapes of its products and from
the planner's table, activations on one block of each kind that is run on this machine for a few tokens. Speeds are
constants of a named GPU. All of it is an estimate.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from zonal.algebra import Operator
from zonal.errors import ArgumentError
from zonal.execution import machine
from zonal.execution.explain import explain
from zonal.memory import Memory
from zonal.models import ModelConfig, language_model
from zonal.models.build import class_of
from zonal.nn import Attention, Block, Mamba2, TokenMixer
from zonal.training.step import autocast


@dataclass(frozen=True)
class Gpu:
    """flops: operations of dense products per second, by number format. memory: bytes. bandwidth: of its memory, bytes
    per second. link, network: bytes per second that it sends to GPUs of its machine, and to other machines.
    """

    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    link: float
    network: float


GPUS = {
    "h100": Gpu({"bfloat16": 989e12, "float32": 67e12}, 80e9, 3.35e12, 450e9, 50e9),
    "a100": Gpu({"bfloat16": 312e12, "float32": 19.5e12}, 80e9, 2.04e12, 300e9, 25e9),
}
"""Data sheets of the SXM models with 80 GB, with an InfiniBand port of 400 and of 200 Gbit/s for each GPU."""


@dataclass(frozen=True)
class Setup:
    """A run.

    sequence: GPUs that hold a sequence together. rows, tokens: of a batch. dtype: float32 or bfloat16. per_machine:
    GPUs per machine. efficiency: the share of its products per second that a GPU reaches.
    """

    gpus: int
    sequence: int
    rows: int
    tokens: int
    dtype: str
    accumulate: int
    recompute: bool
    gpu: Gpu
    per_machine: int
    efficiency: float

    def __post_init__(self) -> None:
        if self.gpus % self.sequence:
            raise ArgumentError(
                f"explain: --sequence-parallel {self.sequence} must divide --gpus {self.gpus}. Choose a divisor."
            )
        parts = self.gpus // self.sequence * self.accumulate
        if self.rows % parts:
            raise ArgumentError(
                f"explain: --batch-size {self.rows} must be a multiple of {parts}, which is --gpus {self.gpus} divided "
                f"by --sequence-parallel {self.sequence}, times --accumulate {self.accumulate}. Choose another batch."
            )
        if self.tokens < self.sequence:
            raise ArgumentError(
                f"explain: --sequence-parallel {self.sequence} needs as many tokens per sequence, received --tokens "
                f"{self.tokens}. Choose longer sequences."
            )

    @property
    def held(self) -> float:
        """Tokens of which a GPU holds activations at a time."""
        return self.rows * self.tokens / (self.gpus * self.accumulate)


@dataclass(frozen=True)
class StepEstimate:
    """Of one GPU: memory and traffic in bytes by part, operations and seconds of a step. notes: what is not counted."""

    parameters: int
    memory: dict[str, float]
    operations: dict[str, float]
    traffic: dict[str, float]
    seconds: dict[str, float]
    notes: tuple[str, ...]

    @property
    def fastest(self) -> float:
        """Seconds of a step whose messages hide behind its operations, or the reverse."""
        return max(self.seconds["operations"], self.seconds["messages"]) + self.seconds["optimiser"]

    @property
    def slowest(self) -> float:
        """Seconds of a step in which nothing runs at the same time."""
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "seconds_overlapped": self.fastest, "seconds_in_turn": self.slowest}


class _Kind(NamedTuple):
    """Blocks of one kind: how many, one of them, and the bytes of a token that it keeps for the backward pass."""

    times: int
    block: Block
    kept: float


def estimated(config: ModelConfig, setup: Setup) -> StepEstimate:
    """What a step of training the model takes. Raises: ArgumentError for a layer that is not split over a sequence."""
    with torch.device("meta"):
        model = class_of(config)(config)
    kinds, notes = _kinds(config, setup), list[str]()
    wide = 2 if setup.dtype == "bfloat16" else 4
    layers = [_sharded(each.block.parameters(), setup.gpus) for each in kinds]
    blocks = sum(each.times * size for each, size in zip(kinds, layers, strict=True))
    every = _sharded(model.parameters(), setup.gpus)
    root = every - blocks
    kept = [each.kept * setup.held for each in kinds]
    inputs = 4.0 * config.dim * setup.held * len(config.layers)
    activations = sum(each.times * size for each, size in zip(kinds, kept, strict=True))
    memory = {
        "parameters": 4.0 * every / setup.gpus,
        "gradients": 4.0 * every / setup.gpus,
        "optimiser": 8.0 * every / setup.gpus,
        # the embedding and the head with their gradient; two blocks, one of them fetched ahead, and a gradient
        "gathered": 8.0 * root + max(layers, default=0) * (2 * wide + wide + 4),
        "activations": (inputs + max(kept, default=0) if setup.recompute else activations)
        + 12.0 * config.dim * setup.held + 64 * 2**20,  # hidden states of the head with their gradient, its logits
    }  # fmt: skip
    operations = _operations(config, kinds, setup, notes)
    traffic = _traffic(kinds, setup, root, blocks)
    gpu, spread = setup.gpu, setup.gpus > setup.per_machine
    seconds = {
        "operations": sum(operations.values()) / (gpu.flops[setup.dtype] * setup.efficiency),
        "messages": sum(traffic.values()) / (gpu.network if spread else gpu.link),
        "optimiser": 28.0 * every / setup.gpus / gpu.bandwidth,
    }
    return StepEstimate(model.num_parameters(), memory, operations, traffic, seconds, tuple(notes))


def _sharded(parameters: Iterable[nn.Parameter], gpus: int) -> int:
    """Numbers of all shards together: FSDP cuts the first axis of each parameter into equal parts, filled up."""
    return sum(-(-each.shape[0] // gpus) * gpus * each[0].numel() for each in parameters)


def _kinds(config: ModelConfig, setup: Setup) -> list[_Kind]:
    found = Counter(zip(config.layers, config.conv_widths, strict=True))
    kinds = []
    for (spec, width), times in found.items():
        one = dataclasses.replace(config, layers=(spec,), conv=(width,), vocab_size=1, silent_tokens=())
        (block,) = language_model(one, seed=0).blocks
        assert isinstance(block, Block)
        few, more = (_kept(block, tokens, setup.dtype) for tokens in _MEASURED)
        kinds.append(_Kind(times, block, max(0.0, (more - few) / (_MEASURED[1] - _MEASURED[0]))))
    return kinds


def _kept(block: Block, tokens: int, dtype: str) -> int:
    """Bytes that a block keeps for the backward pass after so many tokens, besides its weights."""
    weights = {each.untyped_storage().data_ptr() for each in block.parameters()}
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    x = torch.ones(1, tokens, block.attention.dim, dtype=torch.float32, requires_grad=True)
    with (
        machine.typical_rates(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        autocast(x.device, dtype),
    ):
        y = block((x,))
    assert isinstance(y, torch.Tensor)  # until here what it keeps is held
    return sum(saved.values())


_MEASURED = (512, 1024)
"""Tokens of the two calls whose difference is what a token adds."""


def _operations(config: ModelConfig, kinds: list[_Kind], setup: Setup, notes: list[str]) -> dict[str, float]:
    """Of a GPU: two for each multiply-add, three times for forward and backward, four where blocks are run again."""
    tokens = setup.rows * setup.tokens / setup.gpus
    passes = 4 if setup.recompute else 3
    matrices = sum(each.times * _multiplied(each.block, config) for each in kinds)
    attention = 0.0
    for each in kinds:
        mixer = each.block.attention
        if not isinstance(mixer, Attention | Mamba2):
            notes.append(f"operations of {type(mixer).__name__} besides its projections are not counted")
            continue
        attention += each.times * _attention(mixer, setup) * setup.rows / setup.gpus * passes / 3
    return {
        "projections and mlps": 2.0 * matrices * tokens * passes,
        "attention": attention,
        "output head": 6.0 * config.vocab_size * config.dim * tokens,
    }


def _multiplied(block: Block, config: ModelConfig) -> float:
    """Multiply-adds per token of a block's matrices."""
    count = sum(each.weight.numel() for each in block.modules() if isinstance(each, nn.Linear))
    experts = sum(each.numel() for each in block.parameters() if each.ndim == 3) if config.mlp == "experts" else 0
    return count + experts * config.experts_per_token / config.experts


def _shapes(mixer: Attention | Mamba2) -> tuple[Operator, int, int, int, int]:
    """The operator, its heads and key heads, and the sizes of keys and values."""
    if isinstance(mixer, Attention):
        return mixer.operator, mixer.heads, mixer.kv_heads, mixer.key_dim, mixer.head_dim
    sizes = mixer.sizes
    return mixer.operator, sizes.heads, sizes.heads, sizes.state, sizes.head_dim


def _attention(mixer: Attention | Mamba2, setup: Setup) -> float:
    """Operations of one sequence, there and back, on the path that the planner would take on a typical processor."""
    operator, heads, kv_heads, key_dim, value_dim = _shapes(mixer)
    causal = not isinstance(mixer, Attention) or mixer.causal
    with machine.typical_rates():
        found = explain(
            operator, (1, heads, setup.tokens, key_dim), (1, kv_heads, setup.tokens, key_dim),
            (1, kv_heads, setup.tokens, value_dim), causal=causal, gradients=True,
        )  # fmt: skip
    return found.plan.estimates[0].flops


def _traffic(kinds: list[_Kind], setup: Setup, root: int, blocks: int) -> dict[str, float]:
    """Bytes that a GPU sends in a step, where each message goes round a ring."""
    wide, share = (2 if setup.dtype == "bfloat16" else 4), (setup.gpus - 1) / setup.gpus * setup.accumulate
    sequence = 0.0
    if setup.sequence > 1:
        rows = setup.rows * setup.sequence / setup.gpus
        sequence = rows * sum(each.times * _between(each.block.attention, setup) for each in kinds)
    return {
        "parameters": (4.0 * root + 2.0 * wide * blocks) * share,  # blocks once more for the backward pass
        "gradients": 4.0 * (root + blocks) * share,
        "between parts of a sequence": sequence,
    }


def _between(mixer: TokenMixer, setup: Setup) -> float:
    """Bytes of one sequence that the rank sends which sends most."""
    if not isinstance(mixer, Attention | Mamba2):
        raise ArgumentError(
            f"explain: layers of {type(mixer).__name__} are not split over a sequence. Leave --sequence-parallel out."
        )
    ranks, again = setup.sequence, setup.recompute
    operator, _, kv_heads, key_dim, value_dim = _shapes(mixer)
    if Memory.kind_for(operator, key_dim) == "keys":
        token = kv_heads * (key_dim + value_dim) * (2 if setup.dtype == "bfloat16" else 4) + 1
        return (2 + again) * (ranks - 1) * setup.tokens / ranks * token
    rounds = 1 + math.ceil(math.log2(ranks - 1)) if ranks > 2 else 1
    return (2 + again) * rounds * mixer.memory_bytes(0)


__all__ = ["GPUS", "Gpu", "Setup", "StepEstimate", "estimated"]
