"""O-sets: sets whose membership is witnessed or not yet, and three-valued reports made of two of them.

A stage is what is known at some time, of any type. A later stage continues an earlier one when it knows at least as
much. At a stage t, an o-set X gives a bool tensor over finitely many records w: True where acceptance is witnessed,
False for "not yet", never "no". Acceptance is stable when no continuation withdraws it; ``withdrawn`` finds where one
does.

    join     w in_t X | Y      iff  w in_t X or w in_t Y              least upper bound of the preorder ``refines``
    meet     w in_t X & Y      iff  w in_t X and w in_t Y             greatest lower bound
    product  (w, u) in_t X * Y iff  w in_t X and u in_t Y
    report   ACCEPTED where only ``yes`` accepts, CONTRADICTED where only ``no``, its rival, does, UNDECIDED elsewhere

Join, meet and product keep stability. A complement does not: a record that is not accepted yet may be accepted later,
which would withdraw "not X". A stable complement exists only where X is decided once and for all. (The source says that
none exists, and overlooks this case.) A report keeps its values along continuations when both o-sets are stable and
never accept the same record. Where both accept a record, the report becomes UNDECIDED.
Source: Geometric Attention, appendix A.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from zonal.algebra.declaration import require
from zonal.verdict import Verdict

Stage = TypeVar("Stage")


@dataclass(frozen=True)
class OSet(Generic[Stage]):
    """accepts: from a stage to a bool tensor over the records, True where acceptance is witnessed."""

    accepts: Callable[[Stage], Tensor]

    @classmethod
    def generated(cls, generators: Sequence[Callable[[Stage], Tensor]], protocol: Callable[[Stage], Tensor]) -> Self:
        """The o-set of a family of generators and an answer protocol.

        It accepts the records that some generator has logged and the protocol accepts.

        Raises: ArgumentError without a generator, since nothing would ever be logged.
        """
        require(
            len(generators) > 0,
            "OSet.generated: at least one generator is required, received none. "
            "Pass procedures that log records, stage -> bool tensor.",
        )

        def accepts(stage: Stage) -> Tensor:
            logged, *others = (_flags("OSet.generated: a generator", log(stage)) for log in generators)
            for more in others:
                logged = torch.logical_or(*_alike("generated", logged, more))
            answer = _flags("OSet.generated: the protocol", protocol(stage))
            return torch.logical_and(*_alike("generated", logged, answer))

        return cls(accepts)

    def at(self, stage: Stage) -> Tensor:
        """The records accepted at a stage. Raises: ArgumentError when that is no bool tensor."""
        return _flags("OSet: accepts", self.accepts(stage))

    def join(self, other: "OSet[Stage]") -> "OSet[Stage]":
        """Accepted by either."""
        return OSet(lambda stage: torch.logical_or(*_alike("join", self.at(stage), other.at(stage))))

    def meet(self, other: "OSet[Stage]") -> "OSet[Stage]":
        """Accepted by both."""
        return OSet(lambda stage: torch.logical_and(*_alike("meet", self.at(stage), other.at(stage))))

    def product(self, other: "OSet[Stage]") -> "OSet[Stage]":
        """The o-set on pairs of records that accepts a pair if both records are accepted.

        Axes of this o-set come first.
        """

        def accepts(stage: Stage) -> Tensor:
            mine, theirs = self.at(stage), other.at(stage)
            return mine.reshape(*mine.shape, *(1,) * theirs.ndim) & theirs

        return OSet(accepts)

    def refines(self, other: "OSet[Stage]", stages: Iterable[Stage]) -> bool:
        """Whether the other o-set accepts all that this one accepts, at each of these stages (the preorder)."""
        return all(bool(torch.le(*_alike("refines", self.at(stage), other.at(stage))).all()) for stage in stages)

    def withdrawn(self, history: Iterable[Stage]) -> "Withdrawal | None":
        """The first acceptance that is withdrawn along stages that continue one another, or None if there is none."""
        before: Tensor | None = None
        for place, stage in enumerate(history):
            now = self.at(stage)
            if before is not None and bool((lost := torch.gt(*_alike("withdrawn", before, now))).any()):
                return Withdrawal(place, lost)
            before = now
        return None


class Withdrawal(NamedTuple):
    """place: index of the stage that withdraws acceptance. records: bool, the records that lose it."""

    place: int
    records: Tensor


class Partition(NamedTuple):
    """Two-valued membership of decoded elements: bool (elements,) each, one the complement of the other."""

    members: Tensor
    others: Tensor


@dataclass(frozen=True)
class Reporter(Generic[Stage]):
    """Two o-sets on the same records: ``yes`` accepts for the label, ``no`` for its rival."""

    yes: OSet[Stage]
    no: OSet[Stage]

    @property
    def decided(self) -> OSet[Stage]:
        """The o-set of records that either accepts."""
        return self.yes.join(self.no)

    def report(self, stage: Stage) -> Tensor:
        """The ``Verdict`` of each record, int8. A record that both accept is undecided."""
        yes, no = _alike("report", self.yes.at(stage), self.no.at(stage))
        return yes.to(torch.int8) - no.to(torch.int8)

    def exclusive(self, stages: Iterable[Stage]) -> bool:
        """Whether no record is accepted by both at any of these stages."""
        return not any(bool(self.yes.meet(self.no).at(stage).any()) for stage in stages)

    def consistent(self, subject: OSet[Stage], stages: Iterable[Stage]) -> bool:
        """Whether, at these stages, ``yes`` accepts a subset of the given o-set, and ``no`` nothing in it."""
        return self.yes.refines(subject, stages := tuple(stages)) and not any(
            bool(self.no.meet(subject).at(stage).any()) for stage in stages
        )

    def decoded(self, stage: Stage, decode: Tensor) -> tuple[Tensor, Tensor]:
        """(yes, no), bool (elements,): for each element, whether some record of it is accepted.

        decode (records,): the element that each record stands for, counted from 0.

        Raises: ArgumentError unless decode gives one element per record and reaches every element up to its largest.
        """
        yes, no = _alike("decoded", self.yes.at(stage).flatten(), self.no.at(stage).flatten())
        fits = decode.dtype == torch.int64 and decode.shape == yes.shape and decode.numel() > 0
        require(
            fits,
            f"Reporter: decode must be int64 with one element for each of {tuple(yes.shape)} records, received "
            f"{decode.dtype} of {tuple(decode.shape)}.",
        )
        count = int(decode.max()) + 1
        found = decode.unique()
        require(
            int(decode.min()) >= 0 and found.numel() == count,
            f"Reporter: decode must reach every element from 0 to {count - 1}, received only {found.tolist()}. "
            "Number the elements that have records.",
        )
        empty = torch.zeros(count, dtype=torch.bool, device=decode.device)
        return empty.index_put((decode[yes],), empty.new_ones(())), empty.index_put((decode[no],), empty.new_ones(()))

    def certified(self, stage: Stage, decode: Tensor) -> bool:
        """Whether a stage is certified two-valued: each element has a decided record, and none has both labels."""
        yes, no = self.decoded(stage, decode)
        return bool((yes ^ no).all())

    def partition(self, stage: Stage, decode: Tensor) -> Partition:
        """Classical membership of the elements at a certified stage.

        Raises: ArgumentError at any other stage, naming an element that is undecided or has both labels.
        """
        yes, no = self.decoded(stage, decode)
        for flags, what, remedy in (
            (~(yes | no), "is undecided", "Wait for a later stage, or report it as Verdict.UNDECIDED."),
            (yes & no, "has records of both labels", "Decode them to different elements."),
        ):
            require(
                not bool(flags.any()),
                f"Reporter.partition: the stage is not two-valued: element {int(flags.to(torch.int8).argmax())} "
                f"{what}. {remedy}",
            )
        return Partition(yes, no)


def _flags(what: str, value: Tensor) -> Tensor:
    require(
        isinstance(value, Tensor) and value.dtype == torch.bool,
        f"{what} must give a bool tensor over the records, received {value!r}. Compare evidence with a threshold.",
    )
    return value


def _alike(verb: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    require(
        a.shape == b.shape,
        f"OSet.{verb}: both must be on the same records, received shapes {tuple(a.shape)} and {tuple(b.shape)}. "
        "Use product for pairs of different records.",
    )
    return a, b


__all__ = ["OSet", "Partition", "Reporter", "Verdict", "Withdrawal"]
