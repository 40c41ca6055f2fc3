"""``zonal explain --model … --gpus N``: a step of training on GPUs that are not there."""

import dataclasses
import json
import shlex

import pytest
from cli.commands import refused, run

from zonal.cli.app import main
from zonal.models import ModelConfig, build

CONFIG = ModelConfig(64, dim=16, layers=("softmax", "ska(power=1)", "softmax"), heads=2, conv=3)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CONFIG.to_dict()))
    return path


def step(words, capsys):
    code, out, err = run(f"explain {words} --json", capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["estimate"] is True
    return found["step"]


def test_parts_are_counted_from_the_model(model, capsys):
    made = build(CONFIG, seed=0)
    one = step(f"--model {model} --gpus 1 --batch-size 8 --tokens 128", capsys)
    numbers = sum(each.numel() for each in made.parameters())
    assert one["parameters"] == made.num_parameters()
    assert one["memory"]["parameters"] == one["memory"]["gradients"] == 4 * numbers
    assert one["memory"]["optimiser"] == 8 * numbers
    assert set(one["traffic"].values()) == {0}
    matrices = sum(
        each.numel() for name, each in made.blocks.named_parameters() if each.ndim == 2 and "conv" not in name
    )
    assert one["operations"]["projections and mlps"] == 6 * matrices * 8 * 128
    assert one["operations"]["output head"] == 6 * 64 * 16 * 8 * 128


def test_more_gpus_share_and_send(model, capsys):
    words = f"--model {model} --batch-size 8 --tokens 128"
    one, two, four = (step(f"{words} --gpus {gpus}", capsys) for gpus in (1, 2, 4))
    for part in ("parameters", "gradients", "optimiser"):
        assert four["memory"][part] == pytest.approx(two["memory"][part] / 2, rel=0.02)
    for name in one["operations"]:
        assert four["operations"][name] == pytest.approx(one["operations"][name] / 4)
    assert four["traffic"]["gradients"] == pytest.approx(two["traffic"]["gradients"] * 1.5, rel=0.02)
    split = step(f"{words} --gpus 4 --sequence-parallel 4", capsys)
    assert split["traffic"]["between parts of a sequence"] > 0
    assert split["memory"] == four["memory"]
    longer = step(f"{words} --gpus 4 --sequence-parallel 4 --tokens 256", capsys)
    sums = longer["traffic"]["between parts of a sequence"] / split["traffic"]["between parts of a sequence"]
    assert 1 < sums < 2  # keys and values grow with the tokens, the memory of ska does not


def test_what_the_options_change(model, capsys):
    words = f"--model {model} --gpus 4 --batch-size 8 --tokens 512"
    plain, again = step(words, capsys), step(f"{words} --recompute", capsys)
    assert again["memory"]["activations"] < plain["memory"]["activations"]
    assert again["operations"]["projections and mlps"] == plain["operations"]["projections and mlps"] * 4 / 3
    half = step(f"{words} --dtype bfloat16", capsys)
    assert plain["traffic"]["parameters"] / 2 < half["traffic"]["parameters"] < plain["traffic"]["parameters"]
    assert half["traffic"]["gradients"] == plain["traffic"]["gradients"]
    slow = step(f"{words} --peak-flops 1e12 --efficiency 0.5 --link-speed 1e9", capsys)
    assert slow["seconds"]["operations"] == pytest.approx(sum(plain["operations"].values()) / 0.5e12)
    assert slow["seconds"]["messages"] == pytest.approx(sum(plain["traffic"].values()) / 1e9)
    assert slow["seconds_overlapped"] < slow["seconds_in_turn"] == pytest.approx(sum(slow["seconds"].values()))


def test_the_page_names_its_constants(model, capsys):
    code, out, _ = run(f"explain --model {model} --gpus 16 --batch-size 16 --dtype bfloat16", capsys)
    assert code == 0
    assert out.startswith("Estimate, not measured: ")
    for constant in ("989 TFLOP/s", "40% are", "3,350 GB/s", "450 GB/s", "50 GB/s", "16 GPUs (h100) in 2 machines"):
        assert constant in " ".join(out.split())  # lines break where the model's path ends


def test_models_by_name_and_of_runs(tmp_path, capsys):
    assert step("--model echo-1M --gpus 8 --tokens 256", capsys)["parameters"] == 973_240
    words = (
        "train --task mqar-demo --vocab-size 64 --length 32 --train-examples 64 --test-examples 8 --dim 16 --heads 2"
    )
    assert main(shlex.split(f"{words} --batch-size 4 --steps 1 --no-tensorboard --out {tmp_path / 'run'}")) == 0
    capsys.readouterr()
    assert step(f"--model {tmp_path / 'run'} --gpus 8 --tokens 256", capsys)["memory"]["parameters"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 8 --sequence-parallel 3", "--sequence-parallel 3 must divide --gpus 8"),
        ("--gpus 8 --batch-size 12", "--batch-size 12 must be a multiple of 8"),
        ("--gpus 8 --sequence-parallel 8 --tokens 4", "needs as many tokens per sequence, received --tokens 4"),
        ("--gpus 8 --dtype float16", "--gpus is for --dtype float32 or bfloat16, received float16"),
        ("--gpus 8 --efficiency 0", "--efficiency must be above 0"),
        ("--gpus 8 --causal", "--causal is not about a step of training; leave it out with --gpus"),
        ("--batch-size 8", "--batch-size 8 needs --gpus"),
    ],
)
def test_mistakes_are_one_line(model, words, message, capsys):
    refused(f"explain --model {model} {words}", capsys, message)


def test_mistakes_about_the_model(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**CONFIG.to_dict(), "width": 3}))
    mixed = tmp_path / "mixed.json"
    mixed.write_text(json.dumps(dataclasses.replace(CONFIG, layers=("mamba3(head_dim=16, state=8)",)).to_dict()))
    for words, message in (
        (f"--model {other} --gpus 2", "unknown: width"),
        ("--model nothing-such --gpus 2", "nothing-such"),
        (f"--model {mixed} --gpus 2 --sequence-parallel 2", "layers of Mamba3 are not split over a sequence"),
        ("--gpus 2", "--gpus 2 needs --model."),
    ):
        refused(f"explain {words}", capsys, message)
