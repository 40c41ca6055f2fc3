"""A memory is a value: store facts, merge two memories, take one back, fork one and change its mind, save and load.

python examples/constant_memory.py
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m

DIM = 64
EUROPE = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Greece": "Athens"}
ASIA = {"Japan": "Tokyo", "Korea": "Seoul", "Nepal": "Kathmandu", "Laos": "Vientiane"}
WORDS = ["(nothing)", *EUROPE.values(), *ASIA.values(), "Lyon"]
OPERATOR = m.ridge(eps=1e-3, learn_ridge=False)


def key(name: str) -> Tensor:
    """A direction for a name: random, but always the same."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode()[:6], "little"))
    return torch.nn.functional.normalize(torch.randn(DIM, generator=generator), dim=0)


def absorb(memory: zonal.Memory, facts: dict[str, str]) -> zonal.Memory:
    """The memory after ``facts``; the one that was given is not changed."""
    keys = torch.stack([key(name) for name in facts])[None, None]
    values = torch.eye(len(WORDS))[[WORDS.index(word) for word in facts.values()]][None, None]
    return memory.absorb(keys, values)


def ask(memory: zonal.Memory, name: str) -> str:
    """The word that the memory names for a name; (nothing) when none stands out."""
    answer = memory.read(key(name)[None, None, None])[0, 0, 0]
    return WORDS[int(answer.argmax())] if answer.max() > 0.5 else "(nothing)"


def main() -> None:
    empty = zonal.Memory.empty(OPERATOR, batch=1, heads=1, key_dim=DIM, value_dim=len(WORDS), dtype=torch.float32)
    europe, asia = absorb(empty, EUROPE), absorb(empty, ASIA)
    print(f"empty: {empty.nbytes} bytes; with {europe.count} facts: {europe.nbytes} bytes")
    assert europe.nbytes == empty.nbytes

    world = europe.merge(asia)
    print(
        f"merged: {world.count} facts, {world.nbytes} bytes; Greece → {ask(world, 'Greece')}, Nepal → "
        f"{ask(world, 'Nepal')}"
    )
    assert all(ask(world, name) == word for name, word in {**EUROPE, **ASIA}.items())
    assert ask(world, "Atlantis") == "(nothing)"

    asia_again = world.subtract(europe)
    print(f"without Europe: France → {ask(asia_again, 'France')}, Japan → {ask(asia_again, 'Japan')}")
    assert ask(asia_again, "France") == "(nothing)"
    assert ask(asia_again, "Japan") == "Tokyo"

    # what a fork learns, the original does not: say it often enough and the fork changes its mind
    doubtful = world.fork()
    for _ in range(3):
        doubtful = absorb(doubtful, {"France": "Lyon"})
    print(f"the fork: France → {ask(doubtful, 'France')}; the original: France → {ask(world, 'France')}")
    assert (ask(doubtful, "France"), ask(world, "France")) == ("Lyon", "Paris")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "world.safetensors"
        world.save(path)
        loaded = zonal.Memory.load(path)
        print(f"saved and loaded: {path.stat().st_size} bytes on disk; Italy → {ask(loaded, 'Italy')}")
        assert ask(loaded, "Italy") == "Rome"


if __name__ == "__main__":
    main()
