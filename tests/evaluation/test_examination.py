import pytest
import torch

from zonal.errors import ArgumentError
from zonal.evaluation import Marks, examine
from zonal.tasks import Examined


def test_means_by_cell():
    marks = Marks()
    marks.add(Examined({"exact": [1.0, 0.0], "far": [3.0, 5.0]}, {"depth": [5, 5]}))
    marks.add(Examined({"exact": [1.0]}, {"depth": [9]}))
    marks.add(Examined({"exact": [1.0], "far": [1.0]}, {"depth": [5]}))
    assert marks.result() == [
        {"slices": {"depth": 5}, "values": {"exact": 2 / 3, "far": 3.0}, "examples": 3},
        {"slices": {"depth": 9}, "values": {"exact": 1.0}, "examples": 1},
    ]
    assert Marks().result() == []


@pytest.mark.parametrize(
    "found",
    [
        Examined({"exact": [1.0, 0.0]}, {"depth": [5, 6]}),
        Examined({"exact": [1.0]}, {"depth": [5, 5]}),
        Examined({"a": [1.0], "b": [1.0, 2.0]}, {}),
        Examined({}, {"depth": [5, 5]}),
        Examined({"a": []}, {}),
    ],
)
def test_batches_that_do_not_fit(found):
    with pytest.raises(ArgumentError, match="all rows of a batch"):
        Marks().add(found)


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ArgumentError, match="finite numbers are required, received others for far"):
        Marks().add(Examined({"exact": [1.0], "far": [float("nan")]}, {}))


def test_the_model_is_put_back():
    class Task:
        def examine(self, model, batch_size):
            assert not model.training
            assert not torch.is_grad_enabled()
            yield Examined({"rows": [float(batch_size)]}, {})

    model = torch.nn.Linear(1, 1)
    model.predict = None
    assert examine(model, Task(), batch_size=3) == [{"slices": {}, "values": {"rows": 3.0}, "examples": 1}]
    assert model.training
