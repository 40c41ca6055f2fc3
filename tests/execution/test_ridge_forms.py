"""The forms of ridge and Koopman read-outs beside the default: action masks and gates, relative ridges, spectral norms,
the paper's preset.
"""

import pytest
import torch
from execution.chunks import assert_same
from matrix import randomised
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, link, score
from zonal import mechanisms as m
from zonal.algebra.primal import contraction
from zonal.errors import ArgumentError, NonFiniteError

PATHS = ("dense", "chunked", "streaming")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(tokens: int = 23, r: int = 5) -> list[Tensor]:
    """Queries of 4 heads, keys and values of 2, which take gradients."""
    return [
        x.requires_grad_()
        for x in (draw(2, 4, tokens, r), draw(2, 2, tokens, r, seed=1), draw(2, 2, tokens, 3, seed=2))
    ]


def some(tokens: int = 23, share: float = 0.6) -> Tensor:
    return torch.rand(2, tokens, generator=torch.Generator().manual_seed(5)) < share


# -- action masks and gates ------------------------------------------------------------------------------------------


def test_an_action_mask_weighs_the_sums() -> None:
    """G = sum w z z^T, M = sum w_t w_{t-1} z_t z_{t-1}^T, C = sum w v z^T: a token that is not stored is one all the
    same.
    """
    operator = m.ska(power=1, key_limit=None, eps=0.3).double()
    q, k, v = sample(9)
    stored = some(9)
    y = zonal.attention(q, k, v, operator, action_mask=stored, path="dense")
    for b in range(2):
        w, z, values = stored[b].double(), k[b, 0], v[b, 0]
        gram, cross = (w[:, None] * z).T @ z, (w[:, None] * values).T @ z
        moved = (w[1:, None] * w[:-1, None] * z[1:]).T @ z[:-1]
        inverse = torch.linalg.inv(gram + 0.3 * torch.eye(5))
        scale = operator.anchor.output_scale(operator.bind(1, 1).anchor_params, 1)  # type: ignore[attr-defined]
        assert torch.allclose(y[b, 0], scale * q[b, 0] @ (cross @ inverse @ moved @ inverse).T, atol=1e-11)


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize(
    "name",
    [
        "ska(power=2)",
        "ska(power=1, fading=True)",
        "ska(power=1, chunk=4, running_max=True)",
        "ridge(relative=0.1, chunk=4)",
    ],
)
def test_weights_of_keys_on_every_path(name: str, path: str) -> None:
    """Masks and gates with padding, on every form; what is not stored and what padding holds may be anything."""
    operator, tensors = randomised(m.resolve(name)), sample()
    gate = torch.rand(2, 2, 23, generator=torch.Generator().manual_seed(7), dtype=torch.float64).requires_grad_()
    q, k, v = tensors
    stored, real = some(), some(share=0.8)
    poison = v.masked_fill(~stored[:, None, :, None], float("nan"))

    def run(path: str, v: Tensor, gate: Tensor = gate) -> Tensor:
        return zonal.attention(
            q, k, v, operator, causal=True, action_mask=stored, key_gate=gate, key_padding_mask=real, path=path
        )

    assert_same(run(path, v), run("dense", v), [*tensors, gate, *operator.parameters()])
    assert torch.equal(run(path, poison, gate.masked_fill(~real[:, None], float("nan"))), run(path, v))


@pytest.mark.parametrize("power", [0, 1, (0, 2, 1, 1)])
def test_weights_in_single_precision(power: int | tuple[int, ...]) -> None:
    """The compiled kernel, where there is one, and a decoder's single steps take weighed keys as they come."""
    operator = m.ska(power=power)
    q, k, v = (x.detach().float() for x in sample())
    stored, gate = some(), torch.rand(2, 2, 23, generator=torch.Generator().manual_seed(7))
    expected = zonal.attention(
        q.double(),
        k.double(),
        v.double(),
        m.ska(power=power).double(),
        causal=True,
        action_mask=stored,
        key_gate=gate,
        path="dense",
    )
    memory: Memory = Memory.empty(operator, 2, 2, 5, 3)
    parts = []
    with torch.no_grad():
        got = zonal.attention(q, k, v, operator, causal=True, action_mask=stored, key_gate=gate, path="chunked")
        for t in range(23):
            one = slice(t, t + 1)
            y, memory = zonal.attention(
                q[:, :, one],
                k[:, :, one],
                v[:, :, one],
                operator,
                causal=True,
                action_mask=stored[:, one],
                key_gate=gate[:, :, one],
                memory=memory,
            )
            parts.append(y)
    for y in (got, torch.cat(parts, 2)):
        assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("length", "least", "most"), [(1.0, 0.0, 0.1), (0.1, 1.0, 1.0)])
def test_distractors_with_short_keys_do_no_harm(length: float, least: float, most: float) -> None:
    """32 facts among 500 distractors, r = 56: with keys of equal length the facts are lost, with keys of a tenth none
    is.
    """
    facts, others, r = 32, 500, 56
    k, v = torch.nn.functional.normalize(draw(1, 2, facts + others, r), dim=-1), draw(1, 2, facts + others, 16, seed=1)
    gate = torch.ones(1, 2, facts + others, dtype=torch.float64)
    gate[:, :, facts:] = length
    with torch.no_grad():
        y = zonal.attention(k[:, :, :facts], k, v, m.ridge(eps=1e-3).double(), key_gate=gate)
    recalled = (torch.cdist(y, v).argmin(-1) == torch.arange(facts)).double().mean().item()
    assert least <= recalled <= most


def test_bad_weights_change_nothing() -> None:
    q, k, v = sample()
    nothing = some()
    nothing[1] = False
    for operator in (m.softmax(), m.yat().replace(anchor=anchor.Ridge()), m.linear()):
        with pytest.raises(ArgumentError, match=r"action_mask weighs the keys of ridge .* key_padding_mask"):
            zonal.attention(q, k, v, operator, causal=True, action_mask=some())
    with pytest.raises(ArgumentError, match=r"stores no token of sequence 1.*leave the mask out"):
        zonal.attention(q, k, v, m.ska(), causal=True, action_mask=nothing)
    with pytest.raises(ArgumentError, match=r"action_mask must be bool of shape .* \(2, 23\)"):
        zonal.attention(q, k, v, m.ska(), causal=True, action_mask=some(22))
    with pytest.raises(ArgumentError, match="key_gate must be floating"):
        zonal.attention(q, k, v, m.ska(), causal=True, key_gate=torch.ones(2, 23))
    operator = m.ska(power=1).double()
    empty = Memory.empty(operator, 2, 2, 5, 3, torch.float64)
    memory = empty.absorb(k, v, action_mask=some())
    before, count = memory.read(q), memory.count
    for wrong, error, words in (
        ({"action_mask": some(22)}, ArgumentError, "action_mask must be bool of shape"),
        ({"key_gate": torch.full((2, 2, 23), float("nan"))}, NonFiniteError, "nothing was absorbed"),
    ):
        with pytest.raises(error, match=words):
            memory.absorb_(k, v, **wrong)  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match="nothing was absorbed"):
        memory.absorb_(torch.full_like(k, float("nan")), v)
    assert memory.count == count
    assert torch.equal(memory.read(q), before)
    assert torch.equal(memory.absorb(k, v, action_mask=torch.zeros(2, 23, dtype=torch.bool)).read(q), before)


@pytest.mark.parametrize(
    "operator",
    [
        m.ridge(),
        m.ska(power=1),
        m.ska(power=2, eps=1e-3, key_limit=None, running_max=True),
        m.ska(power=2, chunk=4, eps=1e-3, key_limit=None, running_max=True, spectral_norm="power"),
    ],
    ids=["ridge", "ska", "running maximum", "the paper's form"],
)
def test_a_piece_of_a_text_may_store_nothing(operator: Operator) -> None:
    """The first piece too, though a whole text must store something: texts begin with noise."""
    operator, (q, k, v), stored = operator.double(), sample(), some()
    stored[1, :12] = stored[:, 16:20] = False
    with torch.no_grad():
        wanted = zonal.attention(q, k, v, operator, causal=True, action_mask=stored)
        memory, found = None, []
        for begin, end in ((0, 12), (12, 16), (16, 20), (20, 23)):
            piece = (x[:, :, begin:end] for x in (q, k, v))
            y, memory = zonal.attention(
                *piece, operator, causal=True, memory=memory, return_memory=True, action_mask=stored[:, begin:end]
            )
            found.append(y)
    torch.testing.assert_close(torch.cat(found, 2), wanted)
    assert bool((found[0][1] == 0).all())
    assert bool((found[3][1] != 0).any())


@pytest.mark.parametrize("chunk", [16, None])
def test_a_late_piece_that_stores_nothing_keeps_the_ridge_of_those_before(chunk: int | None) -> None:
    """The running maximum is that of all keys so far. Past 1,024 tokens the ridge decides on float32 or float64."""
    operator = m.ska(power=2, chunk=chunk, eps=1e-3, key_limit=None, running_max=True)
    q, k, v = 10 * draw(3, 2, 2, 1536, 24).float()
    stored = torch.zeros(2, 1536, dtype=torch.bool)
    stored[:, 3:7] = True
    with torch.no_grad():
        wanted = zonal.attention(q, k, v, operator, causal=True, action_mask=stored)[:, :, 1024:]
        memory = zonal.attention(
            *(x[:, :, :1024] for x in (q, k, v)), operator, causal=True, return_memory=True,
            action_mask=stored[:, :1024],
        )[1]  # fmt: skip
        found = zonal.attention(
            *(x[:, :, 1024:] for x in (q, k, v)), operator, causal=True, memory=memory, action_mask=stored[:, 1024:]
        )[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


# -- relative ridges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["constant", "running_max"])
def test_a_relative_ridge_follows_the_keys(mode: str) -> None:
    """rho + relative tr(G) / r of the keys that a query sees, token by token and over chunks."""
    q, k, v = sample(12)
    fitted = anchor.Ridge(eps=0.2, mode=mode, relative=0.05)  # type: ignore[arg-type]
    operator = Operator(score.Dot(scale=1.0), link.Identity(), fitted).double()
    y = zonal.attention(q, k, v, operator, causal=True, path="dense")
    for t in (1, 5, 11):
        z, values = k[1, 1, :t], v[1, 1, :t]
        rho = (0.2 * z.square().sum(-1).max() if mode == "running_max" else 0.2) + 0.05 * z.square().sum() / 5
        expected = values.T @ z @ torch.linalg.inv(z.T @ z + rho * torch.eye(5)) @ q[1, 3, t]
        assert torch.allclose(y[1, 3, t], expected, atol=1e-11)
    assert (
        "an inverse of its own"
        in zonal.explain(m.ridge(relative=0.1), q.shape, k.shape, v.shape, causal=True).plan.refused["chunked"]
    )


def test_a_relative_ridge_keeps_single_precision_alive() -> None:
    """Keys along one direction, ten thousand of them, without a ridge to speak of: it grows with them, and float32
    suffices.
    """
    k = torch.ones(1, 1, 10_000, 4) / 2
    for relative, good in ((1e-3, True), (0.0, False)):
        gram = k[0, 0].mT @ k[0, 0] + 1e-6 * torch.eye(4)
        gram = gram + relative * gram.trace() / 4 * torch.eye(4)
        assert bool(torch.linalg.cholesky_ex(gram).info == 0) == good
        y = zonal.attention(k[:, :, :1], k, k, m.ridge(eps=1e-6, relative=relative), path="chunked")
        assert torch.allclose(y, k[:, :, :1], rtol=2e-3)


# -- spectral norms --------------------------------------------------------------------------------------------------


def test_power_iteration_would_divide() -> None:
    """Six power iterations find the norm of a step, from below, and divide by it where it is past one; keys never take
    it there.
    """
    step = torch.diag(torch.tensor([3.0, 0.5, 0.1], dtype=torch.float64))
    assert abs(1 / contraction(torch.eye(3, dtype=torch.float64), step, "test").item() - 3) < 1e-6
    assert contraction(torch.eye(3, dtype=torch.float64), step / 4, "test").item() == 1
    for seed in range(20):
        z = draw(30, 6, seed=seed) * 10.0 ** (seed % 5 - 2)
        gram = z.T @ z + 1e-3 * z.square().sum(-1).max() * torch.eye(6, dtype=torch.float64)
        assert contraction(gram, z[1:].T @ z[:-1], "test").item() == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [None, 4])
def test_spectral_normalisation_changes_nothing(chunk: int | None, causal: bool) -> None:
    """With and without it: the same numbers on every path that has it, gradients included."""
    tensors = sample()
    plain, normed = (m.ska(power=2, eps=1e-3, chunk=chunk, spectral_norm=name).double() for name in ("none", "power"))  # type: ignore[arg-type]
    paths = [
        path
        for path in PATHS
        if (path != "chunked" or chunk or not causal) and (path != "streaming" or causal or chunk)
    ]
    for path in paths:
        results = []
        for operator in (plain, normed):
            y = zonal.attention(*tensors, operator, causal=causal, path=path)
            results.append(
                [y, *torch.autograd.grad(y.square().sum(), [*tensors, *operator.parameters()], allow_unused=True)]
            )
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).abs().max() <= 1e-9 * (1 + b.abs().max())


# -- the paper's form ------------------------------------------------------------------------------------------------


def test_the_preset_is_the_paper() -> None:
    """Power 2, chunks of 64, the largest key so far; trained in parallel and decoded from snapshots at the borders of
    chunks: one function.
    """
    operator = m.ska(preset="paper").double()
    assert operator.anchor == anchor.Koopman(power=2, eps=1e-3, mode="running_max", spectral_norm="power")
    assert operator.config()["prior"] == [{"type": "ChunkCausal", "size": 64}]
    q, k, v = (x.detach() for x in sample(150, r=16))
    with torch.no_grad():
        trained = zonal.attention(q, k, v, operator, causal=True, path="chunked")
        memory: Memory = Memory.empty(operator, 2, 2, 16, 3, torch.float64)
        parts = []
        for t in range(150):
            y, memory = zonal.attention(
                *(x[:, :, t : t + 1] for x in (q, k, v)), operator, causal=True, memory=memory, path="streaming"
            )
            parts.append(y)
    assert trained[:, :, 64:].abs().max() > 0.01
    assert trained[:, :, :64].abs().max() == 0
    assert (torch.cat(parts, 2) - trained).abs().max() < 1e-7 * trained.abs().max()
    with pytest.raises(ArgumentError, match="preset='paper' sets power"):
        m.ska(power=0, preset="paper")
    with pytest.raises(ArgumentError, match="preset must be 'paper'"):
        m.ska(preset="papers")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"power": -1}, "power must be a whole number from 0 to 8"), ({"power": (0, -1)}, "power must be"),
        ({"power": ()}, "power must be"), ({"power": True}, "power must be"),
        ({"chunk": 0}, "size must be a whole number >= 1"), ({"relative": -1.0}, "relative .* must be >= 0"),
        ({"spectral_norm": "on"}, "spectral_norm must be 'none' or 'power'"),
        ({"rank": 0}, "qk_dim must be a whole number >= 1"),
    ],
)  # fmt: skip
def test_bad_arguments(change: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        m.ska(**change)  # type: ignore[arg-type]


def test_powers_by_head_are_each_heads_own() -> None:
    """A mixed operator is its parts side by side, and meets fewer heads or more by rule."""
    q, k, v = sample()
    mixed = zonal.attention(q, k, v, m.ska(power=(0, 1, 2, 1)).double(), causal=True)
    for head, power in enumerate((0, 1, 2, 1)):
        alone = zonal.attention(q, k, v, m.ska(power=power).double(), causal=True)
        assert torch.allclose(mixed[:, head], alone[:, head], atol=1e-11)
    with pytest.raises(ArgumentError, match="Koopman powers is declared for 3 heads and meets 4"):
        zonal.attention(q, k, v, m.ska(power=(0, 1, 2)), causal=True)


@pytest.mark.parametrize("eps", [0.1, 30.0, 100.0, 1e6])
def test_a_learned_ridge_starts_at_any_size(eps: float) -> None:
    """The exponential of a ridge above 88 is no number of float32."""
    q, k, v = (x.detach() for x in sample())
    fixed, learned = (m.ridge(eps=eps, learn_ridge=learns, key_limit=None) for learns in (False, True))
    expected = zonal.attention(q, k, v, fixed, causal=True)
    assert torch.allclose(zonal.attention(q, k, v, learned, causal=True), expected, rtol=1e-5, atol=1e-12)
