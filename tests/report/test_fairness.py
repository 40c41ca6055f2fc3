"""What makes a comparison less than fair stands beside its headline; who has not learned the task is not ranked."""

import json
import shutil

import pytest
from report.comparison_folder import SLUGS, edited, summary_of, write_comparison

from zonal import report

FAIR = ("softmax", "sko")


def sentence(folder, kind):
    """The one flag of a kind."""
    (found,) = [flag for flag in summary_of(folder).flags if flag.kind == kind]
    return found.sentence


def edit(folder, name, **changes):
    """Change records of runs: those whose folder's name holds ``name``."""
    found = [path for path in folder.glob("runs/*/*/run.json") if name in str(path)]
    assert found
    for path in found:
        with edited(path) as record:
            record |= changes


@pytest.fixture
def fair(tmp_path):
    """Two operators of one size, three seeds, three rates of which the middle one is best."""
    folder = write_comparison(tmp_path / "fair", operators=FAIR, rates=(0.001, 0.003, 0.01))
    for operator in FAIR:
        for path in folder.glob(f"runs/{SLUGS[operator]}/*/run.json"):
            with edited(path) as record:
                record["parameters"] = 181_248
                record["final"]["accuracy"] = {0.001: 0.9, 0.003: 0.95, 0.01: 0.85}[
                    record["learning_rate"]
                ] - 0.01 * FAIR.index(operator)
    return folder


def test_a_fair_comparison_has_no_flags(fair):
    assert summary_of(fair).flags == ()


def test_who_is_below_a_guess_is_not_ranked(tmp_path):
    folder = write_comparison(
        tmp_path, operators=("softmax", "squared_affine", "linear"), changes={"guess": {"value": 0.32, "trained": None}}
    )
    summary = summary_of(folder)
    assert summary.ranking == ("softmax", "squared_affine")
    assert summary.unlearned == ("linear",)
    assert "Linear" not in summary.headline
    assert sentence(folder, "not learned").startswith(
        "Linear is not trained far enough to compare: no better than a guess (accuracy 0.320)"
    )
    paths = report.write(folder)
    assert "Linear is not trained far enough" in paths.html.read_text()
    assert "- Linear is not trained far enough" in paths.markdown.read_text()
    (stored,) = json.loads(paths.summary.read_text())["comparisons"]
    assert stored["guess"] == 0.32
    assert "not learned" in [flag["kind"] for flag in stored["flags"]]
    assert [(row["operator"], row["rank"], row["learned"]) for row in stored["operators"]] == [
        ("softmax", 1, True),
        ("squared_affine", 2, True),
        ("linear", None, False),
    ]
    assert report.results(summary).rows[-1][1][0].text == "Linear"
    assert "not trained far enough to compare" in [cell.note for cell in report.results(summary).rows[-1][1]]


def test_when_nobody_learned_nobody_leads(tmp_path):
    folder = write_comparison(
        tmp_path, operators=("squared_affine", "linear"), changes={"guess": {"value": 0.7, "trained": None}}
    )
    summary = summary_of(folder)
    assert summary.ranking == ()
    assert summary.headline.startswith(
        "No operator is trained far enough to compare: Squared affine reaches accuracy 0.6"
    )
    report.write(folder)


def test_one_that_learned_is_alone(tmp_path):
    folder = write_comparison(
        tmp_path, operators=("softmax", "linear"), changes={"guess": {"value": 0.5, "trained": None}}
    )
    assert summary_of(folder).headline.endswith("; the other is not trained far enough to compare.")


def test_a_guess_that_is_always_right_says_nothing(tmp_path):
    """With one pair, naming the value that stands there is the task."""
    folder = write_comparison(
        tmp_path, operators=("softmax", "linear"), changes={"guess": {"value": 1.0, "trained": None}}
    )
    summary = summary_of(folder)
    assert set(summary.ranking) == {"softmax", "linear"}
    assert not summary.unlearned
    assert "not learned" not in {flag.kind for flag in summary.flags}


def test_a_loss_above_a_guess_is_not_learned(tmp_path):
    folder = write_comparison(
        tmp_path, name="text", operators=("softmax", "linear"), changes={"guess": {"value": 1.65, "trained": None}}
    )
    summary = summary_of(folder)
    assert summary.row("softmax").loss.mean < 1.65 < summary.row("linear").loss.mean
    assert summary.ranking == ("softmax",)
    assert "no better than a guess (validation loss 1.650)" in sentence(folder, "not learned")


@pytest.mark.parametrize("where", ["slices", "examined"])
def test_what_was_trained_decides_where_more_is_tested(tmp_path, where):
    """High on the whole evaluation and low on its trained part is not learned."""
    folder = write_comparison(
        tmp_path, operators=("softmax", "sko"), changes={"guess": {"value": 0.25, "trained": ["group", ["trained"]]}}
    )
    for path in folder.glob("runs/*/*/run.json"):
        with edited(path) as record:
            value = 0.9 if record["operator"] == "softmax" else 0.25
            if where == "slices":
                record["final"]["slices"]["group"] = {"trained": value, "held out": 0.99}
            else:
                record["final"]["examined"] = [
                    {"slices": {"group": "trained"}, "values": {"accuracy": value}},
                    {"slices": {"group": "held out"}, "values": {"accuracy": 0.99}},
                ]
    assert summary_of(folder).unlearned == ("sko",)


@pytest.mark.parametrize(("answers", "learned"), [(100, False), (10_000, True)])
def test_better_than_a_guess_by_chance_is_not_learned(tmp_path, answers, learned):
    """Accuracies of 0.53 are within two standard errors of a half over a hundred answers, not over ten thousand."""
    folder = write_comparison(tmp_path, operators=("softmax",), changes={"guess": {"value": 0.5, "trained": None}})
    for path in folder.glob("runs/*/*/run.json"):
        with edited(path) as record:
            record["final"] |= {"accuracy": 0.53, "positions": answers}
    assert summary_of(folder).row("softmax").learned is learned
    if not learned:
        assert "no better than a guess (accuracy 0.500 ± 0.100 by chance)" in sentence(folder, "not learned")


def test_a_mean_of_seeds_that_learned_and_seeds_that_did_not(fair):
    with edited(fair / "comparison.json") as record:
        record["guess"] = {"value": 0.25, "trained": None}
    with edited(fair / "runs/sko/seed-1-lr-0.003/run.json") as run:
        run["final"]["accuracy"] = 0.2
    for rate in ("0.001", "0.01"):  # so that 0.003 stays the best of three
        for seed in range(3):
            with edited(fair / f"runs/sko/seed-{seed}-lr-{rate}/run.json") as other:
                other["final"]["accuracy"] = 0.3
    assert sentence(fair, "some seeds not learned").startswith("1 of 3 seeds of SKO is no better than a guess")


def test_a_best_rate_at_the_edge(fair):
    for seed in range(3):
        with edited(fair / f"runs/softmax/seed-{seed}-lr-0.01/run.json") as record:
            record["final"]["accuracy"] = 0.99
    assert sentence(fair, "edge") == (
        "Best learning rates lie at the edge of the 3 that were tried: the highest (0.01) for Softmax. A rate "
        "beyond the edge may do better."
    )


def test_rates_that_are_equal_have_no_edge(fair):
    edit(fair, "runs/softmax/", final={"loss": 0.1, "accuracy": 1.0})
    assert summary_of(fair).row("softmax").learning_rate == 0.001
    assert summary_of(fair).flags == ()
    # the sooner of two that reached the accuracy at which runs stop is better than the other
    with edited(fair / "comparison.json") as record:
        record["training"]["stop_at_accuracy"] = 0.9
    edit(fair, "-lr-0.001", steps_done=120)
    assert "the lowest (0.001) for Softmax" in sentence(fair, "edge")


@pytest.mark.parametrize(("parameters", "flagged"), [(183_000, False), (183_100, True)])
def test_parameters_beyond_one_per_cent(fair, parameters, flagged):
    edit(fair, "runs/sko/", parameters=parameters)
    kinds = [flag.kind for flag in summary_of(fair).flags]
    assert kinds == (["parameters"] if flagged else [])
    if flagged:
        assert sentence(fair, "parameters") == "Parameters differ by 1.0%: from 181,248 (Softmax) to 183,100 (SKO)."


def test_unequal_steps(fair):
    with edited(fair / "comparison.json") as record:
        record["training"]["stop_at_accuracy"] = 0.9
    edit(fair, "runs/sko/seed-2-lr-0.003", steps_done=120)
    assert sentence(fair, "steps").startswith(
        "Runs were not trained equally long: from 120 steps (SKO, seed 2) to 300 (Softmax, seed 0); each run "
        "stops at accuracy 0.9"
    )


def test_runs_that_diverged(fair):
    edit(
        fair,
        "runs/sko/seed-0-lr-0.01",
        status="failed",
        final=None,
        message="train: the loss became nan in step 7 of 300: layer 1. Lower the rate.",
    )
    assert sentence(fair, "failed") == (
        "1 of 18 runs was dropped because the loss or its gradient was no longer finite: SKO at rate 0.01, 1 of 3 "
        "seeds."
    )
    shutil.copytree(fair, fair.with_name("screened"))
    for seed in (1, 2):
        shutil.rmtree(fair.with_name("screened") / f"runs/sko/seed-{seed}-lr-0.01")
    assert sentence(fair.with_name("screened"), "failed").endswith("SKO at rate 0.01, 1 of 1 seed.")
    edit(fair, "runs/sko/seed-1-lr-0.01", status="failed", final=None, message="train: out of memory.")
    assert sentence(fair, "failed") == (
        "2 of 18 runs were dropped, 1 of them because the loss or its gradient was no longer finite: SKO at rate "
        "0.01, 2 of 3 seeds."
    )


def test_one_seed_and_one_rate(tmp_path):
    folder = write_comparison(tmp_path, operators=FAIR, seeds=(0,), rates=(0.003,))
    kinds = [flag.kind for flag in summary_of(folder).flags]
    assert kinds == ["one rate", "one seed"]


def test_the_commit_stands_on_the_page(tmp_path):
    folder = write_comparison(tmp_path, operators=FAIR, changes={"commit": "0123abc-dirty"})
    paths = report.write(folder)
    assert "| commit | 0123abc-dirty |" in paths.markdown.read_text()
    assert "0123abc-dirty" in paths.html.read_text()
    assert json.loads(paths.summary.read_text())["comparisons"][0]["commit"] == "0123abc-dirty"
