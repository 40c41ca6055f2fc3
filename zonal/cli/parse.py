"""Texts of the command line as values: budgets, seeds, learning rates, ranks, shapes."""

import itertools
import math
import re
from collections.abc import Callable
from typing import TypeVar

from zonal.errors import ArgumentError
from zonal.limits import RATE

N = TypeVar("N", int, float)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 10 * 365 * 24 * 3600.0
# seeds or learning rates of one comparison
_MOST = 1000
_LARGEST_AXIS = 2**40


def duration(text: str) -> float:
    """Seconds of ``90s``, ``10m``, ``2h``, ``1h30m`` or plain ``90``."""
    whole = text.strip().lower()
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", whole)
    if (
        parts
        and "".join(number + unit for number, unit in parts) == whole
        and len({unit for _, unit in parts}) == len(parts)
    ):
        value = math.fsum(float(number) * _UNITS[unit] for number, unit in parts)
    elif re.fullmatch(r"\d+(\.\d+)?", whole):
        value = float(whole)
    else:
        raise ArgumentError(f"--budget: {text!r} is not a time. Write 90s, 10m, 2h or 1h30m.")
    if not 0 < value <= _LONGEST:
        raise ArgumentError(f"--budget: a time above zero and of at most ten years is required, got {text!r}.")
    return value


def seeds(text: str) -> tuple[int, ...]:
    """``"3"`` → 0, 1, 2; a list such as ``"0,5"`` or ``"7,"`` → these seeds."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ArgumentError(
            f"--seeds: {text!r} is neither a count such as 3 nor a list of seeds such as 0,1,2."
        ) from error
    if not numbers or min(numbers) < 0 or ("," not in text and numbers[0] < 1):
        raise ArgumentError(
            f"--seeds: {text!r} must be a count of at least 1, or a list of seeds of at least 0, such as '0,' for "
            "seed 0 alone."
        )
    if max(len(numbers), 0 if "," in text else numbers[0]) > _MOST or max(numbers) >= 2**63:
        raise ArgumentError(f"--seeds: at most {_MOST:,} seeds, each below 2**63, are possible, got {text!r}.")
    return tuple(range(numbers[0])) if "," not in text else tuple(numbers)


def _numbers(text: str, kind: Callable[[str], N]) -> tuple[N, ...]:
    """The numbers between commas; none where one of them is none."""
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError:
        return ()


def learning_rates(text: str) -> tuple[float, ...]:
    """``"1e-3,3e-3"`` → its numbers, each above zero."""
    numbers = _numbers(text, float)
    if not numbers:
        raise ArgumentError(f"--learning-rates: {text!r} is not a list of numbers such as 1e-3,3e-3.")
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ArgumentError(f"--learning-rates: learning rates must be above zero, got {text!r}.")
    if len(numbers) > _MOST or max(numbers) > RATE.most:
        raise ArgumentError(
            f"--learning-rates: at most {_MOST:,} learning rates, each of at most {RATE.most:g}, are possible, "
            f"got {text!r}."
        )
    return numbers


def parts(text: str) -> tuple[float, ...]:
    """``"0.25,0.5,0.75"`` → three rising parts of a run."""
    numbers = _numbers(text, float)
    if len(numbers) != 3 or not all(a <= b for a, b in itertools.pairwise((0.0, *numbers, 1.0))):
        raise ArgumentError(
            f"--curriculum: {text!r} must be three rising parts of the run from 0 to 1, such as 0.25,0.5,0.75."
        )
    return numbers


def tokens(text: str) -> tuple[int, ...]:
    """``"0,1"`` → its token numbers."""
    numbers = _numbers(text, int)
    if not numbers:
        raise ArgumentError(f"--silent-tokens: {text!r} is not a list of token numbers such as 0,1.")
    return numbers


def ranks(text: str) -> tuple[int, ...]:
    """``"1,2,4"`` → its rising whole numbers."""
    numbers = _numbers(text, int)
    if not numbers or numbers[0] < 1 or not all(a < b for a, b in itertools.pairwise(numbers)):
        raise ArgumentError(f"--ranks: {text!r} must be rising whole numbers of at least 1, such as 1,2,4.")
    return numbers


def shape(text: str) -> tuple[int, int, int, int]:
    """``"1,8,4096,64"`` → batch, heads, tokens, head dimension."""
    numbers = _numbers(text, int)
    if len(numbers) != 4 or min(numbers) < 1 or max(numbers) > _LARGEST_AXIS:
        raise ArgumentError(
            f"--shape: {text!r} must be four whole numbers from 1 to 2**40: batch,heads,tokens,head dimension, "
            "such as 1,8,4096,64."
        )
    batch, heads, tokens, dimension = numbers
    return batch, heads, tokens, dimension
