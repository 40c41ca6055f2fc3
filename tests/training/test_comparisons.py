import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training.training_doubles import lines

from zonal import tasks
from zonal.errors import ArgumentError, FileFormatError, InsufficientSpaceError
from zonal.models import ModelConfig, build
from zonal.report import load, packing, summarise
from zonal.training import Comparison, ComparisonSpec, TrainConfig
from zonal.training import compare as compare_module
from zonal.training import events as kinds
from zonal.training import loop as loop_module
from zonal.training import plan as plan_module
from zonal.training import processes as processes_module
from zonal.training.environment import FolderInUseError, folder_lock
from zonal.training.plan import Timing, decide_steps, estimate, evaluations
from zonal.training.record import RunResult

HERE = Path(__file__).parent


def a_spec(**changes):
    settings = {
        "task": tasks.resolve(
            "mqar", tasks.TaskSettings(vocab_size=32, length=16, pairs=2, train_examples=200, test_examples=24)
        ),
        "model": ModelConfig(vocab_size=32, dim=16, layers=("softmax",), heads=2, mlp="none", conv=2, init_std=0.1),
        "training": TrainConfig(
            steps=6, batch_size=8, eval_every=3, learning_rate=1e-2, tensorboard=False, checkpoint_seconds=None
        ),
        "operators": ("softmax", "sko(degrees=(2.0, 3.0))"),
        "seeds": (0, 1),
    }
    return ComparisonSpec(**{**settings, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison") / "it"
    seen = []
    result = Comparison(folder, a_spec()).run(on_event=seen.append)
    return folder, result, seen


def test_a_packed_comparison_goes_on(whole, tmp_path):
    folder, result, _ = whole
    packed = packing.pack(folder, tmp_path / "it")
    found = Comparison(packed, a_spec())
    assert tuple(found.records()) == result.runs
    again = found.run()
    assert (again.status, again.runs) == ("done", result.runs)
    assert not (packed / "runs.tar.xz").exists()
    # what was lost is run again, to the same numbers
    shutil.rmtree(next(packed.glob("runs/softmax/*")))
    assert [run.final for run in Comparison.open(packed).run().runs] == [run.final for run in result.runs]


def test_a_comparison_runs_everything(whole):
    folder, result, seen = whole
    assert result.status == "done"
    assert [(run.operator, run.seed) for run in result.runs] == [
        (operator, seed) for seed in (0, 1) for operator in ("softmax", "sko(degrees=(2.0, 3.0))")
    ]
    assert all((run.status, run.steps_done, run.steps) == ("done", 6, 6) for run in result.runs)
    stored = json.loads((folder / "comparison.json").read_text())
    assert stored["model"]["layers"] == ["operator"]
    assert (stored["steps"], stored["training"]["steps"], stored["schema"], stored["metric"]) == (6, 6, 1, "accuracy")
    assert set(stored["device"]) == {"name", "cores", "threads", "memory_bytes"}
    assert sorted(str(path.parent.relative_to(folder)) for path in folder.glob("runs/*/*/run.json")) == [
        "runs/sko-degrees-2.0-3.0/seed-0-lr-0.01", "runs/sko-degrees-2.0-3.0/seed-1-lr-0.01",
        "runs/softmax/seed-0-lr-0.01", "runs/softmax/seed-1-lr-0.01",
    ]  # fmt: skip
    assert isinstance(seen[0], kinds.Measuring)
    planned = next(event for event in seen if isinstance(event, kinds.Planned))
    assert (planned.runs, planned.remaining, planned.steps) == (4, 4, 6)
    assert set(planned.step_seconds) == {"softmax", "sko(degrees=(2.0, 3.0))"}
    assert seen[-1] == kinds.ComparisonFinished("done", 4, 0, 0, {"softmax": 0.01, "sko(degrees=(2.0, 3.0))": 0.01})


def test_the_report_can_be_written(whole):
    from zonal import report

    data = report.load(whole[0])
    assert [run.status for run in data.runs] == ["done"] * 4
    assert data.metric == "accuracy"


def test_equal_data_and_equal_shared_weights():
    spec = a_spec()
    models = [build(spec.model_for(operator), 1) for operator in spec.operators]
    states = [model.state_dict() for model in models]
    shared = [name for name in states[0] if name in states[1] and states[0][name].shape == states[1][name].shape]
    assert "embedding.weight" in shared
    assert len(shared) >= 5
    assert all(torch.equal(states[0][name], states[1][name]) for name in shared)
    assert not torch.equal(
        build(spec.model_for("softmax"), 2).state_dict()["embedding.weight"], states[0]["embedding.weight"]
    )


def test_every_operator_sees_the_same_batches(tmp_path, monkeypatch):
    seen = {}
    spec = a_spec()
    real = spec.task.train_batch
    current = []

    def watched(step, batch_size, seed):
        batch = real(step, batch_size, seed)
        if current:
            seen.setdefault(current[-1], []).append(batch.tokens)
        return batch

    monkeypatch.setattr(spec.task, "train_batch", watched)
    Comparison(tmp_path, spec).run(
        on_event=lambda event: current.append(event.run) if isinstance(event, kinds.RunStarted) else None
    )
    first, second, third, fourth = (torch.stack(seen[run.name][:6]) for run in spec.runs())
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)


def test_finished_runs_are_skipped(whole):
    folder, result, _ = whole
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/*")}
    seen = []
    again = Comparison(folder, a_spec()).run(on_event=seen.append)
    assert again == result
    assert not [event for event in seen if isinstance(event, kinds.StepDone | kinds.Measuring)]
    assert [event.skipped for event in seen if isinstance(event, kinds.RunFinished)] == [True] * 4
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/*")}


def stop_after(count):
    """(should_stop, on_event): a wish to stop after ``count`` updates of runs."""
    done = []
    return (lambda: len(done) >= count), (
        lambda event: done.append(event) if isinstance(event, kinds.StepDone) else None
    )


@pytest.mark.parametrize("open_it", [False, True])
def test_stopped_and_continued_is_the_same_comparison(whole, tmp_path, open_it):
    folder = tmp_path / "it"
    for _ in range(3):
        should_stop, on_event = stop_after(5)
        comparison = Comparison.open(folder) if open_it and folder.exists() else Comparison(folder, a_spec())
        result = comparison.run(should_stop=should_stop, on_event=on_event)
        assert result.status == "stopped"
    assert Comparison.open(folder).run().status == "done"
    for run in a_spec().runs():
        assert lines(folder / run.name) == lines(whole[0] / run.name)


def test_stop_while_measuring_leaves_no_plan(tmp_path):
    seen = []
    result = Comparison(tmp_path, a_spec()).run(should_stop=lambda: True, on_event=seen.append)
    assert result.status == "stopped"
    assert [type(event) for event in seen] == [kinds.Measuring, kinds.ComparisonFinished]
    assert not (tmp_path / "comparison.json").exists()
    assert Comparison(tmp_path, a_spec(seeds=(0,), operators=("softmax",))).run().status == "done"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seeds": (0, 2)}, r"seeds\[1\] is 1 there and 2 here"),
        ({"operators": ("softmax", "linear")}, r"operators\[1\]"),
        ({"learning_rates": (0.1,)}, r"learning_rates\[0\]"),
        ({"budget_seconds": 60.0}, "budget_seconds is None there and 60.0 here"),
        ({"training": replace(a_spec().training, batch_size=4)}, "training.batch_size is 8 there and 4 here"),
        ({"model": replace(a_spec().model, dim=32)}, "model.dim is 16 there and 32 here"),
        (
            {
                "task": tasks.resolve(
                    "mqar", tasks.TaskSettings(vocab_size=32, length=16, pairs=4, train_examples=200, test_examples=24)
                )
            },
            "task",
        ),
    ],
)
def test_another_comparison_in_the_folder(whole, changes, field):
    with pytest.raises(ArgumentError, match=rf"holds another comparison: {field}.*--resume") as caught:
        Comparison(whole[0], a_spec(**changes))
    assert "\n" not in str(caught.value)


def test_what_does_not_change_a_number_may_change(whole):
    training = replace(a_spec().training, checkpoint_every=1)
    again = Comparison(whole[0], a_spec(title="other", command="other", training=training))
    assert {record.status for record in again.records()} == {"done"}
    with pytest.raises(ArgumentError, match="begun without keep_best"):
        Comparison(whole[0], a_spec(training=replace(training, keep_best=True)))


def test_folders_that_are_none(tmp_path):
    (tmp_path / "photo.txt").write_text("x")
    with pytest.raises(ArgumentError, match="not empty and holds no comparison"):
        Comparison(tmp_path, a_spec())
    with pytest.raises(ArgumentError, match="is a file"):
        Comparison(tmp_path / "photo.txt", a_spec())
    with pytest.raises(FileFormatError, match="holds no comparison"):
        Comparison.open(tmp_path)
    (tmp_path / "comparison.json").write_text('{"schema": 99}')
    with pytest.raises(FileFormatError, match="schema 99"):
        Comparison.open(tmp_path)
    (tmp_path / "comparison.json").write_text('{"schema": 1}')
    with pytest.raises(FileFormatError, match="'operators' is missing"):
        Comparison.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operators": ()}, "at least one operator"), ({"operators": ("softmax", "softmax()")}, "must not repeat"),
        ({"operators": ("softmx",)}, "Did you mean"), ({"operators": ("ska", "ska(power=1)")}, "the same model as"),
        ({"seeds": ()}, "one seed"), ({"seeds": (-1,)}, "seed must be"),
        ({"learning_rates": (0.0,)}, "learning_rate must be"), ({"budget_seconds": 0.0}, "budget"),
        ({"labels": ("one",)}, "labels"), ({"operators": ("sq", "squared_affine")}, "the same model as"),
        ({"device": "gpu"}, "not a device"), ({"device": "cuda:99"}, "is not available"),
        ({"model": replace(a_spec().model, vocab_size=64)}, "vocab_size must be that of the task"),
    ],
)  # fmt: skip
def test_spec_refuses(changes, message):
    with pytest.raises(ArgumentError, match=message):
        a_spec(**changes)


# one run that fails


def test_one_failure_does_not_stop_the_others(tmp_path, monkeypatch):
    real = processes_module.forward_backward

    def poisoned(model, parts, dtype):
        loss = real(model, parts, dtype)
        return math.nan if model.config.layers == ("softmax",) else loss

    spec = a_spec(seeds=(0,), learning_rates=(0.01, 0.02))
    with monkeypatch.context() as patch:
        patch.setattr(processes_module, "forward_backward", poisoned)
        seen = []
        result = Comparison(tmp_path, spec).run(on_event=seen.append)
    assert result.status == "failed"
    assert [run.status for run in result.runs] == ["failed", "done", "failed", "done"]
    assert "the loss became nan in step 1 of 6" in result.runs[0].message
    assert result.best_learning_rates["softmax"] is None
    assert [event.status for event in seen if isinstance(event, kinds.RunFinished)] == [
        "failed",
        "done",
        "failed",
        "done",
    ]
    assert Comparison.open(tmp_path).run().status == "failed"  # a failure is an end
    told = []
    assert Comparison.open(tmp_path).run(retry_failed=True, on_event=told.append).status == "done"
    (planned,) = [event for event in told if isinstance(event, kinds.Planned)]
    assert (planned.runs, planned.remaining) == (4, 2)
    assert planned.estimated_seconds > 0


def test_out_of_memory_ends_one_run(tmp_path, monkeypatch):
    real = processes_module.forward_backward

    def hungry(model, parts, dtype):
        if model.config.layers == ("softmax",):
            torch.empty(10**15)
        return real(model, parts, dtype)

    monkeypatch.setattr(processes_module, "forward_backward", hungry)
    result = Comparison(tmp_path, a_spec(seeds=(0,))).run()
    assert [run.status for run in result.runs] == ["failed", "done"]
    assert "out of memory" in result.runs[0].message
    assert "\n" not in result.runs[0].message


def test_a_defect_is_not_hidden(tmp_path, monkeypatch):
    def broken(model, parts, dtype):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(processes_module, "forward_backward", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        Comparison(tmp_path, a_spec(seeds=(0,))).run()


def test_a_folder_in_use_is_told_by_the_call_that_was_made(tmp_path):
    comparison = Comparison(tmp_path, a_spec())
    with folder_lock(tmp_path), pytest.raises(FolderInUseError, match=r"^compare: .* is in use by another process"):
        comparison.run()


def test_a_kill_while_planning_leaves_a_folder_that_can_be_used(tmp_path):
    (tmp_path / ".comparison.json.abc_0123.part").mkdir()
    assert Comparison(tmp_path, a_spec(seeds=(0,), operators=("softmax",))).run().status == "done"
    assert not list(tmp_path.glob(".*.part"))


def test_learning_rates_have_a_folder_each():
    rates = (0.001, 0.0012345678, 0.0012345679)
    names = [run.name for run in a_spec(learning_rates=rates, seeds=(0,), operators=("softmax",)).runs()]
    assert names[0].endswith("lr-0.001")
    assert len(set(names)) == 3


def test_operators_have_a_folder_each():
    spec = a_spec(operators=("ska(power=0)", "ska(power=1)", "softmax"), seeds=(0,))
    assert len({run.name for run in spec.runs()}) == 3
    lists = [f"[{', '.join(['ska(power=1)', 'softmax', 'linear'] * 20)}, {last}]" for last in ("softmax", "linear")]
    spec = a_spec(operators=lists, seeds=(0,), model=replace(spec.model, layers=("softmax",) * 61))
    names = {part for run in spec.runs() for part in Path(run.name).parts}
    assert len({run.name for run in spec.runs()}) == 2
    assert max(map(len, names)) < 255


def test_an_operator_that_cannot_run_is_refused_before_anything_runs(tmp_path, monkeypatch):
    def refuse(config, seed):
        raise ArgumentError("Attention: this operator cannot do that.")

    monkeypatch.setattr(plan_module, "language_model", refuse)
    with pytest.raises(ArgumentError, match="cannot do that"):
        Comparison(tmp_path, a_spec()).run()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_stops_everything(tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise InsufficientSpaceError("store: no space left")

    comparison = Comparison(tmp_path, a_spec())
    monkeypatch.setattr(loop_module.checkpoints, "save_checkpoint", full)
    with pytest.raises(InsufficientSpaceError):
        comparison.run()
    assert [run.status for run in comparison.records()] == ["running", "pending", "pending", "pending"]


# learning rates


@pytest.mark.parametrize(("jobs", "operators"), [(1, ("softmax", "sko(degrees=(2.0, 3.0))")), (2, ("softmax",))])
def test_the_other_seeds_take_the_rate_that_the_first_has_chosen(tmp_path, jobs, operators):
    """With two jobs each run is a process, which takes seconds to start: there are fewer."""
    labels, seeds = ("first", "second")[: len(operators)], (3, 4, 5)[: 4 - jobs]
    spec = a_spec(operators=operators, labels=labels, seeds=seeds, learning_rates=(1e-4, 1e-2), screening_seeds=1)
    comparison, seen = Comparison(tmp_path / "it", spec), []
    stopped = comparison.run(
        on_event=seen.append, should_stop=lambda: any(isinstance(event, kinds.RunFinished) for event in seen)
    )
    assert stopped.status == "stopped"
    assert stopped.left == spec.runs_each * len(operators) - 1
    # the second operator has no run yet
    assert [row.label for row in summarise(load(tmp_path / "it")).rows] == list(labels)
    result = Comparison.open(tmp_path / "it").run(jobs=jobs, threads=None)
    assert (result.status, result.left, len(result.runs)) == ("done", 0, len(operators) * spec.runs_each)
    for operator in spec.operators:
        runs = [run for run in result.runs if run.operator == operator]
        tried = {run.learning_rate: run.final["validation"]["accuracy"] for run in runs if run.seed == 3}
        best = min(rate for rate in tried if tried[rate] == max(tried.values()))
        assert set(tried) == {1e-4, 1e-2}
        assert result.best_learning_rates[operator] == best
        assert [(run.seed, run.learning_rate) for run in runs if run.seed != 3] == [(seed, best) for seed in seeds[1:]]
        row = next(row for row in summarise(load(tmp_path / "it")).rows if row.operator == operator)
        assert row.learning_rate == best
        assert [run.seed for run in row.runs] == list(seeds)
    again, events = Comparison.open(tmp_path / "it"), []
    assert again.run(on_event=events.append).status == "done"
    assert not any(isinstance(event, kinds.RunStarted) for event in events)


@pytest.mark.parametrize(("jobs", "first"), [(1, {"softmax"}), (2, {"softmax", "linear"})])
def test_several_runs_at_a_time_try_the_rates_of_all_operators(tmp_path, jobs, first):
    spec = a_spec(operators=("softmax", "linear"), learning_rates=(0.01, 0.02), seeds=(0, 1), screening_seeds=1)
    tried = next(iter(Comparison(tmp_path, spec)._rounds(jobs)))
    assert {run.operator for run in tried} == first
    assert {run.seed for run in tried} == {0}


def test_a_seed_that_tried_one_rate_does_not_choose(tmp_path):
    """Its rate was chosen by others: it must not make that rate look worse than one it never tried."""
    spec = a_spec(operators=("softmax",), learning_rates=(0.01, 0.02), seeds=(0, 1), screening_seeds=1)
    accuracy = {(0, 0.01): 0.8, (0, 0.02): 0.9, (1, 0.02): 0.1}
    records = tuple(
        RunResult("softmax", "softmax", seed, rate, status="done", final={"accuracy": value, "loss": 1.0})
        for (seed, rate), value in accuracy.items()
    )
    assert Comparison(tmp_path, spec).best_learning_rates(records) == {"softmax": 0.02}


@pytest.mark.parametrize("seeds", [0, 3])
def test_screening_is_by_seeds_that_are_there(seeds):
    with pytest.raises(ArgumentError, match=rf"screening_seeds must be at least 1 and at most .* \(2\).*got {seeds}"):
        a_spec(screening_seeds=seeds)


@pytest.mark.parametrize(("rates", "seeds"), [((1e-3, 1e-2), 2), ((1e-3,), 1)])
def test_all_seeds_or_one_rate_are_no_screening(rates, seeds):
    screened, whole = a_spec(learning_rates=rates, screening_seeds=seeds), a_spec(learning_rates=rates)
    assert (screened.screening_seeds, screened.identity()) == (None, whole.identity())
    assert len(screened.runs()) == screened.runs_each * len(screened.operators) == 2 * len(rates) * len(whole.operators)


def test_the_best_learning_rate_is_chosen_by_the_mean_over_seeds(tmp_path, monkeypatch):
    spec = a_spec(operators=("softmax",), learning_rates=(0.01, 0.02, 0.04))
    comparison = Comparison(tmp_path, spec)
    assert [run.name for run in spec.runs()][:4] == [
        "runs/softmax/seed-0-lr-0.01", "runs/softmax/seed-0-lr-0.02", "runs/softmax/seed-0-lr-0.04",
        "runs/softmax/seed-1-lr-0.01",
    ]  # fmt: skip
    accuracy = {(0, 0.01): 0.5, (1, 0.01): 0.5, (0, 0.02): 0.9, (1, 0.02): 0.2, (0, 0.04): 0.8, (1, 0.04): None}
    records = tuple(
        RunResult(
            "softmax",
            "softmax",
            seed,
            rate,
            status="failed" if value is None else "done",
            final=value and {"accuracy": value, "loss": 1.0},
        )
        for (seed, rate), value in accuracy.items()
    )
    assert comparison.best_learning_rates(records) == {"softmax": 0.02}


# the budget


def timings(**updates):
    return {name: Timing(update, 10 * update, 1.0) for name, update in updates.items()}


def test_evaluations_are_counted():
    config = a_spec().training
    assert [evaluations(config, steps) for steps in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    assert evaluations(replace(config, eval_every=None), 1000) == 10


@pytest.mark.parametrize("budget", [40.0, 100.0, 1234.5])
@pytest.mark.parametrize("eval_every", [None, 7])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_budget_gives_every_run_the_same_steps(budget, eval_every, jobs):
    training = replace(a_spec().training, steps=100_000, eval_every=eval_every)
    spec = a_spec(budget_seconds=budget, training=training)
    times = timings(softmax=0.01, sko=0.03)
    plan = decide_steps(spec, times, spent=3.0, jobs=jobs)
    expected = (
        sum(
            plan.steps * time.update + (evaluations(training, plan.steps) + 1) * time.evaluation + 1.0
            for time in times.values()
        )
        * 2
    )
    assert estimate(spec, times, plan.steps, 1) == pytest.approx(expected)
    assert plan.estimated_seconds <= budget * 0.9 - 3.0
    # nothing is wasted: a twentieth more would not fit
    assert estimate(spec, times, plan.steps + plan.steps // 20 + 10, jobs) > budget * 0.9 - 3.0


def test_steps_are_the_most_a_budget_may_take():
    spec = a_spec(budget_seconds=1e6)
    assert decide_steps(spec, timings(softmax=0.01, sko=0.03), 0.0, 1).steps == 6


def test_a_budget_too_small_says_what_is_needed():
    training = replace(a_spec().training, steps=1000)
    times = timings(softmax=0.01, sko=0.03)
    with pytest.raises(
        ArgumentError, match=r"a budget of 3 s is too small for 10 updates in each of 4 runs; about (\d+) s"
    ) as caught:
        decide_steps(a_spec(budget_seconds=3.0, training=training), times, 0.5, 1)
    needed = int(str(caught.value).split("about ")[1].split(" s")[0])
    assert decide_steps(a_spec(budget_seconds=float(needed), training=training), times, 0.5, 1).steps >= 10


def test_a_budgeted_comparison_keeps_its_plan(tmp_path, monkeypatch):
    training = replace(a_spec().training, steps=100_000, eval_every=None)
    spec = a_spec(budget_seconds=4.0, training=training, seeds=(0,), operators=("softmax",))
    should_stop, on_event = stop_after(3)
    first = Comparison(tmp_path, spec)
    monkeypatch.setattr(compare_module, "measure", lambda *arguments: Timing(update=0.1, evaluation=0.1, overhead=0.1))
    first.run(should_stop=should_stop, on_event=on_event)
    assert 10 <= first.plan.steps <= 40
    assert first.plan.estimated_seconds <= 4.0
    monkeypatch.setattr(compare_module, "measure", lambda *arguments: pytest.fail("measured again"))
    second = Comparison(tmp_path, spec)
    assert second.plan == first.plan
    result = second.run()
    assert result.runs[0].steps_done == first.plan.steps


# processes


def environment():
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)]),
        "OMP_NUM_THREADS": "1",
    }


SCRIPT = """
import sys
from training.test_comparisons import a_spec
from zonal.training import Comparison
from zonal.training import events as kinds
def show(event):
    if isinstance(event, kinds.StepDone):
        print(event.run, event.step, flush=True)
jobs = int(sys.argv[2])
spec = a_spec(training=__import__("dataclasses").replace(a_spec().training, steps=int(sys.argv[3])))
print(Comparison(sys.argv[1], spec).run(on_event=show, jobs=jobs, threads=1).status)
"""


def start(folder, jobs, steps):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(jobs), str(steps)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def read_until(process, step, runs=1):
    """Returns once one run has reached ``step`` and ``runs`` of them have begun."""
    begun = {}
    for line in process.stdout:
        run, _, at = line.rpartition(" ")
        begun[run] = int(at)
        if len(begun) >= runs and max(begun.values()) >= step:
            return
    pytest.fail(process.stderr.read())


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_then_again(tmp_path, jobs):
    process = start(tmp_path / "it", jobs, 10_000)
    read_until(process, 20, runs=jobs)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.split()[-1] == "stopped"
    assert "Traceback" not in err
    records = {name: RunResult.read(tmp_path / "it" / name) for name in (run.name for run in a_spec().runs())}
    begun = {name: record for name, record in records.items() if record.status == "stopped"}
    assert sorted(record.status for record in records.values()) == ["pending"] * (4 - jobs) + ["stopped"] * jobs
    assert 20 <= max(record.steps_done for record in begun.values()) < 10_000
    should_stop, on_event = stop_after(1)
    first = []
    Comparison.open(tmp_path / "it").run(
        should_stop=should_stop, on_event=lambda event: (first.append(event), on_event(event))
    )
    started = next(event for event in first if isinstance(event, kinds.RunStarted))
    assert (started.run, started.step) == ("runs/softmax/seed-0-lr-0.01", begun[started.run].steps_done)


@pytest.mark.skipif(sys.platform != "linux", reason="children are found through /proc")
def test_two_at_a_time_and_a_killed_worker(tmp_path):
    folder = tmp_path / "it"
    process = start(folder, 2, 120)
    read_until(process, 5, runs=2)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.split()[-1] == "stopped"
    records = [RunResult.read(path.parent) for path in folder.glob("runs/*/*/run.json")]
    assert sorted(record.status for record in records) == ["done", "done", "done", "stopped"]
    victim = next(record for record in records if record.status == "stopped")
    assert "killed by SIGKILL" in victim.message
    assert Comparison.open(folder).run().status == "done"
    spec = a_spec(training=replace(a_spec().training, steps=120))
    Comparison(tmp_path / "one by one", spec).run(threads=1)
    for run in spec.runs():
        assert lines(folder / run.name) == lines(tmp_path / "one by one" / run.name)


@pytest.mark.skipif(sys.platform != "linux", reason="children are found through /proc")
def test_workers_of_a_killed_parent_stop_with_a_checkpoint(tmp_path):
    folder = tmp_path / "it"
    process = start(folder, 2, 10_000)
    read_until(process, 5, runs=2)
    process.kill()
    process.communicate(timeout=60)
    result = Comparison.open(folder)  # a run's folder is free once its worker has written its checkpoint
    deadline = time.monotonic() + 30
    while (statuses := sorted(record.status for record in result.records())) != ["pending"] * 2 + ["stopped"] * 2:
        assert time.monotonic() < deadline, statuses
        time.sleep(0.1)
    assert max(record.steps_done for record in result.records()) >= 5
