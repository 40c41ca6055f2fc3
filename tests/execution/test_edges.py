"""Inputs at the edge: queries that see no key, padding that holds NaN, rows of nearly no mass, axes of size zero."""

import pytest
import torch
from matrix import OPERATORS
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError, PathError

PATHS = ("dense", "tiled", "chunked", "streaming")


def tokens(queries: int, keys: int, dim: int = 4, value_dim: int = 3, heads: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, queries, dim), (2, heads, keys, dim), (2, heads, keys, value_dim))
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return q, k, v


WINDOWS = {"open": prior.Window(left=1), "own": prior.Window(left=0), "closed": prior.Window(1, 0)}


@pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["softmax", "squared_affine", "distance", "softmax-top", "ridge", "sinkhorn"])
def test_a_window_with_more_queries_than_keys(name: str, window: str, causal: bool) -> None:
    """The first queries stand before the first key: they see what a window leaves open, else nothing, and read zeros."""
    operator = OPERATORS[name]().replace(prior=WINDOWS[window])
    if causal and operator.tags.couples:
        return
    q, k, v = tokens(9, 3)
    exact = zonal.attention(q, k, v, operator.double(), causal=causal, path="dense")
    blind = 5 if window == "closed" or causal else 0
    assert bool((exact[:, :, :blind] == 0).all())
    for dtype in (torch.float64, torch.float32):
        cast, low = operator.to(dtype), [x.to(dtype) for x in (q, k, v)]
        for path in (*PATHS, "auto"):
            try:
                y = zonal.attention(*low, cast, causal=causal, path=path)
            except PathError:
                continue
            allowed = 1e-10 if dtype == torch.float64 else 1e-4 if operator.tags.couples else 2e-6  # a plan is found up to its tolerance
            error = float((y.double() - exact).detach().abs().max())
            assert error <= allowed, f"{path} in {dtype} is off by {error:.3g}"
            assert bool((y[:, :, :blind] == 0).all())


@pytest.mark.parametrize("held", [1, 6])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_memory_read_by_more_queries_than_new_keys(window: str, held: int) -> None:
    """As all keys at once, or refused where the window has let go of keys that the first queries see."""
    operator = m.softmax(prior=WINDOWS[window]).float()
    q, k, v = (x.float() for x in tokens(5, held + 2))
    exact = zonal.attention(q, k, v, operator, path="dense")
    _, memory = zonal.attention(q[:, :, :0], k[:, :, :held], v[:, :, :held], operator, return_memory=True)
    if held == 6:
        with pytest.raises(ArgumentError, match="a memory with a window has let go of the first"):
            zonal.attention(q, k[:, :, held:], v[:, :, held:], operator, memory=memory)
    else:
        y, _ = zonal.attention(q, k[:, :, held:], v[:, :, held:], operator, memory=memory)
        torch.testing.assert_close(y, exact, rtol=0, atol=2e-6)
