"""The chunked path by a compiled kernel, C++ on the CPU and Triton on CUDA: which calls with sums over features it takes, and how a call becomes one."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zonal.algebra.anchor import Count, Raw, Row
from zonal.algebra.prior import ChunkCausal, Rule, Visibility, intervals_of, visibility
from zonal.algebra.score import Fused
from zonal.execution import native
from zonal.execution.call import Call
from zonal.features import SymmetricPowers, feature_map
from zonal.formula import Formula
from zonal.kernels import native as native_kernels
from zonal.kernels import sums_ops, transforms
from zonal.kernels.cpp import sums_library
from zonal.kernels.cpp.sums_library import Places
from zonal.kernels.sums_spec import SumsSpec
from zonal.memory import DecayedSums, FeatureSums, Memory, Tokens
from zonal.memory.sums import carried
from zonal.memory.tokens import joined

Runner = Callable[[Tensor, Tensor, Tensor], Tensor | None]


def refusal(call: Call, kind: str | None = None) -> str | None:
    """Why torch's scan runs in the kernel's place, or None. kind: of the memory that the call goes on from or leaves, None without."""
    bound = call.bound
    reason = native_kernels.unfit(call.device.type, call.coefficients.dtype)
    if reason is not None:
        return reason
    code = native.code_of(bound.link)
    if code is None:
        return f"link {type(bound.link).__name__} has no formula for it"
    if type(bound.anchor) not in (Row, Count, Raw):
        return f"anchor {type(bound.anchor).__name__} is not in it"
    if call.bias.slope is not None:
        return "a bias that falls with the distance (ALiBi) is not in it"
    if kind not in (None, "features", "decayed"):
        return f"a memory of kind {kind!r} is not in it"
    if min(call.shape[4:]) < 1:
        return f"key and value dimensions must be at least 1, this call has {call.shape[4]} and {call.shape[5]}"
    if call.device.type == "cuda":
        return cuda_refusal(call)
    return native_kernels.missing(code, sums_library.SOURCE)


def cuda_refusal(call: Call) -> str | None:
    """Why the Triton kernels do not run a call that the C++ kernel would, or None."""
    code, features = native.code_of(call.bound.link), feature_map(call.bound.link)
    if code is None or not code.triton:
        return f"link {type(call.bound.link).__name__} has no Triton functions"
    if features is not None and features.degree > 2:
        return f"on CUDA powers of the score up to 2 are in it, link {type(call.bound.link).__name__} has {features.degree}"
    if max(call.shape[4:]) > native.LARGEST:
        return (
            f"key and value dimensions must be 1 to {native.LARGEST}, this call has {call.shape[4]} and {call.shape[5]}"
        )
    return None if native.has_triton() else "triton is not installed (pip install triton)"


def chunked(call: Call, memory: FeatureSums | DecayedSums | None) -> tuple[Tensor, Memory | None]:
    """y (B, H, T, P) for a call that is not refused, and what follows ``memory``. Raises: BuildError when the kernel does not compile.

    A row of a positive link with the row anchor whose sum over features nearly vanishes is summed key by key, or is NaN where too little of what
    a memory brought is left (``sums_library.forward``).
    """
    if isinstance(memory, FeatureSums) and call.chunk is not None:
        return _by_chunks(call, memory)
    y, final = _run(call, memory, None)
    if memory is None:
        return y, None
    return y, carried(memory, final, Tokens(*_given(call), call.visibility.key_mask, call.log_decay))


def _by_chunks(call: Call, memory: FeatureSums) -> tuple[Tensor, Memory]:
    """With a memory whose last tokens wait for their chunk to end: they come before the call's, and what is left over waits again."""
    assert call.chunk is not None
    new, earlier = Tokens(call.k, call.v, call.visibility.key_mask, None, call.key_bias), memory.committed()
    if new.length == 0:
        return _run(call, earlier, None)[0], memory
    tokens = joined(memory.pending, new)
    whole = tokens.length // call.chunk * call.chunk
    priors = tuple(prior for prior in call.bound.priors if isinstance(prior, ChunkCausal))
    seen = visibility(
        call.q.shape[2],
        tokens.length,
        priors,
        causal=True,
        include_self=call.include_self,
        key_padding_mask=tokens.mask,
    )
    y, final = _run(call, earlier, (tokens.span(0, whole), seen))
    after = carried(earlier, final, tokens)
    assert isinstance(after, FeatureSums)
    return y, replace(
        after, pending=tokens.span(whole, tokens.length).map(torch.clone) if whole < tokens.length else None
    )


def _given(call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values, as they came where they did."""
    return (call.k, call.v) if call.raw is None else (call.raw.k, call.raw.v)


def _run(
    call: Call, memory: FeatureSums | DecayedSums | None, placed: tuple[Tokens, Visibility] | None
) -> tuple[Tensor, Tensor]:
    """y, and the state after the last key where there is a memory. placed: prepared keys and who sees them, in place of the call's own."""
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
    key_bias = call.key_bias
    if placed is not None:
        fused, q, (k, v, _, _, key_bias), seen = Fused(False, 0.0, 1.0), call.q, placed[0], placed[1]
    spec = _spec(call, code, features, fused, memory is not None)
    initial = None if memory is None or memory.count == 0 else memory.state
    before = None if initial is None or memory is None else memory.real.double()
    mask = None if seen.key_mask is None else seen.key_mask[:, : k.shape[2]]
    scale = (
        fused.scale
        if isinstance(fused.scale, Tensor)
        else torch.full((heads,), fused.scale, device=q.device, dtype=torch.float32)
    )
    if call.shared is not None and call.raw is not None and q is call.raw.q and not scale.requires_grad:
        q, k = call.shared
    given = (q, k, v, scale, initial, call.log_decay, key_bias, call.coefficients)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if not tracked and not transforms.active() and native.plain(q, k, v):
        y, _, final, _ = sums_library.forward(
            q,
            k,
            v,
            scale,
            *_numbers(call, code),
            places_of(seen, k.shape[2]),
            initial,
            before,
            call.log_decay,
            key_bias,
            spec,
        )
    else:
        y, _, final, _ = sums_ops.feature_sums(
            q, k, v, scale, *_numbers(call, code), initial, call.log_decay, key_bias, mask, seen.lo, seen.hi,
            seen.segment_start if seen.packed else None, before, sums_ops.encode(spec), call.coefficients.shape[0],
        )  # fmt: skip
    return call.scaled(y), final


def _numbers(call: Call, code: Formula) -> tuple[Tensor, Tensor]:
    """What the link's formula reads, (H, n), and the coefficients of its powers, (H, degree + 1)."""
    heads, link = call.shape[1], call.bound.link
    rows = call.coefficients.flatten(1).T.expand(heads, -1)
    if code.constants:
        rows = torch.cat([rows, rows.new_tensor(code.constants).expand(heads, -1)], 1)
    return rows, link.monomials(call.coefficients).to(rows).flatten(1).T.expand(heads, -1)


def _spec(call: Call, code: Formula, features: SymmetricPowers, fused: Fused, keeps: bool) -> SumsSpec:
    anchor = call.bound.anchor
    kind = "row" if anchor.normalises else "count" if isinstance(anchor, Count) else "raw"  # type: ignore[attr-defined]
    return SumsSpec(code, features.degree, features.lowest, kind, fused.normalise, fused.eps, keeps, call.tags.positive)


def places_of(seen: Visibility, keys: int) -> Places:
    """Who sees whom of the first ``keys``; kept from call to call where it follows from the call's shape."""
    if seen.key_mask is None and seen.rule is not None:
        return _kept_places(seen.rule, keys)
    mask = None if seen.key_mask is None else seen.key_mask[:, :keys]
    return sums_library.places(mask, seen.lo, seen.hi, seen.segment_start if seen.packed else None, keys)


@functools.lru_cache(maxsize=8)
def _kept_places(rule: Rule, keys: int) -> Places:
    found = intervals_of(*rule)
    return sums_library.places(None, found.lo, found.hi, None, keys)


def runner(call: Call) -> Runner | None:
    """The kernel for q, k and v like those of a call that is not refused, as long as its operator stays as it is; None where there is more to do."""
    bound, raw = call.bound, call.raw
    fused = None if raw is None else bound.score.fused(call.shape[4], bound.score_params, raw.scale)
    if (
        raw is None
        or fused is None
        or call.log_decay is not None
        or bound.anchor.output_scale(bound.anchor_params, bound.heads) is not None
    ):
        return None
    code, features = native.code_of(bound.link), feature_map(bound.link)
    assert code is not None
    assert features is not None
    scale = (
        fused.scale.float().contiguous()
        if isinstance(fused.scale, Tensor)
        else torch.full((bound.heads,), fused.scale, dtype=torch.float32)
    )
    rows, monomials = (x.float().contiguous() for x in _numbers(call, code))
    seen, spec = places_of(call.visibility, raw.k.shape[2]), _spec(call, code, features, fused, False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        if os.environ.get(native_kernels.VARIABLE) == "off":
            return None
        return sums_library.forward(q, k, v, scale, rows, monomials, seen, None, None, None, None, spec)[0]

    return run


__all__ = ["chunked", "cuda_refusal", "places_of", "refusal", "runner"]
