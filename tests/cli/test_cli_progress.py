"""The display: what it adds up from events, the estimate of the time left, and lines where no terminal is."""

import io
import itertools

import pytest
from rich.console import Console

from zonal.cli.progress import EVALUATIONS, Board, LiveDisplay, PlainDisplay, held_out
from zonal.training import events

LABELS = {"softmax": "Softmax", "sko": "SKO"}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def planned(**changes):
    values = {
        "runs": 4, "remaining": 4, "steps": 100, "step_seconds": {"softmax": 0.1, "sko": 0.3},
        "evaluation_seconds": {"softmax": 0.0, "sko": 0.0}, "estimated_seconds": 80.0,
    }  # fmt: skip
    return events.Planned(**{**values, **changes})


def started(run, operator, step=0):
    return events.RunStarted(run, operator, LABELS[operator], 0, 0.003, step, 100)


def step(run, number):
    return events.StepDone(run, number, 100, 2.0, 0.003, 1.0, number * 1000, number * 0.1)


def evaluated(run, number, accuracy):
    return events.Evaluated(
        run, number, 100, {"loss": 1.0, "accuracy": accuracy, "slices": {"pairs": {"4": accuracy}}}, 1.0
    )


def ended(run, operator, accuracy, *, status="done", skipped=False, message=None):
    final = {"loss": 0.5, "accuracy": accuracy, "slices": {}} if status == "done" else None
    return events.RunFinished(run, operator, LABELS[operator], 0, 0.003, status, message, 100, final, skipped)


def test_work_is_weighed_by_measured_time():
    board = Board("accuracy", LABELS, Clock())
    for event in (planned(), started("a", "softmax"), step("a", 50)):
        board.add(event)
    # softmax takes 10 of the 80 seconds of all four runs, and is half done
    assert board.fraction() == pytest.approx(5 / 80)
    for event in (ended("a", "softmax", 0.9), started("b", "sko"), step("b", 50)):
        board.add(event)
    assert board.fraction() == pytest.approx(25 / 80)


def test_evaluations_weigh_too():
    board = Board("accuracy", LABELS, Clock())
    for event in (planned(evaluation_seconds={"softmax": 1.0, "sko": 0.0}), ended("a", "softmax", 0.9)):
        board.add(event)
    assert board.fraction() == pytest.approx((10 + EVALUATIONS) / (80 + 2 * EVALUATIONS))


def test_estimate_follows_the_pace():
    clock = Clock()
    board = Board("accuracy", LABELS, clock)
    board.add(planned())
    assert board.seconds_left() == 80.0
    clock.now = 1.0
    assert board.seconds_left() == 79.0
    board.add(started("a", "softmax"))
    clock.now = 20.0
    board.add(step("a", 100))
    # 10 of 80 measured seconds took 20: half the speed, 140 left
    assert board.seconds_left() == pytest.approx(140.0)


def test_a_plan_whose_time_is_up_says_nothing_of_what_is_left():
    clock = Clock()
    board = Board("accuracy", LABELS, clock)
    for event in (planned(), started("a", "softmax"), step("a", 1)):
        board.add(event)
    clock.now = 80.0
    assert board.seconds_left() is None


def test_estimate_after_a_resume_counts_only_this_sitting():
    clock = Clock()
    board = Board("accuracy", LABELS, clock)
    for event in (
        planned(remaining=3, estimated_seconds=70.0),
        ended("a", "softmax", 0.9, skipped=True),
        started("b", "sko", step=50),
    ):
        board.add(event)
    assert board.seconds_left() == 70.0
    clock.now = 15.0
    board.add(step("b", 100))
    assert board.fraction() == pytest.approx(40 / 80)
    assert board.seconds_left() == pytest.approx(40.0)


def test_one_run_without_a_plan():
    clock = Clock()
    board = Board("loss", {"softmax": "Softmax"}, clock)
    board.add(started("a", "softmax"))
    clock.now = 10.0
    board.add(step("a", 25))
    assert board.fraction() == 0.25
    assert board.seconds_left() == pytest.approx(30.0)


def test_a_failed_run_counts_as_ended():
    board = Board("accuracy", LABELS, Clock())
    for event in (
        planned(),
        started("a", "softmax"),
        step("a", 10),
        ended("a", "softmax", 0.0, status="failed", message="NaN"),
    ):
        board.add(event)
    assert board.ended() == 1
    assert board.current == []
    assert board.results("softmax") == []
    assert board.fraction() == pytest.approx(10 / 80)


def shown(board):
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(LiveDisplay(board, console, "A heading").render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_live_display_shows_names_in_brackets(monkeypatch):
    monkeypatch.setitem(LABELS, "softmax", "[mamba2*3, softmax]")
    board = Board("accuracy", LABELS, Clock())
    for event in (planned(), started("a", "softmax"), step("a", 40)):
        board.add(event)
    assert "[mamba2*3, softmax], seed 0" in shown(board)


def test_live_display_shows_bars_and_table():
    board = Board("accuracy", LABELS, Clock())
    assert "Preparing" in shown(board)
    board.add(events.Measuring("sko", 1, 2))
    assert "Measuring the speed of SKO (2 of 2)" in shown(board)
    for event in (
        planned(),
        started("a", "softmax"),
        ended("a", "softmax", 0.91),
        started("b", "sko"),
        step("b", 40),
        evaluated("b", 40, 0.25),
    ):
        board.add(event)
    text = shown(board)
    for words in (
        "A heading",
        "1 of 4 runs done",
        "left",
        "SKO, seed 0",
        "step 40 of 100",
        "loss 2.000",
        "accuracy 0.250",
        "Ctrl-C",
    ):
        assert words in text
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("●")}
    assert "0.910" in rows["Softmax"]
    assert "1 of 2" in rows["Softmax"]
    assert "0.250" in rows["SKO"]
    assert "0 of 2" in rows["SKO"]


def test_plain_display_is_one_line_an_event(capsys):
    clock = Clock()
    display = PlainDisplay(Board("accuracy", LABELS, clock), "A heading")
    with display:
        for event in (
            events.Measuring("softmax", 0, 2), planned(), started("a", "softmax"), step("a", 10),
            evaluated("a", 50, 0.5),
            events.Checkpointed("a", 50, "x"), ended("a", "softmax", 0.9),
            ended("b", "sko", 0.1, status="failed", message="loss became NaN"),
            ended("c", "sko", 0.8, skipped=True),
        ):  # fmt: skip
            display(event)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "A heading",
        "Measuring the speed of Softmax (1 of 2) …",
        "4 of 4 runs to do, 100 steps each, about 1 min 20 s.",
        "Softmax, seed 0, learning rate 0.003: begins.",
        # tokens of step 10 alone: 1.2 % of the work is too little to judge the pace
        "Softmax, seed 0: step 50 of 100, held-out accuracy 0.500, loss 1.000; 1 % of all, about 1 min 20 s left.",
        "Softmax, seed 0: done after 100 steps, accuracy 0.900, loss 0.500.",
        "SKO, seed 0: failed after 100 steps: loss became NaN",
        "SKO, seed 0: done before after 100 steps, accuracy 0.800, loss 0.500.",
    ]
    assert "\x1b" not in "".join(lines)


def test_plain_display_reports_steps_now_and_then(capsys):
    clock = Clock()
    display = PlainDisplay(Board("loss", {"softmax": "Softmax"}, clock), "A heading")
    display(started("a", "softmax"))
    for number in itertools.count(1):
        clock.now += 1.0
        display(step("a", number))
        if number == 50:
            break
    lines = [line for line in capsys.readouterr().out.splitlines() if ": step" in line]
    assert len(lines) == 2
    assert lines[0] == "Softmax, seed 0: step 21 of 100, loss 2.000; 21 % of all, about 1 min 19 s left."


def test_words_for_numbers():
    assert held_out({"loss": 1.0, "accuracy": 0.5, "positions": 7.0}, "loss") == "loss 1.000, accuracy 0.500"
