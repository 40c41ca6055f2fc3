"""A comparison takes more operators, seeds and learning rates, and keeps what it has."""

import json
from dataclasses import replace

import pytest
from training.test_comparisons import a_spec

from zonal.errors import ArgumentError
from zonal.report import load, packing, summarise
from zonal.training import Comparison
from zonal.training import events as kinds

FIRST = {"operators": ("softmax",), "seeds": (1,), "title": "First", "command": "first"}
MORE = {"operators": ("linear", "softmax"), "seeds": (0, 1), "learning_rates": (0.02, 0.01), "command": "more"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "it"
    return folder, Comparison(folder, a_spec(**FIRST)).run()


def copied(begun, place):
    return packing.pack(begun[0], place / "it")  # a packed folder is unpacked and goes on as any other


def stored(folder):
    return json.loads((folder / "comparison.json").read_text())


def test_a_comparison_grows_to_what_it_would_have_been(begun, tmp_path):
    folder = copied(begun, tmp_path)
    before, seen = stored(folder), []
    result = Comparison(folder, a_spec(**MORE, title="Second")).run(on_event=seen.append)
    whole = Comparison(tmp_path / "whole", a_spec(**MORE)).run()
    assert (result.status, len(result.runs), result.best_learning_rates) == ("done", 8, whole.best_learning_rates)
    numbers = [(run.operator, run.seed, run.learning_rate, run.final) for run in result.runs]
    assert numbers == [(run.operator, run.seed, run.learning_rate, run.final) for run in whole.runs]
    # only the new operator was timed, and the run that was there is as it was
    assert [event.operator for event in seen if isinstance(event, kinds.Measuring)] == ["linear"]
    (kept,) = (run for run in result.runs if (run.operator, run.seed, run.learning_rate) == ("softmax", 1, 0.01))
    assert (kept,) == begun[1].runs
    after = stored(folder)
    assert (after["title"], after["command"], after["seeds"]) == ("First", "more", [0, 1])
    assert after["plan"]["timings"]["softmax"] == before["plan"]["timings"]["softmax"]
    assert {**after, **before} == {**after, **before, "device": after["device"]}
    rows = summarise(load(folder)).rows
    assert {row.operator: len(row.runs) for row in rows} == {"softmax": 2, "linear": 2}


def test_a_stop_before_the_new_operator_is_timed_changes_nothing(begun, tmp_path):
    folder = copied(begun, tmp_path)
    before = stored(folder)
    assert Comparison(folder, a_spec(**MORE)).run(should_stop=lambda: True).status == "stopped"
    assert stored(folder) == before
    assert Comparison.open(folder).run().runs == begun[1].runs


def test_the_number_of_steps_stays(tmp_path):
    few = a_spec(**FIRST, budget_seconds=600.0)
    Comparison(tmp_path, few).run()
    more = Comparison(tmp_path, replace(few, seeds=(1, 2, 3, 4)))
    assert {run.steps_done for run in more.run().runs} == {stored(tmp_path)["steps"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": (0, 2)},
        {"seeds": (0, 1), "learning_rates": (0.02,)},
        {"operators": ("linear",)},
        {"seeds": (0, 1), "learning_rates": (0.01, 0.02), "screening_seeds": 1},  # seed 1 might lose its rate
        {"seeds": (0, 1), "shapes": {"softmax": replace(a_spec().model, dim=32)}},
        {"seeds": (0, 1), "training": replace(a_spec().training, batch_size=4)},
    ],
)
def test_what_would_lose_a_run_is_refused(begun, changes):
    with pytest.raises(ArgumentError, match=r"holds another comparison: .* Operators, seeds and learning rates may be"):
        Comparison(begun[0], a_spec(**{**FIRST, **changes}))


def test_seeds_that_took_the_best_rate_may_try_all(tmp_path):
    some = a_spec(operators=("softmax",), learning_rates=(0.01, 0.02), screening_seeds=1)
    assert len(Comparison(tmp_path, some).run().runs) == 3
    assert len(Comparison(tmp_path, replace(some, screening_seeds=None)).run().runs) == 4
    assert Comparison.open(tmp_path).spec.screening_seeds is None
