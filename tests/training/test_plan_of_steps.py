"""What is measured before a comparison is planned."""

import time

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
