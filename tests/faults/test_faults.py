"""A few faults of `make faults`, the same in every run."""

import os
import random

import pytest
from faults.damage import damaged
from faults.kills import full_disks, kills

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forks")


@pytest.mark.parametrize(("name", "count"), [("train", 2), ("ingest of changed texts", 4), ("report", 3)])
def test_killed_commands_lose_nothing_and_give_the_same_bits(name, count, tmp_path):
    found = kills(name, tmp_path, count, random.Random(0))
    assert found["failures"] == []
    assert found["kills"] >= count


def test_a_full_disk_is_told_and_costs_nothing(tmp_path):
    found = full_disks("ingest", tmp_path, 3, random.Random(0))
    assert found["failures"] == []
    assert sum(found["said"].values()) >= 2


@pytest.mark.parametrize("name", ["memory", "archive/", "corpus/", "criterion"])
def test_damaged_files_are_refused_by_name(name, tmp_path):
    found = damaged(name, tmp_path, 8, random.Random(0))
    assert found["failures"] == []
    assert found["refused by name"] == 8
