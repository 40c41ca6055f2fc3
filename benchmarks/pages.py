"""The HTML pages of benchmarks, made again from their JSON: ``python -m benchmarks.pages results/benchmarks``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import fidelity_page, merging_page, recall_page, scaling_page, sparse_page, verdicts_page
from benchmarks.common import folder_of_records
from zonal.store import read_json

PAGES: dict[str, Callable[[Path, Any], None]] = {
    "fidelity": lambda path, value: fidelity_page.write(path, value["rows"]),
    "merging": merging_page.write,
    "recall": recall_page.write,
    "scaling": scaling_page.write,
    "sparse": sparse_page.write,
    "verdicts": verdicts_page.write,
}


def write(folder: Path) -> list[Path]:
    """Write the page of every benchmark in ``folder``, or in a folder of a machine in it, that has one; returns the
    pages. Raises: FileFormatError.
    """
    made = []
    for record in sorted(folder.rglob("*.json")):
        if record.stem in PAGES:
            made.append(record.with_suffix(".html"))
            PAGES[record.stem](made[-1], read_json(record))
    return made


if __name__ == "__main__":
    for path in write(folder_of_records(__doc__ or "")):
        print(f"Page: {path}")
