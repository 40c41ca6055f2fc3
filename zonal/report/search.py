"""The page of a search: the move graph as a picture, rounds, regimes, what circulates, the winner's recipe; from
search.json, findings.json and recipe.json.
"""

import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zonal import store
from zonal.evaluation.statistics import difference_within_spread, spread
from zonal.report import formats, page, table
from zonal.report.fairness import guess_margin
from zonal.report.table import Grid

SCHEMA = 1
_SHOWN_CYCLES = 12
_SETTINGS = "seeds rounds width rungs eta measure rule threshold temperature kinds palette budget_seconds draw"
_VERDICTS = {
    "exact": (
        "Yes, up to rounding: the sum of efforts around every cycle is 0, so one number per regime gives all of them. "
        "This must hold when every edge was measured after the same number of steps."
    ),
    "within the spread": "They may: no sum around a cycle differs from 0 by more than the spread over seeds.",
    "beyond the spread": (
        "No: some sums around cycles differ from 0 by more than the spread over seeds. The worth of a move depends on "
        "the path that led to it, and no single number per regime gives all efforts."
    ),
    "not decidable": "One seed cannot tell: sums around cycles are not 0, and their spread is unknown.",
    "no cycles": "Nothing can be said: no two ways lead from one regime to another among those that were tried.",
}


_FLATTERED = (
    "The first is the best of many on the numbers that chose it, which flatters it: compare it with the start on new "
    "seeds before you believe the distance."
)
_FAIR = (
    "Regimes were chosen by validation data, of which each seed's value is, too. That flatters the first regime there, "
    "but not on the evaluation set."
)


@dataclass(frozen=True)
class SearchPaths:
    """The files of a search's report."""

    html: Path
    markdown: Path


def write(directory: str | os.PathLike[str]) -> SearchPaths:
    """Write report.html and report.md into the folder of a search, from the files in it.

    Raises: FileFormatError when a file is missing, damaged or of another version; InsufficientSpaceError.
    """
    folder = Path(directory)
    advice = "Write the page with the version that searched."
    names = ["search.json", "findings.json", *(["recipe.json"] if (folder / "recipe.json").is_file() else [])]
    with store.understood("report", folder):
        values = context(*(store.read_record(folder / name, SCHEMA, "report", advice) for name in names))
    paths = SearchPaths(folder / "report.html", folder / "report.md")
    store.write_bytes(paths.html, page.rendered_html("search", values))
    store.write_bytes(paths.markdown, page.rendered_markdown("search", values))
    return paths


def context(
    search: Mapping[str, Any], found: Mapping[str, Any], recipe: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What both templates need."""
    regimes, machine, made = found["regimes"], table.device(search["device"]), formats.date(search["created"])
    return {
        "title": search["title"],
        "description": search["task_description"],
        "measured": found["measured"],
        "headline": headline(search, found),
        "facts": _facts(search, found),
        "rounds": _rounds(found),
        "regimes": _regimes(regimes),
        "flattered": _FAIR if _validated(regimes) else _FLATTERED,
        "potential": _potential(found),
        "cycles": _cycles(found),
        "edges": _edges(found),
        "recipe": [] if recipe is None else list(recipe["commands"].values()),
        "skipped": _skipped(found["skipped"], regimes),
        "search": search["command"],
        "settings": [
            ("Search", table.settings({name: search[name] for name in _SETTINGS.split()})),
            ("Model", table.settings(search["model"])),
            ("Training", table.settings(search["training"])),
            ("Versions and device", table.settings({**search["versions"], "device": machine, "made": made})),
        ],
        "payload": picture(found),
    }


def _last(regime: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The longest training of a regime that has a cost."""
    return max((rung for rung in regime["rungs"] if rung["cost"]), key=lambda rung: rung["steps"], default=None)


def _cost(rung: Mapping[str, Any] | None) -> str:
    return formats.spread(None if rung is None else spread(list(rung["by_seed"].values())))


def _reported(rung: Mapping[str, Any]) -> dict[int, float]:
    """Seed → the measure on the evaluation set. In findings of an earlier version, and for a task without a validation
    set, that is what the regimes were chosen by.
    """
    return {int(seed): value for seed, value in (rung.get("reported") or rung["by_seed"]).items()}


def _shown(rung: Mapping[str, Any]) -> str:
    return formats.spread(spread(list(_reported(rung).values())))


def _validated(regimes: Sequence[Mapping[str, Any]]) -> bool:
    return any(rung.get("reported") for regime in regimes for rung in regime["rungs"])


def _interval(effort: Mapping[str, Any]) -> str:
    """``-0.12 ± 0.03``: mean and half of its interval, with a sign."""
    mean, low, high = effort["mean"], effort["low"], effort["high"]
    sign = "−" if mean < 0 else "+" if mean > 0 else ""
    return sign + (formats.number(abs(mean)) if low is None else formats.margin(mean, (high - low) / 2))


def _signed(value: float) -> str:
    return f"{value:+.4f}" if abs(value) >= 5e-5 else "0"


def headline(search: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The result of the search in a few sentences."""
    regimes, rounds = found["regimes"], found["rounds"]
    accepted = sum(each["accepted"] for each in rounds)
    walk = (
        f"{len(rounds)} round{'s' if len(rounds) != 1 else ''}, {accepted} accepted; "
        f"{len(regimes)} regimes were trained. It ended because {found['reason']}."
    )
    if found["winner"] is None:
        return ["No regime has been trained to the last rung yet.", walk]
    start, winner = regimes[0], regimes[found["winner"]]
    # both have costs: a search whose start has failed has no winner
    best, first = _last(winner) or {}, _last(start) or {}
    guess = search.get("guess")  # a search of an earlier version has none
    margin = _margin(search, best)
    learned = guess is None or spread(list(_reported(best).values())).mean < guess - margin
    chance = f" ± {formats.number(margin)} by chance" if margin else ""
    than_guess = "" if learned else f" That is no better than a guess ({formats.number(guess)}{chance})."
    if found["winner"] == 0:
        most = max(rung["steps"] for rung in start["rungs"])
        others = sum(any(rung["steps"] == most and rung["cost"] for rung in regime["rungs"]) for regime in regimes) - 1
        has = f"{start['label']}: {found['measured']} {_shown(first)}"
        if not others:
            return [f"No other regime came to the last rung than the start, {has}.{than_guess}", walk]
        verdict = (
            "The one other that came to the last rung is no better"
            if others == 1
            else f"None of the {others} others that came to the last rung is better"
        )
        return [f"{verdict} than the start, {has}.{than_guess}", walk]
    seeds = {
        "within the spread": " The difference is within the spread over seeds.",
        "not decidable": " One seed cannot show whether that is more than chance.",
        "beyond the spread": "",
    }[difference_within_spread(_reported(best), _reported(first)).verdict]
    chosen = ", on an evaluation set by which nothing was chosen" if _validated(regimes) else ""
    return [
        f"{winner['label']} is the best that was found: {found['measured']} {_shown(best)} against "
        f"{_shown(first)} for the start, {start['label']}{chosen}.{than_guess}{seeds}",
        walk,
    ]


def _margin(search: Mapping[str, Any], rung: Mapping[str, Any]) -> float:
    """How far the error of a guess may lie below its mean by chance. 0 for a loss, and in findings of an earlier
    version, which do not say how many answers were read.
    """
    guess, answers = search.get("guess"), rung.get("answers")
    return guess_margin(guess, answers) if guess is not None and answers and search["metric"] == "accuracy" else 0.0


def _facts(search: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    seeds = len(search["seeds"])
    rule = (
        f"threshold {search['threshold']:g}"
        if search["rule"] == "threshold"
        else f"Metropolis, temperature {search['temperature']:g}"
    )
    return [
        f"{seeds} seed{'s' if seeds != 1 else ''}",
        f"{formats.count(search['training']['steps'])} steps on the last of {search['rungs']} rungs",
        rule,
        f"{formats.seconds(found['seconds'])} of training and evaluating",
    ]


def _rounds(found: Mapping[str, Any]) -> Grid:
    regimes = found["regimes"]
    rows = []
    for number, each in enumerate(found["rounds"], start=1):
        chosen = formats.MISSING if each["chosen"] is None else regimes[each["chosen"]]["label"]
        verdict = "went there" if each["accepted"] else "stayed" if each["chosen"] is not None else "cut short"
        chance = formats.MISSING if each["probability"] is None else f"{each['probability']:.2f}"
        effort = formats.MISSING if each["effort"] is None else _interval(each["effort"])
        drawn = "; ".join(move["text"] for move in each["drawn"])
        rows.append((str(number), regimes[each["current"]]["label"], drawn, chosen, effort, chance, verdict))
    return Grid(("Round", "From", "Moves drawn", "Best of them", "Effort", "Probability", "The search"), tuple(rows))


def _regimes(regimes: Sequence[Mapping[str, Any]]) -> Grid:
    def order(regime: Mapping[str, Any]) -> tuple[float, float]:
        rung = _last(regime)
        return (1.0, 0.0) if rung is None else (-rung["steps"], rung["cost"]["mean"])

    rows, validated = [], _validated(regimes)
    for regime in sorted(regimes, key=order):
        rung = _last(regime)
        message = next((each["message"] for each in regime["rungs"] if each["message"]), None)
        seeds = ", ".join(map(formats.number, rung["by_seed"].values())) if rung else message or formats.MISSING
        steps = formats.MISSING if rung is None else formats.count(rung["steps"])
        size, time = formats.compact(regime["parameters"]), formats.seconds(regime["seconds"])
        evaluated = formats.MISSING if rung is None or not rung.get("reported") else _shown(rung)
        costs = (_cost(rung), evaluated) if validated else (_cost(rung),)
        rows.append((regime["label"], steps, *costs, seeds, size, time, regime["operator"]))
    columns = ("Cost on validation data", "On the evaluation set") if validated else ("Cost",)
    return Grid(("Regime", "Steps", *columns, "Each seed", "Parameters", "Trained", "Operator"), tuple(rows))


def _potential(found: Mapping[str, Any]) -> list[str]:
    turning = found["graph"]["circulation"]
    if turning is None:
        return ["No two of the regimes that were tried are one move apart."]
    lines = [_VERDICTS[turning["verdict"]]]
    if turning["cycles"]:
        each = ", ".join(f"{share:.1%}" for share in turning["share_by_seed"])
        lines.append(
            f"Of the squared efforts {turning['share']:.1%} circulate ({each} by seed, noise among it): "
            "the residual of a least-squares fit of one number per regime to all "
            f"{len(found['graph']['edges'])} moves. "
            f"Its norm is {formats.number((turning['curl'] ** 2 + turning['harmonic'] ** 2) ** 0.5)} "
            f"({formats.number(turning['curl'])} around triangles, "
            f"{formats.number(turning['harmonic'])} around longer cycles only) "
            f"beside {formats.number(turning['gradient'])} of the gradient."
        )
        lines.append(
            "Edges were measured after "
            f"{formats.enumerate_names([formats.count(steps) for steps in turning['steps']])} steps; "
            "intervals of cycle sums hold together at 95% "
            f"({turning['level']:.2%} each)."
        )
    return lines


def _cycles(found: Mapping[str, Any]) -> Grid:
    turning, regimes = found["graph"]["circulation"], found["regimes"]
    sums = sorted(turning["cycles"] if turning else [], key=lambda cycle: -abs(cycle["sum"]["mean"]))
    rows = [
        (
            " → ".join(regimes[node]["label"] for node in (*cycle["nodes"], cycle["nodes"][0])),
            _interval(cycle["sum"]),
            formats.number(cycle["length"]),
        )
        for cycle in sums[:_SHOWN_CYCLES]
    ]
    title = "Cycle" if len(sums) <= _SHOWN_CYCLES else f"Cycle (the largest {_SHOWN_CYCLES} of {len(sums)})"
    return Grid((title, "Sum", "Efforts on the way, absolute"), tuple(rows))


def _edges(found: Mapping[str, Any]) -> Grid:
    regimes = found["regimes"]
    rows = [
        (
            regimes[edge["from"]]["label"],
            regimes[edge["to"]]["label"],
            edge["text"],
            formats.count(edge["steps"]),
            _interval(edge["effort"]),
            _signed(edge["circulation"]),
        )
        for edge in found["graph"]["edges"]
    ]
    return Grid(("From", "To", "Move", "Steps", "Effort", "Circulating part"), tuple(rows))


def _skipped(skipped: Sequence[Mapping[str, Any]], regimes: Sequence[Mapping[str, Any]]) -> Grid:
    places: dict[tuple[str, str, str], list[str]] = {}
    for each in skipped:
        place = places.setdefault((each["kind"], each["text"], each["reason"]), [])
        place.append(regimes[each["from"]]["label"])
    rows = [
        (text, found[0] + (f" and {len(found) - 1} more" if found[1:] else ""), reason)
        for (_, text, reason), found in places.items()
    ]
    return Grid(("Move", "From", "Reason"), tuple(rows))


def picture(found: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes at (moves from the start, cost), edges between them; a node without a cost is not drawn."""
    regimes, edges = found["regimes"], found["graph"]["edges"]
    distance = _distances(len(regimes), edges)
    walked = {frozenset((each["current"], each["chosen"])) for each in found["rounds"] if each["accepted"]}
    visited = {0, *(each["chosen"] for each in found["rounds"] if each["accepted"])}
    most = max((rung["steps"] for regime in regimes for rung in regime["rungs"]), default=0)
    drawn = {index: rung for index, regime in enumerate(regimes) if (rung := _last(regime))}
    place = {index: position for position, index in enumerate(drawn)}
    # regimes at one distance stand side by side, so that their lines can be told apart
    beside: Counter[int] = Counter()
    nodes = []
    for index, rung in drawn.items():
        label, step = regimes[index]["label"], distance.get(index, 0)
        shift = (0.0, 0.16, -0.16, 0.32, -0.32)[beside[step] % 5]
        beside[step] += 1
        nodes.append(
            {
                "x": step + (shift if step else 0.0), "y": rung["cost"]["mean"], "sd": rung["cost"]["deviation"],
                "last": rung["steps"] == most, "winner": index == found["winner"], "visited": index in visited,
                "text": f"<b>{_escaped(label)}</b><br>{_cost(rung)} after {formats.count(rung['steps'])} steps",
            }
        )  # fmt: skip
    lines = [
        {
            "from": place[edge["from"]], "to": place[edge["to"]],
            "walked": frozenset((edge["from"], edge["to"])) in walked,
            "text": (
                f"{_escaped(edge['text'])}<br>effort {_interval(edge['effort'])} after {formats.count(edge['steps'])} "
                f"steps<br>circulating {_signed(edge['circulation'])}"
            ),
        }
        for edge in edges
    ]  # fmt: skip
    return {
        "nodes": nodes,
        "edges": lines,
        "measured": found["measured"],
        "ticks": sorted({distance.get(index, 0) for index in drawn}),
    }


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _distances(count: int, edges: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Moves from the first regime to each, along moves that were measured."""
    beside: list[list[int]] = [[] for _ in range(count)]
    for edge in edges:
        beside[edge["from"]].append(edge["to"])
        beside[edge["to"]].append(edge["from"])
    distance, waiting = {0: 0}, deque([0])
    while waiting:
        node = waiting.popleft()
        for other in beside[node]:
            if other not in distance:
                distance[other] = distance[node] + 1
                waiting.append(other)
    return distance
