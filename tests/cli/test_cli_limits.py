"""Whatever is typed ends in an exit code and at most one line: sizes have stated limits, and no value reaches a library
that cannot take it.
"""

import dataclasses
import importlib
import shlex
import typing

import pytest

from zonal.cli.app import COMMANDS, main
from zonal.limits import Between

TRAIN = (
    "train --task mqar-demo --train-examples 8 --test-examples 8 --steps 1 --batch-size 2 --mlp none --no-tensorboard"
)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"{TRAIN} --threads 1000000", "--threads"),
        (f"{TRAIN} --threads -2", "--threads"),
        (f"{TRAIN} --threads 0", "--threads"),
        (f"{TRAIN.replace('--steps 1', '--steps 0')}", "--steps"),
        (f"{TRAIN} --dim 100000000", "--dim"),
        (f"{TRAIN} --dim {'9' * 400}", "--dim"),
        (f"{TRAIN} --dim {'9' * 5000}", "--dim"),
        (f"{TRAIN} --learning-rate {'9' * 400}", "--learning-rate"),
        (f"{TRAIN} --weight-decay nan", "--weight-decay"),
        (f"{TRAIN} --dim 65536 --heads 64 --layers 1024 --vocab-size 1000000", "memory"),
        (f"{TRAIN} --batch-size 65536 --length 100000 --vocab-size 200000", "memory"),
        (f"{TRAIN} --operator 'sko(degrees={{[]:1}})'", "degrees"),
        (f"{TRAIN} --operator 'kernel_ridge(kernel=5)'", "kernel"),
        (f"{TRAIN} --operator \"softmax(scale='x')\"", "scale"),
        (f"{TRAIN} --operator 'softmax(scale={'9' * 400})'", "scale"),
        (f"{TRAIN} --operator 'softmax(scale=1e999)'", "scale"),
        (f"{TRAIN} --operator 'performer(draws=100000000000)'", "draws"),
        (f"{TRAIN} --operator 'softmax*1000000000'", "layers"),
        (f"{TRAIN} --operator '{'(' * 1500}softmax{')' * 1500}'", "cannot be read"),
        (f"{TRAIN} --operator 'softmax(scale={'-' * 5000}1)'", "cannot be read"),
        (f"{TRAIN} --out {'x' * 300}", "--out"),
        (f"{TRAIN} --out 'a\0b'", "--out"),
        (f"{TRAIN} --out /proc/zonal", "/proc/zonal"),
        ("train --task text --tokenizer no", "Valid names: byte, gpt2, the path of a tokenizer.json."),
        ("tokenizer --out /proc/version", "--out /proc/version exists already; name a new file"),
        ("ask memory 'what?' --least 2", "--least must be from 1e-06 to 1, received 2.0"),
        ("ask memory 'what?' --least 0", "--least must be from 1e-06 to 1, received 0.0"),
        ("compare --task mqar-demo --seeds 1000000000000", "--seeds"),
        ("compare --task mqar-demo --jobs 1000000", "--jobs"),
        (f"compare --task mqar-demo --budget {'9' * 400}h", "--budget"),
        ("compare --resume 'a\0b'", "--resume"),
        ("compare --task mqar-demo --title '\udcff'", "--title"),
        ("generate --model x --temperature 1e-300", "temperature"),
        ("train --task mqar-demo --betas 0.9 1.5", "--betas"),
        ("influence --tokens 1000000000", "--tokens"),
        ("explain --shape 1,1,1,99999999999999999999999", "--shape"),
        ("train --task text --data 'a\0b'", "--data"),
        (f"train --task text --data {'x' * 300}", "--data"),
        ("search --task mqar-demo --rungs 1000000000", "--rungs"),
    ],
)
def test_one_line(words, named, here, capsys):
    assert main(split(words)) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 1200
    assert not list(here.rglob("*.json"))


def split(words):
    """As a shell does, which cannot hand over a NUL; a program that calls this one can."""
    return [word.replace("NUL", "\0") for word in shlex.split(words.replace("\0", "NUL"))]


def numbers(kind):
    """(option, what it is declared as) of all numeric options."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from numbers(hint)
        elif {int, float} & {
            *typing.get_args(hint),
            *(inner for part in typing.get_args(hint) for inner in typing.get_args(part)),
            hint,
        }:
            yield name, hint


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_has_limits(command):
    kind = getattr(importlib.import_module(f"zonal.cli.{COMMANDS[command].module}"), COMMANDS[command].options)
    for name, hint in numbers(kind):
        assert any(isinstance(part, Between) for part in typing.get_args(hint)), f"--{name} of {command} says no limits"
        value = getattr(kind(), name, None)
        limit = next(part for part in typing.get_args(hint) if isinstance(part, Between))
        assert value is None or limit.least <= value <= limit.most, name
