"""The tiled path of distance scores by a compiled kernel (C++ or Triton): which calls it takes, how they are passed."""

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra.link import Link, Oscillatory
from zonal.execution.call import Call
from zonal.execution.paths import tile
from zonal.kernels.distance import CODE, FAMILY, TERMS, WAVES, DistanceInputs, DistanceSpec, distance
from zonal.kernels.native import Reason


def refusal(call: Call) -> Reason:
    """Why the distance kernel does not run a call, or None."""
    return FAMILY.refusal(
        call.device.type, call.coefficients.dtype, lambda: unfit(call), cuda=lambda: cuda_refusal(call)
    )


def cuda_refusal(call: Call) -> Reason:
    """Why the Triton kernels do not run a call that the C++ kernel would, or None.

    Tiles of float32 are three tf32 products on the warp-group units of Hopper, as were those of a kernel for ridge
    read-outs that was wrong there; these have not run there. Gradients of oscillating scores were off by twice
    their largest entry there for points of 96 numbers, and are right in the interpreter.
    """
    if call.dtype == torch.float32:
        return "on CUDA it is for bfloat16 and float16"
    return "on CUDA oscillating scores are not in it" if _waves(call.bound.link) else None


def unfit(call: Call) -> Reason:
    """Why no kernel for distances takes a call, or None."""
    score, link = call.bound.score, call.bound.link
    # prepared queries have their weights in front
    dim = call.shape.dim if call.raw is not None else call.k.shape[3]
    if (reason := tile.too_wide(dim, call.shape.value_dim)) is not None:
        return reason
    terms = score.terms(dim)
    if terms is None:
        metric = type(getattr(score, "metric", score)).__name__
        return f"score {type(score).__name__} with {metric} is no sum of plane, spherical and hyperbolic distances"
    if len(terms) > TERMS:
        return f"a sum of at most {TERMS} distances is in it, this one has {len(terms)}"
    waves = _waves(link)
    if waves is None or waves > WAVES:
        return f"link {type(link).__name__} is not in it (Exp is, and Oscillatory of up to {WAVES} waves)"
    if (reason := tile.other_anchor(call)) is not None:
        return reason
    if call.biased:
        return "log priors (decay, ALiBi, key biases) are not in it"
    return torch_func.refusal()


def _waves(link: Link) -> int | None:
    """How many waves a link has: 0 for exp, None where it is something else."""
    if type(link) is Oscillatory:
        return len(link.amplitudes)
    code = tile.code_of(link)
    return 0 if code is not None and tile.exponential(code) and code.domain is None else None


def tiled(call: Call) -> Tensor:
    """y (B, H, T, P) for a call that is not refused.

    Raises: BuildError when the kernel does not compile.
    """
    bound, seen = call.bound, call.visibility
    if call.raw is None:
        q, k, v = call.tokens
        scale = None
    else:
        q, k, v, scale, _ = call.raw
        k = bound.score.prepare_key(k, bound.score_params)
        q = q.to(call.coefficients.dtype)
    weights, q = bound.score.weighed(q, bound.score_params, k.shape[3], scale, prepared=call.raw is None)
    terms, waves = bound.score.terms(k.shape[3]), _waves(bound.link)
    assert terms is not None
    assert waves is not None
    weights = weights.expand(*q.shape[:3], -1)
    coefficients = call.coefficients.flatten(1).T.expand(q.shape[1], -1)
    edges = None if seen.borders is None else seen.borders.to(q.device)
    inputs = DistanceInputs(q, k, v, weights, coefficients, seen.key_mask, edges)
    return call.scaled(distance(inputs, DistanceSpec(tile.rules(call, CODE), terms, waves))[0])


__all__ = ["cuda_refusal", "refusal", "tiled", "unfit"]
