"""Checks that the tests of several layers share. ``alone(u)`` is the layer on one sequence u, by definition."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Alone = Callable[[Tensor], Tensor]
Tolerance = dict[str, float]
TOLERANCE: Tolerance = {"rtol": 1e-9, "atol": 1e-9}


def tokens(batch: int = 2, length: int = 13, dim: int = 12, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_gradients(
    layer: nn.Module, path: str, alone: Alone, values: Tolerance = TOLERANCE, gradients: Tolerance = TOLERANCE
) -> None:
    """A path gives the definition's output and all its gradients, none of which is zero."""
    u = tokens().requires_grad_()
    weight, leaves = tokens(seed=8), [u, *layer.parameters()]
    expected, y = alone(u), layer(u, path=path)
    torch.testing.assert_close(y, expected, **values)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    got = torch.autograd.grad((y * weight).sum(), leaves)
    for name, one, other in zip(["u", *dict(layer.named_parameters())], got, wanted, strict=True):
        assert other.abs().max() > 0, name
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}", **gradients)


def check_causal(layer: nn.Module) -> None:
    """No output depends on a later token."""
    u = tokens()
    y = layer(u)
    for t in (0, 5, 12):
        changed = u.clone()
        changed[:, t:] = 30 * tokens(seed=9)[:, t:]  # large norms: a maximum over the sequence would leak here
        difference = (layer(changed) - y).abs().amax(dim=(0, 2))
        assert not t or difference[:t].max() < 1e-10
        assert difference[t:].max() > 1e-3


def check_pieces(layer: nn.Module, split: list[int], alone: Alone, tolerance: Tolerance = TOLERANCE) -> None:
    """Pieces with a memory that fades equal one pass."""
    u = tokens()
    memory, parts = layer.empty_memory(2), []
    for piece in u.split(split, dim=1):
        y, memory = layer(piece, memory=memory)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), alone(u), **tolerance)
    assert (memory.length, memory.memory.count, memory.memory.kind) == (13, 13, "decayed")


def check_documents(
    layer: nn.Module, last: int, alone: Alone, path: str = "auto", tolerance: Tolerance = TOLERANCE
) -> None:
    """Packed documents, the last one of ``last`` tokens, equal separate ones."""
    documents = [tokens(1, n, seed=n) for n in (1, 5, 2, last)]
    packed = layer(torch.cat(documents, dim=1), cu_seqlens=torch.tensor([0, 1, 6, 8, 8 + last]), path=path)
    torch.testing.assert_close(packed, torch.cat([alone(d) for d in documents], dim=1), **tolerance)


def check_padding(layer: nn.Module, side: str, alone: Alone) -> None:
    """Padding changes nothing."""
    u, filler = tokens(1, 9), 50 * tokens(1, 4, seed=5)
    padded = torch.cat((filler, u) if side == "left" else (u, filler), dim=1)
    mask = torch.tensor([[False] * 4 + [True] * 9 if side == "left" else [True] * 9 + [False] * 4])
    y = layer(padded, key_padding_mask=mask)
    assert y.isfinite().all()
    torch.testing.assert_close(y[mask], alone(u)[0], **TOLERANCE)


def check_rows(layer: nn.Module, alone: Alone, filler: Tensor, tolerance: Tolerance = TOLERANCE) -> None:
    """Rows of unequal length in one memory, padded on the left or on the right, go on as if each were alone; gradients
    are finite.

    filler (3, 9, 12): what padding holds.
    """
    rows = [tokens(1, 9, seed=3), tokens(1, 5, seed=4), tokens(1, 1, seed=5)]
    more, u, mask = tokens(3, 4, seed=6), filler.clone(), torch.zeros(3, 9, dtype=torch.bool)
    for index, (row, side) in enumerate(zip(rows, ["left", "right", "left"], strict=True)):
        place = slice(9 - row.shape[1], 9) if side == "left" else slice(0, row.shape[1])
        mask[index, place] = True
        u[index, place] = row
    y, memory = layer(u.requires_grad_(), return_memory=True, key_padding_mask=mask)
    assert torch.autograd.grad(y.square().sum(), u)[0].isfinite().all()
    holes = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
    first, memory = layer(more[:, :3], memory=memory, key_padding_mask=holes)
    second, memory = layer(more[:, 3:], memory=memory)
    for index, row in enumerate(rows):
        whole = torch.cat((row, more[index : index + 1, :3][:, holes[index]], more[index : index + 1, 3:]), dim=1)
        got = torch.cat((y[index][mask[index]], first[index][holes[index]], second[index]))
        torch.testing.assert_close(got, alone(whole)[0], **tolerance)


def check_bfloat16(layer: nn.Module, autocast: bool) -> None:
    """Under autocast, or in bfloat16 itself, a layer stays near float32 and trains."""
    layer, u = layer.float(), tokens(1, 40).float()
    expected = layer(u)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = layer(u) if autocast else layer.bfloat16()(u.bfloat16())
    assert y.dtype == torch.bfloat16
    assert 0 < (y.float() - expected).norm() / expected.norm() < 0.05
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
