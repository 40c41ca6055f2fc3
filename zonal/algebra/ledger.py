"""The ledger: the moves that lead from the full interaction of all tokens to an operator, and their consequences.

Moves are sorted by ``STEPS``. Operators therefore share their first common moves, and together they form a tree.
"""

from collections.abc import Mapping, Sequence

from zonal.algebra.declaration import Move

ROOT = "all evidence between all records"
STEPS = {
    "closure": "what there is becomes a fixed set",
    "restriction": "fewer kernels are admitted",
    "quotient": "what no probe tells apart is one",
    "section": "one of those is taken",
    "approximation": "a function is replaced by one that is cheaper to write down",
}
_SLOTS = ("carrier", "link", "score", "prior", "anchor", "search")


def ordered(moves: Sequence[Move]) -> tuple[Move, ...]:
    """Moves from the root on: by step, then by slot."""
    return tuple(sorted(moves, key=lambda move: (list(STEPS).index(move.step), _SLOTS.index(move.slot))))


def text(moves: Sequence[Move]) -> str:
    """The moves of one operator as lines: each with its assumption, and its consequences below."""
    lines = [ROOT]
    for index, move in enumerate(moves):
        last = index == len(moves) - 1
        lines.append(f"{'└─' if last else '├─'} {move.line}")
        lines += [f"{'  ' if last else '│ '}    {derived.text}" for derived in move.derives]
    return "\n".join(lines)


def tree(operators: Mapping[str, Sequence[Move]]) -> str:
    """A text tree of the moves of several operators by name: branches part where moves first differ.

    The operators are its leaves. Neighbouring branches with one name also show the settings of their operators.
    """
    return "\n".join([ROOT, *_branches([(name, tuple(moves)) for name, moves in operators.items()], "")])


def legend(operators: Mapping[str, Sequence[Move]]) -> str:
    """The assumption of each move of a tree, once each, in the order of steps, with the settings of its operators."""
    moves = {move.line: move for each in operators.values() for move in each}
    return "\n".join(move.line for move in ordered(tuple(moves.values())))


def _branches(paths: Sequence[tuple[str, tuple[Move, ...]]], indent: str) -> list[str]:
    groups: dict[str, list[tuple[str, tuple[Move, ...]]]] = {}
    for name, moves in paths:
        # what follows from a move depends on the others, too: it tells no moves apart
        groups.setdefault(moves[0].line if moves else "", []).append((name, moves))
    firsts = [members[0][1][0] for line, members in groups.items() if line]
    lines = []
    for index, (line, members) in enumerate(groups.items()):
        last = index == len(groups) - 1
        if not line:
            lines.append(f"{indent}{'└─' if last else '├─'} = {', '.join(one for one, _ in members)}")
            continue
        first = members[0][1][0]
        alike = sum((move.step, move.name) == (first.step, first.name) for move in firsts) > 1
        lines.append(
            f"{indent}{'└─' if last else '├─'} {first.step}: "
            f"{first.name}{f' ({first.settings})' if alike and first.settings else ''}"
        )
        lines += _branches([(one, moves[1:]) for one, moves in members], indent + ("   " if last else "│  "))
    return lines
