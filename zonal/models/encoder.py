"""Bidirectional models: a stack of blocks in which every token sees all tokens, merging of tokens between layers, and
an image classifier.
"""

import dataclasses
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.algebra import Operator
from zonal.algebra.declaration import require, require_whole
from zonal.errors import ArgumentError
from zonal.models import files
from zonal.models.config import from_fields
from zonal.models.layers import layer_list
from zonal.names import known_names
from zonal.nn import Attention, Block, Draws, Merged, MergeSchedule, RMSNorm, SwiGLU
from zonal.nn.norm import accumulation_dtype
from zonal.nn.positions import check_masks


@known_names
class Encoder(nn.Module):
    """Pre-norm blocks of bidirectional attention, and a norm. It adds no positions; add them to the input.

    Args:
        dim: width of the residual stream.
        operator: one operator per layer, each an ``Operator`` or a spec. A single string such as "softmax*3, sinkhorn"
            is read as a list.
        heads, kv_heads, head_dim, qk_dim, qk_norm: as in ``nn.Attention``, for every layer.
        hidden: hidden size of the SwiGLU of each block. None: 8/3 dim, rounded up to a multiple of 8.
        merge: the tokens to merge before each layer, unless a call gives another schedule. None: no merging.
        eps: ε of the norms.

    block: the class of the blocks.

    Raises:
        ArgumentError: sizes do not fit, an operator is unknown, or the schedule has another number of layers.
    """

    block: type[Block] = Block

    def __init__(
        self,
        dim: int,
        operator: str | Sequence[Operator | str],
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_dim: int | None = None,
        qk_norm: bool = False,
        hidden: int | None = None,
        merge: MergeSchedule | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        operators = layer_list(operator, "Encoder") if isinstance(operator, str) else tuple(operator)
        require(len(operators) > 0, "Encoder: at least one operator is required, one a layer, received none.")
        hidden = 8 * math.ceil(dim / 3) if hidden is None else hidden
        self.dim, self.merge = dim, merge
        self.blocks = nn.ModuleList(
            self.block(
                Attention(dim, heads, one, kv_heads=kv_heads, head_dim=head_dim, qk_dim=qk_dim, qk_norm=qk_norm,
                causal=False), SwiGLU(dim, hidden), eps
            )
            for one in operators
        )  # fmt: skip
        self.norm = RMSNorm(dim, eps)
        self._check_schedule(merge)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights except those of the operators."""
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            block.reset_parameters(draws.child(f"blocks.{index}"))
        self.norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        merge: MergeSchedule | None = None,
        path: str = "auto",
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim). After merging, each token gets the result of its bucket.

        Args:
            x: (B, T, dim).
            key_padding_mask: bool (B, T), True for a real token.
            merge: a schedule for this call. ``MergeSchedule((0.0,) * layers)`` merges nothing.
            path: the execution path of ``zonal.attention``.

        Raises:
            ArgumentError: tokens are merged and an operator cannot read merged tokens (see ``nn.Attention``).
        """
        return self.merged(x, key_padding_mask=key_padding_mask, merge=merge, path=path).unmerged()

    def merged(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        merge: MergeSchedule | None = None,
        path: str = "auto",
    ) -> Merged:
        """The result of ``forward`` per bucket. Arguments as there."""
        return deque(self.states(x, key_padding_mask=key_padding_mask, merge=merge, path=path), maxlen=1).pop()

    def states(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        merge: MergeSchedule | None = None,
        path: str = "auto",
    ) -> Iterator[Merged]:
        """The input of each block, before tokens are merged for it, and the result. Arguments as in ``forward``."""
        schedule = self.merge if merge is None else merge
        self._check_schedule(schedule)
        if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] != self.dim:
            raise ArgumentError(
                f"Encoder: x (B, T, {self.dim}) with at least one token is required, received {tuple(x.shape)}."
            )
        check_masks("Encoder", x.shape[0], x.shape[1], key_padding_mask, None)
        counts = (x.shape[1],) * len(self.blocks) if schedule is None else schedule.counts(x.shape[1])
        state = Merged.of(x, key_padding_mask)
        for block, count in zip(self.blocks, counts, strict=True):
            yield state
            state = state.without(state.x.shape[1] - count)
            if state.x.shape[1] == x.shape[1]:
                state = state.holding(block(state.x, key_padding_mask=key_padding_mask, path=path))
            else:
                state = state.holding(block(state.x, mass=state.mass, path=path))
        yield state.holding(self.norm(state.x))

    def _check_schedule(self, schedule: MergeSchedule | None) -> None:
        if schedule is None:
            return
        if not isinstance(schedule, MergeSchedule):
            raise ArgumentError(
                f"Encoder: merge must be a MergeSchedule or None, received {schedule!r}. Pass MergeSchedule(rates)."
            )
        if len(schedule.rates) != len(self.blocks):
            raise ArgumentError(
                f"Encoder: a schedule with one rate per layer is required, {len(self.blocks)} of them, received "
                f"{len(schedule.rates)}. MergeSchedule.even(share, {len(self.blocks)}) makes one."
            )


@known_names
@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The shape of a vision transformer that classifies images.

    Args:
        image: height and width of an image in pixels, a multiple of ``patch``.
        patch: height and width of a patch, which becomes one token.
        channels: channels of an image.
        classes: number of classes.
        dim, heads, qk_norm, hidden: as in ``Encoder``.
        layers: the specs of the operators, as in ``Encoder``.
        merge: rates of a ``MergeSchedule``, one per layer. (): no merging.
        init_std: standard deviation of initial weights. None: 1 / √dim. Projections into the residual stream get
            init_std / √(2 · layers).

    Raises:
        ArgumentError: a field is not as required; the message names the field, what is required and what was given.
    """

    image: int = 28
    patch: int = 4
    channels: int = 1
    classes: int = 10
    dim: int = 64
    layers: tuple[str, ...] = ("softmax",) * 4
    heads: int = 4
    qk_norm: bool = False
    hidden: int | None = None
    merge: tuple[float, ...] = ()
    init_std: float | None = None

    def __post_init__(self) -> None:
        for field in ("image", "patch", "channels", "classes", "dim", "heads"):
            require_whole(f"VisionConfig: {field}", getattr(self, field))
        require(
            self.image % self.patch == 0, f"VisionConfig: patch must divide image={self.image}, received {self.patch}."
        )
        require(
            self.init_std is None or self.init_std > 0,
            f"VisionConfig: init_std must be > 0 or None, received {self.init_std}.",
        )
        object.__setattr__(
            self,
            "layers",
            layer_list(self.layers, "VisionConfig") if isinstance(self.layers, str) else tuple(self.layers),
        )
        object.__setattr__(self, "merge", tuple(self.merge))

    @property
    def tokens(self) -> int:
        """Number of patches of an image."""
        return (self.image // self.patch) ** 2

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**dataclasses.asdict(self), "layers": list(self.layers), "merge": list(self.merge)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "VisionConfig":
        """The config that ``to_dict`` wrote.

        Raises:
            ArgumentError: fields are unknown or missing; the message names them.
        """
        return from_fields(cls, fields)


@known_names
class VisionEncoder(nn.Module):
    """Patches, learned positions, an ``Encoder``, the mean over patches, and a linear head.

    Source: Dosovitskiy et al. 2021, arXiv 2010.11929, without a class token.

    stack: the class of the encoder.
    """

    stack: type[Encoder] = Encoder

    def __init__(self, config: VisionConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Linear(config.channels * config.patch**2, config.dim)
        self.positions = nn.Parameter(torch.empty(config.tokens, config.dim))
        self.encoder = self.stack(
            config.dim,
            config.layers,
            config.heads,
            qk_norm=config.qk_norm,
            hidden=config.hidden,
            merge=MergeSchedule(config.merge) if config.merge else None,
        )
        self.head = nn.Linear(config.dim, config.classes)
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all weights, and the random features of operators. With a seed, each is drawn from a stream named by its
        qualified name.
        """
        std = self.config.dim**-0.5 if self.config.init_std is None else self.config.init_std
        draws = Draws(std, std * (2 * len(self.config.layers)) ** -0.5, seed)
        # a patch's numbers are of order 1: so are tokens then
        draws.normal_(self.patches.weight, "patches.weight", std=self.patches.in_features**-0.5)
        draws.normal_(self.positions, "positions", std=0.1)
        nn.init.zeros_(self.patches.bias)
        draws.linear_(self.head, "head")
        self.encoder.reset_parameters(draws.child("encoder"))

    def forward(self, images: Tensor, *, merge: MergeSchedule | None = None, path: str = "auto") -> Tensor:
        """images (B, channels, image, image) -> logits (B, classes). merge and path as in ``Encoder.forward``."""
        return self.head(self.encoder.merged(self.tokens(images), merge=merge, path=path).pooled())

    def loss(
        self, images: Tensor, labels: Tensor, *, merge: MergeSchedule | None = None, path: str = "auto"
    ) -> tuple[Tensor, int]:
        """Cross-entropy in nats, summed over images, and the number of images; in float32 or better. labels: int64
        (B,), from 0 to classes - 1.

        Raises:
            ArgumentError: shapes, dtypes or labels do not fit.
        """
        if labels.shape != images.shape[:1] or labels.dtype != torch.int64:
            raise ArgumentError(
                f"VisionEncoder.loss: one int64 label per image is required, ({len(images)},), received "
                f"{labels.dtype} of shape {tuple(labels.shape)}."
            )
        if bool(((labels < 0) | (labels >= self.config.classes)).any()):
            raise ArgumentError(
                f"VisionEncoder.loss: labels must lie in [0, {self.config.classes}), received {int(labels.min())} … "
                f"{int(labels.max())}. Leave images without a label out."
            )
        logits = self(images, merge=merge, path=path)
        loss = F.cross_entropy(logits.to(accumulation_dtype(logits.dtype)), labels, reduction="sum")
        return loss, len(labels)

    def tokens(self, images: Tensor) -> Tensor:
        """The input of the encoder: patches with their positions, (B, patches, dim)."""
        size, patch = self.config.image, self.config.patch
        if images.ndim != 4 or images.shape[1:] != (self.config.channels, size, size) or not images.is_floating_point():
            raise ArgumentError(
                f"VisionEncoder: images must be floating numbers (batch, {self.config.channels}, {size}, "
                f"{size}), received {images.dtype} of shape {tuple(images.shape)}."
            )
        return self.patches(F.unfold(images, patch, stride=patch).mT) + self.positions

    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights and config to one safetensors file, completely or not at all."""
        files.save(path, "vision model", self, self.config.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "VisionEncoder":
        """The model that ``save`` wrote, on the CPU.

        Raises:
            FileFormatError: the file is missing, damaged, or not a vision encoder.
        """
        return files.load(path, "vision model", lambda config: cls(VisionConfig.from_dict(config)))


__all__ = ["Encoder", "VisionConfig", "VisionEncoder"]
