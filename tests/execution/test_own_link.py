"""Links declared outside of the library, each in one class."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zonal
from zonal.algebra.link import Link
from zonal.formula import Formula
from zonal.kernels.build import SETS, file_name


@dataclass(frozen=True)
class Cubic(Link):
    """l(x) = 1.2 + x + x^3 / 6, at least 1/30 on [-1, 1]."""

    @property
    def positive(self) -> bool:
        return True

    @property
    def degree(self) -> int:
        return 3

    def monomials(self, c: Tensor) -> Tensor:
        return torch.tensor([1.2, 1.0, 0.0, 1 / 6], dtype=torch.float64).to(c).view(4, 1, 1, 1)

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return 1.2 + x + x**3 / 6

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return 1 + x.square() / 2


@dataclass(frozen=True)
class Cauchy(Link):
    """l(x) = 1 / (1 + a (1 - x)) with a learned a, and no derivative written by hand."""

    domain = (-1.0, 1.0)

    @property
    def positive(self) -> bool:
        return True

    def initial(self) -> dict[str, Tensor]:
        return {"sharpness": torch.tensor([4.0, 2.0])}

    def coefficients(self, params: dict[str, Tensor]) -> Tensor:
        return params["sharpness"].double().view(1, -1, 1, 1)

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return 1 / (1 + c[0] * (1 - x))


@dataclass(frozen=True)
class Square(Link):
    """l(x) = x^2, which says that it has no smaller power."""

    lowest_degree = 2

    @property
    def positive(self) -> bool:
        return True

    @property
    def degree(self) -> int:
        return 2

    def monomials(self, c: Tensor) -> Tensor:
        return torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).to(c).view(3, 1, 1, 1)

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return x.square()


def test_a_link_without_small_powers():
    operator = zonal.Operator(zonal.score.Dot(), Square(), zonal.anchor.Row())
    q, k, v = torch.randn(3, 1, 2, 40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = zonal.attention(q, k, v, operator, causal=True, path="dense")
    for path in ("auto", "tiled", "chunked", "streaming"):
        torch.testing.assert_close(zonal.attention(q, k, v, operator, causal=True, path=path), expected)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            [0.0, 0.0, 2.0],
            r"Other: value must be the polynomial of monomials, received values 0\.751 apart",
        ),
        ([0.0, 1.0], r"Other\.monomials: the coefficients of x\^0 to x\^2, \(3, 1, 1, 1\), were required"),
    ],
)
def test_monomials_are_the_value(numbers: list[float], message: str) -> None:
    """Sums of features took the one, and tiles the other, without a word."""

    @dataclass(frozen=True)
    class Other(Square):
        def monomials(self, c: Tensor) -> Tensor:
            return torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1, 1)

    with pytest.raises(zonal.errors.ArgumentError, match=message):
        zonal.Operator(zonal.score.Dot(), Other(), zonal.anchor.Row())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"derivative": lambda self, x, c: x}, r"Other: derivative must be that of value by autograd"),
        ({"value": lambda self, x, c: x.square().float()}, r"Other\.value: one number for each score, of its type"),
        (
            {"value": lambda self, x, c: x.square().mean(-1)},
            r"\(1, 1, 1, 14\) of torch\.float64\. Received \(1, 1",
        ),
        ({"value": lambda self, x, c: x.mul_(x)}, r"Other\.value: the scores were changed in place"),
        (
            {"value": lambda self, x, c: x**3, "degree": None},
            r"Other: positive = True requires l\(x\) >= 0",
        ),
    ],
)
def test_a_link_is_what_it_says(given: dict[str, Any], message: str) -> None:
    """Tiles use the derivative, the dense path does not: gradients were those of the path that ran."""
    other = dataclass(frozen=True)(type("Other", (Square,), given))
    with pytest.raises(zonal.errors.ArgumentError, match=message):
        zonal.Operator(zonal.score.Dot(), other(), zonal.anchor.Row())


def test_the_gradient_of_coefficients_is_that_of_the_value() -> None:
    def twice(self: Link, x: Tensor, grad: Tensor, c: Tensor) -> Tensor:
        return 2 * Link.coefficient_vjp(self, x, grad, c)

    other = dataclass(frozen=True)(type("Other", (Cauchy,), {"coefficient_vjp": twice}))
    with pytest.raises(zonal.errors.ArgumentError, match=r"Other: coefficient_vjp must be that of value"):
        zonal.Operator(zonal.score.Cosine(), other(), zonal.anchor.Row())


@dataclass(frozen=True)
class Root(Link):
    """The root of the distance to an end of the domain, where the slope is infinite."""

    end: float = 0.0
    factor: float = 1.0

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return (x - self.end).abs().sqrt()

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return self.factor * (x - self.end).sign() / (2 * self.value(x, c))


@pytest.mark.parametrize(
    ("end", "domain"), [(0.0, (0.0, float("inf"))), (0.0, (float("-inf"), 0.0)), (3.0, (3.0, 4.0)), (0.0, None)]
)
def test_a_link_is_asked_inside_of_its_domain(end: float, domain: tuple[float, float] | None) -> None:
    within = dataclass(frozen=True)(type("Within", (Root,), {"domain": domain}))
    assert zonal.Operator(zonal.score.Dot(), within(end), zonal.anchor.Row(allow_signed=True)).link == within(end)
    with pytest.raises(zonal.errors.ArgumentError, match=r"Within: derivative must be that of value by autograd"):
        zonal.Operator(zonal.score.Dot(), within(end, 1.01), zonal.anchor.Row(allow_signed=True))


def test_a_link_is_asked_in_inference_mode() -> None:
    """There is no derivative then; the rest is checked."""
    other = dataclass(frozen=True)(type("Other", (Square,), {"value": lambda self, x, c: 2 * x.square()}))
    with torch.inference_mode(), pytest.raises(zonal.errors.ArgumentError, match=r"Other: value must be the polynom"):
        zonal.Operator(zonal.score.Dot(), other(), zonal.anchor.Row())


OPERATOR = zonal.Operator(zonal.score.Cosine(), Cubic(), zonal.anchor.Row())


def answers(path: str, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, heads, 40, 5, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    y = zonal.attention(*leaves, OPERATOR, causal=True, path=path)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("path", ["tiled", "chunked", "streaming", "auto"])
def test_every_path_runs_it(path: str, dtype: torch.dtype) -> None:
    for a, b in zip(answers(path, dtype), answers("dense", torch.float64), strict=True):
        assert float((a.double() - b).abs().max()) <= (1e-10 if dtype == torch.float64 else 2e-5) * float(b.abs().max())


def test_its_memory_has_one_size() -> None:
    memory = zonal.Memory.empty(OPERATOR, batch=1, heads=2, key_dim=5, value_dim=5)
    assert memory.kind == "features"
    assert memory.bytes_at(10) == memory.bytes_at(100_000)


@pytest.mark.parametrize("path", ["tiled", "streaming"])
def test_a_link_of_a_value_alone(path: str) -> None:
    """Derivatives by x and by what is learned follow from the value."""
    operator = zonal.Operator(zonal.score.Cosine(), Cauchy(), zonal.anchor.Row())
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 2, 40, 5, generator=draw, dtype=torch.float64).requires_grad_() for _ in "qkv"]
    wanted = [*leaves, operator.learned_parts["link_sharpness"]]

    def gradients(path: str) -> list[Tensor]:
        y = zonal.attention(*leaves, operator, causal=True, path=path)
        return [y, *torch.autograd.grad(y.square().sum(), wanted)]

    for a, b in zip(gradients(path), gradients("dense"), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-10)


@dataclass(frozen=True)
class Even(Link):
    """l(x) = 1: the mean of the values."""

    positive = True

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return torch.ones_like(x)


def test_a_constant_link_has_gradients() -> None:
    """They failed with torch's own error."""
    leaves = [torch.randn(1, 2, 40, 5, dtype=torch.float64).requires_grad_() for _ in "qkv"]
    y = zonal.attention(*leaves, zonal.Operator(zonal.score.Cosine(), Even(), zonal.anchor.Row()), path="tiled")
    dq, dk, dv = torch.autograd.grad(y.sum(), leaves)
    assert not torch.cat([dq, dk]).any()
    torch.testing.assert_close(dv, torch.ones_like(dv))


def test_it_is_read_back_from_a_configuration() -> None:
    again = zonal.Operator.from_config(OPERATOR.config())
    assert again.link == OPERATOR.link


def test_a_name_of_the_library_is_kept() -> None:
    with pytest.raises(
        zonal.errors.ArgumentError, match=r"class Yat: zonal\.algebra\.link\.yat declares a link of this name"
    ):
        type("Yat", (Link,), {})


_BELOW = "(1.f + c[0] - c[0] * x)"


@pytest.mark.parametrize(
    "code",
    [
        Formula("by_triton", triton="nowhere:by_triton"),
        Formula("by_value", f"1.f / {_BELOW}"),
        Formula("by_both", f"1.f / {_BELOW}", f"c[0] / ({_BELOW} * {_BELOW})"),
        Formula("by_log", log=True),
    ],
    ids=lambda code: code.name,
)
def test_torch_runs_what_a_formula_leaves_out(code: Formula) -> None:
    """Kernels took x for the value, and 1 for each derivative, without a word."""

    @dataclass(frozen=True)
    class Partly(Cauchy):
        formula = code

    mine, exact = (zonal.Operator(zonal.score.Cosine(), each, zonal.anchor.Row()) for each in (Partly(), Cauchy()))
    leaves = [torch.randn(1, 2, 40, 8).requires_grad_() for _ in "qkv"]

    def gradients(operator: zonal.Operator, path: str) -> list[Tensor]:
        y = zonal.attention(*leaves, operator, causal=True, path=path)
        return [y, *torch.autograd.grad(y.square().sum(), [*leaves, operator.learned_parts["link_sharpness"]])]

    for a, b in zip(gradients(mine, "tiled"), gradients(exact, "dense"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_any_text_names_a_formula() -> None:
    """Its kernel was written outside of the cache, or a long name failed with an OSError."""
    for name in ("../mine", "a/b", "", "long" * 100):
        file = file_name(Formula(name, "x", "spread(1.f)"), "tile", SETS[-1])
        assert Path(file).name == file
        assert len(file) < 120


@pytest.mark.parametrize(
    ("domain", "temperature", "refused"),
    [
        ((0.0, 1.0), 1.0, r"defined on \[0, 1\] and score Cosine can leave it; use a link that is defined everywhere"),
        ((-1.0, 1.0), 0.5, r"defined on \[-1, 1\] and score Cosine can leave it; use score\.Cosine\(\)"),
        ((-4, 4), 0.5, None),
        ((-float("inf"), float("inf")), 0.5, None),
    ],
)
def test_scores_stay_within_a_domain(domain: tuple[float, float], temperature: float, refused: str | None) -> None:
    """Scores below 0 were clamped with a gradient, and a domain beyond [-1, 1] was taken for that."""

    @dataclass(frozen=True)
    class Within(Even):
        def value(self, x: Tensor, c: Tensor) -> Tensor:
            return 5 + x

    Within.domain = domain
    operator = zonal.Operator(zonal.score.Cosine(temperature=temperature), Within(), zonal.anchor.Row())
    q, k, v = torch.randn(3, 1, 2, 40, 5, dtype=torch.float64)
    if refused is not None:
        with pytest.raises(zonal.errors.ArgumentError, match=refused):
            zonal.attention(q, k, v, operator)
        return
    cosines = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    weights = 5 + cosines / temperature
    for path in ("dense", "tiled"):
        found = zonal.attention(q, k, v, operator, path=path)
        torch.testing.assert_close(found, weights / weights.sum(-1, keepdim=True) @ v)
