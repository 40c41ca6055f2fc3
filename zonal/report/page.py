"""The HTML page: one file that opens without a network, with plotly inside, compressed."""

import base64
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from zonal.report import charts, commands, formats, glossary, style, table, transfer
from zonal.report.summary import METRIC_NAMES, Summary


def asset(name: str) -> bytes:
    """A file shipped beside this module."""
    return importlib.resources.files("zonal.report").joinpath("assets", name).read_bytes()


class _Verbatim(str):
    """Text that Markdown does not interpret, as in a code block, or that is Markdown already."""

    __slots__ = ()


def _environment(html: bool) -> jinja2.Environment:
    """The templates beside this module, with the filters of the Markdown ones."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("zonal.report", "templates"),
        autoescape=html,
        finalize=None if html else _escaped,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"cell": _markdown_cell, "spark": _spark, "verbatim": _Verbatim}
    return made


def rendered_html(name: str, values: Mapping[str, Any]) -> bytes:
    """The page of the template called ``name``: one file with style, plotly, and the script of that name, which draws
    the value "payload".
    """
    script = asset("unpack.js").decode() + asset(f"{name}.js").decode()
    page = _environment(html=True).get_template(f"{name}.html.j2")
    return page.render({**values, **shipped(values["payload"]), "script": script}).encode()


def shipped(payload: Any) -> dict[str, str]:
    """What every page carries: what its script draws, style and plotly."""
    return {
        "payload": script_json(payload),
        "css": asset("page.css").decode(),
        "plotly": base64.b64encode(asset("plotly-basic-4.1.1.min.js.gz")).decode(),
    }


def rendered_markdown(name: str, values: Mapping[str, Any]) -> bytes:
    """The Markdown of the template called ``name``."""
    return _environment(html=False).get_template(f"{name}.md.j2").render(**values).strip().encode() + b"\n"


def script_json(value: Any) -> str:
    """JSON that can stand inside a script element: no text in it can close the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def identifiers(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """A short name of each comparison for links: the task's name, numbered where two share it."""
    names: list[str] = []
    for summary in summaries:
        name = str(summary.data.task.get("name") or "task").lower()
        base = "".join(letter if letter.isalnum() else "-" for letter in name).strip("-") or "task"
        count = sum(other == base or other.startswith(f"{base}-") for other in names)
        names.append(base if not count else f"{base}-{count + 1}")
    return tuple(names)


def heading(summaries: Sequence[Summary]) -> str:
    """The title of the page."""
    operators = len({row.operator for summary in summaries for row in summary.rows})
    noun = "attention operator" if operators == 1 else "attention operators"
    if len(summaries) == 1:
        return f"{formats.word(operators)} {noun}: {summaries[0].data.title}"
    return f"{formats.word(operators)} {noun} on {formats.word(len(summaries)).lower()} tasks"


def view(summary: Summary, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """What the templates need of one comparison. drawn: what the script draws of it."""
    data = summary.data
    slices = [(name, glossary.slice_name(name), table.slices(summary, name)) for name in table.slice_names(summary)]
    values = [value for row in summary.rows for run in row.runs if (value := run.value(data.metric)) is not None]
    strips = {
        row.operator: charts.strip(row, data.metric, min(values), max(values)) if values else "" for row in summary.rows
    }
    seen = [
        (row, run.diagnostics)
        for row in summary.rows
        if (run := charts.run_of_memories(summary, row)) is not None and run.diagnostics is not None
    ]
    operators = drawn["operators"]
    spaces = [space for each in operators if each["embeddings"] for space in each["embeddings"]["spaces"]]
    return {
        "id": drawn["id"],
        "summary": summary,
        "data": data,
        "metric": METRIC_NAMES[data.metric],
        "results": table.results(summary),
        "costs": table.costs(summary),
        "created": formats.date(data.created),
        "strips": strips,
        "slices": slices,
        "examined": table.examined(summary),
        "learned": table.learned(summary),
        "transfer": transfer.tables(summary),
        "transfer_panels": transfer.panels(summary),
        "transfer_pairs": transfer.slices(summary, "pairs"),
        "published": data.published,
        "geometry": any(each["geometry"] for each in operators),
        "embeddings": max((space["head"] for space in spaces), default=0),
        "kernels": any(each["kernels"] for each in operators),
        "diagnosed": table.diagnostics(seen),
        "pictures": _pictures([each["diagnostics"] for each in operators if each["diagnostics"]]),
        "runs": table.runs(summary),
        "unfinished": table.unfinished(summary),
        "settings": [(title, table.settings(values)) for title, values in _settings(summary)],
        "versions": table.settings({**data.versions, **({"commit": data.commit} if data.commit else {})}),
        "device": table.device(data.device),
        "swept": len(data.learning_rates) > 1,
        "curves": any(run.evaluations or run.training for run in data.runs),
        "memory": sum(bool(row.memory_bytes) for row in summary.rows),
        "state": sum(bool(row.value(data.metric) and row.memory_bytes) for row in summary.rows) > 1,
        "tradeoff": sum(bool(row.value(data.metric) and row.tokens_per_second) for row in summary.rows) > 1,
        "facts": _facts(summary),
        "command": data.command,
        "fixed_command": commands.fixed_command(data.command, data.steps),
        "row_commands": [
            (row.operator, row.label, commands.row_command(data.command, row.operator, row.learning_rate, data.steps))
            for row in summary.rows
        ],
    }


def _settings(summary: Summary) -> list[tuple[str, Mapping[str, Any]]]:
    """Settings with their titles; of an operator with a model of its own, those in which its model differs."""
    data = summary.data
    own = [
        (
            f"Model of {row.label}, where it differs",
            {name: value for name, value in data.shapes[row.operator].items() if value != data.model.get(name)},
        )
        for row in summary.rows
        if row.operator in data.shapes
    ]
    return [("Task", data.task), ("Model", data.model), *own, ("Training", data.training)]


def _pictures(payloads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Which pictures of the memories some operator has."""
    return {
        "spectra": any(each["spectra"] for each in payloads),
        "bars": [
            (key, title)
            for key, title in glossary.DIAGNOSTIC_NAMES.items()
            if any(key in each["bars"] for each in payloads)
        ],
        "leverage": any(each["leverage"] for each in payloads),
        "capacity": any(each["capacity"] for each in payloads),
    }


def _facts(summary: Summary) -> list[str]:
    """The circumstances in a few short phrases."""
    data = summary.data
    seeds = len(data.seeds)
    facts = [f"{seeds} seed{'s' if seeds != 1 else ''}"]
    if data.steps:
        facts.append(f"{formats.count(data.steps)} training steps each")
    if len(data.learning_rates) > 1:
        tried = "" if data.screening_seeds is None else f" tried with {len(data.screening)} of the seeds"
        validated = [bool(run.final and run.final.validation) for run in data.runs if run.done]
        chosen = f", chosen by {'validation data' if all(validated) else 'the reported data'}" if validated else ""
        facts.append(
            f"learning rates {', '.join(formats.rate(rate) for rate in sorted(data.learning_rates))}{tried}{chosen}"
        )
    if data.budget_seconds:
        facts.append(f"within {formats.seconds(data.budget_seconds)}")
    parameters = sorted({row.parameters for row in summary.rows if row.parameters})
    if parameters:
        low, high = formats.compact(parameters[0]), formats.compact(parameters[-1])
        facts.append(f"{low} parameters" if low == high else f"{low} to {high} parameters")
    return facts


def context(summaries: Sequence[Summary]) -> dict[str, Any]:
    """What the page's template and its Markdown twin have in common."""
    specs = list(dict.fromkeys(row.operator for summary in summaries for row in summary.rows))
    looks = style.looks(specs)
    keys = {spec: f"op{index}" for index, spec in enumerate(specs)}
    labels = {row.operator: row.label for summary in summaries for row in summary.rows}
    names = identifiers(summaries)
    payload = [charts.payload(summary, name, keys, looks) for summary, name in zip(summaries, names, strict=True)]
    return {
        "heading": heading(summaries),
        "views": [view(summary, drawn) for summary, drawn in zip(summaries, payload, strict=True)],
        "operators": [
            {
                "spec": spec,
                "key": keys[spec],
                "label": labels[spec],
                "look": looks[spec],
                "explanation": style.explanation(spec),
            }
            for spec in specs
        ],
        "keys": keys,
        "groups": style.GROUPS,
        "how_to_read": glossary.HOW_TO_READ,
        "chart_help": glossary.CHART_HELP,
        "created": formats.date(max((summary.data.created for summary in summaries), default="")),
        "payload": payload,
    }


def _markdown_cell(text: str) -> str:
    """Text that cannot break a table row."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _escaped(value: Any) -> Any:
    """A value of a Markdown template, so that it is shown as it is. ``|`` is escaped by ``cell``."""
    if not isinstance(value, str) or isinstance(value, _Verbatim):
        return value
    return re.sub(r"\\(?!\|)|[*`<]|(?<!\w)_|_(?!\w)|(?<=\])\(", r"\\\g<0>", value)


def _spark(curve: dict[str, Any] | None) -> str:
    if not curve or not curve["loss"]:
        return ""
    return formats.sparkline([value for value in curve["loss"]["mean"] if value is not None])
