"""The tiled path by a compiled kernel (C++ on the CPU, Triton on CUDA): which calls it takes, and how they are passed.

It also holds what all bridges to kernels share: refusal messages, the kernels' names of anchors, and links as source.
"""

import functools
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra.bound import Bound
from zonal.algebra.link import Link
from zonal.algebra.score import Fused, Score
from zonal.execution.call import Call
from zonal.execution.paths.features import prepared
from zonal.formula import Formula
from zonal.kernels.abi import ANCHORS, Anchor
from zonal.kernels.native import LARGEST, Reason
from zonal.kernels.tile import FAMILY, TileInputs, TileSpec, tile
from zonal.tracing import recorded

_FAR = 1e30
"""An end of a domain at infinity, in source text, which has no literal for it. In float32, also times log2(e)."""


def kind_of(call: Call) -> Anchor:
    """The anchor as the kernels name it, for those that ``other_anchor`` does not refuse."""
    return cast(Anchor, call.tags.reduction)


def other_anchor(call: Call) -> Reason:
    """The refusal of an anchor that is neither Row, Count nor Raw."""
    return None if call.tags.reduction in ANCHORS else f"anchor {type(call.bound.anchor).__name__} is not in it"


def empty_rows(call: Call) -> Reason:
    """The refusal of keys or values without numbers."""
    dim, value_dim = call.shape.dim, call.shape.value_dim
    if min(dim, value_dim) >= 1:
        return None
    return f"key and value dimensions must be at least 1, this call has {dim} and {value_dim}"


def too_wide(dim: int, value_dim: int, extra: int = 0) -> Reason:
    """The refusal of keys or values that registers do not hold. extra: numbers that the kernel appends to a key."""
    if max(dim + extra, value_dim) <= LARGEST and min(dim, value_dim) >= 1:
        return None
    sizes = f"1 to {LARGEST - extra} and 1 to {LARGEST}" if extra else f"1 to {LARGEST}"
    return f"key and value dimensions must be {sizes}, this call has {dim} and {value_dim}"


def refusal(call: Call) -> Reason:
    """Why torch's tiles run in the kernel's place, or None."""
    code = _code(call.bound.link, call.bound.score)
    return FAMILY.refusal(
        call.device.type,
        call.coefficients.dtype,
        lambda: _unfit(call, code),
        cuda=lambda: without_triton(call.bound.link, code),
        code=code,
    )


def _unfit(call: Call, code: Formula | None) -> Reason:
    link, score = call.bound.link, call.bound.score
    if not score.bilinear and score.dot_reduction is None:
        return f"score {type(score).__name__} is no dot product of prepared vectors, nor has it a map of one"
    if code is None and not score.bilinear:
        return f"link {type(link).__name__} has no formula for it with score {type(score).__name__} (link Exp has)"
    if (reason := missing_formula(call.bound, code, call.device.type)) is not None:
        return reason
    if (reason := other_anchor(call)) is not None:
        return reason
    if call.biased and call.device.type == "cuda":
        return "log priors (decay, ALiBi, key biases) are not in it on CUDA"
    if call.biased and torch_func.active():
        return "log priors (decay, ALiBi, key biases) are not in it under the transforms of torch.func"
    reduction = score.dot_reduction
    if reduction is not None and reduction.steep and not torch_func.active():
        return "distances are steep where points are near, and the squares of such points cancel in its float32"
    return too_wide(call.shape.dim, call.shape.value_dim, 0 if reduction is None else reduction.extra)


def missing_formula(bound: Bound, code: Formula | None, device: str) -> Reason:
    """The refusal of a link whose formula is not there, or leaves out what the kernel of the device reads."""
    name = type(bound.link).__name__
    if code is None:
        return f"link {name} has no formula for it"
    if device == "cuda" or exponential(code):
        return None
    if not (code.cpp_value and code.cpp_derivative):
        return f"the formula of link {name} has no {'cpp_derivative' if code.cpp_value else 'cpp_value'}"
    if bound.coefficients.shape[0] and not code.cpp_base:
        return f"the formula of link {name} has no cpp_base, the derivative with respect to what the link learns"
    return None


def exponential(code: Formula) -> bool:
    """Whether a link is the exponential of its score and nothing else."""
    return code.log and not code.cpp_value


def without_triton(link: Link, code: Formula | None) -> Reason:
    """The refusal on CUDA of a link that has no Triton functions."""
    if code is not None and (code.triton or exponential(code)):
        return None
    return f"link {type(link).__name__} has no Triton functions"


def rules(call: Call, code: Formula, fused: Fused | None = None, inference: bool = False) -> TileSpec:
    """What a tile kernel is told of a call's anchor and of who sees whom."""
    window = call.window
    return TileSpec(
        code,
        kind_of(call),
        fused is not None and fused.normalise,
        causal=call.causal and call.chunk is None,
        include_self=call.tags.includes_self,
        chunk=call.chunk or 0,
        left=None if window is None else window.left,
        right=None if window is None else window.right,
        inference=inference,
        learned=call.coefficients.shape[0],
    )


def rows_of(call: Call, code: Formula) -> Tensor:
    """What a link's formula reads of each head, (H, n): its coefficients, then its constants."""
    return by_head(call.coefficients, call.shape.heads, code)


def by_head(coefficients: Tensor, heads: int, code: Formula) -> Tensor:
    """``rows_of``, from the link's coefficients (n, H or 1, 1, 1)."""
    rows = coefficients.flatten(1).T.expand(heads, -1)
    return torch.cat([rows, rows.new_tensor(code.constants).expand(heads, -1)], 1) if code.constants else rows


def scale_of(fused: Fused, heads: int, device: torch.device) -> Tensor:
    """What the scores of each head are multiplied by, (H,)."""
    if isinstance(fused.scale, Tensor):
        return fused.scale
    return torch.full((heads,), fused.scale, device=device, dtype=torch.float32)


def code_of(link: Link) -> Formula | None:
    """The link as source text, with its domain."""
    return _with_domain(link) if torch.compiler.is_compiling() else _kept_code(link)


def _with_domain(link: Link) -> Formula | None:
    formula, domain = link.formula, link.domain
    if formula is not None and exponential(formula) and not link.log_space:  # it says that the link is Exp
        return None
    if domain is not None:
        domain = float(max(domain[0], -_FAR)), float(min(domain[1], _FAR))
    return None if formula is None else replace(formula, domain=domain)


_kept_code = functools.lru_cache(maxsize=256)(_with_domain)  # which a tracer cannot follow


def _code(link: Link, score: Score) -> Formula | None:
    """The link of a score; where the score is a map of a dot product, that map with the link exp after it."""
    code, reduction = code_of(link), score.dot_reduction
    if reduction is None or code is None:
        return code
    return reduction.formula if exponential(code) and code.domain is None else None


def tiled(call: Call) -> Tensor:
    """y (B, H, T, P) for a call that is not refused.

    Raises: BuildError when the kernel does not compile.
    """
    bound, seen = call.bound, call.visibility
    code, reduction = _code(bound.link, bound.score), bound.score.dot_reduction
    assert code is not None
    fused = call.fused
    if reduction is not None:
        fused, (q, k), v = Fused(scale=reduction.scale), bound.score.reduced(call.q, call.k), call.v
    elif fused is None or call.raw is None:
        fused, (q, k, v) = Fused(), prepared(call)
    else:
        q, k, v = call.raw[:3]
    edges = None if seen.borders is None else seen.borders.to(q.device)
    scale = scale_of(fused, call.shape.heads, q.device)
    bias = call.bias
    inputs = TileInputs(q, k, v, scale, rows_of(call, code), seen.key_mask, edges, bias.row, bias.col, bias.slope)
    # under vmap a tensor does not say that gradients flow through it
    inference = not torch_func.active() and not recorded((*inputs[:5], call.coefficients, bias.row, bias.col))
    return call.scaled(tile(inputs, rules(call, code, fused, inference))[0])


__all__ = [
    "by_head", "code_of", "empty_rows", "exponential", "kind_of", "other_anchor", "refusal", "rows_of", "rules",
    "scale_of", "tiled", "too_wide", "without_triton",
]  # fmt: skip
