"""The same run on two machines of one kind, which measured unlike rates, gives the same bits."""

from dataclasses import replace

import pytest
import torch
from training.training_doubles import Recall, lines, tiny_config, tiny_model

from zonal.execution import calibration
from zonal.execution.constants import DEFAULT_CPU
from zonal.training import train

CPU = torch.device("cpu")
# what two machines may have measured: on the second the compiled kernels seem slow
RATES = (DEFAULT_CPU, replace(DEFAULT_CPU, tile=1e-9, tile_call=1e-2, sums=1e-9, sums_call=1e-2))


def test_measured_rates_do_not_reach_the_numbers_of_a_run(tmp_path, monkeypatch):
    runs = []
    for number, rates in enumerate(RATES):
        monkeypatch.setattr(calibration, "_once", lambda *_, rates=rates: rates)
        model = tiny_model("ska(power=1)")
        train(model, Recall(), tiny_config(steps=2), tmp_path / str(number), threads=1)
        runs.append((lines(tmp_path / str(number)), [value.clone() for value in model.state_dict().values()]))
    (first, weights), (second, others) = runs
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_typical_rates_hold_inside_the_body_alone(monkeypatch):
    measured = replace(DEFAULT_CPU, note="measured")
    monkeypatch.setattr(calibration, "_once", lambda *_: measured)
    assert calibration.constants_for(CPU) is measured
    with pytest.raises(ZeroDivisionError), calibration.typical_rates():  # noqa: PT012
        inside = calibration.constants_for(CPU)
        assert inside == DEFAULT_CPU
        assert "typical" in inside.note
        assert calibration.constants_for(CPU) is inside
        raise ZeroDivisionError
    assert calibration.constants_for(CPU) is measured
