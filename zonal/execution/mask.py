"""What weighs the keys of a call: their decays, and the masses of the queries and keys of a plan."""

from typing import NamedTuple

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra import Operator
from zonal.algebra.anchor import Marginals, Potentials
from zonal.algebra.anchor.plan import ABSENT
from zonal.algebra.declaration import require_values
from zonal.algebra.operator import Bound
from zonal.algebra.prior import Visibility
from zonal.errors import ArgumentError
from zonal.memory.incoming import decay_of
from zonal.typed import check_tensors


class Masses(NamedTuple):
    """What a call says of a plan's masses: query_mass (B, H, T), key_mass (B, Hkv, S), and potentials to start from."""

    query: Tensor | None = None
    key: Tensor | None = None
    start: Potentials | None = None


NO_MASSES = Masses()


def marginals_of(
    operator: Operator, seen: Visibility, shape: tuple[int, int, int, int, int], device: torch.device,
    dtype: torch.dtype, masses: Masses,
) -> Marginals | None:  # fmt: skip
    """Log masses for (B, H, Hkv, T, S); those of each document sum to one. None when queries do not affect one another.

    A document (or a whole sequence) of which queries or keys have no mass at all takes no part.

    Raises: ArgumentError for masses that an operator has no use for, that do not fit, or that no plan can have.
    """
    _check_masses(operator, masses, shape, device)
    batch, heads, kv_heads, queries, keys = shape
    query_mass, key_mass, start = masses
    if not operator.anchor.couples:
        return None
    if operator.anchor.family == "tree" and (queries != keys or seen.packed):
        what = f"{seen.documents} packed documents" if seen.packed else f"{queries} queries and {keys} keys"
        raise ArgumentError(
            f"attention: operator {operator.name!r} has anchor Hierarchical, which needs queries and keys of the same "
            f"tokens, one tree for each sequence; received {what}. "
            "Pass sequences as rows of a batch, with key_padding_mask."
        )
    sees, seen_by = _meeting(seen, device)
    mu = sees.to(dtype).expand(batch, heads, queries) if query_mass is None else query_mass.to(dtype)
    nu = (
        seen_by.to(dtype).expand(batch, heads, keys)
        if key_mass is None
        else key_mass.to(dtype).repeat_interleave(heads // kv_heads, 1)
    )
    # a plan does not change when all masses of a document are multiplied by one number, which leaves the gradient of
    # their sum to rounding: tokens that take no part get none of it
    mu, nu = (mass.masked_fill(mass == 0, 0) for mass in (mu, nu))
    for name, mass, meets in (("query_mass", query_mass, sees), ("key_mass", key_mass, seen_by)):
        if mass is not None and mass.device.type != "meta" and bool(((mass > 0) & ~meets).any()):
            whom, rule = ("queries", "see no key") if name == "query_mass" else ("keys", "are seen by no query")
            raise ArgumentError(
                f"attention: {name} is positive for {whom} that {rule}, so that no plan has these masses. "
                "Set it to 0 where key_padding_mask or a window hides everything."
            )
    if seen.borders is None:
        place = [torch.zeros(n, dtype=torch.int64, device=device) for n in (queries, keys)]
    else:
        place = [torch.bucketize(torch.arange(n), seen.borders[1:], right=True).to(device) for n in (queries, keys)]
    totals = [
        mass.new_zeros(batch, heads, seen.documents).index_add(2, where, mass)
        for mass, where in zip((mu, nu), place, strict=True)
    ]
    both = (totals[0] > 0) & (totals[1] > 0)
    found = []
    for mass, where, total in zip((mu, nu), place, totals, strict=True):
        there = (mass > 0) & both[..., where]
        share = torch.where(there, mass, 1) / torch.where(both, total, 1)[..., where]
        found.append(torch.where(there, share.log(), ABSENT))
    return Marginals(found[0], found[1], start)


def _check_masses(
    operator: Operator, masses: Masses, shape: tuple[int, int, int, int, int], device: torch.device
) -> None:
    """Raise ArgumentError for masses and potentials that the operator does not take, or whose shape or values do not
    fit.
    """
    batch, heads, kv_heads, queries, keys = shape
    query_mass, key_mass, start = masses
    check_tensors("attention", {"query_mass": query_mass, "key_mass": key_mass}, device, optional=True)
    given = {"query_mass": (query_mass, (batch, heads, queries)), "key_mass": (key_mass, (batch, kv_heads, keys))}
    for name, (mass, fits) in given.items():
        if mass is None:
            continue
        if operator.anchor.family != "plan":
            raise ArgumentError(
                f"attention: {name} is for anchors with masses, and operator {operator.name!r} has anchor "
                f"{type(operator.anchor).__name__}. Use m.sinkhorn(), or leave it out."
            )
        if tuple(mass.shape) != fits or not mass.is_floating_point():
            raise ArgumentError(
                f"attention: {name} must be floating point of shape {fits}, received {mass.dtype} of shape "
                f"{tuple(mass.shape)}."
            )
        if mass.device.type != "meta" and not bool((torch.isfinite(mass) & (mass >= 0)).all()):
            raise ArgumentError(
                f"attention: {name} must be finite and >= 0, 0 for a token that takes no part; "
                f"received values from {float(mass.min()):g} to {float(mass.max()):g}."
            )
    if start is None:
        return
    if not isinstance(start, Potentials):
        raise ArgumentError(
            f"attention: start must be what zonal.potentials returns, or None, received {type(start).__name__}."
        )
    if operator.anchor.family != "plan":
        raise ArgumentError(
            f"attention: start is for anchors that make a plan, and operator {operator.name!r} has anchor "
            f"{type(operator.anchor).__name__}. Leave it out."
        )
    for name, potential, tokens in (("query", start.query, queries), ("key", start.key, keys)):
        if potential.shape != (batch, heads, tokens) or not bool(torch.isfinite(potential).all()):
            raise ArgumentError(
                f"attention: start.{name} must be finite potentials of shape {(batch, heads, tokens)}, "
                f"received shape {tuple(potential.shape)}. Leave start out to begin at zero."
            )


def _meeting(seen: Visibility, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which queries see a key, (B or 1, 1, T), and which keys a query sees, (B or 1, 1, S)."""
    open_ = seen.hi > seen.lo
    edge = torch.zeros(seen.keys + 1, dtype=torch.int64)
    edge.index_add_(0, seen.lo[open_], torch.ones_like(seen.lo[open_])).index_add_(
        0, seen.hi[open_], -torch.ones_like(seen.hi[open_])
    )
    reached = (edge.cumsum(0)[:-1] > 0).to(device)[None, None]
    return seen.count(device) > 0, reached if seen.key_mask is None else reached & seen.key_mask[:, None]


def log_decay_of(bound: Bound, k: Tensor, padding: Tensor | None, given: Tensor | None) -> Tensor | None:
    """The log decay of each key (``decay_of``). Raises: ArgumentError for a given one that is positive or NaN."""
    if torch_func.mapped(given):
        raise ArgumentError(
            "attention: log_decay must be <= 0, which cannot be checked under torch.func.vmap. "
            "Fold that axis into the batch."
        )
    decay = decay_of(bound, k, padding, given)
    if given is not None and decay is not None:
        require_values(
            (decay <= 0).all(),
            "attention: log_decay must be <= 0 (a rate from 0 to 1), received positive values or NaN.",
        )
    return decay


__all__ = ["NO_MASSES", "Masses", "log_decay_of", "marginals_of"]
