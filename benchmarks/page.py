"""A page of results in Markdown beside a benchmark's JSON: what was predicted, what was measured, in tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zonal import store


class Table(NamedTuple):
    """Rows of cells under a heading, with a paragraph before them."""

    title: str
    about: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def write(
    target: Path, title: str, about: Sequence[str], tables: Sequence[Table], value: Mapping[str, Any], command: str
) -> None:
    """Write the page of the JSON ``value``; ``command`` runs it again."""
    device, versions = value["device"], value["versions"]
    load = f", load {value['load_per_core']:g} a core when it began" if value["load_per_core"] is not None else ""
    circumstances = (
        f"{device['name']}, {device['threads']} thread{'s' * (device['threads'] != 1)}{load}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items() if version)}; "
        f"{value['date'][:10]}."
    )
    lines = [
        f"# {title}",
        "",
        *(line for paragraph in about for line in (paragraph, "")),
        circumstances,
        "",
        "```bash",
        command,
        "```",
        "",
    ]
    for table in tables:
        lines += [
            f"## {table.title}",
            "",
            table.about,
            "",
            _row(table.header),
            _row(["---"] * len(table.header)),
            *map(_row, table.rows),
            "",
        ]
    store.write_bytes(target, "\n".join(lines).encode())


def shown(path: Path) -> str:
    """A path for a command that others run: where it is on this machine is left out."""
    return path.name if path.is_absolute() else path.as_posix()


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


__all__ = ["Table", "shown", "write"]
