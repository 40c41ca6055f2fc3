"""The short convolution: one pass, pieces, single tokens, padding and packing are one function."""

import pytest
import torch

from zonal.errors import ArgumentError
from zonal.nn import Attention, ShortConvolution


def by_hand(x, weight):
    """y_t = Σ_i a_i x_{t−i}, token by token."""
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for i in range(min(weight.shape[1], t + 1)):
            y[:, t] += weight[:, i] * x[:, t - i]
    return y


def make(dim=5, width=3, activation=None):
    torch.manual_seed(0)
    return ShortConvolution(dim, width, activation).double()


@pytest.mark.parametrize("width", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 13])
def test_equals_the_sum_over_taps(width, length):
    conv = make(width=width)
    x = torch.randn(2, length, 5, dtype=torch.float64)
    torch.testing.assert_close(conv(x)[0], by_hand(x, conv.weight), rtol=1e-12, atol=1e-12)


def test_silu_follows_when_asked():
    conv = make(activation="silu")
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(conv(x)[0], torch.nn.functional.silu(by_hand(x, conv.weight)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pieces", [[13], [1] * 13, [5, 8], [1, 1, 11], [12, 1], [2, 3, 1, 7]])
@pytest.mark.parametrize("width", [2, 3, 7])
def test_pieces_with_a_tail_equal_one_pass(pieces, width):
    conv = make(width=width)
    x = torch.randn(2, 13, 5, dtype=torch.float64)
    tail, parts = conv.empty_tail(2), []
    for piece in x.split(pieces, dim=1):
        y, tail = conv(piece, tail)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), conv(x)[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tail, conv(x)[1], rtol=0, atol=0)
    assert tail.untyped_storage().nbytes() == 2 * (width - 1) * 5 * 8  # the tail is a copy, not a view that keeps x


def test_packed_documents_equal_separate_ones():
    conv = make(width=4)
    lengths = [1, 5, 2, 3, 1]
    documents = [torch.randn(1, n, 5, dtype=torch.float64) for n in lengths]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    packed, tail = conv(torch.cat(documents, dim=1), cu_seqlens=offsets)
    torch.testing.assert_close(packed, torch.cat([conv(d)[0] for d in documents], dim=1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tail, conv(documents[-1])[1], rtol=0, atol=0)


def mask_from(rows):
    return torch.tensor([[token == "x" for token in row] for row in rows])


@pytest.mark.parametrize(
    "rows",
    [["xxxxxx", "..xxxx"], ["....xx", ".....x"], ["xxxx..", "x....."], ["x.x.xx", ".xx.x."], ["......", "xxxxxx"]],
    ids=["left", "short", "right", "holes", "empty"],
)
@pytest.mark.parametrize("filled", [False, True])
def test_padded_tokens_do_not_exist(rows, filled):
    conv = make(width=4)
    mask = mask_from(rows)
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    tail = conv(torch.randn(2, 5, 5, dtype=torch.float64))[1] if filled else conv.empty_tail(2)
    y, after = conv(x, tail, key_padding_mask=mask)
    for row in range(2):
        real = mask[row]
        assert torch.equal(y[row, ~real], torch.zeros_like(y[row, ~real]))
        if real.any():
            expected, expected_tail = conv(x[row : row + 1, real], tail[row : row + 1])
            torch.testing.assert_close(y[row, real], expected[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(after[row], expected_tail[0], rtol=0, atol=0)
        else:
            torch.testing.assert_close(after[row], tail[row], rtol=0, atol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients(masked):
    conv = make(width=3)
    x = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)
    tail = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    mask = mask_from(["..xxx", "xx.x."]) if masked else None
    assert torch.autograd.gradcheck(
        lambda a, b, w: torch.func.functional_call(conv, {"weight": w}, (a, b), {"key_padding_mask": mask}),
        (x, tail, conv.weight),
    )


def test_non_finite_padding_does_not_leak():
    conv = make()
    x = torch.randn(1, 4, 5, dtype=torch.float64)
    x[0, 0] = float("nan")
    y, _ = conv(x, key_padding_mask=mask_from([".xxx"]))
    y.sum().backward()
    assert y.isfinite().all()
    assert conv.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c(torch.zeros(2, 3, 4)), "x must be"),
        (lambda c: c(torch.zeros(2, 3)), "x must be"),
        (lambda c: c(torch.zeros(2, 0, 5)), "tokens >= 1"),
        (lambda c: c(torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)), "tail must be"),
        (lambda c: c(torch.zeros(1, 3, 5), c.empty_tail(1), cu_seqlens=torch.tensor([0, 3])), "no tail"),
        (lambda c: c(torch.zeros(2, 3, 5), cu_seqlens=torch.tensor([0, 3])), "batch 1"),
        (lambda c: c(torch.zeros(1, 3, 5), cu_seqlens=torch.tensor([0, 2])), "packed length 3"),
        (lambda c: c(torch.zeros(1, 3, 5), cu_seqlens=torch.tensor([0, 2, 2, 3])), "packed length 3"),
        (lambda c: c(torch.zeros(1, 3, 5), cu_seqlens=torch.tensor([0.0, 3.0])), "whole numbers"),
        (lambda c: c(torch.zeros(2, 3, 5), key_padding_mask=torch.ones(2, 3)), "boolean"),
        (lambda c: c(torch.zeros(2, 3, 5), key_padding_mask=torch.ones(3, 2, dtype=torch.bool)), r"\(2, 3\)"),
        (
            lambda c: c(
                torch.zeros(1, 3, 5),
                key_padding_mask=torch.ones(1, 3, dtype=torch.bool),
                cu_seqlens=torch.tensor([0, 3]),
            ),
            "exclude",
        ),
        (lambda c: ShortConvolution(4, 1), "width >= 2"),
        (lambda c: ShortConvolution(4, 3, "relu"), "silu"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call(ShortConvolution(5, 3))


@pytest.mark.parametrize("operator", ["softmax", "linear", "local_global(window=3)"])
@pytest.mark.parametrize("position", [0, 7])
@torch.no_grad()
def test_a_row_that_is_only_padding_keeps_its_tail_in_a_merge(operator: str, position: int) -> None:
    layer = Attention(12, 2, operator, rotary=True, conv=3).double()
    first, second, next_token = (torch.randn(2, length, 12, dtype=torch.float64) for length in (5, 6, 1))
    real = torch.tensor([[True], [False]]).expand(2, 6)
    start = layer(first, layer.empty_memory(2).at(9))[1]
    read = layer(second, layer.empty_memory(2).at(position), key_padding_mask=real)[1]
    merged = start.merge(read, span="second")
    for memory in (merged, merged.merge(read, span="third").forget("third")):
        torch.testing.assert_close(layer(next_token, memory=memory)[0][1], layer(next_token, memory=start)[0][1])
