"""Memories warn where the bound on the rounding errors of their sums passes a quarter, and not before."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.memory import Memory
from zonal.memory.base import MOST_DRIFT
from zonal.memory.summed import Summed
from zonal.memory.sums import FeatureSums

SUMS = {
    "squared_affine": m.squared_affine,
    "retention": m.retention,
    "local_global": lambda: m.local_global(window=4, far="squared_affine"),
    "compact": lambda: m.ska(power=0, compact=True),
}


def tokens(count: int = 3) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, 1, 2, count, 4, generator=torch.Generator().manual_seed(0))
    return k, v


def long(name: str, left: int, dtype: torch.dtype = torch.float32) -> Memory:
    """A memory that takes ``left`` more tokens before its bound is passed. Its sums are those of three."""
    memory = Memory.empty(SUMS[name](), 1, 2, 4, 4, dtype).absorb(*tokens())
    return replace(memory, count=memory.tokens_before_drift - left)


def absorbed(memory: Memory) -> int:
    return memory.absorb(*tokens()).count


def named(memory: Memory) -> int:
    return memory.absorb(*tokens(), span="last").count


def merged(memory: Memory) -> int:
    return memory.merge(Memory.empty(memory.operator, 1, 2, 4, 4, memory.form.dtype).absorb(*tokens())).count


def attended(memory: Memory) -> int:
    k, v = tokens()
    return zonal.attention(k, k, v, memory.operator, causal=True, memory=memory, return_memory=True)[1].count


def stepped(memory: Memory) -> int:
    (k, v), decoder = tokens(), memory.decoder()
    with torch.no_grad():
        for at in range(3):
            decoder.step(*(x[:, :, at : at + 1] for x in (k, k, v)))
    return decoder.memory().count


VERBS = (absorbed, named, merged, attended, stepped)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", SUMS)
def test_a_memory_warns_once_where_its_bound_is_passed(name, verb):
    memory = long(name, 2)
    if isinstance(memory, Summed) and memory.total is not None:
        memory = replace(memory, total=memory.total * 0)  # nothing of it has faded
    remedy = "leave out compact=True" if name == "compact" else "dtype=torch.float64"
    with pytest.warns(UserWarning, match=f"rounding errors may exceed 0.25 of their terms .*{remedy}") as told:
        assert verb(memory) == memory.count + 3
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verb(replace(memory, count=memory.count - 2))
        verb(replace(memory, count=memory.count + 3))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", SUMS)
def test_float64_does_not_warn(name, verb):
    memory = long(name, 2)
    exact = Memory.empty(SUMS[name](), 1, 2, 4, 4, torch.float64).absorb(*tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verb(replace(exact, count=memory.count))


@pytest.mark.parametrize("kind", [m.ridge, m.softmax])
def test_ridge_statistics_and_kept_keys_have_no_such_bound(kind):
    assert Memory.empty(kind(), 1, 2, 4, 4).tokens_before_drift > 2**50


@pytest.mark.parametrize("verb", [absorbed, attended, stepped])
def test_what_fades_counts_the_tokens_that_have_not_faded(verb):
    memory = long("retention", 2)
    assert isinstance(memory, Summed)
    assert memory.total is not None
    rate = 1 - 2 / memory.tokens_before_drift
    slow = replace(memory, total=memory.count * torch.full_like(memory.total, rate).log())
    assert slow.unfaded == pytest.approx(memory.tokens_before_drift / 2, rel=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verb(slow)
        slow.total[:, 0].zero_()  # one head keeps all of it
        with pytest.raises(UserWarning, match="rounding errors may exceed"):
            verb(slow)


def test_why_it_warns():
    """Ones that steps add to four times as many tokens in float32 are lost, all of them."""
    memory = Memory.empty(m.squared_affine(), 1, 2, 4, 4).absorb(*tokens())
    assert isinstance(memory, FeatureSums)
    most = round(4 * MOST_DRIFT * 2**24)
    full = replace(memory, count=most, state=memory.state * (most / float(memory.state[0, 0, 0, -1])))
    decoder = full.decoder()
    k, v = tokens(1)
    with torch.no_grad():
        for _ in range(100):
            decoder.step(k, k, v)
    after = decoder.memory()
    assert isinstance(after, FeatureSums)
    assert (after.count, after.state[0, 0, 0, -1].item()) == (most + 100, most)
    assert memory.tokens_before_drift == most // 4 - 8
