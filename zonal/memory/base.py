"""Memory: what an operator keeps of the tokens it has absorbed, as a value."""

import abc
import dataclasses
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.named import operator_of
from zonal.algebra.prior import ChunkCausal
from zonal.errors import ArgumentError, unknown_name
from zonal.memory import files
from zonal.memory.alike import declared_alike, same_but_for_type, same_declaration
from zonal.memory.decoding import Decoder
from zonal.memory.form import ENDLESS, FLOATS, Form
from zonal.memory.incoming import check_tokens, prepared
from zonal.memory.reading import Readable
from zonal.memory.refusals import served_by, statistics_refusal
from zonal.memory.rows import check_alike
from zonal.memory.spans import Part
from zonal.memory.tokens import Tokens
from zonal.memory.weights import check_weights, weighed
from zonal.names import known_names
from zonal.store import understood
from zonal.typed import check_tensors, fits

MOST_DRIFT = 0.25
"""The bound on rounding errors (``Memory.drift``) past which a memory warns."""


@dataclass(frozen=True, eq=False, repr=False)
class Memory(Readable):
    """What ``operator`` keeps of ``count`` tokens (padding included).

    A value: ``absorb``, ``merge`` and ``subtract`` return the result and leave this memory as it was; the names that
    end with an underscore make this object the result. A failed call changes nothing. Learned values of the operator
    are looked up when they are needed, so a memory follows its operator through training. Gradients flow through absorb
    and read. What it does with queries is in ``reading``, with named spans in ``spans``, with the sequences of its
    batch in ``rows``.
    """

    roundings: ClassVar[int]
    """How often a number of the sums is rounded for one token, at most."""
    double: ClassVar[bool] = False
    """Whether the sums are float64 for every type of keys and values."""

    kinds: "ClassVar[dict[str, type[Memory]]]"
    """The class of each kind of memory; a class that names its kind adds itself."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            Memory.kinds[cls.kind] = cls

    # --- making one ---------------------------------------------------------------------------------------------------

    @staticmethod
    def kind_for(operator: Operator, key_dim: int) -> str:
        """The smallest kind of memory that is exact: "keys", "features", "decayed", "windowed", "ridge" or "fading"; or
        "compact", if that is declared.
        """
        operator = operator.for_dim(key_dim)
        if operator.anchor.solves:
            constant = "compact" if getattr(operator.anchor, "compact", False) else "ridge"
            natural = "fading" if operator.tags.decays else constant
            return "keys" if statistics_refusal(operator, key_dim) else natural
        if served_by(operator, key_dim) is None:
            return "keys"
        if operator.anchor.window:
            return "windowed"
        if not operator.tags.decays:
            return "features"
        return "keys" if any(isinstance(p, ChunkCausal) for p in operator.prior) else "decayed"

    @staticmethod
    @known_names
    def empty(
        operator: Operator | str,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        kind: str | None = None,
    ) -> "Memory":
        """The memory of ``batch`` sequences before their first token.

        Args:
            operator: an Operator, or a spec such as "ridge". heads: key heads. dtype: of keys and values; sums are
            float32 or better (float64 when asked for), ridge statistics that are not compact always float64.
            kind: "keys" keeps keys and values where fewer numbers would do; None = ``kind_for``.
        """
        operator = operator_of("Memory.empty", operator)
        if isinstance(key_dim, int):
            operator = operator.for_dim(key_dim)
        operator.check("Memory.empty", key_dim if isinstance(key_dim, int) else None)
        if operator.anchor.couples:
            raise ArgumentError(
                f"Memory.empty: operator {operator.name!r} reads all queries together, so that a memory read query "
                "by query would give other answers. Use attention on all of them."
            )
        for name, value in (("batch", batch), ("heads", heads), ("key_dim", key_dim), ("value_dim", value_dim)):
            if not fits(value, int) or value < 1:
                raise ArgumentError(f"Memory.empty: {name} must be a whole number >= 1, received {value!r}.")
        if dtype not in FLOATS:
            raise ArgumentError(f"Memory.empty: dtype must be float16, bfloat16, float32 or float64, received {dtype}.")
        natural = Memory.kind_for(operator, key_dim)
        kind = natural if kind is None else kind
        if kind not in Memory.kinds:
            raise unknown_name("Memory.empty", "kind", kind, Memory.kinds)
        if kind not in (natural, "keys") and not (kind == "decayed" and natural == "features"):
            raise ArgumentError(
                f"Memory.empty: operator {operator.name!r} cannot keep its past as {kind!r}; it can as "
                f"{' or '.join(repr(one) for one in dict.fromkeys((natural, 'keys')))}."
            )
        device = torch.get_default_device() if device is None else torch.device(device)
        return Memory.kinds[kind].start(operator, Form(batch, heads, key_dim, value_dim, dtype, device))

    # --- what it can do -----------------------------------------------------------------------------------------------

    @known_names
    def absorb(
        self,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        log_decay: Tensor | None = None,
        key_bias: Tensor | None = None,
        action_mask: Tensor | None = None,
        key_gate: Tensor | None = None,
        *,
        span: str | None = None,
    ) -> "Memory":
        """The memory after more tokens: k (B, Hkv, n, D), v (B, Hkv, n, P), masks, priors and weights as in
        ``zonal.attention``.

        span: a name that these tokens can be forgotten by.

        Raises: ArgumentError for shapes and names that are taken, NonFiniteError for NaN or infinity in a real token.
        """
        if span is not None:
            self._check_new([span], "absorb")
            self._at_border("open")
        check_tensors("Memory.absorb", {"k": k, "v": v})
        shape = (self.form.batch, self.form.heads, k.shape[2] if k.ndim == 4 else 0)
        check_weights("Memory.absorb", self.operator, shape, action_mask, key_gate, key_padding_mask, whole=False)
        check_tokens(self.operator, self.form, k, v, key_padding_mask, log_decay, key_bias, key_gate)
        if key_padding_mask is not None:  # whatever it holds, padding is in no product, here or in the gradients
            hidden = ~key_padding_mask[:, None]
            k, v = (x.masked_fill(hidden[..., None], 0) for x in (k, v))
            key_bias, key_gate = (None if x is None else x.masked_fill(hidden, 0) for x in (key_bias, key_gate))
        tokens = prepared(self.operator, self.form, k, v, key_padding_mask, log_decay, key_bias)
        keys, values = weighed(tokens.k, tokens.v, action_mask, key_gate)
        tokens = tokens._replace(k=keys, v=values)
        whole = self.unnamed()
        with torch.autocast(self.form.device.type, enabled=False):  # sums keep their type
            # a named span is added as one sum, as ``forget`` adds the parts that are left
            after = (
                whole.extended(tokens)
                if span is None
                else whole.followed_by(self.start(self.operator, self.form).extended(tokens))
            )
            after.warn_of_drift(self.count, stacklevel=4)
            return self.recorded(after, tokens) if span is None else self.open(span).recorded(after, tokens).close()

    @known_names
    def absorb_(
        self,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        log_decay: Tensor | None = None,
        key_bias: Tensor | None = None,
        action_mask: Tensor | None = None,
        key_gate: Tensor | None = None,
        *,
        span: str | None = None,
    ) -> Self:
        """``absorb`` in place."""
        return self._become(self.absorb(k, v, key_padding_mask, log_decay, key_bias, action_mask, key_gate, span=span))

    @known_names
    def merge(self, other: "Memory", *, span: str | None = None) -> "Memory":
        """The memory of this one's tokens and then the other's, with the spans of both. Associative; commutative only
        where order means nothing.

        span: a name for all of the other's tokens. Raises: ArgumentError for unlike memories and for names that are
        taken.
        """
        return self.joined(other, span, ({}, {}))

    @known_names
    def merge_(self, other: "Memory", *, span: str | None = None) -> Self:
        """``merge`` in place."""
        return self._become(self.merge(other, span=span))

    def joined(
        self, other: "Memory", span: str | None, marks: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    ) -> "Memory":
        """``merge``. marks: what goes with the ends of both."""
        self._same_form("merge", other)
        if span is not None and other.parts:
            raise ArgumentError(
                f"Memory.merge: the other memory has spans of its own, so {span!r} cannot name all of it. Name it "
                "with other.unnamed(), or leave span out."
            )
        theirs = [part.name for part in other.parts if part.name is not None]
        self._check_new(theirs if span is None else [span], "merge")
        if other.parts or span is not None:
            self._at_border("open")
        whole = self.unnamed().followed_by(other.unnamed())
        whole.warn_of_drift(max(self.count, other.count), stacklevel=5)
        return self.together(other, whole, span, marks)

    def subtract(self, other: "Memory") -> "Memory":
        """The memory as if the other's tokens had not been absorbed: subtract(merge(a, b), a) = b up to rounding.

        What has named spans is taken out by their names, as ``forget`` does.

        Raises: ArgumentError when more would be taken out than was put in, or when the other cannot be a part of this
        one.
        """
        self._same_form("subtract", other)
        if other.count > self.count:
            raise ArgumentError(
                f"Memory.subtract: the other memory holds {other.count} tokens, this one only {self.count}. It is no "
                "part of it."
            )
        if not self.parts and not other.parts:
            return self.unnamed().without(other)
        return self._without_spans(other)

    def subtract_(self, other: "Memory") -> Self:
        """``subtract`` in place."""
        return self._become(self.subtract(other))

    def _without_spans(self, other: "Memory") -> "Memory":
        mine = {span.name: span.count for span in self.spans()}
        theirs = {span.name: span.count for span in other.spans()}
        for name, count in theirs.items():
            if mine.get(name) != count:
                here = f"was never absorbed here (spans: {sorted(mine) or 'none'})"
                if name in mine:
                    here = f"has {mine[name]} tokens here and {count} there"
                raise ArgumentError(
                    f"Memory.subtract: span {name!r} {here}; the other memory is no part of this one. Subtract what "
                    "was merged."
                )
        if sum(theirs.values()) != other.count:
            raise ArgumentError(
                "Memory.subtract: where tokens belong that have no name cannot be told in a memory with named spans. "
                "Forget spans by name, or subtract from unnamed()."
            )
        rest: Memory = self
        for name in theirs:
            rest = rest.forget(name)
        return rest

    def forget_(self, span: str) -> Self:
        """``forget`` in place."""
        return self._become(self.forget(span))

    def decoder(self) -> Decoder:
        """A decoder that continues from this memory token by token, in place: ``y = decoder.step(q, k, v)``.

        ``decoder.memory()`` returns the memory so far. This memory is not changed.
        """
        return Decoder.implementation(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def fork(self) -> Self:
        """A copy that shares no storage."""
        return self.mapped(self.form, torch.clone)

    def to(self, device: torch.device | str) -> Self:
        """The memory on another device. Its operator stays where it is: move the model, too."""
        if not isinstance(device, torch.device | str):
            raise ArgumentError(
                f"Memory.to: a device such as 'cpu' or 'cuda' was required, received {device!r}. A memory keeps the "
                "dtype that it was made with."
            )
        device = torch.device(device)
        return self.mapped(self.form._replace(device=device), lambda x: x.to(device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, atomically: operator, what it learned and drew, shapes, dtype, count, spans,
        checksum.
        """
        files.save(
            path,
            {"operator": self.operator.config(), **self.about()},
            self.contents(),
            {**self.operator.learned_parts, **dict(self.operator.fixed_parts.named_buffers())},
        )

    @staticmethod
    def load(path: str | os.PathLike[str], operator: Operator | str | None = None) -> "Memory":
        """Read a file of ``save``; with ``operator`` (or a spec, which makes a new one) the memory belongs to that one,
        which must be declared alike.

        Raises: FileFormatError for missing, truncated, damaged or foreign files and memories of another operator;
        ArgumentError for what is no operator.
        """
        operator = None if operator is None else operator_of("Memory.load", operator)
        header, tensors, learned = files.load(path)
        with understood("load memory", path):
            if operator is None:
                operator = Operator.from_config(header["operator"])
                for name, initial in list(operator.learned_parts.items()):
                    found = learned[name]
                    if not (found.is_floating_point() and len(found) and found.shape[1:] == initial.shape[1:]):
                        raise ValueError(f"{name} of its operator is {found.dtype} of shape {tuple(found.shape)}")
                    operator.learned_parts[name] = torch.nn.Parameter(found)
                for name, _ in list(operator.fixed_parts.named_buffers()):
                    if name in learned:  # files written before have what the declared seed draws
                        operator.fixed_parts.register_buffer(name, learned[name])
            elif not declared_alike(operator, header["operator"]):  # a user's own parts are compared, never looked up
                spec = header["operator"]["spec"]
                raise ValueError(f"it belongs to operator {spec!r}, and {operator.spec!r} was given")
            for name, drawn in operator.fixed_parts.named_buffers():
                if name in learned and not same_but_for_type(learned[name], drawn):
                    raise ValueError(f"its operator drew other numbers ({name}) than the one that was given")
            return Memory.described(header, tensors, operator, torch.device("cpu"))

    def about(self) -> dict[str, Any]:
        """What a file has to say of the memory besides its tensors and its operator."""
        form = self.form._asdict() | {"dtype": str(self.form.dtype).removeprefix("torch.")}
        form.pop("device")
        parts = [part.about() for part in self.settled_parts()]
        return {"memory": self.kind, **form, "count": self.count, "plain": self.plain(), "parts": parts}

    def contents(self) -> dict[str, Tensor]:
        """Everything to be saved, by name, spans included."""
        parts = enumerate(self.settled_parts())
        return self.tensors() | {f"part{i}.{name}": x for i, part in parts for name, x in part.tensors().items()}

    @staticmethod
    def described(
        about: Mapping[str, Any], tensors: Mapping[str, Tensor], operator: Operator, device: torch.device
    ) -> "Memory":
        """The memory that ``about()`` and ``contents()`` described. Raises: KeyError, ValueError and the like when they
        do not fit.
        """
        dtype = getattr(torch, about["dtype"])
        numbers = [about[name] for name in ("batch", "heads", "key_dim", "value_dim", "count")]
        if dtype not in FLOATS or not all(isinstance(n, int) and 0 <= n < ENDLESS for n in numbers):
            raise ValueError("shapes or dtype make no sense")
        if strange := [name for name, x in tensors.items() if x.is_complex()]:
            raise ValueError(f"{strange[0]} holds complex numbers")
        form = Form(numbers[0], numbers[1], numbers[2], numbers[3], dtype, device)
        told = about.get("parts", [])
        groups: list[dict[str, Tensor]] = [{} for _ in told]
        own: dict[str, Tensor] = {}
        for name, x in tensors.items():
            head, _, leaf = name.partition(".")
            if not (head.startswith("part") and head[4:].isdigit()):
                own[name] = x
            elif int(head[4:]) < len(groups):
                groups[int(head[4:])][leaf] = x
            else:
                raise ValueError(f"{name!r} belongs to a span that is not announced")
        parts = tuple(_part(one, group, operator, form) for one, group in zip(told, groups, strict=True))
        if parts and (held := sum(part.count for part in parts)) != numbers[4]:
            raise ValueError(f"{numbers[4]} tokens are announced and its spans hold {held}")
        whole = Memory.kinds[about["memory"]].restored(operator, form, numbers[4], own, about["plain"])
        return dataclasses.replace(whole, parts=parts)

    # --- what it is ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        spans = [span.name for span in self.spans()]
        named = f", spans {spans}" if spans else ""
        return (
            f"{type(self).__name__}(operator {self.operator.name!r}, {self.count} tokens, {self.nbytes} bytes, "
            f"form {self.form.shown()}{named})"
        )

    @property
    def batch(self) -> int:
        return self.form.batch

    @property
    def drift(self) -> float:
        """A bound on the rounding error of each number of the sums, relative to the sum of its terms' absolute values.

        It is the bound of recursive summation, for any order of absorbing, merging and forgetting: (n + 8) u for n
        tokens, 8 u of it for the terms themselves, with u = 2^-24 in float32 and 2^-53 in float64; four times as much
        where the past fades. Most errors cancel, to about the square root of the bound. 0 for kept keys and values.
        ``absorb``, ``merge``, attention and a decoder's steps warn where it passes 0.25.
        """
        return self._drift_each * (self.count + 8)

    @property
    def _drift_each(self) -> float:
        """What each token adds to ``drift``."""
        dtype = torch.float64 if self.double else self.form.statistics
        return self.roundings * torch.finfo(dtype).eps / 2

    @property
    def unfaded(self) -> float:
        """The number of tokens, or of those that have not faded where the past fades."""
        return self.count

    @property
    def tokens_before_drift(self) -> int:
        """After how many tokens ``drift`` reaches ``MOST_DRIFT``."""
        return int(MOST_DRIFT / self._drift_each) - 8 if self._drift_each else ENDLESS

    def warn_of_drift(self, before: int, stacklevel: int) -> None:
        """Warn where ``drift`` has passed ``MOST_DRIFT`` since the memory held ``before`` tokens.

        Where the past fades, the tokens count that have not faded, as errors fade with the terms that they are errors
        of. This waits for the device, and so is asked only once in ``tokens_before_drift``.
        """
        if torch.compiler.is_compiling():
            return
        most = self.tokens_before_drift
        if self.count // most <= before // most or self.unfaded < most:
            return
        remedy = (
            "leave out compact=True, so that the sums are float64"
            if self.kind == "compact"
            else "make the memory with dtype=torch.float64"
        )
        warnings.warn(
            f"Memory: this memory of kind {self.kind!r} holds sums of {self.form.statistics} over so many tokens that "
            f"their rounding errors may exceed {MOST_DRIFT} of their terms (Memory.drift is the bound). For so many "
            f"tokens {remedy}, or absorb the tokens that still matter into a new memory.",
            stacklevel=stacklevel,
        )

    # --- what a kind of memory provides; used by the execution paths on prepared keys and queries ---------------------

    @abc.abstractmethod
    def extended(self, tokens: Tokens) -> "Memory": ...

    @property
    @abc.abstractmethod
    def has_read(self) -> Tensor:
        """Which sequences have read a real token, (B,). Where a window has let go of tokens, padding may count, too."""

    @abc.abstractmethod
    def without(self, other: "Memory") -> "Memory":
        """``subtract`` of a memory of the same form."""

    # --- shared -------------------------------------------------------------------------------------------------------

    def _become(self, other: "Memory") -> Self:
        if type(other) is not type(self):
            raise ArgumentError(
                f"Memory: the result is a memory of kind {other.kind!r} and cannot replace one of kind {self.kind!r} "
                "in place; use the form that returns it."
            )
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, getattr(other, field.name))
        return self

    def _same_form(self, call: str, other: "Memory") -> None:
        if not isinstance(other, Memory):
            raise ArgumentError(f"Memory.{call}: another Memory is required, received {other!r}.")
        check_alike(call, self, other, free_batch=False)

    def of_operator(self, operator: Operator) -> bool:
        """Whether an operator is this memory's, or declared like it."""
        return operator is self.operator or same_declaration(operator, self.operator)


def _part(about: Mapping[str, Any], tensors: Mapping[str, Tensor], operator: Operator, form: Form) -> Part:
    """A part of a memory as a file describes it."""
    groups: dict[str, dict[str, Tensor]] = {"memory": {}, "tokens": {}, "mark": {}}
    for name, x in tensors.items():
        group, _, leaf = name.partition(".")
        groups[group][leaf] = x
    name, count = about["name"], about["count"]
    if not isinstance(count, int) or count < 0 or not (name is None or isinstance(name, str)):
        raise ValueError(f"a span of name {name!r} and {count!r} tokens makes no sense")
    held: Memory | Tokens | None = None
    if "kind" in about:
        held = Memory.kinds[about["kind"]].restored(operator, form, count, groups["memory"], about["plain"])
    elif groups["tokens"]:
        held = Tokens(**groups["tokens"])
        by_head = (form.batch, form.heads, count)
        if held.k.shape[:3] != by_head or held.v.shape != (*by_head, form.value_dim):
            raise ValueError(f"the tokens of span {name!r} do not have the shapes of the header")
    return Part(name, count, held, groups["mark"])


Memory.kinds = {}

__all__ = ["Form", "Memory"]
