"""torch.func over attention and its kernel: vmap and vmap of grad equal a loop, and what cannot says so."""

import warnings

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import zonal
from zonal import Operator, anchor, link, metric, prior, score, torch_func
from zonal import mechanisms as m
from zonal.errors import ArgumentError, PathError
from zonal.execution.paths import tile as tile_path
from zonal.kernels import native as native_kernels
from zonal.kernels.tile import TileInputs, TileSpec, tile

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")

KINDS = {
    "softmax": m.softmax,
    "sko": lambda: m.sko(degrees=(2.0, 3.0)),
    "yat": m.yat,
    "squared_affine": lambda: m.squared_affine(learn_bias=True),
    "cosine-learned": lambda: Operator(score.Cosine(temperature=0.5, learn_temperature=True), link.Exp(), anchor.Row()),
}
SHAPES = {"q": (2, 4, 21, 8), "k": (2, 2, 21, 8), "v": (2, 2, 21, 5)}


@pytest.fixture(autouse=True)
def rules_are_used() -> None:
    """torch's own loop, which it falls back to, warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def tokens(dims: tuple[int | None, ...], size: int = 3) -> list[Tensor]:
    """q, k, v with a mapped axis where ``dims`` says."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape, dim in zip(SHAPES.values(), dims, strict=True):
        full = list(shape)
        if dim is not None:
            full.insert(dim, size)
        found.append(torch.randn(full, generator=generator))
    return found


def element(arguments: list[Tensor], dims: tuple[int | None, ...], i: int) -> list[Tensor]:
    return [x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)]


def same(got: object, rows: list[object], tolerance: float = 2e-6) -> None:
    """vmap's result is the rows, stacked."""
    leaves = [torch.utils._pytree.tree_leaves(x) for x in (got, *rows)]
    for stacked, *parts in zip(*leaves, strict=True):
        expected = torch.stack(parts)
        assert (stacked - expected).abs().max() <= tolerance * (1 + expected.abs().max())


@pytest.mark.parametrize("path", ["tiled", "auto", "dense"])
@pytest.mark.parametrize("dims", [(0, 0, 0), (4, 1, 2), (0, None, None), (None, 3, 0)], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_vmap_equals_a_loop(name: str, dims: tuple[int | None, ...], path: str) -> None:
    """Outputs and gradients of q, k and v."""
    operator, arguments = KINDS[name](), tokens(dims)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path=path)

    gradient = grad(lambda q, k, v: run(q, k, v).square().sum(), argnums=(0, 1, 2))
    for function in (run, gradient):
        same(vmap(function, in_dims=dims)(*arguments), [function(*element(arguments, dims, i)) for i in range(3)])
    q, k, v = (x.requires_grad_() for x in element(arguments, dims, 0))
    plain = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    for a, b in zip(gradient(q.detach(), k.detach(), v.detach()), plain, strict=True):
        assert (a - b).abs().max() <= 2e-6 * (1 + b.abs().max())


@pytest.mark.parametrize("spec", ["sko(degrees=(2.0, 3.0))", "polynomial_square"])
def test_vmap_of_polynomials_on_the_dense_path(spec: str) -> None:
    """With coefficients of their own (sko), and with fixed ones; in float64, for which there is no kernel."""
    operator, arguments = m.resolve(spec), [x.double() for x in tokens((0, 0, 0))]
    learned = {name: torch.stack([x.detach(), 2 * x.detach(), -x.detach()]) for name, x in operator.named_parameters()}

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator = operator

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return zonal.attention(q, k, v, self.operator, causal=True, path="dense")

    def run(learned: dict[str, Tensor], *arguments: Tensor) -> Tensor:
        return functional_call(Call(), {f"operator.{name}": x for name, x in learned.items()}, arguments)

    rows = [run({name: x[i] for name, x in learned.items()}, *(x[i] for x in arguments)) for i in range(3)]
    same(vmap(run)(learned, *arguments), rows, 1e-12)


@pytest.mark.parametrize("mapped_mask", [False, True])
@pytest.mark.parametrize("name", ["sko", "squared_affine", "cosine-learned"])
def test_parameters_of_their_own(name: str, mapped_mask: bool) -> None:
    """An ensemble: each element has its own learned parts, and their gradients; with one mask for all or one each."""
    operator, arguments = KINDS[name](), tokens((0, 0, 0))
    parameters = {
        key: torch.stack([value.detach() + 0.1 * i for i in range(3)]) for key, value in operator.named_parameters()
    }
    masks = torch.rand(3, 2, 21, generator=torch.Generator().manual_seed(1)) > 0.3

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator = operator

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return zonal.attention(q, k, v, self.operator, causal=True, key_padding_mask=mask, path="tiled")

    module, mask_dim = Call(), 0 if mapped_mask else None

    def loss(parameters: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        named = {f"operator.{key}": value for key, value in parameters.items()}
        return functional_call(module, named, (q, k, v, mask)).square().sum()

    gradient = grad(loss, argnums=(0, 1))
    mask = masks if mapped_mask else masks[0]
    got = vmap(gradient, in_dims=(0, 0, 0, 0, mask_dim))(parameters, *arguments, mask)
    rows = [
        gradient(
            {key: value[i] for key, value in parameters.items()},
            *element(arguments, (0, 0, 0), i),
            masks[i] if mapped_mask else mask,
        )
        for i in range(3)
    ]
    same(got, rows, 1e-5)
    assert all(g.abs().max() > 1e-3 for g in got[0].values())


def test_folding_starts_the_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once an element: the mapped axis joins the batch, and the heads where elements differ in their parameters."""
    seen: list[tuple[int, ...]] = []
    body = tile.bodies["cpu"]
    forward = body.forward
    monkeypatch.setattr(
        body, "forward", lambda inputs, spec: seen.append(tuple(inputs.q.shape)) or forward(inputs, spec)
    )
    operator, (q, k, v) = m.sko(degrees=(2.0,), manifold_dim=4), tokens((0, 0, 0))
    vmap(lambda q, k, v: zonal.attention(q, k, v, operator, causal=True, path="tiled"))(q, k, v)
    code = tile_path.code_of(operator.link)
    assert code is not None
    coefficients = torch.randn(3, 4, 3)

    def run(q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, edges: Tensor | None) -> Tensor:
        spec = TileSpec(code, "count", True, learned=3)
        return tile(TileInputs(q, k, v, torch.ones(4), coefficients, None, edges), spec)[0]

    vmap(run, in_dims=(0, 0, 0, 0, None))(q, k, v, coefficients, None)
    assert seen == [(6, 4, 21, 8), (2, 12, 21, 8)]
    # rules of their own: nothing to fold into
    edges = torch.tensor([[0, 5, 21], [0, 7, 21], [0, 11, 21]])
    q, k, v = q[:, :1], k[:, :1], v[:, :1]
    got = vmap(run, in_dims=(0, 0, 0, 0, 0))(q, k, v, coefficients, edges)
    assert seen[2:] == [(1, 4, 21, 8)] * 3
    same(got, [run(*(x[i] for x in (q, k, v, coefficients, edges))) for i in range(3)])


def test_other_transforms() -> None:
    """vjp, jacrev (a vmap over the backward pass alone), and vmap of vmap."""
    operator, (q, k, v) = m.yat(eps=0.5), tokens((0, 0, 0))

    def run(q: Tensor) -> Tensor:
        return zonal.attention(q, k[0], v[0], operator, causal=True, path="tiled")

    y, back = vjp(run, q[0])
    leaf = q[0].clone().requires_grad_()
    assert torch.allclose(back(y)[0], torch.autograd.grad(run(leaf), leaf, y.detach())[0], atol=1e-6)
    few = q[0, :, :, :3].clone()
    rows = jacrev(
        lambda x: zonal.attention(x, k[0, :, :, :3], v[0, :, :, :3], operator, causal=True, path="tiled").sum((0, 2))
    )(few)
    expected = jacrev(
        lambda x: zonal.attention(x, k[0, :, :, :3], v[0, :, :, :3], operator, causal=True, path="dense").sum((0, 2))
    )(few)
    assert torch.allclose(rows, expected, atol=1e-5)
    twice = torch.stack([q, q + 1])
    assert torch.allclose(
        vmap(vmap(run))(twice), torch.stack([torch.stack([run(x) for x in part]) for part in twice]), atol=1e-6
    )


def test_gates_of_factors() -> None:
    """A gate of zero keeps its gradient, which is not the one of a clamp, under every transform."""
    metrics = (metric.Euclidean(), metric.Sphere())
    operator = Operator(
        score.NegativeDistance(metric.Product(metrics, gates=(0.0, 0.5)), temperature=0.5), link.Exp(), anchor.Row()
    ).double()
    name = next(name for name, _ in operator.named_parameters() if "gate" in name)
    gate = dict(operator.named_parameters())[name].detach()
    q, k, v = (x.double() for x in tokens((0, 0, 0)))

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator = operator

        def forward(self, *x: Tensor) -> Tensor:
            return zonal.attention(*x, self.operator, causal=True, path="dense")

    holder = Holder()

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return functional_call(holder, {f"operator.{name}": gate}, (q, k, v))

    for sign in (1, -1):  # a descent step opens the gate of zero for one of them
        derived = grad(lambda *x, sign=sign: sign * run(*x).square().sum(), argnums=(0, 3))
        rows = [derived(*(x[i] for x in (q, k, v)), gate) for i in range(3)]
        same(vmap(derived, in_dims=(0, 0, 0, None))(q, k, v, gate), rows, 1e-9)
        leaves = [q[0].clone().requires_grad_(), gate.clone().requires_grad_()]
        loss = sign * run(leaves[0], k[0], v[0], leaves[1]).square().sum()
        for mine, expected in zip(rows[0], torch.autograd.grad(loss, leaves), strict=True):
            assert torch.allclose(mine, expected, atol=1e-9)
    same(vmap(run, in_dims=(0, 0, 0, None))(q, k, v, gate), [run(q[i], k[i], v[i], gate) for i in range(3)], 1e-9)
    with warnings.catch_warnings():  # torch's own jvp compiles with what torch has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        _, found = jvp(lambda q: run(q, k[0], v[0], gate), (q[0],), (q[1],))
    step = 1e-6
    moved = run(q[0] + step * q[1], k[0], v[0], gate) - run(q[0] - step * q[1], k[0], v[0], gate)
    assert torch.allclose(found, moved / (2 * step), atol=1e-6)


def test_gates_of_factors_in_one_graph() -> None:
    product = metric.Product((metric.Euclidean(), metric.Sphere()), gates=(0.0, 0.5))
    operator = Operator(score.NegativeDistance(product, temperature=0.5), link.Exp(), anchor.Row())
    q, k, v = (x[0, :, :, :5] for x in tokens((0, 0, 0)))

    def run(q: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path="dense")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        y = torch.compile(run, backend="aot_eager", fullgraph=True)(q)
    expected, leaves = run(q), list(operator.parameters())
    assert torch.allclose(y, expected, atol=1e-6)
    for mine, own in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (y, expected)), strict=True):
        assert torch.allclose(mine, own, atol=1e-5)


@pytest.mark.parametrize(
    ("operator", "path", "arguments", "message"),
    [
        (m.ridge, "auto", {}, "no path can run operator 'ridge' here .* Fold what is mapped into the batch"),
        (m.ridge, "dense", {}, "it asks for numbers on the way"),
        (
            m.squared_affine,
            "chunked",
            {},
            "which the transforms of torch.func do not know. Use path='dense' or path='tiled'",
        ),
        (
            lambda: m.softmax(prior=prior.ALiBi()),
            "tiled",
            {},
            "log priors .*torch's tiles do not know the transforms of torch.func",
        ),
        (m.softmax, "auto", {"return_memory": True}, "no meaning under torch.func's transforms"),
        (
            m.softmax,
            "auto",
            {"log_decay": -torch.ones(3, 2, 2, 21)},
            "log_decay must be <= 0, which cannot be checked",
        ),
        (m.softmax, "auto", {"cu_seqlens": torch.tensor([[0, 21]] * 3)}, "cu_seqlens must be the same for all"),
    ],
)
def test_what_cannot_says_so(operator, path: str, arguments: dict[str, object], message: str) -> None:
    chosen, mapped = operator(), {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    plain = {key: value for key, value in arguments.items() if key not in mapped}

    def run(q: Tensor, k: Tensor, v: Tensor, more: dict[str, Tensor]) -> Tensor:
        return zonal.attention(q, k, v, chosen, causal=True, path=path, **plain, **more)

    with pytest.raises((PathError, ArgumentError), match=message):
        vmap(run)(*tokens((0, 0, 0)), mapped)


def test_second_derivatives_are_refused() -> None:
    q, k, v = tokens((None, None, None))
    with pytest.raises(PathError, match="no second derivative"):
        grad(
            lambda x: grad(lambda y: zonal.attention(y, k, v, m.softmax(), causal=True, path="tiled").square().sum())(
                x
            ).sum()
        )(q)


def test_outside_of_transforms_nothing_changes() -> None:
    assert not torch_func.active()
    q, k, v = tokens((None, None, None))
    assert not torch_func.mapped(q)
    assert zonal.explain(m.ridge(), q.shape, k.shape, v.shape, causal=True).path in ("chunked", "dense", "streaming")
