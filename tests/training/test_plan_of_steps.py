"""What is measured before a comparison is planned."""

import time
from dataclasses import replace

import pytest
from training.test_comparisons import a_spec

from zonal.training import plan


def test_what_a_process_does_once_is_not_charged_to_every_run(monkeypatch):
    """The first model of a process takes seconds, of which later ones take none."""
    build, built = plan.language_model, []

    def slow_at_first(*arguments):
        time.sleep(0.0 if built else 2.0)
        built.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(plan, "language_model", slow_at_first)
    assert plan.measure(a_spec(), "softmax", 1, lambda: False).overhead < 2.0


@pytest.mark.parametrize("evaluation", [1.0, 10.0, 30.0])
@pytest.mark.parametrize("budget", [120.0, 300.0, 1000.0, 3000.0])
def test_the_steps_are_the_most_that_fit(evaluation, budget):
    """With ten evaluations a run, 21 steps have seven, and 20 have ten. The validation set is one more."""
    training = replace(a_spec().training, steps=1000, eval_every=None)
    spec = a_spec(operators=("softmax",), seeds=(0,), training=training, budget_seconds=budget)
    times = {"softmax": plan.Timing(1.0, evaluation, 0.0)}
    fitting = [n for n in range(10, 1001) if n + evaluation * (plan.evaluations(training, n) + 1) <= 0.9 * budget]
    if fitting:
        assert plan.decide_steps(spec, times, 0.0, 1).steps == max(fitting)
    else:
        with pytest.raises(plan.SmallBudgetError):
            plan.decide_steps(spec, times, 0.0, 1)


def test_more_jobs_than_runs_do_not_stretch_a_budget():
    """Two runs on eight places take as long as one; three on two places as long as two."""
    spec = a_spec(seeds=(0,))
    times = {name: plan.Timing(1.0, 0.0, 0.0) for name in ("softmax", "sko")}
    assert plan.estimate(spec, times, 100, 8) == 100 * plan.CROWDING + plan.WORKER_SECONDS
    three = a_spec(operators=("softmax",), seeds=(0, 1, 2))
    assert plan.estimate(three, {"softmax": times["softmax"]}, 100, 2) == 200 * plan.CROWDING + plan.WORKER_SECONDS
