"""Reading a memory: values and, where asked for, a verdict on each query from evidence that the memory holds."""

import abc
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from zonal.algebra.operator import Bound
from zonal.errors import ArgumentError
from zonal.memory.criterion import Criterion, Evidence, bound_of, gap, is_share
from zonal.memory.form import FLOATS
from zonal.memory.rows import Batched
from zonal.names import known_names
from zonal.typed import check_tensors


class Reading(NamedTuple):
    """values (B, H, T, P); verdict (B, H, T) int8, values of ``Verdict``; support and residual (B, H, T) in [0, 1], the
    evidence.

    residual: None where there is nothing to compare the answer with. rate: the most of queries never stored that are
    decided; None for a memory with more tokens than were calibrated, the only thing that is compared. weight (B, H, T):
    the largest weight that a query gives to one stored key, without the first key of a sequence, to which trained
    models give what weight they have to spare; None for memories that do not keep keys, and for weights that may be
    negative or do not sum to 1. It decides no verdict.
    """

    values: Tensor
    verdict: Tensor
    support: Tensor
    residual: Tensor | None
    rate: float | None
    weight: Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Readable(Batched):
    """What a memory does with queries."""

    # --- verbs --------------------------------------------------------------------------------------------------------

    @overload
    def read(self, q: Tensor, *, report: Literal[False] = False, claim: None = None) -> Tensor: ...

    @overload
    def read(self, q: Tensor, *, report: Literal[True] | Criterion, claim: Tensor | None = None) -> Reading: ...

    @known_names
    def read(self, q: Tensor, *, report: bool | Criterion = False, claim: Tensor | None = None) -> Tensor | Reading:
        """What queries (B, H, T, D) get from all absorbed tokens, (B, H, T, P), each standing at the last absorbed
        position.

        report: with a criterion (True: the default one) a ``Reading``, which says of each query whether its answer is
        accepted, contradicted, or not known yet. Evidence carries no gradients. claim: values (B, H, T, P) to judge in
        place of the memory's own, before the anchor's factor per head: contradicted where the memory answers otherwise.

        Raises: ArgumentError for shapes, and where a memory of this kind holds no evidence.
        """
        if claim is not None and report is False:
            raise ArgumentError(
                "Memory.read: a claim is judged, not read. Ask for the verdict: read(q, report=True, claim=v)."
            )
        self._check_queries("read", q)
        bound = self.operator.bind(q.shape[1], self.form.heads)
        with torch.autocast(q.device.type, enabled=False):
            exact = q.to(torch.promote_types(q.dtype, torch.float32))
            prepared = bound.score.prepare_query(exact, bound.score_params, None)
            y = self.lookup(prepared, bound)
            factor = bound.anchor.output_scale(bound.anchor_params, bound.heads)
            values = (y if factor is None else y * factor.to(y).view(1, -1, 1, 1)).to(q.dtype)
            if report is False:
                return values
            criterion = Criterion() if report is True else report
            self._check_evidence("read")
            with torch.no_grad():
                verdict, evidence = self._judged(prepared, y, self._at_home(exact, bound), bound, criterion, claim)
                weight = self.largest_weight(prepared, bound)
            stated = criterion.tokens is not None and self.count <= criterion.tokens
            return Reading(values, verdict, *evidence, criterion.rate if stated else None, weight)

    def support(self, q: Tensor) -> Tensor:
        """How much of each query, taken as a key, the stored keys span, (B, H, T) in [0, 1], from none of it to all.
        What that is measured by:

        Ridge statistics: 1 - q^T P q / q^T P_0 q, with P = (G + rho I)^-1 and P_0 the same of an empty memory: what the
        leverage has come down by.
        Kept keys: the same in the features of the kernel, of one key (the best) or, for anchors that solve, of all.
        Sums over features: K summed over all keys, which is more than any one's, as a part of K(q, q).

        Raises: ArgumentError where a memory of this kind cannot know.
        """
        self._check_queries("support", q)
        self._check_evidence("support")
        bound = self.operator.bind(q.shape[1], self.form.heads)
        with torch.autocast(q.device.type, enabled=False):
            return self.spanned(self._at_home(q.to(torch.promote_types(q.dtype, torch.float32)), bound), bound)

    def calibrate(
        self,
        strangers: Tensor,
        rate: float = 0.01,
        *,
        least: float = 0.5,
        stored: tuple[Tensor, Tensor] | None = None,
        miss: float = 0.01,
    ) -> Criterion:
        """The criterion that decides at most ``rate`` of queries like ``strangers`` (B, H, n, D), none of which was
        ever stored; n >= 1 / rate - 1.

        That holds for this memory as full as it is, head by head over all rows of the batch, when further strangers are
        as these; and for the same memory at any earlier time, where support only grows. least: the support that is
        asked for in any case. stored: (q, v) of pairs that are stored: at most ``miss`` of claims that are as right as
        these is contradicted. Without it the residual is the default one.

        Raises: ArgumentError for rates outside [0, 1], and for too few strangers or pairs.
        """
        if not is_share(least):
            raise ArgumentError(
                f"Memory.calibrate: least must lie in [0, 1], received {least!r}. It is the support below which "
                "nothing is accepted."
            )
        if stored is not None and not (isinstance(stored, tuple | list) and len(stored) == 2):
            raise ArgumentError(
                "Memory.calibrate: stored must be a pair (q, v) of queries and the values stored for them, received "
                f"{type(stored).__name__}. Leave it out for the default residual."
            )
        given = {"strangers": strangers} | dict(zip(("stored q", "stored v"), stored or (), strict=False))
        check_tensors("Memory.calibrate", given)
        if not all(bool(torch.isfinite(x).all()) for x in given.values()):
            raise ArgumentError(
                "Memory.calibrate: finite queries and values are required, received NaN or infinity. Leave them out."
            )
        with torch.no_grad():
            support = bound_of("rate", self.support(strangers), rate, least)
            if stored is None:
                return Criterion(support, rate=rate, tokens=self.count)
            residual = self.read(stored[0], report=Criterion(), claim=stored[1]).residual
        assert residual is not None
        return Criterion(support, bound_of("miss", residual, miss), rate, miss, self.count)

    # --- what a kind of memory provides -------------------------------------------------------------------------------

    @abc.abstractmethod
    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        """``read`` of prepared queries (B, H, T, D), before the anchor's factor per head."""

    @property
    def evidence_refusal(self) -> str | None:
        """Why this memory cannot say what it has seen (``support``, ``read(report=…)``); None = it can."""
        return "it holds sums that have forgotten single keys"

    def spanned(self, home: Tensor, bound: Bound) -> Tensor:
        """``support`` of queries, for a memory without an ``evidence_refusal``. home (B, H, T, D): the same vectors
        prepared as keys."""
        raise NotImplementedError

    def largest_weight(self, q: Tensor, bound: Bound) -> Tensor | None:
        """``Reading.weight`` of prepared queries."""
        return None

    def differing(self, q: Tensor, home: Tensor, bound: Bound, y: Tensor, support: Tensor) -> Tensor | None:
        """The largest ``gap`` (B, H, T) between what the whole answers prepared queries and what those of its spans
        do that support the query by themselves, with more than ``support`` (1, H, 1). 0 where none does; None for a
        memory without spans."""
        if not self.parts:
            return None
        worst = y.new_zeros(y.shape[:3])
        for part in self.settled_parts():
            if part.count:
                alone: Any = self.part_memory(part.held)
                worst = torch.maximum(
                    worst, torch.where(alone.spanned(home, bound) > support, gap(alone.lookup(q, bound), y), 0)
                )
        return worst

    # --- shared -------------------------------------------------------------------------------------------------------

    def _judged(
        self, q: Tensor, y: Tensor, home: Tensor, bound: Bound, criterion: Criterion, claim: Tensor | None
    ) -> tuple[Tensor, Evidence]:
        """Verdicts of prepared queries whose answers are y, and the evidence."""
        if not isinstance(criterion, Criterion):
            raise ArgumentError(
                f"Memory.read: report must be True, False or a Criterion, received {criterion!r}. Memory.calibrate "
                "makes one."
            )
        if claim is None:
            residual = self.differing(q, home, bound, y, criterion.columns(bound.heads, y)[0])
        else:
            check_tensors("Memory.read", {"claim": claim})
            if claim.shape != y.shape:
                raise ArgumentError(
                    f"Memory.read: claim must have the shape of what is read, {tuple(y.shape)}, received "
                    f"{tuple(claim.shape)}."
                )
            if not bool(torch.isfinite(claim).all()):
                raise ArgumentError(
                    "Memory.read: claim must be finite, received NaN or infinity. Mend it, or read without it."
                )
            residual = gap(claim.to(y), y)
        evidence = Evidence(self.spanned(home, bound), residual)
        return criterion.verdict(evidence), evidence

    def _check_evidence(self, call: str) -> None:
        why = self.evidence_refusal
        if why is not None:
            raise ArgumentError(
                f"Memory.{call}: a memory of kind {self.kind!r} of operator {self.operator.name!r} has no evidence for "
                f"a verdict: {why}. Read without report, keep keys and values (kind='keys') of a positive kernel, or "
                "use an operator that solves, such as ridge."
            )

    def _check_queries(self, call: str, q: Tensor) -> None:
        form = self.form
        check_tensors(f"Memory.{call}", {"q": q})
        if (
            q.ndim != 4
            or q.shape[0] != form.batch
            or q.shape[1] % form.heads
            or q.shape[1] == 0
            or q.shape[3] != form.key_dim
        ):
            raise ArgumentError(
                f"Memory.{call}: q must be (batch, heads, queries, dim) = ({form.batch}, a multiple of {form.heads}, "
                f"any, {form.key_dim}), received {tuple(q.shape)}."
            )
        if q.dtype not in FLOATS or q.device != form.device:
            raise ArgumentError(
                f"Memory.{call}: q must be of a float type on {form.device}, received {q.dtype} on {q.device}."
            )

    def _at_home(self, q: Tensor, bound: Bound) -> Tensor:
        """Queries prepared as keys, by key head as keys are."""
        by_key_head = q.reshape(q.shape[0], bound.kv_heads, -1, q.shape[3])
        key = bound.score.prepare_key(by_key_head, bound.score_params)
        return key.view(*q.shape[:3], key.shape[-1])


__all__ = ["Readable", "Reading"]
