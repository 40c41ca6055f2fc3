"""``zonal explain``: the path a call takes, why, its cost, the paths refused, and what the operator assumes."""

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import zonal
from zonal import ledger, mechanisms
from zonal.cli import explain_model, explain_run, parse
from zonal.cli.console import ledger_tree, screen, table
from zonal.cli.explain_model import ModelLook
from zonal.cli.explain_run import RunLook
from zonal.cli.options import command_line, shown
from zonal.errors import ArgumentError
from zonal.execution.explain import Explanation
from zonal.execution.plan import duration
from zonal.limits import SIZE, TOKENS, Between
from zonal.report import formats
from zonal.training.environment import check_device

DESCRIPTION = """\
Print how an operator would run on a shape: the chosen path and the reason, estimates for every path that can run, why
the others were refused, the memory of one sequence, and the assumptions of the operator. It allocates no tensors of
that shape. The first call on a machine measures its speed, which takes some seconds.

With --model, describe the heads of a trained model: the shares of the scores that depend only on the query, only on
the key, and on a dot product of few numbers; the share that does not affect the weights (gauge); and how much the
weights change without the rest. --out writes a page with pictures.

With --model and --gpus, estimate a step of training that model on many GPUs, which this machine need not have: memory,
operations, traffic and time, from constants that are printed. --model may then also be the name of a model, or a JSON
file with the fields of a ModelConfig.

With --tree, print the steps that lead to each mechanism from the full interaction of all tokens.

Examples:
  zonal explain --operator sko --shape 1,8,4096,64 --causal
  zonal explain --operator 'ska(power=1)' --shape 4,8,1,64 --causal --memory 16384
  zonal explain --operator softmax --shape 1,8,2048,64 --kv-heads 2 --gradients --json
  zonal explain --model runs/train-text-1a2b3c4d --layer 1 --text "It was the best of times" --out page.html
  zonal explain --model echo-180M --gpus 64 --sequence-parallel 8 --batch-size 64 --tokens 32768 --dtype bfloat16"""


@dataclass(frozen=True)
class Explain:
    """Print how an operator would run, and why."""

    operator: str = "softmax"
    """A name, or name(argument=value, ...)."""
    shape: Annotated[str | None, shown("B,H,T,D", "required")] = None
    """Batch, heads, tokens and head dimension of the queries."""
    kv_heads: Annotated[int | None, SIZE, shown("INT", "default: as heads")] = None
    """Key and value heads."""
    keys: Annotated[int | None, TOKENS, shown("INT", "default: as tokens")] = None
    """Number of keys."""
    value_dim: Annotated[int | None, SIZE, shown("INT", "default: head dimension")] = None
    """Dimension of the values."""
    causal: bool = False
    """Each query sees only its own and earlier keys."""
    gradients: bool = False
    """Include the backward pass."""
    key_padding: bool = False
    """The call has a mask of padded keys."""
    memory: Annotated[int | None, Between(0, 2**40), shown("INT", "default: none")] = None
    """The call continues a memory of this many tokens."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"
    """Number format."""
    device: str = "cpu"
    """cpu, cuda or cuda:1."""
    json: bool = False
    """Print JSON instead of tables."""
    tree: bool = False
    """Print the tree of all mechanisms and the assumptions of its steps."""
    look: ModelLook = field(default_factory=ModelLook)
    run: RunLook = field(default_factory=RunLook)


def explained(options: Explain) -> Explanation:
    """What the library says of the options.

    Raises: ArgumentError for a shape that does not fit, an unknown operator or device.
    """
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
        device=check_device(options.device),
        gradients=options.gradients,
        key_padding=options.key_padding,
        memory=False if options.memory is None else options.memory,
    )


def _facts(found: Explanation) -> RenderableType:
    shape = found.shape
    sides, gradients = "causal" if shape.tied else "bidirectional", "with" if shape.gradients else "without"
    call = [str(shape), found.dtype, str(shape.device), sides, f"{gradients} gradients"]
    call += ["with key padding"] if shape.padded else []
    sizes = found.memory_bytes.items()
    kept = ", ".join(f"{formats.bytes_(size)} after {formats.tokens(length)}" for length, size in sizes)
    memory = f"{found.memory_kind}; one sequence keeps {kept} tokens" if kept else "none: all queries are read together"
    grid = Table.grid(padding=(0, 2))
    for name, text in (
        ("operator", f"{found.operator}: {found.declaration}"),
        ("call", ", ".join(call)),
        ("path", found.path),
        ("why", found.why),
        ("memory", memory),
        ("machine", found.machine),
    ):
        grid.add_row(Text(name, style="dim"), Text(text, style="bold" if name == "path" else ""))
    return grid


def _operations(count: float) -> str:
    """18.2 GFLOP."""
    text = formats.compact(count)
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def tables(found: Explanation) -> list[RenderableType]:
    """The explanation as tables for the terminal."""
    estimates = [
        (e.path, e.route.name, duration(e.seconds), _operations(e.flops), *map(formats.bytes_, sizes), f"{e.calls:,}")
        for e in found.plan.estimates
        for sizes in [(e.bytes_moved, e.peak_bytes)]
    ]
    head = ("path", "route", "time", "work", "moved", "peak memory", "torch calls")
    refused = [(path, why) for path, why in found.plan.refused.items()] or [("none", "every path can run this call")]
    meaning = "; ".join(f"{step}: {text}" for step, text in ledger.STEPS.items())
    return [
        _facts(found),
        Text(),
        table("Estimates", head, estimates, found.path),
        Text(),
        table("Refused", ("path", "because"), refused),
        Text(),
        Text("Ledger", style="bold"),
        ledger_tree(found.moves),
        Text(meaning, style="dim"),
    ]


def tree() -> str:
    """The tree of all mechanisms and its legend."""
    moves = {name: mechanisms.resolve(name).moves() for name in mechanisms.names()}
    return f"{ledger.tree(moves)}\n\n{ledger.legend(moves)}"


def _check(options: Explain) -> None:
    """Raises: ArgumentError for options that belong to another use of the command."""
    plain = Explain()
    if options.tree:
        others = replace(options, tree=False)
        why = "does not apply to the tree of all mechanisms; leave it out with --tree"
    elif options.look.model is None:
        others = replace(plain, look=options.look, run=options.run)
        alone = options.run == plain.run or options.run.gpus is not None
        why = "needs --model" if alone else "needs --model and --gpus"
    elif options.run.gpus is not None:
        look = replace(options.look, model=None)
        others = replace(options, look=look, run=plain.run, json=False, dtype=plain.dtype)
        why = "is not about a step of training; leave it out with --gpus"
    elif options.run != plain.run:
        others, why = replace(plain, run=options.run), "needs --gpus"
    else:
        others = replace(options, look=plain.look, device=plain.device, json=False)
        why = "is about how an operator is run; leave it out with --model"
    if others != plain:
        raise ArgumentError(f"explain: {command_line('explain', others).removeprefix('zonal explain ')} {why}.")


def run(options: Explain, command: str) -> int:
    """Run the command; returns the exit code."""
    _check(options)
    if options.tree:
        print(tree())
        return 0
    model, page = options.look.model, None
    if model is None:
        found = explained(options)
        shown_as = partial(tables, found)
    elif options.run.gpus is not None:
        found = explain_run.estimate(model, options.run, options.dtype)
        shown_as = partial(explain_run.tables, found)
    else:
        found = explain_model.looked_at(options.look, options.device)
        shown_as = partial(explain_model.tables, found)
        page = None if options.look.out is None else explain_model.write(found, options.look.out, command)
    if options.json:
        print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False))
        return 0
    console = screen()
    for part in shown_as():
        console.print(part)
    if page is not None:
        console.print(Text(f"Page: {page}"))
    return 0
