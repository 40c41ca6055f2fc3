"""Words of the command line as values, and mistakes in them as one line each."""

import dataclasses
import io
import shlex

import pytest

from zonal.cli import parse
from zonal.cli.app import COMMANDS, help_text, main, option_names, parse_options
from zonal.cli.compare import DESCRIPTION, Compare, specification
from zonal.cli.demo import Demo, parts
from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions, command_line
from zonal.cli.train import Train, defaults, layers_of, model_of
from zonal.errors import ArgumentError
from zonal.models import preset
from zonal.models.layers import split


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("softmax", ("softmax",)),
        ("softmax,sko , ska", ("softmax", "sko", "ska")),
        ("sko(degrees=(2,3)),ska(power=1)", ("sko(degrees=(2,3))", "ska(power=1)")),
        ("sko(degrees=(2, 3), init='ones,x'),softmax", ("sko(degrees=(2, 3), init='ones,x')", "softmax")),
        ("a(x=[1,2],y={3,4}),b", ("a(x=[1,2],y={3,4})", "b")),
        ("a(x=')'),b", ("a(x=')')", "b")),
        ("softmax, mamba2, [mamba2*3, ska(power=1)]", ("softmax", "mamba2", "[mamba2*3, ska(power=1)]")),
    ],
)
def test_operators(text, found):
    assert split(text, "--operators") == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sko(degrees=(2,3)", "unclosed bracket"),
        ("sko),b", "without an opening"),
        ("a,,b", "empty entry"),
        ("", "empty entry"),
        ("a('x", "unclosed quotation"),
    ],
)
def test_broken_operator_lists(text, message):
    with pytest.raises(ArgumentError, match=message):
        split(text, "--operators")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1h30m", 5400), ("1.5m", 90), ("45", 45), (" 3M ", 180)],
)
def test_durations(text, seconds):
    assert parse.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "ten", "10d", "m10", "5m5m", "-5m", "0s", "1h 30m x", "inf", "nan"])
def test_broken_durations(text):
    with pytest.raises(ArgumentError, match="--budget"):
        parse.duration(text)


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("0,5", (0, 5)), ("7,", (7,)), ("1", (0,))])
def test_seeds(text, seeds):
    assert parse.seeds(text) == seeds


@pytest.mark.parametrize("text", ["0", "x", "", "-1", "1,-2", "1.5"])
def test_broken_seeds(text):
    with pytest.raises(ArgumentError, match="--seeds"):
        parse.seeds(text)
    with pytest.raises(ArgumentError, match="such as '0,' for seed 0 alone"):
        parse.seeds("0")


def test_learning_rates_and_shapes():
    assert parse.learning_rates("1e-3,3e-3") == (0.001, 0.003)
    assert parse.shape("1,8,4096,64") == (1, 8, 4096, 64)
    for text in ("", "x", "0", "-1", "nan", "1e-3,inf"):
        with pytest.raises(ArgumentError, match="--learning-rates"):
            parse.learning_rates(text)
    for text in ("", "1,2,3", "1,2,3,x", "1,2,3,0"):
        with pytest.raises(ArgumentError, match="--shape"):
            parse.shape(text)


def read(words):
    return parse_options(Compare, "zonal compare", DESCRIPTION, words)


def test_options_land_in_their_groups():
    options = read(
        shlex.split(
            "--task text --data my.txt --seeds 3 --budget 10m --layers 3 --conv 0 --rotary --batch-size 8 "
            "--no-tensorboard --out runs/x"
        )
    )
    assert (options.task.task, options.task.data, options.seeds, options.budget) == ("text", "my.txt", "3", "10m")
    assert (options.model.layers, options.model.conv, options.model.rotary) == (3, 0, True)
    assert (options.training.batch_size, options.training.tensorboard) == (8, False)


def test_a_command_line_reads_back_as_the_same_options():
    options = Compare(
        operators="sko(degrees=(2, 3)),softmax",
        seeds="0,2",
        retry_failed=True,
        task=TaskOptions(task="text", data="my file.txt"),
        model=ModelOptions(rotary=True, tie_embeddings=False, mlp="none"),
        training=TrainingOptions(steps=7, clip=0.5),
    )
    words = shlex.split(command_line("compare", options))
    assert words[:2] == ["zonal", "compare"]
    assert read(words[2:]) == options


def test_none_leaves_out_what_takes_a_number():
    options = read(["--clip", "none", "--checkpoint-seconds", "none", "--stop-at-accuracy", "None", "--steps", "7"])
    training = options.training.config(7, 1e-3, 0)
    assert (training.clip, training.checkpoint_seconds, training.stop_at_accuracy) == (None, None, None)
    assert options.training.steps == 7
    assert read(shlex.split(command_line("compare", options))[2:]) == options


def test_defaults_need_no_words():
    assert command_line("compare", Compare()) == "zonal compare"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tsk", "text"], "unknown option --tsk. Did you mean --task?"),
        (["--operater=x"], "Did you mean --operators?"),
        (["--no-rotray"], "Did you mean --no-rotary?"),
        (["--steps", "abc"], "--steps cannot be 'abc'"),
        (["--clip", "no"], "--clip cannot be 'no'"),
        (["--dtype", "float8"], "invalid choice 'float8' for argument '--dtype'"),
        (["--steps"], "Missing value for argument"),
        (["text"], "unexpected 'text'"),
    ],
)
def test_mistakes_in_options_are_one_line(words, message):
    with pytest.raises(ArgumentError) as caught:
        read(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_are_told_the_same_where_the_output_is_not_utf8(monkeypatch):
    class Ascii(io.StringIO):
        encoding = "ascii"

    def said(words):
        with pytest.raises(ArgumentError) as caught:
            read(words)
        return str(caught.value)

    for words in (["--steps", "abc"], ["--dtype", "float8"], ["--steps"]):
        before = said(words)
        with monkeypatch.context() as patched:
            patched.setattr("sys.stdout", Ascii())
            assert said(words) == before
        assert "---" not in before


def test_option_names_hold_both_forms_of_a_switch():
    assert {"--rotary", "--no-rotary", "--task", "--help"} <= option_names(Compare())


def test_specification_of_the_users_command():
    options = read(
        shlex.split(
            "--task mqar-demo --train-examples 64 --test-examples 16 --operators "
            "'softmax,sko(degrees=(2,3)),ska' --seeds 3 --budget 10m"
        )
    )
    spec = specification(options, "zonal compare …")
    assert spec.operators == ("softmax", "sko(degrees=(2,3))", "ska")
    assert spec.labels == ("Softmax", "SKO (degrees=(2, 3))", "SKA K=1")
    assert (spec.seeds, spec.budget_seconds, spec.command) == ((0, 1, 2), 600.0, "zonal compare …")
    assert spec.model.vocab_size == spec.task.vocab_size


def test_fixed_steps_need_no_budget():
    options = read(shlex.split("--task mqar-demo --train-examples 64 --test-examples 16 --steps 40"))
    spec = specification(options, "")
    assert (spec.training.steps, spec.budget_seconds) == (40, None)


def test_a_comparison_may_name_whole_lists_of_layers():
    words = (
        "--task mqar-demo --train-examples 64 --test-examples 16 --steps 4 --layers 3 --operators "
        "'softmax,mamba2,[mamba2*2, ska]'"
    )
    spec = specification(read(shlex.split(words)), "")
    assert [spec.model_for(operator).layers for operator in spec.operators] == [
        ("softmax",) * 3,
        ("mamba2",) * 3,
        ("mamba2", "mamba2", "ska"),
    ]
    assert len({run.name for run in spec.runs()}) == 3
    with pytest.raises(ArgumentError, match="has 3 layers, the model has 2"):
        specification(read(shlex.split(words.replace("--layers 3", "--layers 2"))), "")
    with pytest.raises(ArgumentError, match="mamba2"):
        specification(read(shlex.split(words.replace("mamba2,", "mamba4,"))), "")


def test_layers_of_a_trained_model():
    assert layers_of("train", "sko", 3, "zonal train --layers 3") == ("sko",) * 3
    assert layers_of("train", "softmax,ska(power=1)", 2, "zonal train --layers 2") == ("softmax", "ska(power=1)")
    assert layers_of("train", "mamba2*2, ska(power=0), mamba2", 2, "zonal train") == (
        "mamba2",
        "mamba2",
        "ska(power=0)",
        "mamba2",
    )
    assert layers_of("train", "softmax,sko,linear", 2, "zonal train") == ("softmax", "sko", "linear")
    for layers in (5, ModelOptions().layers):  # a number that is the default is asked for as well
        with pytest.raises(ArgumentError, match=f"search: --operator names 3 layers, --layers asks for {layers}"):
            layers_of("search", "softmax,sko,linear", layers, f"zonal search --layers={layers}")


def test_demo_shares_out_its_time():
    found = parts(Demo(budget="100s", seeds="2"))
    assert sum(parse.duration(settings.budget or "") for _, settings in found) == pytest.approx(100)
    assert [settings.task.task for _, settings in found] == ["mqar-demo", "text"]
    assert all(settings.seeds == "2" for _, settings in found)
    for folder, settings in found:
        assert folder.parent == Demo().out
        assert read(shlex.split(command_line("compare", settings))[2:]) == settings


def test_every_command_has_help_with_worked_examples(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    for name in COMMANDS:
        assert f"  {name} " in text
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code in (0, None)
        words = capsys.readouterr().out
        assert "Examples:" in words
        assert f"  zonal {name}" in words
        # every option says what it is
        assert "--help" in words


def test_examples_in_the_help_can_be_parsed():
    from importlib import import_module

    for name, command in COMMANDS.items():
        module = import_module(f"zonal.cli.{command.module}")
        examples = [
            line.strip()
            for line in f"{module.DESCRIPTION}\n{help_text()}".splitlines()
            if line.strip().startswith(f"zonal {name}") and "--help" not in line
        ]
        assert examples
        for example in examples:
            words = shlex.split(example)[2:]
            assert (
                parse_options(getattr(module, command.options), f"zonal {name}", module.DESCRIPTION, words) is not None
            )


def test_a_comparison_takes_the_shape_of_a_model_by_name():
    words = "--task mqar-demo --train-examples 8 --test-examples 4 --steps 4 --model-preset echo-1M"
    own = specification(read(shlex.split(words)), words)
    known = preset("echo-1M", vocab_size=own.task.vocab_size, max_len=own.task.length)
    assert [own.model_for(operator) for operator in own.operators] == [known]
    two = f"{words} --operators 'softmax,[mamba2*3, ska]'"
    spec = specification(read(shlex.split(two)), two)
    assert spec.model_for("softmax") == dataclasses.replace(known, layers=("softmax",) * 4)
    assert spec.model_for(spec.operators[1]).layers == ("mamba2", "mamba2", "mamba2", "ska")
    usual = f"{words} --operators '{Compare.operators}'"  # what stands there counts, though it be the default
    assert len(specification(read(shlex.split(usual)), usual).operators) == 5
    for more, message in (
        ("--dim 32", "names the whole shape"),
        (f"--dim {ModelOptions().dim}", "names the whole shape"),
        ("--no_rotary", "names the whole shape"),
        ("--operators '[softmax, ska]'", "the model has 4"),
    ):
        with pytest.raises(ArgumentError, match=message):
            specification(read(shlex.split(f"{words} {more}")), f"{words} {more}")
    with pytest.raises(ArgumentError, match="Did you mean 'echo-1M'"):
        specification(read(shlex.split(words.replace("echo-1M", "echo-1N"))), words)


def test_a_preset_gives_the_task_and_a_model_by_name_the_shape():
    options = defaults(("--preset", "echo-table3"))
    task = options.task.resolve("train")
    named = dataclasses.replace(options, model_preset="echo-1M")
    words = "zonal train --preset echo-table3 --model-preset echo-1M"
    assert model_of(named, task, words) == preset("echo-1M", vocab_size=task.vocab_size, max_len=task.length)
    for more in ("--operator sko", f"--operator {Train.operator}", "--layers 2", "--no-rotary", "--mlp_ratio=2"):
        with pytest.raises(ArgumentError, match="Leave out --operator and the model's options"):
            model_of(named, task, f"{words} {more}")
