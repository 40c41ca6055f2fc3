"""From words to a command: parsing, one-line errors, exit codes."""

import contextlib
import dataclasses
import difflib
import importlib
import io
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

import zonal
from zonal import device_memory, limits, subnormals
from zonal.errors import ArgumentError, ZonalError, unknown_name

MISTAKE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
_LESS = "Ask for less at a time; what was acknowledged is kept."


@dataclass(frozen=True)
class Command:
    """A command: its module in this package, which has ``DESCRIPTION``, ``run`` and the options class ``options``."""

    module: str
    options: str
    summary: str


COMMANDS = {
    "compare": Command("compare", "Compare", "compare operators on one task and write a report"),
    "train": Command("train", "Train", "train one model"),
    "generate": Command("generate", "Generate", "continue a prompt with a trained model"),
    "convert": Command("convert", "Convert", "give layers of a pre-trained model a constant memory"),
    "ingest": Command("ingest", "Ingest", "read folders of texts into one memory and an index of spans"),
    "ask": Command("ask", "Ask", "find the span of the texts in a memory that fits a question"),
    "tokenizer": Command("tokenizer", "TokenizerOptions", "learn a tokeniser from a text"),
    "tasks": Command("tasks", "Tasks", "list the tasks, or show what one asks"),
    "report": Command("report", "Report", "write the pages of comparisons and searches again, or pack one to keep"),
    "search": Command("search", "SearchOptions", "search over operators and parameters"),
    "explain": Command("explain", "Explain", "print how an operator would run on a shape, and why"),
    "influence": Command("influence", "Influence", "print which inputs can influence which outputs"),
    "build": Command("build", "Build", "compile the CPU kernels before their first use"),
    "bench": Command("bench", "Bench", "run a benchmark"),
    "demo": Command("demo", "Demo", "compare five operators on two tasks in a few minutes"),
}

HELP = """\
usage: zonal COMMAND [OPTIONS]

Attention operators declared by their parts, planned onto the cheapest exact path, and compared fairly.

Commands:
{commands}

Examples:
  zonal demo
  zonal compare --task text --data my.txt --operators softmax,sko,ska --seeds 3 --budget 10m
  zonal train --task text --data my.txt --operator sko --steps 500
  zonal generate --model runs/train-text-1a2b3c4d --prompt "Call me" --max-new-tokens 200
  zonal explain --operator sko --shape 1,8,4096,64 --causal

`zonal COMMAND --help` lists the options of a command. `zonal --version` prints the version."""


def help_text() -> str:
    """What ``zonal --help`` prints."""
    return HELP.format(commands="\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's). Returns the exit code; see the package's docstring."""
    words = list(sys.argv[1:] if argv is None else argv)
    # whoever starts a command may have closed its output; what is printed then goes nowhere
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, open as long as the process
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal or a pipe of another encoding lacks some characters, such as those of formulas; the rest is printed
        sys.stdout.reconfigure(errors="replace")
    try:
        with subnormals.flushed():  # ahead of all threads, so that each does the same
            code = _dispatch(words)
        # a broken pipe may only show when what is buffered is written
        sys.stdout.flush()
        return code
    except ZonalError as error:
        return _mistake(str(error))
    except KeyboardInterrupt:
        print(f"\nInterrupted. To resume, run again: {shlex.join(['zonal', *words])}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the interpreter flushes stdout once more at exit; give it somewhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        # what the operating system refuses lies outside of the program: a folder without rights, a file system that is
        # read only
        return _mistake(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error))
    except Exception as error:
        if device_memory.exhausted(error):
            return _mistake(f"out of memory ({str(error).splitlines()[0] if str(error) else 'of Python'}). {_LESS}")
        raise


def _mistake(message: str) -> int:
    """Print a mistake in one line, and cut words of hundreds of letters."""
    line = re.sub(r"\S{280,}", lambda word: f"{word[0][:40]}… ({len(word[0]):,} characters)", " ".join(message.split()))
    print(f"zonal: {line}", file=sys.stderr)
    return MISTAKE


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if words else MISTAKE
    if words[0] == "--version":
        print(f"zonal {zonal.__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise unknown_name("zonal", "command", name, COMMANDS)
    options, passed = read(name, rest)
    run = importlib.import_module(f"zonal.cli.{COMMANDS[name].module}").run
    return run(options, passed) if name == "bench" else run(options, shlex.join(["zonal", *words]))


def read(name: str, words: list[str]) -> tuple[Any, list[str]]:
    """The options of a command, with what a preset named among its words fills in, and the words that it passes on."""
    command = COMMANDS[name]
    module = importlib.import_module(f"zonal.cli.{command.module}")
    own, passed = _split(name, words)
    defaults = module.defaults(own) if name in ("compare", "train") else None
    return parse_options(getattr(module, command.options), f"zonal {name}", module.DESCRIPTION, own, defaults), passed


def _split(name: str, words: list[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and for ``bench`` those after the benchmark's name, which belong to the benchmark."""
    if name != "bench" or not words or words[0].startswith("-"):
        return words, []
    return words[:1], words[1:]


def parse_options(kind: type, prog: str, description: str, words: list[str], defaults: Any = None) -> Any:
    """``words`` as a value of the options class ``kind``; what they leave out is as in ``defaults``, or as the class
    has it. --help prints and exits.

    Raises: ArgumentError in one line for anything that does not fit; an unknown option with the nearest.
    """
    call = prog.removeprefix("zonal ")
    errors = io.StringIO()
    given = {} if defaults is None else {"default": defaults}
    try:
        with _registry(), contextlib.redirect_stderr(errors):
            options, unknown = tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=words,
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
                **given,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ArgumentError(f"{call}: {_one_line(errors.getvalue())}") from stop
    if unknown:
        raise _unknown_option(call, unknown[0], kind())
    limits.check(call, options)
    return options


def _registry() -> tyro.constructors.ConstructorRegistry:
    """The parser's rules, with one more: an option that takes a number or None takes ``none`` for the latter."""
    made = tyro.constructors.ConstructorRegistry()
    made.primitive_rule(_number_or_none)
    return made


def _number_or_none(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    kind = next((kind for kind in (int, float) if info.type == kind | None), None)
    if kind is None:
        return None

    def read_number(words: list[str]) -> float | None:
        try:
            return None if words[0].lower() == "none" else kind(words[0])
        except ValueError as error:
            raise ValueError(f"no number: {words}") from error  # in the parser's own form, for _one_line

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read_number,
        is_instance=lambda value: value is None or isinstance(value, int | kind),
        str_from_instance=lambda value: [str(value)],
    )


def _unknown_option(call: str, word: str, options: Any) -> ArgumentError:
    if not word.startswith("-"):
        return ArgumentError(
            f"{call}: unexpected {word!r}. Options begin with --; values with spaces or brackets need "
            "quotes in the shell."
        )
    near = difflib.get_close_matches(word.split("=")[0], sorted(option_names(options)), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return ArgumentError(f"{call}: unknown option {word}.{hint} `zonal {call} --help` lists them.")


def option_names(options: Any) -> set[str]:
    """All options of a command, with the two forms of its switches."""
    names = {"--help"}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        option = f"--{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            names |= option_names(value) - {"--help"}
        else:
            names |= {option, option.replace("--", "--no-", 1)} if isinstance(value, bool) else {option}
    return names


def _one_line(box: str) -> str:
    """The parser's boxed message as one sentence."""
    text = re.sub(r"[╭╮╰╯│]", " ", box)
    # the first line is the box's title, with a rule below it where the output is not UTF-8; a rule ends the message
    # proper
    lines = [line.strip() for line in text.splitlines()][1:]
    below = lines[1:] if lines and _is_rule(lines[0]) else lines
    message = " ".join(itertools.takewhile(lambda line: not _is_rule(line), below)).strip()
    wrong = re.match(r"Error parsing (--\S+): .*?\[(.*?)\]", message)
    if wrong:
        return f"{wrong[1]} cannot be {wrong[2]}. See --help for what it takes."
    return f"{message} See --help." if message else "the options cannot be read. See --help."


def _is_rule(line: str) -> bool:
    return re.fullmatch(r"[─-]{2,}", line) is not None
