"""Base class of feature maps: phi_q(q) . phi_k(k) approximates a kernel, and sums over keys replace the keys.

A map is a frozen declaration. ``prepare`` makes everything that it draws, chooses or learns, once, as a dict of tensors
with one row per head. A module registers them (``learned`` names the parameters, the rest are buffers), so that they
are saved with the model and never drawn again. The same seed gives the same numbers on every device and for every
dtype.
"""

import abc
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.anchor import Anchor, Row
from zonal.algebra.declaration import Declaration, require, require_whole
from zonal.algebra.score import FeatureLayer
from zonal.errors import ArgumentError, PathError

Side = Literal["query", "key"]
Buffers = Mapping[str, Tensor]
NONE: Buffers = MappingProxyType({})


class Claim(NamedTuple):
    """What is known of phi_q . phi_k compared with ``kernel(x)``.

    kind: ``exact`` up to rounding; ``unbiased`` over seeds; ``biased``: ``kernel`` is only the limit or the fitted
    target; ``learned``: no kernel is claimed.
    text: the reason. error: the largest error relative to the target kernel, where known.
    """

    kind: Literal["exact", "unbiased", "biased", "learned"]
    text: str
    error: float | None = None


@dataclass(frozen=True)
class Source:
    """The source of numbers for ``prepare``: a seed, and keys for maps that use them, in float64 on the CPU.

    stand_in: use random directions for missing keys, to get the right shapes.
    """

    seed: int
    dim: int
    heads: int
    keys: Tensor | None  # (H, N, d)
    prefix: str = ""
    stand_in: bool = False

    def child(self, name: str) -> "Source":
        """The source of a part, with random numbers of its own."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def generator(self, name: str) -> torch.Generator:
        """The generator of ``stream``."""
        return stream(self.seed, f"{self.prefix}{name}")

    def normal(self, name: str, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator(name), dtype=torch.float64)

    def gaussian(self, count: int, orthogonal: bool, *, direction: str = "omega", length: str = "length") -> Tensor:
        """Vectors (H, count, d) of N(0, I). orthogonal: orthogonal within blocks of d, with lengths drawn apart.

        direction, length: the names by which these are drawn.
        """
        if not orthogonal:
            return self.normal("omega", self.heads, count, self.dim)
        lengths = self.normal(length, self.heads, count, self.dim).norm(dim=-1, keepdim=True)
        return self.units(direction, count, orthogonal=True) * lengths

    def integers(self, name: str, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator(name))

    def signs(self, name: str, *shape: int) -> Tensor:
        return self.integers(name, 2, *shape).double() * 2 - 1

    def units(self, name: str, count: int, orthogonal: bool = False) -> Tensor:
        """Unit vectors (H, count, d), uniform on the sphere. orthogonal: orthogonal within blocks of d."""
        if not orthogonal:
            return torch.nn.functional.normalize(self.normal(name, self.heads, count, self.dim), dim=-1)
        blocks = -(-count // self.dim)
        q, r = torch.linalg.qr(self.normal(name, self.heads, blocks, self.dim, self.dim))
        # the sign of R's diagonal makes Q uniform
        q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        return q.mT.reshape(self.heads, -1, self.dim)[:, :count].contiguous()

    def need_keys(self, call: str, at_least: int) -> Tensor:
        """The keys. Raises: ArgumentError when there are none or too few, and for NaN and infinity."""
        if self.stand_in:
            return self.units("stand-in", at_least)
        if self.keys is None or self.keys.shape[-2] < at_least:
            have = "none" if self.keys is None else f"{self.keys.shape[-2]}"
            raise ArgumentError(
                f"{call}: at least {at_least} keys per head are required, received {have}. "
                "Pass prepare(keys=...) of shape (N, dim) or (heads, N, dim)."
            )
        require(
            bool(self.keys.isfinite().all()),
            f"{call}: finite keys are required, received NaN or infinity. Leave them out.",
        )
        return self.keys


class FeatureMap(Declaration, abc.ABC, abstract=True):
    """phi_q and phi_k of a kernel. A subclass gives ``dimension``, ``flops``, ``claim``, ``kernel`` and ``__call__``.

    Shapes: x (…, H, T, d), buffers (H, …) or (1, …), phi (…, H, T, m). For grouped heads, repeat the rows of key heads
    for queries.
    ``trivial``: phi(x) = x on both sides. ``unit``: the claim and the positivity hold for vectors of length one only.
    ``learned``: names in ``prepare`` that are trained. ``chosen``: names in ``prepare`` that are taken from given keys.
    ``nonnegative``: every feature is >= 0, so that rounding cannot make phi_q . phi_k negative. ``alike``: the products
    phi_q,i phi_k,i of all features i have the same expectation over seeds.
    """

    slot: ClassVar[str] = "features"
    trivial: ClassVar[bool] = False
    unit: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ()
    chosen: ClassVar[tuple[str, ...]] = ()
    nonnegative: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    claim: ClassVar[Claim]

    @property
    def positive(self) -> bool:
        """Whether phi_q(q) . phi_k(k) >= 0 for all q and k, in exact arithmetic."""
        return self.nonnegative

    @abc.abstractmethod
    def dimension(self, dim: int) -> int:
        """m, the number of features of a vector of ``dim`` numbers."""

    def factors(self, dim: int) -> int:
        """How many numbers the features of a vector are products of, in ``layer``."""
        return self.dimension(dim)

    @abc.abstractmethod
    def flops(self, dim: int) -> int:
        """Additions, multiplications and elementary functions for the features of one vector."""

    @abc.abstractmethod
    def kernel(self, x: Tensor, dim: int) -> Tensor:
        """The kernel of ``claim`` at x = q . k. Raises: ArgumentError for a map that claims none."""

    @abc.abstractmethod
    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        """phi(x), with a graph for x and for what is learned in ``buffers``."""

    def layer(self, buffers: Buffers, side: Side) -> FeatureLayer | None:
        """The map as the kernel for features of one layer computes it, from vectors as they are; None = by torch."""
        return None

    def draw(self, source: Source) -> dict[str, Tensor]:
        """The buffers in float64 (or int64), one row per head."""
        return {}

    def prepare(
        self,
        dim: int,
        heads: int = 1,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        keys: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Everything that the map draws, chooses or learns, each (heads, …), for heads of size ``dim``.

        keys: (N, dim) or (heads, N, dim), as the score prepares them. Maps that choose landmarks from data require
        them.

        Raises: ArgumentError for sizes that do not fit.
        """
        call = f"{type(self).__name__}.prepare"
        _check_sizes(call, dim, heads)
        require(dtype.is_floating_point, f"{call}: a floating type is required, received {dtype}.")
        if keys is not None:
            require(
                keys.shape[-1] == dim and (keys.dim() == 2 or (keys.dim() == 3 and keys.shape[0] == heads)),
                f"{call}: keys must be (N, {dim}) or ({heads}, N, {dim}), received {tuple(keys.shape)}.",
            )
            keys = keys.detach().to("cpu", torch.float64).expand(heads, -1, -1)
        drawn = self.draw(Source(seed, dim, heads, keys))
        return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in drawn.items()}

    def start(self, dim: int, heads: int = 1, *, seed: int = 0) -> dict[str, Tensor]:
        """``prepare`` in float32 for a map without keys: values to be chosen from keys have their shape and are NaN."""
        _check_sizes(type(self).__name__, dim, heads)
        drawn = self.draw(Source(seed, dim, heads, None, stand_in=bool(self.chosen)))
        drawn |= {name: torch.full_like(drawn[name], torch.nan) for name in self.chosen}
        return {name: value.float() if value.is_floating_point() else value for name, value in drawn.items()}

    def query(self, q: Tensor, buffers: Buffers = NONE) -> Tensor:
        """phi_q(q), with a graph."""
        return self(q, buffers, "query")

    def key(self, k: Tensor, buffers: Buffers = NONE) -> Tensor:
        """phi_k(k), with a graph."""
        return self(k, buffers, "key")

    def refusal(self, anchor: Anchor) -> str | None:
        """Why this map may not serve an anchor, or None. Anchors that divide by a sum need nonnegative features."""
        if self.positive or not anchor.normalises or (isinstance(anchor, Row) and anchor.allow_signed):
            return None
        return (
            f"features {type(self).__name__} can make kernel values negative, and anchor {type(anchor).__name__} "
            "divides by their sum: it may vanish or turn negative, and outputs then grow without bound. Use a map "
            "whose positive is True, anchor.Count() or anchor.Raw(), or Row(allow_signed=True) if you accept such rows"
        )

    def check(self, call: str, anchor: Anchor) -> None:
        """Raise PathError if ``refusal`` gives a reason."""
        reason = self.refusal(anchor)
        if reason is not None:
            raise PathError(f"{call}: {reason}.")


def _check_sizes(call: str, dim: int, heads: int) -> None:
    require_whole(f"{call}: dim", dim)
    require_whole(f"{call}: heads", heads)


def stream(seed: int, name: str) -> torch.Generator:
    """A generator seeded by SHA-256 of (seed, qualified name), so equal on every machine."""
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def part(buffers: Buffers, prefix: str) -> dict[str, Tensor]:
    """The buffers of a part that were stored under ``prefix_``."""
    return {name.removeprefix(f"{prefix}_"): value for name, value in buffers.items() if name.startswith(f"{prefix}_")}


def under(prefix: str, buffers: Buffers) -> dict[str, Tensor]:
    """The inverse of ``part``."""
    return {f"{prefix}_{name}": value for name, value in buffers.items()}


def repeat_heads(buffers: Buffers, groups: int) -> dict[str, Tensor]:
    """Rows of key heads repeated for the query heads that share them: head h belongs to row h // groups."""
    return {
        name: value.repeat_interleave(groups, 0) if value.shape[0] > 1 else value for name, value in buffers.items()
    }


__all__ = ["NONE", "Buffers", "Claim", "FeatureMap", "Side", "Source", "part", "repeat_heads", "stream", "under"]
