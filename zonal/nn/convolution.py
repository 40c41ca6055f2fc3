"""The short causal convolution that lets a layer see its last few tokens."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.algebra.declaration import require_one_of
from zonal.errors import ArgumentError
from zonal.kernels.mixer import WIDEST, ConvolutionInputs, ConvolutionSpec, short_convolution
from zonal.nn.compiled import refusal
from zonal.nn.initialise import Draws
from zonal.nn.positions import check_masks, document_index, document_positions
from zonal.stretch import Stretch, Tensors, active


def _windows(x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """Every full window of x (B, T, C) under taps (C, w), oldest first.

    As an image of height 1 with its channels last, x needs no copy.
    """
    with torch.autocast(x.device.type, enabled=False):
        return (
            F.conv2d(x.transpose(1, 2).unsqueeze(2), taps[:, None, None], bias, groups=x.shape[2])
            .squeeze(2)
            .transpose(1, 2)
        )


class _Filter(torch.autograd.Function):
    """``_windows`` with a backward of its own: torch's, of a convolution a channel, takes several times as long on a
    CPU.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        return _windows(x, taps, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        x, taps, _ = inputs
        ctx.save_for_backward(x, taps)
        ctx.save_for_forward(x, taps)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor | None) -> Tensor:
        (x, taps), (dx, dtaps, dbias) = ctx.saved_tensors, grad_inputs
        parts = [
            None if dx is None else _windows(dx, taps, None),
            None if dtaps is None else _windows(x, dtaps, None),
            None if dbias is None else dbias.expand(x.shape[0], x.shape[1] - taps.shape[1] + 1, -1),
        ]
        return torch.stack([part for part in parts if part is not None]).sum(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, taps = ctx.saved_tensors
        grad, width = grad_outputs[0], taps.shape[1]
        dx = (
            _windows(F.pad(grad, (0, 0, width - 1, width - 1)), taps.flip(1), None) if ctx.needs_input_grad[0] else None
        )
        dtaps = None
        if ctx.needs_input_grad[1]:
            dtaps = torch.stack([(grad * x[:, i : i + grad.shape[1]]).sum((0, 1)) for i in range(width)], dim=1)
        return dx, dtaps, grad.sum((0, 1)) if ctx.needs_input_grad[2] else None


def _joined_tails(a: Tensors, count: int, b: Tensors, more: int) -> Tensors:
    """The tail after the tokens of two pieces: (B, w − 1, dim), and how many real tokens it has, (B,), at its end."""
    (older, before), (newer, real) = a, b
    gap = newer.shape[1]
    place = torch.arange(gap, device=newer.device) + real[:, None]
    moved = older.gather(1, place.clamp(max=gap - 1)[..., None].expand_as(older))
    return torch.where((place < gap)[..., None], moved, newer), (before + real).clamp(max=gap)


class _Read(NamedTuple):
    """Checked arguments of ``ShortConvolution.parts``."""

    x: Tensor
    sizes: list[int]
    heads: int
    tail: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None


class ShortConvolution(nn.Module):
    """A causal depthwise convolution: y_t = Σ_{i<w} a_i ⊙ x_{t−i} (+ b), optionally followed by SiLU.

    ``tail`` holds the w − 1 tokens before the first; it is zero for a new sequence. A sequence gives the same values in
    one pass, in pieces, and token by token. Padded tokens are skipped: they enter neither a window nor the tail, and
    their output is zero. Packed documents do not see each other.

    Other libraries differ: the ``BaseConv`` of zoology filters the layer input with a bias and no activation; fla
    filters q, k and v after their projections, with SiLU and without bias. Here the layer input is filtered, by default
    without bias and activation. All three start from torch's default for Conv1d, U(−1/√w, 1/√w).

    In float32 on a CPU, more than one token runs in a compiled kernel, forward and backward (``ZONAL_KERNELS=off``:
    torch).

    Args:
        dim: number of channels.
        width: w, the number of tokens in a window, at least 2.
        activation: None or "silu".
        bias: add b.

    Raises:
        ArgumentError: sizes or the activation are not as required.
    """

    def __init__(self, dim: int, width: int, activation: str | None = None, bias: bool = False) -> None:
        super().__init__()
        if dim < 1 or width < 2:
            raise ArgumentError(
                f"ShortConvolution: required dim >= 1 and width >= 2, received dim={dim}, width={width}."
            )
        require_one_of("ShortConvolution: activation", activation, (None, "silu"))
        self.dim = dim
        self.width = width
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(dim, width))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        draws.uniform_(self.weight, "weight", self.width**-0.5)
        if self.bias is not None:
            draws.uniform_(self.bias, "bias", self.width**-0.5)

    def empty_tail(
        self, batch: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """The tail of a new sequence: zeros (batch, w − 1, dim)."""
        return torch.zeros(
            batch, self.width - 1, self.dim, dtype=dtype or self.weight.dtype, device=device or self.weight.device
        )

    def forward(
        self,
        x: Tensor,
        tail: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Filter x.

        Args:
            x: (B, T, dim).
            tail: (B, w − 1, dim), the tokens before x. None: a new sequence.
            key_padding_mask: bool (B, T), True for a real token.
            cu_seqlens: (N + 1,) offsets of packed documents, for B = 1 and without ``tail``.

        Returns: y (B, T, dim) and the new tail (B, w − 1, dim), a copy that does not keep x alive.

        Raises:
            ArgumentError: shapes do not fit.
        """
        (y,), tail = self.parts(x, [self.dim], tail, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        return y.flatten(2), tail

    def parts(
        self,
        x: Tensor,
        sizes: list[int],
        tail: Tensor | None = None,
        *,
        heads: int = 1,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """``forward`` with y split into up to three parts of ``sizes`` channels. The first has shape
        (B, T, heads, size / heads). Each part is a tensor of its own, so its gradient needs no copy.

        Other arguments and errors are those of ``forward``.
        """
        if x.dim() != 3 or x.shape[2] != self.dim or x.shape[1] == 0:
            raise ArgumentError(
                f"ShortConvolution: x must be (batch, tokens >= 1, {self.dim}), received {tuple(x.shape)}."
            )
        if not 1 <= len(sizes) <= 3 or sum(sizes) != self.dim or sizes[0] % heads:
            raise ArgumentError(
                f"ShortConvolution: sizes must be 1 to 3 numbers that sum to {self.dim}, the first a multiple of "
                f"heads; received {sizes}, {heads}."
            )
        batch, length, _ = x.shape
        check_masks("ShortConvolution", batch, length, key_padding_mask, cu_seqlens)
        if tail is not None and cu_seqlens is not None:
            raise ArgumentError(
                "ShortConvolution: packed documents (cu_seqlens) start afresh and take no tail. Pass one of the two."
            )
        if tail is not None and tail.shape != (batch, self.width - 1, self.dim):
            raise ArgumentError(
                f"ShortConvolution: tail must be {(batch, self.width - 1, self.dim)}, received {tuple(tail.shape)}."
            )
        tail = None if tail is None else tail.to(x.dtype)
        read, stretch = _Read(x, sizes, heads, tail, key_padding_mask, cu_seqlens), active()
        return self._filtered(read) if stretch is None else self._continued(stretch, read)

    def _filtered(self, read: _Read) -> tuple[list[Tensor], Tensor]:
        x, mask = read.x, read.mask
        order = None if mask is None else torch.argsort(~mask, dim=1, stable=True)  # slot -> token
        present = None if mask is None else mask.sum(dim=1)
        compiled = x.shape[1] > 1 and self.width <= WIDEST and refusal(x, read.tail, self.weight, self.bias) is None
        y = self._compiled(read, order, present) if compiled else self._by_torch(read, order)
        return y, self._after(x, read.tail, order, present, read.cu_seqlens)

    def _continued(self, stretch: Stretch, read: _Read) -> tuple[list[Tensor], Tensor]:
        """``parts`` of a stretch of longer sequences: its first document continues from the tail of earlier ones."""
        x, _, _, _, mask, cu_seqlens = read
        cut = stretch.cut(x, x.shape[1], cu_seqlens)
        own, real = x[:, cut.last :], torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        tail = self.empty_tail(x.shape[0], x.dtype, x.device)
        if own.shape[1]:
            present = real + own.shape[1] if mask is None else mask[:, cut.last :].sum(1)
            order = None if mask is None else torch.argsort(~mask[:, cut.last :], dim=1, stable=True)
            tail, real = self._after(own, None, order, present, None), present.clamp(max=self.width - 1)
        tail, _ = stretch.before((tail, real), _joined_tails, (x,))
        head = None if mask is None else mask[:, : cut.head]
        y, after = self._filtered(read._replace(x=x[:, : cut.head], tail=tail, mask=head, cu_seqlens=None))
        if cut.rest is None:
            return y, after
        others, after = self._filtered(read._replace(x=x[:, cut.head :], tail=None, mask=None, cu_seqlens=cut.rest))
        return [torch.cat(both, 1) for both in zip(y, others, strict=True)], after

    def _compiled(self, read: _Read, order: Tensor | None, present: Tensor | None) -> list[Tensor]:
        """In one pass over x, without copies of what windows see."""
        x, sizes, heads, tail, _, cu_seqlens = read
        reach = None if cu_seqlens is None else document_positions(cu_seqlens, x.shape[1])
        places = (None if each is None else each.to(torch.int32) for each in (order, present, reach))
        inputs = ConvolutionInputs(x, tail, self.weight, self.bias, *places)
        y = short_convolution(inputs, ConvolutionSpec(self.activation == "silu", heads, tuple(sizes)))
        return list(y[: len(sizes)])

    def _after(
        self, x: Tensor, tail: Tensor | None, order: Tensor | None, present: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The last w − 1 tokens that are there, of the last document, with the tail before them."""
        gap = self.width - 1
        tail = x.new_zeros(x.shape[0], gap, self.dim) if tail is None else tail
        if order is None or present is None:
            last = x[:, -gap:] if cu_seqlens is None else x[:, max(int(cu_seqlens[-2]), x.shape[1] - gap) :]
            return torch.cat((tail[:, last.shape[1] :], last), dim=1)
        # places in the tail and the tokens behind it
        last = present[:, None] + torch.arange(gap, device=x.device)
        token = order.gather(1, (last - gap).clamp(min=0))
        old = tail.gather(1, last.clamp(max=gap - 1)[..., None].expand(-1, -1, self.dim))
        return torch.where((last < gap)[..., None], old, x.gather(1, token[..., None].expand(-1, -1, self.dim)))

    def _by_torch(self, read: _Read, order: Tensor | None) -> list[Tensor]:
        x, sizes, heads, tail, mask, cu_seqlens = read
        tail = x.new_zeros(x.shape[0], self.width - 1, self.dim) if tail is None else tail
        if cu_seqlens is not None:
            y = self._packed(x, cu_seqlens)
        elif mask is not None and order is not None:
            y = self._padded(x, tail, mask, order)
        else:
            y = self._filter(torch.cat((tail, x), dim=1))
        first, *others = y.split(sizes, dim=2)
        return [first.unflatten(2, (heads, -1)), *others]

    def _filter(self, extended: Tensor) -> Tensor:
        """(B, w − 1 + T, dim) -> (B, T, dim): every full window."""
        taps = self.weight.to(extended.dtype)
        bias = None if self.bias is None else self.bias.to(extended.dtype)
        if extended.shape[1] == self.width:  # one token: a convolution call costs more than its arithmetic
            y = (extended * taps.flip(1).t()).sum(dim=1, keepdim=True)
            y = y if bias is None else y + bias
        elif extended.device.type == "cpu":
            y = _Filter.apply(extended, taps.flip(1), bias)
            assert isinstance(y, Tensor)
        else:
            y = F.conv1d(extended.transpose(1, 2), taps.flip(1)[:, None], bias, groups=self.dim).transpose(1, 2)
        return F.silu(y) if self.activation == "silu" else y

    def _padded(self, x: Tensor, tail: Tensor, mask: Tensor, order: Tensor) -> Tensor:
        """Move real tokens to the front of their rows, filter, and move them back."""
        x = x.masked_fill(~mask[..., None], 0.0)
        extended = torch.cat((tail, x.gather(1, order[..., None].expand_as(x))), dim=1)
        y = self._filter(extended)
        back = torch.argsort(order, dim=1)  # token -> slot
        return y.gather(1, back[..., None].expand_as(y)).masked_fill(~mask[..., None], 0.0)

    def _packed(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Put w − 1 zeros before every document, filter, and take them out."""
        length, gap = x.shape[1], self.width - 1
        documents = cu_seqlens.numel() - 1
        place = torch.arange(length, device=x.device) + (document_index(cu_seqlens, length) + 1) * gap
        spread = x.new_zeros(1, length + documents * gap, self.dim).index_copy(1, place, x)
        return self._filter(spread)[:, place - gap]

    def extra_repr(self) -> str:
        return f"{self.dim}, width={self.width}, activation={self.activation}, bias={self.bias is not None}"
