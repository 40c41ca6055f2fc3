"""Numbers on the pages are those of the records. A comment ahead of them, ``<!-- claims 3 -->``, stands for part [3] of
the file of its page in ``tests/claims``, which names records, places in them, and the words that the numbers stand in:

    [3]
    results/a/summary.json comparisons/0/operators
    label=Softmax/accuracy | softmax {mean:.3f} ± {deviation:.3f}
    label=Ridge/seconds => *1000 | {:.1f} ms @ ridge @ 2

A line without " | " names a file and where in it the lines below begin. A place is a way through
the JSON: names of objects and numbers of entries, or ``key=value`` for the first entry of a list that has it, or
``key=value&key=value`` for the first that has both. What is there, or what ``=> 1/x``, ``=> exp`` or ``=> *1000`` makes
of it, fills the words, which must then stand in what follows: up to the second blank line, or with ``@ title @ n`` in
the cell after n others in the row of the table that begins with that title.
"""

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from zonal.report import archive

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# pages whose numbers are all of one or two records; each must name them
NAMING = (
    "docs/echo.md",
    "docs/echo_baselines.md",
    "docs/echo_failures.md",
    "docs/echo_forms.md",
    "docs/echo_paper_size.md",
    "docs/echo_two_hops.md",
    "docs/encoder_tasks.md",
    "docs/rewa.md",
    "docs/rewa_ablations.md",
    "docs/verdicts_measured.md",
    "docs/slay_measured.md",
    "docs/slay_tasks_measured.md",
    "docs/merging.md",
    "docs/convert_measured.md",
    "docs/convert_trained.md",
    "docs/documents_measured.md",
    "docs/long_context.md",
    "docs/sparse_measured.md",
    "docs/backbones.md",
    "docs/baselines.md",
    "docs/search.md",
    "docs/mechanisms/rewa.md",
    "docs/mechanisms/sinkhorn.md",
    "docs/kernel_ridge_measured.md",
    "docs/mechanisms/ska.md",
    "docs/which-operator.md",
    "docs/echo_variables.md",
    "docs/recall_based.md",
    "docs/recall_measured.md",
    "docs/text_lengths.md",
    "docs/text_measured.md",
    "docs/text_novel.md",
)


# a comment, and what follows it up to the second blank line
BLOCK = re.compile(r"<!-- claims (\d+) -->\n(\n?(?:[^\n]+\n)+)")
PART = re.compile(r"^\[(\d+)\]\n((?:[^\n]+\n)+)", re.MULTILINE)


class Claim(NamedTuple):
    file: str
    place: str
    words: str
    text: str


def parts(page: Path) -> dict[str, str]:
    """The parts of the file of claims of a page, by number."""
    file = (ROOT / "tests" / "claims" / page.relative_to(ROOT)).with_suffix(".txt")
    return dict(PART.findall(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def claims(page: Path) -> Iterator[Claim]:
    stated = parts(page)
    for number, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        file, begin = "", ""
        for line in stated.get(number, "").splitlines():
            if " | " in line:
                place, words = line.split(" | ", 1)
                yield Claim(file, f"{begin}/{place}", words, text)
            else:
                file, begin = line.split(" ", 1)


def value_at(record: Any, place: str) -> Any:
    for step in place.split("/"):
        if isinstance(record, list) and "=" in step:
            wanted = [pair.partition("=")[::2] for pair in step.split("&")]
            record = next(entry for entry in record if all(str(entry.get(key)) == value for key, value in wanted))
        else:
            record = record[int(step)] if isinstance(record, list) else record[step]
    return record


def converted(value: Any, how: str) -> Any:
    """A value of a record as a page gives it."""
    if how == "1/x":
        return 1 / value
    if how == "exp":
        return math.exp(value)
    return value * float(how.removeprefix("*")) if how else value


def cell(text: str, title: str, column: int) -> str:
    """The cell of a table after so many others, in the row that begins with this title."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    found = [row[column] for row in rows if row[0] == title and len(row) > column]
    assert len(found) == 1, f"{len(found)} rows begin with {title!r}"
    return found[0]


@functools.cache
def record(file: str) -> Any:
    """A file under results/; those of runs are packed."""
    folder, tree, rest = file.partition("/runs/")
    return json.loads(packed(folder)[f"runs/{rest}"] if tree else (ROOT / file).read_bytes())


@functools.cache
def packed(folder: str) -> dict[str, bytes]:
    """The runs of a record, each file once unpacked for all claims."""
    return archive.read(ROOT / folder / archive.NAME)


def difference(claim: Claim) -> str | None:
    """What a page should say and does not; None if it does."""
    place, _, how = claim.place.partition(" => ")
    value = converted(value_at(record(claim.file), place), how)
    form, *where = claim.words.split(" @ ")
    words = " ".join((form.format(**value) if isinstance(value, dict) else form.format(value)).split())
    text = cell(claim.text, where[0], int(where[1])) if where else " ".join(claim.text.split())
    return None if words in text else f"{claim.file} has {words!r} at {claim.place}"


CLAIMS = {page.relative_to(ROOT).as_posix(): list(claims(page)) for page in PAGES}


@pytest.mark.parametrize("page", [page for page, found in CLAIMS.items() if found])
def test_the_numbers_of_a_page_are_those_of_its_records(page: str) -> None:
    wrong = [said for said in map(difference, CLAIMS[page]) if said]
    assert not wrong, "\n".join([page, *wrong])


def test_pages_name_their_records() -> None:
    assert {page for page, found in CLAIMS.items() if found} >= set(NAMING)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        read = [number for number, _ in BLOCK.findall(text)]
        assert len(read) == len(re.findall("^<!--", text, re.MULTILINE)), (
            f"{page}: a comment without text below it, or of another form"
        )
        assert sorted(read) == sorted(parts(page)), f"{page}: its comments are not the parts of its file of claims"


def test_files_of_claims_have_pages_and_no_other_lines() -> None:
    for file in (ROOT / "tests" / "claims").rglob("*.txt"):
        page = (ROOT / file.relative_to(ROOT / "tests" / "claims")).with_suffix(".md")
        whole = "\n".join(f"[{number}]\n{lines}" for number, lines in parts(page).items())
        assert page in PAGES, file
        assert whole == file.read_text(encoding="utf-8"), file
