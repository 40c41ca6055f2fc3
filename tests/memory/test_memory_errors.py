"""What a memory says about bad input; and that it is unchanged afterwards."""

from collections.abc import Callable

import pytest
import torch

import zonal
from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError, NonFiniteError
from zonal.memory import FeatureSums, Memory


def made(operator=None, tokens: int = 6, **changes: object) -> Memory:
    settings = {"batch": 2, "heads": 2, "key_dim": 4, "value_dim": 3, **changes}
    memory = Memory.empty(operator or m.ska(power=1), **settings)  # type: ignore[arg-type]
    return memory.absorb(*kv(tokens, memory)) if tokens else memory


def kv(tokens: int, memory: Memory, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator, form = torch.Generator().manual_seed(seed), memory.form
    return (
        torch.randn(form.batch, form.heads, tokens, form.key_dim, generator=generator).to(form.dtype),
        torch.randn(form.batch, form.heads, tokens, form.value_dim, generator=generator).to(form.dtype),
    )


Act = Callable[[Memory], object]
BAD: list[tuple[str, Act, str]] = [
    (
        "key shape",
        lambda a: a.absorb(torch.zeros(2, 2, 5, 9), torch.zeros(2, 2, 5, 3)),
        r"k must have shape .*\(2, 2, any, 4\), received \(2, 2, 5, 9\)",
    ),
    ("axes", lambda a: a.absorb(torch.zeros(2, 5, 4), torch.zeros(2, 2, 5, 3)), "k must have shape"),
    (
        "value shape",
        lambda a: a.absorb(torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 6, 3)),
        r"v must have shape .*\(2, 2, 5, 3\), received \(2, 2, 6, 3\)",
    ),
    (
        "integers",
        lambda a: a.absorb(torch.zeros(2, 2, 5, 4, dtype=torch.int64), torch.zeros(2, 2, 5, 3)),
        "of a float type",
    ),
    ("mask type", lambda a: a.absorb(*kv(5, a), torch.ones(2, 5)), "must be bool of shape"),
    ("mask shape", lambda a: a.absorb(*kv(5, a), torch.ones(2, 4, dtype=torch.bool)), r"\(batch, keys\) = \(2, 5\)"),
    ("bias", lambda a: a.absorb(*kv(5, a), key_bias=torch.zeros(2, 2, 5)), "key_bias must be None"),
    (
        "mask as a bias",
        lambda a: made(m.squared_affine()).absorb(*kv(5, a), key_bias=torch.ones(2, 2, 5, dtype=torch.bool)),
        "Memory.absorb: key_bias must be floating point, received torch.bool. A mask of keys is key_padding_mask",
    ),
    (
        "whole decays",
        lambda a: made(m.retention()).absorb(*kv(5, a), log_decay=torch.zeros(2, 2, 5, dtype=torch.int64)),
        "log_decay must be floating point, received torch.int64. Convert it",
    ),
    ("query shape", lambda a: a.read(torch.zeros(2, 3, 1, 4)), r"a multiple of 2.*received \(2, 3, 1, 4\)"),
    ("query type", lambda a: a.read(torch.zeros(2, 2, 1, 4, dtype=torch.int32)), "float type"),
    ("merge with nothing", lambda a: a.merge("b"), "another Memory is required"),  # type: ignore[arg-type]
    ("merge of kinds", lambda a: a.merge(made(kind="keys")), "of one kind"),
    ("merge of forms", lambda a: a.merge(made(key_dim=5)), "one form.*key_dim 4.*key_dim 5"),
    ("merge of operators", lambda a: a.merge(made(m.ska(power=2))), "belong to one operator"),
    ("too much", lambda a: a.subtract(made(tokens=7)), "holds 7 tokens, this one only 6"),
    (
        "no part",
        lambda a: a.merge(made()).subtract(made().absorb(*kv(1, a, 5)).subtract(made())),
        "border of these tokens is unknown|no part",
    ),
]


@pytest.mark.parametrize(("act", "words"), [pytest.param(act, words, id=name) for name, act, words in BAD])
def test_bad_input(act: Act, words: str) -> None:
    memory = made()
    q = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(1))
    before, count = memory.read(q), memory.count
    with pytest.raises(ArgumentError, match=words):
        act(memory)
    assert memory.count == count
    assert torch.equal(memory.read(q), before)


@pytest.mark.parametrize("verb", ["absorb", "absorb_"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", ["softmax", "squared_affine", "retention", "ska(power=1)"])
def test_poison_is_refused(spec: str, poison: float, verb: str) -> None:
    memory = made(m.resolve(spec))
    q = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(1))
    before = memory.read(q)
    for which in (0, 1):
        tokens = kv(3, memory)
        tokens[which][1, 1, 1, 0] = poison
        with pytest.raises(NonFiniteError, match="nothing was absorbed"):
            getattr(memory, verb)(*tokens)
        assert torch.equal(memory.read(q), before)
        # a masked token may hold anything
        mask = torch.ones(2, 3, dtype=torch.bool)
        mask[1, 1] = False
        assert torch.isfinite(memory.absorb(*tokens, mask).read(q)).all()


def test_a_gate_is_finite_for_real_tokens() -> None:
    memory, gate = made(), torch.rand(2, 2, 3)
    poisoned, mask = gate.clone(), torch.tensor([[True, True, False]]).expand(2, -1)
    poisoned[..., 2] = float("nan")
    with pytest.raises(NonFiniteError, match="key_gate holds NaN or infinity in a real token; nothing was absorbed"):
        memory.absorb(*kv(3, memory), key_gate=poisoned)
    q = torch.ones(2, 2, 1, 4)
    found, expected = (memory.absorb(*kv(3, memory), mask, key_gate=x).read(q) for x in (poisoned, gate))
    assert torch.equal(found, expected)


def test_positive_decay_is_refused() -> None:
    memory = made(m.linear())
    with pytest.raises(ArgumentError, match="log_decay must be <= 0"):
        memory.absorb(*kv(3, memory), log_decay=torch.ones(2, 2, 3))


@pytest.mark.parametrize("spec", ["softmax", "yat", "squared_affine", "retention", "local_global(window=2)"])
def test_a_bias_of_minus_infinity_hides_a_key(spec: str) -> None:
    """As in attention; what is hidden gives no support, either."""
    memory = made(m.resolve(spec), tokens=0)
    k, v = kv(3, memory)
    bias = torch.zeros(2, 2, 3)
    bias[:, 0, 1] = -float("inf")
    q = torch.randn(2, 2, 1, 4, generator=torch.Generator().manual_seed(1))
    held, seen = memory.absorb(k, v, key_bias=bias), torch.tensor([0, 2])
    last = (q, q, v[:, :, :1])
    keys, values = (torch.cat([old, new], 2) for old, new in zip((k, v), last[1:], strict=True))
    biases = torch.cat([bias, torch.zeros(2, 2, 1)], 2)
    whole = zonal.attention(q, keys, values, memory.operator, causal=True, key_bias=biases)
    assert torch.allclose(zonal.attention(*last, memory.operator, causal=True, memory=held)[0], whole, atol=1e-5)
    if held.kind == "keys":
        support = held.support(k)[:, 0]
        assert torch.allclose(support, memory.absorb(k[:, :, seen], v[:, :, seen]).support(k)[:, 0])
        assert (support[:, 1] < 1).all()
    for value in (float("inf"), float("nan")):
        with pytest.raises(NonFiniteError, match="key_bias holds NaN or infinity"):
            memory.absorb(k, v, key_bias=bias.masked_fill(bias < 0, value))


@pytest.mark.parametrize("kind", ["keys", None])
@pytest.mark.parametrize("value", [-1e9, -float("inf")])
def test_a_decay_that_forgets_everything_is_what_it_is_for_attention(kind: str | None, value: float) -> None:
    operator, generator = m.retention(), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 9, 4, generator=generator).unbind()
    decay = -torch.rand(2, 2, 9, generator=generator)
    decay[..., 4] = value
    expected = zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path="dense")[:, :, -1:]
    memory = Memory.empty(operator, 2, 2, 4, 4, kind=kind).absorb(k, v, log_decay=decay)
    torch.testing.assert_close(memory.read(q[:, :, -1:]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch must be a whole number >= 1"),
        ({"batch": True}, "batch must be a whole number >= 1, received True"),
        ({"key_dim": 2.0}, "key_dim must be a whole number"),
        ({"dtype": torch.int8}, "dtype must be float16"),
        ({"kind": "kyes"}, "Did you mean 'keys'"),
        ({"kind": "features"}, "cannot keep its past as 'features'; it can as 'ridge' or 'keys'"),
    ],
)
def test_bad_form(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        made(tokens=0, **changes)


def test_not_an_operator() -> None:
    with pytest.raises(ArgumentError, match="an Operator or a spec"):
        Memory.empty(5, 1, 1, 4, 4)  # type: ignore[arg-type]


def test_operator_that_means_nothing() -> None:
    from zonal import anchor

    with pytest.raises(ArgumentError, match=r"Memory.empty: operator .* cannot be run"):
        made(m.sko().replace(anchor=anchor.Row()))


def test_in_place_does_not_change_kind() -> None:
    memory = made(m.linear())
    with pytest.raises(ArgumentError, match="cannot replace one of kind 'features' in place"):
        memory.absorb_(*kv(3, memory), log_decay=-torch.ones(2, 2, 3))
    assert memory.kind == "features"


def test_borders_of_chunks() -> None:
    """What would move the borders of later chunks is refused, and says what to do."""
    operator = m.sko(degrees=(2.0,), manifold_dim=4).replace(prior=prior.ChunkCausal(4))
    whole, inside = made(operator, 8), made(operator, 6)
    assert isinstance(inside, FeatureSums)
    assert whole.merge(inside).count == 14
    with pytest.raises(ArgumentError, match="ends inside a chunk"):
        inside.merge(whole)
    assert inside.merge(made(operator, 3)).count == 9  # nothing of the second is in a chunk yet
    with pytest.raises(ArgumentError, match="only whole chunks can be taken out"):
        whole.subtract(inside)
    faded = made(m.retention().replace(prior=(prior.Decay(), prior.ChunkCausal(4))))
    assert faded.kind == "keys"


def test_faded_more_than_there_is() -> None:
    operator = m.retention()
    short, long = made(operator, 6), made(operator, 6)
    object.__setattr__(long, "total", long.total * 2)
    with pytest.raises(ArgumentError, match="not its beginning"):
        short.subtract(long)


@torch.no_grad()
def test_keys_that_are_not_finite_are_named_where_an_inverse_is_kept() -> None:
    memory = made(m.ska(power=1, chunk=2).double(), dtype=torch.float64)
    k, v = kv(2, memory)
    memory.read(k)  # keeps the inverse, which few tokens update
    k[0, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="is not positive definite"):
        zonal.attention(k, k, v, memory.operator, causal=True, memory=memory)
