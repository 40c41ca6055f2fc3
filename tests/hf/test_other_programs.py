"""``python -m zonal.hf PROGRAM``: a program that knows only the Auto classes loads the models of this library."""

import subprocess
import sys

import pytest

from zonal import hf
from zonal.hf.__main__ import main

PROGRAM = """\
import sys
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(__name__, type(model).__name__, *sys.argv[2:])
"""
# first alone; one process, since each would import transformers
BOTH = """\
import runpy, sys

sys.argv = ["program", "model"]
try:
    runpy.run_module("program", run_name="__main__", alter_sys=True)
except ValueError as error:
    assert "zonal" in str(error)
    print("alone it fails")
sys.argv = ["zonal.hf", "program", "model", "--tasks", "x"]
runpy.run_module("zonal.hf", run_name="__main__", alter_sys=True)
"""


def test_a_program_loads_a_model_of_this_library(tmp_path):
    config = hf.ZonalConfig(vocab_size=32, dim=16, layers="linear", heads=2)
    hf.ZonalForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "-c", BOTH], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["alone it fails", "__main__ ZonalForCausalLM --tasks x"]


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zonal.hf", "no_such_program"])
    with pytest.raises(SystemExit, match=r"python -m zonal\.hf: the module no_such_program is required"):
        main()
