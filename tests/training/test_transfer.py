"""What a finished run is measured on once more: other tasks and lengths, read whole or in pieces from the model's
memory.
"""

import dataclasses

import pytest
import torch

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.evaluation import Cells, evaluate_transfer
from zonal.models import ModelConfig, build
from zonal.tasks import Batch, Retrieval, Shape, Stage
from zonal.training import Comparison, ComparisonSpec, TrainConfig, train
from zonal.training import events as kinds
from zonal.training.plan import Timing, estimate

TASK = Retrieval(
    [Stage(0, (Shape("system-prompt", 1, 12),))],
    transfer_shapes=(Shape("needle", 1, 12), Shape("needle", 2, 40)),
    vocab_size=40,
    test_examples=6,
    transfer_examples=5,
)
CONFIG = TrainConfig(
    steps=4, batch_size=4, eval_every=2, tensorboard=False, checkpoint_seconds=None, checkpoint_every=1
)


def model(layers="softmax", seed=0):
    return build(ModelConfig(TASK.vocab_size, dim=16, layers=layers, heads=2, mlp="none", init_std=0.5), seed)


@pytest.mark.parametrize(
    "layers",
    [
        "softmax",
        "mamba2(state=8, head_dim=16)",
        "ska(power=0)",
        "ska(power=2)",
        "ska(power=1, chunk=8)",
        "mamba2(state=8, head_dim=16), ska(power=1)",
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 8])
def test_pieces_say_what_the_whole_says(layers, piece):
    """Recurrent reading, piece by piece from a memory, against the parallel pass over all tokens."""
    decoder = model(layers).double()
    batch = next(TASK.transfer_batches(5))
    for block in decoder.blocks:
        torch.nn.init.normal_(block.attention.output.weight, std=0.3)
    whole, parts = (
        decoder.predict(batch.tokens, batch.targets),
        decoder.predict(batch.tokens, batch.targets, piece=piece),
    )
    assert torch.equal(whole.predicted, parts.predicted)
    torch.testing.assert_close(whole.loss, parts.loss, rtol=1e-7, atol=1e-7)


def test_a_piece_has_a_token():
    batch = next(TASK.transfer_batches(2))
    with pytest.raises(ArgumentError, match="piece must be at least 1"):
        model().predict(batch.tokens, batch.targets, piece=0)
    with pytest.raises(ArgumentError, match="transfer_piece must be at least 1"):
        TrainConfig(transfer_piece=0)


def test_a_run_ends_where_longer_sequences_have_no_finite_loss(tmp_path, monkeypatch):
    decoder = model()
    predict = type(decoder).predict

    def overflowing(self, tokens, targets, **options):
        found = predict(self, tokens, targets, **options)
        return found if tokens.shape[1] <= 12 else found._replace(loss=found.loss * torch.nan)

    monkeypatch.setattr(type(decoder), "predict", overflowing)
    result = train(decoder, TASK, CONFIG, tmp_path)
    assert result.status == "done"
    assert result.final is not None
    short, long = result.final["transfer"]
    assert short["loss"] > 0
    assert long["loss"] is None
    assert 0 <= long["accuracy"] <= 1


def test_the_last_evaluation_has_every_cell(tmp_path):
    decoder = model()
    result = train(decoder, TASK, CONFIG, tmp_path)
    assert result.final is not None
    cells = result.final["transfer"]
    assert [(cell["task"], cell["pairs"], cell["length"], cell["examples"]) for cell in cells] == [
        ("needle", 1, 12, 5),
        ("needle", 2, 40, 5),
    ]
    assert cells == evaluate_transfer(decoder, TASK, batch_size=4)
    assert result.best is not None
    assert "transfer" not in result.best
    for cell, shape in zip(cells, TASK.transfer_shapes, strict=True):
        batch = Batch(
            *(
                torch.cat(part)
                for part in zip(
                    *((b.tokens, b.targets) for b in TASK.transfer_batches(4) if b.tokens.shape[1] == shape.length),
                    strict=True,
                )
            ),
            {},
        )
        said = decoder.predict(batch.tokens, batch.targets)
        assert cell["accuracy"] == pytest.approx(float((said.predicted == said.target).double().mean()))


def test_a_run_that_is_good_enough_is_measured_too(tmp_path):
    result = train(
        model(),
        TASK,
        dataclasses.replace(CONFIG, steps=40, eval_every=1, stop_at_accuracy=1e-9, learning_rate=1e-2),
        tmp_path,
    )
    assert result.final is not None
    assert result.stopped_early == (result.final["validation"]["accuracy"] > 0)
    assert len(result.final["transfer"]) == 2


def test_stopped_while_being_measured_goes_on(tmp_path):
    calls = iter(range(100))
    # 4 updates, 2 evaluations of 2 batches each, then the first transfer batch
    stopped = train(model(), TASK, CONFIG, tmp_path / "a", should_stop=lambda: next(calls) >= 9)
    assert stopped.status == "stopped"
    assert stopped.steps_done == 4
    assert "transfer" not in (stopped.final or {})
    finished = train(model(), TASK, CONFIG, tmp_path / "a")
    assert finished.status == "done"
    assert finished.final == train(model(), TASK, CONFIG, tmp_path / "b").final


def test_cells_do_not_mix():
    batch = Batch(
        torch.zeros(2, 3, dtype=torch.long),
        torch.zeros(2, 3, dtype=torch.long),
        {"task": ["needle", "two-hop"], "length": [3, 3]},
    )
    with pytest.raises(ArgumentError, match="all rows of a batch must have the same task"):
        Cells().of(batch)
    one = tasks.Retrieval([Stage(0, (Shape("needle", 1, 12),))], vocab_size=40)
    assert evaluate_transfer(model(), one, batch_size=4) == []


def two_rates(folder, **changes):
    settings = {
        "task": TASK,
        "model": ModelConfig(TASK.vocab_size, 16, ("softmax",), heads=2),
        "training": TrainConfig(steps=4, batch_size=4, eval_batch_size=5, tensorboard=False, checkpoint_seconds=None),
        "operators": ("softmax", "linear"),
        "seeds": (0, 1, 2),
        "learning_rates": (1e-3, 1e-2),
        "screening_seeds": 2,
    }
    return Comparison(folder, ComparisonSpec(**{**settings, **changes}))


@pytest.mark.parametrize("jobs", [1, 2])
def test_of_several_rates_only_the_best_is_measured(jobs, tmp_path):
    result = two_rates(tmp_path / "two").run(jobs=jobs, threads=1)
    assert (result.status, result.left) == ("done", 0)
    measured = {(run.operator, run.learning_rate, run.seed) for run in result.runs if "transfer" in run.final}
    best = result.best_learning_rates
    assert measured == {(operator, best[operator], seed) for operator in ("softmax", "linear") for seed in (0, 1, 2)}
    assert measured == {(run.operator, run.learning_rate, run.seed) for run in result.runs if run.measured}
    # to the numbers of runs that are measured at once
    once = two_rates(tmp_path / "once", operators=("linear",), learning_rates=(best["linear"],), screening_seeds=None)
    finals = {run.seed: run.final for run in result.runs if run.measured and run.operator == "linear"}
    assert {run.seed: run.final for run in once.run().runs} == finals
    assert two_rates(tmp_path / "two").run().runs == result.runs


def test_a_measurement_that_was_broken_off_is_made_again(tmp_path):
    comparison = two_rates(tmp_path / "stopped", operators=("softmax",), seeds=(0, 1), screening_seeds=None)
    ended, stop = [], []

    def listen(event):
        ended.extend([event.run] if isinstance(event, kinds.RunFinished) else [])
        # in the first measurement, after all runs
        stop.extend([True] if len(ended) == 4 and isinstance(event, kinds.EvaluationProgress) else [])

    result = comparison.run(on_event=listen, should_stop=lambda: bool(stop))
    assert (result.status, result.left, len(ended)) == ("stopped", 2, 5)
    assert all(run.status == "done" and "transfer" not in run.final for run in result.runs)
    again = two_rates(tmp_path / "stopped", operators=("softmax",), seeds=(0, 1), screening_seeds=None).run()
    assert (again.status, again.left) == ("done", 0)
    (chosen,) = again.best_learning_rates.values()
    assert [len(run.final.get("transfer", ())) for run in again.runs] == [
        2 * (run.learning_rate == chosen) for run in again.runs
    ]


def test_a_record_lost_before_the_measurement(tmp_path):
    folder = tmp_path / "run"
    config = TrainConfig(steps=2, batch_size=4, tensorboard=False)
    first = train(model(), TASK, config, folder, measure_end=False)
    assert not first.measured
    assert train(model(), TASK, config, folder, measure_end=False) == first
    (folder / "run.json").unlink()
    assert not train(model(), TASK, config, folder, measure_end=False).measured
    (folder / "run.json").unlink()
    found = train(model(), TASK, config, folder)
    assert found.measured
    assert found.final == {**first.final, "transfer": found.final["transfer"]}
    assert len(found.final["transfer"]) == 2


def test_the_estimate_counts_a_measurement_once_a_seed():
    spec = two_rates("unused", operators=("softmax",)).spec
    without, with_end = (estimate(spec, {"softmax": Timing(1.0, 0.0, 0.0, end)}, 10, 1) for end in (0.0, 7.0))
    assert with_end - without == 3 * 7.0
