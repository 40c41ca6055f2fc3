"""Machine of the machine: measured in time, kept, read back, and never at the caller's expense."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_memory import LiveMemory
from torch.utils.checkpoint import checkpoint

from zonal.cache import VARIABLE
from zonal.errors import FileFormatError
from zonal.execution import machine as machines
from zonal.execution.machine import TYPICAL_CPU, TYPICAL_GPU, Machine, typical

CPU = torch.device("cpu")
# taken before the session's fixture puts fixed numbers in its place
MEASURE = machines.measure


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; constants remembered by the process belong to another."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Measuring leaves a mark and gives numbers that say how often it happened."""
    seen: list[torch.device] = []

    def stand_in(device: torch.device) -> Machine:
        seen.append(device)
        return replace(
            TYPICAL_CPU,
            name=machines.name(device),
            threads=machines.threads(device),
            torch=torch.__version__,
            call=len(seen) * 1e-6,
        )

    monkeypatch.setattr(machines, "measure", stand_in)
    return seen


def test_measured_once_and_kept(folder: Path, measured: list[torch.device]) -> None:
    first = machines.machine_for(CPU)
    assert "measured now and kept in" in first.note
    assert machines.machine_for(CPU) is first
    assert len(measured) == 1
    path = machines.file_for(CPU)
    assert path.parent == folder / "machine"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left behind"
    again = machines.read(path, CPU)
    assert again == first
    assert "read from" in again.note


def test_another_process_reads_what_was_kept(folder: Path, measured: list[torch.device]) -> None:
    machines.machine_for(CPU)
    machines._once.cache_clear()
    assert "read from" in machines.machine_for(CPU).note
    assert len(measured) == 1


def test_threads_have_constants_of_their_own(folder: Path, measured: list[torch.device]) -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            assert machines.machine_for(CPU).threads == count
    finally:
        torch.set_num_threads(before)
    assert len(measured) == 2
    assert len(list((folder / "machine").iterdir())) == 2


def damage(text: str, how: str) -> str:
    value = json.loads(text)
    if how == "truncated":
        return text[: len(text) // 2]
    if how == "empty":
        return ""
    if how == "no object":
        return "[1, 2]"
    if how == "another machine":
        value["name"] = "another one"
    elif how == "another schema":
        value["schema"] = 0
    elif how == "missing":
        del value["products"]
    elif how == "negative":
        value["call"] = -1.0
    elif how == "text for a number":
        value["call"] = "fast"
    elif how == "true for a number":
        value["call"] = True
    elif how == "number for a machine":
        value["name"] = 3
    elif how == "zero":
        value["bandwidth"] = 0
    return json.dumps(value)


HARM = (
    "truncated", "empty", "no object", "another machine", "another schema", "missing", "negative", "text for a number",
    "true for a number",
    "number for a machine", "zero",
)  # fmt: skip


@pytest.mark.parametrize("how", HARM)
def test_bad_files_are_measured_anew(how: str, folder: Path, measured: list[torch.device]) -> None:
    machines.machine_for(CPU)
    path = machines.file_for(CPU)
    path.write_text(damage(path.read_text(), how))
    with pytest.raises(FileFormatError):
        machines.read(path, CPU)
    machines._once.cache_clear()
    found = machines.machine_for(CPU)
    assert len(measured) == 2
    assert "because the file there could not be used" in found.note
    assert machines.read(path, CPU) == found, "the bad file was replaced"


def test_infinity_is_refused() -> None:
    value = TYPICAL_CPU.to_dict()
    value["bandwidth"] = float("inf")
    with pytest.raises(FileFormatError, match="bandwidth"):
        Machine.from_dict(value)


def test_the_first_to_finish_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone else's file that appears while this process measures is used, so that both plan alike."""
    mine = replace(
        TYPICAL_CPU,
        name=machines.name(CPU),
        threads=machines.threads(CPU),
        torch=torch.__version__,
        call=1e-6,
    )
    theirs = replace(mine, call=2e-6)

    def slow(device: torch.device) -> Machine:
        machines.store.write_json(machines.file_for(CPU), theirs.to_dict())
        return mine

    monkeypatch.setattr(machines, "measure", slow)
    assert machines.machine_for(CPU).call == 2e-6


def test_without_links_the_file_is_whole_all_the_same(
    folder: Path, measured: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert "kept in" in machines.machine_for(CPU).note
    assert len(list((folder / "machine").iterdir())) == 1


def test_a_folder_that_cannot_be_written_gives_typical_values(
    tmp_path: Path, measured: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be kept is not measured: it would differ from process to process, and so would the path taken."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    found = machines.machine_for(CPU)
    assert found == TYPICAL_CPU
    assert "ZONAL_CACHE" in found.note
    assert not measured


def test_processes_at_once_agree(folder: Path) -> None:
    """Several processes on an empty cache: all end with the same constants, and one file is there."""
    code = (
        "import json, torch\n"
        "from dataclasses import replace\n"
        "from zonal.execution import machine as c\n"
        "import os, time\n"
        "def stand_in(device):\n"
        "    time.sleep(0.3)\n"
        "    return replace(c.TYPICAL_CPU, name=c.name(device), threads=c.threads(device), "
        "torch=torch.__version__, call=os.getpid() * 1e-9)\n"
        "c.measure = stand_in\n"
        "print(json.dumps(c.machine_for(torch.device('cpu')).to_dict()))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate(timeout=120)[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(answers) == 1
    assert len(list((folder / "machine").iterdir())) == 1


def test_inside_a_dispatch_mode_nothing_is_measured(folder: Path, measured: list[torch.device]) -> None:
    with LiveMemory():
        assert "nothing is measured" in machines.machine_for(CPU).note
    assert not measured
    outside = machines.machine_for(CPU)
    with LiveMemory():
        assert machines.machine_for(CPU) == outside


def test_devices_that_are_not_there() -> None:
    assert machines.machine_for(torch.device("meta")) == TYPICAL_GPU
    if not torch.cuda.is_available():
        assert machines.machine_for(torch.device("cuda")) == TYPICAL_GPU
    assert typical(CPU, "because").note == "because"


# -- the real thing --------------------------------------------------------------------------------------------------


def test_real_numbers_make_sense() -> None:
    real = MEASURE(CPU)
    assert 1e-8 < real.call < 1e-3
    # between a hundred million and a hundred trillion
    assert 1e8 < real.products < 1e14
    assert 1e8 < real.compiled < 1e14
    assert 1e8 < real.bandwidth < 1e13
    assert real.memory_bytes > 1 << 28
    assert Machine.from_dict(json.loads(json.dumps(real.to_dict()))) == real


def test_the_caller_notices_nothing() -> None:
    """Random numbers, threads, gradients, autocast and inference mode are as before, and measuring works inside all of
    them.
    """
    torch.manual_seed(3)
    state, count = torch.get_rng_state(), torch.get_num_threads()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        MEASURE(CPU, budget=1e-4)
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == count
    assert torch.is_grad_enabled()


def test_inside_a_checkpointed_region() -> None:
    """Measured on the first run of the region only: what it saves must not count as the region's."""
    x = torch.randn(4, requires_grad=True)
    done = []

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        if not done:
            done.append(MEASURE(CPU, budget=1e-4))
        return y * x

    checkpoint(region, x, use_reentrant=False).sum().backward()
    assert len(done) == 1
    torch.testing.assert_close(x.grad, x.detach().exp() * (1 + x.detach()))


def test_inside_backward_and_another_thread() -> None:
    found = []

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            found.append(MEASURE(CPU, budget=1e-4))
            return grad

    x = torch.ones(3, requires_grad=True)
    thread = threading.Thread(target=lambda: Inside.apply(x).sum().backward())
    thread.start()
    thread.join()
    assert len(found) == 1
    assert torch.equal(x.grad, torch.ones(3))


def test_contended_threads_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads that lose to one mean that others had the processor."""
    took = {1: 1e-4, 2: 6e-5}
    count = torch.get_num_threads()
    monkeypatch.setattr(machines, "_fastest", lambda *_: took[torch.get_num_threads()])
    torch.set_num_threads(2)
    try:
        assert machines._with_threads(CPU, lambda: None, 0.0) == (6e-5, False)
        took[2] = 8e-3
        seconds, contended = machines._with_threads(CPU, lambda: None, 0.0)
    finally:
        torch.set_num_threads(count)
    assert contended
    assert seconds == pytest.approx(1e-4 / 1.7)


# -- a CUDA device, with and without one -----------------------------------------------------------------------------


class Device:
    """A stand-in for torch.cuda: work takes device seconds that its events see and the host's clock does not."""

    now = 0.0
    waits = 0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1.0

        def record(self, stream: str) -> None:
            assert stream == "the stream in use"
            self.at = Device.now

        def elapsed_time(self, end: "Device.Event") -> float:
            assert Device.waits > 0, "events are read when the device is done"
            return 1e3 * (end.at - self.at)  # in milliseconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    Device.now, Device.waits = 0.0, 0

    def wait(device: torch.device) -> None:
        assert device.type == "cuda"
        Device.waits += 1

    monkeypatch.setattr(torch.cuda, "Event", Device.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream in use")
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    return torch.device("cuda", 0)


def work(seconds: float) -> None:
    Device.now += seconds


def test_time_without_the_processor_does_not_count_for_one_thread() -> None:
    """It sleeps in place of another program that has the core. Several threads would wait for one another."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert machines._fastest(CPU, lambda: (time.sleep(0.02), sum(range(20000))), budget=0.0) < 0.02
        torch.set_num_threads(2)
        assert machines._fastest(CPU, lambda: time.sleep(0.02), budget=0.0) >= 0.02
    finally:
        torch.set_num_threads(threads)


def test_cuda_is_timed_by_its_events(device: torch.device) -> None:
    assert machines.seconds(device, lambda: work(0.5), repeat=3) == pytest.approx(1.5)
    assert Device.waits == 1
    assert machines._fastest(device, lambda: work(2e-6), budget=0.0) == pytest.approx(2e-6), (
        "short work is repeated until the clock sees it"
    )
    slow = iter([1.0, 0.4, 0.1, 0.2])
    assert machines._fastest(device, lambda: work(next(slow)), budget=0.0) == pytest.approx(0.1), (
        "the first run is a warm-up, the least counts"
    )


def test_devices_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and number of multiprocessors: slices of one device differ in nothing else."""

    class Properties:
        name, multi_processor_count = "Some Accelerator", 100

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda")
    first = machines.file_for(cuda)
    assert first.name.startswith("some-accelerator-100-")
    assert first != machines.file_for(CPU)
    Properties.multi_processor_count = 50
    assert machines.file_for(cuda) != first
    Properties.multi_processor_count, Properties.name = 100, "Another"
    assert machines.file_for(cuda) != first


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device, and torch sees none here (`make test-gpu` where there is one)",
)
def test_real_numbers_of_a_device_make_sense() -> None:
    machine = MEASURE(torch.device("cuda"))
    assert machine.name == torch.cuda.get_device_name()
    assert machine.threads == torch.cuda.get_device_properties("cuda").multi_processor_count
    # between ten billion and a quadrillion multiply-adds in float32
    assert 1e10 < machine.compiled < 1e15
    assert 1e10 < machine.products < 1e15


def test_rates_follow_the_machine() -> None:
    """What a route does on the typical processor is scaled by how fast this one is at work of its kind."""
    assert TYPICAL_CPU.rate(3e9, compiled=True) == TYPICAL_CPU.rate(3e9, compiled=False) == 3e9
    fast = replace(TYPICAL_CPU, compiled=2 * TYPICAL_CPU.compiled)
    assert fast.rate(3e9, compiled=True) == 6e9
    assert fast.rate(3e9, compiled=False) == 3e9
