"""Learning rates are chosen by the validation set of a task, which no run trains on or reports."""

import json
import math
from dataclasses import replace

import pytest
from report.comparison_folder import write_comparison
from training.training_doubles import Recall, tiny_config, tiny_model

from zonal import report
from zonal.errors import NonFiniteError
from zonal.evaluation import evaluate
from zonal.models import ModelConfig
from zonal.report import load, summarise
from zonal.training import Comparison, ComparisonSpec, load_model, train


class Validated(Recall):
    """A double with a validation set."""

    def validation_batches(self, batch_size):
        return Recall(self.vocab_size, self.length, 10, first_seed=99).evaluation_batches(batch_size)


class OnlyValidated(Recall):
    """The validation set of ``Validated`` as an evaluation set."""

    evaluation_batches = Validated.validation_batches


def test_only_the_last_evaluation_has_it(tmp_path):
    model, events = tiny_model(), []
    result = train(model, Validated(), tiny_config(), tmp_path, on_event=events.append)
    found = evaluate(model, OnlyValidated(), batch_size=8)
    assert result.final is not None
    assert result.best is not None
    assert result.final["validation"] == {"loss": found["loss"], "accuracy": found["accuracy"]}
    assert result.final["accuracy"] == evaluate(model, Recall(), batch_size=8)["accuracy"] != found["accuracy"]
    assert ["validation" in line for line in evaluations(tmp_path)] == [False, False, True]


def evaluations(folder):
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in log if line["kind"] == "eval"]


@pytest.mark.parametrize("kind", [Validated, Recall])
def test_it_ends_a_run_early(kind, tmp_path):
    """Or the evaluation set, where a task has none."""
    result = train(tiny_model(), kind(), tiny_config(steps=400, eval_every=4, stop_at_accuracy=0.5), tmp_path)
    assert result.stopped_early
    judged = [line.get("validation", line)["accuracy"] for line in evaluations(tmp_path)]
    reported = [line["accuracy"] for line in evaluations(tmp_path)]
    assert all(value < 0.5 for value in judged[:-1])
    assert judged[-1] >= 0.5
    assert (judged == reported) == (kind is Recall)


def test_it_chooses_the_weights_that_are_kept(tmp_path):
    """After training, answers of ``Contrary`` are wrong: its best weights are those of the first evaluation."""
    config = tiny_config(steps=60, eval_every=20, learning_rate=3e-2)
    for kept in (True, False):
        folder = tmp_path / str(kept)
        result = train(tiny_model(), Contrary(), replace(config, keep_best=kept), folder)
        found = evaluations(folder)
        assert result.best is not None
        if not kept:
            assert result.best["step"] == max(found, key=lambda line: line["accuracy"])["step"] > 20
            continue
        assert result.best["step"] == max(found, key=lambda line: line["validation"]["accuracy"])["step"] == 20
        best, _ = load_model(folder / "best.safetensors")
        assert evaluate(best, Contrary(), batch_size=8)["accuracy"] == result.best["accuracy"]


def test_stopped_in_the_middle_of_it_goes_on(tmp_path):
    def run(folder, calls):
        left = iter(range(calls))
        return train(tiny_model(), Validated(), tiny_config(), folder, should_stop=lambda: next(left, None) is None)

    whole = run(tmp_path / "whole", 10_000)
    calls, statuses = 0, []
    while not statuses or statuses[-1] != "done":
        calls += 1
        statuses.append(run(tmp_path / str(calls), calls).status)
    assert calls > 20
    again = run(tmp_path / str(calls - 1), 10_000)
    assert again.final == whole.final


def test_a_validation_loss_that_is_not_finite_is_named(tmp_path):
    model = tiny_model()

    def spoil(module, inputs, output):
        return output * math.nan if output.shape[0] == 2 and not module.training else output

    model.blocks[0].attention.register_forward_hook(spoil)  # the last batch of the ten sequences has two
    with pytest.raises(NonFiniteError, match=r"validation loss became nan after step 12: .*'blocks\.0\.attention'"):
        train(model, Validated(), tiny_config(), tmp_path)


class Contrary(Recall):
    """Other sequences choose: those whose answers are all the token that an untrained model hardly names."""

    def validation_batches(self, batch_size):
        for batch in self.evaluation_batches(batch_size):
            wrong = batch.targets.where(batch.targets == -100, (batch.targets + 1) % self.vocab_size)
            yield batch._replace(targets=wrong)


@pytest.mark.parametrize(("kind", "best"), [(Recall, 3e-2), (Contrary, 1e-4)])
def test_the_rate_of_a_comparison_is_chosen_by_it(kind, best, tmp_path):
    """After training, answers of the task are right, and those of ``Contrary`` wrong: less so at a rate near 0."""
    spec = ComparisonSpec(
        task=kind(), model=ModelConfig(16, dim=16, layers=("softmax",), heads=2, mlp="none", conv=2, init_std=0.1),
        training=tiny_config(steps=40, batch_size=16, eval_every=40), operators=("softmax",), seeds=(0, 1),
        learning_rates=(1e-4, 3e-2), screening_seeds=1,
    )  # fmt: skip
    result = Comparison(tmp_path, spec).run()
    accuracy = {run.learning_rate: run.final["accuracy"] for run in result.runs if run.final and run.seed == 0}
    assert accuracy[3e-2] > accuracy[1e-4] + 0.2
    assert result.best_learning_rates == {"softmax": best}
    assert [run.learning_rate for run in result.runs if run.seed == 1] == [best]
    assert summarise(load(tmp_path)).rows[0].learning_rate == best
    by = "validation data" if kind is Contrary else "the reported data"
    assert (
        f"learning rates 0.0001, 0.03 tried with 1 of the seeds, chosen by {by} ·"
        in report.write(tmp_path).markdown.read_text()
    )


def test_records_from_before_there_were_validation_sets(tmp_path):
    made = write_comparison(tmp_path / "x", operators=("softmax", "sko"), rates=(0.001, 0.003))
    assert "chosen by the reported data" in report.write(made).markdown.read_text()
    assert {row.learning_rate for row in summarise(load(made)).rows} <= {0.001, 0.003}
