"""Numbers, bytes and durations as people read them. None is shown as an en dash everywhere."""

import datetime
import itertools
import math
import re
from collections.abc import Sequence

from zonal.evaluation.statistics import Spread

MISSING = "–"
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 24
# a difference, or a share of a mean: what is smaller came from the last digits of floating-point numbers
_ROUNDING = 1e-9
_PLAIN, _LARGE = 5e-6, 1e6
"""What is smaller or larger reads as zero with five decimals, or is a long number; it is in scientific form."""


def number(value: float | None) -> str:
    """A plain number with three decimals; very small or large ones in scientific form."""
    if value is None:
        return MISSING
    if value != 0 and (abs(value) >= _LARGE or abs(value) < 5e-4):
        return f"{value:.2e}"
    return f"{value:.3f}"


def difference(value: float) -> str:
    """A positive difference with two significant digits, so that it never reads 0.000; one that is rounding is 0."""
    if abs(value) < _ROUNDING:
        return "0"
    if not _PLAIN <= abs(value) < _LARGE:
        return f"{abs(value):.1e}"
    decimals = min(6, max(2, 1 - math.floor(math.log10(abs(value)))))
    return f"{abs(value):.{decimals}f}"


def margin(value: float, half: float) -> str:
    """``0.0031 ± 0.0002``: a difference and half of its interval with the same decimals, the coarser of which shows;
    very small or large ones in scientific form.
    """
    value, half = (0.0 if abs(number) < _ROUNDING else number for number in (value, half))
    if value == 0 and half == 0:
        return "0"
    smaller = min(abs(number) for number in (value, half) if number)
    decimals = min(5, max(2, -math.floor(math.log10(smaller))))
    return _plus_minus(abs(value), half, decimals)


def told_apart(a: float, b: float) -> tuple[str, str]:
    """Two numbers with three decimals, or with as many (up to 6) as it takes to tell them apart, and from the one they
    are short of.
    """

    def plain(decimals: int) -> bool:
        texts = f"{a:.{decimals}f}", f"{b:.{decimals}f}"
        return texts[0] != texts[1] and not any(
            x != 1 and float(text) == 1 for x, text in zip((a, b), texts, strict=True)
        )

    decimals = next((digits for digits in (3, 4, 5, 6) if plain(digits)), 3)
    return f"{a:.{decimals}f}", f"{b:.{decimals}f}"


def date(text: str) -> str:
    """An ISO time as "31 January 2026, 12:00 UTC"; anything else as it is."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
    zone = f" {found.tzname()}" if found.tzinfo is not None else ""
    return f"{found.day} {found:%B %Y, %H:%M}{zone}"


def spread(found: Spread | None) -> str:
    """``0.981 ± 0.004``; more decimals (up to 5) when the deviation would read as zero; no ± with a single seed; very
    small or large ones in scientific form.

    A deviation that is rounding counts as zero.
    """
    if found is None or found.deviation is None:
        return number(found and found.mean)
    mean, deviation = found.mean, found.deviation
    hidden = _ROUNDING * abs(mean) < deviation < 5e-4
    decimals = min(5, 1 - math.floor(math.log10(deviation))) if hidden else 3
    return _plus_minus(mean, deviation, decimals)


def _plus_minus(value: float, half: float, decimals: int) -> str:
    top = max(abs(value), half)
    if top and not _PLAIN <= top < _LARGE:
        return f"{value:.1e} ± {half:.1e}"
    return f"{value:.{decimals}f} ± {half:.{decimals}f}"


def rate(value: float | None) -> str:
    """A learning rate: 0.001, 3e-4."""
    if value is None:
        return MISSING
    plain = f"{value:g}"
    return plain.replace("e-0", "e-").replace("e+0", "e+")


def count(value: float | None) -> str:
    """A whole number with thin separators that copy as plain commas: 1,234,567."""
    return MISSING if value is None else f"{round(value):,}"


def compact(value: float | None) -> str:
    """Three significant digits with k or M: 12.3k."""
    if value is None:
        return MISSING
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # what rounds to 1000 of a unit is 1 of the next
            return f"{_three(value / size)}{unit}"
    return _three(value)


def bytes_(value: float | None) -> str:
    """Bytes in powers of 1024: 1.5 MiB."""
    if value is None:
        return MISSING
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= size:
            return f"{_three(value / size)} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """Seconds as 8.2 s, 3 min 20 s or 1 h 5 min."""
    if value is None:
        return MISSING
    if value < 60:
        return f"{_three(value)} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole % 3600 // 60 else f"{whole // 3600} h"


def ratio(value: float | None) -> str:
    """1.4×"""
    return MISSING if value is None else f"{value:.2g}×" if value < 10 else f"{value:.0f}×"


def tokens(value: int) -> str:
    """Sequence lengths: 1k, 16k, 128k for powers of two, else the number."""
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else f"{value:,}"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(value: float | None, digits: int = 4) -> float | None:
    """``value`` with a few significant digits: a page holds what can be seen, files hold the rest. None for what is not
    finite.
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text, low to high; longer curves are averaged down to 24 blocks."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    if len(finite) > _WIDTH:
        edges = [round(index * len(finite) / _WIDTH) for index in range(_WIDTH + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(finite), max(finite)
    if high == low:
        return _BLOCKS[0] * len(finite)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in finite)


def named(label: str) -> str:
    """A label inside a sentence: in quotation marks where it holds a comma that stands in no brackets."""
    return f'"{label}"' if ", " in re.sub(r"\([^)]*\)", "", label) else label


def enumerate_names(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(names) < 3:
        return " and ".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def word(value: int) -> str:
    """Small numbers as words at the start of a sentence: Five."""
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")
    return words[value] if value < len(words) else str(value)
