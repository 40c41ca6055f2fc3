"""MesaNet, Gated KalmaNet and Gated DeltaNet: the recurrence token by token, every block size, gradients, memory,
masks, and what they equal.
"""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from nn import layers
from nn.layers import tokens

from zonal import Operator, anchor, attention, link, mechanisms, score
from zonal.algebra.solvers import conjugate_gradients
from zonal.errors import ArgumentError, FileFormatError, PathError
from zonal.memory import Memory
from zonal.nn import GatedDeltaNet, GatedKalmaNet, Mamba2, MesaNet
from zonal.nn.fading import RESET, FadingSums, cut, uncut
from zonal.nn.gated_deltanet import delta_rule
from zonal.nn.gated_kalmanet import kalman
from zonal.nn.mesanet import mesa
from zonal.nn.recurrence import ssd
from zonal.nn.solvers import chebyshev, solution

TOLERANCE = {"rtol": 1e-8, "atol": 1e-9}
LAYERS = {"mesanet": MesaNet, "gated_kalmanet": GatedKalmaNet, "gated_deltanet": GatedDeltaNet}
KINDS = tuple(LAYERS)
SOLVED = ("mesanet", "gated_kalmanet")


def make(kind, *, dim=12, seed=0, **options):
    """A float64 layer whose parameters are far from their start; iterations enough for float64."""
    torch.manual_seed(seed)
    steps = {"mesanet": {"steps": 20}, "gated_kalmanet": {"steps": 60, "ridge": 0.3}, "gated_deltanet": {}}[kind]
    layer = LAYERS[kind](dim, **{"state": 5, "head_dim": 4, "conv": 3} | steps | options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(("bias", "norm.weight", "log_rate", "raw_ridge")):
                parameter.uniform_(-0.5, 1.0)
            else:
                parameter.normal_(0.0, 0.5)
    return layer.double()


# --- definition -----------------------------------------------------------------------------------------------------


def by_hand(layer, u):
    """The layer of the paper, one token after another, every system solved by elimination."""
    s = layer.sizes
    heads, n, p = s.heads, s.state, s.head_dim
    raw = u @ layer.input.weight.T
    wide = layer.convolution.dim
    mixed, taps = raw[..., :wide], torch.zeros_like(raw[..., :wide])
    for i in range(layer.convolution.width):
        taps[:, i:] += layer.convolution.weight[:, i] * mixed[:, : u.shape[1] - i]
    qkv = torch.cat([F.silu(taps), raw[..., wide : 2 * heads * n + heads * p]], -1)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in qkv.split([heads * n, heads * n, heads * p], -1))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    numbers = raw[..., raw.shape[-1] - layer.gates * heads :].unflatten(-1, (layer.gates, heads))
    first, write = numbers[..., 0, :], numbers[..., 1, :]
    if isinstance(layer, MesaNet):
        decay, write = torch.sigmoid(first + layer.forget_bias), torch.sigmoid(write + layer.write_bias)
    else:
        decay = torch.exp(-layer.log_rate.exp() * torch.log1p((first + layer.step_bias).exp()))
        write = torch.sigmoid(write if isinstance(layer, GatedDeltaNet) else write + layer.write_bias)
    gram, cross, rows = u.new_zeros(len(u), heads, n, n), u.new_zeros(len(u), heads, n, p), []
    for t in range(u.shape[1]):
        a, b = decay[:, t, :, None, None], write[:, t, :, None, None]
        key, query, value = k[:, t, :, :, None], q[:, t, :, :, None], v[:, t, :, None]
        if isinstance(layer, GatedDeltaNet):
            cross = a * (torch.eye(n, dtype=u.dtype) - b * key @ key.mT) @ cross + b * key @ value
            y = cross.mT @ query / n**0.5
        else:
            b = b if isinstance(layer, MesaNet) else b * b
            gram, cross = a * gram + b * key @ key.mT, a * cross + b * key @ value
            if isinstance(layer, MesaNet):
                ridge = layer.ridge_floor + torch.log1p(layer.raw_ridge.exp())
                y = cross.mT @ torch.linalg.solve(gram + torch.diag_embed(ridge), query)
            else:
                ridge = layer.ridge * gram.square().sum((-2, -1), keepdim=True).sqrt()
                solved = torch.linalg.solve(gram + ridge * torch.eye(n, dtype=u.dtype), query)
                share = torch.sigmoid(numbers[:, t, 2] + layer.mix_bias)[..., None, None]
                y = cross.mT @ (share * solved + (1 - share) * query) / n**0.5
        rows.append(y.squeeze(-1))
    y = torch.stack(rows, 1)
    y = (y / (y.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight).flatten(2)
    if layer.gated:
        y = y * F.silu(raw[..., 2 * heads * n + heads * p :][..., : heads * p])
    return y @ layer.output.weight.T


@pytest.mark.parametrize("path", ["dense", "chunked", "streaming"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_block_size_is_the_recurrence_with_all_gradients(kind, path):
    layer = make(kind)
    layers.check_gradients(
        layer, path, functools.partial(by_hand, layer), values=TOLERANCE, gradients={"rtol": 1e-6, "atol": 1e-7}
    )


@pytest.mark.parametrize("kind", ["gated_kalmanet", "gated_deltanet"])
def test_the_gate_of_the_output_can_be_left_out(kind):
    layer = make(kind, gated=False)
    layers.check_gradients(
        layer, "chunked", functools.partial(by_hand, layer), values=TOLERANCE, gradients={"rtol": 1e-6, "atol": 1e-7}
    )
    layers.check_causal(layer)
    gated = make(kind).input.weight.shape[0]
    assert gated - layer.input.weight.shape[0] == layer.sizes.inner  # SiLU(z) alone


@pytest.mark.parametrize("length", [1, 64, 131])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_over_borders_of_blocks(kind, length):
    layer, u = make(kind), tokens(1, length)
    expected = by_hand(layer, u)
    y = layer.float()(u.float())
    assert (y.double() - expected).abs().max() < 1e-4 * (1 + expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_no_output_depends_on_a_later_token(kind):
    layers.check_causal(make(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_layer_trains_in_float32(kind):
    torch.manual_seed(0)
    layer, u = LAYERS[kind](64, state=32, head_dim=32), torch.randn(2, 150, 64)
    layer(u).square().mean().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    assert len(layer.learned()["rates"]) == 2
    assert all(0 < rate < 1 for rate in layer.learned()["rates"])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_size_are_solved_alike(kind):
    """A token that hardly matters to the loss must not spoil the gradient of all the others."""
    layer, u = make(kind).float(), tokens().float()
    found = []
    for scale in (1.0, 1e-15, 1e-20, 1e-21, 1e-22):  # the squares of the last three underflow
        weight = tokens(seed=8).float()
        weight[:, ::2] *= scale
        layer.zero_grad()
        (layer(u) * weight).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    assert found[0].isfinite().all()
    assert (found[0] - found[1]).norm() > 0.1 * found[0].norm()
    assert all((one - found[1]).norm() < 1e-4 * found[1].norm() for one in found[2:])


# --- solvers --------------------------------------------------------------------------------------------------------


def system(condition=20.0, size=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
    matrix = (basis * torch.linspace(1, condition, size, dtype=torch.float64)) @ basis.T
    return matrix, torch.randn(3, size, dtype=torch.float64, generator=generator)


def test_conjugate_gradients_end_after_as_many_steps_as_there_are_unknowns():
    matrix, q = system()
    exact = torch.linalg.solve(matrix, q.T).T
    found = [conjugate_gradients(lambda x: x @ matrix, q, matrix.diagonal(), steps) for steps in (2, 7, 50)]
    assert (found[0] - exact).abs().max() > 1e-3
    for one in found[1:]:
        torch.testing.assert_close(one, exact, rtol=1e-9, atol=1e-9)
    loose = conjugate_gradients(lambda x: x @ matrix, q, matrix.diagonal(), 50, tolerance=0.05)
    residual = (q - loose @ matrix).norm(dim=-1) / q.norm(dim=-1)
    assert residual.max() <= 0.05
    assert residual.max() > 1e-6


def test_chebyshev_converges_at_its_rate():
    matrix, q = system()
    exact = torch.linalg.solve(matrix, q.T).T
    low, high = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[20.0]], dtype=torch.float64)
    rate = (20**0.5 - 1) / (20**0.5 + 1)
    for steps in (4, 10, 40):
        error = (chebyshev(lambda x: x @ matrix, q, low, high, steps) - exact) @ matrix
        assert error.norm(dim=-1).max() <= 2 * rate**steps * q.norm(dim=-1).max() + 1e-12


def test_a_solution_has_the_derivative_of_the_exact_one():
    matrix, q = system()
    root, q = (matrix.clone() / 4).requires_grad_(), q.requires_grad_()

    def product(x):
        return x @ (root @ root.T) + x

    y = solution(product, lambda right: conjugate_gradients(product, right, (root @ root.T).diagonal() + 1, 40), q)
    exact = torch.linalg.solve(root @ root.T + torch.eye(7, dtype=torch.float64), q.T).T
    weight = torch.randn(3, 7, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((y * weight).sum(), [root, q]),
        torch.autograd.grad((exact * weight).sum(), [root, q]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", SOLVED)
def test_a_second_derivative_through_a_solution_is_refused(kind):
    layer, x = make(kind), torch.randn(1, 5, 12, dtype=torch.float64).requires_grad_()

    def loss(x):
        return layer(x).square().sum()

    (plain,) = torch.autograd.grad(loss(x), x)
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(first, plain)
    with pytest.raises(PathError, match=r"no second derivative.*GatedDeltaNet"):
        torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), plain)
    with pytest.raises(PathError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x.detach())


# --- what they are equal to -----------------------------------------------------------------------------------------


def parts(length=40, n=6, p=4, heads=2, seed=0):
    """q, k of norm 1 (1, heads, length, n), v, write (…, 1), log decays, in float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (
        F.normalize(torch.randn(1, heads, length, n, dtype=torch.float64, generator=generator), dim=-1)
        for _ in range(2)
    )
    v = torch.randn(1, heads, length, p, dtype=torch.float64, generator=generator)
    write = torch.rand(1, heads, length, 1, dtype=torch.float64, generator=generator)
    return q, k, v, write, -torch.rand(1, heads, length, dtype=torch.float64, generator=generator) / 5


@pytest.mark.parametrize("kind", SOLVED)
def test_without_forgetting_they_are_ridge_regression(kind):
    """MesaNet with a constant Λ, and Gated KalmaNet with m = 1 up to its ridge: the ridge anchor over keys the query's
    own token among.
    """
    q, k, v, _, _ = parts()
    sums = FadingSums.of(
        k, torch.cat([k, v], -1), torch.zeros(1, 2, 40, dtype=torch.float64), q.new_zeros(1, 2, 6, 10), 16
    )
    ridge = 0.2
    if kind == "mesanet":
        y = uncut(mesa(sums, cut(q, 16), torch.full((2, 6), ridge, dtype=torch.float64), 12), 40)
    else:
        y = uncut(kalman(sums, cut(q, 16), torch.ones(1, 2, 3, 16, 1, dtype=torch.float64), ridge, 80), 40)
    for t in (0, 7, 39):
        eps = ridge if kind == "mesanet" else ridge * float((k[0, 0, : t + 1].T @ k[0, 0, : t + 1]).norm())
        fitted = Operator(score.Dot(scale=1.0), link.Identity(), anchor.Ridge(eps=eps))
        expected = attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], fitted, causal=False)
        heads = slice(None) if kind == "mesanet" else slice(0, 1)
        torch.testing.assert_close(y[:, heads, t : t + 1], expected[:, heads], **TOLERANCE)


def test_mesanet_of_earlier_keys_is_ska():
    """``ska(power=0)`` sees strictly earlier keys: MesaNet's read-out one token earlier with the same query, times η,
    1.5 at its start.
    """
    q, k, v, _, _ = parts()
    expected = attention(q, k, v, mechanisms.ska(power=0, eps=0.2), causal=True) / 1.5
    later = torch.cat([q[:, :, 1:], q[:, :, :1]], 2)
    sums = FadingSums.of(
        k, torch.cat([k, v], -1), torch.zeros(1, 2, 40, dtype=torch.float64), q.new_zeros(1, 2, 6, 10), 16
    )
    y = uncut(mesa(sums, cut(later, 16), torch.full((2, 6), 0.2, dtype=torch.float64), 12), 40)
    torch.testing.assert_close(
        y[:, :, :-1], expected[:, :, 1:], rtol=1e-5, atol=1e-6
    )  # η and the ridge start in float32


def test_gated_kalmanet_without_its_solve_is_attention_that_fades():
    q, k, v, _, decay = parts()
    sums = FadingSums.of(k, torch.cat([k, v], -1), decay, q.new_zeros(1, 2, 6, 10), 16)
    y = uncut(kalman(sums, cut(q, 16), q.new_zeros(1, 2, 3, 16, 1), 0.02, 30), 40)
    torch.testing.assert_close(y, attention(q, k, v, ssd(), causal=True, log_decay=decay), **TOLERANCE)


def test_the_delta_rule_is_one_step_of_online_regression():
    q, k, v, write, decay = parts(length=1, heads=1)
    state = torch.randn(1, 1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    faded = (state * decay.exp()[..., None]).requires_grad_()
    loss = 0.5 * (faded.mT @ k.mT - v.mT).square().sum()
    (gradient,) = torch.autograd.grad(loss, faded)
    _, after, _ = delta_rule(q, k, v, write, decay, state, 1)
    torch.testing.assert_close(after, faded.detach() - write * gradient, **TOLERANCE)


def test_the_delta_rule_on_orthogonal_keys_is_attention_that_fades():
    q, _, v, write, decay = parts(length=6)
    k = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0].expand(1, 2, 6, 6)
    y, _, _ = delta_rule(q, k, v, write, decay, q.new_zeros(1, 2, 6, 4), 4)
    torch.testing.assert_close(y, attention(q, k, v * write, ssd(), causal=True, log_decay=decay), **TOLERANCE)


def test_the_delta_rule_overwrites_what_ridge_averages():
    """The same key twice: with β = 1 the second value alone is left; regression keeps their mean."""
    k = F.normalize(torch.ones(1, 1, 2, 6, dtype=torch.float64), dim=-1)
    v, none = torch.tensor([[[[1.0], [3.0]]]], dtype=torch.float64), torch.zeros(1, 1, 2, dtype=torch.float64)
    y, _, _ = delta_rule(k, k, v, torch.ones(1, 1, 2, 1, dtype=torch.float64), none, k.new_zeros(1, 1, 6, 1), 2)
    assert y[0, 0, 1].item() == pytest.approx(3.0)
    sums = FadingSums.of(k, torch.cat([k, v], -1), none, k.new_zeros(1, 1, 6, 7), 2)
    assert mesa(sums, cut(k, 2), torch.full((1, 6), 1e-6, dtype=torch.float64), 10)[0, 0, 0, 1].item() == pytest.approx(
        2.0, rel=1e-5
    )


def test_a_reset_forgets_everything():
    _, k, v, _, decay = parts()
    start = torch.randn(1, 2, 6, 10, dtype=torch.float64)
    decay[:, :, 21] = RESET
    whole = FadingSums.of(k, torch.cat([k, v], -1), decay, start, 16)
    after = FadingSums.of(k[:, :, 21:], torch.cat([k, v], -1)[:, :, 21:], decay[:, :, 21:], torch.zeros_like(start), 16)
    torch.testing.assert_close(whole.last, after.last, rtol=0, atol=1e-12)


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [[1] * 13, [7, 1, 1, 4]], ids=lambda s: "+".join(map(str, s)))
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_with_memory_equal_one_pass(kind, split):
    layer = make(kind)
    layers.check_pieces(layer, split, functools.partial(by_hand, layer), TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_a_value_of_constant_size_that_can_be_saved(kind, tmp_path):
    layer, u = make(kind), tokens()
    _, memory = layer(u[:, :6], return_memory=True)
    first, _ = layer(u[:, 6:], memory=memory)
    memory.save(tmp_path / "memory.safetensors")
    for past in (memory, memory.fork(), layer.load_memory(tmp_path / "memory.safetensors")):
        torch.testing.assert_close(layer(u[:, 6:], memory=past)[0], first, rtol=0, atol=0)
    columns = 4 if kind == "gated_deltanet" else 9
    held = (
        8 * 3 * 5 * columns + 8 * (1 + 3) + layer.convolution.dim * 2 * 8
    )  # the matrices; padding and decay so far; the tail
    assert memory.nbytes == 2 * held == 2 * layer.memory_bytes(1) == 2 * layer.memory_bytes(10**6)
    with pytest.raises(FileFormatError, match="does not fit layer 0"):
        make(kind, state=6).load_memory(tmp_path / "memory.safetensors")


@pytest.mark.parametrize("kind", SOLVED)
def test_the_sums_of_two_spans_merge(kind):
    """What is remembered is a sum that fades, so spans read apart are one memory: merge, then read on."""
    layer, u = make(kind, conv=2), tokens()
    layer.convolution.weight.data[:, 1] = 0  # so that the spans share no window
    _, first = layer(u[:, :6], return_memory=True)
    _, second = layer(u[:, 6:10], return_memory=True)
    _, whole = layer(u[:, :10], return_memory=True)
    merged = first.memory.merge(second.memory)
    for name, value in whole.memory.tensors().items():
        torch.testing.assert_close(merged.tensors()[name], value, **TOLERANCE)


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_separate_ones(kind, path):
    layer = make(kind)
    layers.check_documents(layer, 70, functools.partial(by_hand, layer), path, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_prefill_then_decode_equals_each_row_alone(kind):
    layer, filler = make(kind), torch.full((3, 9, 12), float("nan"), dtype=torch.float64)
    layers.check_rows(layer, functools.partial(by_hand, layer), filler, TOLERANCE)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_near_float32(kind, autocast):
    layers.check_bfloat16(make(kind), autocast)


def of_other_sizes(layer: MesaNet) -> None:
    empty = layer.empty_memory(2)
    layer(
        tokens(),
        dataclasses.replace(empty, memory=Memory.empty(layer.operator, 2, 1, 5, 4, torch.float64, kind="decayed")),
    )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: MesaNet(12, state=0, head_dim=4), ArgumentError, "nn.MesaNet: state must be a whole number >= 1"),
        (lambda: MesaNet(12, head_dim=4, ridge_floor=0.0), ArgumentError, "ridge_floor > 0"),
        (lambda: MesaNet(12, head_dim=4, steps=0), ArgumentError, "steps >= 1"),
        (lambda: GatedKalmaNet(12, head_dim=4, ridge=0.0), ArgumentError, "ridge > 0"),
        (
            lambda: GatedDeltaNet(12, head_dim=5),
            ArgumentError,
            "head_dim must divide expand · dim = 12, received head_dim=5",
        ),
        (
            lambda: make("gated_deltanet")(tokens(), path="tiled"),
            PathError,
            "nn.GatedDeltaNet: path must be one of auto, chunked, streaming, dense",
        ),
        (lambda: make("mesanet")(tokens(), path="fast"), ArgumentError, "received 'fast'"),
        (
            lambda: make("mesanet")(tokens(), make("gated_deltanet").empty_memory(2)),
            ArgumentError,
            "made by another layer",
        ),
        (
            lambda: make("mesanet")(tokens(), Mamba2(12, state=5, head_dim=4).double().empty_memory(2)),
            ArgumentError,
            "made by another layer",
        ),
        (lambda: of_other_sizes(make("mesanet")), ArgumentError, "another kind of layer"),
        (
            lambda: make("mesanet")(tokens(1), make("mesanet").empty_memory(1), cu_seqlens=torch.tensor([0, 13])),
            ArgumentError,
            "take no memory",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("floor", [1e-3, 0.25, 1000.0])
def test_the_ridge_of_mesanet_starts_at_one_or_twice_its_floor(floor: float) -> None:
    start = torch.full((3, 64), max(1.0, 2 * floor))
    torch.testing.assert_close(MesaNet(12, head_dim=4, ridge_floor=floor).ridge().detach(), start)
