"""Hostile texts: specs of operators and layers, options of the command line, presets in TOML."""

import contextlib
import dataclasses
import importlib
import inspect
import io
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from hypothesis import strategies as st

import zonal
from zonal import mechanisms
from zonal.cli import app, parse, presets
from zonal.errors import ZonalError
from zonal.models import layers

LITERALS = (
    "1", "0", "-1", "2.5", "1e-320", "1e400", "nan", "None", "True", "'x'", "''", "()", "(1,)", "(1, 2)", "(2.0, 3.0)",
    "[]", "{}", "{[]: 1}", "{1: 2}", "9" * 30, "9" * 5000, "-0.0", "1j", "b'x'", "...", "x", "f(1)", "lambda: 1",
    "'softmax'",
    "'ridge'", "(((1,),),)", "('a', 'b')", "1 + 1", "10**9", "65537", "1048577", "*a", "0.5", "3", "'\\0'", "'é'",
    "1_000",
    "(0.5, 1.0)", "(0, 2, 1)", "'running_max'", "'power'", "'matern'", "1e-30", "1e30",
)  # fmt: skip
NAMES = (*mechanisms.names(), *mechanisms.SHORT, "mamba2", "mamba3", "mesanet", "gated_kalmanet", "gated_deltanet",
         "mixture", "lifted", "gated", "nothing")  # fmt: skip
ARGUMENTS = tuple(
    sorted({name for each in mechanisms.MECHANISMS.values() for name in inspect.signature(each.make).parameters})
)
READERS = {
    "layers": lambda text: layers.layer_list(text),
    "layer": lambda text: layers.check(text, 16),
    "duration": parse.duration,
    "seeds": parse.seeds,
    "rates": parse.learning_rates,
    "parts": parse.parts,
    "tokens": parse.tokens,
    "ranks": parse.ranks,
    "shape": parse.shape,
}
LETTERS = st.characters(codec="utf-8", exclude_categories=()) | st.sampled_from("()[]{},=*'\"\\+-.0123456789_ \0\n")


@dataclass(frozen=True)
class Spec:
    """A text for the reader of that name; "operator" also runs what it resolves to."""

    text: str
    reader: str = "operator"


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Names with hostile arguments, some of them damaged, and any text at all."""
    reader = draw(st.sampled_from(("operator", "operator", "operator", *READERS)))
    if draw(st.integers(0, 9)) == 0 or reader not in ("operator", "layers", "layer"):
        return Spec(draw(st.text(LETTERS, max_size=30)) or draw(st.sampled_from(LITERALS)), reader)
    name = draw(st.sampled_from(NAMES))
    maker = mechanisms.MECHANISMS.get(name)
    known = (
        ARGUMENTS if maker is None or draw(st.integers(0, 9)) == 0 else tuple(inspect.signature(maker.make).parameters)
    )
    given = draw(st.dictionaries(st.sampled_from(known or ARGUMENTS), st.sampled_from(LITERALS), max_size=3))
    text = name + (f"({', '.join(f'{each}={value}' for each, value in given.items())})" if given else "")
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(LETTERS, max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    return Spec(text, reader)


def check_spec(each: Spec) -> None:
    """Raise unless the text is refused by an error of the library, or what it stands for runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of Python's own parser: '1if 2else 3'
        try:
            if each.reader != "operator":
                READERS[each.reader](each.text)
                return
            operator = mechanisms.resolve(each.text)
            q = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
            y = zonal.attention(q, q, q, operator, causal=not operator.tags.couples)
        except ZonalError:
            return
    assert torch.isfinite(y).all(), "numbers that are not finite, of ordinary tokens"


# --- command line -----------------------------------------------------------------------------------------------------

WORDS = (
    "", " ", "0", "-1", "1", "2", "nan", "inf", "1e999", "9" * 400, "a\0b", "\udcff", "x" * 300, "/proc/zonal", "[]",
    "{}",
    "1,2,3", "softmax", "sko,ska", "true", "None", "é", "--", "-", "%s", "softmax(scale='x')", "mqar-demo", "text",
    "needle",
    "1,1,4,8", "90s", "0.5", "missing.json", "here.toml", "here.json", "here", ".", "../..", "auto", "float32", "byte",
)  # fmt: skip


OPTIONS = {
    name: sorted(
        app.option_names(getattr(importlib.import_module(f"zonal.cli.{each.module}"), each.options)()) - {"--help"}
    )
    for name, each in app.COMMANDS.items()
    if name != "build"
}


class WouldRunError(BaseException):
    """In place of training: the words were accepted."""


@dataclass(frozen=True)
class Words:
    """A command line."""

    words: tuple[str, ...]


@st.composite
def commands(draw: st.DrawFn) -> Words:
    name = draw(st.sampled_from(sorted(OPTIONS)))
    options = OPTIONS[name]
    found = [name]
    if "--task" in options and draw(st.integers(0, 4)):
        found += ["--task", "mqar-demo"]
    for _ in range(draw(st.integers(0, 3))):
        found.append(draw(st.sampled_from([*options, *options, "--nothing", "--help", "-x"])))
        found += draw(st.lists(st.sampled_from(WORDS), max_size=2))
    return Words(tuple(found))


@contextlib.contextmanager
def elsewhere() -> Iterator[Path]:
    """A folder to be in, with files of hostile contents."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        (folder / "here.toml").write_text("x = " + "[" * 100_000)
        (folder / "here.json").write_text("[" * 100_000)
        (folder / "here").mkdir()
        yield folder


def check_command(each: Words) -> None:
    """Raise unless the words are refused with exit code 2 and one line, or accepted."""
    would = mock.Mock(side_effect=WouldRunError)
    out, errors = io.StringIO(), io.StringIO()
    with (
        elsewhere(),
        mock.patch("zonal.cli.train.train", would),
        mock.patch("zonal.cli.compare.execute", would),
        mock.patch("zonal.cli.search.Search.run", would),
        mock.patch("zonal.cli.bench.load", would),
        mock.patch("zonal.cli.tokenizer.tokenizers.train", would),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = app.main(each.words)
        except WouldRunError:
            return
        except SystemExit as stop:  # of --help
            if stop.code:
                raise
            return
    lines = errors.getvalue()
    assert code == 0 or (code == 2 and lines.count("\n") == 1 and len(lines) < 20_000), (code, lines)


# --- presets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """The text of a preset's file. suffix: of its name."""

    text: str
    suffix: str = ".toml"


SHIPPED = {name: (presets._shipped() / f"{name}.toml").read_text(encoding="utf-8") for name in presets.names()}
VALUES = (
    "1", "-1", "0", "1.5", "nan", "inf", "'x'", "''", "[]", "{}", "[[]]", "true", "9" * 30, "['a', 1]", "{spec = 1}",
    "{spec = 'softmax', dim = 'x'}", "[" * 300, "1979-05-27", "'\\u0000'", "{a = {b = {c = 1}}}", "\"\"\"",
    "'1e-3,1e999'",
)  # fmt: skip


@st.composite
def preset_files(draw: st.DrawFn) -> Preset:
    """Shipped presets with a line replaced, a value replaced, or cut short."""
    text = SHIPPED[draw(st.sampled_from(sorted(SHIPPED)))]
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        name, equals, _ = lines[at].partition("=")
        kind = draw(st.integers(0, 3))
        value = draw(st.sampled_from(VALUES))
        if kind == 0 and equals:
            lines[at] = f"{name}= {value}"
        elif kind == 1:
            lines[at] = draw(st.text(LETTERS, max_size=12))
        elif kind == 2:
            lines.insert(
                at, f"{draw(st.sampled_from(['about', 'seeds', 'nothing', 'operators', 'published']))} = {value}"
            )
        else:
            del lines[at]
            lines = lines or [""]
    return Preset(
        "\n".join(lines)[: draw(st.sampled_from((None, None, 100, 1000)))], draw(st.sampled_from((".toml", ".json")))
    )


def check_preset(each: Preset) -> None:
    """Raise unless the file is refused by an error of the library, or read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"given{each.suffix}"
        path.write_bytes(each.text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(ZonalError):
            assert dataclasses.is_dataclass(presets.find(str(path), "compare"))


__all__ = [
    "Preset", "Spec", "Words", "check_command", "check_preset", "check_spec", "commands", "preset_files", "specs",
]  # fmt: skip
