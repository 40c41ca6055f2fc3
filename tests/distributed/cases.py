"""Calls that several ranks and one process make alike: operators, layers and models, on plain, packed and padded input,
and with biased keys.

    python cases.py RANKS FILE NAME...

Forks RANKS processes from this one, which has everything imported, runs the named cases, and writes what is wrong with
each to FILE as JSON: null, or a sentence.
"""

import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a call on several ranks loads it, which takes seconds: here, and not in each of them
import torch.distributed as dist
from distributed.programs import CHECKS
from matrix import OPERATORS, randomised
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

import zonal
from zonal.distributed import SequenceParallel, sequence_parallel
from zonal.errors import ArgumentError, ZonalError
from zonal.nn import TokenMixer
from zonal.stretch import active

BOUND = 1e-5
LOOSER = {"yat": 5e-5, "yat-decay": 5e-5, "kernel_ridge": 2e-5, "cosine": 2e-5}
"""Where rounding is larger: the compiled tiles of Yat have it in one process too, which takes the dense path here. The
temperature of cosine attention gets a sum over all scores."""
Inputs = dict[str, Tensor | None]


@dataclass
class Case:
    """``call`` of inputs, each with its axis of tokens, gives y with tokens on ``axis``.

    lengths: of the stretches, by number of ranks. offsets: of packed documents in the whole sequence. refused: a part
    of the sentence that refuses the call.
    """

    call: Callable[[Inputs], Tensor]
    inputs: dict[str, tuple[Tensor | None, int]]
    axis: int
    module: nn.Module
    offsets: Tensor | None = None
    lengths: dict[int, tuple[int, ...]] = field(default_factory=lambda: LENGTHS)

    @property
    def tokens(self) -> int:
        return sum(self.lengths[2])


UNEVEN = "learned_parts.score_gate"
"""A gate at zero has the gradient of each rank that would open it, and not that of their sum."""
TOKENS = 37
LENGTHS = {2: (14, 23), 4: (9, 2, 15, 11), 3: (9, 2, 26)}
"""Unequal, odd, and shorter than a convolution."""
OFFSETS = torch.tensor([0, 3, 11, 30, 37])
"""A document ends in the second stretch of four, one crosses two borders, and with two ranks one crosses."""
FORMS = ("plain", "packed", "padded")


def _mask(form: str, batch: int) -> Tensor | None:
    """Padding on the left over more than a stretch, within, and on the right."""
    if form != "padded":
        return None
    mask = torch.ones(batch, TOKENS, dtype=torch.bool)
    mask[0, :12], mask[1, 33:], mask[1, 5:7] = False, False, False
    return mask


def operator(name: str, form: str) -> Case:
    """``zonal.attention`` with an operator of the matrix."""
    torch.manual_seed(0)
    batch = 1 if form == "packed" else 2
    made = randomised(OPERATORS[name]().for_heads(4, 2, dim=5))
    q, k, v = torch.randn(batch, 4, TOKENS, 5), torch.randn(batch, 2, TOKENS, 5), torch.randn(batch, 2, TOKENS, 3)
    bias = torch.randn(batch, 2, TOKENS) if form == "biased" else None
    inputs = {"q": (q, 2), "k": (k, 2), "v": (v, 2), "key_padding_mask": (_mask(form, batch), 1), "key_bias": (bias, 2)}

    def call(given: Inputs) -> Tensor:
        offsets = OFFSETS if form == "packed" and active() is None else None
        y = zonal.attention(operator=made, causal=True, cu_seqlens=offsets, **given)  # type: ignore[arg-type]
        return real(y, given["key_padding_mask"], 2)

    return Case(call, inputs, 2, made, OFFSETS if form == "packed" else None)


def layer(make: Callable[[], TokenMixer], form: str) -> Case:
    """A layer, with weights of its output that are not zero."""
    torch.manual_seed(1)
    batch, made = 1 if form == "packed" else 2, make()
    with torch.no_grad():
        made.output.weight.normal_(std=0.2)
    inputs = {"x": (torch.randn(batch, TOKENS, 16), 1), "key_padding_mask": (_mask(form, batch), 1)}

    def call(given: Inputs) -> Tensor:
        offsets = OFFSETS if form == "packed" and active() is None else None
        y = made(given["x"], key_padding_mask=given["key_padding_mask"], cu_seqlens=offsets)
        return real(y, given["key_padding_mask"], 1)

    return Case(call, inputs, 1, made, OFFSETS if form == "packed" else None)


def real(y: Tensor, mask: Tensor | None, axis: int) -> Tensor:
    """y with zeros for padding, which nobody reads."""
    return y if mask is None else y.masked_fill(~(mask[..., None] if axis == 1 else mask[:, None, :, None]), 0)


LAYERS: dict[str, Callable[[], TokenMixer]] = {
    "attention": lambda: zonal.nn.Attention(16, 4, "softmax", kv_heads=2, rotary=True, conv=4, qk_norm=True),
    "ska": lambda: zonal.nn.Attention(16, 4, "ska(fading=True)", conv=3, key_gate=True, rotary=True),
    "mamba2": lambda: zonal.nn.Mamba2(16, state=8, head_dim=8),
    "mixture": lambda: zonal.nn.Mixture(
        [zonal.nn.Attention(16, 2, "yat"), zonal.nn.Attention(16, 2, "linear", conv=2)]
    ),
}
CASES: dict[str, Callable[[], Case]] = {
    **{
        f"{name}/{form}": partial(operator, name, form)
        for name in OPERATORS
        if not OPERATORS[name]().tags.couples
        for form in FORMS
    },
    **{
        f"{name}/biased": partial(operator, name, "biased")
        for name in OPERATORS
        if not OPERATORS[name]().tags.couples and not OPERATORS[name]().tags.solves
    },
    **{f"layer {name}/{form}": partial(layer, make, form) for name, make in LAYERS.items() for form in FORMS},
}


def compared(case: Case, ranks: int, bound: float = BOUND) -> str | None:
    """What is wrong with a case on this rank.

    In float64 both are equal to rounding. Over a small ridge float32 has few digits in one process already: results may
    differ from the float64 ones by a few times as much as those of one process.
    """
    exact, one = (_gradients(case, dtype) for dtype in (torch.float64, torch.float32))
    with sequence_parallel(cu_seqlens=case.offsets) as parallel:
        own = partial(_stretch, lengths=case.lengths[ranks], rank=parallel.rank)
        double, single = (_gradients(case, dtype, parallel, own) for dtype in (torch.float64, torch.float32))
    exact, one = ({**found, "y": own(found["y"], axis=case.axis)} for found in (exact, one))
    if not exact.keys() == one.keys() == double.keys() == single.keys():
        return f"gradients of {sorted(one)} in one process, of {sorted(single)} in several"
    wrong = {f"{name} in float64": e for name, x in exact.items() if not (e := _error(double[name], x)) <= 1e-9}
    for name, x in exact.items():
        error = _error(single[name], one[name])
        if not (error <= bound or _error(single[name], x) <= 8 * _error(one[name], x)):
            wrong[name] = error
    return f"differs by {wrong}" if wrong else None


def _gradients(
    case: Case, dtype: torch.dtype, parallel: SequenceParallel | None = None, own: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """y, and the gradients of all inputs and parameters, on one process or of all ranks."""
    module, axes = case.module.to(dtype), {name: axis for name, (_, axis) in case.inputs.items()}
    module.zero_grad(set_to_none=True)
    whole = {name: _leaf(x, dtype) for name, (x, _) in case.inputs.items()}
    y = case.call(whole if own is None else {name: own(x, axis=axes[name]) for name, x in whole.items()})
    shape = [case.tokens if axis == case.axis else size for axis, size in enumerate(y.shape)]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    (y * (weight if own is None else own(weight, axis=case.axis))).sum().backward()
    found = {name: x.grad for name, x in whole.items() if x is not None and x.grad is not None}
    if parallel is not None:
        parallel.sum_gradients(module.parameters())
        found = {name: parallel.ranks.summed(x) for name, x in found.items()}
    learned = {name: x.grad for name, x in module.named_parameters() if x.grad is not None and name != UNEVEN}
    found |= {name: x.clone() for name, x in learned.items() if x.numel() > 16}
    if few := [x.flatten() for x in learned.values() if x.numel() <= 16]:
        # of a few numbers some nearly cancel: together, as a step of training takes them
        found["learned numbers"] = torch.cat(few)
    module.to(torch.float32)
    return {"y": y.detach(), **found}


def _leaf(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x.to(dtype, copy=True).requires_grad_() if x is not None and x.is_floating_point() else x


def _stretch(x: Any, *, axis: int, lengths: Sequence[int], rank: int) -> Any:
    return None if x is None else x.narrow(axis, sum(lengths[:rank]), lengths[rank])


def _error(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|, by the norms of whole tensors."""
    return float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-12))


def refused(case: Case, ranks: int) -> str | None:
    """What is wrong with the refusal of a case on this rank."""
    with sequence_parallel(cu_seqlens=case.offsets) as parallel:
        own = partial(_stretch, lengths=case.lengths[ranks], rank=parallel.rank)
        try:
            case.call({name: own(x, axis=axis) for name, (x, axis) in case.inputs.items()})
        except ArgumentError as error:
            return None if "sequence_parallel" in str(error) else f"the refusal does not say by what: {error}"
    return "it was not refused"


REFUSED = frozenset((
    "softmax-top", "yat-top", "rewa-top", "ridge-yat", "koopman-exp", "ridge-window", "regime-ridge",
    "kernel_ridge-yat", "sko-chunk", "ska-paper", "ridge-chunk", "ska-relative", "kernel_ridge-chunk",
))  # fmt: skip
"""Operators that are not split over these stretches: they keep the largest weights, solve with keys, or read chunks."""


def main(rank: int, ranks: int, folder: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    # a rank that waits for one that has failed ends, too
    patience = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{folder}/store", timeout=patience)
    wrong: dict[str, str | None] = {}
    for name in names:
        if name in CHECKS:
            wrong[name] = CHECKS[name]()
            continue
        case = CASES[name]()
        try:
            bound = LOOSER.get(name.partition("/")[0], BOUND)
            wrong[name] = refused(case, ranks) if name.partition("/")[0] in REFUSED else compared(case, ranks, bound)
        except ZonalError as error:  # of every rank, or the others wait for this one
            wrong[name] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


if __name__ == "__main__":
    count, file, *chosen = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        start_processes(
            main,
            args=(
                int(count),
                directory,
                chosen or [*CASES, *(name for name in CHECKS if name != "meshes" or count == "4")],
            ),
            nprocs=int(count),
            start_method="fork",
        )
        each = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(int(count))]
        told = {name: next((one[name] for one in each if one[name]), None) for name in each[0]}
        Path(file).write_text(json.dumps(told))
