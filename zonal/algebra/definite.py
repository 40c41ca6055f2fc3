"""Whether the kernel among keys is positive definite, which anchors that solve stand on: with a ridge it can then always be inverted, and the fit exists."""

from zonal.algebra.link import Exp, Gegenbauer, Identity, Link, Oscillatory, PolynomialSquare, SquaredAffine, Yat
from zonal.algebra.metric import (
    Euclidean,
    FisherRao,
    HilbertSchmidt,
    Hyperbolic,
    Metric,
    Product,
    Sphere,
    SquaredEuclidean,
)
from zonal.algebra.score import Categorical, Cosine, Dot, NegativeDistance, OperatorPath, Score

_KINDS = (Euclidean, SquaredEuclidean, Sphere, Hyperbolic, HilbertSchmidt, FisherRao)


def indefinite_reason(score: Score, link: Link, dim: int | None) -> str | None:
    """Why l(S) among keys may have negative eigenvalues, for people, or None when it cannot. dim: numbers of a key, None = not known yet."""
    if isinstance(score, NegativeDistance):
        return _of_distance(score, link)
    if not score.bilinear or isinstance(score, OperatorPath) or (isinstance(score, Categorical) and score.relation):
        return f"score {type(score).__name__} among keys need not be symmetric"
    if isinstance(score, Dot) and score.scale is not None and score.scale <= 0:
        return f"score Dot(scale={score.scale:g}) among keys is the negative of an inner product; use a scale > 0"
    return _of_link(link, isinstance(score, Cosine), dim)


def _of_distance(score: NegativeDistance, link: Link) -> str | None:
    if isinstance(link, Identity):
        return "a bare distance is none; use link.Exp()"
    if not isinstance(link, Exp):
        return f"link {type(link).__name__} of a distance need be none; use link.Exp()"
    kinds = [type(part).__name__ for part in _parts(score.metric) if not isinstance(part, _KINDS)]
    if kinds:
        return f"exp(-d) is one for distances of negative type ({', '.join(kind.__name__ for kind in _KINDS)}), which {kinds[0]} need not be"
    if isinstance(score.metric, Product) and score.metric.adaptive:
        return "a product whose weights each query chooses gives keys an unsymmetric kernel; use adaptive=False"
    return "a dot product beside the distance may be subtracted" if score.dot is not None and score.dot < 0 else None


def _parts(metric: Metric) -> tuple[Metric, ...]:
    return tuple(part for own in metric.factors for part in _parts(own)) if isinstance(metric, Product) else (metric,)


def _of_link(link: Link, unit: bool, dim: int | None) -> str | None:
    """The same of a link over inner products, of unit vectors where ``unit``."""
    if isinstance(link, Exp | Identity | Yat):
        return None  # power series with coefficients >= 0, and the identity
    if isinstance(link, SquaredAffine):
        return _of_square(link)
    if isinstance(link, PolynomialSquare):
        return _of_polynomial(link)
    if isinstance(link, Gegenbauer):
        return _of_harmonics(link, unit, dim)
    if isinstance(link, Oscillatory):
        return "link Oscillatory swings, and is positive definite for no more than some numbers; use link.Exp()"
    return f"link {type(link).__name__} is not known to keep inner products positive definite"


def _of_square(link: SquaredAffine) -> str | None:
    if link.learn_bias:
        return "link SquaredAffine(learn_bias=True) may learn b < 0, and (x + b)^2 then has the part 2 b x; fix b >= 0, or learn link.Gegenbauer(degrees=(2.0,), nonnegative=True)"
    return (
        f"link SquaredAffine(bias={link.bias:g}) has the part 2 b x with b < 0; use bias >= 0"
        if link.bias < 0
        else None
    )


def _of_polynomial(link: PolynomialSquare) -> str | None:
    if link.learn:
        return "link PolynomialSquare(learn=True) may learn coefficients of any sign; use learn=False, or learn link.Gegenbauer(nonnegative=True)"
    found = link.monomials(link.coefficients({})).flatten().tolist()
    bad = next((k for k, c in enumerate(found) if c < 0), None)
    return (
        None
        if bad is None
        else f"link PolynomialSquare{link.polynomial} has the part {found[bad]:g} x^{bad}, a negative power; use coefficients whose square has none"
    )


def _of_harmonics(link: Gegenbauer, unit: bool, dim: int | None) -> str | None:
    if not unit:
        return "link Gegenbauer is positive definite on unit vectors; use score.Cosine()"
    if link.learn_weights and not link.nonnegative:
        return "link Gegenbauer may learn weights of any sign, and a negative weight w_k makes its harmonics negative; use Gegenbauer(nonnegative=True)"
    if dim is not None and link.manifold_dim != "head" and dim > link.manifold_dim + 1:
        return (
            f"link Gegenbauer(manifold_dim={link.manifold_dim}) is positive definite for keys of at most manifold_dim + 1 = {link.manifold_dim + 1} numbers, these have {dim}; "
            f"use manifold_dim >= {dim - 1}"
        )
    return None


__all__ = ["indefinite_reason"]
