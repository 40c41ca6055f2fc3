"""``zonal explain`` prints what ``zonal.explain`` says."""

import json
import shlex
from dataclasses import asdict

import pytest
import torch
from cli.commands import refused, run
from report.comparison_folder import drawn

import zonal
from zonal import mechanisms
from zonal.cli.app import main
from zonal.cli.explain import _operations
from zonal.nn import Attention
from zonal.theory.heads import forms
from zonal.training import load_model


@pytest.mark.parametrize("spec", ["softmax", "sko(degrees=(2,3))", "ska(power=1)"])
def test_tables_hold_what_the_library_says(spec, capsys):
    code, out, err = run(f"explain --operator '{spec}' --shape 1,2,64,16 --causal", capsys)
    assert (code, err) == (0, "")
    found = zonal.explain(mechanisms.resolve(spec), (1, 2, 64, 16), causal=True)
    lines = [line.rstrip() for line in out.splitlines()]
    assert f"path      {found.path}" in lines
    assert any(line.startswith("why") and found.why[:40] in line for line in lines)
    for estimate in found.plan.estimates:
        assert any(line.startswith(estimate.path) and f"{estimate.calls:,}" in line for line in lines)
    for path, why in found.plan.refused.items():
        assert any(line.startswith(path) and why[:60] in line for line in lines)
    for move in found.moves:
        assert any(f"── {move.step} [{move.slot}] {move.name}: {move.assumes}"[:90] in line for line in lines)
        assert all(any(f"── {derived.text}"[:90] in line for line in lines) for derived in move.derives)
    assert "\x1b" not in out


def test_an_operator_without_a_memory_says_so(capsys):
    _, out, _ = run("explain --operator sinkhorn --shape 1,2,64,16", capsys)
    assert "memory    none: all queries are read together" in [line.rstrip() for line in out.splitlines()]


def test_json_and_every_option(capsys):
    words = (
        "explain --operator softmax --shape 2,4,32,16 --kv-heads 2 --keys 48 --value-dim 8 --gradients --key-padding "
        "--dtype bfloat16 --json"
    )
    code, out, _ = run(words, capsys)
    assert code == 0
    found = zonal.explain(
        mechanisms.softmax(),
        (2, 4, 32, 16),
        (2, 2, 48, 16),
        (2, 2, 48, 8),
        dtype=torch.bfloat16,
        gradients=True,
        key_padding=True,
    ).to_dict()
    assert json.loads(out) == json.loads(json.dumps(found))


def test_a_memory_is_gone_on_from(capsys):
    code, out, _ = run("explain --operator ridge --shape 1,2,1,16 --causal --memory 100 --json", capsys)
    assert code == 0
    assert json.loads(out)["call"]["memory_tokens"] == 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--operator sko", "--shape is required"),
        ("--shape 1,8,64", "four whole numbers"),
        ("--operator skko --shape 1,8,64,64", "unknown operator 'skko'. Did you mean 'sko'?"),
        ("--shape 1,8,64,64 --kv-heads 3", "multiple"),
        ("--shape 1,8,64,64 --device tpu", "'tpu' is not a device"),
        ("--shape 1,8,64,64 --memory -4", "explain: --memory must be from 0"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    refused(f"explain {words}", capsys, message)


def test_operations():
    assert [_operations(value) for value in (12, 1.5e6, 18.2e9)] == ["12 FLOP", "1.5 MFLOP", "18.2 GFLOP"]


def test_the_tree(capsys):
    code, out, _ = run("explain --tree", capsys)
    assert code == 0
    tree, legend = out.split("\n\n")
    assert tree.splitlines()[0] == "all evidence between all records"
    assert "= regime, softmax" in tree
    assert "quotient [anchor] row probe: only the row-conditional of K is observed" in legend.splitlines()
    names = {line.split("─ ")[1].split(": ")[1] for line in tree.splitlines() if ": " in line}
    assert names == {line.split("] ")[1].split(": ")[0] for line in legend.splitlines()}
    message = "--causal does not apply to the tree of all mechanisms; leave it out with --tree"
    refused("explain --tree --causal", capsys, message)


# --- a trained model --------------------------------------------------------------------------------------------------

TASK = "--task mqar-demo --vocab-size 64 --length 32 --train-examples 64 --test-examples 8"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = (
        f"train {TASK} --dim 16 --heads 2 --mlp none --batch-size 4 --steps 1 --no-tensorboard --operator "
        f"'softmax, sko, mamba2(head_dim=16, state=8), linear' --out {folder}"
    )
    assert main(shlex.split(words)) == 0
    return folder


def test_heads_of_a_trained_model(trained, capsys):
    code, out, err = run(f"explain --model {trained} --ranks 1,3 --refine 2 --length 24", capsys)
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    assert "2 sequences of 24 tokens; heads as layer.head" in lines
    rows = {
        line.split()[0]: line.split()[1:] for line in lines if line[:3] in ("1.1", "1.2", "4.1", "4.2") and "%" in line
    }
    assert set(rows) == {"1.1", "1.2", "4.1", "4.2"}
    for cells in rows.values():
        assert sum(float(cell.rstrip("%")) for cell in cells[:3]) == pytest.approx(100, abs=0.2)
    assert any(
        line.split() == ["head", "equal", "columns", "rank", "1", "fitted", "rank", "3", "fitted"] for line in lines
    )
    assert "layer 2 is left out: the kernel of sko may be negative" in lines
    assert "layer 3 is left out: Mamba2 compares no queries with keys" in lines
    assert any("row gauge" in line for line in lines)
    assert "Ledger of softmax" in lines
    assert "Ledger of linear" in lines


def test_heads_as_json(trained, capsys):
    path = trained / "checkpoint.safetensors"
    words = f"explain --model {path} --layer 1 --text '3 40 5 41 3 40 7' --ranks 1,2 --refine 0 --json"
    code, out, _ = run(words, capsys)
    assert code == 0
    found = json.loads(out)
    assert (found["sequences"], found["tokens"], found["ranks"]) == (1, 7, [1, 2])
    (layer,) = found["layers"]
    assert (layer["layer"], layer["operator"], layer["refused"]) == (1, "softmax", None)
    assert all(head["gauge"] == head["rows"] > 0 for head in layer["heads"])
    model, _ = load_model(path)
    _, attention, x = next(model.layer_inputs(torch.tensor([[3, 40, 5, 41, 3, 40, 7]])))
    assert isinstance(attention, Attention)
    assert layer["heads"] == json.loads(json.dumps([asdict(head) for head in forms(attention, x, (1, 2))]))
    assert layer["ledger"][1]["derives"][0]["theorem"] == "exponential link"


def test_heads_as_a_page(trained, tmp_path, capsys):
    path = tmp_path / "page.html"
    words = f"explain --model {trained} --layer 4 --text '3 40 5 41 3 40 7' --ranks 1,2 --refine 0 --out {path}"
    code, out, err = run(words, capsys)
    assert (code, err) == (0, "")
    assert f"Page: {path}" in out
    found = drawn(path)
    assert found["tokens"] == ["3", "40", "5", "41", "3", "40", "7"]
    assert set(found["maps"]) == {"4.1", "4.2"}
    assert all(sum(head["spectrum"]) == pytest.approx(1, abs=1e-3) for head in found["heads"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layer 5", "--layer must be from 1 to 4"),
        ("--layer 2", "no layer's heads have a form: layer 2: the kernel of sko may be negative"),
        ("--ranks 2,1", "--ranks: '2,1' must be rising"),
        ("--ranks 40", "ranks up to 40 need as many tokens, and at least 2; received 32"),
        ("--text '3 4 x'", "--text must be such numbers"),
        ("--text 3", "received 1"),
        ("--sequences 0", "--sequences must be from 1"),
        (
            "--shape 1,2,3,4 --causal",
            "--shape 1,2,3,4 --causal is about how an operator is run; leave it out with --model",
        ),
    ],
)
def test_mistakes_about_a_model(trained, words, message, capsys):
    refused(f"explain --model {trained} {words}", capsys, message)


def test_what_needs_a_model_says_so(capsys):
    refused("explain --shape 1,2,3,4 --layer 1 --ranks 1", capsys, "--layer 1 --ranks 1 needs --model")
