"""Compact ridge memories: bytes, drift in float32 against float64 and its stated bound, decoding, files, refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.memory import CompactStatistics, Memory, RidgeStatistics

RANK, TOKENS = 12, 400


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def keys(few: bool) -> Tensor:
    """Keys of length one, in all directions or in three."""
    k = draw(1, 1, TOKENS, 3) @ draw(3, RANK, seed=1) if few else draw(1, 1, TOKENS, RANK)
    return k / k.norm(dim=-1, keepdim=True)


def by_tokens(memory: Memory, k: Tensor, v: Tensor) -> Memory:
    for at in range(k.shape[2]):
        memory = memory.absorb(k[:, :, at : at + 1], v[:, :, at : at + 1])
    return memory


@pytest.mark.parametrize(("rank", "power", "numbers"), [(24, 0, 300 + 576), (56, 0, 1596 + 3136), (56, 1, 1596 + 6384)])
def test_bytes(rank: int, power: int, numbers: int) -> None:
    """A packed factor, S and N in float32: less than the paper's G, C and M, and under a third of what is kept else."""
    compact, plain = (Memory.empty(m.ska(power=power, compact=x), 1, 1, rank, rank).nbytes for x in (True, False))
    assert compact == 4 * numbers + 8  # the count of padding
    assert 3.1 * compact < plain
    assert compact < 4 * (2 + power) * rank**2
    told = zonal.explain(m.ska(power=power, compact=True), (1, 1, 8, rank))
    assert told.memory_kind == "compact"
    assert set(told.memory_bytes.values()) == {compact}


@pytest.mark.parametrize("few", [False, True], ids=["all directions", "three directions"])
@torch.no_grad()
def test_drift(few: bool) -> None:
    """Absorbed token by token in float32, each entry stays within the bound, and read-outs near those in float64."""
    k, v = keys(few), draw(1, 1, TOKENS, 5, seed=2)
    memory = by_tokens(Memory.empty(m.ska(power=1, compact=True), 1, 1, RANK, 5), k, v)
    twin = Memory.empty(m.ska(power=1).double(), 1, 1, RANK, 5, torch.float64).absorb(k.double(), v.double())
    assert isinstance(memory, CompactStatistics)
    assert isinstance(twin, RidgeStatistics)
    assert memory.drift == 3 * (TOKENS + 8) * 2**-24
    held = memory.whole()
    long = (twin.gram.diagonal(dim1=-2, dim2=-1) + 0.1).sqrt()
    values = v.double().square().sum(2).sqrt()
    for got, exact, size in (
        (held.gram, twin.gram, long[..., :, None] * long[..., None, :]),
        (held.cross, twin.cross, values[..., :, None] * long[..., None, :]),
        (held.shift, twin.shift, long[..., :, None] * long[..., None, :]),
    ):
        assert got is not None
        assert exact is not None
        assert 0 < (got - exact).abs().div(size).max() <= memory.drift
    assert float(torch.linalg.eigvalsh(held.gram).min()) > -1e-3 * 0.1  # far from indefinite with the ridge of 0.1
    q = draw(1, 1, 32, RANK, seed=3)
    got, exact = memory.read(q).double(), twin.read(q.double())
    assert (got - exact).abs().max() < 3e-4 * float(v.abs().max())


@torch.no_grad()
def test_a_decoder_holds_nothing_more() -> None:
    operator, k, v = m.ska(power=1, compact=True), keys(False)[:, :, :40], draw(1, 1, 40, 5, seed=2)
    decoder = Memory.empty(operator, 1, 1, RANK, 5).decoder()
    found = torch.cat([decoder.step(*(x[:, :, at : at + 1] for x in (k, k, v))) for at in range(40)], 2)
    expected = zonal.attention(k.double(), k.double(), v.double(), m.ska(power=1).double(), causal=True, path="dense")
    assert (found - expected).abs().max() < 1e-4
    after = decoder.memory()
    assert isinstance(after, CompactStatistics)
    assert after.nbytes == Memory.empty(operator, 1, 1, RANK, 5).nbytes
    y, other = zonal.attention(k, k, v, operator, causal=True, return_memory=True)  # by the compiled kernel
    assert (y - expected).abs().max() < 1e-4
    assert isinstance(other, CompactStatistics)
    assert (other.read(k) - after.read(k)).abs().max() < 1e-4


@torch.no_grad()
def test_models_and_files(tmp_path: Path) -> None:
    layer = zonal.nn.Attention(16, heads=2, operator="ska(power=1, compact=True)", conv=0)
    x = draw(1, 9, 16)
    _, filled = layer(x, return_memory=True)
    assert isinstance(filled.memory, CompactStatistics)
    filled.memory.save(tmp_path / "memory")
    again = Memory.load(tmp_path / "memory")
    assert isinstance(again, CompactStatistics)
    assert torch.equal(again.factor, filled.memory.factor)
    assert "compact" not in m.ska(power=1).config()["anchor"]  # files of before, and for before, stay as they are
    with pytest.raises(ArgumentError, match="memories must be of one kind"):
        again.merge(Memory.empty(m.ska(power=1), 1, 2, 8, 8))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: m.ska(power=1, compact=True, running_max=True), "compact keeps a factor that is made with eps"),
        (lambda: m.ska(power=1, compact=True, fading=True), "fades sums in float64"),
    ],
)
def test_refusals(make, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()
