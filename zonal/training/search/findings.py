"""findings.json: everything that a search found, as plain JSON for its page and for whoever reads on."""

from pathlib import Path
from typing import Any

from zonal.evaluation.statistics import Spread, spread
from zonal.store import write_checked
from zonal.training.search.graph import Graph, move_graph
from zonal.training.search.regime import Regime
from zonal.training.search.result import Outcome, SearchResult
from zonal.training.search.spec import SearchSpec

FILE = "findings.json"
SCHEMA = 1


def write(directory: Path, spec: SearchSpec, result: SearchResult) -> None:
    """Write findings.json into the folder of a search, atomically."""
    write_checked(directory / FILE, findings(spec, result))


def findings(spec: SearchSpec, result: SearchResult) -> dict[str, Any]:
    """What the file holds. Regimes are named by their place in "regimes", in the order they were tried."""
    tried = list(result.outcomes)
    place = {regime: index for index, regime in enumerate(tried)}
    graph = move_graph(result.costs, spec.model, spec.kinds, spec.palette)
    return {
        "schema": SCHEMA,
        "status": result.status,
        "reason": result.reason,
        "measured": spec.measured,
        "seconds": sum(outcome.seconds for rungs in result.outcomes.values() for outcome in rungs.values()),
        "winner": None if result.winner is None else place[result.winner],
        "regimes": [_regime(regime, rungs) for regime, rungs in result.outcomes.items()],
        "rounds": [
            {
                "current": place[each.current],
                "drawn": [{"kind": move.kind, "text": move.text, "to": place.get(move.target)} for move in each.drawn],
                "rungs": [
                    {"steps": steps, "order": [place[regime] for regime in order]} for steps, order in each.rungs
                ],
                "chosen": None if each.chosen is None else place[each.chosen],
                "effort": None if each.effort is None else _spread(each.effort),
                "probability": each.probability,
                "accepted": each.accepted,
            }
            for each in result.rounds
        ],
        "skipped": [
            {"from": place[regime], "kind": each.kind, "text": each.text, "reason": each.reason}
            for regime, found in result.judged.items()
            for each in found.skipped
        ],
        "graph": _graph(graph, place),
    }


def _spread(found: Spread) -> dict[str, Any]:
    return {"n": found.n, "mean": found.mean, "deviation": found.deviation, "low": found.low, "high": found.high}


def _regime(regime: Regime, rungs: dict[int, Outcome]) -> dict[str, Any]:
    runs = [run for outcome in rungs.values() for run in outcome.runs]
    return {
        **regime.to_dict(),
        "operator": regime.operator,
        "label": regime.label,
        "name": regime.name,
        "parameters": next((run.parameters for run in runs if run.parameters is not None), None),
        "seconds": sum(outcome.seconds for outcome in rungs.values()),
        "rungs": [
            {
                "steps": steps,
                "cost": None if outcome.costs is None else _spread(spread(list(outcome.costs.values()))),
                "by_seed": _named(outcome.costs),
                "reported": _named(outcome.reported),
                # of an evaluation: the margin of chance of a guess depends on their number
                "answers": min((run.final["positions"] for run in outcome.runs if run.final is not None), default=None),
                "message": outcome.message,
            }
            for steps, outcome in rungs.items()
        ],
    }


def _named(by_seed: dict[int, float] | None) -> dict[str, float] | None:
    return None if by_seed is None else {str(seed): value for seed, value in by_seed.items()}


def _graph(graph: Graph, place: dict[Regime, int]) -> dict[str, Any]:
    """Edges with their efforts and what of them circulates, the potential of each regime, and the cycles."""
    found = graph.found
    nodes = [place[regime] for regime in graph.regimes]
    return {
        "nodes": nodes,
        "potential": None if found is None else found.mean.potential.tolist(),
        "edges": [
            {
                "from": nodes[edge.tail],
                "to": nodes[edge.head],
                "kind": edge.kind,
                "text": edge.text,
                "steps": edge.steps,
                "efforts": list(edge.efforts),
                "effort": _spread(edge.effort),
                "circulation": None if found is None else float(found.mean.circulation[index]),
            }
            for index, edge in enumerate(graph.edges)
        ],
        "circulation": None
        if found is None
        else {
            "verdict": found.verdict,
            "share": found.mean.share,
            "share_by_seed": list(found.share_by_seed),
            "curl": float(found.mean.curl.norm()),
            "harmonic": float(found.mean.harmonic.norm()),
            "gradient": float(found.mean.gradient.norm()),
            "level": found.level,
            "steps": sorted({edge.steps for edge in graph.edges}),
            "cycles": [
                {"nodes": [nodes[node] for node in cycle.nodes], "sum": _spread(cycle.total), "length": cycle.length}
                for cycle in found.cycles
            ],
        },
    }
