import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from zonal.cli import app
from zonal.errors import ArgumentError
from zonal.training import environment
from zonal.training.environment import FolderInUseError, PeakMemory, deterministic, folder_lock, interruptible

CPU = torch.device("cpu")
MB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets its high-water mark")
def test_a_small_run_after_a_large_one_is_measured_as_small():
    large = PeakMemory(CPU)
    block = torch.ones(64 * MB)
    many = [torch.ones(1000) for _ in range(20_000)]  # small blocks, which stay in the heap when they are freed
    del block, many
    assert large.growth() > 250 * MB
    small = PeakMemory(CPU)
    assert small.method == "resettable high-water mark"
    block = torch.ones(16 * MB)
    del block
    assert 60 * MB < small.growth() < 100 * MB


def test_deterministic_puts_everything_back():
    threads = torch.get_num_threads()
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), deterministic(3, threads + 1, CPU):  # noqa: PT012
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == threads + 1
        first = torch.rand(2)
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before)
    with deterministic(3, threads, CPU):
        assert torch.equal(torch.rand(2), first)


def test_subnormal_numbers_count_as_zero_in_runs_and_commands(monkeypatch):
    tiny = torch.tensor(1e-39)
    with deterministic(3, 1, CPU):
        with deterministic(3, 1, CPU):
            assert not tiny * 1
        assert not tiny * 1
    assert tiny * 1
    monkeypatch.setattr(app, "_dispatch", lambda words: 0 if tiny * 1 else 7)
    assert app.main([]) == 7
    assert tiny * 1


def test_smallest_numbers_of_numpy_and_of_threads_that_a_command_starts():
    """In a process of its own: here torch has long started its threads, which take subnormal numbers for zero where a
    command starts them; and numpy before 2.4 looks for its smallest numbers once, and warns where it finds 0.
    """
    program = (
        "import numpy, torch; from zonal import subnormals\n"
        "with subnormals.flushed():\n"
        "    found = [numpy.finfo(kind) for kind in (numpy.float32, numpy.float64)]\n"
        "    torch.set_num_threads(2)\n"
        "    print(int((torch.full((1 << 20,), 1.2e-38) * 0.5).count_nonzero()))\n"
        "print(all(kind.smallest_subnormal > 0 for kind in found))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True"]


def test_first_interrupt_is_a_wish_second_is_at_once(request):
    # a shell that starts the suite in the background has it ignore the signal
    request.addfinalizer(
        functools.partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    with pytest.raises(KeyboardInterrupt), interruptible() as wished:  # noqa: PT012
        assert not wished()
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 30
        while not wished() and time.monotonic() < deadline:  # another thread of the process may take the signal first
            time.sleep(0.01)
        assert wished()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_are_left_alone_outside_the_main_thread():
    found = []

    def body():
        with interruptible() as wished:
            found.append(wished())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [False]


def test_lock_waits_for_the_other(tmp_path):
    entered = threading.Event()

    def hold():
        with folder_lock(tmp_path):
            entered.set()
            threading.Event().wait(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with pytest.raises(FolderInUseError, match="in use by another process"), folder_lock(tmp_path):
        pass
    with folder_lock(tmp_path, wait=5.0):
        pass
    thread.join()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArgumentError, match="cannot be made"), folder_lock(folder):
            pass


def test_commit_of_a_checkout_and_of_a_package(tmp_path, monkeypatch):
    def git(*words):
        return subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    package = tmp_path / "zonal" / "training"
    package.mkdir(parents=True)
    (tmp_path / "zonal" / "__init__.py").write_text("")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    assert environment.commit() == environment.package_version()
    git("init", "-q")
    (tmp_path / "mine.txt").write_text("somebody else's")
    git("add", "mine.txt")
    git("commit", "-qm", "one")
    assert environment.commit() == environment.package_version()  # a package below a checkout that it is not part of
    git("add", "-A")
    git("commit", "-qm", "two")
    assert environment.commit() == git("rev-parse", "HEAD")
    (tmp_path / "mine.txt").write_text("changed beside the library")
    assert environment.commit() == git("rev-parse", "HEAD")
    (tmp_path / "zonal" / "__init__.py").write_text("x = 1")
    assert environment.commit() == git("rev-parse", "HEAD") + "-dirty"
