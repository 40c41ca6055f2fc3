"""Base class of links.

A link is evaluated on tiles. ``value(x, c)`` and ``derivative(x, c)`` are elementwise in x and take the coefficients c,
a tensor (n, H, 1, 1) made once per call from the parameters. A polynomial link gives its ``degree`` and its
coefficients of powers of x (``monomials``). Exact features, the chunked path and memories of constant size follow from
these.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from zonal.algebra.declaration import Declaration, of_library, require
from zonal.algebra.score import Params
from zonal.formula import Formula

NO_COEFFICIENTS = torch.zeros(0, 1, 1, 1, dtype=torch.float64)


class Link(Declaration, abstract=True):
    """Base of links: evidence l(x) of scores x (B, H, T, S), elementwise. A subclass gives at least ``value``.

    domain: where l is defined, None = everywhere. log_space: l(x) = exp(x), of which kernels keep the logarithm, x;
    for ``Exp`` alone. linear: l(x) = x.
    positive: whether l(x) >= 0 on the whole domain. degree: that of the polynomial, None when l is none.
    lowest_degree: the smallest power of x that the polynomial may have. operations: elementwise passes over a tile for
    one evaluation, for the planner. formula: the link as C++ and Triton expressions for the compiled kernels, None =
    torch's tiles run it.
    """

    slot = "link"
    reserved = ("log_space",)
    domain: ClassVar[tuple[float, float] | None] = None
    log_space: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    """Whether values per head are spread over any number of heads; else one number must divide the other."""
    positive: ClassVar[bool] = False
    degree: ClassVar[int | None] = None
    lowest_degree: ClassVar[int] = 0
    operations: ClassVar[int] = 1
    formula: ClassVar[Formula | None] = None

    @property
    def fixed_degree(self) -> bool:
        """Whether the degree is not learned. A learned one has no gradient through features of harmonics."""
        return True

    def sized(self, dim: int) -> "Link":
        """The link for heads of ``dim`` numbers, with open sizes filled in."""
        return self

    def spread(self, heads: int) -> "Link":
        """This link, with its values per head spread over ``heads`` heads where the numbers do not divide."""
        return self

    def indefinite_reason(self, unit: bool, dim: int | None) -> str | None:
        """Why l(x) of inner products x of keys may have negative eigenvalues, in words; None if it never has.

        unit: keys have length one. dim: size of a key, None = not known yet.
        """
        return f"link {type(self).__name__} is not known to keep inner products positive definite"

    def indefinite_reason_of_distance(self) -> str | None:
        """As ``indefinite_reason``, where x is minus a distance of negative type."""
        return f"link {type(self).__name__} of a distance need be none; use link.Exp()"

    def coefficients(self, params: Params) -> Tensor:
        """Coefficients (n, H, 1, 1) in float64, differentiable in the parameters."""
        return NO_COEFFICIENTS

    def monomials(self, c: Tensor) -> Tensor:
        """Coefficients of x^0, x^1, … as (degree + 1, H, 1, 1), for polynomial links."""
        raise NotImplementedError(f"{type(self).__name__} is not a polynomial")

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        """l(x), elementwise, of the type of x. x is not changed."""
        raise NotImplementedError(f"{type(self).__name__}.value")

    def at(self, x: Tensor) -> Tensor:
        """l(x) at x of any shape, for a link with nothing learned."""
        return self.value(x.reshape(1, 1, 1, -1), self.coefficients({}).to(x)).reshape(x.shape)

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        """l'(x), elementwise; by autograd where a link writes none."""
        return _gradient(self.value, x, c, torch.ones_like(x))[0]

    def coefficient_vjp(self, x: Tensor, grad: Tensor, c: Tensor) -> Tensor:
        """The gradient of sum(grad * value(x, c)) with respect to c, in float64. The default uses autograd."""
        if not c.numel():
            return torch.zeros(0, 1, 1, 1, dtype=torch.float64, device=x.device)
        return _gradient(self.value, x, c, grad)[1].double()

    # The same three for tiles of one shape after another, without a graph. The last argument is a buffer of x's shape.
    # It may be used and returned: a fresh buffer for each tile costs more than the arithmetic. Overriding is optional.

    def value_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return self.value(x, c)

    def derivative_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return self.derivative(x, c)

    def coefficient_vjp_into(self, x: Tensor, grad: Tensor, c: Tensor, spare: Tensor) -> Tensor:
        return self.coefficient_vjp(x, grad, c)


def require_consistent(link: Link, params: Params) -> None:
    """Raise ArgumentError unless a user's link is what it says, at points of its domain. Some paths use the ``value``,
    others its ``derivative`` or ``monomials``.
    """
    if of_library(type(link)) or torch.compiler.is_compiling():
        return
    name, c = type(link).__name__, link.coefficients(params).detach()
    if c.device.type == "meta":
        return
    x = _points(link, c)
    given = x.clone()
    value = link.value(given, c)
    require(torch.equal(given, x), f"{name}.value: the scores were changed in place. Return new ones.")
    require(
        value.shape == x.shape and value.dtype == x.dtype,
        f"{name}.value: one number for each score, of its type, was required: {tuple(x.shape)} of {x.dtype}. Received "
        f"{tuple(value.shape)} of {value.dtype}. Compute elementwise, and convert constants with .to(x).",
    )
    require(
        not link.positive or not bool((value < 0).any()),
        f"{name}: positive = True requires l(x) >= 0, received {float(value.min()):.3g}. Leave it out.",
    )
    if link.degree is not None:
        _require_equal(f"{name}: value must be the polynomial of monomials", value, _polynomial(link, x, c))
    if torch.is_inference_mode_enabled():  # no derivatives there
        return
    ones = torch.ones_like(x)
    slope, by_coefficients = _gradient(link.value, x, c, ones)
    _require_equal(f"{name}: derivative must be that of value by autograd", link.derivative(x, c), slope)
    if c.numel():
        found = link.coefficient_vjp(x, ones, c)
        _require_equal(f"{name}: coefficient_vjp must be that of value by autograd", found, by_coefficients)


def _points(link: Link, c: Tensor) -> Tensor:
    """Scores (1, H, 1, 14) within the domain, around 0 if they may be. An even number, so that none is a kink at the
    middle; none is an end, where a slope may be infinite.
    """
    low, high = link.domain or (-1.0, 1.0)
    low, high = max(low, min(-1.0, high - 2)), min(high, max(1.0, low + 2))
    points = torch.linspace(low, high, 16, dtype=c.dtype, device=c.device)[1:-1]
    return points.repeat(1, max(1, c.shape[1]), 1, 1)


def _polynomial(link: Link, x: Tensor, c: Tensor) -> Tensor:
    """What a user's ``monomials`` make of scores x. Raises: ArgumentError for another number of them."""
    assert link.degree is not None
    found, size = link.monomials(c), (link.degree + 1, x.shape[1], 1, 1)
    require(
        tuple(found.shape) in (size, (size[0], 1, 1, 1)),
        f"{type(link).__name__}.monomials: the coefficients of x^0 to x^{link.degree}, {size}, were required, received "
        f"{tuple(found.shape)}.",
    )
    return torch.stack([row * x**power for power, row in enumerate(found)]).sum(0)


def _require_equal(what: str, found: Tensor, exact: Tensor) -> None:
    """Raise ArgumentError for numbers that differ by more than rounding. Where one is not finite, at a pole or outside
    of what a link is defined on, nothing is asked.
    """
    apart = (found - exact).abs().nan_to_num(0.0, posinf=0.0)
    near = apart <= 1e-6 * (1 + exact.abs().nan_to_num())
    require(bool(near.all()), f"{what}, received values {float(apart.max()):.3g} apart. Correct one of the two.")


def _gradient(value: Callable[[Tensor, Tensor], Tensor], x: Tensor, c: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of sum(grad * value(x, c)) with respect to x and c."""
    with torch.enable_grad():
        inputs = x.detach().requires_grad_(), c.detach().requires_grad_()
        found = value(*inputs)
    if not found.requires_grad:  # a constant
        return tuple(torch.zeros_like(each) for each in inputs)
    return torch.autograd.grad(found, inputs, grad.expand(found.shape), allow_unused=True, materialize_grads=True)


__all__ = ["NO_COEFFICIENTS", "Link", "require_consistent"]
