"""The first call of a process computes what later ones do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
BUDGET = {"torch.float32": 1e-4, "torch.float64": 1e-11}

# mkl_vml_serv_cpu_detect begins by reading the kind of processor, -1 before the first call
STATE = """
import ctypes, pathlib, torch
library = next(pathlib.Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))
function = getattr(ctypes.CDLL(str(library)), "mkl_vml_serv_cpu_detect", None)
if function is not None:
    start = ctypes.cast(function, ctypes.c_void_p).value
    code = ctypes.string_at(start, 6)
    if code[:2] == bytes([0x8B, 0x05]):
        kind = ctypes.c_int.from_address(start + 6 + int.from_bytes(code[2:], "little", signed=True))
        before = kind.value
        import zonal
        print(before, kind.value)
"""


def said(*arguments: str) -> str:
    environment = {**os.environ, "MALLOC_PERTURB_": "1"}  # what is allocated holds garbage
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork a process")
def test_first_calls_read_no_memory_that_was_not_written() -> None:
    found = {
        tuple(names): error
        for *names, error in map(json.loads, said(str(TESTS / "execution/first_calls.py")).splitlines())
    }
    assert {path for path, *_ in found} == {"dense", "tiled", "chunked", "streaming", "sparse", "decode"}
    assert {case: error for case, error in found.items() if not error <= BUDGET[case[2]]} == {}


def test_one_thread_makes_the_first_call_of_mkl() -> None:
    """Two threads that make it at once may compute exp to nine digits."""
    state = said("-c", STATE).split()
    if not state:
        pytest.skip("this build of torch has no MKL, or another one")
    before, after = map(int, state)
    assert before == -1
    assert after >= 0
