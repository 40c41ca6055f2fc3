"""What every benchmark promises of its options, of its record, and of the memory that it counts."""

import importlib

import pytest
import torch

from benchmarks import common
from zonal.errors import ArgumentError


@pytest.mark.parametrize(
    ("words", "written"),
    [([], True), (["--only", "x"], False), (["--quick"], False), (["--only", "x", "--resume"], True)],
)
def test_a_part_replaces_no_record_and_is_written_where_it_is_told(words: list[str], written: bool) -> None:
    made = common.parser("about", "it", "only", "resume")
    assert (common.Run(made.parse_args(words)).target != "-") == written
    assert common.Run(made.parse_args([*words, "--out", "mine.json"])).target == "mine.json"


def test_rows_that_are_not_there_are_told() -> None:
    run = common.Run(common.parser("about", "it", "only").parse_args(["--only", "skko"]))
    with pytest.raises(ArgumentError, match="no row has --only 'skko' in its description"):
        common.bounded(run, [], lambda cases: {}, lambda case: {}, lambda row, case: "")


ON_THE_CPU = ("convert", "ingest", "long_context", "merging", "recall", "relatives", "soak", "transport", "verdicts")
NEEDED = {"convert": ["--model", "m"], "long_context": ["--model", "m"]}


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_what_runs_on_the_cpu_refuses_another_device(name: str) -> None:
    """Its record would name that device, and be kept with its records."""
    benchmark = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(ArgumentError, match=r"received --device meta\. Leave"):
        benchmark.main([*NEEDED.get(name, []), "--quick", "--device", "meta", "--out", "-"])


def test_the_memory_of_a_gpu_is_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resident size of the process says nothing of it."""
    held = {"now": 100, "most": 0}

    def work() -> object:
        held["most"] = 1100
        return object()

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held["most"])
    assert common.peak_bytes(work, torch.device("cuda")) == 1000


def test_the_memory_of_a_cpu_is_that_of_the_process() -> None:
    size = 1 << 26
    assert common.peak_bytes(lambda: torch.ones(size, dtype=torch.uint8)) >= size // 2
