"""Memory files: equality after a round trip, and one clear line for every file that is not what it should be."""

import pytest
import torch
from matrix import OPERATORS, randomised

from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError, FileFormatError
from zonal.memory import KeyValues, Memory
from zonal.store import save_tensors

NAMES = [
    "softmax",
    "softmax-window",
    "yat-decay",
    "squared_affine",
    "sko-fractional",
    "sko-chunk",
    "retention",
    "ridge",
    "ska-1",
    "ska-paper",
    "ska-fading",
    "ridge-yat",
]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(name: str, dtype: torch.dtype = torch.float64) -> Memory:
    operator = randomised(OPERATORS[name]()).to(dtype)
    parts = []
    for seed in (0, 1):
        mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(seed)) > 0.3
        parts.append(
            Memory.empty(operator, 2, 2, 5, 3, dtype).absorb(
                draw(2, 2, 12, 5, seed=seed).to(dtype), draw(2, 2, 12, 3, seed=seed + 5).to(dtype), mask
            )
        )
    merged = parts[0].merge(parts[1])
    return merged.absorb(draw(2, 2, 2, 5, seed=8).to(dtype), draw(2, 2, 2, 3, seed=9).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, dtype: torch.dtype, tmp_path) -> None:
    """The file alone can read, what it can do is unchanged, and nothing else is left behind."""
    memory, path = filled(name, dtype), tmp_path / "a.memory"
    memory.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.memory"]
    q, more = (
        draw(2, 4, 3, 5, seed=3).to(dtype),
        (draw(2, 2, 6, 5, seed=4).to(dtype), draw(2, 2, 6, 3, seed=5).to(dtype)),
    )
    for loaded in (Memory.load(path), Memory.load(path, memory.operator)):
        assert (loaded.kind, loaded.count, loaded.nbytes, loaded.form) == (
            memory.kind,
            memory.count,
            memory.nbytes,
            memory.form,
        )
        assert torch.equal(loaded.read(q), memory.read(q))
        assert torch.equal(loaded.absorb(*more).read(q), memory.absorb(*more).read(q))
        assert set(loaded.tensors()) == set(memory.tensors())
        if memory.count % 4 == 0 or not any(isinstance(p, prior.ChunkCausal) for p in loaded.operator.prior):
            assert loaded.merge(memory).count == 2 * memory.count


def test_given_operator_is_the_live_one(tmp_path) -> None:
    memory = filled("ska-1")
    memory.save(tmp_path / "m")
    live = m.ska(power=1).double()
    assert Memory.load(tmp_path / "m", live).operator is live


def test_a_spec_is_an_operator_and_a_number_is_none(tmp_path) -> None:
    memory = Memory.empty(m.ridge(), 1, 1, 4, 3)
    memory.save(tmp_path / "m")
    assert Memory.load(tmp_path / "m", "ridge").form == memory.form
    with pytest.raises(ArgumentError, match=r"Memory.load: an Operator or a spec"):
        Memory.load(tmp_path / "m", 5)  # type: ignore[arg-type]


def test_an_empty_memory_goes_on_from_its_file(tmp_path) -> None:
    k, v, q = (draw(1, 2, 4, 4, seed=seed).float() for seed in range(3))
    for name in NAMES:
        empty = Memory.empty(OPERATORS[name](), 1, 2, 4, 4)
        empty.save(tmp_path / "m")
        loaded = Memory.load(tmp_path / "m")
        assert loaded.count == 0
        assert torch.equal(loaded.absorb(k, v).read(q), empty.absorb(k, v).read(q)), name


@pytest.mark.parametrize("name", ["softmax", "ska-1", "squared_affine"])
def test_truncated_flipped_and_foreign_files(name: str, tmp_path) -> None:
    memory, path = filled(name), tmp_path / "m"
    memory.save(path)
    whole = path.read_bytes()
    for length in (0, 4, len(whole) // 3, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError, match="load memory") as told:
            Memory.load(path)
        assert "\n" not in str(told.value)
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(len(whole), (60,), generator=generator).tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        with pytest.raises(FileFormatError, match="load memory"):
            Memory.load(path)
    path.write_bytes(b"PK\x03\x04 something else entirely")
    with pytest.raises(FileFormatError, match="load memory"):
        Memory.load(path)
    save_tensors(path, {"x": torch.zeros(2)}, {"kind": "model"})
    with pytest.raises(FileFormatError, match="a 'memory' was required"):
        Memory.load(path)
    save_tensors(path, {"x": torch.zeros(2)}, {"kind": "memory"})
    with pytest.raises(FileFormatError, match="was not written by this library"):
        Memory.load(path)
    with pytest.raises(FileFormatError, match="does not exist"):
        Memory.load(tmp_path / "absent")


def test_memory_of_another_operator(tmp_path) -> None:
    filled("ska-1").save(tmp_path / "m")
    for other in (m.ska(power=2), m.softmax(), m.ska(power=1, chunk=4)):
        with pytest.raises(FileFormatError, match=r"belongs to operator 'ska'.*was given") as told:
            Memory.load(tmp_path / "m", other)
        assert "\n" not in str(told.value)


def test_shapes_that_do_not_fit_the_header(tmp_path) -> None:
    """A header that was honestly signed but describes other tensors is refused all the same."""
    for name in ("softmax", "ska-1", "squared_affine", "retention"):
        memory = filled(name)
        header = {
            "memory": memory.kind, "operator": memory.operator.config(), "batch": 3, "heads": 2, "key_dim": 5,
            "value_dim": 3, "dtype": "float64",
            "count": memory.count, "plain": memory.plain(),
        }  # fmt: skip
        named = {f"memory.{key}": x for key, x in memory.tensors().items()} | {
            f"operator.{key}": x for key, x in memory.operator.learned_parts.items()
        }
        save_tensors(tmp_path / "m", named, {"kind": "memory", "about": header})
        with pytest.raises(FileFormatError, match="shapes of the header"):
            Memory.load(tmp_path / "m")
        save_tensors(tmp_path / "m", named, {"kind": "memory", "about": {**header, "batch": 2, "memory": "nonsense"}})
        with pytest.raises(FileFormatError, match="does not fit"):
            Memory.load(tmp_path / "m")
        named.popitem() if memory.operator.learned_parts else named.pop(next(iter(named)))
        save_tensors(tmp_path / "m", named, {"kind": "memory", "about": {**header, "batch": 2}})
        with pytest.raises(FileFormatError, match="does not fit"):
            Memory.load(tmp_path / "m")


def test_keys_count_must_match(tmp_path) -> None:
    memory = filled("softmax")
    assert isinstance(memory, KeyValues)
    object.__setattr__(memory, "count", memory.count + 1)
    memory.save(tmp_path / "m")
    with pytest.raises(FileFormatError, match="tokens are announced"):
        Memory.load(tmp_path / "m")
