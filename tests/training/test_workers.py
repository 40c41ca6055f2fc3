"""What is asked of Ray, which is an extra: a stand-in for its module notes it. ``test_ray`` runs on a cluster."""

import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

from zonal import workers
from zonal.errors import ZonalError


class UnreadTaskError(TypeError):
    """Ray's error where a machine lacks what a task needs."""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A cluster of a machine with 2 cores and one with 4, which runs a task when it is asked for its result."""
    asked = SimpleNamespace(cores=[])

    def remote(*, num_cpus: int, max_retries: int) -> object:
        asked.cores.append(num_cpus)
        return lambda function: SimpleNamespace(remote=lambda *given: (function, given))

    errors = ModuleType("ray.exceptions")
    errors.RayError, errors.RayTaskError = OSError, TypeError  # type: ignore[attr-defined]
    errors.RaySystemError = UnreadTaskError  # type: ignore[attr-defined]
    module = ModuleType("ray")
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": True, "Resources": {"CPU": 4.0}},
             {"Alive": False, "Resources": {"CPU": 64.0}}, {"Alive": True, "Resources": {}}]  # fmt: skip
    vars(module).update(
        exceptions=errors, remote=remote, nodes=lambda: nodes, cluster_resources=lambda: {"CPU": 6.0},
        wait=lambda tasks, timeout: (tasks, []), get=lambda task: task[0](*task[1]), cancel=lambda task, force: None,
        is_initialized=lambda: False,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    asked.module = module
    return asked


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (4, 4), (8, 4)])
def test_a_task_asks_for_no_more_cores_than_a_machine_has(ray: SimpleNamespace, cores: int, expected: int) -> None:
    """One that asked for more waited without end."""
    assert list(workers.tasks(abs, [-1, 2, -3], cores=cores)) == [(0, 1), (1, 2), (2, 3)]
    assert ray.cores == [expected]


@pytest.mark.parametrize("error", [ConnectionError("No running instance.\nMore."), ValueError("Invalid address")])
def test_an_address_without_a_cluster_is_told(
    ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def init(**settings: object) -> None:
        raise error

    ray.module.init = init
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    told = r"no Ray cluster answers at RAY_ADDRESS=nowhere \((No|Invalid)[^\n]*remove it"
    with pytest.raises(ZonalError, match=told), workers.session(None, 1):
        raise AssertionError("there is no session")


def test_a_port_where_nothing_answers_is_told_without_asking_ray(
    ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself asks there for minutes; the stand-in has no ``init``."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for named in (address, f"ray://{address}"):
            monkeypatch.setenv("RAY_ADDRESS", named)
            with pytest.raises(ZonalError, match=f"RAY_ADDRESS={named} .*refused.*ray start"), workers.session(None, 1):
                raise AssertionError("there is no session")


def test_a_machine_without_the_library_is_told(ray: SimpleNamespace) -> None:
    def get(task: object) -> object:
        raise UnreadTaskError("ray::_called()\nSystem error:\nModuleNotFoundError: No module named 'zonal'\n")

    ray.module.get = get
    with pytest.raises(ZonalError, match=r"tasks of zonal \(ModuleNotFoundError: No module named 'zonal'\)\. Install"):
        list(workers.tasks(abs, [-1], cores=1))
