"""``zonal.explain``: how a call would run, what it costs, what was refused and why, and what the operator assumes."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zonal.algebra import Move, Operator, ledger
from zonal.algebra.named import operator_of
from zonal.errors import ArgumentError
from zonal.execution import machine as machines
from zonal.execution.call import Call, Held, check_carried, prepare
from zonal.execution.machine import Machine
from zonal.execution.paths.coverage import Coverage, measured
from zonal.execution.plan import Choice, choose, duration
from zonal.execution.routes import Route
from zonal.execution.shape import Shape, shape_of
from zonal.kernels.native import shown
from zonal.memory import Memory
from zonal.names import known_names
from zonal.typed import check_switch, check_tensors

LENGTHS = (1024, 16384, 131072)
_HELD = 1024


@dataclass(frozen=True)
class Explanation:
    """A plan and its grounds. Printing it gives a page for people, ``to_dict`` plain values for programs.

    plan: path, reason, estimates (fastest first), refused.
    memory_bytes: the memory of one sequence after 1k, 16k and 128k tokens; empty when all queries are read together.
    moves: the ledger.
    coverage: the share of a sample that the sparse path's candidates find, None without a sample.
    machine: the machine whose measured speeds the estimates use.
    """

    operator: str
    declaration: str
    shape: Shape
    dtype: str
    plan: Choice
    memory_kind: str
    memory_bytes: Mapping[int, int]
    moves: tuple[Move, ...]
    machine: str
    coverage: Coverage | None = None

    @property
    def path(self) -> str:
        return self.plan.path

    @property
    def why(self) -> str:
        return self.plan.reason

    @property
    def tiles(self) -> str:
        """What runs the tiled path."""
        return self._by("tiled")

    @property
    def sums(self) -> str:
        """What runs the chunked path's sums over features, as far as it has any."""
        return self._by("chunked", "sums")

    @property
    def ridge(self) -> str:
        """What runs the chunked path's ridge read-outs, as far as it has any."""
        return self._by("chunked", "ridge")

    @property
    def candidates(self) -> str:
        """What runs the sparse path, as far as it can run."""
        return self._by("sparse")

    @property
    def decode(self) -> str:
        """What runs the streaming path's few tokens after a memory of sums."""
        return self._by("streaming")

    def _by(self, path: str, family: str = "") -> str:
        """What runs a path: a compiled kernel, or torch and why."""
        if family not in ("", self.shape.tags.family):
            return f"torch, for its anchor is not one of {family}"
        if any(e.path == path and e.route.compiled for e in self.plan.estimates):
            return "a compiled kernel"
        reasons = [why for route, why in self.plan.found.without.items() if route.path == path]
        return f"torch, for {'; '.join(reasons) or self.plan.refused.get(path, 'it has no kernel here')}"

    def _implementation(self, route: Route) -> str:
        """The name of a route, with the instruction set of a C++ kernel: "C++ AVX2"."""
        if not route.sources:
            return route.name
        return route.name.replace("C++", f"C++ {shown(route.sources[0], getattr(torch, self.dtype)).label}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        p = self.shape
        return {
            "operator": self.operator,
            "declaration": self.declaration,
            "call": {
                "batch": p.batch, "heads": p.heads, "kv_heads": p.kv_heads, "queries": p.queries, "keys": p.keys,
                "key_dim": p.dim, "value_dim": p.value_dim, "dtype": self.dtype, "device": str(p.device),
                "causal": p.tied, "gradients": p.gradients, "key_padding": p.padded, "documents": p.documents,
                "memory_tokens": p.past,
            },
            "path": self.path, "why": self.why, "tiles": self.tiles, "sums": self.sums, "ridge": self.ridge,
            "decode": self.decode, "candidates": self.candidates,
            "coverage": None if self.coverage is None else asdict(self.coverage),
            "estimates": [{"path": e.path, **e._asdict(), "route": e.route.name} for e in self.plan.estimates],
            "refused": dict(self.plan.refused),
            "memory": {
                "kind": self.memory_kind,
                "bytes_per_sequence": {str(n): size for n, size in self.memory_bytes.items()},
            },
            "ledger": [asdict(move) for move in self.moves],
            "machine": self.machine,
        }  # fmt: skip

    def __str__(self) -> str:
        p = self.shape
        about = [
            str(p), self.dtype, str(p.device), "causal" if p.tied else "bidirectional",
            "with gradients" if p.gradients else "no gradients", *(["key padding"] if p.padded else []),
            *([f"{p.documents} packed documents"] if p.documents > 1 else []),
        ]  # fmt: skip
        rows = [("path", "route", "time", "FLOPs", "moved", "peak memory", "torch calls")]
        for e in self.plan.estimates:
            mark = "*" if e == self.plan.estimates[0] else " "
            rows.append(
                (
                    f"{mark} {e.path}",
                    self._implementation(e.route),
                    duration(e.seconds),
                    f"{e.flops:.3g}",
                    size(e.bytes_moved),
                    size(e.peak_bytes),
                    f"{e.calls:,}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  "
            + "  ".join(
                cell.rjust(w) if i > 1 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        refused = [f"  {path:<9} {why}" for path, why in self.plan.refused.items()] or ["  nothing"]
        kept = ", ".join(f"{size(n)} after {length // 1024}k" for length, n in self.memory_bytes.items())
        memory = (
            f"{self.memory_kind}; one sequence keeps {kept} tokens" if kept else "none: all queries are read together"
        )
        return "\n".join(
            [
                f"operator  {self.operator}: {self.declaration}",
                f"call      {', '.join(about)}",
                f"path      {self.path}",
                f"why       {self.why}",
                "estimates",
                *(row.rstrip() for row in table),
                "refused",
                *refused,
                *([] if self.coverage is None else [f"coverage  {self.coverage}"]),
                f"memory    {memory}",
                f"machine   {self.machine}",
                "ledger",
                *("  " + line for line in ledger.text(self.moves).splitlines()),
            ]
        )


def size(count: float) -> str:
    """A number of bytes as text, such as 1.5 MiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.0f} {unit}" if count >= 100 * scale else f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


@known_names
def explain(
    operator: Operator | str,
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    v_shape: Sequence[int] | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradients: bool = False,
    key_padding: bool = False,
    packed: Sequence[int] | Tensor | None = None,
    memory: bool | int = False,
    path: str = "auto",
    sample: tuple[Tensor, Tensor] | None = None,
) -> Explanation:
    """How ``zonal.attention`` would run a call of these shapes, and why. Nothing of their size is allocated.

    Args:
        q_shape, k_shape, v_shape: (B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, P). By default k has the shape of q, and v
            the shape of k.
        causal, scale, path: as ``zonal.attention`` has them.
        gradients: whether backward follows; what the operator learns then counts, too.
        key_padding: whether there is a key_padding_mask. packed: borders of documents, as cu_seqlens.
        memory: how many tokens the call continues from (True: 1024). The call then also returns a memory of the
            operator's own kind.
        sample: queries (B, H, T, D) and keys (B, Hkv, S, D) of the call's shapes, for operators that declare a
            search. ``coverage`` then says what the sparse path finds of them, measured on some rows against all keys.

    Raises: ArgumentError for what ``zonal.attention`` would refuse, with the same words.
    """
    operator = operator_of("explain", operator)
    check_switch("explain", "gradients", gradients)
    check_switch("explain", "key_padding", key_padding)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"explain: dtype must be a type of torch such as torch.float32, received {dtype!r}.")
    place = _place(device)
    shapes = full_shapes(q_shape, k_shape, v_shape)
    if memory is not False and (not isinstance(memory, int) or memory < 0):
        raise ArgumentError(f"explain: memory must be True, False or a number of tokens, received {memory!r}.")
    call = _call(operator, shapes, causal, scale, dtype, gradients, key_padding, packed)
    with torch.set_grad_enabled(gradients):
        heads, key_dim, value_dim = call.k.shape[1], call.head_dim, call.v.shape[3]
        kind = Memory.kind_for(operator, key_dim)
        held = None if memory is False else Held(kind, _HELD if memory is True else memory)
        if held is not None:
            check_carried(call, held.tokens)
        call = replace(call, held=held, place=place)
        speeds = machines.machine_for(place)
        forced = None if path == "auto" else choose(call, path)
        choice, rows = choose(call, machine=speeds), heads if operator.anchor.solves else call.bound.heads
        if forced is not None:  # what the other paths would cost, behind the one that was asked for
            first = tuple(sorted(choice.estimates, key=lambda estimate: estimate.path != path))
            choice = replace(choice, routes=forced.routes, estimates=first, unranked=forced.unranked)
        shape = shape_of(call)
    one = None
    if not operator.anchor.couples:
        one = Memory.empty(operator, 1, heads, max(key_dim, 1), max(value_dim, 1), dtype, "meta")
    return Explanation(
        operator=operator.spec, declaration=_declaration(operator), shape=shape,
        dtype=str(dtype).removeprefix("torch."), plan=choice, memory_kind=kind if one is not None else "none",
        memory_bytes={} if one is None else {length: one.bytes_at(length) for length in LENGTHS},
        moves=operator.replace(link=operator.link.sized(key_dim).spread(rows)).moves(), machine=_machine(speeds, place),
        coverage=None if sample is None else _covered(operator, sample, call, causal, scale),
    )  # fmt: skip


def _covered(
    operator: Operator, sample: tuple[Tensor, Tensor], call: Call, causal: bool, scale: float | None
) -> Coverage:
    """What the sparse path finds of a sample for the call."""
    q, k = sample
    check_tensors("explain", {"the sample's q": q, "the sample's k": k})
    assert call.raw is not None
    if (q.shape, k.shape) != (call.raw.q.shape, call.raw.k.shape):
        raise ArgumentError(
            f"explain: sample must have the call's shapes, {tuple(call.raw.q.shape)} and {tuple(call.raw.k.shape)}, "
            f"received {tuple(q.shape)} and {tuple(k.shape)}."
        )
    return measured(operator, q, k, causal=causal, cu_seqlens=call.visibility.edges, scale=scale)


def _place(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"explain: device must be one of torch such as 'cpu', received {device!r}.") from error


def full_shapes(
    q_shape: Sequence[int], k_shape: Sequence[int] | None, v_shape: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """Of q, k and v: that of k is by default that of q, and that of v that of k."""
    shapes = [_checked("q_shape", q_shape)]
    shapes.append(shapes[0] if k_shape is None else _checked("k_shape", k_shape))
    return [*shapes, shapes[1] if v_shape is None else _checked("v_shape", v_shape)]


def _checked(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    numbers = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(numbers) != 4 or not all(isinstance(n, int) and n >= 0 for n in numbers):
        given = f"a tensor; pass its shape, {shape.shape}" if isinstance(shape, Tensor) else repr(shape)
        raise ArgumentError(f"explain: {name} must be 4 whole numbers (batch, heads, tokens, dim), received {given}.")
    return numbers


def _call(
    operator: Operator, shapes: list[tuple[int, ...]], causal: bool, scale: float | None, dtype: torch.dtype,
    gradients: bool, key_padding: bool, packed: Sequence[int] | Tensor | None,
) -> Call:  # fmt: skip
    """The call on meta tensors: shapes without numbers."""
    shadow = copy.deepcopy(operator).to("meta")
    for name, value in shadow.named_parameters():
        value.requires_grad_(dict(operator.named_parameters())[name].requires_grad)
    with torch.set_grad_enabled(gradients):
        q, k, v = (
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradients and dtype.is_floating_point)
            for shape in shapes
        )
        mask = torch.empty(k.shape[0], k.shape[2], dtype=torch.bool, device="meta") if key_padding else None
        edges = None if packed is None else _edges(packed)
        return prepare(shadow, q, k, v, causal=causal, key_padding_mask=mask, cu_seqlens=edges, scale=scale)


def _edges(packed: Sequence[int] | Tensor) -> Tensor:
    try:
        return torch.as_tensor(packed)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"explain: packed must hold the borders of documents such as [0, 40, 100], received {packed!r}."
        ) from error


def _declaration(operator: Operator) -> str:
    parts = [operator.score, operator.link, operator.anchor, *operator.prior]
    return " x ".join(type(part).__name__ for part in parts)


def _machine(machine: Machine, place: torch.device) -> str:
    threads = f", {machine.threads} thread{'s' if machine.threads != 1 else ''}" if place.type == "cpu" else ""
    busy = "; measured while the processor was busy: remove the file to measure again" if machine.contended else ""
    return f"{machine.name}{threads}; {machine.note}{busy}"


__all__ = ["LENGTHS", "Explanation", "explain"]
