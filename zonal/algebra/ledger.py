"""The ledger: which moves lead from the full interaction of all tokens to the operator that runs."""

from collections.abc import Sequence

from zonal.algebra.declaration import Move

KINDS = ("assumed", "derived", "approximated")


def text(moves: Sequence[Move]) -> str:
    """The moves as lines, grouped by kind; an empty group says 'nothing'."""
    lines = []
    for kind in KINDS:
        of_kind = [move for move in moves if move.kind == kind]
        lines.append(f"{kind}:" + ("" if of_kind else " nothing"))
        lines += [f"  {move.slot:<7} {move.text}" for move in of_kind]
    return "\n".join(lines)
