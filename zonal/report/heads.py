"""The page of `zonal explain --model`: what the heads of a trained model score, as shares, singular values and maps,
from plain numbers.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zonal import store
from zonal.report import page
from zonal.report.table import Grid

_FORBIDDEN = 255
_TITLES = {
    "evidence": "Log evidence",
    "interaction": "Interaction",
    "product": "Dot product of rank {rank}",
    "weights": "Weights",
}


@dataclass(frozen=True)
class Heads:
    """What the page is made of.

    found: what ``zonal explain --model --json`` prints. shares, nats: its tables. maps: by "layer.head", then by name,
    (T, T), -inf where a pair is forbidden.
    tokens: T texts. ledgers: one a operator, by its spec. command: what made it.
    """

    found: Mapping[str, Any]
    shares: Grid
    nats: Grid
    maps: Mapping[str, Mapping[str, Tensor]]
    tokens: Sequence[str]
    ledgers: Mapping[str, str]
    command: str


def write(path: Path, heads: Heads) -> Path:
    """Write the page, whole or not at all."""
    store.write_bytes(path, page.rendered_html("heads", context(heads)))
    return path


def context(given: Heads) -> dict[str, Any]:
    """What the template needs."""
    found = given.found
    layers = [layer for layer in found["layers"] if layer["heads"]]
    heads = [
        {"name": f"{layer['layer']}.{number}", "layer": layer["layer"], "head": number, **head}
        for layer in layers
        for number, head in enumerate(layer["heads"], 1)
    ]
    drawn = {name: {kind: scaled(kind, each) for kind, each in of_head.items()} for name, of_head in given.maps.items()}
    rank, sequences = found["ranks"][-1], found["sequences"]
    kept = ("name", "layer", "head", "rows", "columns", "interaction")
    return {
        "title": "What the heads of a model score",
        "headline": headline(heads, rank),
        "facts": [
            found["model"],
            f"{sequences} sequence{'s' if sequences > 1 else ''} of {found['tokens']} tokens",
            f"{len(heads)} heads, as layer.head",
            ", ".join(given.ledgers),
        ],
        "left_out": [
            f"Layer {layer['layer']} is left out: {layer['refused']}." for layer in found["layers"] if layer["refused"]
        ],
        "masked": any(bool(each["interaction"].isneginf().any()) for each in given.maps.values()),
        "refined": any(head["refined"] for head in heads),
        "height": 3 + 1.5 * len(heads),
        "shares": given.shares,
        "nats": given.nats,
        "layers": [layer["layer"] for layer in layers],
        "heads": [
            {**head, "maps": [_titled(kind, each, rank) for kind, each in drawn[head["name"]].items()]}
            for head in heads
        ],
        "ledgers": given.ledgers,
        "made": given.command,
        "payload": {
            "tokens": list(given.tokens),
            "maps": drawn,
            "heads": [
                {**{key: head[key] for key in kept}, "spectrum": [round(share, 5) for share in head["spectrum"]]}
                for head in heads
            ],
        },
    }


def headline(heads: Sequence[Mapping[str, Any]], rank: int) -> list[str]:
    """The shares that heads have on average, and between what a dot product of the largest rank explains."""
    rows, columns, interaction, gauge = (
        math.fsum(head[part] for head in heads) / len(heads) for part in ("rows", "columns", "interaction", "gauge")
    )
    rising = sorted(heads, key=lambda head: head["explained"][-1])
    least, most = rising[0], rising[-1]
    return [
        f"On average over {len(heads)} heads {rows:.0%} of the evidence is the queries' own, {columns:.0%} the keys' "
        f"own, and {interaction:.0%} interaction of queries with keys. "
        f"{gauge:.0%} does not change the weights (gauge).",
        f"A dot product of rank {rank} explains from {least['explained'][-1]:.0%} (head {least['name']}) "
        f"to {most['explained'][-1]:.0%} (head {most['name']}) of the interaction.",
    ]


def scaled(kind: str, values: Tensor) -> dict[str, Any]:
    """A map as 255 levels between two numbers, and 255 where a pair is forbidden: what an eye can tell apart."""
    allowed = ~values.isneginf()
    inside, signed = values[allowed], kind in ("interaction", "product")
    low, high = (float(inside.min()), float(inside.max())) if inside.numel() else (0.0, 0.0)
    if signed:
        high = max(abs(low), abs(high))
        low = -high
    share = (torch.where(allowed, values, low) - low) / (high - low or 1.0)
    levels = torch.where(allowed, (share * (_FORBIDDEN - 1)).round(), _FORBIDDEN).to(torch.uint8)
    return {
        "low": low,
        "high": high,
        "signed": signed,
        "levels": base64.b64encode(levels.cpu().numpy().tobytes()).decode(),
    }


def _titled(kind: str, each: Mapping[str, Any], rank: int) -> dict[str, str]:
    return {"name": kind, "title": _TITLES[kind].format(rank=rank), "range": f"{each['low']:.3g} to {each['high']:.3g}"}
