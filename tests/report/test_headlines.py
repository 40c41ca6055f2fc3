"""Headlines say no more than the records carry: seeds that are missing, runs that stopped, rates that were not run."""

import shutil

import pytest
from report.comparison_folder import SLUGS, compared, edited, summary_of, write_comparison

from zonal import report
from zonal.errors import FileFormatError
from zonal.report import charts
from zonal.report.records import Point


def steps_of(folder, spec, steps):
    for path in folder.glob(f"runs/{SLUGS[spec]}/*/run.json"):
        with edited(path) as record:
            record["steps_done"] = steps


def test_a_copy_of_a_run_is_no_seed(tmp_path):
    made = write_comparison(tmp_path / "x", operators=("softmax", "sko"))
    run = next(made.glob(f"runs/{SLUGS['sko']}/seed-1*"))
    shutil.copytree(run, run.with_name(run.name + ".bak"))
    words = rf"{run.name} and .*{run.name}\.bak both hold seed 1 of 'sko' at the learning rate"
    with pytest.raises(FileFormatError, match=words):
        report.load(made)


@pytest.mark.parametrize(
    ("sko", "words"),
    [
        ((0.90, 0.911, 0.0), "With fewer seeds: SKO 0.905 (2 seeds)."),
        ((0.90, 0.99, 0.0), "With fewer seeds: SKO 0.945 (2 seeds)."),
        ((0.95, 0.0, 0.0), "With fewer seeds: SKO 0.950 (1 seed)."),
    ],
)
def test_who_is_better_with_fewer_seeds_is_in_the_headline(tmp_path, sko, words):
    missing = [("sko", seed) for seed, value in enumerate(sko) if not value]
    summary = compared(tmp_path, {"softmax": (0.80, 0.81, 0.82), "sko": sko}, missing=missing)
    assert summary.headline == (
        f"No clear winner: Softmax has the best mean accuracy of the operators with 3 seeds, 0.810. {words}"
    )
    assert "ahead of Softmax in accuracy" in summary.sentences[0]


def test_one_who_lacks_seeds_is_not_beyond_the_spread(tmp_path):
    values = {"softmax": (0.90, 0.901, 0.902), "sko": (0.80, 0.81, 0.82), "linear": (0.70, 0.0, 0.0)}
    summary = compared(tmp_path, values, missing=[("linear", 1), ("linear", 2)])
    assert summary.headline == (
        "Softmax is ahead in accuracy: 0.901 against 0.810 for SKO. The difference, 0.091, is larger than the spread "
        "over seeds. Linear has too few seeds to be told apart from it."
    )


def test_runs_that_stopped_alike_are_told_apart_by_steps(tmp_path):
    values = {"softmax": (0.9951, 0.9953, 0.9952), "sko": (0.9990, 0.9992, 0.9991), "linear": (0.99, 0.99, 0.99)}
    compared(tmp_path, values, changes={"training": {"stop_at_accuracy": 0.995}})
    for spec, steps in (("softmax", 10), ("sko", 20)):
        steps_of(tmp_path, spec, steps)
    summary = summary_of(tmp_path)
    assert summary.ranking == ("softmax", "sko", "linear")
    assert summary.headline == (
        "No clear winner: Softmax and SKO both reach accuracy 0.995, at which a run stops. How many steps they took "
        "tells them apart."
    )
    assert "Linear is 0.005" in summary.sentences[0]
    assert [row.label for row in summary.rows if "accuracy" in row.best] == ["Softmax", "SKO"]
    assert not any("SKO is" in sentence for sentence in summary.sentences)


def test_what_was_reached_on_the_validation_set_is_reached(tmp_path):
    """Runs stop by it; the evaluation set may then have a little less."""
    stop = {"training": {"stop_at_accuracy": 0.9}}
    assert (
        "is ahead" in compared(tmp_path, {"softmax": (0.901,) * 3, "sko": (0.894, 0.895, 0.896)}, changes=stop).headline
    )
    for path in tmp_path.glob(f"runs/{SLUGS['sko']}/*/run.json"):
        with edited(path) as record:
            record["final"]["validation"] = {"loss": 0.4, "accuracy": 0.902}
            record["steps_done"] = 10
    summary = summary_of(tmp_path)
    assert summary.headline.startswith(
        "No clear winner: SKO and Softmax both reach accuracy 0.9, at which a run stops."
    )


def test_an_operator_with_failed_runs_does_not_reach_the_accuracy_beside_a_whole_one(tmp_path):
    values = {"softmax": (0.95, 0.95, 0.95), "sko": (0.95, 0.0, 0.0), "linear": (0.3, 0.3, 0.3)}
    stop = {"training": {"stop_at_accuracy": 0.9}}
    summary = compared(tmp_path, values, missing=[("sko", 1), ("sko", 2)], changes=stop)
    assert summary.headline == (
        "No clear winner: Softmax has the best mean accuracy of the operators with 3 seeds, 0.900. With fewer seeds: "
        "SKO 0.900 (1 seed)."
    )


@pytest.mark.parametrize(
    ("values", "headline", "first"),
    [
        (
            {"softmax": (0.0, 0.0), "sko": (0.0, 0.0)},
            "Softmax and SKO have the same mean accuracy, 0.000, with 2 seeds.",
            "tied",
        ),
        (
            {"softmax": (0.8, 0.7, 0.6), "sko": (0.6, 0.8, 0.7), "linear": (0.7, 0.6, 0.8), "ska(power=0)": (0, 0, 0)},
            "Softmax, SKO and Linear have the same mean accuracy, 0.700, with 3 seeds.",
            "tied",
        ),
        (
            {"softmax": (0.5,), "sko": (0.5,), "linear": (0.5,)},
            "Softmax, SKO and Linear have the same accuracy, 0.500, with one seed.",
            "tied",
        ),
        (
            {"softmax": (0.9,), "sko": (0.5,), "linear": (0.5,)},
            "Softmax has the best accuracy: 0.900 against 0.500 for SKO. One seed cannot show whether that is more "
            "than chance.",
            "leads",
        ),
    ],
)
def test_nobody_leads_where_several_are_equal(tmp_path, values, headline, first):
    summary = compared(tmp_path, values)
    assert summary.headline == headline
    results = report.results(summary)
    assert results.rows[0][1][results.head.index("Behind the best")].text == first


def test_operators_without_a_seed_in_common(tmp_path):
    summary = compared(tmp_path, {"softmax": (0.9, 0.0), "sko": (0.0, 0.8)}, missing=[("softmax", 1), ("sko", 0)])
    assert summary.headline == (
        "Softmax has the best accuracy: 0.900 against 0.800 for SKO. Without a seed in common they cannot show whether "
        "that is more than chance."
    )


def test_one_run_each_does_not_show_who_trains_fastest(tmp_path):
    sentences = compared(tmp_path, {"softmax": (0.9,), "linear": (0.8,)}).sentences
    assert (
        "Linear was the fastest in one run each: 66k tokens a second, 1.3× the speed of softmax. More seeds show "
        "whether it is faster."
    ) in sentences


def test_beyond_the_stop_the_sooner_rate_is_shown(tmp_path):
    summary = compared(
        tmp_path, {"softmax": (0.999,)}, rates=(0.001, 0.003), changes={"training": {"stop_at_accuracy": 0.9}}
    )
    (row,) = summary.rows
    assert row.learning_rate == 0.001
    (path,) = tmp_path.glob("runs/softmax/*-0.003/run.json")
    with edited(path) as record:
        record["steps_done"] = 10
    assert summary_of(tmp_path).rows[0].learning_rate == 0.003


def test_a_run_that_is_missing_counts_against_its_rate(tmp_path):
    """Whether it is there without an end, or was left out when the folder was packed."""
    compared(tmp_path, {"softmax": (0.9, 0.9)}, rates=(0.001, 0.003))
    (path,) = tmp_path.glob("runs/softmax/seed-1-lr-0.001/run.json")
    with edited(path) as record:
        record |= {"status": "stopped", "final": None}
    assert summary_of(tmp_path).rows[0].learning_rate == 0.003
    path.unlink()
    assert summary_of(tmp_path).rows[0].learning_rate == 0.003


def test_who_failed_at_every_rate_has_no_more_runs(tmp_path):
    compared(
        tmp_path,
        {"softmax": (0.9, 0.9), "sko": (0.9, 0.9)},
        rates=(0.001, 0.003),
        missing=[("sko", 0)],
        changes={"screening_seeds": 1},
    )
    for path in (*tmp_path.glob("runs/sko/seed-1-*/run.json"), *tmp_path.glob("runs/softmax/seed-1-lr-0.003/run.json")):
        path.unlink()
        (path.parent / "metrics.jsonl").unlink()
    assert summary_of(tmp_path).sentences[-1].startswith("2 of 5 runs failed")


@pytest.mark.parametrize(("ends", "every"), [((2000, 1400, 1100), 1), ((2000, 1370, 1111), 7), ((450, 620, 980), 10)])
def test_training_curves_of_seeds_that_ended_at_other_steps(ends, every):
    """They share their bins, up to the end of the shortest; a loss that falls along a line stays on it."""
    curves = [
        (seed, [Point(step, step, step, 3000 - step + seed) for step in range(every, end + 1, every)])
        for seed, end in enumerate(ends)
    ]
    binned = charts.training_curves(curves)
    steps = [[point.step for point in points] for _, points in binned]
    shared = set.intersection(*map(set, steps))
    assert len(shared) == min(map(len, steps)) >= min(100, min(len(points) for _, points in curves))
    assert max(map(len, steps)) <= charts.MAX_POINTS
    width = max(steps[0]) / len(steps[0])
    assert all(abs(point.loss - seed - (3000 - point.step)) <= width for seed, points in binned for point in points)


def test_a_short_training_curve_is_drawn_as_it_is():
    points = [Point(step, step, step, 1 / step) for step in range(5, 400, 5)]
    assert [[(p.step, p.loss) for p in points]] == [
        [(p.step, p.loss) for p in drawn] for _, drawn in charts.training_curves([(0, points)])
    ]
    assert charts.training_curves([(0, [])]) == []
