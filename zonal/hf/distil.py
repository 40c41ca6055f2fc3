"""Conversion by training: the operators of a converted model learn what its softmax attention did.

Two stages, as published linearisations have them (Zhang et al. 2024, LoLCATs):

1. Attention transfer. In a forward pass of the original model each layer hands its queries, keys and values to its
   operator as well, which learns by the relative squared error of its output,
   L_l = |y_l - y*_l|^2 / |y*_l|^2, with y* the output of softmax attention. Layers do not see each other's errors.
2. Distillation. The converted model learns the original's predictions: L = KL(p* || p) per token. The weights of the
   attention layers are trained with the operators.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from zonal import mechanisms, store
from zonal.algebra.operator import Operator
from zonal.attention import attention
from zonal.errors import ArgumentError, FileFormatError
from zonal.hf import examine
from zonal.hf.attending import padding
from zonal.hf.layers import NAME, for_layer, layers_of, operator_of, operators, read_out, unscaled, window_of, windowed
from zonal.hf.swap import convert

_TRANSFER = "zonal_transfer"
_KIND = "state of a conversion"
_CLIP = 1.0
_WARMUP = 10  # steps in which the rate rises to its peak
_LAST = 0.1  # the rate at the end, as a fraction of its peak


@dataclass(frozen=True)
class Stage:
    """How long a stage learns and how fast.

    steps: at most so many, each on one window of text. seconds: at most so long, None = no limit. The rate rises in
    the first steps and then falls linearly to a tenth with the share of steps or time that is used up. halved: the
    share at whose end windows of half the length give way to whole ones: a half costs half as much and teaches nearly
    as much at first.
    """

    steps: int
    rate: float
    seconds: float | None = None
    halved: float = 0.0

    def used(self, step: int, seconds: float) -> float:
        """The share of steps or time that is used up, 1 at the end."""
        time = 0.0 if self.seconds is None else seconds / self.seconds
        return min(1.0, max(step / self.steps if self.steps else 1.0, time))

    def rate_at(self, step: int, seconds: float) -> float:
        """The learning rate of the update after ``step`` others."""
        return self.rate * min(1.0, (step + 1) / _WARMUP) * (1 - (1 - _LAST) * self.used(step, seconds))


@dataclass(frozen=True)
class Update:
    """What a step of a stage tells: its number from 1, the share that is used up, and its losses by name."""

    stage: str
    step: int
    used: float
    seconds: float
    losses: Mapping[str, Any]


@dataclass(frozen=True)
class Text:
    """Tokens to learn from and windows (n, T) to measure on, from the last tenth of each text."""

    tokens: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], windows: int, length: int, trained: int = 1) -> "Text":
        """Cut texts in two: nine tenths to learn from, and evenly spread windows of the rest.

        trained: tokens of a window of training.
        Raises: ArgumentError when they are too short for the windows.
        """
        learned, rest = [], []
        for tokens in documents:
            cut = len(tokens) * 9 // 10
            learned.append(torch.tensor(tokens[:cut], dtype=torch.int64))
            rest.append(torch.tensor(tokens[cut:], dtype=torch.int64))
        tokens = torch.cat(rest)
        longest = max(length, trained)
        if len(tokens) < length * windows or sum(map(len, learned)) <= longest:
            needed = max(10 * length * windows, 10 * longest // 9 + 2)
            raise ArgumentError(
                f"convert: texts with at least {needed:,} tokens are required: a tenth of them is held out for "
                f"{windows} windows of {length}, and the rest must be longer than {longest}. "
                f"Received {sum(map(len, documents)):,}. Give more text, or fewer or shorter windows."
            )
        starts = [index * (len(tokens) - length) // max(1, windows - 1) for index in range(windows)]
        return cls(torch.cat(learned), torch.stack([tokens[start : start + length] for start in starts]))

    def window(self, seed: int, step: int, length: int) -> Tensor:
        """(1, length) tokens, the same for the same seed and step."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        start = int(torch.randint(len(self.tokens) - length, (), generator=generator))
        return self.tokens[None, start : start + length]


class Transfer:
    """Attention transfer on a converted model, which computes what it did before the conversion while this is used."""

    name = "transfer"

    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, layers_of("convert", model)
        self._errors: dict[int, float] = {}
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self._places = {id(self.layers[index]): index for index in convertible(model)}
        for index in self._places.values():
            operators(model)[index].requires_grad_(True)
        AttentionInterface.register(_TRANSFER, self._attend)
        AttentionMaskInterface.register(_TRANSFER, padding)

    def losses(self, tokens: Tensor) -> dict[str, Any]:
        """The relative squared error of each layer's output, None for a layer that keeps its sliding window; its
        gradients are in the parameters.
        """
        self._errors = {}
        self.model.set_attn_implementation(_TRANSFER)
        try:
            with torch.no_grad():
                self.model(tokens, use_cache=False, logits_to_keep=1)
        finally:
            self.model.set_attn_implementation(NAME)
        errors = [self._errors.get(index) for index in range(len(self.layers))]
        return {"error": sum(self._errors.values()) / len(self._errors), "layers": errors}

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        operator = windowed(mechanisms.softmax(scale=scaling), others.get("sliding_window"), causal=True)
        wanted = attention(q, k, v, operator, causal=True)
        place, own = self._places.get(id(module)), operator_of(module)
        if place is None or own is None:
            return wanted.transpose(1, 2), None
        with torch.enable_grad():
            found = attention(unscaled(module, q, scaling), k, v, own, causal=True)
            found = read_out(module, own, found.transpose(1, 2)).transpose(1, 2)
            error = (found - wanted).square().sum() / wanted.square().sum()
            if any(value.requires_grad for value in own.parameters()):
                error.backward()
        self._errors[place] = float(error.detach())
        return wanted.transpose(1, 2), None


class Distillation:
    """The converted model learns the predictions of the original."""

    name = "distillation"

    def __init__(self, model: Any, original: Any) -> None:
        self.model, self.original = model, original
        learned = {id(value) for layer in layers_of("convert", model) for value in layer.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in learned)

    def losses(self, tokens: Tensor) -> dict[str, Any]:
        """Nats a token by which the predictions differ; their gradients are in the parameters."""
        with torch.no_grad():
            meant = self.original(tokens, use_cache=False).logits.float().log_softmax(-1)
        said = self.model(tokens, use_cache=False).logits.float().log_softmax(-1)
        loss = F.kl_div(said.flatten(0, 1), meant.flatten(0, 1), reduction="batchmean", log_target=True)
        loss.backward()
        return {"nats": float(loss.detach())}


def learn(
    task: Transfer | Distillation,
    stage: Stage,
    text: Text,
    *,
    length: int,
    seed: int,
    state: Path,
    save_seconds: float = 120.0,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Update]:
    """Train until the stage is over. Yields each step.

    state: a file that keeps what was learned, the optimiser and the losses; it is written now and then, when
        ``interrupted`` says so (the iterator then ends), and at the end. A stage whose file exists goes on from it.

    Raises: FileFormatError for a file of another conversion, ArgumentError for a loss that is not finite.
    """
    named = {name: value for name, value in task.model.named_parameters() if value.requires_grad}
    if not named:
        return
    optimiser = torch.optim.AdamW(named.values(), lr=stage.rate, betas=(0.9, 0.95), weight_decay=0.0)
    step, spent, told = _restored(state, task.name, named, optimiser)
    yield from (Update(**each) for each in told)
    begun = saved = time.perf_counter()
    while stage.used(step, spent) < 1 and not interrupted():
        for group in optimiser.param_groups:
            group["lr"] = stage.rate_at(step, spent)
        optimiser.zero_grad()
        half = stage.used(step, spent) < stage.halved
        losses = task.losses(text.window(seed, step, length // 2 if half else length))
        if not all(math.isfinite(value) for value in losses.values() if isinstance(value, float)):
            raise ArgumentError(
                f"convert: the loss of the {task.name} is not finite at step {step + 1}; the update was not applied. "
                "Lower its rate."
            )
        nn.utils.clip_grad_norm_(named.values(), _CLIP)
        optimiser.step()
        step += 1
        now = time.perf_counter()
        spent, begun = spent + now - begun, now
        update = Update(task.name, step, stage.used(step, spent), spent, losses)
        told.append(dataclasses.asdict(update))
        yield update
        if now - saved > save_seconds:
            _save(state, task.name, named, optimiser, told)
            saved = now
    _save(state, task.name, named, optimiser, told)


def _save(
    path: Path,
    name: str,
    named: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    told: list[dict[str, Any]],
) -> None:
    tensors = {f"value.{key}": value.detach() for key, value in named.items()}
    for key, value in named.items():
        tensors |= {f"{part}.{key}": kept for part, kept in optimiser.state.get(value, {}).items()}
    store.save_tensors(path, tensors, {"kind": _KIND, "stage": name, "told": told})


def _restored(
    path: Path, name: str, named: Mapping[str, nn.Parameter], optimiser: torch.optim.Optimizer
) -> tuple[int, float, list[dict[str, Any]]]:
    """Put what a file holds into the parameters and the optimiser: (steps, seconds, what the steps told)."""
    if not path.exists():
        return 0, 0.0, []
    tensors, header = store.load_tensors(path, _KIND)
    values = store.under(tensors, "value.")
    if header.get("stage") != name or store.unlike(values, named):
        raise FileFormatError(
            f"convert: {path} is the state of another conversion (another stage, model or operator). Choose another "
            "folder, or delete the file to begin again."
        )
    with torch.no_grad():
        for key, value in named.items():
            value.copy_(values[key])
            if f"step.{key}" in tensors:
                optimiser.state[value] = {part: tensors[f"{part}.{key}"] for part in ("exp_avg", "exp_avg_sq", "step")}
    told = header["told"]
    return (told[-1]["step"], told[-1]["seconds"], told) if told else (0, 0.0, told)


@torch.no_grad()
def harms(model: Any, windows: Tensor) -> list[float | None]:
    """By how many nats a token the loss on windows grows when one layer alone has its operator and all others have
    softmax, layer by layer; None for a layer that keeps its sliding window.
    """
    layers, own = layers_of("convert", model), operators(model)
    exact = [for_layer("convert", layer, "softmax") for layer in layers]
    norms = [layer.readout for layer in layers]
    try:
        _put(layers, exact, [None] * len(layers))
        base = float(examine.nats(model, windows).mean())
        found: list[float | None] = [None] * len(layers)
        for index in convertible(model):
            layer = layers[index]
            _put([layer], [own[index]], [norms[index]])
            found[index] = float(examine.nats(model, windows).mean()) - base
            _put([layer], [exact[index]], [None])
    finally:
        _put(layers, own, norms)
    return found


def _put(layers: Sequence[Any], operators: Sequence[Operator], norms: Sequence[nn.Module | None]) -> None:
    for layer, operator, norm in zip(layers, operators, norms, strict=True):
        layer.operator, layer.readout = operator, norm


def converted(original: Any, operator: str, chosen: Mapping[int, Mapping[str, Tensor]] | None = None) -> Any:
    """A converted copy of a model whose ``generate`` keeps memories.

    chosen: the layers to convert, with what their operators and norms have learned; None = all that are
        ``convertible``, as they start.
    """
    model = copy.deepcopy(original)
    convert(model, operator, layers=convertible(model) if chosen is None else list(chosen), cache="memory")
    for index, learned in (chosen or {}).items():
        layers_of("convert", model)[index].load_state_dict(dict(learned), strict=False)
    return model


def convertible(model: Any) -> list[int]:
    """The layers that a conversion gives a constant memory: those without a sliding window. The memory of the others is
    bounded already, and they keep it.

    Raises: ArgumentError for a model whose layers all have a sliding window.
    """
    layers = layers_of("convert", model)
    found = [index for index, layer in enumerate(layers) if window_of(layer) is None]
    if not found:
        raise ArgumentError(
            f"convert: layers without a sliding window are required, and all {len(layers)} layers of "
            f"{type(model).__name__} have one of {window_of(layers[0])} tokens: their memory is bounded already. To "
            "convert them as layers that see all earlier tokens, set sliding_window to null in config.json."
        )
    return found


def learned_by(model: Any) -> list[dict[str, Tensor]]:
    """What the operator and the norm of each layer have learned."""
    return [
        {
            name: value.clone()
            for name, value in layer.state_dict().items()
            if name.split(".")[0] in ("operator", "readout")
        }
        for layer in layers_of("convert", model)
    ]


__all__ = [
    "Distillation",
    "Stage",
    "Text",
    "Transfer",
    "Update",
    "converted",
    "convertible",
    "harms",
    "learn",
    "learned_by",
]
