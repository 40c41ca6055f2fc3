"""The benchmarks of all kinds of machines side by side: ``python -m benchmarks.machines results/benchmarks``.

It reads the records of each folder of a kind of machine and writes ``machines.md`` beside them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import folder_of_records, ratio_text
from zonal import store

_ABOUT = (
    "A cell is the ratio of the time to that of the peer behind the colon, its median and quartiles over pairs. "
    "Below 1 the library is faster. `make bench` measures the machine it runs on, `make results` writes this page."
)
_MEASURED = ("bytes", "error", "load_per_core", "parameters")
"""Parts of the names of numbers that are measured, and do not describe a row."""


def described(row: Mapping[str, Any]) -> str:
    """What was measured: the row's own description, or its settings."""
    if "row" in row:
        return row["row"]
    settings = {
        name: value for name, value in row.items()
        if isinstance(value, str | int | bool) and not any(part in name for part in _MEASURED)
    }  # fmt: skip
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def ratios(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what was measured, ratio to the peer) of each comparison in a record."""
    for row in record["rows"]:
        compared = {name: value for name, value in row.items() if isinstance(value, dict) and "ratio" in value}
        for name, value in compared.items():
            peer = row.get("peer", name.removeprefix("against_")) if len(compared) == 1 else name.replace("_", " ")
            yield f"{described(row)}: {peer}", ratio_text(value, 2)


def page(folder: Path) -> str:
    """The page of all records in the folders of a folder."""
    records: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.json")):
        records.setdefault(path.stem, {})[path.parent.name] = store.read_json(path)
    lines = ["# Benchmarks by machine", "", _ABOUT]
    for name, machines in records.items():
        found = {machine: dict(ratios(record)) for machine, record in machines.items()}
        rows = list(dict.fromkeys(row for each in found.values() for row in each))
        if not rows:
            continue
        lines += ["", f"## {name}", ""]
        lines += [
            f"- {machine}: {record['device']['name']}, {record['device']['threads']} threads, torch "
            f"{record['versions']['torch']}, {record['date'][:10]}"
            for machine, record in machines.items()
        ]
        lines += ["", f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
        lines += [f"| {row} | {' | '.join(each.get(row, '') for each in found.values())} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    records = folder_of_records(__doc__ or "")
    target = records / "machines.md"
    target.write_text(page(records), encoding="utf-8")
    print(f"Page: {target}")
