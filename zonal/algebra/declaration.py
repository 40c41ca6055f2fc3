"""Declarations: frozen values that fill the slots of an operator, and can be printed, compared and saved as JSON."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from zonal.errors import ArgumentError, ZonalError, unknown_name
from zonal.typed import check_fields

_LEAST = torch.finfo(torch.float32).tiny
Step = Literal["closure", "restriction", "quotient", "section", "approximation"]


@dataclass(frozen=True)
class Derived:
    """A consequence of a move.

    theorem: the name under which tests check it numerically; "" if no finite check can show it.
    """

    theorem: str
    text: str


@dataclass(frozen=True)
class Move:
    """One step from the full interaction to the operator that runs, and its consequences.

    step: ``closure`` (fixes the set of units), ``restriction`` (admits fewer kernels), ``quotient`` (identifies kernels
    that a probe does not distinguish), ``section`` (chooses one kernel of each class), or ``approximation`` (replaces a
    function by a cheaper one).
    slot: of the declaration. name: the usual name. assumes: the assumption in words. settings: fields of the
    declaration that differ from their defaults.
    """

    step: Step
    slot: str
    name: str
    assumes: str
    derives: tuple[Derived, ...] = ()
    settings: str = ""

    @property
    def line(self) -> str:
        """The move in words, without its consequences."""
        return f"{self.step} [{self.slot}] {self.name}: {self.assumes}{f' ({self.settings})' if self.settings else ''}"


REGISTRY: dict[str, type["Declaration"]] = {}
"""Every declared type by its name, in the order of definition: what a configuration may contain."""


def declared(*slots: str) -> dict[str, type["Declaration"]]:
    """The library's own types of some slots by name, in the order of definition: the names that a spec may use."""
    return {name: kind for name, kind in REGISTRY.items() if kind.slot in slots and of_library(kind)}


class Declaration:
    """Base of the frozen dataclasses that fill the slots. Each subclass enters ``REGISTRY`` when it is defined.

    Abstract bases (``class Link(Declaration, abstract=True)``) and classes with a leading underscore do not.

    A declaration holds plain values only. ``initial()`` gives the initial values of its parameters by name, as tensors
    whose first axis runs over heads (one row is shared by all heads). The Operator makes them parameters and passes
    their current values back under the same names. ``fixed()`` gives buffers, which are drawn once and saved with the
    parameters.
    """

    slot: ClassVar[str]
    kv_rows: ClassVar[tuple[str, ...]] = ()
    """Names in ``initial()`` and ``fixed()`` with one row per key head, because a memory depends on them; the others
    have one row per query head.
    """
    later: ClassVar[tuple[str, ...]] = ()
    """Fields added after the first files were written: ``config()`` omits them at their default."""
    reserved: ClassVar[tuple[str, ...]] = ()
    """Names that say which kernels compute a part of the library, and that a user's class leaves alone."""

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__()
        if not of_library(cls):
            _refuse_base(cls)
        if abstract or cls.__name__.startswith("_"):
            return
        known = REGISTRY.get(cls.__name__, cls)
        # a class of the library keeps its name; one of a user may be defined anew, as a notebook does
        if of_library(known) and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ArgumentError(
                f"class {cls.__name__}: {known.__module__} declares a {known.slot} of this name, by which "
                "configurations find it. Give the class another name, or one that begins with an underscore."
            )
        REGISTRY[cls.__name__] = cls

    def initial(self) -> dict[str, Tensor]:
        return {}

    def fixed(self) -> dict[str, Tensor]:
        return {}

    def moves(self) -> tuple[Move, ...]:
        """The assumptions of this declaration and their consequences, for the ledger."""
        return ()

    def move(self, step: Step, name: str, assumes: str, *derives: Derived) -> Move:
        """One of ``moves``."""
        return Move(step, self.slot, name, assumes, derives)

    def settings(self) -> str:
        """The fields that differ from their defaults, as in its repr; "" if none does."""
        assert dataclasses.is_dataclass(self)
        defaults: dict[str, Any] = {}
        # the default of the first class with the field, so that two types with equal values have equal texts
        for kind in type(self).__mro__:
            defaults |= vars(kind)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values = {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}
        return ", ".join(f"{name}={_shown(value)}" for name, value in values.items())

    def config(self) -> dict[str, Any]:
        """The declaration as plain JSON values, with its type."""
        assert dataclasses.is_dataclass(self)
        kept = (
            field
            for field in dataclasses.fields(self)
            if field.name not in self.later or getattr(self, field.name) != field.default
        )
        fields = {field.name: _plain(getattr(self, field.name)) for field in kept}
        return {"type": type(self).__name__, **fields}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_shown(item) for item in value)}{',' if len(value) == 1 else ''})"
    return f"{type(value).__name__}({value.settings()})" if isinstance(value, Declaration) else repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Declaration):
        return value.config()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def of_library(kind: type) -> bool:
    """Whether a class is the library's own, not a user's."""
    return kind.__module__.partition(".")[0] == "zonal"


def _refuse_base(kind: type[Declaration]) -> None:
    """Raise ArgumentError for a user's subclass of anything but the bases of scores, links, anchors and maps, and for
    one that has a reserved name.
    """
    for base in kind.__mro__[1:]:
        if not (of_library(base) and issubclass(base, Declaration)) or base is Declaration:
            continue
        if base.slot == "prior":
            raise ArgumentError(
                f"class {kind.__name__}: priors cannot be added, because every path and memory would have to know "
                "them. Use those of zonal.prior, or key_bias and key_padding_mask of a call."
            )
        if Declaration not in base.__bases__:
            (root,) = (each for each in base.__mro__ if Declaration in each.__bases__)
            raise ArgumentError(
                f"class {kind.__name__}: {base.__name__} cannot be subclassed. Kernels, feature maps and memories "
                f"compute {base.__name__} itself, and would not see what {kind.__name__} changes. Derive the class "
                f"from {root.__name__} instead."
            )
    taken = [name for name in kind.reserved if name in vars(kind)]
    if taken:
        raise ArgumentError(
            f"class {kind.__name__}: {taken[0]} says which kernels compute the library's {kind.slot}s, and these "
            f"would not see what {kind.__name__} computes. Leave it out, or choose another name for a field."
        )


def from_config(config: Mapping[str, Any], slot: str) -> Declaration:
    """The declaration that ``config()`` wrote down. slot: the slot to fill, named in the error for an unknown type."""
    fields = dict(config)
    name = fields.pop("type", None)
    if not isinstance(name, str) or name not in REGISTRY:
        raise unknown_name("Operator.from_config", slot, str(name), REGISTRY)
    known = {field.name for field in dataclasses.fields(REGISTRY[name])}  # type: ignore[arg-type]
    for key in fields:
        if key not in known:
            raise unknown_name("Operator.from_config", f"field of {name}", key, known)
    values = {key: _read(value, key) for key, value in fields.items()}
    if of_library(REGISTRY[name]):
        check_fields("Operator.from_config", REGISTRY[name], values)
    return REGISTRY[name](**values)


def _read(value: Any, key: str) -> Any:
    """A value of a configuration: a declaration where it was one, a tuple where it is a list."""
    if isinstance(value, list):
        return tuple(_read(item, key) for item in value)
    return from_config(value, key) if isinstance(value, dict) else value


def vjp(pair: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad * pair(q, k)) with respect to q and k, by autograd."""
    with torch.enable_grad():
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        dq, dk = torch.autograd.grad(pair(q, k), (q, k), grad)
    return dq, dk


def row(*values: float) -> Tensor:
    """Initial values of a parameter, one per head group, in float32."""
    return torch.tensor(values, dtype=torch.float32)


def expand_rows(value: Tensor, rows: int, name: str, spread: bool = False) -> Tensor:
    """Head rows (R, ...) -> (rows, ...): repeated in turn for more heads, evenly thinned (keeping the last) for fewer.

    Raises: ArgumentError when neither number divides the other, unless they are to be spread (``spread_rows``).
    """
    have = value.shape[0]
    if rows % have == 0:
        # joining is three times faster than repeat for the few numbers that these are
        return value if rows == have else torch.cat([value] * (rows // have))
    if have % rows == 0:
        return value[have // rows - 1 :: have // rows]
    if spread:
        return value[spread_rows(have, rows)]
    raise ArgumentError(
        f"Operator: {name} is declared for {have} heads and meets {rows}; one number must divide the other. "
        "Declare as many values as heads, or one."
    )


def spread_rows(have: int, rows: int) -> list[int]:
    """The index of the declared value that each of ``rows`` heads takes, of ``have`` values.

    Values repeat in turn where they divide the heads; otherwise they are evenly spread in order, with the last one
    kept.
    """
    if rows % have == 0:
        return [i % have for i in range(rows)]
    return [-(-(i + 1) * have // rows) - 1 for i in range(rows)]


def require(condition: bool, message: str) -> None:
    """Raise ArgumentError with ``message`` unless ``condition``."""
    if not condition:
        raise ArgumentError(message)


def require_positive(name: str, value: float | None, why: str = "", *, optional: bool = False) -> None:
    """Raise ArgumentError unless ``value`` is > 0 in float32 too, or None where it is ``optional``.

    name: the call and the argument, "Cosine: temperature". why: what the limit is for.
    """
    if not (optional if value is None else value >= _LEAST):
        reason, other = f" ({why})" if why else "", " or None" if optional else ""
        raise ArgumentError(f"{name} must be > 0{reason}{other}, received {value!r}.")


def require_storable(part: Declaration) -> None:
    """Raise ArgumentError for a field of a declaration, or of one inside it, that files cannot hold: a number that is
    infinite or NaN, of which outputs would be NaN, and in a user's declaration a list, an array or the like.
    """
    assert dataclasses.is_dataclass(part)
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Declaration):
                require_storable(each)
            finite = not isinstance(each, float) or math.isfinite(each)
            require(finite, f"{type(part).__name__}: {field.name} must be finite, received {value!r}.")
        require(
            of_library(type(part)) or _is_plain(value),
            f"{type(part).__name__}: {field.name} must be a number, a text, None, a declaration, or a tuple of these, "
            f"received {value!r}. Write a list as a tuple; tensors are for initial() and fixed().",
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Declaration)


def require_one_of(name: str, value: object, valid: Iterable[object]) -> None:
    """Raise ArgumentError unless ``value`` is one of ``valid``. name: the call and the argument, "Dot: map"."""
    if value not in (valid := tuple(valid)):
        *others, last = map(repr, valid)
        raise ArgumentError(f"{name} must be {', '.join(others)} or {last}, received {value!r}.")


def require_values(condition: Tensor, message: str, error: type[ZonalError] = ArgumentError) -> None:
    """``require`` for a condition on the values of a tensor (one bool). In a traced graph it asserts at run time."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)  # pyright: ignore[reportPrivateImportUsage]
    elif not bool(condition):
        raise error(message)


def require_whole(name: str, value: object, least: int = 1, most: int = 2**20) -> None:
    """Raise ArgumentError unless ``value`` is a whole number from ``least`` to ``most``.

    name: the call and the argument, "Anchors: count".
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{name} must be a whole number >= {least}, received {value!r}.")
    require(value <= most, f"{name} must be a whole number of at most {most:,}, received {value!r}.")
