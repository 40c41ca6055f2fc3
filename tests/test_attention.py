"""The public entry: agreement with torch, and what it says about bad input."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from matrix import OPERATORS, Case, inputs

import zonal
from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError, PathError


def qkv(
    batch: int = 2, heads: int = 4, tokens: int = 9, dim: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch, heads, tokens, dim, generator=generator).to(dtype) for _ in range(3))


@pytest.mark.parametrize("path", ["dense", "tiled", "auto"])
@pytest.mark.parametrize("causal", [True, False])
def test_softmax_is_sdpa(path: str, causal: bool) -> None:
    q, k, v = qkv(dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.allclose(zonal.attention(q, k, v, m.softmax(), causal=causal, path=path), expected, atol=1e-12)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    assert torch.allclose(
        zonal.attention(q, k, v, m.softmax(), causal=causal, path=path, scale=0.3), expected, atol=1e-12
    )


def test_gqa_and_padding_are_sdpa() -> None:
    q, _, _ = qkv(heads=8, dtype=torch.float64)
    k, v, _ = qkv(heads=2, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], enable_gqa=True)
    for path in ("dense", "tiled"):
        assert torch.allclose(
            zonal.attention(q, k, v, m.softmax(), key_padding_mask=mask, path=path), expected, atol=1e-12
        )


def test_alibi_and_decay_against_written_out_masks() -> None:
    q, k, v = qkv(dtype=torch.float64)
    t = torch.arange(9)
    distance = (t[:, None] - t[None]).double()
    for given, slopes in (
        (None, tuple(2 ** (-8 * (h + 1) / 4) for h in range(4))),
        (rare := (0.3, 0.1, 0.7, 0.9), rare),
    ):
        bias = -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(distance < 0, float("-inf")))
        y = zonal.attention(q, k, v, m.softmax(prior=prior.ALiBi(given)), causal=True)
        assert torch.allclose(y, expected, atol=1e-12)
    rates = torch.tensor([0.9, 0.97, 0.99, 0.997], dtype=torch.float64)
    weight = (rates[:, None, None] ** distance).masked_fill(distance < 0, 0)
    expected = (q @ k.mT / 8**0.5 * weight) @ v
    for path in ("dense", "tiled"):
        assert torch.allclose(
            zonal.attention(q, k, v, m.retention(learn=False), causal=True, path=path), expected, atol=1e-12
        )


def test_declared_rates_belong_to_key_heads() -> None:
    q, k, v = (x.double() for x in qkv())
    shared, repeated = (k[:, :2], v[:, :2]), (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
    y = zonal.attention(q, *shared, m.retention(rates=(0.5, 0.9)), causal=True)
    expected = zonal.attention(q, *repeated, m.retention(rates=(0.5, 0.5, 0.9, 0.9)), causal=True)
    torch.testing.assert_close(y, expected)


def test_a_count_anchor_counts_keys_that_a_bias_hides() -> None:
    q, k, v = (x.double() for x in qkv())
    real = torch.arange(9).expand(2, 9) % 3 > 0
    hidden = torch.zeros(2, 4, 9, dtype=torch.float64).masked_fill(~real[:, None], -float("inf"))
    by_bias = zonal.attention(q, k, v, m.sko(), key_bias=hidden)
    torch.testing.assert_close(by_bias * 9 / 6, zonal.attention(q, k, v, m.sko(), key_padding_mask=real))


@pytest.mark.parametrize("path", ["dense", "tiled", "auto"])
def test_fewer_queries_than_keys_are_the_last_positions_for_alibi_too(path: str) -> None:
    q, k, v = qkv()
    operator = m.softmax(prior=prior.ALiBi((0.5,)))
    whole = zonal.attention(q, k, v, operator, path=path)
    for priors in (operator.prior, (*operator.prior, prior.Window(100))):  # a window that hides nothing
        last = zonal.attention(q[:, :, 6:], k, v, operator.replace(prior=priors), path=path)
        torch.testing.assert_close(last, whole[:, :, 6:])


def test_per_token_decay_and_its_gradient() -> None:
    q, k, v = qkv(dtype=torch.float64)
    log_decay = -torch.rand(2, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    log_decay.requires_grad_()
    running = log_decay.cumsum(-1)
    weight = (running[..., :, None] - running[..., None, :]).tril().exp().tril()
    expected = (q @ k.mT / 8**0.5 * weight) @ v
    for path in ("dense", "tiled"):
        y = zonal.attention(q, k, v, m.retention(), causal=True, path=path, log_decay=log_decay)
        assert torch.allclose(y, expected, atol=1e-12)
        got, want = (
            torch.autograd.grad(y.square().sum(), log_decay)[0],
            torch.autograd.grad(expected.square().sum(), log_decay, retain_graph=True)[0],
        )
        assert torch.allclose(got, want, atol=1e-10)


@pytest.mark.parametrize("reset", [-1e3, -1e9, -float("inf")])
@pytest.mark.parametrize(
    ("spec", "path"),
    [
        *(("softmax", path) for path in ("dense", "tiled", "streaming")),
        *(("retention", path) for path in ("dense", "tiled", "chunked", "streaming")),
    ],
)
def test_a_decay_that_forgets_everything_leaves_the_later_tokens_their_digits(
    spec: str, path: str, reset: float
) -> None:
    q, k, v = qkv(batch=1, tokens=40)
    log_decay = torch.full((1, 4, 40), -0.05)
    log_decay[..., 17] = reset
    log_decay.requires_grad_()
    pieces = [
        zonal.attention(*(x[:, :, part].double() for x in (q, k, v)), spec, causal=True, path="dense",
                        log_decay=log_decay[..., part].double().clamp_min(-700))
        for part in (slice(0, 17), slice(17, 40))
    ]  # fmt: skip
    y = zonal.attention(q, k, v, spec, causal=True, path=path, log_decay=log_decay)
    torch.testing.assert_close(y.double(), torch.cat(pieces, 2), rtol=1e-4, atol=2e-4)
    got, want = (torch.autograd.grad(x.square().sum(), log_decay)[0] for x in (y, torch.cat(pieces, 2)))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_many_resets_cost_the_definition_no_digits() -> None:
    q, k, v = qkv(batch=1, tokens=200)
    log_decay = torch.full((1, 4, 200), -0.05)
    log_decay[..., ::5] = -1e9
    got, want = (
        zonal.attention(q.to(t), k.to(t), v.to(t), "softmax", causal=True, path="dense", log_decay=log_decay.to(t))
        for t in (torch.float32, torch.float64)
    )
    assert (got - want).abs().max() < 5e-6


def test_long_decay_keeps_its_digits() -> None:
    """Running sums of thousands of log decays lose nothing that matters in float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 3000, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    log_decay = -3 * torch.rand(1, 1, 3000, generator=generator, dtype=torch.float64)
    exact = zonal.attention(q, k, v, m.retention(), causal=True, path="tiled", log_decay=log_decay)
    got = zonal.attention(
        q.float(), k.float(), v.float(), m.retention(), causal=True, path="tiled", log_decay=log_decay.float()
    )
    assert (got - exact).abs().max() < 2e-5 * exact.abs().max()


def test_cosine_of_a_zero_vector() -> None:
    """It is 0 with every key: the mean of the values, where a link gives 0 some weight."""
    q, k, v = (x.clone().requires_grad_() for x in qkv())
    with torch.no_grad():
        q[:, :, 3], k[:, :, 5] = 0, 0
    for operator in (m.sko(), m.yat(), m.cosine(), m.squared_affine()):
        for path in ("dense", "tiled"):
            y = zonal.attention(q, k, v, operator, causal=True, path=path)
            found = torch.autograd.grad(y.sum(), (q, k, v))
            assert all(torch.isfinite(x).all() for x in (y, *found))
            if operator.name in ("cosine", "squared_affine"):
                assert torch.allclose(y[:, :, 3], v[:, :, :4].mean(2), atol=1e-6)


@pytest.mark.parametrize("path", ["dense", "tiled", "chunked", "streaming"])
def test_linear_keeps_the_digits_of_small_features(path: str) -> None:
    """phi(x) = e^x of negative numbers, however small."""
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    q, k = q.abs().neg() - 20, k.abs().neg() - 18
    weights = (q.double().exp() @ k.double().exp().mT).tril()
    expected = (weights / weights.sum(-1, keepdim=True)) @ v.double()
    y = zonal.attention(q, k, v, m.linear(), causal=True, path=path)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


def test_nan_stays_where_it_is() -> None:
    """A NaN key poisons the queries that see it and no other."""
    q, k, v = qkv()
    k = k.clone()
    k[0, 0, 4] = float("nan")
    for path in ("dense", "tiled"):
        y = zonal.attention(q, k, v, m.softmax(), causal=True, path=path)
        assert torch.isnan(y[0, 0, 4:]).all()
        assert torch.isfinite(y[0, 0, :4]).all()
        assert torch.isfinite(y[1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_compute_in_single(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    exact = zonal.attention(q.double(), k.double(), v.double(), m.sko(), causal=True, path="dense")
    for path in ("dense", "tiled"):
        y = zonal.attention(q, k, v, m.sko(), causal=True, path=path)
        assert y.dtype == dtype
        # a kernel with bfloat16 products rounds the weights, too
        factor = 2 if path == "tiled" and dtype == torch.bfloat16 else 1.01
        assert (y.double() - exact).abs().max() <= factor * (exact.to(dtype).double() - exact).abs().max() + 1e-6


def test_autocast_sets_the_type_and_does_not_lower_the_scores() -> None:
    """As for torch's own attention: one type for q, k and v, whatever they came in; scores and sums are in float32 as
    for any bfloat16 call.
    """
    q, k, v = qkv()
    plain = zonal.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), m.yat(), causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((q, k, v), (q, k, v.bfloat16()), (q.bfloat16(), k, v)):
            y = zonal.attention(*given, m.yat(), causal=True)
            assert (
                y.dtype
                == torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True).dtype
                == torch.bfloat16
            )
            assert torch.equal(y, plain)
        exact = zonal.attention(q.double(), k.double(), v.double(), m.yat(), causal=True)
    assert torch.equal(exact, zonal.attention(q.double(), k.double(), v.double(), m.yat(), causal=True))
    with pytest.raises(ArgumentError, match="must share one dtype"):
        zonal.attention(q, k, v.bfloat16(), m.yat(), causal=True)


def bad(**changes: object) -> dict[str, object]:
    q, k, v = qkv()
    return {"q": q, "k": k, "v": v, "operator": m.softmax(), **changes}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda: bad(q=torch.zeros(3, 4)), "q must have 4 axes"),
        *(
            (
                lambda layout=layout: bad(q=torch.nested.nested_tensor([torch.zeros(4, 9, 8)] * 2, layout=layout)),
                r"q must be dense, received a nested tensor. Pass q.to_padded_tensor\(0.0\)",
            )
            for layout in (torch.strided, torch.jagged)
        ),
        (lambda: bad(k=torch.zeros(2, 4, 9, 5)), "share the head dimension"),
        (lambda: bad(v=torch.zeros(2, 4, 8, 8)), "share heads and tokens"),
        (lambda: bad(q=torch.zeros(1, 4, 9, 8)), "share the batch size"),
        (lambda: bad(q=torch.zeros(2, 3, 9, 8)), "multiple of the heads"),
        (lambda: bad(q=torch.zeros(2, 4, 9, 8, dtype=torch.float64)), "share one dtype"),
        (lambda: bad(q=torch.zeros(2, 4, 9, 8, dtype=torch.int64)), "must be float16"),
        (lambda: bad(key_padding_mask=torch.ones(2, 8, dtype=torch.bool)), r"shape \(batch, keys\) = \(2, 9\)"),
        (lambda: bad(key_padding_mask=torch.ones(2, 9)), "must be bool"),
        (lambda: bad(cu_seqlens=torch.tensor([0, 9])), "need batch size 1"),
        (lambda: bad(key_bias=torch.zeros(2, 9)), r"\(batch, key heads, keys\)"),
        (
            lambda: bad(key_bias=torch.ones(2, 4, 9, dtype=torch.bool)),
            "key_bias must be floating point, received torch.bool. A mask of keys is key_padding_mask",
        ),
        (lambda: bad(key_bias=torch.ones(2, 4, 9, dtype=torch.complex64)), "key_bias must be floating point"),
        (
            lambda: bad(operator=m.retention(), causal=True, log_decay=torch.zeros(2, 4, 9, dtype=torch.int64)),
            "log_decay must be floating point",
        ),
        (lambda: bad(path="dens"), "Did you mean 'dense'"),
        (lambda: bad(operator=m.sko(), scale=2.0), "fixes the scale"),
        (lambda: bad(operator=m.retention()), "fades with time"),
        (lambda: bad(operator=m.retention(), causal=True, log_decay=torch.ones(2, 4, 9)), "must be <= 0"),
        (
            lambda: bad(operator=m.retention(), causal=True, log_decay=torch.full((2, 4, 9), float("nan"))),
            "positive values or NaN",
        ),
        *(
            (lambda spec=spec: bad(operator=spec, key_bias=torch.full((2, 4, 9), -float("inf"))), "key_bias above -inf")
            for spec in ("sinkhorn", "hierarchical")
        ),
        (lambda: bad(operator=m.ridge(), key_bias=torch.zeros(2, 4, 9)), "must be None"),
        (lambda: bad(operator=torch.ones(2)), "an Operator or a spec such as .* is required, received a Tensor"),
    ],
)
def test_bad_input(arguments: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        zonal.attention(**arguments())  # type: ignore[operator]


@pytest.mark.parametrize("edges", [[0, 5, 4, 9], [1, 9], [0, 8], [0, 10], [0, 5, 5, 9], [0]])
def test_bad_cu_seqlens(edges: list[int]) -> None:
    q, k, v = qkv(batch=1)
    with pytest.raises(ArgumentError, match="cu_seqlens must start at 0"):
        zonal.attention(q, k, v, m.softmax(), cu_seqlens=torch.tensor(edges))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_batch_of_none(name: str) -> None:
    operator = OPERATORS[name]()
    given = inputs(Case(batch=0, causal=not operator.tags.couples))
    for path in ("auto", "dense", "tiled", "chunked", "streaming"):
        with contextlib.suppress(PathError):  # where it has such a path
            y = given.run(operator, path)
            y.sum().backward()
            assert y.shape == (0, 4, 17, 3)
            assert all(x.grad is not None and x.grad.shape == x.shape for x in (given.q, given.k, given.v))
