"""``zonal explain --model``: how much of what the heads of a trained model score is row field, column field, and a dot
product of few numbers, and how much of it weights see.
"""

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import Tensor

from zonal import tasks
from zonal.algebra import Operator, ledger
from zonal.cli import parse
from zonal.cli.console import ledger_tree, table
from zonal.cli.generate import checkpoint_in, codec
from zonal.cli.options import shown
from zonal.errors import ArgumentError
from zonal.limits import Between
from zonal.nn import Attention
from zonal.report import heads as report
from zonal.report.table import Grid
from zonal.theory.heads import HeadForm, HeadMaps, forms, maps, refusal
from zonal.training import load_model
from zonal.training.environment import check_device


@dataclass(frozen=True)
class ModelLook:
    """Instead of an operator: the heads of a trained model."""

    model: Annotated[Path | None, shown("PATH", "default: none")] = None
    """A checkpoint, or the folder of a run of `zonal train` or `zonal compare`."""
    layer: Annotated[int | None, Between(1, 4096), shown("INT", "default: all")] = None
    """Only this layer of the model, counted from 1."""
    text: Annotated[str | None, shown("TEXT", "default: what was held out")] = None
    """The input of the model: text, or token numbers for a model that was not trained on text."""
    sequences: Annotated[int, Between(1, 4096)] = 2
    """Without --text: the number of held-out sequences to read."""
    length: Annotated[int, Between(2, 4096)] = 128
    """The largest number of tokens per sequence."""
    ranks: str = "1,2,4"
    """Ranks of the dot products that are fitted to the scores."""
    refine: Annotated[int, Between(0, 100_000)] = 30
    """Steps of fitting each rank to the weights; 0 for none."""
    out: Annotated[Path | None, shown("FILE", "default: none")] = None
    """Also write a page with shares, singular values and maps of the first sequence."""


@dataclass(frozen=True)
class Layer:
    """A layer of the model, numbered from 1, with the forms of its heads, or why it has none."""

    number: int
    operator: Operator | None
    heads: tuple[HeadForm, ...]
    refused: str | None = None
    maps: tuple[HeadMaps, ...] = ()


@dataclass(frozen=True)
class Found:
    """What the heads of a model do on some tokens. ``to_dict``: plain values."""

    model: Path
    sequences: int
    tokens: int
    ranks: tuple[int, ...]
    layers: tuple[Layer, ...]
    read: tuple[str, ...]
    """The tokens of the first sequence."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        layers = [
            {
                "layer": layer.number, "operator": None if layer.operator is None else layer.operator.spec,
                "refused": layer.refused, "heads": [asdict(head) for head in layer.heads],
                "ledger": [] if layer.operator is None else [asdict(move) for move in layer.operator.moves()],
            }
            for layer in self.layers
        ]  # fmt: skip
        sizes = {"sequences": self.sequences, "tokens": self.tokens, "ranks": list(self.ranks)}
        return {"model": str(self.model), **sizes, "layers": layers}


def looked_at(options: ModelLook, place: str) -> Found:
    """The heads of the model on the device ``place``. Raises: ArgumentError, FileFormatError for what does not fit."""
    assert options.model is not None
    ranks = parse.ranks(options.ranks)
    model, config = load_model(checkpoint_in(options.model, "explain"))
    model = model.to(check_device(place))
    if options.layer is not None and not 1 <= options.layer <= len(model.blocks):
        raise ArgumentError(
            f"explain: --layer must be from 1 to {len(model.blocks)}, the layers of this model, "
            f"received {options.layer}."
        )
    tokens = _tokens(options, config["identity"]["task"], model.config.vocab_size).to(place)
    if tokens.shape[1] < max(2, *ranks):
        raise ArgumentError(
            f"explain: ranks up to {ranks[-1]} need as many tokens, and at least 2; received {tokens.shape[1]}. "
            "Give more --text or --length, or lower --ranks."
        )
    inputs = [
        (index + 1, mixer, x) for index, mixer, x in model.layer_inputs(tokens) if options.layer in (None, index + 1)
    ]
    layers = tuple(_layer(number, mixer, x, ranks, options) for number, mixer, x in inputs)
    if not any(layer.heads for layer in layers):
        raise ArgumentError(
            "explain: no layer's heads have a form: "
            f"{'; '.join(f'layer {layer.number}: {layer.refused}' for layer in layers)}."
        )
    decode = codec(config["identity"]["task"], model.config.vocab_size, "explain").decode
    read = tuple(decode([token]) for token in tokens[0].tolist())
    return Found(options.model, tokens.shape[0], tokens.shape[1], ranks, layers, read)


def _layer(number: int, mixer: object, x: Tensor, ranks: tuple[int, ...], options: ModelLook) -> Layer:
    if not isinstance(mixer, Attention):
        return Layer(number, None, (), f"{type(mixer).__name__} compares no queries with keys")
    refused = refusal(mixer.operator)
    if refused is not None:
        return Layer(number, mixer.operator, (), refused)
    drawn = () if options.out is None else tuple(maps(mixer, x, ranks[-1]))
    return Layer(number, mixer.operator, tuple(forms(mixer, x, ranks, refine=options.refine)), maps=drawn)


def _tokens(options: ModelLook, task: dict[str, Any], vocab_size: int) -> Tensor:
    """The model's input: the given text, or the beginnings of the first sequences held out from its training."""
    if options.text is None:
        return next(tasks.from_config(task).evaluation_batches(options.sequences)).tokens[:, : options.length]
    encoded = codec(task, vocab_size, "explain", "--text").encode(options.text)
    return torch.tensor([encoded[: options.length]], dtype=torch.int64)


def _by_rank(head: HeadForm, fitted: bool) -> list[str]:
    """With what was fitted to the weights behind what it was fitted from; a dash where it was not."""
    pairs = itertools.zip_longest(head.by_rank, head.refined)
    return [f"{nat:.4f}" if nat is not None else "–" for pair in pairs for nat in (pair if fitted else pair[:1])]


def _grids(found: Found) -> tuple[Grid, Grid]:
    """Shares, and nats, a row each head."""
    heads = [(f"{layer.number}.{number}", head) for layer in found.layers for number, head in enumerate(layer.heads, 1)]
    by_rank = tuple(f"rank {rank}" for rank in found.ranks)
    refined = any(head.refined for _, head in heads)
    fitted = tuple(name for rank in by_rank for name in (rank, *(("fitted",) if refined else ())))
    shares = tuple(
        (name, *(f"{share:.1%}" for share in (head.rows, head.columns, head.interaction, head.gauge, *head.explained)))
        for name, head in heads
    )
    nats = tuple(
        (name, f"{head.uniform:.4f}", f"{head.by_columns:.4f}", *_by_rank(head, refined)) for name, head in heads
    )
    return Grid(("head", "rows", "columns", "interaction", "gauge", *by_rank), shares), Grid(
        ("head", "equal", "columns", *fitted), nats
    )


def _ran(found: Found) -> dict[str, Operator]:
    """The operators of layers whose heads are shown, by spec."""
    return {layer.operator.spec: layer.operator for layer in found.layers if layer.operator is not None and layer.heads}


def write(found: Found, path: Path, command: str) -> Path:
    """Write the page of what was found."""
    maps = {
        f"{layer.number}.{number}": each._asdict()
        for layer in found.layers
        for number, each in enumerate(layer.maps, 1)
    }
    ledgers = {spec: ledger.text(operator.moves()) for spec, operator in _ran(found).items()}
    return report.write(path, report.Heads(found.to_dict(), *_grids(found), maps, found.read, ledgers, command))


def tables(found: Found) -> list[RenderableType]:
    """One table of shares, one of weights, and the ledger of each operator."""
    shares, nats = _grids(found)
    parts: list[RenderableType] = [
        Text(
            f"{found.sequences} sequence{'s' if found.sequences > 1 else ''} of {found.tokens} tokens; "
            "heads as layer.head"
        ),
        Text(),
        table("Parts of the log evidence of a head", shares.head, shares.rows),
        Text(
            "rows: a number a query; columns: a number a key; interaction: what is left, and what of it a dot product "
            "of so many numbers explains. "
            "gauge: the part that the operator's weights do not see",
            style="dim",
        ),
        Text(),
        table("How far its weights are from others, in nats", nats.head, nats.rows),
        Text(
            "equal: those of the row field alone; columns: of the column field too; rank: with the dot product too, "
            "fitted to the evidence, and then to the weights",
            style="dim",
        ),
    ]
    ran = _ran(found)
    parts += [
        Text(f"layer {layer.number} is left out: {layer.refused}", style="dim")
        for layer in found.layers
        if layer.refused
    ]
    for spec, operator in ran.items():
        parts += [Text(), Text(f"Ledger of {spec}", style="bold"), ledger_tree(operator.moves())]
    return parts
