"""Calls that would not fit into memory say by how much, before they allocate."""

import sys
from pathlib import Path

import pytest
import torch

import zonal
from zonal import device_memory, features
from zonal import mechanisms as m
from zonal.errors import InsufficientMemoryError, ZonalError
from zonal.execution import machine


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "free", lambda device: 1 << 30)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory is free")
def test_what_is_free_is_less_than_all() -> None:
    left = device_memory.free("cpu")
    assert left is not None
    assert 1 << 20 < left <= machine.memory(torch.device("cpu"))


def test_devices_that_do_not_say_what_is_free() -> None:
    assert device_memory.free("meta") is None
    assert torch.cuda.is_available() or device_memory.free("cuda") is None


def test_what_the_system_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:      42 kB\n")
    assert device_memory._available(meminfo) == [42 * 1024]
    assert device_memory._available(tmp_path / "none") == []
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert device_memory._left(tmp_path) == [100]
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory._left(tmp_path) == []
    assert device_memory._left(tmp_path / "none") == []


@pytest.mark.usefixtures("small_machine")
def test_both_numbers_are_said() -> None:
    device_memory.require("call", "things", 1 << 29, "cpu", "Use fewer.")
    with pytest.raises(
        InsufficientMemoryError, match=r"^call: things take 3\.0 GiB, and 1\.0 GiB of memory are free\. Use fewer\.$"
    ) as caught:
        device_memory.require("call", "things", 3 << 30, "cpu", "Use fewer.")
    assert isinstance(caught.value, ZonalError)
    assert isinstance(caught.value, MemoryError)


def test_small_calls_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(device_memory, "free", asked.append)
    device_memory.require("call", "things", 1 << 20, "cpu", "")
    assert not asked
    device_memory.require("call", "things", 1 << 40, "cpu", "")  # nobody knows what is free
    assert asked == ["cpu"]


@pytest.mark.usefixtures("small_machine")
def test_features_of_all_tokens() -> None:
    """2 * 100000 tokens * 2048 features * 4 bytes; vectors of zeros that take no memory themselves."""
    x = torch.zeros(1, 1, 1, 8).expand(1, 1, 100_000, 8)
    with pytest.raises(
        InsufficientMemoryError,
        match=r"attention: 2048 features for each of 100000 vectors.* take 1\.5 GiB, and 1\.0 GiB",
    ):
        zonal.attention(x, x, x, m.slay(scale="large", anew=True))  # its features are made by torch


@pytest.mark.usefixtures("small_machine")
def test_sums_and_landmarks() -> None:
    with pytest.raises(
        InsufficientMemoryError, match=r"Memory: sums over 2048 features for 1000 sequences of 8 heads take 4\.0 GiB"
    ):
        zonal.Memory.empty(m.slay(scale="large", dim=8), 1000, 8, 8, 64)
    with pytest.raises(
        InsufficientMemoryError, match=r"Nystrom\.prepare: 20000 landmarks for each of 1 heads take 8\.9 GiB"
    ):
        features.Nystrom(20_000).prepare(8)
