"""What tests draw without a seed is the same in every run, and another for each test."""

import random
import zlib

import numpy as np
import pytest
import torch


@pytest.mark.parametrize("case", ["a", "b"])
def test_draws_follow_the_name(case: str, seeded: int) -> None:
    assert seeded == zlib.crc32(f"tests/test_seeds.py::test_draws_follow_the_name[{case}]".encode())
    drawn = random.random(), np.random.random(), torch.rand(())
    random.seed(seeded)
    np.random.seed(seeded)
    torch.manual_seed(seeded)
    assert drawn == (random.random(), np.random.random(), torch.rand(()))
