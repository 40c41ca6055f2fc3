"""The chunked path of sums over features by a compiled kernel (C++ or Triton): which calls it takes, and how."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zonal.algebra.link import Link
from zonal.algebra.prior import Rule, Visibility, intervals_of
from zonal.algebra.score import Fused
from zonal.execution.call import Call, Prepared, Result
from zonal.execution.paths import tile
from zonal.execution.paths.features import layers_of, made_by
from zonal.features import SymmetricPowers
from zonal.features.serve import powers_of
from zonal.formula import Formula
from zonal.kernels.native import Reason, switched_off
from zonal.kernels.op import Op, Results, plain
from zonal.kernels.sums import FAMILY, Places, SumsInputs, SumsSpec, places, prepared, summed, sums
from zonal.memory import DecayedSums, FeatureSums, Memory, Tokens
from zonal.memory.sums import carried
from zonal.memory.tokens import joined
from zonal.tracing import concrete, recorded

Runner = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""y of q, k and v, or None where the environment has switched kernels off since it was made."""


def refusal(call: Call) -> Reason:
    """Why torch's scan runs instead of the kernel, or None."""
    if call.memory is not None and call.memory.form.statistics != torch.float32:
        return "the kernel carries sums in float32, and this memory has others"
    code = tile.code_of(call.bound.link)
    return FAMILY.refusal(
        call.device.type,
        call.coefficients.dtype,
        lambda: _unfit(call, code),
        cuda=lambda: cuda_refusal(call),
        code=code,
    )


def _unfit(call: Call, code: Formula | None) -> Reason:
    reason = tile.missing_formula(call.bound, code, call.device.type) or tile.other_anchor(call)
    if reason is not None:
        return reason
    if call.bound.slopes is not None:
        return "a bias that falls with the distance (ALiBi) is not in it"
    if call.held is not None and call.held.kind not in ("features", "decayed"):
        return f"a memory of kind {call.held.kind!r} is not in it"
    return tile.empty_rows(call)


def cuda_refusal(call: Call) -> Reason:
    """Why the Triton kernels do not run a call that the C++ kernel would, or None."""
    link = call.bound.link
    if (reason := tile.without_triton(link, tile.code_of(link))) is not None:
        return reason
    if (degree := powers_of(link).degree) > 2:
        return f"on CUDA powers of the score up to 2 are in it, link {type(link).__name__} has {degree}"
    return tile.too_wide(call.shape.dim, call.shape.value_dim)


def chunked(call: Call) -> Result:
    """y (B, H, T, P) for a call that is not refused, and the memory after its tokens where it goes on from one.

    With a positive link and the row anchor, a row whose sum over features nearly vanishes is summed key by key. It is
    NaN where too little of a memory's part is left (``summed``).

    Raises: BuildError when the kernel does not compile.
    """
    memory = call.memory
    assert memory is None or isinstance(memory, FeatureSums | DecayedSums)
    if isinstance(memory, FeatureSums) and call.chunk is not None:
        return _by_chunks(call, memory)
    y, final = _run(call, memory)
    if memory is None:
        return y, None
    return y, carried(memory, final, Tokens(*call.given[1:], call.visibility.key_mask, call.log_decay))


def _by_chunks(call: Call, memory: FeatureSums) -> tuple[Tensor, Memory]:
    """With a memory whose last tokens wait for their chunk to end. They come first, and the remainder waits again."""
    assert call.chunk is not None
    new, earlier = call.new_tokens, memory.committed()
    if new.length == 0:
        return _run(call, earlier)[0], memory
    tokens = joined(memory.pending, new)
    whole = tokens.length // call.chunk * call.chunk
    done, rest = tokens.span(0, whole), tokens.span(whole, tokens.length).map(torch.clone)
    seen = call.seen(call.q.shape[2], tokens.length, tokens.mask)
    prepared = Prepared(call.q, done.k, done.v)
    y, final = _run(replace(call, raw=None, prepared=prepared, visibility=seen, key_bias=done.key_bias), earlier)
    after = carried(earlier, final, tokens)
    assert isinstance(after, FeatureSums)
    return y, replace(after, pending=rest if rest.length else None)


def _run(call: Call, memory: FeatureSums | DecayedSums | None) -> tuple[Tensor, Tensor]:
    """y, and with a memory the state after the last key."""
    raw, fused = call.raw, call.fused
    code, features = known(call.bound.link)
    spec = _spec(call, code, features, fused or Fused(), memory is not None)
    scale = tile.scale_of(fused or Fused(), call.shape.heads, call.device)
    if fused is not None and raw is not None:
        q, k, v = raw[:3]
        if raw.shared is not None and not scale.requires_grad:
            q, k = raw.shared
    else:
        layers = layers_of(call)
        if layers is None or (layers[0].left and not features.trivial):
            q, k, v = call.tokens
        else:
            q, k, v = made_by(layers, call)
            spec = replace(spec, left=layers[0].left, nodes=layers[0].nodes)
    initial = None if memory is None or memory.count == 0 else memory.state
    before = None if initial is None or memory is None else memory.real.double()
    given = SumsInputs(q, k, v, scale, *link_numbers(call, code), initial, before, call.log_decay, call.key_bias)
    y, _, final, _ = run_kernel(sums, summed, given, call.visibility, spec)
    return call.scaled(y), final


def run_kernel(op: Op, read: Callable[[Any, Places, Any], Results], given: Any, seen: Visibility, spec: Any) -> Results:
    """The results of sums or ridge read-outs. given: all inputs but who sees whom, which is ``seen``. read: the same
    without torch's operator.
    """
    keys = given.k.shape[2]
    if plain(given) and not recorded(given):
        return read(given, places_of(seen, keys), spec)
    mask = None if seen.key_mask is None else seen.key_mask[:, :keys]
    start = seen.segment_start if seen.packed else None
    return op(given._replace(key_mask=mask, lo=seen.lo, hi=seen.hi, segment_start=start), spec)


def known(link: Link) -> tuple[Formula, SymmetricPowers]:
    """The formula and the features of a link that is not refused."""
    code = tile.code_of(link)
    assert code is not None
    return code, powers_of(link)


def link_numbers(call: Call, code: Formula) -> tuple[Tensor, Tensor]:
    """What the link's formula reads, (H, n), and the coefficients of its powers, (H, degree + 1)."""
    rows = tile.rows_of(call, code)
    return rows, call.bound.link.monomials(call.coefficients).to(rows).flatten(1).T.expand(call.shape.heads, -1)


def _spec(call: Call, code: Formula, features: SymmetricPowers, fused: Fused, keeps: bool) -> SumsSpec:
    kind, positive, learned = tile.kind_of(call), call.tags.positive, call.coefficients.shape[0]
    return SumsSpec(code, features.degree, features.lowest, kind, fused.normalise, keeps, positive, learned)


def places_of(seen: Visibility, keys: int) -> Places:
    """Which of the first ``keys`` each query sees. Cached where it follows from the shape of the call."""
    if seen.key_mask is None and seen.rule is not None:
        return _kept_places(seen.rule, keys)
    mask = None if seen.key_mask is None else seen.key_mask[:, :keys]
    return places(mask, seen.lo, seen.hi, seen.segment_start if seen.packed else None, keys)


@functools.lru_cache(maxsize=8)
def _kept_places(rule: Rule, keys: int) -> Places:
    with concrete():
        found = intervals_of(*rule)
        return places(None, found.lo, found.hi, None, keys)


def runner(call: Call) -> Runner | None:
    """The kernel for q, k and v like those of a call that is not refused, while its operator stays as it is.

    None when a call needs more than the kernel.
    """
    bound, raw, fused = call.bound, call.raw, call.fused
    if (
        raw is None
        or fused is None
        or call.log_decay is not None
        or bound.anchor.output_scale(bound.anchor_params, bound.heads) is not None
    ):
        return None
    code, features = known(bound.link)
    scale = tile.scale_of(fused, bound.heads, call.device).float().contiguous()
    rows, monomials = (x.float().contiguous() for x in link_numbers(call, code))
    seen, spec = places_of(call.visibility, raw.k.shape[2]), _spec(call, code, features, fused, False)
    run = prepared(SumsInputs(*raw[:3], scale, rows, monomials), seen, spec)
    return lambda q, k, v: None if switched_off() else run(q, k, v)[0]


__all__ = ["Runner", "chunked", "cuda_refusal", "known", "link_numbers", "places_of", "refusal", "run_kernel", "runner"]
