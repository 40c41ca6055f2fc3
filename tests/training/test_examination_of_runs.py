"""A finished run is examined by its task, with the model that it ends with."""

import pytest

from zonal import tasks
from zonal.evaluation import examine
from zonal.models import ModelConfig, build
from zonal.tasks import Ancestors, Lookup
from zonal.training import TrainConfig, train

CONFIG = TrainConfig(
    steps=3, batch_size=4, eval_every=2, tensorboard=False, checkpoint_seconds=None, checkpoint_every=1
)
EXPRESSIONS = tasks.resolve("sexpr", tasks.TaskSettings(depth=2, test_examples=3))
TASKS = [
    EXPRESSIONS,
    Lookup(Ancestors("carnivore"), pairs=2, questions=1, test_examples=3),
    tasks.resolve("periodic", tasks.TaskSettings(frequencies=1, length=8, test_examples=3)),
]


def model(task):
    return build(ModelConfig(task.vocab_size, dim=16, layers="softmax", heads=2, mlp="none", init_std=0.5), 0)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_last_evaluation_has_what_was_found(task, tmp_path):
    decoder = model(task)
    result = train(decoder, task, CONFIG, tmp_path)
    assert result.final is not None
    assert result.final["examined"] == examine(decoder, task, batch_size=4)
    assert all(cell["examples"] == 3 for cell in result.final["examined"])
    assert result.best is not None
    assert "examined" not in result.best


def test_stopped_while_being_examined_goes_on(tmp_path):
    def run(folder, calls):
        left = iter(range(calls))
        return train(model(EXPRESSIONS), EXPRESSIONS, CONFIG, folder, should_stop=lambda: next(left, None) is None)

    whole = train(model(EXPRESSIONS), EXPRESSIONS, CONFIG, tmp_path / "whole")
    # 3 updates and 2 evaluations of one batch each are asked about before the examination
    stopped = run(tmp_path / "a", 5)
    assert (stopped.status, stopped.steps_done) == ("stopped", 3)
    assert "examined" not in (stopped.final or {})
    finished = train(model(EXPRESSIONS), EXPRESSIONS, CONFIG, tmp_path / "a")
    assert finished.status == "done"
    assert finished.final == whole.final
