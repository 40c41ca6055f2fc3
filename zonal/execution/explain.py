"""``zonal.explain``: how a call would run, what it costs, what was refused and why, and what the operator assumes.
``zonal.plan``: the same as a value that runs calls of these shapes without planning again.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra import Move, Operator, ledger
from zonal.algebra.named import operator_of
from zonal.errors import ArgumentError
from zonal.execution import machine as machines
from zonal.execution.call import Call, Held, check_carried, lowered, prepare, spread
from zonal.execution.machine import Machine
from zonal.execution.numbers import Numbers, check_devices, devices_of
from zonal.execution.paths.coverage import Coverage, measured
from zonal.execution.paths.sums import Runner
from zonal.execution.plan import Choice, choose, duration, run
from zonal.execution.routes import Route
from zonal.execution.shape import Shape, shape_of
from zonal.kernels.native import shown
from zonal.kernels.op import plain
from zonal.memory import Memory
from zonal.names import known_names
from zonal.stretch import active
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
    shapes = _shapes(q_shape, k_shape, v_shape)
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


def _shapes(
    q_shape: Sequence[int], k_shape: Sequence[int] | None, v_shape: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """Of q, k and v, as they were given."""
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


# -- plans as values ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kernel:
    """A compiled kernel with all that follows from a plan, and the operator's numbers that it was given."""

    run: Runner
    numbers: Numbers

    def fits(self, operator: Operator) -> bool:
        """Whether the operator still has these numbers, and nobody asks for their gradients."""
        if self.numbers.none:
            return True
        return not torch.is_grad_enabled() and not self.numbers.changed(operator)


class Plan:
    """How calls of these shapes run. ``plan(q, k, v)`` runs one; ``print(plan)`` explains it as ``zonal.explain`` does.

    The operator's learned numbers are read at each call, so that a plan follows its operator through training.
    Gradients flow through a plan that was made for them. A plan refuses shapes, types and devices other than its own.

    path: that it takes. explanation: the choice and its grounds, as a value.
    """

    def __init__(
        self, operator: Operator, explanation: Explanation, causal: bool, scale: float | None,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.operator, self.explanation, self.causal, self.scale = operator, explanation, causal, scale
        self.shapes = tuple(map(torch.Size, shapes))
        self.dtype: torch.dtype = getattr(torch, explanation.dtype)
        self._kernel: _Kernel | None = None
        self._devices = devices_of(operator)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kernel": None}  # a copy prepares its own

    @property
    def path(self) -> str:
        return self.explanation.path

    def __str__(self) -> str:
        return str(self.explanation)

    def __repr__(self) -> str:
        return f"Plan({self.operator.name!r}, {self.explanation.shape}, {self.explanation.plan.routes[0]})"

    @known_names
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """y (B, H, T, P) of ``zonal.attention`` for tensors as the plan was made for, by the route that it chose.

        Raises: ArgumentError for other shapes, another type or device, an operator that has moved to another device, a
            mask where none was planned (or the reverse), and gradients where none were planned.
        """
        if active() is not None:
            raise ArgumentError(
                "plan: a plan is for the tokens of one process, and within sequence_parallel others hold the rest. "
                "Call zonal.attention."
            )
        kernel = self._kernel
        if kernel is not None and key_padding_mask is None and self._plain(q, k, v) and kernel.fits(self.operator):
            y = kernel.run(*spread(q, k, v), v)
            if y is not None:
                return y
        q, k, v = lowered("plan", q, k, v)
        self._check(q, k, v, key_padding_mask)
        with torch.autocast(q.device.type, enabled=False):
            call = prepare(
                self.operator, q, k, v, causal=self.causal, key_padding_mask=key_padding_mask, scale=self.scale
            )
            if call.recorded and not self.explanation.shape.gradients:
                raise ArgumentError(
                    "plan: gradients may be asked for, and the plan was made without them. Call it inside "
                    "torch.no_grad(), or make the plan with gradients=True."
                )
            if call.empty:
                return choose(call, "dense").routes[0].run(call)[0]
            # what the plan chose may know no transforms and no tangents
            again = torch_func.active() or torch_func.forward()
            y = run(choose(call, self.path) if again else self.explanation.plan, call)[0]
        if kernel is None and not torch.compiler.is_compiling() and self._plain(q, k, v):
            self._kernel = self._made(call)
        return y

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether a compiled kernel of the CPU may be given these tensors as they are."""
        if q is None or k is None or v is None or not plain((q, k, v)):  # plain() passes over None
            return False
        if (q.shape, k.shape, v.shape) != self.shapes:
            return False
        if not q.dtype is k.dtype is v.dtype is self.dtype is torch.float32:
            return False
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return False
        return not torch.is_autocast_enabled("cpu")

    def _made(self, call: Call) -> _Kernel | None:
        make = self.explanation.plan.routes[0].runner
        if make is None or self.explanation.shape.padded:
            return None
        with torch.inference_mode(False), torch.no_grad():
            found = make(call)
            return None if found is None else _Kernel(found, Numbers(call.operator))

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        check_devices("plan", self.operator, self._devices)
        device = self.explanation.shape.device
        for name, x, shape in zip("qkv", (q, k, v), self.shapes, strict=True):
            if x.shape != shape or x.dtype != self.dtype or x.device.type != device.type:
                raise ArgumentError(
                    f"plan: {name} must be {self.dtype} of shape {tuple(shape)} on {device}, received {x.dtype} of "
                    f"shape {tuple(x.shape)} on {x.device}. Make another plan for it, or call zonal.attention, which "
                    "plans each call."
                )
        if (mask is not None) != self.explanation.shape.padded:
            made, came = ("with", "none") if self.explanation.shape.padded else ("without", "one")
            raise ArgumentError(
                f"plan: the plan was made {made} a key_padding_mask, and the call has {came}. "
                f"Make another plan with key_padding={mask is not None}."
            )


@known_names
def plan(
    operator: Operator | str,
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    v_shape: Sequence[int] | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradients: bool | None = None,
    key_padding: bool = False,
    path: str = "auto",
) -> Plan:
    """A plan for calls of ``zonal.attention`` of these shapes: ``plan(q, k, v)`` runs them without planning again.

    Args:
        operator: an Operator, or a spec such as "sko", which is read once.
        q_shape, k_shape, v_shape: (B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, P). By default k has the shape of q, and v
            the shape of k.
        causal, scale, path: as ``zonal.attention`` has them.
        gradients: whether they flow; None = as torch.is_grad_enabled() says now.
        key_padding: whether calls have a key_padding_mask.

    Raises: ArgumentError for arguments that ``zonal.attention`` would refuse, in the same words; PathError when the
        path cannot run such calls.
    """
    operator = operator_of("plan", operator)
    found = explain(
        operator, q_shape, k_shape, v_shape, causal=causal, scale=scale, dtype=dtype, device=device,
        gradients=torch.is_grad_enabled() if gradients is None else gradients, key_padding=key_padding, path=path,
    )  # fmt: skip
    return Plan(operator, found, causal, scale, _shapes(q_shape, k_shape, v_shape))


__all__ = ["LENGTHS", "Explanation", "Plan", "explain", "plan"]
