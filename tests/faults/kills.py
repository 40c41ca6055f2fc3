"""Kills and full disks at random points of commands that write: nothing that was acknowledged is lost."""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from faults.child import NONE, Ended, Fault, run
from faults.inputs import need
from faults.victims import VICTIMS, Facts, Victim, leftovers

MOST_IN_A_ROW = 4
STATUS_OF_MISTAKES = 2
AMPLE = 1 << 28


class Whole(NamedTuple):
    """A run that nothing happened to."""

    ended: Ended
    result: Any
    size: int


class Place:
    """Where a victim works: a folder with ``out``, its own cache, and the compiled kernels and rates of all."""

    def __init__(self, victim: Victim, base: Path) -> None:
        need(base, *victim.needs)
        self.victim, self.base, self.root = victim, base, base / "work"
        self.words = victim.words(base / "inputs", self.root)

    @contextlib.contextmanager
    def fresh(self, size: int | None = None) -> Iterator[None]:
        """An own state of the folder. size: bytes of the disk that it is on, where one can be mounted."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        if size is not None:
            mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self.root))
        try:
            (self.root / "cache").mkdir()
            for name in ("kernels", "machine"):
                (self.root / "cache" / name).symlink_to(self.base / "cache" / name)
            self.victim.begin(self.root)
            yield
        finally:
            if size is not None:
                subprocess.run(["umount", str(self.root)], check=True)
            shutil.rmtree(self.root)

    def run(self, fault: Fault = NONE) -> Ended:
        return run(self.words, self.root, fault, self.victim.prepare)

    def whole(self) -> Whole:
        """Twice: what is made once and kept for all, such as kernels, is not part of the run."""
        for _ in range(2):
            with self.fresh():
                ended = self.run()
                assert ended.code == 0, ended.said
                assert not leftovers(self.root), leftovers(self.root)
                found = self.victim.result(self.root)
                size = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        return Whole(ended, found, size)

    def told(self, before: Facts, ended: Ended) -> Facts:
        """What is acknowledged now: all that was before, and all that the command claimed."""
        now, claimed = self.victim.told(self.root), self.victim.claims(ended.said)
        assert before <= now, f"lost: {sorted(map(str, before - now))[:5]}"
        assert claimed <= now, f"claimed and lost: {sorted(map(str, claimed - now))[:5]}"
        return now

    def finish(self, before: Facts, whole: Whole) -> None:
        """The same command, to its end: the same bits, and no temporary file."""
        ended = self.run()
        done = ended.code == 0
        if not done and self.victim.again is not None and self.victim.again in ended.said:
            done = self.victim.told(self.root) == before  # nothing was left to do
        assert done, f"status {ended.code}: {ended.said[-600:]}"
        self.told(before, ended)
        found = different(self.victim.result(self.root), whole.result)
        assert found is None, f"not the same bits as an uninterrupted run: {found}"
        assert not leftovers(self.root), f"left behind: {leftovers(self.root)}"


def kills(name: str, base: Path, count: int, draw: random.Random) -> dict[str, Any]:
    """Kill a victim ``count`` times, a few times in a row, and let it end: half of the kills before a random file
    operation, half after a random time.
    """
    place = Place(VICTIMS[name], base)
    whole = place.whole()
    killed = {"before a file operation": 0, "after a random time": 0}
    found: list[str] = []
    while sum(killed.values()) < count and len(found) < 5:
        points: list[Fault] = []
        try:
            with place.fresh():
                facts = place.victim.told(place.root)
                for _ in range(draw.randint(1, MOST_IN_A_ROW)):
                    by_time = draw.random() < 0.5
                    fault = (
                        Fault(kill_after=draw.uniform(0, whole.ended.seconds))
                        if by_time
                        else Fault(kill_at=draw.randrange(whole.ended.operations))
                    )
                    points.append(fault)
                    ended = place.run(fault)
                    facts = place.told(facts, ended)
                    if not ended.killed:
                        assert ended.code == 0 or str(place.victim.again) in ended.said, ended.said[-600:]
                        break
                    killed["after a random time" if by_time else "before a file operation"] += 1
                place.finish(facts, whole)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error} after {points}")
    return {"kills": sum(killed.values()), **killed, "seconds_whole": round(whole.ended.seconds, 2), "failures": found}


def full_disks(name: str, base: Path, count: int, draw: random.Random) -> dict[str, Any]:
    """Fill the disk of a victim ``count`` times: half from a random file operation on, half by a file system of a
    random size, where one can be mounted. It says a sentence, and goes on once there is space.
    """
    place = Place(VICTIMS[name], base)
    whole, mounted = place.whole(), mountable(base)
    told = {"from a file operation on": 0, "on a small file system": 0}
    found: list[str] = []
    for _ in range(count):
        small = mounted and draw.random() < 0.5
        size = draw.randrange(4096, whole.size) if small else None
        fault = NONE if small else Fault(full_at=draw.randrange(whole.ended.takings))
        try:
            with place.fresh(size=AMPLE if small else None):
                facts = place.victim.told(place.root)
                if small:
                    used = os.statvfs(place.root)
                    taken = (used.f_blocks - used.f_bfree) * used.f_frsize
                    mount("-o", f"remount,size={taken + size}", str(place.root))
                ended = place.run(fault)
                if ended.code != 0:
                    sentence_of(ended, "no space left", "No space left")
                    told["on a small file system" if small else "from a file operation on"] += 1
                facts = place.told(facts, ended)
                if small:
                    mount("-o", f"remount,size={AMPLE}", str(place.root))
                place.finish(facts, whole)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error} after {size or fault}")
    return {"disks": count, "said": told, "failures": found}


def different(one: Any, other: Any, place: str = "") -> str | None:
    """Where two values first differ, and how."""
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = ([each for pair in sorted(value.items()) for each in pair] for value in (one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for n, pair in pairs if (found := different(*pair, f"{place}/{n}"))), None)
    return None if one == other else f"{str(one)[:200]} and {str(other)[:200]} at {place}"


def sentence_of(ended: Ended, *words: str) -> None:
    """Raise unless a command ended as by a mistake, with one line of the library that has one of ``words``."""
    lines = [line for line in ended.said.splitlines() if line.startswith("zonal: ")]
    assert ended.code == STATUS_OF_MISTAKES, f"status {ended.code}: {ended.said[-600:]}"
    assert "Traceback" not in ended.said, ended.said[-600:]
    assert len(lines) == 1, ended.said[-600:]
    assert any(word in lines[0] for word in words), lines[0]


def mountable(base: Path) -> bool:
    """Whether this process may mount a file system."""
    place = base / "mount"
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["umount", str(place)], check=True)
    return True


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)
