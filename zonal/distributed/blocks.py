"""The queries of one rank and the keys of another: a block of a call, by the kernel of tiles or by torch's tiles."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.anchor import Raw
from zonal.algebra.prior import Bias, Intervals, Visibility
from zonal.execution.paths import tile, tiled
from zonal.execution.paths.tiled import Gradients, Parts
from zonal.kernels.tile import TileInputs, TileSpec
from zonal.kernels.tile import tile as kernel

Keys = tuple[Tensor, ...]
"""mask (B, 1, S), k (B, Hkv, S, D), v (B, Hkv, S, P), and where there is one the log prior (B or 1, H, S)."""


class Part(NamedTuple):
    """What rows have read of some keys: y (B, H, T, P), and their factor (B, H, T, 1) as tiles have it: of sums, or for
    kernels in log space that are normalised the logarithm of the row's sum."""

    y: Tensor
    factor: Tensor


@dataclass(frozen=True)
class BlockRules:
    """What the blocks of a call have in common.

    parts: of torch's tiles. compiled: the rules of the kernel for a rank's own keys; None where torch's tiles run.
    inside: offsets of the documents within the rank's stretch.
    """

    parts: Parts
    compiled: TileSpec | None
    inside: tuple[int, ...]

    @property
    def online(self) -> bool:
        """Whether factors are logarithms of sums."""
        return self.parts.log and self.parts.anchor.normalises

    def joined(self, a: Part, b: Part) -> Part:
        """What rows have read of both sets of keys. Rows without keys have the factor +inf for logarithms, else 0."""
        if isinstance(self.parts.anchor, Raw):
            return Part(a.y + b.y, a.factor)
        if self.online:
            logs = [x.factor.masked_fill(x.factor.isinf(), float("-inf")) for x in (a, b)]
            log = torch.logaddexp(*logs)
            empty = log.isinf()
            share, factor = (logs[1] - log.masked_fill(empty, 0)).exp(), log.masked_fill(empty, float("inf"))
        else:
            masses = [torch.where(x.factor == 0, 0, 1 / x.factor) for x in (a, b)]
            mass = masses[0] + masses[1]
            share = torch.where(mass == 0, 0, masses[1] / mass)
            factor = torch.where(b.factor == 0, a.factor, torch.where(a.factor == 0, b.factor, 1 / mass))
        # so that rows of one part keep its bits: gradients of a row that sees one key cancel to zero
        return Part(a.y + (b.y - a.y) * share, factor)


class _Given(NamedTuple):
    """A block as the kernel takes it: the first ``queries``, and the keys from ``first`` on."""

    inputs: TileInputs
    spec: TileSpec
    queries: int
    first: int


@dataclass(frozen=True)
class Block:
    """The queries of a rank and some keys. made: the keys [lo, hi) of each query. own: whether they are the rank's."""

    rules: BlockRules
    keys: Keys
    made: Intervals
    own: bool

    @property
    def parts(self) -> Parts:
        """The parts of torch's tiles."""
        mask = self.keys[0][:, 0]
        seen = Visibility(self.made, mask.shape[1], None if bool(mask.all()) else mask)
        return self.rules.parts._replace(visibility=seen)

    def bias(self, row: Tensor | None) -> Bias:
        return Bias(row, self.keys[3] if len(self.keys) > 3 else None, self.rules.parts.slope)

    def given(self, q: Tensor, c: Tensor, row: Tensor | None) -> _Given | None:
        """What the kernel is given; None where torch's tiles run."""
        spec, slope, inside, edges = self.rules.compiled, self.rules.parts.slope, self.rules.inside, None
        if spec is None:
            return None
        queries, first, keys = q.shape[2], 0, self.keys[0].shape[2]
        if self.own:
            edges = torch.tensor(inside, dtype=torch.int64, device=q.device) if len(inside) > 2 else None
        else:  # the first queries see all keys from some key on, or torch's tiles run
            lo, hi, *_ = self.made
            queries, first = int((hi > lo).sum()), int(lo[0])
            whole = (lo[:queries] == first) & (hi[:queries] == keys)
            if slope is not None or not queries or not bool(whole.all()):
                return None
            spec = replace(spec, causal=False, left=None, right=None)
        mask, k, v, *col = (x[:, :, first:] for x in self.keys)
        mask = None if bool(mask.all()) else mask[:, 0]
        rows, row = tile.by_head(c, q.shape[1], spec.link), None if row is None else row[..., :queries]
        scale = torch.ones(q.shape[1], dtype=torch.float32, device=q.device)
        inputs = TileInputs(q[:, :, :queries], k, v, scale, rows, mask, edges, row, col[0] if col else None, slope)
        return _Given(inputs, spec, queries, first)

    def forward(self, q: Tensor, c: Tensor, row: Tensor | None) -> Part:
        """What queries (B, H, T, D) read of the keys. c: the link's coefficients; row: the log prior of rows."""
        given = self.given(q, c, row)
        if given is None:
            return Part(*tiled.run_forward(self.parts, self.bias(row), q, self.keys[1], self.keys[2], c)[:2])
        y, factor, _ = kernel.bodies[q.device.type].forward(given.inputs, given.spec)
        rest = q.shape[2] - given.queries
        empty = float("inf") if self.rules.online else 1.0 if isinstance(self.rules.parts.anchor, Raw) else 0.0
        return Part(F.pad(y, (0, 0, 0, rest)), F.pad(factor, (0, rest), value=empty)[..., None])

    def backward(
        self, inputs: tuple[Tensor, Tensor, Tensor | None], whole: Part, dy: Tensor, learned: bool
    ) -> Gradients:
        """Gradients of one block; q and row may be those of the first queries alone. inputs: q, c and row. whole: what
        the rows have read of all keys. learned: whether c has a gradient.
        """
        q, c, row = inputs
        given = self.given(*inputs)
        if given is None:
            bias, passed = self.bias(row), tiled.Passed(q, self.keys[1], self.keys[2], c, *whole, q.new_empty(0))
            return tiled.run_backward(
                self.parts, bias, passed, dy, c=learned, row=row is not None, col=bias.col is not None
            )
        names = ["q", "k", "v"] + ["coefficients"] * learned + ["row"] * (row is not None)
        names += ["col"] * (len(self.keys) > 3)
        some = slice(None, given.queries)
        results = whole.y[:, :, some].contiguous(), whole.factor[:, :, some, 0].contiguous(), q.new_empty(0)
        dq, dk, dv, _, dc, drow, dcol = kernel.bodies[q.device.type].backward(
            (dy[:, :, some].contiguous(),), given.inputs, results, given.spec, frozenset(names)
        )
        assert dq is not None
        assert dk is not None
        assert dv is not None
        before = given.first
        dk, dv = (F.pad(x, (0, 0, before, 0)) for x in (dk, dv))
        if dc is not None:  # (H, n and constants) -> (n, H or 1, 1, 1)
            dc = dc[:, : c.shape[0]].T[..., None, None].sum_to_size(c.shape)
        return Gradients(dq, dk, dv, dc, drow, None if dcol is None else F.pad(dcol, (before, 0)))


__all__ = ["Block", "BlockRules", "Keys", "Part"]
