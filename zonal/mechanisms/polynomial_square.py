"""Polynomial-square attention: K = p(x)^2 + c, x = cos(q, k), rows divided by their sum.

It has m exact features, C(D + n, n) for degree n. Cost: T m P per head; decoder memory: m (P + 1) numbers per head.
The recommended forms follow from measurements on SLAY (docs/slay.md).
"""

import math
from typing import Literal

from torch import Tensor
from torch.nn.functional import normalize

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.declaration import require, require_one_of
from zonal.algebra.link import PolynomialSquare, Yat
from zonal.algebra.score import Cosine
from zonal.features import SquareFit, fit_square, row_weights
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Polynomial square",
    "the square of a polynomial of the cosine; constant memory for short keys.",
    weights="$p(x)^2 + c$ over row sum",
    memory="$m(P + 1)$, $m$ features",
    paths="tiled, chunked",
)
def polynomial_square(
    coefficients: tuple[float, ...] | None = None,
    floor: float = 0.0,
    learn: bool = False,
    degree: int | None = None,
    eps: float = 1.0,
    d_qk: int | None = None,
    fit: Literal["density", "data"] = "density",
    data: tuple[Tensor, Tensor] | None = None,
) -> Operator:
    """p(x)^2 + floor with p(x) = sum_k coefficients[k] x^k: nonnegative by construction.

    Give coefficients, (0.1, 0.3, 1) by default, or ``degree`` (2, 4 or 6, the degree of the whole in x). With
    ``degree``, the polynomial and the floor are fitted to ``yat(eps)``: ``fit="density"`` fits on random unit vectors
    in R^d_qk (d_qk = 16 by default), and ``fit="data"`` on the causal rows of ``data`` = (q, k), (…, T, d) each.
    d_qk: size of queries and keys in a layer; the size of values is independent. A small d_qk has few features, C(d_qk
    + degree, degree). Recommended: ``degree=4, d_qk=8`` and ``degree=2, d_qk=16``; docs/slay.md has their errors.

    The operator's ``spec`` holds the fitted coefficients, so that a model can rebuild it.

    Raises: ArgumentError when both are given, for a degree that cannot be fitted, for eps <= 0, for data that are
    missing, and for data, an eps or a floor that would not be used.
    """
    require(
        0 < eps < math.inf,
        f"polynomial_square: eps must be > 0 (the kernel is unbounded at 0) and finite, received {eps}.",
    )
    require(
        d_qk is None or d_qk >= 2,
        f"polynomial_square: d_qk must be >= 2 (unit vectors of one number have no angle), received {d_qk}.",
    )
    require_one_of("polynomial_square: fit", fit, ("density", "data"))
    require(
        (fit == "data") == (data is not None),
        "polynomial_square: fit='data' and data=(q, k) go together. Pass both, or neither.",
    )
    require(
        data is None or degree is not None,
        "polynomial_square: data is what a polynomial of some degree is fitted to. Pass degree=2, 4 or 6.",
    )
    require(
        coefficients is None or degree is None,
        "polynomial_square: coefficients and degree were both given. Pass one of the two.",
    )
    require(
        degree is not None or eps == 1,
        f"polynomial_square: eps is of the Yat to which a degree is fitted, received eps={eps} without one. Pass "
        "degree=2, 4 or 6, or leave eps out.",
    )
    require(
        degree is None or floor == 0,
        f"polynomial_square: a fit finds its own floor, received floor={floor} with degree={degree}. Leave it out, or "
        "pass it with coefficients.",
    )
    if degree is not None:
        dim = 16 if d_qk is None else d_qk
        link = (fit_square(Yat(eps), degree, dim=dim) if data is None else _fitted_rows(Yat(eps), degree, data)).link
        # the last digits of a fit differ from process to process, and a declaration must not
        coefficients, floor = tuple(float(f"{c:.9g}") for c in link.polynomial), float(f"{link.floor:.9g}")
    elif coefficients is None:
        coefficients = (0.1, 0.3, 1.0)
    spec = None
    if degree is not None:
        spec = f"polynomial_square(coefficients={coefficients}, floor={floor}, learn={learn}, d_qk={d_qk})"
    return Operator(
        Cosine(),
        PolynomialSquare(polynomial=coefficients, floor=floor, learn=learn),
        Row(),
        name="polynomial_square",
        qk_dim=d_qk,
        spec=spec,
    )


def _fitted_rows(kernel: Yat, degree: int, data: tuple[Tensor, Tensor]) -> SquareFit:
    q, k = data
    require(
        q.ndim >= 2 and q.shape == k.shape and 0 not in q.shape,
        f"polynomial_square: data=(q, k) must be (…, tokens, dim) each, of one shape, received {tuple(q.shape)} and "
        f"{tuple(k.shape)}.",
    )
    # no normalised cosine leaves [-1, 1], but rounding does
    x = (normalize(q.detach().double(), dim=-1) @ normalize(k.detach().double(), dim=-1).mT).clamp(-1, 1)
    return fit_square(kernel, degree, angles=x, weights=row_weights(kernel, x))
