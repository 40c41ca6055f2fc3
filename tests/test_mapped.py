"""One function over many items in several processes: a process that dies costs no item."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from zonal.errors import ZonalError
from zonal.workers import mapped


def ends_its_process(item: tuple[str, int]) -> int:
    """Ends the process that it runs in when it is called with this file for the first time."""
    file, number = item
    if number == 5 and not Path(file).exists():
        Path(file).write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def always_ends(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_dead_worker_costs_one_item(tmp_path):
    items = [(str(tmp_path / "died"), number) for number in range(12)]
    assert list(mapped(ends_its_process, items, 2)) == [number * number for number in range(12)]
    assert (tmp_path / "died").exists()
    with pytest.raises(ZonalError, match="processes died 4 times in a row"):
        list(mapped(always_ends, [1, 2, 3], 2))


class Slow(list[Any]):
    """Items that take a while to come, in which a process that was given an earlier one dies."""

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if isinstance(place, slice):
            return (time.sleep(0.2) or each for each in found)
        time.sleep(0.2)
        return found


def test_a_worker_may_die_before_all_items_are_given_out(tmp_path):
    """The error of the pool ended the caller, or an item that was done was left out."""
    items = Slow((str(tmp_path / "died"), number) for number in range(8))
    assert list(mapped(ends_its_process, items, 2)) == [number * number for number in range(8)]
    with pytest.raises(ZonalError, match="processes died 4 times in a row"):
        list(mapped(always_ends, Slow([1, 2]), 2))


def sleeps(number: int) -> int:
    time.sleep(0.2)
    return os.getpid()


def test_workers_end_with_their_parent() -> None:
    code = (
        "import test_mapped, zonal.workers as w\n"
        "for pid in w.mapped(test_mapped.sleeps, range(10**6), 2): print(pid, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    ) as process:
        assert process.stdout is not None
        found = {int(process.stdout.readline()) for _ in range(6)}
        process.kill()
        # they hold its output open for as long as they live
        process.communicate(timeout=60)
    assert len(found) == 2
