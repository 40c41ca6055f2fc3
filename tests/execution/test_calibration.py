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

from zonal import mechanisms
from zonal.data.cache import VARIABLE
from zonal.errors import FileFormatError
from zonal.execution import calibration
from zonal.execution.constants import DEFAULT_CPU, DEFAULT_GPU, Constants, Curve, default
from zonal.execution.cost_kernel import kernel
from zonal.execution.problem import Problem, problem_of
from zonal.execution.tally import Tally

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
        return replace(
            DEFAULT_CPU,
            machine=calibration.machine(device),
            threads=calibration.threads(device),
            torch=torch.__version__,
            call=len(seen) * 1e-6,
        )

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
    "truncated", "empty", "no object", "another machine", "another schema", "missing", "negative", "text for a number",
    "true for a number",
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
    mine = replace(
        DEFAULT_CPU,
        machine=calibration.machine(CPU),
        threads=calibration.threads(CPU),
        torch=torch.__version__,
        call=1e-6,
    )
    theirs = replace(mine, call=2e-6)

    def slow(device: torch.device) -> Constants:
        calibration.store.write_json(calibration.file_for(CPU), theirs.to_dict())
        return mine

    monkeypatch.setattr(calibration, "measure", slow)
    assert calibration.constants_for(CPU).call == 2e-6


def test_without_links_the_file_is_whole_all_the_same(
    folder: Path, measured: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert "kept in" in calibration.constants_for(CPU).note
    assert len(list((folder / "calibration").iterdir())) == 1


def test_a_folder_that_cannot_be_written_gives_typical_values(
    tmp_path: Path, measured: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "    return replace(DEFAULT_CPU, machine=c.machine(device), threads=c.threads(device), "
        "torch=torch.__version__, call=os.getpid() * 1e-9)\n"
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


# -- the real thing --------------------------------------------------------------------------------------------------


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
    for curve in (
        constants.simple,
        constants.select,
        constants.exp,
        constants.reduce,
        constants.matmul,
        constants.cholesky,
        constants.solve,
    ):
        assert curve.at(1e9) > curve.at(10)
    # between a hundred megaflops and a hundred teraflops in big products
    assert 1e8 < 3e7 / constants.matmul.at(3e7) < 1e14
    assert Constants.from_dict(json.loads(json.dumps(constants.to_dict()))) == constants


def test_real_measurement_is_short(real: tuple[Constants, float]) -> None:
    """Two seconds on an idle machine; the processor time leaves room for slow ones."""
    assert real[1] < 12


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


def test_cuda_is_timed_by_its_events(device: torch.device) -> None:
    assert calibration.seconds(device, lambda: work(0.5), repeat=3) == pytest.approx(1.5)
    assert Device.waits == 1
    assert calibration._fastest(device, lambda: work(2e-6), budget=0.0) == pytest.approx(2e-6), (
        "short work is repeated until the clock sees it"
    )
    slow = iter([1.0, 0.4, 0.1, 0.2])
    assert calibration._fastest(device, lambda: work(next(slow)), budget=0.0) == pytest.approx(0.1), (
        "the first run is a warm-up, the least counts"
    )


def test_the_tile_kernel_of_cuda(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call on next to nothing, and the rate of one that fills the device; threads of the processor are left
    alone.
    """
    heads, tokens = calibration._TILES["cuda"]
    lengths, whole = [], calibration.prepare

    def prepared(operator, q, k, v, *, causal):
        lengths.append(tuple(q.shape))
        return whole(operator, q, k, v, causal=causal)

    def tiled(call) -> None:
        work(3e-5 if call.shape[2] == 1 else 3e-5 + 4.0 * heads * tokens**2 * 64 / 2e13)

    def refuse(count: int) -> None:
        raise AssertionError("torch's threads have nothing to do with it")

    full = torch.full
    monkeypatch.setattr(
        torch, "full", lambda *shape, device=None, **options: full(*shape, device=device and "meta", **options)
    )
    monkeypatch.setattr(torch, "set_num_threads", refuse)
    monkeypatch.setattr(calibration, "prepare", prepared)
    monkeypatch.setattr(calibration.native, "refusal", lambda call: None)
    monkeypatch.setattr(calibration.native, "tiled", tiled)
    monkeypatch.setattr(calibration.Operator, "to", lambda operator, device: torch.nn.Module.to(operator, "meta"))
    call, operation = calibration._tile(device, 1e-4)
    assert lengths == [(1, heads, 1, 64), (1, heads, tokens, 64)]
    assert call == pytest.approx(3e-5)
    assert operation == pytest.approx(1 / 2e13)
    monkeypatch.setattr(calibration.native, "refusal", lambda call: "triton is not installed")
    assert calibration._tile(device, 1e-4) == (0.0, 0.0)


def test_devices_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and number of multiprocessors: slices of one device differ in nothing else."""

    class Properties:
        name, multi_processor_count = "Some Accelerator", 100

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda")
    first = calibration.file_for(cuda)
    assert first.name.startswith("some-accelerator-100-")
    assert first != calibration.file_for(CPU)
    Properties.multi_processor_count = 50
    assert calibration.file_for(cuda) != first
    Properties.multi_processor_count, Properties.name = 100, "Another"
    assert calibration.file_for(cuda) != first


def test_the_kernel_costs_what_the_device_measured() -> None:
    """A call that fills the device goes by its rate, one that fills half of it takes twice as long; split keys fill it
    too.
    """
    gpu = replace(DEFAULT_GPU, threads=128, tile=1e-13, tile_call=5e-5, traffic=0.0)
    whole = problem_of_sums(heads=128, queries=64, keys=4096)
    seconds = kernel(whole, Tally(gpu)).seconds
    operations = (seconds - gpu.tile_call) / gpu.tile
    assert operations == pytest.approx(kernel(whole, Tally(gpu)).flops)
    half = replace(whole, H=64, Hkv=64)
    assert kernel(half, Tally(gpu)).seconds == pytest.approx(seconds)
    step = replace(whole, T=1, H=8, Hkv=8)
    assert kernel(step, Tally(gpu)).seconds - gpu.tile_call == pytest.approx((seconds - gpu.tile_call) / 128 * 8 / 4)


def problem_of_sums(heads: int, queries: int, keys: int) -> Problem:
    """Bidirectional SKO on a CUDA device."""
    q, k = (torch.empty(1, heads, tokens, 64, device="meta") for tokens in (queries, keys))
    with torch.no_grad():
        return problem_of(
            calibration.prepare(mechanisms.sko().to("meta"), q, k, k, causal=False), device=torch.device("cuda")
        )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device, and torch sees none here (`make test-gpu` where there is one)",
)
def test_real_numbers_of_a_device_make_sense() -> None:
    constants = MEASURE(torch.device("cuda"))
    assert constants.machine == torch.cuda.get_device_name()
    assert constants.threads == torch.cuda.get_device_properties("cuda").multi_processor_count
    assert 1e-6 < constants.tile_call < 1e-2
    # between ten gigaflops and a petaflop in float32
    assert 1e-15 < constants.tile < 1e-10
    assert 1e8 < 3e7 / constants.matmul.at(3e7) < 1e15
    assert constants.fresh == 0
    assert Constants.from_dict(json.loads(json.dumps(constants.to_dict()))) == constants


def test_free_memory_is_less_than_all() -> None:
    free, total = calibration.free_memory(CPU), calibration.memory(CPU)
    assert free is None or 0 < free <= total


def test_curves_are_flat_before_and_proportional_after() -> None:
    curve = Curve((2.0, 8.0), (1.0, 2.0))
    assert curve.at(0.5) == 1
    assert curve.at(4) == pytest.approx(2**0.5)
    assert curve.at(16) == 4
