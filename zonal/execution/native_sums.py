"""The chunked path by a compiled kernel, C++ on the CPU and Triton on CUDA: which calls with sums over features it takes, and how a call becomes one."""

import os
from dataclasses import replace

import torch
from torch import Tensor

from zonal.algebra.anchor import Count, Raw, Row
from zonal.algebra.score import Fused
from zonal.execution import native
from zonal.execution.call import Call
from zonal.features import feature_map
from zonal.kernels import sums_ops
from zonal.kernels.cpp import build, library, sums_library
from zonal.kernels.sums_spec import SumsSpec
from zonal.memory import FeatureSums, Memory


def refusal(call: Call, kind: str | None = None) -> str | None:
    """Why torch's scan runs in the kernel's place, or None. kind: of the memory that the call goes on from or leaves, None without."""
    bound = call.bound
    if os.environ.get(native.VARIABLE) == "off":
        return f"the environment says {native.VARIABLE}=off"
    if call.device.type not in ("cpu", "cuda", "meta"):
        return f"there is no kernel for device {call.device.type!r}"
    if call.coefficients.dtype == torch.float64:
        return "the kernel is for float32 and shorter, the call is in float64"
    code = native.code_of(bound.link)
    if code is None:
        return f"link {type(bound.link).__name__} has no formula for it"
    if type(bound.anchor) not in (Row, Count, Raw):
        return f"anchor {type(bound.anchor).__name__} is not in it"
    if not call.bias.empty:
        return "log priors (decay, key biases) are not in it"
    if kind not in (None, "features"):
        return f"a memory of kind {kind!r} is not in it"
    if kind is not None and call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if min(call.shape[4:]) < 1:
        return f"key and value dimensions must be at least 1, this call has {call.shape[4]} and {call.shape[5]}"
    if call.device.type == "cuda":
        return cuda_refusal(call)
    if build.compiler() is None:
        return "no C++ compiler was found (set CXX, or install g++ or clang++)"
    if torch.compiler.is_compiling():  # a traced graph has the kernel in it and says so when it cannot be had
        return None
    failure = library.failure(code, sums_library.SOURCE)
    return None if failure is None else f"the kernel could not be had ({failure})"


def cuda_refusal(call: Call) -> str | None:
    """Why the Triton kernel does not run a call that the C++ kernel would, or None."""
    code, features = native.code_of(call.bound.link), feature_map(call.bound.link)
    if code is None or not code.triton:
        return f"link {type(call.bound.link).__name__} has no Triton functions"
    if features is not None and features.degree > 2:
        return f"on CUDA powers of the score up to 2 are in it, link {type(call.bound.link).__name__} has {features.degree}"
    if max(call.shape[4:]) > native.LARGEST:
        return f"key and value dimensions must be 1 to {native.LARGEST}, this call has {call.shape[4]} and {call.shape[5]}"
    return None if native.has_triton() else "triton is not installed (pip install triton)"


def chunked(call: Call, memory: FeatureSums | None) -> tuple[Tensor, Memory | None]:
    """y (B, H, T, P) for a call that is not refused, and what follows ``memory``. Raises: BuildError when the kernel does not compile."""
    bound, seen = call.bound, call.visibility
    code, features = native.code_of(bound.link), feature_map(bound.link)
    assert code is not None
    assert features is not None
    heads, dim = call.shape[1], call.shape[4]
    fused = None if call.raw is None else bound.score.fused(dim, bound.score_params, call.raw.scale)
    if fused is None or call.raw is None:
        fused, (q, k, v) = Fused(False, 0.0, 1.0), call.tokens
    else:
        q, k, v = call.raw[:3]
    scale = fused.scale if isinstance(fused.scale, Tensor) else torch.full((heads,), fused.scale, device=q.device)
    rows = call.coefficients.flatten(1).T.expand(heads, -1)
    if code.constants:
        rows = torch.cat([rows, rows.new_tensor(code.constants).expand(heads, -1)], 1)
    monomials = bound.link.monomials(call.coefficients).to(rows).flatten(1).T.expand(heads, -1)
    spec = SumsSpec(
        code, features.degree, features.lowest, "row" if bound.anchor.normalises else "count" if isinstance(bound.anchor, Count) else "raw",  # type: ignore[attr-defined]
        fused.normalise, fused.eps, memory is not None,
    )  # fmt: skip
    initial = None if memory is None or memory.count == 0 else memory.state
    before = None if initial is None or memory is None else memory.real.double()
    y, _, final = sums_ops.feature_sums(
        q, k, v, scale, rows, monomials, seen.key_mask, seen.lo, seen.hi, seen.segment_start if seen.packed else None, initial, before,
        sums_ops.encode(spec), call.coefficients.shape[0],
    )  # fmt: skip
    if memory is None:
        return call.scaled(y), None
    absent = 0 if seen.key_mask is None else (~seen.key_mask).sum(1)
    return call.scaled(y), replace(memory, count=memory.count + k.shape[2], state=final, padding=memory.padding + absent)


__all__ = ["chunked", "cuda_refusal", "refusal"]
