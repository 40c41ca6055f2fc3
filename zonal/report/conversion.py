"""The page of ``zonal convert``: a model before and after, from conversion.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zonal import store
from zonal.report import formats, page
from zonal.report.table import Grid

SCHEMA = 1


def write(path: Path, record: Mapping[str, Any]) -> Path:
    """Write the page, whole or not at all."""
    store.write_bytes(path, page.rendered_html("conversion", context(record)))
    return path


def context(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the template needs. Without "after", the page of a plan."""
    before, after = record["before"], record.get("after")
    titles = {"before": "the original", "transferred": "after attention transfer", "after": "converted"}
    stages = {title: record[name] for name, title in titles.items() if name in record}
    chosen = record.get("chosen")
    settings = record["settings"]
    return {
        "title": f"{record['title']}, converted" if after else f"{record['title']}: layers to convert",
        "headline": headline(record),
        "facts": [
            settings["operator"],
            f"{settings['length']} tokens a step",
            f"{len(record.get('transfer', [])) and record['transfer'][-1]['step']} steps of transfer",
            f"{record['distillation'][-1]['step'] if record.get('distillation') else 0} steps of distillation",
        ],
        "chosen": None if chosen is None else ", ".join(map(str, chosen)),
        "compared": compared(before, after),
        "positions": Grid(
            ("Tokens before", *stages),
            tuple(
                (
                    f"{row['from']:,}–{row['to']:,}",
                    *(f"{stage['by_position'][index]['perplexity']:.2f}" for stage in stages.values()),
                )
                for index, row in enumerate(before["by_position"])
            ),
        ),
        "layers": layers(record),
        "samples": [(titles[name], record[name]["sample"]) for name in ("before", "after") if name in record],
        "settings": Grid(("Setting", "Value"), tuple((name, str(value)) for name, value in settings.items())),
        "machine": Grid(
            ("Machine", "Value"), tuple((name, str(value)) for name, value in record["surroundings"].items())
        ),
        "made": record["command"],
        "payload": {
            "transfer": [[each["step"], each["losses"]["error"]] for each in record.get("transfer", [])],
            "distillation": [[each["step"], each["losses"]["nats"]] for each in record.get("distillation", [])],
            "positions": {
                title: [[row["from"], row["to"], row["perplexity"]] for row in stage["by_position"]]
                for title, stage in stages.items()
            },
            "harms": record.get("harms", []),
            "chosen": chosen or [],
        },
    }


def headline(record: Mapping[str, Any]) -> list[str]:
    """The result in two sentences."""
    before, after = record["before"], record.get("after")
    if after is None:
        alone = f"{record['layers']} layers, each converted alone after attention transfer."
        return [f"{alone} Perplexity of the original: {before['perplexity']:.2f}."]
    windows = record["harms"].count(None)
    kept = f", {windows} keep their sliding window" if windows else ""
    change = after["perplexity"] / before["perplexity"] - 1
    first, last = before["decoding"][-1], after["decoding"][-1]
    speed = last["tokens_per_second"] / first["tokens_per_second"]
    return [
        f"{len(record['chosen'])} of {record['layers']} layers have a constant memory{kept}. Perplexity on held-out "
        f"text is {after['perplexity']:.2f}, {abs(change):.1%} {'higher' if change >= 0 else 'lower'} than the "
        f"original's {before['perplexity']:.2f}.",
        f"After {last['length']:,} tokens it decodes at {speed:.1f} times the original's speed "
        f"with {last['bytes'] / first['bytes']:.1%} of its bytes.",
    ]


def compared(before: Mapping[str, Any], after: Mapping[str, Any] | None) -> Grid:
    """One row a measure: the original and the converted model."""
    models = [before] if after is None else [before, after]
    rows = [("Perplexity", *(f"{each['perplexity']:.2f}" for each in models))]
    rows += [(f"Recall: {probe}", *(f"{each['recall'][probe]:.0%}" for each in models)) for probe in before["recall"]]
    for index, first in enumerate(before["decoding"]):
        length = f"{first['length']:,} tokens"
        measured = [each["decoding"][index] for each in models]
        rows.append((f"Tokens a second after {length}", *(f"{each['tokens_per_second']:.1f}" for each in measured)))
        rows.append((f"Memory after {length}", *(formats.bytes_(each["bytes"]) for each in measured)))
    reading = f"Tokens a second, reading {before['prefill']['length']:,}"
    rows.append((reading, *(f"{each['prefill']['tokens_per_second']:.0f}" for each in models)))
    return Grid(("Measure", "Original", "Converted")[: 1 + len(models)], tuple(rows))


def layers(record: Mapping[str, Any]) -> Grid:
    """One row a layer: error of its output after transfer, harm when it alone is converted, whether it was chosen. A
    layer that keeps its sliding window has neither error nor harm.
    """
    harms: Sequence[float | None] = record["harms"]
    errors = record["transfer"][-1]["losses"]["layers"] if record.get("transfer") else [None] * len(harms)
    chosen = record.get("chosen")
    return Grid(
        ("Layer", "Error of its output", "Nats a token, alone", *(() if chosen is None else ("Converted",))),
        tuple(
            (
                str(index),
                formats.MISSING if errors[index] is None else f"{errors[index]:.3f}",
                formats.MISSING if harm is None else f"{harm:+.4f}",
                *(() if chosen is None else (_fate(index in chosen, harm),)),
            )
            for index, harm in enumerate(harms)
        ),
    )


def _fate(chosen: bool, harm: float | None) -> str:
    """Whether a layer was converted."""
    return "yes" if chosen else "no" if harm is not None else "keeps its window"


__all__ = ["SCHEMA", "compared", "context", "headline", "layers", "write"]
