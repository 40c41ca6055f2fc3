"""``python -m zonal.hf PROGRAM``: a program that knows only the Auto classes loads the models of this library."""

import subprocess
import sys

from zonal import hf

PROGRAM = """\
import sys
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(__name__, type(model).__name__, *sys.argv[2:])
"""


def run(*words: str, folder) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True)


def test_a_program_loads_a_model_of_this_library(tmp_path):
    config = hf.ZonalConfig(vocab_size=32, dim=16, layers="linear", heads=2)
    hf.ZonalForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM)
    alone = run("program", "model", folder=tmp_path)
    assert alone.returncode != 0
    assert "zonal" in alone.stderr
    done = run("zonal.hf", "program", "model", "--tasks", "x", folder=tmp_path)
    assert done.stdout.split() == ["__main__", "ZonalForCausalLM", "--tasks", "x"], done.stderr


def test_a_missing_program_is_named(tmp_path):
    done = run("zonal.hf", "no_such_program", folder=tmp_path)
    assert done.returncode == 1
    assert "python -m zonal.hf: the module no_such_program is required" in done.stderr
