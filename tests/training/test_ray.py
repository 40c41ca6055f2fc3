"""Work on two nodes of a Ray cluster is that of one process, also when a worker or a node is lost.

`make test-ray` installs Ray, which is an extra, and runs these.
"""

import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest
from test_ingest import SMALL, TEXTS, same, written
from training.search_and_be_killed import a_search
from training.test_comparisons import a_spec
from training.test_search import timeless
from training.training_doubles import lines

from zonal import ingest, store, workers
from zonal.errors import ArgumentError, ZonalError
from zonal.training import Comparison, TrainConfig
from zonal.training.search import Search

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra: make test-ray installs it"),
    pytest.mark.filterwarnings("default"),  # ray's own
]


@pytest.fixture(scope="module")
def nodes():
    """A cluster with a core on each of two nodes; the second one can be lost."""
    import ray
    from ray.cluster_utils import Cluster

    here = Path(__file__).parents[1]
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here.parent), str(here), before])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()
    os.environ["PYTHONPATH"] = before


def works(item: tuple[str, int]) -> tuple[int, int]:
    """Its process and the square; a kill, the first time, where the number is 3, and errors where it is below 0."""
    file, number = item
    if number < 0:
        raise (ArgumentError if number == -1 else ZeroDivisionError)("below 0")
    if number == 3 and not Path(file).exists():
        Path(file).write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid(), number * number


def test_a_killed_worker_is_replaced(nodes, tmp_path):
    assert workers.slots(1) == 2
    items = [(str(tmp_path / "died"), number) for number in range(8)]
    found = list(workers.mapped(works, items, "ray"))
    assert (tmp_path / "died").exists()
    assert [square for _, square in found] == [number * number for number in range(8)]
    assert os.getpid() not in {process for process, _ in found}
    with pytest.raises(ArgumentError, match="below 0"):
        list(workers.mapped(works, [("", -1)], "ray"))
    with pytest.raises(ZeroDivisionError, match="below 0"):
        list(workers.mapped(works, [("", -2)], "ray"))


def always_dies(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_an_item_that_kills_every_worker_is_named(nodes):
    with pytest.raises(ZonalError, match="a task of Ray was lost 4 times"):
        list(workers.mapped(always_dies, [1], "ray"))


def test_ingesting_gives_the_same_bits(nodes, tmp_path):
    root = written(tmp_path / "notes", TEXTS)
    here = ingest.ingest(root, tmp_path / "here", **SMALL).archive
    assert same(here, ingest.ingest(root, tmp_path / "there", workers="ray", **SMALL).archive)


@pytest.mark.parametrize("workers", [2, "ray"])
def test_a_search_goes_the_same_way(nodes, tmp_path, workers):
    Search(tmp_path / "whole", a_search()).run(threads=1)
    Search(tmp_path / "ray", a_search()).run(workers=workers, threads=1)
    assert timeless(tmp_path / "ray") == timeless(tmp_path / "whole")


@pytest.mark.timeout(900)  # a busy machine takes long to notice that a node is lost
def test_a_comparison_survives_the_loss_of_a_node(nodes, tmp_path):
    """One of two nodes is lost while each trains a run; its run goes on from its checkpoint, to the same numbers."""
    cluster, second = nodes
    training = TrainConfig(steps=800, batch_size=8, eval_every=400, learning_rate=1e-2, tensorboard=False,
                           checkpoint_every=20, checkpoint_seconds=None)  # fmt: skip
    spec = a_spec(training=training, operators=("softmax",))
    whole = Comparison(tmp_path / "whole", spec).run(threads=1)
    reached: dict[Path, int] = {}
    lost: dict[Path, int] = {}

    def watch() -> bool:
        for file in (tmp_path / "ray").glob("runs/*/*/checkpoint.safetensors"):
            step = store.read_header(file, "checkpoint")["progress"]["step"]
            assert step >= reached.get(file, 0), "a run began again before its checkpoint"
            reached[file] = step
        if not lost and sum(step < 700 for step in reached.values()) == 2:
            lost.update(reached)
            cluster.remove_node(second, allow_graceful=False)
        return False

    found = Comparison(tmp_path / "ray", spec).run(jobs="ray", threads=1, should_stop=watch)
    assert len(lost) == 2
    assert found.status == "done"
    assert [run.final for run in found.runs] == [run.final for run in whole.runs]
    for run in spec.runs():
        assert lines(tmp_path / "ray" / run.name) == lines(tmp_path / "whole" / run.name)
    deadline = time.monotonic() + 60
    while workers.slots(1) != 1 and time.monotonic() < deadline:  # Ray counts the lost node's core for some seconds
        time.sleep(0.2)
    assert workers.slots(1) == 1
    # a wish to stop ends the tasks; what is left is run by the next call
    seen = Comparison(tmp_path / "stopped", spec).run(jobs="ray", threads=1, should_stop=lambda: True)
    assert seen.status == "stopped"
