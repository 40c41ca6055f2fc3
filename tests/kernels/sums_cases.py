"""Operators with sums over features, and the comparison that the tests of their compiled kernel share."""

from collections.abc import Callable

import torch
from matrix import OPERATORS
from torch import Tensor

from zonal import Operator, anchor, link, prior, score
from zonal import mechanisms as m

KINDS: dict[str, Callable[[], Operator]] = {
    **OPERATORS,
    "squared_affine-count": lambda: m.squared_affine(learn_bias=True).replace(anchor=anchor.Count()),
    "squared_affine-raw": lambda: m.squared_affine().replace(anchor=anchor.Raw()),
    "squared_affine-strict": lambda: m.squared_affine().replace(prior=prior.Causal(include_self=False)),
    "squared_affine-chunk": lambda: m.squared_affine().replace(prior=prior.ChunkCausal(24)),
    "sko-1": lambda: m.sko(degrees=(1.0,), manifold_dim=4),
    "sko-3": lambda: m.sko(degrees=(3.0, 2.0), manifold_dim=4),
    "degree-6": lambda: Operator(
        score.Cosine(learn_temperature=True),
        link.PolynomialSquare((0.2, 0.5, 0.3, 0.4), floor=0.01, learn=True),
        anchor.Row(),
    ),
    "squared_affine-decay": lambda: m.squared_affine(learn_bias=True).replace(prior=prior.Decay((0.9, 0.99))),
    "squared_affine-decay-count": lambda: m.squared_affine().replace(
        prior=(prior.Decay((0.7,)), prior.Causal(include_self=False)), anchor=anchor.Count()
    ),
    "identity-count": lambda: Operator(score.Dot(), link.Identity(), anchor.Count()),
    "linear-relu": lambda: Operator(score.Dot(map="relu"), link.Identity(), anchor.Row(allow_signed=True)),
}


def assert_as_good(
    got: list[Tensor], other: list[Tensor], truth: list[Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """At most twice the error of another run in the same precision, and a floor of rounding (gradients may cancel)."""
    for index, (a, b, t) in enumerate(zip(got, other, truth, strict=True)):
        assert a.dtype == b.dtype
        assert torch.isfinite(a).all()
        if not t.numel():
            continue
        size = max(1.0, t.abs().max().item())
        error, allowed = (a.double() - t).abs().max().item(), (b.double() - t).abs().max().item()
        floor = (
            (64 if index else 16)
            * torch.finfo(torch.float32).eps
            * size
            * (got[0][..., 0].numel() ** 0.5 if index > 3 else 1)
        )
        floor += 0 if dtype == torch.float32 else torch.finfo(dtype).eps * size
        assert error <= 2 * allowed + floor, f"item {index}: error {error:.3g}, torch {allowed:.3g}, size {size:.3g}"
