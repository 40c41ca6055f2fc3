"""``zonal explain`` prints what ``zonal.explain`` says."""

import json
import shlex

import pytest
import torch

import zonal
from zonal import mechanisms
from zonal.cli.app import main
from zonal.cli.explain import _operations


def run(words, capsys):
    code = main(["explain", *shlex.split(words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("spec", ["softmax", "sko(degrees=(2,3))", "ska(power=1)"])
def test_tables_hold_what_the_library_says(spec, capsys):
    code, out, err = run(f"--operator '{spec}' --shape 1,2,64,16 --causal", capsys)
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


def test_json_and_every_option(capsys):
    words = "--operator softmax --shape 2,4,32,16 --kv-heads 2 --keys 48 --value-dim 8 --gradients --key-padding --dtype bfloat16 --json"
    code, out, _ = run(words, capsys)
    assert code == 0
    found = zonal.explain(
        mechanisms.softmax(), (2, 4, 32, 16), (2, 2, 48, 16), (2, 2, 48, 8), dtype=torch.bfloat16, gradients=True, key_padding=True
    ).to_dict()
    assert json.loads(out) == json.loads(json.dumps(found))


def test_a_memory_is_gone_on_from(capsys):
    code, out, _ = run("--operator ridge --shape 1,2,1,16 --causal --memory 100 --json", capsys)
    assert code == 0
    assert json.loads(out)["call"]["memory_tokens"] == 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--operator sko", "--shape is required"),
        ("--shape 1,8,64", "four whole numbers"),
        ("--operator skko --shape 1,8,64,64", "unknown operator 'skko'. Did you mean 'sko'?"),
        ("--shape 1,8,64,64 --kv-heads 3", "multiple"),
        ("--shape 1,8,64,64 --device tpu", "cpu, cuda or cuda:NUMBER was required"),
        ("--shape 1,8,64,64 --memory -4", "explain: memory must be"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_operations():
    assert [_operations(value) for value in (12, 1.5e6, 18.2e9)] == ["12 FLOP", "1.5 MFLOP", "18.2 GFLOP"]
