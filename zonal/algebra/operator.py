"""Operator: score x prior x link x anchor, with the learned parts as parameters.

Softmax attention is one value of this type.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from zonal.algebra import ledger
from zonal.algebra.anchor import Anchor, Koopman, LocalGlobal, Ridge, Row
from zonal.algebra.bound import Bound, Far
from zonal.algebra.declaration import (
    Declaration,
    Derived,
    Move,
    expand_rows,
    from_config,
    require,
    require_one_of,
    require_storable,
    require_whole,
)
from zonal.algebra.link import Exp, Link
from zonal.algebra.link.base import require_consistent
from zonal.algebra.prior import ALiBi, Causal, Decay, Prior
from zonal.algebra.refusals import refusal
from zonal.algebra.score import Dot, Params, Score
from zonal.errors import ArgumentError
from zonal.tracing import recorded, traced

Readout = Literal["head", "concat"] | None
LayerInit = Literal["default", "zero_output", "orthogonal"]


_SLOTS = frozenset(("score", "link", "anchor", "prior"))


class Tags(NamedTuple):
    """Properties of an operator for the planner, which reads only these and never the mechanism's name."""

    positive: bool  # K >= 0 on every input
    log_space: bool  # the kernel is kept as its logarithm
    bilinear: bool  # the score is a dot product of prepared vectors
    degree: int | None  # the kernel is a polynomial of this degree in a bilinear score
    solves: bool  # the anchor solves with the kernel among keys
    normalises: bool  # the anchor divides by the row's sum
    decays: bool  # the prior fades with time
    includes_self: bool  # whether a causal query sees its own key
    couples: bool  # a query's weights depend on the other queries, too
    # of anchors: "sums" over the keys of a row, "ridge" (solves), "window" (sums over two kernels), "plan", "tree", ""
    family: str = "sums"
    # an anchor whose type is exactly that of "row", "count", "raw" or "ridge", which compiled kernels know
    reduction: str | None = None
    top: int = 0  # how many keys a row keeps, 0 = all
    shifts: int = 0  # the most Koopman steps of a head's read-out
    by_query: bool = False  # each query needs an inverse of its own
    window: int = 0  # how many of the last keys have the operator's kernel, earlier ones a far kernel; 0 = all

    @property
    def cancels(self) -> bool:
        """Whether the nonnegative sum of a row over features may cancel to almost nothing.

        Sums used by one call only are then float64.
        """
        return self.positive and self.normalises and (self.degree or 1) > 1


class Operator(nn.Module):
    """An attention operator, y_t = sum_s W_ts v_s with W = A(B * l(S)).

    Args:
        score: S, a number for each query and key. link: l, evidence from scores. anchor: A, weights from evidence.
        prior: B, declared masks and biases, in any order.
        name: for people and messages. readout: the norm that a layer applies to y (``head``: per head, ``concat``: over
            all heads, None).
        layer_init: initialisation of a layer's projections (``zero_output``: orthogonal q and k, zero output;
            ``orthogonal``: also v).
        qk_dim: size of q and k per head in a layer; None = that of v.

    The parts are frozen values and cannot be reassigned; ``replace`` makes an operator with other parts. Parameters are
    in ``learned`` (a ParameterDict), one row per head group. Rows repeat for more heads and are thinned evenly for
    fewer; ``for_heads`` gives each head its own.

    Raises: ArgumentError for parts that cannot be combined.
    """

    def __init__(
        self,
        score: Score = Dot(),
        link: Link = Exp(),
        anchor: Anchor = Row(),
        prior: Prior | tuple[Prior, ...] = (),
        *,
        name: str | None = None,
        readout: Readout = None,
        layer_init: LayerInit = "default",
        qk_dim: int | None = None,
        spec: str | None = None,
    ) -> None:
        super().__init__()
        priors = tuple(prior) if isinstance(prior, tuple | list) else (prior,)
        for value, kind in ((score, Score), (link, Link), (anchor, Anchor), *((p, Prior) for p in priors)):
            if not isinstance(value, kind):
                raise ArgumentError(
                    f"Operator: {kind.__name__.lower()} must be one of the library's or your own, received {value!r}. "
                    f"See zonal.{kind.__name__.lower()} for the choices."
                )
            if not is_dataclass(value) or value.__hash__ is None:
                raise ArgumentError(
                    f"Operator: class {type(value).__name__} must be a frozen dataclass. Write "
                    "@dataclass(frozen=True) above it."
                )
            require_storable(value)
        self.score, self.link, self.anchor, self.prior = score, link, anchor, priors
        self.name = name or f"{type(score).__name__}-{type(link).__name__}-{type(anchor).__name__}".lower()
        self.spec = spec or self.name
        self.readout: Readout = readout
        self.layer_init: LayerInit = layer_init
        require_one_of("Operator: readout", readout, (None, "head", "concat"))
        require_one_of("Operator: layer_init", layer_init, get_args(LayerInit))
        if qk_dim is not None:
            require_whole("Operator: qk_dim", qk_dim)
        self.qk_dim = qk_dim
        start = {slot: part.initial() for slot, part in self._parts()}
        drawn = {slot: part.fixed() for slot, part in self._parts()}
        for slot, part in self._parts():
            for key, value in (start[slot] | drawn[slot]).items():
                if not isinstance(value, Tensor) or not value.ndim:
                    raise ArgumentError(
                        f"Operator: initial() and fixed() of {type(part).__name__} must give tensors whose first axis "
                        f"runs over heads, received {key}={value!r}. One row, as torch.ones(1) is, serves all heads."
                    )
        require(
            not score.bilinear or type(score).pair is Score.pair,
            f"Operator: bilinear = True of score {type(score).__name__} says that scores are dot products of prepared "
            "vectors, and it has a method pair. Leave one of the two out.",
        )
        require_consistent(link, start["link"] | drawn["link"])
        self._learned = {slot: tuple(values) for slot, values in start.items()}
        self._fixed = {slot: tuple(values) for slot, values in drawn.items()}
        self._kv_rows = {slot: frozenset(part.kv_rows) for slot, part in self._parts()}
        if anchor.solves:  # the kernel among keys is each key head's, and so is what it learns
            self._kv_rows["link"] = frozenset(start["link"])
        self._kept: dict[int, tuple[Params, Tensor]] = {}
        self.learned_parts = nn.ParameterDict(
            {f"{slot}_{key}": nn.Parameter(value) for slot, values in start.items() for key, value in values.items()}
        )
        self.fixed_parts = nn.Module()
        for slot, values in drawn.items():
            for key, value in values.items():
                self.fixed_parts.register_buffer(f"{slot}_{key}", value)

    def __setattr__(self, name: str, value: Any) -> None:
        self._keep_slot(name, "assigned")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._keep_slot(name, "deleted")
        super().__delattr__(name)

    def _keep_slot(self, name: str, verb: str) -> None:
        if name in _SLOTS and name in vars(self):
            raise ArgumentError(
                f"Operator: slot {name!r} cannot be {verb}, because operators are immutable. "
                f"Use operator.replace({name}=…), which returns a new one."
            )

    def _parts(self) -> list[tuple[str, Declaration]]:
        return [
            ("score", self.score),
            ("link", self.link),
            ("anchor", self.anchor),
            *((f"prior{i}", p) for i, p in enumerate(self.prior)),
        ]

    def _params(self, slot: str, heads: int, kv_heads: int) -> Params:
        rows = {
            key: kv_heads if key in self._kv_rows[slot] else heads for key in (*self._learned[slot], *self._fixed[slot])
        }
        spread = slot == "link" and self.link.spreads
        return {key: expand_rows(self._value(slot, key), count, f"{slot}.{key}", spread) for key, count in rows.items()}

    def _value(self, slot: str, key: str) -> Tensor:
        name = f"{slot}_{key}"
        return self.learned_parts[name] if key in self._learned[slot] else self.fixed_parts.get_buffer(name)

    @property
    def tags(self) -> Tags:
        # a linear link over a score that is never negative is a positive kernel too
        positive = self.link.positive or (self.link.linear and self.score.positive)
        decays = any(isinstance(p, Decay) for p in self.prior)
        own, anchor = next((p.include_self for p in self.prior if isinstance(p, Causal)), None), self.anchor
        return Tags(
            positive=positive,
            log_space=self.link.log_space,
            bilinear=self.score.bilinear,
            degree=self.link.degree if self.score.bilinear else None,
            solves=anchor.solves,
            normalises=anchor.normalises,
            decays=decays,
            includes_self=anchor.include_self if own is None else own,
            couples=anchor.couples,
            family=anchor.family,
            reduction=anchor.reduction,
            top=anchor.top,
            shifts=anchor.shifts,
            by_query=anchor.by_query,
            window=anchor.window,
        )

    def refusal(self, dim: int | None = None) -> str | None:
        """Why these parts cannot be combined for heads of ``dim`` numbers (None: for any size); None if they can."""
        return refusal(self.score, self.link, self.anchor, self.prior, self.tags.positive, dim)

    def check(self, call: str, dim: int | None = None) -> None:
        """Raise ArgumentError if ``refusal`` gives a reason."""
        reason = self.refusal(dim)
        if reason is not None:
            raise ArgumentError(f"{call}: operator {self.name!r} cannot be run: {reason}.")

    def bind(self, heads: int, kv_heads: int) -> Bound:
        """The parts with current values for H query heads and Hkv key heads."""
        alibi = next((p for p in self.prior if isinstance(p, ALiBi)), None)
        return Bound(
            score=self.score,
            link=self.link,
            anchor=self.anchor,
            priors=self.prior,
            heads=heads,
            kv_heads=kv_heads,
            coefficients=self._coefficients(heads, kv_heads),
            score_params=self._params("score", heads, kv_heads),
            anchor_params=self._params("anchor", heads, kv_heads),
            log_decay=self._log_decay(heads, kv_heads),
            slopes=None if alibi is None else alibi.for_heads(heads),
            far=self._far(heads, kv_heads) if isinstance(self.anchor, LocalGlobal) else None,
        )

    def _log_decay(self, heads: int, kv_heads: int) -> Tensor | None:
        for i, part in enumerate(self.prior):
            if isinstance(part, Decay):
                return part.log_decay(self._params(f"prior{i}", heads, kv_heads), kv_heads)
        return None

    def _far(self, heads: int, kv_heads: int) -> Far:
        anchor, params = self.anchor, self._params("anchor", heads, kv_heads)
        assert isinstance(anchor, LocalGlobal)

        def of(slot: str) -> Params:
            return {name.removeprefix(slot): value for name, value in params.items() if name.startswith(slot)}

        bound = Bound(
            score=anchor.score, link=anchor.link, anchor=Row(), priors=(), heads=heads, kv_heads=kv_heads,
            coefficients=anchor.link.coefficients(of("link_")), score_params=of("score_"), anchor_params={},
            log_decay=None, slopes=None,
        )  # fmt: skip
        return Far(anchor.window, anchor.first, bound, anchor.factor(params))

    def _coefficients(self, heads: int, kv_heads: int) -> Tensor:
        if self.anchor.solves and kv_heads != heads:
            c = self._coefficients(kv_heads, kv_heads)
            return c if c.shape[1] == 1 else c.repeat_interleave(heads // kv_heads, 1)
        learned = {key: self.learned_parts[f"link_{key}"] for key in self._learned["link"]}
        tracked = recorded(learned.values()) or traced()
        if tracked or not all(type(p) is nn.Parameter and p.device.type == "cpu" for p in learned.values()):
            return self._combined(learned, heads)
        # a dozen operations on a few numbers cost more than a short call, so the results are kept while their inputs
        # are unchanged
        kept = self._kept.get(heads)
        if kept is None or not all(
            learned[key].dtype == value.dtype and torch.equal(learned[key], value) for key, value in kept[0].items()
        ):
            with torch.inference_mode(False), torch.no_grad():
                kept = ({key: p.detach().clone() for key, p in learned.items()}, self._combined(learned, heads))
            self._kept[heads] = kept
        return kept[1]

    def _combined(self, learned: Params, heads: int) -> Tensor:
        # rows are repeated after they are combined, there being fewer of them before
        c = self.link.coefficients(learned)
        if c.shape[1] in (1, heads):
            return c
        return expand_rows(c.transpose(0, 1), heads, "link coefficients", self.link.spreads).transpose(0, 1)

    def replace(
        self,
        *,
        score: Score | None = None,
        link: Link | None = None,
        anchor: Anchor | None = None,
        prior: Prior | tuple[Prior, ...] | None = None,
    ) -> "Operator":
        """A new operator with some slots replaced. Unchanged parts keep their learned values."""
        prior = self.prior if prior is None else prior
        new = self._named_alike(score or self.score, link or self.link, anchor or self.anchor, prior)
        for slot, part in new._parts():
            # a prior may have moved among the others
            was = next((own for own, kept in self._parts() if kept == part), None)
            if was is None:
                continue
            for key in self._learned[was]:
                trained = self.learned_parts[f"{was}_{key}"].requires_grad
                new.learned_parts[f"{slot}_{key}"] = nn.Parameter(self._value(was, key).detach().clone(), trained)
            for key in self._fixed[was]:
                new.fixed_parts.register_buffer(f"{slot}_{key}", self._value(was, key).clone())
        return new

    def for_heads(self, heads: int, kv_heads: int | None = None, *, dim: int | None = None) -> "Operator":
        """A copy whose parameters have one row per head.

        dim: size of a head, where score or link left it open.
        """
        kv_heads = kv_heads or heads
        score = self.score if dim is None else self.score.sized(dim, kv_heads)
        anchor = self.anchor if dim is None else self.anchor.sized(dim, kv_heads)
        link = self.link if dim is None else self.link.sized(dim)
        link = link.spread(kv_heads if self.anchor.solves else heads)
        new = self._named_alike(score, link, anchor, self.prior)
        new.spec = self.spec
        own = {"score": score == self.score, "anchor": anchor == self.anchor}
        for slot, _ in self._parts():
            # a part that was sized just now has numbers of its own, which this operator does not have
            source = self if own.get(slot, True) else new
            for key, value in source._params(slot, heads, kv_heads).items():
                name = f"{slot}_{key}"
                if key not in source._learned[slot]:
                    new.fixed_parts.register_buffer(name, value.clone())
                    continue
                if slot == "link" and value.ndim == 2:  # a link of fewer degrees has fewer weights
                    value = value[:, : new.learned_parts[name].shape[1]]
                new.learned_parts[name] = nn.Parameter(value.detach().clone(), source.learned_parts[name].requires_grad)
        return new

    def _named_alike(self, score: Score, link: Link, anchor: Anchor, prior: Prior | tuple[Prior, ...]) -> "Operator":
        """An operator of other parts with this one's name and settings of layers."""
        return Operator(
            score, link, anchor, prior,
            name=self.name, readout=self.readout, layer_init=self.layer_init, qk_dim=self.qk_dim,
        )  # fmt: skip

    def for_dim(self, dim: int) -> "Operator":
        """The operator for heads of ``dim`` numbers, with the same parameters; itself if its link left no size open."""
        link = self.link.sized(dim)
        if link is self.link:
            return self
        new = self.replace(link=link)
        new.spec, new.learned_parts, new.fixed_parts = self.spec, self.learned_parts, self.fixed_parts
        return new

    def sized_since(self, other: "Operator") -> tuple[Literal["score", "anchor"], ...]:
        """The parts that were sized when ``for_heads`` made this operator from the other one."""
        return tuple(slot for slot in ("score", "anchor") if getattr(self, slot) != getattr(other, slot))

    @torch.no_grad()
    def start(self, slot: Literal["score", "anchor"], entry: float, seed: int) -> None:
        """Let a part that was sized for a layer start as the layer's: ``Score.started`` has the arguments."""
        for key, value in (self.score if slot == "score" else self.anchor).started(entry, seed).items():
            own = self._value(slot, key)
            own.copy_(value.expand(own.shape))

    @torch.no_grad()
    def fit(self, k: Tensor) -> "Operator":
        """A copy whose score has chosen its landmarks or directions from keys k (B, Hkv, S, D), given as in calls.

        The choice becomes part of the operator's state: it is saved, loaded and moved with it, and never repeated.

        Raises: ArgumentError for a score without such a choice, or keys that do not fit it.
        """
        if k.ndim != 4 or 0 in k.shape:
            raise ArgumentError(
                f"Operator.fit: keys (batch, key heads, tokens, dim) are required, received shape {tuple(k.shape)}."
            )
        new = self.replace(score=self.score.sized(k.shape[3], k.shape[1]))
        new.spec = self.spec
        chosen = new.score.chosen(k)
        if not chosen:
            raise ArgumentError(
                f"Operator.fit: operator {self.name!r} chooses nothing from keys. What does: "
                "features.Anchors(choice='kmeans'), Nystrom(choice='kmeans') and LowRankSquare(choice='pca')."
            )
        for key, value in chosen.items():
            new._value("score", key).copy_(value)
        return new

    def moves(self) -> tuple[Move, ...]:
        """From the full interaction of all tokens to this operator, as ``ledger.text`` and ``ledger.tree`` show it."""
        tags = self.tags
        listed: list[Move] = []
        for _, part in self._parts():
            unknown = part.move("restriction", type(part).__name__, "it does not say what it assumes")
            first, *rest = part.moves() or (unknown,)
            listed += [replace(first, settings=part.settings()), *rest]
        past = Derived("moments", f"hence moments of keys up to degree {tags.degree} carry all of the past")
        if tags.degree is None:
            past = Derived("", "hence no finite sum over keys is exact: the past must be kept as keys and values")
        if not (tags.solves or tags.window):  # what these keep is their anchor's to say
            listed = [replace(move, derives=(*move.derives, past)) if move.slot == "link" else move for move in listed]
        support = Derived("support", "hence K is an array, and nothing comes from a pair that is forbidden")
        text = "records are a fixed, finite set of tokens, and a pair is allowed or it is not"
        return ledger.ordered((Move("closure", "carrier", "tokens", text, (support,)), *listed))

    def config(self) -> dict[str, Any]:
        """The declaration as plain JSON values (learned values are not in it)."""
        return {
            "name": self.name,
            "spec": self.spec,
            "readout": self.readout,
            "layer_init": self.layer_init,
            "qk_dim": self.qk_dim,
            "score": self.score.config(),
            "link": self.link.config(),
            "anchor": self.anchor.config(),
            "prior": [p.config() for p in self.prior],
        }

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "Operator":
        """The operator that ``config()`` described.

        Raises: ArgumentError for unknown types or fields.
        """
        missing = {"score", "link", "anchor", "prior"} - set(config)
        if missing:
            raise ArgumentError(f"Operator.from_config: the configuration lacks {', '.join(sorted(missing))}.")
        read: dict[str, Any] = {slot: from_config(config[slot], slot) for slot in ("score", "link", "anchor")}
        prior: Any = tuple(from_config(p, "prior") for p in config["prior"])
        return Operator(
            read["score"],
            read["link"],
            read["anchor"],
            prior,
            name=config.get("name"),
            readout=config.get("readout"),
            layer_init=config.get("layer_init", "default"),
            qk_dim=config.get("qk_dim"),
            spec=config.get("spec"),
        )

    @torch.no_grad()
    def learned(self, points: int = 81) -> dict[str, Any]:
        """Learned values as plain lists: the curve l(x) per head, eta, gamma, ridge, degrees, rates, temperatures,
        and weights of distances with their curvature."""
        rows = math.lcm(len(getattr(self.link, "degrees", ())) or 1, *(p.shape[0] for p in self.learned_parts.values()))
        bound = self.bind(rows, rows)
        reach = 1.0 if self.link.domain is not None or self.score.bound is not None else 3.0
        x = torch.linspace(-reach, reach, points, dtype=torch.float64, device=bound.coefficients.device)
        curve = self.link.value(x.expand(1, rows, 1, points), bound.coefficients)[0, :, 0]
        out: dict[str, Any] = {"kernel_curve": {"x": x.tolist(), "heads": curve.tolist()}}
        if isinstance(self.anchor, Ridge):
            out["ridge"] = self.anchor.ridge(bound.anchor_params, rows).tolist()
        if isinstance(self.anchor, Koopman):
            scale = bound.anchor_params
            out["eta"] = scale["eta"].tolist() if "eta" in scale else [self.anchor.eta]
            if self.anchor.shifts:
                out["gamma"] = self.anchor.gamma(scale).tolist()
        if "link_degree" in self.learned_parts:
            out["degrees"] = self.learned_parts["link_degree"].tolist()
        if "score_log_temperature" in self.learned_parts:
            out["temperature"] = self.learned_parts["score_log_temperature"].exp().tolist()
        out |= self.score.learned(bound.score_params)
        if bound.log_decay is not None:
            out["rates"] = bound.log_decay.exp().tolist()
        return out

    def extra_repr(self) -> str:
        return f"name={self.name!r}, score={self.score}, link={self.link}, anchor={self.anchor}, prior={self.prior}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise ArgumentError(
            "Operator: an operator is a declaration; call zonal.attention(q, k, v, operator) to run it."
        )


def apart(a: Operator, b: Operator) -> str:
    """The first difference of two operators in words: fields of one declaration, or two declarations."""
    slot = next(
        (slot for slot in ("score", "link", "anchor", "prior") if getattr(a, slot) != getattr(b, slot)), "anchor"
    )
    mine, theirs = getattr(a, slot), getattr(b, slot)
    shown = [repr(mine), repr(theirs)]
    if type(mine) is type(theirs) and is_dataclass(mine):
        unlike = [field.name for field in fields(mine) if getattr(mine, field.name) != getattr(theirs, field.name)]
        shown = [
            f"{type(part).__name__}({', '.join(f'{name}={getattr(part, name)!r}' for name in unlike)})"
            for part in (mine, theirs)
        ]
    return f"{a.name!r} with {slot} {shown[0]} and {b.name!r} with {shown[1]}"


__all__ = ["Bound", "Far", "Operator", "Readout", "Tags", "apart"]
