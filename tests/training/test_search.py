import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from training.search_and_be_killed import a_search

from zonal import mechanisms
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import ModelConfig
from zonal.report import packing
from zonal.training import events as kinds
from zonal.training.record import RunResult
from zonal.training.search import KINDS, Regime, Search, Skipped, moves
from zonal.training.search.graph import move_graph
from zonal.training.search.moves import proposals
from zonal.training.search.regime import canonical
from zonal.training.search.run import acceptance

HERE = Path(__file__).parent
MODEL = ModelConfig(64, dim=32, layers=("softmax",) * 2, heads=2, mlp="none")
START = Regime(("softmax",) * 2, 4e-3)


def timeless(folder):
    """findings.json without what the clock wrote."""

    def strip(value):
        if isinstance(value, dict):
            return {name: strip(part) for name, part in value.items() if name not in ("seconds", "checksum")}
        return [strip(part) for part in value] if isinstance(value, list) else value

    return strip(json.loads((folder / "findings.json").read_text()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search") / "it"
    seen = []
    result = Search(folder, a_search()).run(on_event=seen.append, threads=1)
    return folder, result, seen


# --- moves ------------------------------------------------------------------------------------------------------------


def test_every_legal_move_is_an_operator_and_every_skipped_one_has_a_reason():
    found = moves(START, MODEL)
    assert {move.kind for move in found.legal} == set(KINDS) - {"power"}
    assert len({move.target for move in found.legal}) == len(found.legal)
    for move in found.legal:
        assert move.target != START
        for spec in move.target.layers:
            if spec != "mamba2":
                mechanisms.resolve(spec).check("test")
    reasons = {skipped.text: skipped.reason for skipped in found.skipped}
    assert "link Yat is defined on [-1, 1] and score Dot can leave it" in reasons["link: yat"]
    assert "may be negative and cancel" in reasons["link: identity"]
    assert "has no one power" in reasons["power: one more"]


def test_squares_of_polynomials_are_judged_before_anchors_that_solve():
    """Models of moves are built on the device meta, whose tensors hold no numbers."""
    found = moves(Regime((canonical("ska"), "softmax"), 4e-3), MODEL, kinds=("link", "anchor"))
    assert "link of Softmax: polynomial_square(polynomial=(0.1, 0.3, 1.0))" in {move.text for move in found.legal}
    squares = Regime((canonical("regime(link='polynomial_square(polynomial=(0.1, -0.3, 1.0))')"),) * 2, 4e-3)
    reasons = {skipped.text: skipped.reason for skipped in moves(squares, MODEL, kinds=("anchor",)).skipped}
    assert "a negative power" in reasons["anchor: koopman"]


def test_moves_are_judged_by_the_declaration_not_by_a_list():
    """From cosine scores the links that need them are legal; count anchors take signed ones, and those that solve only
    what is positive definite.
    """
    cosine = Regime((canonical("regime(score='cosine', anchor='count')"),) * 2, 4e-3)
    targets = {move.target.operator for move in moves(cosine, MODEL, kinds=("link", "anchor")).legal}
    assert "sko" in targets
    assert "regime(score='cosine', link='yat', anchor='count')" in targets
    from_sko = {move.text for move in moves(Regime(("sko",) * 2, 4e-3), MODEL, kinds=("anchor",)).skipped}
    assert from_sko == {"anchor: row", "anchor: topk(k=8)", "anchor: koopman", "anchor: ridge(learn_ridge=True)"}


def test_powers_ranks_and_parameters_step_up_and_down_again():
    start = Regime(("ska",) * 2, 4e-3)
    for kind, expected in (
        ("power", {"ska(power=0)", "ska(power=2)"}),
        ("rank", {8, 32}),
        ("learning_rate", {8e-3, 2e-3}),
        ("head_dim", {8, 32}),
    ):
        found = moves(start, MODEL, kinds=(kind,)).legal
        reached = {
            {
                "power": m.target.operator,
                "rank": mechanisms.resolve(m.target.layers[0]).qk_dim,
                "learning_rate": m.target.learning_rate,
                "head_dim": m.target.head_dim,
            }[kind]
            for m in found
        }
        assert reached == expected
        for move in found:  # each has its way back
            assert start in {back.target for back in moves(move.target, MODEL, kinds=(kind,)).legal}, (kind, move.text)


def test_layers_change_places():
    mixed = Regime(("softmax", "mamba2"), 4e-3)
    model = replace(MODEL, dim=64)
    targets = {
        move.target.layers for move in moves(mixed, model, kinds=("placement",), palette=("softmax", "yat")).legal
    }
    assert targets == {
        ("mamba2", "softmax"),
        ("mamba2", "mamba2"),
        ("softmax", "softmax"),
        ("yat", "mamba2"),
        ("softmax", "yat"),
    }
    swaps = moves(mixed, model, kinds=("link",))
    assert swaps.legal
    assert all(move.target.layers[1] == "mamba2" for move in swaps.legal)
    assert any("mamba2 is a recurrence" in skipped.reason for skipped in swaps.skipped)
    assert [
        type(found)
        for found in proposals(Regime(("softmax",), 4e-3), replace(MODEL, layers=("softmax",)), kinds=("placement",))
    ] == [Skipped]


def test_sizes_that_do_not_fit_are_skipped_with_the_models_words():
    odd = moves(
        Regime(("softmax",), 4e-3, head_dim=2),
        ModelConfig(64, dim=32, layers=("softmax",), heads=2, rotary=True),
        kinds=("head_dim",),
    )
    assert any("rotary needs an even head size" in skipped.reason for skipped in odd.skipped)
    assert {move.target.head_dim for move in odd.legal} == {4}
    # heads of dim / heads again, in a search that began with others
    ranks = moves(START, replace(MODEL, head_dim=32), kinds=("rank",))
    assert [move.text for move in ranks.legal] == ["rank: 16 → 8", "rank: 16 → 32"]
    ranks = moves(START, replace(MODEL, qk_dim=8), kinds=("rank",))
    assert not ranks.legal
    assert all(
        "the model sets the size of queries and keys to 8 in all layers" in skipped.reason for skipped in ranks.skipped
    )


# --- the walk ---------------------------------------------------------------------------------------------------------


def test_a_search_ends_with_a_winner_and_all_that_led_to_it(whole):
    _, result, seen = whole
    assert (result.status, len(result.rounds)) == ("done", 2)
    last = a_search().training.steps
    finals = {regime: found[last] for regime, found in result.costs.items() if last in found}
    assert result.winner == min(finals, key=lambda regime: sum(finals[regime].values()))
    for number, each in enumerate(result.rounds):
        assert [steps for steps, _ in each.rungs] == [2, 4]
        assert len(each.rungs[0][1]) == 2
        (chosen,) = each.rungs[1][1]
        assert chosen == each.chosen == each.rungs[0][1][0]  # the better half of the first rung
        assert each.effort is not None
        differences = [result.costs[chosen][4][seed] - result.costs[each.current][4][seed] for seed in (0, 1)]
        assert each.effort.mean == pytest.approx(sum(differences) / 2)
        after = each.chosen if each.accepted else each.current
        assert number + 1 == len(result.rounds) or result.rounds[number + 1].current == after
    judged = [event for event in seen if isinstance(event, kinds.Judged)]
    assert [(event.regime, event.accepted) for event in judged] == [
        (each.chosen.label, each.accepted) for each in result.rounds if each.chosen
    ]
    rungs = [event for event in seen if isinstance(event, kinds.RungStarted)]
    assert [event.round for event in rungs] == [0, 0, 1, 1, 2, 2]
    assert all(a.share < b.share for a, b in itertools.pairwise(rungs))


def test_all_regimes_see_the_same_data_and_the_cost_is_that_of_their_runs(whole):
    folder, result, _ = whole
    for regime, rungs in result.outcomes.items():
        for steps, outcome in rungs.items():
            stored = json.loads((Search(folder, a_search()).folder(regime, steps) / "comparison.json").read_text())
            assert (stored["seeds"], stored["steps"], stored["learning_rates"]) == (
                [0, 1],
                steps,
                [regime.learning_rate],
            )
            finals = {run.seed: run.final for run in outcome.runs if run.final}
            assert outcome.costs == {seed: final["validation"]["loss"] for seed, final in finals.items()}
            assert outcome.reported == {seed: final["loss"] for seed, final in finals.items()}


def test_killed_and_gone_on_is_the_same_search(whole, tmp_path):
    folder = tmp_path / "killed"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)]),
        "OMP_NUM_THREADS": "1",
    }
    for updates in (3, 15):  # inside the start, and inside a round
        process = subprocess.Popen(
            [sys.executable, str(HERE / "search_and_be_killed.py"), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for _ in range(updates):
            assert process.stdout.readline(), "the search ended before it was killed"
        os.kill(process.pid, signal.SIGKILL)
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        assert not (folder / "findings.json").exists()
    seen = []
    result = Search.open(folder).run(on_event=seen.append)
    assert result.winner == whole[1].winner
    assert timeless(folder) == timeless(whole[0])
    assert any(isinstance(event, kinds.RunFinished) and event.skipped for event in seen)


def test_a_finished_search_trains_nothing(whole):
    folder = whole[0]
    before = {path: path.stat().st_mtime_ns for path in folder.glob("regimes/*/*/runs/*/*/*")}
    seen = []
    Search(folder, a_search()).run(on_event=seen.append)
    assert not [event for event in seen if isinstance(event, kinds.StepDone)]
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("regimes/*/*/runs/*/*/*")}


def test_a_packed_search_trains_nothing(whole, tmp_path):
    packed = packing.pack(whole[0], tmp_path / "it")
    seen = []
    result = Search.open(packed).run(on_event=seen.append)
    assert not [event for event in seen if isinstance(event, kinds.StepDone)]
    assert result.winner == whole[1].winner
    assert not (packed / "runs.tar.xz").exists()


def test_a_stop_is_a_stop_and_a_budget_an_end(whole, tmp_path):
    stopped = Search(tmp_path / "stopped", a_search()).run(should_stop=lambda: True, threads=1)
    assert (stopped.status, stopped.winner, stopped.rounds) == ("stopped", None, ())
    spent = Search(tmp_path / "spent", a_search(budget_seconds=1e-3)).run(threads=1)
    assert (spent.status, spent.winner) == ("done", a_search().start)
    assert "beyond the budget" in spent.reason
    assert [each.chosen for each in spent.rounds] == [None]


def test_a_regime_that_fails_is_told_and_never_chosen(tmp_path, monkeypatch):
    """Seeds of one regime come back as failed: it takes no part in the order, and its message is kept."""
    real = Search.outcome

    def outcome(self, regime, steps):
        found = real(self, regime, steps)
        if found is None or regime == self.spec.start:
            return found
        return replace(found, costs=None, message="the loss became NaN at step 2")

    monkeypatch.setattr(Search, "outcome", outcome)
    result = Search(tmp_path, a_search(rounds=1, rungs=1, seeds=(0,))).run(threads=1)
    assert result.winner == a_search().start
    assert result.rounds[0].chosen is None
    messages = [
        rung["message"]
        for regime in json.loads((tmp_path / "findings.json").read_text())["regimes"][1:]
        for rung in regime["rungs"]
    ]
    assert messages == ["the loss became NaN at step 2"] * 2


def test_rules():
    threshold = a_search(rule="threshold", threshold=0.1)
    assert [acceptance(threshold, effort) for effort in (-1.0, 0.1, 0.11)] == [1.0, 1.0, 0.0]
    metropolis = a_search(temperature=0.5)
    assert acceptance(metropolis, -3.0) == 1.0
    assert acceptance(metropolis, 0.5) == pytest.approx(0.36787944)


def test_costs_of_each_measure():
    run = RunResult(
        "softmax",
        "Softmax",
        0,
        1e-2,
        "done",
        steps_done=30,
        steps=40,
        final={"loss": 0.7, "accuracy": 0.25},
    )
    assert a_search().cost(run) == 0.7
    assert a_search(measure="metric").cost(run) == 0.75
    early = replace(a_search().training, stop_at_accuracy=0.2)  # what goes beyond says nothing
    assert a_search(measure="metric", training=early).cost(run) == 0.8
    steps = a_search(measure="steps", target=0.5)
    assert steps.cost(run) == 30
    training = steps.comparison(steps.start, 40).training  # runs end at the target, or with all their steps
    assert (training.stop_at_accuracy, training.thresholds) == (0.5, (0.5,))
    assert a_search().cost(replace(run, status="failed")) is None
    assert a_search().reported(run) is None


def test_a_validation_set_is_what_is_judged_by():
    final = {"loss": 0.7, "accuracy": 0.25, "validation": {"loss": 0.9, "accuracy": 0.125}}
    run = RunResult("softmax", "Softmax", 0, 1e-2, "done", steps_done=20, steps=40, final=final)
    loss, metric, steps = a_search(), a_search(measure="metric"), a_search(measure="steps", target=0.5)
    assert (loss.cost(run), loss.reported(run)) == (0.9, 0.7)
    assert (metric.cost(run), metric.reported(run)) == (0.875, 0.75)
    assert (steps.cost(run), steps.reported(run)) == (20, None)
    assert loss.reported(replace(run, status="failed")) is None


# --- the graph --------------------------------------------------------------------------------------------------------


def test_edges_join_single_moves_and_mixed_rungs_circulate():
    """Costs made by hand: with equal steps everywhere a potential gives all efforts; an edge on a short rung, where the
    order is another, does not.
    """
    scores = [
        START,
        *(Regime((canonical(f"regime(score='{name}')"),) * 2, 4e-3) for name in ("cosine", "negative_distance")),
    ]
    equal = {regime: {8: {0: cost, 1: cost + 0.25}} for regime, cost in zip(scores, (1.0, 0.5, 0.75), strict=True)}
    graph = move_graph(equal, MODEL, ("score",), ())
    assert {(edge.tail, edge.head) for edge in graph.edges} == {(0, 1), (0, 2), (1, 2)}
    assert graph.found is not None
    assert graph.found.verdict == "exact"
    assert graph.found.mean.potential.tolist() == pytest.approx([0.25, -0.25, 0.0])
    mixed = {regime: {**found, 4: {seed: 2.0 for seed in found[8]}} for regime, found in equal.items()}
    mixed[scores[2]] = {4: {0: 1.0, 1: 1.0}}
    found = move_graph(mixed, MODEL, ("score",), ()).found
    assert found is not None
    (cycle,) = found.cycles
    assert abs(cycle.total.mean) == pytest.approx(0.5)  # -0.5 - 1 + 1: learning curves that cross
    assert found.verdict == "beyond the spread"
    assert found.mean.curl.abs().tolist() == pytest.approx([0.5 / 3] * 3)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rungs": 4}, "rungs must be few enough that the first has a step: 4 steps allow 3"),
        ({"eta": 1}, "eta must be at least 2"),
        ({"width": 0}, "width must be at least 1"),
        ({"seeds": ()}, "seeds must be at least one"),
        ({"temperature": 0.0}, "temperature must be an effort above 0"),
        ({"kinds": ("links",)}, "unknown kind of move 'links'. Did you mean 'link'"),
        ({"palette": ("softmx",)}, "unknown operator 'softmx'"),
        ({"measure": "steps", "target": 1.5}, r"target must be an accuracy in \(0, 1\], got 1.5"),
        (
            {"training": replace(a_search().training, curriculum=(0.25, 0.5, 0.75))},
            "SearchSpec: a curriculum opens the gates of distances, and no operator here has any",
        ),
        ({"budget_seconds": -1.0}, "budget_seconds must be positive"),
        (
            {"model": ModelConfig(32, dim=16, layers=("rewa(parts=(3, 3, 3))",), heads=2, qk_dim=8)},
            "the start is no model|must be",
        ),
    ],
)
def test_spec_refuses(changes, message):
    with pytest.raises(ArgumentError, match=message):
        a_search(**changes)


def test_a_curriculum_concerns_the_regimes_with_gates_alone(tmp_path):
    """It ended the search at the first operator without gates."""
    start = "rewa(gates=(0.5, 1.0, 0.5), parts=(3, 2, 3))"
    training = replace(a_search().training, steps=2, curriculum=(0.25, 0.5, 0.75))
    model = replace(a_search().model, layers=(start,))
    spec = a_search(model=model, training=training, kinds=("score",), seeds=(0,), rounds=1, rungs=1)
    result = Search(tmp_path, spec).run(threads=1)
    found = {regime: spec.comparison(regime, 2).training.curriculum for regime in result.outcomes}
    assert found.pop(spec.start) == training.curriculum
    assert len(found) == 2
    assert set(found.values()) == {None}
    assert all(outcome.costs for rungs in result.outcomes.values() for outcome in rungs.values())


def test_another_search_in_the_folder(whole, tmp_path):
    with pytest.raises(ArgumentError, match=r"holds another search: width is 2 there and 3 here"):
        Search(whole[0], a_search(width=3))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match="is not empty and holds no search"):
        Search(tmp_path, a_search())
    with pytest.raises(FileFormatError, match="holds no search"):
        Search.open(tmp_path)


def test_workers_without_ray_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ArgumentError,
        match=r"Ray is not installed. Install it with pip install 'zonal\[ray\]'",
    ):
        Search(tmp_path, a_search()).run(workers=2)
    with pytest.raises(ArgumentError, match="workers must be at least 1"):
        Search(tmp_path, a_search()).run(workers=0)
    assert not list(tmp_path.iterdir())
