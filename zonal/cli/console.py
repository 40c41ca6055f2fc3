"""What commands print: tables and ledgers, for the terminal."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from zonal.algebra import Move, ledger


def screen(width: int = 160) -> Console:
    """The terminal; for a file or a pipe, which has no width to keep to, one of ``width`` columns."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def table(
    title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], bold: str | None = None
) -> RenderableType:
    """A table: numbers are aligned right, and everything in a table of two or three columns left."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 3, 0, 0), header_style="dim"
    )
    numbers = len(head) > 3
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if numbers and index else "left")
    for row in rows:
        table.add_row(*(Text(cell, style="bold" if row[0] == bold else "") for cell in row))
    return table


def ledger_tree(moves: Sequence[Move]) -> RenderableType:
    """The moves of an operator, each with what follows from it below it."""
    tree = Tree(ledger.ROOT)
    for move in moves:
        branch = tree.add(Text(move.line))
        for derived in move.derives:
            branch.add(Text(derived.text, style="dim"))
    return tree
