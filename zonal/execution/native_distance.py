"""The tiled path of distance scores by a compiled kernel, C++ on the CPU and Triton on CUDA: which calls it takes, and how a call becomes one."""

import torch
from torch import Tensor

from zonal.algebra.anchor import Count, Raw, Row
from zonal.algebra.link import Link, Oscillatory
from zonal.execution import native
from zonal.execution.call import Call
from zonal.kernels import distance_ops, transforms
from zonal.kernels import native as native_kernels
from zonal.kernels.cpp import distance_library
from zonal.kernels.distance_spec import TERMS, WAVES, DistanceSpec


def refusal(call: Call) -> str | None:
    """Why the distance kernel does not run a call, or None."""
    reason = unfit(call)
    if reason is not None:
        return reason
    if call.device.type == "cuda":
        return cuda_refusal()
    return native_kernels.missing(distance_library.CODE, distance_library.source())


def cuda_refusal() -> str | None:
    """Why there are no Triton kernels, or None."""
    return None if native.has_triton() else "triton is not installed (pip install triton)"


def unfit(call: Call) -> str | None:
    """What of a call no kernel for distances takes, or None."""
    reason = native_kernels.unfit(call.device.type, call.coefficients.dtype)
    if reason is not None:
        return reason
    score, link = call.bound.score, call.bound.link
    dim, value_dim = call.shape[4:]
    if call.raw is None:  # prepared queries have their weights in front
        dim = call.k.shape[3]
    if min(dim, value_dim) < 1 or max(dim, value_dim) > native.LARGEST:
        return f"key and value dimensions must be 1 to {native.LARGEST}, this call has {dim} and {value_dim}"
    terms = score.terms(dim)
    if terms is None:
        metric = getattr(score, "metric", score)
        return f"score {type(score).__name__} with {type(metric).__name__} is no sum of plane, spherical and hyperbolic distances"
    if len(terms) > TERMS:
        return f"a sum of at most {TERMS} distances is in it, this one has {len(terms)}"
    waves = _waves(link)
    if waves is None or waves > WAVES:
        return f"link {type(link).__name__} is not in it (Exp is, and Oscillatory of up to {WAVES} waves)"
    if type(call.bound.anchor) not in (Row, Count, Raw):
        return f"anchor {type(call.bound.anchor).__name__} is not in it"
    if not call.bias.empty:
        return "log priors (decay, ALiBi, key biases) are not in it"
    if transforms.active():
        return "a call that is transformed needs operations of torch"
    return None


def _waves(link: Link) -> int | None:
    """How many waves a link has: 0 for exp, None where it is something else."""
    if type(link) is Oscillatory:
        return len(link.amplitudes)
    code = native.code_of(link)
    return 0 if code is not None and code.log and not code.cpp_value and code.domain is None else None


def tiled(call: Call) -> Tensor:
    """y (B, H, T, P) before the anchor's factor a head, for a call that is not refused. Raises: BuildError when the kernel does not compile."""
    bound, seen = call.bound, call.visibility
    if call.raw is None:
        q, k, v = call.tokens
        scale = None
    else:
        q, k, v, scale = call.raw
        k = bound.score.prepare_key(k, bound.score_params)
        q = q.to(call.coefficients.dtype)
    weights, q = bound.score.weighed(q, bound.score_params, k.shape[3], scale, prepared=call.raw is None)
    terms, waves = bound.score.terms(k.shape[3]), _waves(bound.link)
    assert terms is not None
    assert waves is not None
    weights = weights.expand(*q.shape[:3], -1)
    coefficients = call.coefficients.flatten(1).T.expand(q.shape[1], -1)
    spec = DistanceSpec(native.rules(call, distance_library.CODE), terms, waves)
    edges = None if seen.edges is None or not seen.packed else seen.edges.to(q.device)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, weights, coefficients))
    if not recorded and native.plain(q, k, v):
        return distance_library.forward(q, k, v, weights, coefficients, seen.key_mask, edges, spec)[0]
    return distance_ops.distance(
        q, k, v, weights, coefficients, seen.key_mask, edges, distance_ops.encode(spec), coefficients.requires_grad
    )[0]


__all__ = ["refusal", "tiled"]
