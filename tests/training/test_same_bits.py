"""The same run on two machines of one kind, which measured unlike rates, gives the same bits."""

from dataclasses import replace

import pytest
import torch
from training.training_doubles import Recall, lines, tiny_config, tiny_model

from zonal.execution import machine
from zonal.execution.machine import TYPICAL_CPU
from zonal.training import train

CPU = torch.device("cpu")
# what two machines may have measured: on the second the compiled kernels seem slow
RATES = (TYPICAL_CPU, replace(TYPICAL_CPU, compiled=1e7))


def test_measured_rates_do_not_reach_the_numbers_of_a_run(tmp_path, monkeypatch):
    runs = []
    for number, rates in enumerate(RATES):
        monkeypatch.setattr(machine, "_once", lambda *_, rates=rates: rates)
        model = tiny_model("ska(power=1)")
        train(model, Recall(), tiny_config(steps=2), tmp_path / str(number), threads=1)
        runs.append((lines(tmp_path / str(number)), [value.clone() for value in model.state_dict().values()]))
    (first, weights), (second, others) = runs
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_typical_rates_hold_inside_the_body_alone(monkeypatch):
    measured = replace(TYPICAL_CPU, note="measured")
    monkeypatch.setattr(machine, "_once", lambda *_: measured)
    assert machine.machine_for(CPU) is measured
    with pytest.raises(ZeroDivisionError), machine.typical_rates():  # noqa: PT012
        inside = machine.machine_for(CPU)
        assert inside == TYPICAL_CPU
        assert "typical" in inside.note
        assert machine.machine_for(CPU) is inside
        raise ZeroDivisionError
    assert machine.machine_for(CPU) is measured
