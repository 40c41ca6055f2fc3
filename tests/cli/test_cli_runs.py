"""Whole commands: what they write, print and return, and how they end when something is wrong or somebody stops
them.
"""

import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.commands import refused, run

from zonal.cli import bench, compare, demo, parse
from zonal.cli.app import main
from zonal.cli.compare import Compare
from zonal.cli.generate import pieces, until
from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.models import preset
from zonal.training import ComparisonResult
from zonal.training.checkpoint import load_model

SMALL = (
    "--task mqar-demo --vocab-size 64 --length 32 --train-examples 256 --test-examples 16 --layers 1 --dim "
    "16 --heads 2 --mlp none --batch-size 4 --no-tensorboard"
)
ROOT = Path(__file__).resolve().parents[2]


def zonal(words, folder):
    """A process of its own, with what the tests have set in the environment."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "zonal", *shlex.split(words)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


# --- compare ----------------------------------------------------------------------------------------------------------


def test_compare_writes_a_report_and_finds_its_folder_again(here, capsys):
    words = f"compare {SMALL} --operators 'softmax,sko(degrees=(2,3))' --steps 4 --seeds 2"
    code, out, err = run(words, capsys)
    assert (code, err) == (0, "")
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("mqar-demo-")
    assert (folder / "report.html").stat().st_size > 100_000
    assert f"Report: {folder.relative_to(here)}/report.html" in out
    assert "Softmax, seed 0: done after 4 steps, accuracy 0." in out
    assert "SKO (degrees=(2, 3)), seed 1" in out
    assert json.loads((folder / "comparison.json").read_text())["command"] == shlex.join(["zonal", *shlex.split(words)])
    # the same command finds everything done; another number of steps is another comparison
    code, out, _ = run(words, capsys)
    assert code == 0
    assert out.count("done before after 4 steps") == 4
    message = "holds another comparison: training.steps is 4 there and 5 here"
    refused(f"{words.replace('--steps 4', '--steps 5')} --out {folder}", capsys, message)


def test_ctrl_c_stops_with_130_and_the_same_command_goes_on(tmp_path):
    words = f"compare {SMALL} --operators softmax,linear --steps 400 --eval-every 40"
    process = zonal(words, tmp_path)
    assert process.stdout is not None
    line = ""
    while "step 40 of 400" not in line:
        line = process.stdout.readline()
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""
    (folder,) = (tmp_path / "runs").iterdir()
    assert (
        "Stopped with 2 of 2 runs left. Resume with the same command, or with: zonal compare --resume "
        f"{folder.relative_to(tmp_path)}" in out
    )
    assert "No run has finished yet" in (folder / "report.md").read_text()
    again = zonal(f"compare --resume {folder.relative_to(tmp_path)}", tmp_path)
    out, err = again.communicate(timeout=120)
    assert (again.returncode, err) == (0, "")
    assert "Softmax, seed 0, learning rate 0.003: goes on at step " in out
    assert "Linear, seed 0: done after 400 steps" in out
    assert "Preliminary" not in (folder / "report.md").read_text()


def test_how_to_go_on_names_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    """They belong to the machine, so that a comparison does not keep them."""
    stopped = ComparisonResult(Path("runs/a"), "stopped", (), {}, 3)
    assert compare.exit_code(stopped, stopped.directory, 4) == 130
    assert capsys.readouterr().out.endswith("zonal compare --resume runs/a --jobs 4\n")
    assert compare.exit_code(stopped, stopped.directory, "ray") == 130
    assert capsys.readouterr().out.endswith("zonal compare --resume runs/a --workers ray\n")


def test_a_reader_that_leaves_is_no_error(tmp_path):
    process = zonal(f"compare {SMALL} --operators softmax --steps 50 --eval-every 1", tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == ""
    assert process.wait(60) == 141


def test_failed_runs_end_with_1_and_are_in_the_report(here, capsys):
    code, out, _ = run(f"compare {SMALL} --operators softmax --steps 4 --learning-rates 1e6 --out failing", capsys)
    assert code == 1
    assert "1 of 1 runs failed" in out
    assert "zonal compare --resume failing --retry-failed" in out
    assert "Last good checkpoint" in (here / "failing/report.md").read_text()
    began = json.loads((here / "failing/comparison.json").read_text())["device"]["threads"]
    more = f"--threads {began + 1}"
    refused(f"compare --resume failing --retry-failed {more}", capsys, f"{more} would change nothing")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare", "--task is required. Tasks: mqar ("),
        ("compare --task txt", "unknown task 'txt'. Did you mean 'text'?"),
        ("compare --task mqar-demo --operators softmx", "unknown operator 'softmx'. Did you mean 'softmax'?"),
        (
            "compare --task mqar-demo --operators 'sko(degree=(2,3))'",
            "unknown argument 'degree'. Did you mean 'degrees'?",
        ),
        ("compare --task mqar-demo --operators 'sko(degrees=(2,3)'", "unclosed bracket"),
        ("compare --task mqar-demo --data x.txt", "takes no data"),
        ("compare --task text --data missing.txt", "missing.txt does not exist"),
        ("compare --task text --data empty.txt", "empty.txt is empty"),
        ("compare --task text --data binary.txt", "binary.txt is binary"),
        ("compare --task text --data short.txt", "is too short"),
        ("compare --task text --data ''", "--data is empty"),
        ("compare --task text --tokenizer bpe", "unknown tokenizer 'bpe'. Did you mean 'byte'?"),
        ("generate --model nowhere --prompt x", "generate: nowhere does not exist. Required: the folder of a run"),
        ("compare --resume nowhere", "nowhere holds no comparison"),
        (
            "compare --resume there --seeds 5 --steps 9 --jobs 2",
            "goes on with the settings in there, so --seeds, --steps would change nothing",
        ),
        ("compare --resume there --preset echo-mqar", "so --preset would change nothing. Leave it out"),
        (
            "compare --resume there --seeds 1",
            "so --seeds would change nothing. Leave it out, or begin another folder with",
        ),
        ("compare --resume there --seeds 1", "To add operators, seeds or learning rates, give all settings again"),
        ("compare --task mqar-demo --device gpu", "'gpu' is not a device; use 'cpu'"),
        ("compare --task mqar-demo --device cuda:99", "'cuda:99' is not available"),
        ("compare --task mqar-demo --dim 30 --heads 4", "dim"),
        ("compare --task mqar-demo --budget soon", "'soon' is not a time"),
        ("comprae", "unknown command 'comprae'. Did you mean 'compare'?"),
        ("train --task mqar-demo --operator softmax,soko", "unknown operator 'soko'. Did you mean 'sko'?"),
        ("train --task mqar-demo --model-preset echo-2M", "unknown preset 'echo-2M'. Did you mean 'echo-1M'?"),
        ("train --task mqar-demo --model-preset echo-1M --dim 96", "--model-preset names the whole model"),
        ("train --task mqar-demo --model-preset echo-1M --operator sko", "--model-preset names the whole model"),
        (
            "train --preset echo-table3 --model-preset echo-1M --operator sko",
            "--model-preset names the whole model. Leave out --operator",
        ),
        (
            "compare --task mqar-demo --vocab-size 64 --length 32 --jobs 2 --workers 1",
            "--jobs 2 and --workers 1 both say how many runs go on at a time",
        ),
        ("generate --prompt x", "--model is required"),
        ("generate --model nowhere --prompt x", "nowhere"),
        ("generate --model foreign.safetensors --prompt x", "foreign.safetensors"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(here, capsys, words, message):
    (here / "empty.txt").write_bytes(b"")
    (here / "binary.txt").write_bytes(b"abc\x00\xff" * 100)
    (here / "short.txt").write_text("Too short for one sequence.")
    (here / "foreign.safetensors").write_bytes(b"not tensors")
    refused(words, capsys, message)
    assert not (here / "runs").exists()


@pytest.mark.parametrize("hidden", [False, True])
def test_memory_that_is_refused_is_one_line(hidden, capsys, monkeypatch):
    def ask_for_too_much(options, command):
        try:
            torch.empty(1 << 60, dtype=torch.uint8)
        finally:
            if hidden:  # as zipfile does where a member could not be compressed
                raise ValueError("cannot close")

    monkeypatch.setattr("zonal.cli.tasks.run", ask_for_too_much)
    assert main(["tasks"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("zonal: out of memory (")
    assert said.count("\n") == 1


def test_mistakes_show_no_traceback_in_a_process(tmp_path):
    process = zonal("compare --task mqar-demo --operators softmx", tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_stream_of_another_encoding_ends_nothing(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["zonal", "train", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("zonal", run_name="__main__")
    assert ended.value.code == 0
    assert b"--operator" in stream.buffer.getvalue()


def test_a_closed_output_ends_nothing(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)  # as Python has it after >&- and 2>&-
    assert main(["tasks"]) == 0
    assert main(["tasks", "show", "nope"]) == 2
    sys.stdout.close()
    sys.stderr.close()


def test_no_command_shows_the_help_and_is_a_mistake(capsys):
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("zonal ")


# --- train, generate --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a small trained model of text, and one of recall."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times – é. " * 60)
    model = "--layers 1 --dim 16 --heads 2 --steps 3 --batch-size 2 --no-tensorboard"
    assert (
        main(
            shlex.split(
                f"train --task text --data {folder}/text.txt --length 16 --operator softmax {model} --out {folder}/text"
            )
        )
        == 0
    )
    assert main(shlex.split(f"train {SMALL} --operator linear --steps 3 --out {folder}/recall")) == 0
    return folder


def test_train_says_where_the_model_is(here, trained, capsys):
    words = (
        f"train --task text --data {trained}/text.txt --length 16 --operator 'softmax,ska(power=1)' --dim 16 "
        "--heads 2 --steps 2 --batch-size 2 --no-tensorboard"
    )
    code, out, err = run(words, capsys)
    assert (code, err) == (0, "")
    (folder,) = (here / "runs").iterdir()
    assert f"Model: {folder.relative_to(here)}/checkpoint.safetensors" in out
    assert "Held-out loss" in out
    assert json.loads((folder / "run.json").read_text())["operator"] == "[softmax, ska(power=1)]"


def test_a_preset_is_the_whole_model(here, capsys):
    words = (
        "train --task mqar-demo --vocab-size 64 --length 32 --train-examples 32 --test-examples 4 "
        "--model-preset echo-1M-mamba-koopman --steps 1 --batch-size 2 --no-tensorboard"
    )
    code, out, err = run(words, capsys)
    assert (code, err) == (0, "")
    assert "echo-1M-mamba-koopman" in out
    (folder,) = (here / "runs").iterdir()
    config = load_model(folder / "checkpoint.safetensors")[0].config
    assert config == preset("echo-1M-mamba-koopman", vocab_size=64, max_len=config.max_len)


def test_generate_continues_the_prompt(trained, capsys):
    words = f"generate --model {trained}/text --prompt 'It was' --max-new-tokens 12 --seed 3"
    code, first, err = run(words, capsys)
    assert (code, err) == (0, "")
    assert first.startswith("It was")
    assert first.endswith("\n")
    assert run(words, capsys)[1] == first
    assert run(words.replace("--seed 3", "--seed 4"), capsys)[1] != first
    stopped = run(f"{words} --stop {first[7]!r}", capsys)[1]
    assert stopped == first[: 6 + first[6:].index(first[7])] + first[7] + "\n"
    longer = run(words.replace("--max-new-tokens 12", "--max-new-tokens 0"), capsys)[1]
    assert longer == "It was\n"


def test_generate_for_other_tasks_takes_token_numbers(trained, capsys):
    code, out, _ = run(
        f"generate --model {trained}/recall/checkpoint.safetensors --prompt '3 40 5 41 3' --max-new-tokens 2 "
        "--temperature 0",
        capsys,
    )
    assert code == 0
    assert out.startswith("3 40 5 41 3 ")
    assert len(out.split()) == 7
    words = f"generate --model {trained}/recall --prompt"
    refused(f"{words} hello", capsys, "the prompt must be such numbers, got 'hello'")
    refused(f"{words} 999", capsys, "token numbers must be from 0 to 63, got '999'")
    refused(f"{words} 3 --stop x", capsys, "--stop must be such numbers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompt ''", "--prompt is empty"),
        ("--prompt x --temperature -1", "temperature"),
        ("--prompt x --top-p 2", "--top-p must be from 0 to 1"),
    ],
)
def test_generate_refuses(trained, capsys, options, message):
    refused(f"generate --model {trained}/text {options}", capsys, message)


def test_a_run_in_the_folder_of_a_model_of_transformers_is_the_run(trained, tmp_path, capsys):
    shutil.copy(trained / "text/checkpoint.safetensors", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    words = "--prompt 'It was' --max-new-tokens 12 --seed 3"
    code, out, err = run(f"generate --model {tmp_path} {words}", capsys)
    assert (code, err) == (0, "")
    assert out == run(f"generate --model {trained}/text {words}", capsys)[1]


def test_generate_refuses_a_damaged_checkpoint(trained, tmp_path, capsys):
    data = bytearray((trained / "text/checkpoint.safetensors").read_bytes())
    data[-8] ^= 255
    (tmp_path / "checkpoint.safetensors").write_bytes(data)
    refused(f"generate --model {tmp_path} --prompt x", capsys, "checksum")
    (tmp_path / "checkpoint.safetensors").write_bytes(data[:1000])
    refused(f"generate --model {tmp_path} --prompt x", capsys, "checkpoint.safetensors")


def test_text_waits_for_whole_characters():
    def decode(tokens):
        return bytes(tokens).decode("utf-8", errors="replace")

    assert list(pieces("a–é".encode(), decode)) == ["a", "–", "é"]
    # tokens that end one character and begin the next
    crossing = {0: b"\xe4", 1: b"\xb8", 2: b"\xad\xe4", 3: b"\xad"}
    found = list(pieces([0, 1, 2, 1, 3], lambda tokens: decode(b"".join(crossing[token] for token in tokens))))
    assert found == ["中", "中"]
    # bytes that never become a character are shown as such
    assert "".join(pieces([0x80, 0x81, 0x82, 0x83, 0x61], decode)) == "\ufffd" * 4 + "a"
    assert list(pieces([0xE2, 0x80], decode)) == ["\ufffd"]


@pytest.mark.parametrize("stop", ["s the end", "end", "e", "d."])
def test_text_stops_where_the_words_end_in_whatever_pieces_they_come(stop):
    text = "This is the end. This is the end."
    expected = text[: text.index(stop) + len(stop)]
    for size in (1, 2, 3, 7, 50):
        assert "".join(until([text[at : at + size] for at in range(0, len(text), size)], stop)) == expected
    assert "".join(until(["never", " here"], "there")) == "never here"


# --- bench, demo ------------------------------------------------------------------------------------------------------


def test_bench_lists_and_runs(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "benches_under_test"
    folder.mkdir()
    (folder / "quick.py").write_text(
        '"""Measures nothing.\n\nMore."""\nfrom benches_under_test import helper\n\ndef main(argv):\n    '
        "print(helper.SAID, argv)\n    return 3\n"
    )
    (folder / "helper.py").write_text('SAID = "said"\n')
    monkeypatch.setattr(bench, "folder", lambda: folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, _ = run("bench", capsys)
    assert code == 0
    assert "quick  Measures nothing." in out
    assert "helper" not in out
    code, out, _ = run("bench quick --out x.json --help", capsys)
    assert (code, out) == (3, "said ['--out', 'x.json', '--help']\n")
    refused("bench quik", capsys, "unknown benchmark 'quik'. Did you mean 'quick'?")


def test_bench_without_the_source_tree(tmp_path, monkeypatch, capsys):
    (tmp_path / "zonal").mkdir()
    monkeypatch.setattr(bench.zonal, "__file__", str(tmp_path / "zonal/__init__.py"))
    refused("bench tiled", capsys, "They come with the source tree")


def test_demo_shares_out_any_budget():
    budgets = [parse.duration(settings.budget) for _, settings in demo.parts(demo.Demo(budget="600h"))]
    assert sum(budgets) == pytest.approx(600 * 3600)


def test_demo_puts_both_tasks_on_one_page(here, monkeypatch, capsys):
    training = TrainingOptions(steps=2, batch_size=2, tensorboard=False)
    model = ModelOptions(layers=1, dim=16, heads=2, mlp="none")
    small = {"operators": "softmax,linear", "model": model, "training": training}
    recall = Compare(
        task=TaskOptions(task="mqar-demo", vocab_size=64, length=32, train_examples=64, test_examples=8), **small
    )
    text = Compare(task=TaskOptions(task="text", data="novel", length=16, evaluation_bytes=64), **small)
    monkeypatch.setattr(demo, "PARTS", {"recall": recall, "text": text})
    code, out, err = run("demo --budget 60s", capsys)
    assert (code, err) == (0, "")
    assert f"Report: {here}/runs/demo/report.html" in out
    twin = (here / "runs/demo/report.md").read_text()
    assert "# Two attention operators on two tasks" in twin
    assert "zonal compare --task mqar-demo" in twin
    assert "--operators softmax,linear --budget 30s" in twin
    assert run("demo --budget 60s", capsys)[0] == 0
    code, _, err = run("demo --budget 0.5s --out small", capsys)
    assert code == 2
    needed = re.fullmatch(
        r"zonal: demo: --budget 0\.5s is too small; about (\d+) s are needed\. Give as much, and another folder with "
        r"--out, or leave --budget out\.\n",
        err,
    )
    assert needed is not None
    assert int(needed[1]) % 2 == 0  # of both parts
