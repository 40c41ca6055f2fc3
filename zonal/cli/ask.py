"""``zonal ask``: the span of the texts in a memory that fits a question, or that none does."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zonal import ingest
from zonal.errors import ArgumentError
from zonal.ingest.asking import CANDIDATES, LEAST
from zonal.limits import COUNT, Between

DESCRIPTION = """\
Find the span of text that fits a question best, among all texts that `zonal ingest` has read into a memory. Prints the
document, the characters from and to which the span goes, and its text; or "not in memory", with exit code 1.

Examples:
  zonal ask memory "When was the mill built?"
  zonal ask memory "Who is the landlady of the inn?" --top 3 --json"""

MISSING = 1


@dataclass(frozen=True)
class Ask:
    """Find the span that fits a question."""

    archive: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")] = None
    """The folder that zonal ingest wrote."""
    question: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="QUESTION")] = None
    """Words to look for. A word fits only as it is written, in lower or upper case."""
    least: Annotated[float, Between(1e-6, 1)] = LEAST
    """The share of the question's words, weighed by how rare they are, that an answer must have."""
    top: Annotated[int, COUNT] = 1
    """Answers at most."""
    candidates: Annotated[int, COUNT] = CANDIDATES
    """Spans that the memory proposes and that are then read."""
    json: bool = False
    """Print JSON."""


def run(options: Ask, command: str) -> int:
    """Run the command; returns the exit code."""
    if options.archive is None or options.question is None:
        raise ArgumentError('ask: a memory and a question were required: zonal ask MEMORY "QUESTION".')
    found = ingest.ask(
        ingest.Archive.open(options.archive), options.question, least=options.least, candidates=options.candidates,
        top=options.top,
    )  # fmt: skip
    if options.json:
        print(json.dumps([each._asdict() for each in found], indent=1, ensure_ascii=False))
        return 0 if found else MISSING
    for each in found:
        without = f"; without: {', '.join(each.missing)}" if each.missing else ""
        print(
            f"{Path(each.folder) / each.document}, characters {each.start} to {each.end} (fit {each.fit:.2f}{without})"
        )
        print(each.text, end="\n\n" if each is not found[-1] else "\n")
    if not found:
        print("not in memory")
    return 0 if found else MISSING
