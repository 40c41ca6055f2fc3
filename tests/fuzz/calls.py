"""Random calls of attention: right ones against the dense definition in float64, wrong ones against their refusals."""

import contextlib
import math
import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fuzz.rounding import Rounding, patient, weights_made_again
from hypothesis import strategies as st
from matrix import OPERATORS, PATHS, Case, Inputs, fitted, inputs, randomised
from torch import Tensor

import zonal
from zonal import Operator, prior
from zonal.errors import ArgumentError, ConvergenceError, NonFiniteError, PathError, ZonalError
from zonal.kernels import native

VALUES = ("normal", "zero", "sparse", "equal", "tiny", "huge", "subnormal", "mixed", "onehot")
LAYOUTS = ("plain", "stepped", "offset", "expanded", "transposed")
DTYPES = ("float32", "float64", "bfloat16", "float16")
# what any path may lose of the largest number, float32 in solves, and what an iteration up to a tolerance may leave
ROUNDED, SOLVED, PLANS = 1e-9, 1e-3, 1e-2


@dataclass(frozen=True)
class Attention:
    """A call that fits its operator. name: of an operator of the matrix."""

    name: str
    case: Case
    path: str = "auto"
    dtype: str = "float32"
    values: str = "normal"
    layout: str = "plain"
    seed: int = 0


SIZES = (0, 1, 2, 3, 5, 8, 17, 33, 70)
DIMS = (1, 2, 3, 4, 7, 8, 16, 33)


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    """Operators, shapes, masks, types, values and layouts of memory."""
    name = draw(st.sampled_from(sorted(OPERATORS)))
    queries = draw(st.sampled_from(SIZES))
    groups = draw(st.sampled_from((1, 2, 3)))
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    shared = draw(st.integers(0, 5)) == 0
    case = Case(
        batch=draw(st.sampled_from((1, 2, 3, 0))),
        heads=kv_heads * (1 if shared else groups),
        shared=shared,
        kv_heads=kv_heads,
        queries=queries,
        keys=draw(st.one_of(st.just(queries), st.sampled_from(SIZES))),
        key_dim=draw(st.sampled_from((*DIMS, 0))),
        value_dim=draw(st.sampled_from((*DIMS, 0))),
        causal=draw(st.booleans()),
        padding=draw(st.sampled_from(("", "", "left", "random", "all"))),
        key_bias=draw(st.booleans()),
        log_decay=draw(st.booleans()),
        weights=draw(st.sampled_from(("", "action", "gate"))),
        masses=draw(st.booleans()),
    )
    if case.queries == case.keys and draw(st.integers(0, 3)) == 0:
        cuts = sorted(draw(st.sets(st.integers(0, queries), max_size=3)) | {0, queries})
        case = replace(case, batch=1, packed=tuple(cuts))
    return Attention(
        name,
        possible(OPERATORS[name](), case),
        draw(st.sampled_from(("auto", "auto", *PATHS))),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(VALUES)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(0, 999)),
    )


def possible(operator: Operator, case: Case) -> Case:
    """The case without what its operator refuses, and without arguments that have no meaning together."""
    ordered = any(isinstance(part, prior.Causal | prior.ChunkCausal) for part in operator.prior)
    case = replace(case, log_decay=case.log_decay and (case.causal or ordered))
    if operator.tags.couples and case.batch == 0:
        case = replace(case, batch=1)
    if not case.batch:
        case = replace(case, padding="")
    if (case.packed and len(case.packed) < 2) or case.queries == 0:
        case = replace(case, packed=())
    if case.weights == "action" and (case.padding or not case.keys):
        case = replace(case, weights="")  # a sequence that stores nothing is refused
    case = fitted(operator, case)
    if case.queries != case.keys or (case.causal and case.queries > case.keys):
        case = replace(case, masses=False)  # masses of tokens that see nothing are refused
    return case


def valued(x: Tensor, kind: str, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """x (…, tokens, dim) of normal numbers, made into numbers of another kind."""
    last = torch.finfo(torch.promote_types(dtype, torch.float32) if dtype != torch.float16 else dtype)
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "sparse":
        return x * (torch.rand(x.shape, generator=draw) > 0.7)
    if kind == "equal" and x.shape[-2]:
        return x[..., :1, :].expand(x.shape).clone()
    if kind == "tiny":
        return x * (1e-20 if dtype != torch.float16 else 1e-4)
    if kind == "huge":
        return x * 30
    if kind == "subnormal":
        return x * min(last.tiny / 8, 1e-39 if dtype != torch.float16 else 1.0)
    if kind == "mixed":
        return x * 10 ** (6 * torch.rand(*x.shape[:-1], 1, generator=draw, dtype=x.dtype) - 5)
    if kind == "onehot" and x.shape[-1]:
        return torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).to(x)
    return x


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in memory of another layout, as a leaf."""
    x = x.detach()
    if layout == "stepped":
        x = torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2]
    elif layout == "offset":
        whole = x.new_full((x.numel() + 3,), float("nan"))
        whole[3:] = x.flatten()
        x = whole[3:].view(x.shape)
    elif layout == "expanded" and x.shape[0] and x.ndim > 1:
        x = x[:1].expand(x.shape)
    elif layout == "transposed" and x.ndim > 2:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.requires_grad_()


def data_of(each: Attention) -> Inputs:
    """The inputs of a call, in its type and layout."""
    dtype = getattr(torch, each.dtype)
    found = inputs(each.case, seed=each.seed)
    draw = torch.Generator().manual_seed(each.seed)
    with torch.no_grad():
        for name in ("q", "k", "v"):
            x = valued(
                getattr(found, name).detach(),
                each.values if name != "v" or each.values != "onehot" else "",
                dtype,
                draw,
            )
            setattr(found, name, laid_out(x.to(dtype), each.layout))
        for name in ("key_bias", "log_decay", "key_gate", "query_mass", "key_mass"):
            x = getattr(found, name)
            if x is not None:
                setattr(found, name, laid_out(x.to(dtype), "stepped" if each.layout == "stepped" else "plain"))
    return found


def results(operator: Operator, data: Inputs, path: str, rounding: Rounding | None = None) -> list[Tensor]:
    """y and the gradients of all inputs and all learned numbers."""
    y = data.run(operator, path)
    leaves = [*data.leaves, *operator.parameters()]
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    if rounding is not None:
        rounding.backward = True
    found = (
        torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True) if y.requires_grad else [None] * len(leaves)
    )
    return [y.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def nudged(data: Inputs, by: float, seed: int) -> Inputs:
    """The inputs in float64, each number off by up to ``by`` of itself."""
    found, draw = data.to(torch.float64), torch.Generator().manual_seed(seed)
    for name in ("q", "k", "v"):
        x = getattr(found, name).detach()
        moved = x * (1 + by * (2 * torch.rand(x.shape, generator=draw, dtype=torch.float64) - 1))
        setattr(found, name, moved.requires_grad_())
    return found


def roundings(operator: Operator, double: Operator, data: Inputs, path: str) -> list[list[float]]:
    """How far results are off in the operator's computing type with more roundings, drawn at random; see ``rounding``.

    They are those of the definition. Ridge read-outs and plans are reached in more than one way, and not all lose the
    same: theirs are those of torch's own form of the path, too. How far the form itself is from the definition, as by
    a fault, does not count.
    """
    found, doubled = [], data.to(torch.float64)
    exact = results(double, doubled, "dense")
    for seed in range(4):
        off = _rounded(operator, data, "dense", exact, seed)
        with weights_made_again(seed):  # which y does not need
            found += [off, [off[0], *_rounded(operator, data, "dense", exact, seed)[1:]]]
    if operator.tags.solves or operator.tags.couples:
        path = path if path != "auto" else "chunked" if operator.tags.solves else "tiled"
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(PathError):
            patch.setenv(native.VARIABLE, "off")
            exact = results(double, doubled, path)
            found += [_rounded(operator, data, path, exact, seed) for seed in range(4)]
    return found


def _rounded(operator: Operator, data: Inputs, path: str, exact: list[Tensor], seed: int) -> list[float]:
    """The largest error of each item; infinity where arithmetic with such roundings holds no digit of it."""
    compute = torch.promote_types(data.q.dtype, torch.float32)
    try:
        with warnings.catch_warnings(), Rounding(compute, seed) as rounding:
            warnings.simplefilter("ignore")
            found = results(patient(operator), data.to(data.q.dtype), path, rounding)
    except (ConvergenceError, NonFiniteError, torch.linalg.LinAlgError):
        return [math.inf] * len(exact)
    off = [float((x.double() - y).abs().max()) if y.numel() else 0.0 for x, y in zip(found, exact, strict=True)]
    return [each if math.isfinite(each) else math.inf for each in off]


def check_attention(each: Attention) -> None:
    """Raise AssertionError where a call that fits fails, changes its inputs, or is further from the definition than the
    definition in the same type, with inputs one rounding off, or with roundings at random, by more than a small factor.
    """
    dtype = getattr(torch, each.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    double, operator = randomised(OPERATORS[each.name]()), randomised(OPERATORS[each.name]()).to(compute)
    data = data_of(each)
    before = [x.detach().clone() for x in data.leaves]
    try:
        got = results(operator, data, each.path)
    except PathError:
        if each.path == "auto":
            raise
        return
    except ArgumentError as error:  # sizes that the operator does not take
        with pytest.raises(ArgumentError, match=re.escape(str(error))):
            results(operator, data.to(dtype), "dense")
        return
    except (ConvergenceError, NonFiniteError):
        assert operator.tags.couples
        return
    for x, same in zip(data.leaves, before, strict=True):
        assert torch.equal(x.detach(), same), "an input was changed"
    assert got[0].dtype == dtype
    try:
        truth = results(double, data.to(torch.float64), "dense")
        near = [results(operator, data.to(dtype), "dense")]
        near += [results(double, nudged(data, 4 * torch.finfo(compute).eps, seed), "dense") for seed in range(2)]
    except (ConvergenceError, NonFiniteError):
        assert operator.tags.couples
        return
    compare(each, (double, operator), data, got, truth, near)


def compare(
    each: Attention, operators: tuple[Operator, Operator], data: Inputs,
    got: list[Tensor], truth: list[Tensor], near: list[list[Tensor]],
) -> None:  # fmt: skip
    """Raise AssertionError where an item of ``got`` is too far from ``truth``, for what ``near`` and ``roundings`` are.

    operators: in float64, and in the computing type.
    """
    double, operator = operators
    dtype = data.q.dtype
    compute = torch.promote_types(dtype, torch.float32)
    eps, stored = torch.finfo(compute).eps, torch.finfo(dtype).eps
    largest = max((1.0, *(float(x.detach().abs().max()) for x in data.leaves if x.numel())))
    again: list[list[float]] = []

    def budget(index: int, lost: float, size: float) -> float:
        found = 32 * lost + (128 * eps + 2 * (stored if dtype != compute else 0)) * size
        found += 64 * eps * largest * (index > 0)  # gradients may be sums of terms that cancel
        if operator.tags.solves and compute == torch.float32:
            found += SOLVED * size
        return found + ROUNDED * (1 + size) + PLANS * (1 + size) * operator.tags.couples + torch.finfo(dtype).tiny

    for index, (mine, exact) in enumerate(zip(got, truth, strict=True)):
        if not exact.numel():
            continue
        size = float(exact.abs().max())
        held = math.isfinite(size) and size < torch.finfo(dtype).max / 8 and size < 1e30
        same = [x[index].double() for x in near]
        if not held or not all(bool(torch.isfinite(x).all()) for x in same):
            continue
        what = f"{each.path}: item {index} (0 = output, then gradients) of size {size:.3g}"
        assert torch.isfinite(mine).all(), f"{what} is not finite, while the definition is, in float64 and in this type"
        if each.values == "subnormal":  # which have fewer digits themselves
            continue
        lost, error = (max(float((x.double() - exact).abs().max()) for x in some) for some in (same, [mine]))
        allowed = budget(index, lost, size)
        if error > allowed:  # the terms of a small gradient may be large, and the roundings of ``same`` cancel by luck
            again = again or roundings(operator, double, data, each.path)
            allowed = budget(index, max(lost, *(off[index] for off in again)), size)
        assert error <= allowed, f"{what} is off by {error:.3g}, allowed {allowed:.3g}"


# --- calls that do not fit ----------------------------------------------------------------------------------------

HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, math.nan, math.inf, 10**30, "", "x", "\0", b"x", (), [], {}, object(),
    torch.zeros(()), torch.zeros(0), torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 2, 5),
    torch.ones(2, 2, 5, dtype=torch.int64), torch.full((2, 2, 5), math.nan), torch.full((2, 2, 5), math.inf),
    torch.full((2, 2, 5), -math.inf), torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 5, 4, dtype=torch.complex64),
    torch.zeros(2, 2, 5, 4, dtype=torch.int8), torch.zeros(2, 2, 5, 4, device="meta"), torch.zeros(2, 2, 5, 4,
    dtype=torch.float64),
    torch.zeros(2, 2, 0, 4), torch.zeros(2, 0, 5, 4), torch.zeros(2, 2, 5, 4).to_sparse(), torch.tensor([0, 3, 5]),
    torch.tensor([5, 3, 0]), torch.tensor([0, 9]), torch.tensor([-1, 5]), torch.tensor([0.0, 5.0]), torch.tensor([[0,
    5]]),
    torch.tensor([0]), torch.tensor([0, 5], dtype=torch.int32), torch.tensor([1, 5]), torch.tensor([0, 2**62]),
)  # fmt: skip
ARGUMENTS = (
    "q", "k", "v", "operator", "causal", "key_padding_mask", "cu_seqlens", "scale", "memory", "return_memory", "path",
    "log_decay", "key_bias", "action_mask", "key_gate", "query_mass", "key_mass", "start", "dropout",
)  # fmt: skip


@dataclass(frozen=True)
class Misfit:
    """A call with some arguments replaced by values of ``HOSTILE``, by their index. entry: the function."""

    operator: str
    replaced: tuple[tuple[str, int], ...]
    entry: str = "attention"
    batch: int = 2


@st.composite
def misfits(draw: st.DrawFn) -> Misfit:
    names = draw(st.sets(st.sampled_from(ARGUMENTS), min_size=1, max_size=3))
    return Misfit(
        draw(
            st.sampled_from(
                ("softmax", "ridge", "sko", "retention", "sinkhorn", "rewa", "ska(power=1)", "hierarchical")
            )
        ),
        tuple((name, draw(st.integers(0, len(HOSTILE) - 1))) for name in sorted(names)),
        draw(st.sampled_from(("attention", "attention", "plan", "explain", "absorb", "read", "empty"))),
        draw(st.sampled_from((1, 2))),
    )


def check_misfit(each: Misfit) -> None:
    """Raise unless the call is refused by an error of the library, or runs."""
    draw = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {name: torch.randn(each.batch, 2, 5, 4, generator=draw) for name in "qkv"}
    given |= {"operator": each.operator} | {name: HOSTILE[index] for name, index in each.replaced}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            _enter(each.entry, given)
    except ZonalError:
        pass


def _enter(entry: str, given: dict[str, Any]) -> None:
    if entry == "attention":
        zonal.attention(**given)
    elif entry in ("plan", "explain"):
        shapes = [getattr(given.pop(name), "shape", 7) for name in "qkv"]
        taken = ("causal", "return_memory") if entry == "plan" else ("causal", "scale")
        getattr(zonal, entry)(given.pop("operator"), *shapes[:2], **{x: given[x] for x in taken if x in given})
    else:
        memory = zonal.Memory.empty(given.pop("operator") if entry == "empty" else "softmax", 2, 2, 4, 4)
        if entry == "absorb":
            taken = ("key_padding_mask", "log_decay", "key_bias", "action_mask", "key_gate")
            memory.absorb(given["k"], given["v"], **{name: given[name] for name in taken if name in given})
        elif entry == "read":
            memory.read(given["q"])


__all__ = ["Attention", "Misfit", "attentions", "check_attention", "check_misfit", "misfits"]
