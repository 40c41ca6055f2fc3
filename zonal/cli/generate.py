"""``zonal generate``: continue a prompt with a trained model, printed as it comes."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from zonal.cli.options import shown
from zonal.data import tokenizers
from zonal.errors import ArgumentError, FileFormatError
from zonal.limits import COUNT, SEED, SHARE, Between
from zonal.models import CausalLM, Sampler
from zonal.tasks import masked
from zonal.training import load_model
from zonal.training.checkpoint import FILE as CHECKPOINT
from zonal.training.environment import check_device

DESCRIPTION = """\
Continue a prompt with a trained model, token by token from its memory. For a model of text the prompt is text;
for other tasks it is a list of token numbers.

Examples:
  zonal generate --model runs/train-text-1a2b3c4d --prompt "Call me" --max-new-tokens 200
  zonal generate --model runs/train-text-1a2b3c4d/checkpoint.safetensors --prompt "The whale" --top-k 20 --seed 1
  zonal generate --model runs/train-mqar-demo-1a2b3c4d --prompt "3 300 7 290 3" --max-new-tokens 1 --temperature 0"""

_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Generate:
    """Continue a prompt."""

    model: Annotated[Path | None, shown("PATH", "required")] = None
    """A checkpoint, the folder of a run of `zonal train` or `zonal compare`, or a model of transformers such as
    `zonal convert` writes."""
    prompt: str = ""
    """The prompt: text, or token numbers for a model that was not trained on text."""
    max_new_tokens: Annotated[int, Between(0, 1_000_000_000)] = 200
    """Stop after this many tokens."""
    temperature: Annotated[float, Between(0, 1e6)] = 1.0
    """Divides the logits. Below 1: more predictable; above 1: more varied; 0: always the most likely token."""
    top_k: Annotated[int | None, COUNT, shown("INT", "default: all")] = None
    """Draw only from this many most likely tokens."""
    top_p: Annotated[float | None, SHARE, shown("FLOAT", "default: all")] = None
    """Draw from the most likely tokens that together have this probability."""
    stop: Annotated[str | None, shown("TEXT", "default: none")] = None
    """End where this text has been generated."""
    seed: Annotated[int | None, SEED, shown("INT", "default: another each time")] = None
    """The same seed, prompt and model give the same text."""
    device: str = "cpu"
    """cpu, cuda or cuda:1."""


@dataclass(frozen=True)
class Codec:
    """How a model's tokens are written and read. ``joint``: the text between two decoded pieces."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    joint: str


def checkpoint_in(path: Path, command: str = "generate") -> Path:
    """The file itself, or the checkpoint of a run's folder. Raises: FileFormatError when there is none."""
    if not path.exists():
        raise FileFormatError(f"{command}: {path} does not exist. Required: the folder of a run, or a checkpoint file.")
    if not path.is_dir():
        return path
    found = path / CHECKPOINT
    if found.is_file():
        return found
    if (path / "comparison.json").is_file():
        runs = sorted(each.parent for each in path.glob(f"runs/*/*/{CHECKPOINT}"))
        advice = (
            f"Give one of its runs, such as {runs[0]}"
            if runs
            else "None of its runs has weights, which a packed comparison does not keep: run it again"
        )
        raise FileFormatError(f"{command}: {path} holds a comparison. {advice}.")
    raise FileFormatError(
        f"{command}: {path} has no {CHECKPOINT}. Required: the folder of a run, or a checkpoint file."
    )


def codec(task: dict[str, Any], vocab_size: int, command: str = "generate", option: str = "the prompt") -> Codec:
    """The codec for a model trained on ``task`` (its config)."""
    if task.get("task") in ("text", "masked-text"):
        tokenizer = tokenizers.resolve(str(task["tokenizer"]))
        tokenizer.check(command, task.get("tokenizer_sha256"))
        return Codec(lambda text: tokenizer.encode(text).tolist(), functools.partial(masked.decoded, tokenizer), "")

    def numbers(text: str) -> list[int]:
        try:
            found = [int(word) for word in text.replace(",", " ").split()]
        except ValueError as error:
            raise ArgumentError(
                f"{command}: this model was trained on token numbers from 0 to {vocab_size - 1}; "
                f"{option} must be such numbers, got {text!r}."
            ) from error
        if any(not 0 <= number < vocab_size for number in found):
            raise ArgumentError(f"{command}: token numbers must be from 0 to {vocab_size - 1}, got {text!r}.")
        return found

    return Codec(numbers, lambda tokens: " ".join(map(str, tokens)), " ")


def pieces(tokens: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Text as soon as it is certain: tokens that end within a character wait for the rest of it."""
    waiting: list[int] = []
    shown = 0  # characters of the waiting tokens that were given out
    for token in tokens:
        waiting.append(token)
        text = decode(waiting)
        certain = text.removesuffix(_BROKEN)  # a broken last character may still become whole
        if certain[shown:]:
            yield certain[shown:]
        shown = len(certain)
        if certain == text:
            waiting, shown = [], 0
    if waiting:
        yield decode(waiting)[shown:]


def until(texts: Iterable[str], stop: str) -> Iterator[str]:
    """The texts up to the end of the first ``stop``, which may begin in one text and end in a later one."""
    before = ""  # the end of what was given out, in which a stop may have begun
    for text in texts:
        found = (before + text).find(stop)
        if found >= 0:
            yield text[: found + len(stop) - len(before)]
            return
        yield text
        before = (before + text)[-len(stop) :]


def run(options: Generate, command: str) -> int:
    """Run the command; returns the exit code."""
    if options.model is None:
        raise ArgumentError("generate: --model is required: a checkpoint, or the folder of a run of `zonal train`.")
    Sampler(options.temperature, options.top_k, options.top_p)  # refused before the model is read
    if (options.model / "config.json").is_file() and not (options.model / CHECKPOINT).is_file():
        try:
            continuing = importlib.import_module("zonal.hf.continuing")
        except ImportError as error:
            raise ArgumentError(f"generate: {options.model} is a model of transformers. {error}") from error
        continuing.print_continued(
            options.model, check_device(options.device), options.prompt, options.max_new_tokens, options.temperature,
            options.top_k, options.top_p, options.stop, options.seed,
        )  # fmt: skip
        return 0
    model, config = load_model(checkpoint_in(options.model))
    if not isinstance(model, CausalLM):
        raise ArgumentError(
            f"generate: a model that reads from left to right is required, {options.model} is an encoder. "
            "Train one with --task text."
        )
    model = model.to(check_device(options.device))
    task = config["identity"]["task"]
    written = codec(task, model.config.vocab_size)
    prompt = written.encode(options.prompt)
    if not prompt:
        raise ArgumentError("generate: --prompt is empty; at least one token to continue from is required.")
    # the same words have other tokens after other words, so a text is stopped by its characters
    of_text = task.get("task") == "text"
    stop = []
    if options.stop and not of_text:
        stop = [codec(task, model.config.vocab_size, option="--stop").encode(options.stop)]
    tokens = model.generate(
        torch.tensor([prompt], device=options.device, dtype=torch.int64),
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        stop,
        options.seed,
    )
    sys.stdout.write(options.prompt)
    words = pieces((int(token) for token in tokens), written.decode)
    if options.stop and of_text:
        words = until(words, options.stop)
    for piece in words:
        sys.stdout.write(written.joint + piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
