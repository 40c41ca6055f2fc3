"""The tiled path by a compiled kernel, C++ on the CPU and Triton on CUDA: which calls it takes, and how a call becomes one."""

import functools
import importlib.util
from dataclasses import replace

import torch
from torch import Tensor

from zonal.algebra.anchor import Count, Raw, Row
from zonal.algebra.link import Link
from zonal.algebra.prior import Window
from zonal.algebra.score import Fused, Score
from zonal.execution.call import Call
from zonal.formula import Formula
from zonal.kernels import native as native_kernels
from zonal.kernels import ops, transforms
from zonal.kernels.cpp import library
from zonal.kernels.spec import TileSpec

# to look these up among all that torch has takes longer than to call them, where other work has swept the caches
_compiling, _tracing = torch.compiler.is_compiling, torch._C._get_tracing_state
_modes, _transformed = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
LARGEST = 256


def refusal(call: Call) -> str | None:
    """Why torch's tiles run in the kernel's place, or None."""
    reason = native_kernels.unfit(call.device.type, call.coefficients.dtype)
    if reason is not None:
        return reason
    link, score = call.bound.link, call.bound.score
    if not score.bilinear and score.dot_reduction is None:
        return f"score {type(score).__name__} is no dot product of prepared vectors, nor has it a map of one"
    code = _code(link, score)
    if code is None:
        return f"link {type(link).__name__} has no formula for it" + (
            "" if score.bilinear else f" with score {type(score).__name__} (link Exp has)"
        )
    if type(call.bound.anchor) not in (Row, Count, Raw):
        return f"anchor {type(call.bound.anchor).__name__} is not in it"
    if not call.bias.empty and not _carried(call, code):
        return "log priors (decay, ALiBi, key biases but for finite ones of an exponential of a dot product on the CPU) are not in it"
    extra = (0 if score.dot_reduction is None else score.dot_reduction.extra) + (not call.bias.empty)
    if max(call.shape[4] + extra, call.shape[5]) > LARGEST or min(call.shape[4:]) < 1:
        limits = f"1 to {LARGEST - extra} and 1 to {LARGEST}" if extra else f"1 to {LARGEST}"
        return f"key and value dimensions must be {limits}, this call has {call.shape[4]} and {call.shape[5]}"
    if call.device.type == "cuda":
        if not (code.triton or (code.log and not code.cpp_value)):
            return f"link {type(link).__name__} has no Triton functions"
        return None if has_triton() else "triton is not installed (pip install triton)"
    return native_kernels.missing(code, "tile")


def _carried(call: Call, code: Formula) -> bool:
    """Whether all log priors are key biases that can be one number more of each key: log K = q . k + bias = (q, 1) . (k, bias)."""
    bias = call.key_bias
    if (
        bias is None
        or call.bias.row is not None
        or call.bias.slope is not None
        or not (code.log and not code.cpp_value and call.bound.score.bilinear)
    ):
        return False
    if call.device.type != "cpu" or torch.compiler.is_compiling() or transforms.active():
        return False  # where looking for infinite ones would wait, or cannot be done
    return bool(bias.isfinite().all())


def rules(call: Call, code: Formula, fused: Fused | None = None, inference: bool = False) -> TileSpec:
    """What a tile kernel is told of a call's anchor and of who sees whom."""
    anchor, window = call.bound.anchor, next((p for p in call.bound.priors if isinstance(p, Window)), None)
    return TileSpec(
        code, "row" if anchor.normalises else "count" if isinstance(anchor, Count) else "raw", *((False, 0.0) if fused is None else fused[:2]),  # type: ignore[attr-defined]
        call.causal and call.chunk is None, call.include_self, call.chunk or 0, None if window is None else window.left,
        None if window is None else window.right, inference,
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def code_of(link: Link) -> Formula | None:
    """The link as source text, with its domain."""
    return _with_domain(link) if torch.compiler.is_compiling() else _kept_code(link)


def _with_domain(link: Link) -> Formula | None:
    formula = link.formula
    return None if formula is None else replace(formula, domain=link.domain)


_kept_code = functools.lru_cache(maxsize=256)(_with_domain)  # which a tracer cannot follow


def _code(link: Link, score: Score) -> Formula | None:
    """The link of a score; where the score is a map of a dot product, that map with the link exp after it."""
    code, reduction = code_of(link), score.dot_reduction
    if reduction is None or code is None:
        return code
    return reduction.formula if code.log and not code.cpp_value and code.domain is None else None


def tiled(call: Call) -> Tensor:
    """y (B, H, T, P) before the anchor's factor a head, for a call that is not refused. Raises: BuildError when the kernel does not compile."""
    bound, seen = call.bound, call.visibility
    code, reduction = _code(bound.link, bound.score), bound.score.dot_reduction
    assert code is not None
    heads, dim = call.shape[1], call.shape[4]
    fused = None if call.raw is None else bound.score.fused(dim, bound.score_params, call.raw.scale)
    if reduction is not None:
        fused, (q, k), v = Fused(False, 0.0, reduction.scale), bound.score.reduced(call.q, call.k), call.v
    elif not call.bias.empty:
        assert call.key_bias is not None
        fused, v = Fused(False, 0.0, 1.0), call.v
        q, k = (
            torch.cat([call.q, torch.ones_like(call.q[..., :1])], -1),
            torch.cat([call.k, call.key_bias[..., None].to(call.k)], -1),
        )
    elif fused is None or call.raw is None:
        fused, (q, k, v) = Fused(False, 0.0, 1.0), call.tokens
    else:
        q, k, v = call.raw[:3]
    scale = (
        fused.scale
        if isinstance(fused.scale, Tensor)
        else torch.full((heads,), fused.scale, device=q.device, dtype=torch.float32)
    )
    learned = call.coefficients.shape[0]
    coefficients = call.coefficients.flatten(1).T.expand(heads, -1)
    if code.constants:
        coefficients = torch.cat([coefficients, coefficients.new_tensor(code.constants).expand(heads, -1)], 1)
    func = transforms.active()  # under vmap a tensor does not say that gradients flow through it
    inference = not func and not (
        torch.is_grad_enabled() and (call.requires_grad or k.requires_grad or call.coefficients.requires_grad)
    )
    spec = rules(call, code, fused, inference)
    edges = None if seen.edges is None or not seen.packed else seen.edges.to(q.device)
    if spec.inference and plain(q, k, v):
        return library.forward(q, k, v, scale, coefficients, seen.key_mask, edges, spec)[0]
    y, *_ = (transforms.tile if func else ops.tile)(
        q, k, v, scale, coefficients, seen.key_mask, edges, ops.encode(spec), learned
    )
    return y


def plain(*tensors: Tensor) -> bool:
    """Whether these are tensors of the CPU and nobody looks on: torch's operators, which tracers and modes see, then only cost a short call its time."""
    if _compiling() or _tracing() is not None or _modes() or _transformed():
        return False
    for x in tensors:  # noqa: SIM110 (``all`` takes twice as long, a good part of a short call)
        if type(x) is not Tensor or not x.is_cpu:
            return False
    return True


__all__ = ["LARGEST", "code_of", "has_triton", "plain", "refusal", "rules", "tiled"]
