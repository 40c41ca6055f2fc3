"""A window and sums before it: the border, its memory, and numbers of any size."""

import itertools
import re

import pytest
import torch
from matrix import randomised
from torch import Tensor

import zonal
from zonal import anchor, link, prior, score
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.memory import Memory, WindowedSums
from zonal.nn import Attention

FARS = ["squared_affine", "hedgehog(size=6)", "polynomial_square", "performer(draws=8)", "linear"]
TOKENS = 29


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(tokens: int = TOKENS, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(2, heads, tokens, 5), drawn(2, 2, tokens, 5, seed=1), drawn(2, 2, tokens, 3, seed=2)


def operator(window: int = 4, far: str = "squared_affine", first: int = 0) -> zonal.Operator:
    return randomised(m.local_global(window, far, first=first).for_heads(4, 2, dim=5))


def empty(op: zonal.Operator, dtype: torch.dtype = torch.float64) -> Memory:
    return Memory.empty(op, 2, 2, 5, 3, dtype)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("far", FARS)
def test_the_definition_is_the_equation(far: str, first: int) -> None:
    """Pair by pair, from the kernels of softmax and of the mechanism that the far kernel is taken from."""
    op, (q, k, v) = operator(5, far, first), inputs()
    other = m.resolve(far).for_heads(4, 2, dim=5).double()
    for name, value in op.learned_parts.items():
        if name.startswith("anchor_score_"):
            other.learned_parts[name.removeprefix("anchor_")].data = value.data
    scale = 1.0 if far.startswith("performer") else 5**0.25  # Performer divides by it itself
    x, z = (
        other.score.prepare_query(q / scale, other.bind(4, 2).score_params, None),
        other.score.prepare_key(k / scale, other.bind(4, 2).score_params).repeat_interleave(2, 1),
    )
    kernel = other.link.value(x @ z.mT, other.bind(4, 2).coefficients)
    kernel = kernel * op.learned_parts["anchor_log_weight"].exp().view(1, -1, 1, 1)
    near = (q @ k.repeat_interleave(2, 1).mT / 5**0.5).exp()
    age = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    kernel = torch.where((age < 5) | (torch.arange(TOKENS) < first), near, kernel).masked_fill(age < 0, 0)
    expected = kernel / kernel.sum(-1, keepdim=True) @ v.repeat_interleave(2, 1)
    found = zonal.attention(q, k, v, op, causal=True, path="dense")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("path", ["dense", "chunked", "streaming"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_key_leaves_the_window_after_exactly_so_many_tokens(path: str, dtype: torch.dtype) -> None:
    """With a far kernel of almost no weight, a query sees its last keys and no others."""
    op, (q, k, v) = m.local_global(4, weight=1e-30), inputs()
    q, k, v = (x.to(dtype) for x in (q, k, v))
    found = zonal.attention(q, k, v, op, causal=True, path=path)
    expected = zonal.attention(q, k, v, m.softmax(prior=prior.Window(left=3)), causal=True, path="dense")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("extra", "queries"), [*itertools.product(["", "padding", "bias"], [1, 13, 40, 45]), ("packed", 40)]
)
@pytest.mark.parametrize("far", ["squared_affine(learn_bias=True)", "hedgehog(size=6)"])
def test_the_kernels_equal_the_definition(far: str, extra: str, queries: int) -> None:
    """Outputs and all gradients in float32, for as many queries as keys, fewer and more."""
    op, found = operator(4, far, first=1), {}
    batch = 1 if extra == "packed" else 2
    given = drawn(batch, 4, queries, 5), drawn(batch, 2, 40, 5, seed=1), drawn(batch, 2, 40, 3, seed=2)
    mask = torch.rand(batch, 40, generator=torch.Generator().manual_seed(3)) > 0.3 if extra == "padding" else None
    for path, dtype in (("dense", torch.float64), ("chunked", torch.float32)):
        q, k, v = (x.to(dtype).requires_grad_() for x in given)
        bias = drawn(2, 2, 40, seed=4).to(dtype).requires_grad_() if extra == "bias" else None
        op = op.to(dtype)
        y = zonal.attention(
            q, k, v, op, causal=True, path=path, key_padding_mask=mask, key_bias=bias,
            cu_seqlens=torch.tensor([0, 1, 17, 40]) if extra == "packed" else None,
        )  # fmt: skip
        leaves = [q, k, v, *([] if bias is None else [bias]), *op.parameters()]
        weighed = (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum()
        found[path] = [y, *torch.autograd.grad(weighed, leaves, allow_unused=True, materialize_grads=True)]
    told = zonal.explain(op, (2, 4, 40, 5), (2, 2, 40, 5), causal=True, path="chunked")
    assert told.plan.routes[0].name == "C++ window and sums"
    for got, exact in zip(found["chunked"], found["dense"], strict=True):
        assert (got - exact).abs().max() <= 2e-5 * (1 + exact.abs().max())


@pytest.mark.parametrize("path", ["chunked", "streaming"])
def test_a_bias_that_sums_cannot_hold_is_refused(path: str) -> None:
    """A bias that all keys share changes nothing, down to e^-60; beyond, sums in float32 would lose it."""
    op, (q, k, v) = m.local_global(4), (x.float() for x in inputs())
    shape, exact = k.shape[:3], zonal.attention(q.double(), k.double(), v.double(), op.double(), causal=True)
    for bias in (-60.0, 60.0):
        y = zonal.attention(q, k, v, op, causal=True, key_bias=torch.full(shape, bias), path=path)
        assert (y - exact).abs().max() < 1e-4
    mask = torch.ones(shape[0], shape[2], dtype=torch.bool)
    mask[:, 3] = False
    for bias in (-100.0, 95.0, float("nan"), float("inf")):
        alone = torch.zeros(shape)
        alone[:, :, 3] = bias
        with pytest.raises(ArgumentError, match=r"key_bias must lie in \[-60, 60\] or be -inf.*path='dense'"):
            zonal.attention(q, k, v, op, causal=True, key_bias=alone, path=path)
        y = zonal.attention(q, k, v, op, causal=True, key_bias=alone, key_padding_mask=mask, path=path)
        assert y.isfinite().all()
    hidden = torch.zeros(shape).index_fill_(2, torch.tensor([3]), float("-inf"))
    y = zonal.attention(q, k, v, op, causal=True, key_bias=hidden, path=path)
    expected = zonal.attention(q, k, v, op, causal=True, key_bias=hidden, path="dense")
    assert (y - expected).abs().max() < 1e-4


@pytest.mark.parametrize("path", ["dense", "chunked", "streaming"])
def test_a_key_that_is_nan_reaches_all_later_queries(path: str) -> None:
    """In the window and before it."""
    q, k, v = inputs()
    k[:, 1, 7] = float("nan")
    y = zonal.attention(q, k, v, operator(), causal=True, path=path)
    broken = torch.zeros_like(y, dtype=torch.bool)
    broken[:, 2:, 7:] = True
    assert y.isnan().equal(broken)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("path", ["chunked", "streaming"])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pieces_of_any_size_are_the_whole(dtype: torch.dtype, first: int, path: str, padded: bool) -> None:
    op, (q, k, v) = operator(first=first).to(dtype), (x.to(dtype) for x in inputs())
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(3)) > 0.3 if padded else None
    with torch.no_grad():
        whole = zonal.attention(q, k, v, op, causal=True, path="dense", key_padding_mask=mask)
        for sizes in ((TOKENS,), (1,) * TOKENS, (5, 1, 1, 9, 13), (2, 27)):
            memory, parts, at = empty(op, dtype), [], 0
            for size in sizes:
                piece = slice(at, at + size)
                y, memory = zonal.attention(
                    q[:, :, piece], k[:, :, piece], v[:, :, piece], op, causal=True, memory=memory, path=path,
                    key_padding_mask=None if mask is None else mask[:, piece],
                )  # fmt: skip
                parts.append(y)
                at += size
            tolerance = 1e-11 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("first", [0, 2])
def test_memories_merge_into_that_of_all_tokens(first: int) -> None:
    op, (q, k, v) = operator(first=first), inputs()
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(3)) > 0.3

    def of(*borders: int) -> Memory:
        start, stop = borders
        return empty(op).absorb(k[:, :, start:stop], v[:, :, start:stop], mask[:, start:stop])

    whole = of(0, TOKENS).read(q)
    for a, b in ((1, 2), (3, 20), (7, 9), (12, 28)):
        for merged in (of(0, a).merge(of(a, b)).merge(of(b, TOKENS)), of(0, a).merge(of(a, b).merge(of(b, TOKENS)))):
            torch.testing.assert_close(merged.read(q), whole, rtol=1e-11, atol=1e-11)
    if first:
        with pytest.raises(ArgumentError, match="keeps the first tokens of a sequence"):
            of(0, TOKENS).subtract(of(0, 5))
    else:
        for a in (1, 5, 20, 28):
            torch.testing.assert_close(
                of(0, TOKENS).subtract(of(0, a)).read(q), of(a, TOKENS).read(q), rtol=1e-10, atol=1e-10
            )


def test_a_decoder_has_a_constant_size_and_gives_what_one_call_gives() -> None:
    op, (q, k, v) = operator(first=2).float(), (x.float() for x in inputs())
    with torch.no_grad():
        decoder = empty(op, torch.float32).decoder()
        rows = [decoder.step(*(x[:, :, t : t + 1] for x in (q, k, v))) for t in range(TOKENS)]
        whole = zonal.attention(q, k, v, op, causal=True, path="dense")
    torch.testing.assert_close(torch.cat(rows, 2), whole, rtol=2e-5, atol=2e-5)
    after = decoder.memory()
    assert isinstance(after, WindowedSums)
    assert after.nbytes == after.bytes_at(10**9) == sum(x.nbytes for x in after.tensors().values())


@pytest.mark.parametrize("path", ["dense", "chunked", "streaming"])
@pytest.mark.parametrize("size", [0.0, 1e-20, 30.0, 300.0])
def test_scores_of_any_size_give_finite_outputs_and_gradients(size: float, path: str) -> None:
    """Of queries: up to scores of some hundreds, where a window without its maximum, or sums scaled by it, overflow."""
    op = operator(first=1).float()
    q, k, v = (x.float().requires_grad_() for x in inputs())
    y = zonal.attention(q * size, k, v, op, causal=True, path=path)
    exact = zonal.attention(q.double() * size, k.double(), v.double(), op.double(), causal=True, path="dense")
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(y.square().sum(), (q, k, v)))


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("path", ["chunked", "streaming"])
@torch.no_grad()
def test_a_sum_that_cancels_before_the_window(path: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit queries and keys with q . k = -b (1 + 0.003), so that (q . k + b)^2 nearly vanishes. Rounding of a memory's
    terms is then about 1e-7 of 3e5, the bound of their sum, where the window's keys weigh 3: one or two hundredths."""
    monkeypatch.setenv("ZONAL_KERNELS", kernels)
    op, tokens = m.local_global(4, "squared_affine(bias=0.5)", weight=1000.0), 300
    across = torch.nn.functional.normalize(drawn(1, 1, tokens, 6), dim=-1)
    along = torch.full((1, 1, tokens, 1), -0.5 * (1 + 3e-3), dtype=torch.float64)
    k, v = torch.cat([along, (1 - along.square()).sqrt() * across], -1), drawn(1, 1, tokens, 3, seed=2)
    q = torch.zeros(1, 1, tokens, 7, dtype=torch.float64)
    q[..., 0] = 1
    memory: Memory = Memory.empty(op, 1, 1, 7, 3).absorb(*(x[:, :, :280].float() for x in (k, v)))
    y, _ = zonal.attention(*(x[:, :, 280:].float() for x in (q, k, v)), op, causal=True, memory=memory, path=path)
    truth = zonal.attention(q, k, v, op.double(), causal=True, path="dense")[:, :, 280:]
    assert (y - truth).abs().max() < 0.05 * truth.abs().max()


@pytest.mark.parametrize("path", ["dense", "chunked", "streaming"])
def test_half_precision_rounds_once(path: str) -> None:
    op, (q, k, v) = operator().float(), [x.bfloat16() for x in inputs(60)]
    exact = zonal.attention(q.double(), k.double(), v.double(), operator(), causal=True, path="dense")
    found = zonal.attention(q, k, v, op, causal=True, path=path)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def test_far_features_are_parameters_of_the_layer_and_learn() -> None:
    layer = Attention(16, 4, "local_global(window=3, far='hedgehog(size=8)', first=1)", kv_heads=2)
    names = {name for name, _ in layer.named_parameters() if name.startswith("operator")}
    prefix = "operator.learned_parts.anchor_"
    assert names == {f"{prefix}log_weight", f"{prefix}score_query_weight", f"{prefix}score_key_weight"}
    x, far = torch.randn(2, 40, 16), [p for name, p in layer.named_parameters() if name in names]
    teacher = Attention(16, 4, "softmax", kv_heads=2)
    teacher.load_state_dict({name: value for name, value in layer.state_dict().items() if name not in names})
    wanted, optimiser = teacher(x).detach() * 100, torch.optim.Adam(far, lr=0.02)
    losses = []
    for _ in range(30):
        loss = (layer(x) * 100 - wanted).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ArgumentError, match="only for causal=True"):
        zonal.attention(q, k, v, m.local_global())
    with pytest.raises(ArgumentError, match="without a decay; log_decay must be None"):
        zonal.attention(q, k, v, m.local_global(), causal=True, log_decay=-torch.ones(2, 2, TOKENS))
    for far in ("ridge", "ska(power=1)"):
        with pytest.raises(
            ArgumentError, match=rf"negative and have no such sum.*nn\.Mixture.*one with '{re.escape(far)}'"
        ):
            m.local_global(far=far)
    with pytest.raises(ArgumentError, match="far must be a mechanism with anchor Row"):
        m.local_global(far="sko")
    with pytest.raises(ArgumentError, match="must be a polynomial of a dot product"):
        m.local_global(far="softmax")
    with pytest.raises(ArgumentError, match="must never be negative"):
        anchor.LocalGlobal(score=score.Dot(), link=link.Identity())
    with pytest.raises(ArgumentError, match="drop prior Window"):
        m.local_global().replace(prior=prior.Window(3)).check("test")
    for wrong in ("window=0", "weight=0.0", "first=-1"):
        with pytest.raises(ArgumentError, match="LocalGlobal"):
            m.resolve(f"local_global({wrong})")
