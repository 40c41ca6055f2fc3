"""Causal sums over features, block by block: y_t = sum_s D_ts l(q_t . k_s) v_s in time linear in the number of tokens.

Within a block the link is applied to the scores. Earlier tokens enter as phi(q) times the carried state
S = sum phi(k) v^T. Coefficients of the polynomial scale the state and not the features: m P numbers instead of C m.
Backward computes the features again, block by block in reverse, from states kept at a few checkpoints. No array of size
T x m is ever held.

Decays enter as D_ts = exp(c_t - c_s), with c the running sum of log decays. As y scales with exp(c_t) and each v_s with
exp(-c_s), dL/dc_t = dy_t . y_t - v_t . dv_t.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.link import Link
from zonal.features import SymmetricPowers
from zonal.kernels.op import no_second_derivative

# numbers of features, or scores, of one block
_BLOCK_ELEMENTS = 1 << 25


class Step(NamedTuple):
    """Keys [s0, s1) and queries [t0, t1). Queries read the carried state and, if ``within``, these keys, then added."""

    s0: int
    s1: int
    t0: int
    t1: int
    within: bool


class Rule(NamedTuple):
    """Which keys a query at position p sees: all; s <= p; s < p; or s < chunk floor(p / chunk).

    offset: the position of the first query.
    """

    tied: bool
    include_self: bool
    chunk: int | None
    offset: int

    def mask(self, step: Step, device: torch.device) -> Tensor:
        """(queries, keys) bool of a step."""
        p = torch.arange(step.t0, step.t1) + self.offset
        s = torch.arange(step.s0, step.s1)
        if self.chunk is not None:
            p = torch.div(p, self.chunk, rounding_mode="floor") * self.chunk
        seen = s <= p[:, None] if self.include_self and self.chunk is None else s < p[:, None]
        return seen.to(device)

    def steps(self, queries: int, keys: int, block: int) -> tuple[Step, ...]:
        """The blocks in the order in which they run."""
        if not self.tied:
            absorb = [Step(s, min(s + block, keys), 0, 0, False) for s in range(0, keys, block)]
            return (*absorb, *(Step(0, 0, t, min(t + block, queries), False) for t in range(0, queries, block)))
        base = self.offset
        if self.chunk is not None:
            # the first query's chunk starts before it, and none of that chunk's keys may be carried to it
            base = self.offset // self.chunk * self.chunk
            block = self.chunk * max(1, block // self.chunk)
        steps = [Step(s, min(s + block, base), 0, 0, False) for s in range(0, base, block)]
        for s in range(base, keys, block):
            stop = min(s + block, keys)
            within = self.chunk is None or stop - s > self.chunk
            steps.append(Step(s, stop, max(0, s - self.offset), stop - self.offset, within))
        return tuple(steps)


class Job(NamedTuple):
    """What a scan runs, apart from the tensors that get gradients."""

    features: SymmetricPowers
    link: Link
    rule: Rule
    groups: int
    block: int
    wanted: bool  # the final state is asked for


def block_size(features: SymmetricPowers, shape: tuple[int, int, int, int, int], fresh: bool) -> int:
    """Tokens per block for (B, H, S, D, P). Long blocks pass over the state less often, but their scores cost C^2: they
    pay off with many features only.

    fresh: no state is carried in or out. One block over everything then needs no features, best for short sequences.
    """
    batch, heads, keys, dim, value_dim = shape
    size = features.dimension(dim)
    block = 64 if size <= 128 else 128 if size <= 1024 else 256
    while block > 32 and batch * heads * block * size > _BLOCK_ELEMENTS:
        block //= 2
    # multiply-adds a token: scores and values against two passes over the state and (memory-bound) features
    whole, parts = keys * (dim + value_dim), block * (dim + value_dim) + 2 * size * (value_dim + 4)
    if fresh and whole <= parts and batch * heads * keys * keys <= _BLOCK_ELEMENTS:
        return max(keys, 1)
    return block


class _Block(NamedTuple):
    """The tensors of a step: q (B, Hkv, G C, D), k, v, and the factors of its decay, None without decay.

    row: e^{c_t}; tail: e^{c_end - c_s}; whole: e^{c_end}.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    row: Tensor | None
    tail: Tensor | None
    whole: Tensor | None
    apart: Tensor | None  # (B, Hkv, 1, t, s): e^{c_t - c_s}
    within: bool


class _Scan:
    """The arithmetic of one call, shared by forward and backward."""

    def __init__(self, job: Job, q: Tensor, k: Tensor, v: Tensor, monomials: Tensor, decay: Tensor | None) -> None:
        self.job, self.q, self.k, self.v, self.decay = job, q, k, v, decay
        self.batch, self.heads, self.queries, self.dim = q.shape
        self.kv = k.shape[1]
        self.steps = job.rule.steps(self.queries, k.shape[2], job.block)
        self.scale: Tensor | None = None
        if not job.features.trivial:
            scale = job.features.scale(monomials, self.dim)
            # one row for all heads, or one a query head
            self.scale = (
                scale.view(1, 1, 1, -1, 1) if scale.shape[0] == 1 else scale.view(1, self.kv, job.groups, -1, 1)
            )
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def block(self, step: Step) -> _Block:
        q = self.q[:, :, step.t0 : step.t1].unflatten(1, (self.kv, self.job.groups)).flatten(2, 3)
        k, v = self.k[:, :, step.s0 : step.s1], self.v[:, :, step.s0 : step.s1]
        row = tail = whole = apart = None
        within = step.within and step.t1 > step.t0
        if self.decay is not None and step.s1 > step.s0:
            running = self.decay[..., step.s0 : step.s1].cumsum(-1)
            end = running[..., -1:]
            tail, whole = (end - running).exp().to(v).unsqueeze(-1), end.exp().to(v).unsqueeze(-1)
            at = running[..., step.t0 + self.job.rule.offset - step.s0 : step.t1 + self.job.rule.offset - step.s0]
            row = at.exp().to(v).unsqueeze(-1).repeat(1, 1, self.job.groups, 1)
            if within:
                # towards later keys this may overflow, and is cut away with them
                apart = (at.unsqueeze(-1) - running.unsqueeze(-2)).to(v.dtype).exp_().unsqueeze(2)
        return _Block(q, k, v, row, tail, whole, apart, within)

    def cut(self, kernel: Tensor, step: Step) -> Tensor:
        """kernel (…, t, s) with zeros where nothing is seen; in place where its storage is its own."""
        rule = self.job.rule
        if rule.chunk is None:  # s <= t + distance: far faster than a mask
            distance = step.t0 + rule.offset - step.s0 - (0 if rule.include_self else 1)
            return kernel.tril_(distance) if kernel.is_contiguous() else kernel.tril(distance)
        # blocks start at whole chunks, so the mask depends on the distance alone
        key = (step.t0 + rule.offset - step.s0, step.t1 - step.t0, step.s1 - step.s0)
        if key not in self._masks:
            self._masks[key] = ~rule.mask(step, self.q.device)
        return kernel.masked_fill(self._masks[key], 0)

    def scores(self, block: _Block) -> Tensor:
        """(B, H, t, s)."""
        score = (block.q @ block.k.mT).view(self.batch, self.heads, -1, block.k.shape[2])
        return score if self.job.link.domain is None else score.clamp_(*self.job.link.domain)

    def priored(self, kernel: Tensor, block: _Block, step: Step) -> Tensor:
        """The kernel (B, H, t, s) with mask and decay, as (B, Hkv, G t, s)."""
        if block.apart is not None:
            kernel = kernel.view(self.batch, self.kv, self.job.groups, *kernel.shape[2:]) * block.apart
        return self.cut(kernel, step).reshape(self.batch, self.kv, -1, kernel.shape[-1])

    def scaled(self, state: Tensor) -> Tensor:
        """The state with the query head's coefficients: (B, Hkv, 1 or G, m, P)."""
        return state.unsqueeze(2) if self.scale is None else state.unsqueeze(2) * self.scale

    def against(self, rows: Tensor, state: Tensor) -> Tensor:
        """rows (B, Hkv, G t, x) @ state (B, Hkv, 1 or G, x, y)."""
        if state.shape[2] == 1:
            return rows @ state[:, :, 0]
        return (rows.unflatten(2, (self.job.groups, -1)) @ state).flatten(2, 3)

    def advanced(self, state: Tensor | None, step: Step) -> Tensor | None:
        """The state after a step's keys."""
        if step.s1 == step.s0:
            return state
        block = self.block(step._replace(t0=0, t1=0))
        v = block.v if block.tail is None else block.v * block.tail
        phi = self.job.features.write(block.k)
        if state is None:
            return phi.mT @ v
        return (state if block.whole is None else state * block.whole) + phi.mT @ v

    def empty(self) -> Tensor:
        """The state before the first key."""
        return self.q.new_zeros(self.batch, self.kv, self.job.features.dimension(self.dim), self.v.shape[-1])

    def backwards(self, kept: Sequence[Tensor | None], stride: int) -> Iterator[tuple[Step, Tensor | None]]:
        """Steps from the last to the first, each with the state before it, from the states at every so many steps."""
        for part in range(len(kept) - 1, -1, -1):
            first = part * stride
            segment, states = self.steps[first : first + stride], [kept[part]]
            for index, step in enumerate(segment[:-1], first):
                states.append(self.advanced(states[-1], step) if self.needs_state(index) else states[-1])
            yield from zip(reversed(segment), reversed(states), strict=True)

    def needs_state(self, index: int) -> bool:
        """Whether anything reads the state after step ``index``."""
        return self.job.wanted or any(step.t1 > step.t0 for step in self.steps[index + 1 :])


class _Gradients:
    """Gradients of one call, added up from its last step to its first.

    state: the gradient with respect to the state after the step that comes next.
    """

    def __init__(self, scan: _Scan, c: Tensor, state: Tensor | None, *, needs_c: bool, needs_scale: bool) -> None:
        self.scan, self.coefficients, self.state = scan, c, state
        self.q, self.k, self.v = torch.zeros_like(scan.q), torch.zeros_like(scan.k), torch.zeros_like(scan.v)
        self.c = torch.zeros_like(c, dtype=torch.float64) if needs_c else None
        self.scale: Tensor | None = None
        if needs_scale and scan.scale is not None:  # (Hkv, 1 or G, m)
            self.scale = scan.q.new_zeros(scan.kv, *scan.scale.shape[2:4], dtype=torch.float64)

    def add(self, step: Step, state: Tensor | None, dy: Tensor) -> None:
        """Add what a step gives. state: the one before it, which its queries read; dy: of its queries, (B, H, t, P)."""
        scan, block = self.scan, self.scan.block(step)
        if self.state is not None and step.s1 > step.s0:
            self.state = self._absorbed(step, block, self.state)
        if step.t1 == step.t0:
            return
        dy = dy.unflatten(1, (scan.kv, scan.job.groups)).flatten(2, 3)
        dq = None if state is None else self._past(block, state, dy)
        if block.within:
            near = self._near(step, block, dy)
            dq = near if dq is None else dq + near
        if dq is not None:
            self.q[:, :, step.t0 : step.t1] = dq.view(scan.batch, scan.heads, -1, scan.dim)

    def _absorbed(self, step: Step, block: _Block, dstate: Tensor) -> Tensor:
        """Through the state after the step, which has its keys; returned with respect to the state before them."""
        features, keys = self.scan.job.features, slice(step.s0, step.s1)
        weighted = block.v if block.tail is None else block.v * block.tail
        self.k[:, :, keys] += features.vjp(block.k, weighted @ dstate.mT)
        dweighted = features.write(block.k) @ dstate
        self.v[:, :, keys] += dweighted if block.tail is None else dweighted * block.tail
        return dstate if block.whole is None else dstate * block.whole

    def _past(self, block: _Block, state: Tensor, dy: Tensor) -> Tensor:
        """Through what the queries read from the state; returned with respect to them."""
        scan, features = self.scan, self.scan.job.features
        faded = dy if block.row is None else dy * block.row
        scaled, phi = scan.scaled(state), features.write(block.q)
        if scaled.shape[2] == 1:
            moved = (phi.mT @ faded).unsqueeze(2)
        else:
            moved = phi.unflatten(2, (scan.job.groups, -1)).mT @ faded.unflatten(2, (scan.job.groups, -1))
        if self.scale is not None:
            self.scale += (moved * state.unsqueeze(2)).sum(-1).double().sum(0)
        back = (moved if scan.scale is None else moved * scan.scale).sum(2)
        self.state = back if self.state is None else self.state + back
        return features.vjp(block.q, scan.against(faded, scaled.mT))

    def _near(self, step: Step, block: _Block, dy: Tensor) -> Tensor:
        """Through what the queries read from the keys of their own step; returned with respect to them."""
        scan, link, keys = self.scan, self.scan.job.link, slice(step.s0, step.s1)
        scores = scan.scores(block)
        kernel = scores if scan.job.features.trivial else link.value(scores, self.coefficients)
        self.v[:, :, keys] += scan.priored(kernel, block, step).mT @ dy
        ds = scan.priored((dy @ block.v.mT).view(scan.batch, scan.heads, -1, block.k.shape[2]), block, step)
        if not scan.job.features.trivial:
            whole = ds.view(scores.shape)
            if self.c is not None:
                self.c += link.coefficient_vjp(scores, whole, self.coefficients).sum_to_size(self.c.shape)
            ds = (whole * link.derivative(scores, self.coefficients)).view(ds.shape)
        self.k[:, :, keys] += ds.mT @ block.q
        return ds @ block.k

    def of_monomials(self, monomials: Tensor) -> Tensor | None:
        """The gradient of the link's monomials (degrees, 1 or H), from that of the factors of the state."""
        if self.scale is None:
            return None
        # sum over the axis that the coefficients do not have: one row for all heads, or one a head
        rows = self.scale.flatten(0, 1)
        rows = rows if monomials.shape[1] > 1 else rows.sum(0, keepdim=True)
        return self.scan.job.features.scale_vjp(rows, self.scan.dim, monomials.shape[0]).to(monomials)


def _stride(scan: _Scan) -> int:
    """Backward keeps the state every so many steps: every step while states are small, else about the square root."""
    size = scan.job.features.dimension(scan.dim) * scan.v.shape[-1] * scan.batch * scan.kv
    inputs = scan.q.numel() + scan.k.numel() + scan.v.numel()
    return 1 if size * len(scan.steps) <= 2 * inputs else math.isqrt(len(scan.steps) - 1) + 1


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        c: Tensor,
        monomials: Tensor,
        decay: Tensor | None,
        state: Tensor | None,
        job: Job,
    ) -> tuple[Tensor, Tensor | None]:
        scan = _Scan(job, q, k, v, monomials, decay)
        y = q.new_zeros(*q.shape[:3], v.shape[-1])
        recorded = any(ctx.needs_input_grad)
        stride = _stride(scan)
        kept: list[Tensor | None] = []
        for index, step in enumerate(scan.steps):
            if recorded and index % stride == 0:
                kept.append(state)
            if step.t1 > step.t0:
                block = scan.block(step)
                out = None
                if block.within:
                    scores = scan.scores(block)
                    kernel = scores if job.features.trivial else job.link.value(scores, c)
                    out = scan.priored(kernel, block, step) @ block.v
                if state is not None:
                    past = scan.against(job.features.write(block.q), scan.scaled(state))
                    past = past if block.row is None else past * block.row
                    out = past if out is None else out.add_(past)
                if out is not None:
                    y[:, :, step.t0 : step.t1] = out.view(scan.batch, scan.heads, -1, v.shape[-1])
            if step.s1 > step.s0 and scan.needs_state(index):
                state = scan.advanced(state, step)
        final = None if not job.wanted else scan.empty() if state is None else state
        ctx.job, ctx.stride, ctx.empty = job, stride, [s is None for s in kept]
        extra = (y, final) if decay is not None else (None, None)
        ctx.save_for_backward(q, k, v, c, monomials, decay, *extra, *(s for s in kept if s is not None))
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        no_second_derivative("chunked")
        q, k, v, c, monomials, decay, y, final, *stored = ctx.saved_tensors
        needs, job = ctx.needs_input_grad, ctx.job
        scan = _Scan(job, q, k, v, monomials, decay)
        dfinal = dfinal if job.wanted else None
        found = _Gradients(scan, c, dfinal, needs_c=needs[3], needs_scale=needs[4])
        left = iter(stored)
        for step, state in scan.backwards([None if empty else next(left) for empty in ctx.empty], ctx.stride):
            found.add(step, state, dy[:, :, step.t0 : step.t1])
        ddecay = _decay_gradient(scan, dy, y, found.v, dfinal, final) if decay is not None and needs[5] else None
        initial = None if not needs[6] else scan.empty() if found.state is None else found.state
        dc = None if found.c is None else found.c.to(c)
        return found.q, found.k, found.v, dc, found.of_monomials(monomials), ddecay, initial, None


def _decay_gradient(
    scan: _Scan, dy: Tensor, y: Tensor, dv: Tensor, dfinal: Tensor | None, final: Tensor | None
) -> Tensor:
    """Gradient with respect to each token's log decay, (B, Hkv, S) float64."""
    running = -(scan.v * dv).sum(-1).double()
    rows = (dy * y).sum(-1).double().unflatten(1, (scan.kv, scan.job.groups)).sum(2)
    offset = scan.job.rule.offset
    running[..., offset : offset + rows.shape[-1]] += rows
    if dfinal is not None and final is not None and running.shape[-1]:
        running[..., -1] += (dfinal * final).sum((-1, -2)).double()
    return running.flip(-1).cumsum(-1).flip(-1)


def scan(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, decay: Tensor | None, state: Tensor | None, job: Job
) -> tuple[Tensor, Tensor | None]:
    """(y (B, H, T, P), final state or None) for q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, P).

    decay: (B, Hkv, S) float64.
    """
    monomials = coefficients if job.features.trivial else job.link.monomials(coefficients)
    return _Function.apply(q, k, v, coefficients, monomials, decay, state, job)


__all__ = ["Job", "Rule", "Step", "block_size", "scan"]
