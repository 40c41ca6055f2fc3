"""Writes what pages repeat of the code and of records: the links of docs/algebra.md, the tables of docs/operators.md,
the tree of docs/tree.md, and the measured errors of docs/slay_measured.md, docs/slay_maps.md and docs/slay_models.md.

python -m tools.pages
"""

import re
from pathlib import Path

from tools import fidelity_tables
from zonal import mechanisms
from zonal.algebra.declaration import declared
from zonal.cli.explain import tree

DOCS = Path(__file__).resolve().parents[1] / "docs"


def operators(page: str) -> str:
    """docs/operators.md with a row for each mechanism in both of its tables."""
    known = {name: mechanisms.MECHANISMS[name] for name in mechanisms.names()}
    links = {name: f"[{name}](mechanisms/{name}.md)" for name in known}
    formulas = [f"| {links[name]} | {each.weights} | {each.memory} | {each.paths} |" for name, each in known.items()]
    lines = [f"| {links[name]} | {each.label} | {each.line} |" for name, each in known.items()]
    page = _table(page, "| operator | weights | memory | fast paths |", formulas)
    return _table(page, "| operator | name | in one line |", lines)


def _table(page: str, head: str, rows: list[str]) -> str:
    """A page whose table of that head has these rows."""
    body = "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows, ""])
    return re.sub(rf"^{re.escape(head)}\n(\|.*\n)*", lambda _: body, page, flags=re.MULTILINE)


def ancestry(page: str) -> str:
    """docs/tree.md with the ledgers as they are."""
    return re.sub(r"(?<=```text\n).*?(?=\n```)", lambda _: tree().rstrip("\n"), page, flags=re.DOTALL)


def links(page: str) -> str:
    """docs/algebra.md with every link in its table of slots."""
    names = ", ".join(f"`{name}`" for name in sorted(declared("link")))
    return re.sub(r"^(\| link \|.*\| )[^|]*( \|)$", lambda row: f"{row[1]}{names}{row[2]}", page, flags=re.MULTILINE)


PAGES = {
    "algebra.md": links,
    "operators.md": operators,
    "tree.md": ancestry,
    "slay_maps.md": fidelity_tables.maps,
    "slay_models.md": fidelity_tables.models,
    "slay_measured.md": fidelity_tables.table_10,
}


def main() -> None:
    for name, written in PAGES.items():
        page = DOCS / name
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
