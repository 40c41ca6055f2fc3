"""Constants of the machine: measured in time, kept, read back, and never at the caller's expense."""

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

from zonal.data.cache import VARIABLE
from zonal.errors import FileFormatError
from zonal.execution import calibration
from zonal.execution.constants import DEFAULT_CPU, DEFAULT_GPU, Constants, Curve, default

CPU = torch.device("cpu")
# taken before the session's fixture puts fixed numbers in its place
MEASURE = calibration.measure


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; constants remembered by the process belong to another."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Measuring leaves a mark and gives numbers that say how often it happened."""
    seen: list[torch.device] = []

    def stand_in(device: torch.device) -> Constants:
        seen.append(device)
        return replace(DEFAULT_CPU, machine=calibration.machine(device), threads=calibration.threads(device), torch=torch.__version__, call=len(seen) * 1e-6)

    monkeypatch.setattr(calibration, "measure", stand_in)
    return seen


def test_measured_once_and_kept(folder: Path, measured: list[torch.device]) -> None:
    first = calibration.constants_for(CPU)
    assert "measured now and kept in" in first.note
    assert calibration.constants_for(CPU) is first
    assert len(measured) == 1
    path = calibration.file_for(CPU)
    assert path.parent == folder / "calibration"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left behind"
    again = calibration.read(path, CPU)
    assert again == first
    assert "read from" in again.note


def test_another_process_reads_what_was_kept(folder: Path, measured: list[torch.device]) -> None:
    calibration.constants_for(CPU)
    calibration._once.cache_clear()
    assert "read from" in calibration.constants_for(CPU).note
    assert len(measured) == 1


def test_threads_have_constants_of_their_own(folder: Path, measured: list[torch.device]) -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            assert calibration.constants_for(CPU).threads == count
    finally:
        torch.set_num_threads(before)
    assert len(measured) == 2
    assert len(list((folder / "calibration").iterdir())) == 2


def damage(text: str, how: str) -> str:
    value = json.loads(text)
    if how == "truncated":
        return text[: len(text) // 2]
    if how == "empty":
        return ""
    if how == "no object":
        return "[1, 2]"
    if how == "another machine":
        value["machine"] = "another one"
    elif how == "another schema":
        value["schema"] = 0
    elif how == "missing":
        del value["matmul"]
    elif how == "negative":
        value["call"] = -1.0
    elif how == "text for a number":
        value["call"] = "fast"
    elif how == "true for a number":
        value["call"] = True
    elif how == "number for a machine":
        value["machine"] = 3
    elif how == "no curve":
        value["exp"] = 1.0
    elif how == "zero in a curve":
        value["exp"]["seconds"][0] = 0
    elif how == "curve not rising":
        value["exp"]["sizes"][1] = value["exp"]["sizes"][0]
    elif how == "uneven curve":
        value["exp"]["seconds"].pop()
    return json.dumps(value)


HARM = (
    "truncated", "empty", "no object", "another machine", "another schema", "missing", "negative", "text for a number", "true for a number",
    "number for a machine", "no curve", "zero in a curve", "curve not rising", "uneven curve",
)  # fmt: skip


@pytest.mark.parametrize("how", HARM)
def test_bad_files_are_measured_anew(how: str, folder: Path, measured: list[torch.device]) -> None:
    calibration.constants_for(CPU)
    path = calibration.file_for(CPU)
    path.write_text(damage(path.read_text(), how))
    with pytest.raises(FileFormatError):
        calibration.read(path, CPU)
    calibration._once.cache_clear()
    found = calibration.constants_for(CPU)
    assert len(measured) == 2
    assert "because the file there could not be used" in found.note
    assert calibration.read(path, CPU) == found, "the bad file was replaced"


def test_infinity_is_refused() -> None:
    value = DEFAULT_CPU.to_dict()
    value["traffic"] = float("inf")
    with pytest.raises(FileFormatError, match="traffic"):
        Constants.from_dict(value)


def test_the_first_to_finish_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone else's file that appears while this process measures is used, so that both plan alike."""
    mine = replace(DEFAULT_CPU, machine=calibration.machine(CPU), threads=calibration.threads(CPU), torch=torch.__version__, call=1e-6)
    theirs = replace(mine, call=2e-6)

    def slow(device: torch.device) -> Constants:
        calibration.store.write_json(calibration.file_for(CPU), theirs.to_dict())
        return mine

    monkeypatch.setattr(calibration, "measure", slow)
    assert calibration.constants_for(CPU).call == 2e-6


def test_without_links_the_file_is_whole_all_the_same(folder: Path, measured: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert "kept in" in calibration.constants_for(CPU).note
    assert len(list((folder / "calibration").iterdir())) == 1


def test_a_folder_that_cannot_be_written_gives_typical_values(tmp_path: Path, measured: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be kept is not measured: it would differ from process to process, and so would the path taken."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    found = calibration.constants_for(CPU)
    assert found == DEFAULT_CPU
    assert "ZONAL_CACHE" in found.note
    assert not measured


def test_processes_at_once_agree(folder: Path) -> None:
    """Several processes on an empty cache: all end with the same constants, and one file is there."""
    code = (
        "import json, torch\n"
        "from dataclasses import replace\n"
        "from zonal.execution import calibration as c\n"
        "from zonal.execution.constants import DEFAULT_CPU\n"
        "import os, time\n"
        "def stand_in(device):\n"
        "    time.sleep(0.3)\n"
        "    return replace(DEFAULT_CPU, machine=c.machine(device), threads=c.threads(device), torch=torch.__version__, call=os.getpid() * 1e-9)\n"
        "c.measure = stand_in\n"
        "print(json.dumps(c.constants_for(torch.device('cpu')).to_dict()))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate(timeout=120)[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(answers) == 1
    assert len(list((folder / "calibration").iterdir())) == 1


def test_inside_a_dispatch_mode_nothing_is_measured(folder: Path, measured: list[torch.device]) -> None:
    with LiveMemory():
        assert "nothing is measured" in calibration.constants_for(CPU).note
    assert not measured
    outside = calibration.constants_for(CPU)
    with LiveMemory():
        assert calibration.constants_for(CPU) == outside


def test_devices_that_are_not_there() -> None:
    assert calibration.constants_for(torch.device("meta")) == DEFAULT_GPU
    if not torch.cuda.is_available():
        assert calibration.constants_for(torch.device("cuda")) == DEFAULT_GPU
    assert default(CPU, "because").note == "because"


# -- the real thing ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> tuple[Constants, float]:
    start = time.process_time()
    constants = MEASURE(CPU)
    return constants, time.process_time() - start


def test_real_numbers_make_sense(real: tuple[Constants, float]) -> None:
    constants, _ = real
    assert 1e-8 < constants.call < 1e-3
    assert 1e-8 < constants.product < 1e-3
    assert 0 <= constants.record < 1e-3
    assert constants.memory_bytes > 1 << 28
    for curve in (constants.simple, constants.select, constants.exp, constants.reduce, constants.matmul, constants.cholesky, constants.solve):
        assert curve.at(1e9) > curve.at(10)
    # between a hundred megaflops and a hundred teraflops in big products
    assert 1e8 < 3e7 / constants.matmul.at(3e7) < 1e14
    assert Constants.from_dict(json.loads(json.dumps(constants.to_dict()))) == constants


def test_real_measurement_is_short(real: tuple[Constants, float]) -> None:
    """Two seconds on an idle machine; the processor time leaves room for slow ones."""
    assert real[1] < 12


def test_the_caller_notices_nothing() -> None:
    """Random numbers, threads, gradients, autocast and inference mode are as before, and measuring works inside all of them."""
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
    assert x.grad is not None


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


def test_contended_threads_are_told() -> None:
    """Several threads that lose to one mean that others had the processor."""
    one = calibration._Rates({"simple": (1e-6, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)}, (1e-4,), (1e-4,), (1e-4,), 1e-4)
    fine = calibration._Rates({"simple": (1e-6, 1e-6, 1e-5, 6e-5, 6e-4, 6e-3)}, (6e-5,), (6e-5,), (6e-5,), 6e-5)
    stalled = calibration._Rates({"simple": (1e-6, 1e-6, 8e-3, 8e-3, 8e-3, 1.6e-2)}, (8e-3,), (8e-3,), (8e-3,), 8e-3)
    rates, contended = calibration._together(one, fine, 2)
    assert not contended
    assert rates.products == (6e-5,)
    rates, contended = calibration._together(one, stalled, 2)
    assert contended
    assert rates.products[0] == pytest.approx(1e-4 / 1.7)
    assert rates.kinds["simple"][:2] == (1e-6, 1e-6)


def test_free_memory_is_less_than_all() -> None:
    free, total = calibration.free_memory(CPU), calibration.memory(CPU)
    assert free is None or 0 < free <= total


def test_curves_are_flat_before_and_proportional_after() -> None:
    curve = Curve((2.0, 8.0), (1.0, 2.0))
    assert curve.at(0.5) == 1
    assert curve.at(4) == pytest.approx(2**0.5)
    assert curve.at(16) == 4
