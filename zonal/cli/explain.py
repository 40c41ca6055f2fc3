"""``zonal explain``: which path a call would take, why, what it costs, what was refused, and what the operator assumes."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

import zonal
from zonal import ledger, mechanisms
from zonal.cli import parse
from zonal.cli.options import device
from zonal.errors import ArgumentError
from zonal.execution.explain import Explanation
from zonal.execution.plan import duration
from zonal.report import formats

DESCRIPTION = """\
Say how an operator would be run on a shape: the path and the reason, estimates of every path that could run, what was refused
and why, the memory one sequence leaves, and the ledger of what the operator assumes. Nothing of that size is allocated.
The first call on a machine measures its speed, which takes some seconds.

Examples:
  zonal explain --operator sko --shape 1,8,4096,64 --causal
  zonal explain --operator 'ska(power=1)' --shape 4,8,1,64 --causal --memory 16384
  zonal explain --operator softmax --shape 1,8,2048,64 --kv-heads 2 --gradients --json"""


@dataclass(frozen=True)
class Explain:
    """Say how an operator would be run, and why."""

    operator: str = "softmax"
    """A name, or name(argument=value, ...)."""
    shape: Annotated[str | None, tyro.conf.arg(metavar="B,H,T,D", help_behavior_hint="(required)")] = None
    """Batch, heads, tokens and head dimension of the queries."""
    kv_heads: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as heads)")] = None
    """Key and value heads."""
    keys: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as tokens)")] = None
    """Number of keys."""
    value_dim: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: head dimension)")] = None
    """Dimension of the values."""
    causal: bool = False
    """Each query sees nothing later."""
    gradients: bool = False
    """Count the backward pass too."""
    key_padding: bool = False
    """With a mask of real keys."""
    memory: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: none)")] = None
    """Go on from a memory of so many tokens."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """Number format."""
    device: str = "cpu"
    """cpu, cuda or cuda:1."""
    json: bool = False
    """Print JSON instead of tables."""


def explained(options: Explain) -> Explanation:
    """What the library says of the options. Raises: ArgumentError for a shape that does not fit, an unknown operator or device."""
    if options.shape is None:
        raise ArgumentError("explain: --shape is required: batch,heads,tokens,head dimension, such as 1,8,4096,64.")
    operator = mechanisms.resolve(options.operator)
    batch, heads, tokens, dim = parse.shape(options.shape)
    key_heads, keys = options.kv_heads or heads, tokens if options.keys is None else options.keys
    return zonal.explain(
        operator,
        (batch, heads, tokens, dim),
        (batch, key_heads, keys, dim),
        (batch, key_heads, keys, options.value_dim or dim),
        causal=options.causal,
        dtype=getattr(torch, options.dtype),
        device=device(options.device),
        gradients=options.gradients,
        key_padding=options.key_padding,
        memory=False if options.memory is None else options.memory,
    )


def _facts(found: Explanation) -> RenderableType:
    problem = found.problem
    tied = problem.span.causal or problem.span.chunk is not None
    call = [str(problem), found.dtype, str(problem.device), "causal" if tied else "bidirectional", "with gradients" if problem.gradients else "without gradients"]
    call += ["with key padding"] if problem.padded else []
    kept = ", ".join(f"{formats.bytes_(size)} after {formats.tokens(length)}" for length, size in found.memory_bytes.items())
    grid = Table.grid(padding=(0, 2))
    for name, text in (
        ("operator", f"{found.operator}: {found.declaration}"),
        ("call", ", ".join(call)),
        ("path", found.path),
        ("why", found.why),
        ("memory", f"{found.memory_kind}; one sequence keeps {kept} tokens"),
        ("machine", found.machine),
    ):
        grid.add_row(Text(name, style="dim"), Text(text, style="bold" if name == "path" else ""))
    return grid


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]], bold: str | None = None) -> RenderableType:
    """Numbers stand right, everything in a table of two or three columns of words left."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 3, 0, 0), header_style="dim")
    numbers = len(head) > 3
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if numbers and index else "left")
    for row in rows:
        table.add_row(*(Text(cell, style="bold" if row[0] == bold else "") for cell in row))
    return table


def _operations(count: float) -> str:
    """18.2 GFLOP."""
    text = formats.compact(count)
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def tables(found: Explanation) -> list[RenderableType]:
    """The explanation as tables for the terminal."""
    estimates = [
        (e.path, duration(e.seconds), _operations(e.flops), formats.bytes_(e.bytes_moved), formats.bytes_(e.peak_bytes), f"{e.calls:,}")
        for e in found.plan.estimates
    ]
    refused = [(path, why) for path, why in found.plan.refused.items()] or [("none", "every path can run this call")]
    tree = Tree(ledger.ROOT)
    for move in found.moves:
        branch = tree.add(Text(f"{move.step} [{move.slot}] {move.name}: {move.assumes}"))
        for derived in move.derives:
            branch.add(Text(derived.text, style="dim"))
    meaning = "; ".join(f"{step}: {text}" for step, text in ledger.STEPS.items())
    return [
        _facts(found),
        Text(),
        _table("Estimates", ("path", "time", "work", "moved", "peak memory", "torch calls"), estimates, found.path),
        Text(),
        _table("Refused", ("path", "because"), refused),
        Text(),
        Text("Ledger", style="bold"),
        tree,
        Text(meaning, style="dim"),
    ]


def run(options: Explain, command: str) -> int:
    """Run the command; returns the exit code."""
    found = explained(options)
    if options.json:
        print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False))
        return 0
    console = Console()
    # a file or a pipe has no width to keep to
    console = console if console.is_terminal else Console(width=160)
    for part in tables(found):
        console.print(part)
    return 0
