"""The HTML pages of benchmarks, made again from their JSON: ``python -m benchmarks.pages results/benchmarks``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import fidelity_page, merging_page, recall_page, scaling_page, sparse_page, verdicts_page
from benchmarks.common import folder_of_records, write_page

PAGES: dict[str, Callable[[Any], str]] = {
    "fidelity": lambda value: fidelity_page.html(value["rows"]),
    "merging": merging_page.html,
    "recall": recall_page.html,
    "scaling": scaling_page.html,
    "sparse": sparse_page.html,
    "verdicts": verdicts_page.html,
}


def write(folder: Path) -> list[Path]:
    """Write the page of every benchmark in ``folder``, or in a folder of a machine in it, that has one; returns the
    pages. Raises: FileFormatError.
    """
    made = []
    for record in sorted(folder.rglob("*.json")):
        if record.stem in PAGES:
            made.append(record.with_suffix(".html"))
            write_page(str(record), PAGES[record.stem])
    return made


if __name__ == "__main__":
    for path in write(folder_of_records(__doc__ or "")):
        print(f"Page: {path}")
