"""The page of `zonal bench recall`: what SKA remembers, how much, for how long, at what cost; one HTML file with plotly inside and every number in a table."""

import base64
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from zonal import store
from zonal.evaluation import spread
from zonal.report import formats, style
from zonal.report.page import asset, script_json
from zonal.report.table import device

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>What SKA remembers · Zonal</title><link rel="icon" href="data:,">
<style>{{ css | safe }} .chart { height: 20rem; }</style>
</head>
<body>
<header class="page"><p class="kicker">Zonal benchmark</p><h1>What SKA remembers, how much, for how long, at what cost</h1>
{% for line in findings %}<p class="headline">{{ line }}</p>
{% endfor %}<p class="facts">Memories are not trained: random keys of length 1, an answer is the stored value nearest to what was read. {{ circumstances }}</p></header>
<p id="problem" class="notice" hidden></p>
<main>
{% for chart in charts %}
<section><h2>{{ chart.title }}</h2><p>{{ chart.about }}</p>
<div class="chart" data-chart="{{ loop.index0 }}" role="img" aria-label="{{ chart.title }}; the table holds the numbers"></div>
<details{% if chart.open %} open{% endif %}><summary>As a table</summary><div class="scroll"><table class="plain">
<thead><tr><th scope="col">{{ chart.x }}</th>{% for value in chart.ticks %}<th scope="col">{{ value }}</th>{% endfor %}</tr></thead>
<tbody>{% for name, cells in chart.rows %}<tr><th scope="row">{{ name }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div></details></section>
{% endfor %}
</main>
<footer class="page"><p>Charts are drawn with plotly.js (MIT licence), which this file carries.</p></footer>
<script type="application/json" id="data">{{ payload | safe }}</script>
<script type="text/plain" id="plotly">{{ plotly }}</script>
<script>
"use strict";
(async function () {
  const charts = JSON.parse(document.getElementById("data").textContent);
  if (typeof DecompressionStream === "undefined") {
    const box = document.getElementById("problem");
    box.textContent = "This browser is too old to unpack the charts. All numbers are in the tables.";
    box.hidden = false;
    return;
  }
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const element = document.createElement("script");
  element.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(element);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function draw() {
    document.querySelectorAll(".chart").forEach((holder) => {
      const chart = charts[Number(holder.dataset.chart)];
      const traces = chart.series.map((series) => {
        const colour = dark.matches ? series.dark : series.light;
        const text = series.y.map((y, i) => `<b>${series.name}</b><br>${chart.x}: ${series.x[i]}<br>${series.text[i]}`);
        const shared = { name: series.name, x: series.x, y: series.y, hoverinfo: "text", hovertext: text };
        const spread = { error_y: { type: "data", array: series.sd, visible: series.sd.some((v) => v), color: colour, thickness: 1.2, width: 3 } };
        return chart.kind === "bar"
          ? { ...shared, ...spread, type: "bar", marker: { color: colour } }
          : { ...shared, ...spread, mode: "lines+markers", line: { color: colour, width: 2, dash: series.dash }, marker: { symbol: series.symbol, size: 8, color: colour } };
      });
      const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true };
      const ticks = [...new Set(chart.series.flatMap((series) => series.x))];
      const logarithmic = { type: "log", tickvals: ticks, ticktext: ticks.map(String) };
      const category = { type: "category" };
      Plotly.react(holder, traces, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: css("--sans"), size: 12, color: css("--soft") },
        margin: { l: 56, r: 12, t: 12, b: 46 }, hovermode: "closest", barmode: "group", showlegend: true,
        xaxis: { ...axis, ...(chart.kind === "bar" || ticks.includes(0) ? category : logarithmic), title: { text: chart.x } },
        yaxis: { ...axis, title: { text: chart.y }, ...(chart.share ? { range: [0, 1.04], tickformat: ".1~f" } : { type: "log" }) },
      }, { responsive: true, displaylogo: false, displayModeBar: false });
    });
  }
  dark.addEventListener("change", draw);
  draw();
  document.documentElement.dataset.drawn = "true";
})();
</script>
</body>
</html>
"""

Row = Mapping[str, Any]
_KNOWN = ("softmax, a cache", "SKA K=0", "SKA K=2", "SKA K=1", "SKA K=3", "linear attention", "sums of v k, as Mamba-2 without fading")
_LOOKS = {name: style.LOOKS[place] for place, name in enumerate(_KNOWN)} | {"softmax": style.LOOKS[0]}


def _series(rows: Iterable[Row], name: Callable[[Row], str], x: str, y: Callable[[Row], float], text: Callable[[float], str]) -> list[dict[str, Any]]:
    """One curve a name, a point a value of ``x``: the mean over rows that share both, with their spread."""
    found: dict[str, dict[Any, list[float]]] = {}
    for row in rows:
        found.setdefault(name(row), {}).setdefault(row[x], []).append(y(row))
    series = []
    for index, (label, points) in enumerate(found.items()):
        look = _LOOKS.get(label, style.LOOKS[(len(_KNOWN) + index) % len(style.LOOKS)])
        totals = [spread(values) for values in points.values()]
        texts = [text(total.mean) + (f" ± {text(total.deviation)}" if total.deviation is not None else "") for total in totals]
        series.append(
            {
                "name": label, "x": list(points), "y": [total.mean for total in totals], "sd": [total.deviation or 0 for total in totals], "text": texts,
                "light": look.light, "dark": look.dark, "symbol": look.symbol, "dash": look.dash,
            }
        )  # fmt: skip
    return series


def _chart(title: str, about: str, x: str, y: str, series: list[dict[str, Any]], *, kind: str = "line", share: bool = True, shown: bool = False) -> dict[str, Any]:
    ticks = list(dict.fromkeys(value for one in series for value in one["x"]))
    rows = [(one["name"], [dict(zip(one["x"], one["text"], strict=True)).get(value, formats.MISSING) for value in ticks]) for one in series]
    return {"title": title, "about": about, "x": x, "y": y, "series": series, "kind": kind, "share": share, "open": shown, "ticks": ticks, "rows": rows}


def charts(rows: list[Row]) -> list[dict[str, Any]]:
    """What the page draws, in its order."""

    def of(part: str) -> list[Row]:
        return [row for row in rows if row["part"] == part]

    def operator(row: Row) -> str:
        return row["operator"]

    share = formats.number
    found = [
        _chart(
            "K shifts the read-out", "A memory of 24 pairs is asked with a key. Which value comes back: the key's own (offset 0), or one stored later? K = 0 recalls, "
            "K = 1 is an induction head, K = 2 reads one further: no filter, a shift.",
            "offset of the value that is returned", "share of questions", _series(of("which"), operator, "offset", lambda row: row["share"], share), kind="bar", shown=True,
        ),
        _chart(
            "The same, trained", "Decoders of one layer (two where two are named) without a convolution, trained to name the word j after the one asked for; a model for each bar and seed.",
            "offset j that was trained", "accuracy", _series(of("trained"), operator, "offset", lambda row: row["accuracy"], share), kind="bar", shown=True,
        ),
    ]  # fmt: skip
    ranks = sorted({row["rank"] for row in of("capacity")})
    for rank in ranks:
        own = [row for row in of("capacity") if row["rank"] == rank]
        found.append(
            _chart(
                f"How much: r = {rank}", "Recall of the value K after the key's own by the number of pairs, with keys that are equally long. What is held grows with r; each further K asks for more room.",
                "pairs", "recall", _series(own, operator, "pairs", lambda row: row["recall"], share),
            )
        )  # fmt: skip
    found.append(
        _chart(
            "Keys that are alike", "Recall of 32 pairs (r = 64) by the mean cosine of their keys, each of which has a part of one direction that all share. A fit takes that part out; a sum "
            "returns what keys have in common. On keys of random directions the two hold about as many pairs.",
            "cosine", "recall", _series(of("alike"), operator, "cosine", lambda row: row["recall"], share), shown=True,
        )
    )  # fmt: skip
    found += [
        _chart(
            f"For how long: distractors of length {length:g}", "Recall of 16 pairs (r = 64) after so many further keys and values that nobody asks for. Short keys hardly enter the fit: "
            "a layer that shortens what need not be kept keeps the rest.",
            "distractors", "recall", _series([row for row in of("distractors") if row["length"] == length], operator, "distractors", lambda row: row["recall"], share),
        )
        for length in sorted({row["length"] for row in of("distractors")}, reverse=True)
    ]  # fmt: skip
    found.append(
        _chart(
            "What exactness buys", "Recall of the key that stood so many tokens ago (K = 0, r = 128, 128 tokens). In chunks, a query sees only whole chunks before its own, so the nearest past is missing.",
            "tokens ago", "recall", _series(of("exactness"), operator, "distance", lambda row: row["recall"], share), shown=True,
        )
    )  # fmt: skip
    found.append(
        _chart(
            "What exactness costs", "Forward and backward of four heads of r = 32, one sequence.", "tokens", "seconds",
            _series(of("times"), lambda row: f"{row['operator']}, K={row['power']}" if row["operator"] != "softmax" else "softmax", "tokens", lambda row: row["seconds"]["median"], lambda value: f"{value * 1e3:.3g} ms"),
            share=False, shown=True,
        )
    )  # fmt: skip
    own = [row for row in of("capacity") if row["operator"] == "SKA K=1"]
    bytes_ = _series(own, lambda row: f"SKA K=1, r={row['rank']}", "pairs", lambda row: row["bytes"], formats.bytes_)
    bytes_ += _series(own, lambda row: f"keys and values, r={row['rank']}", "pairs", lambda row: row["cache_bytes"], formats.bytes_)
    found.append(_chart("At what cost: bytes a head", "A memory of SKA is as large after one pair as after a million; a cache of keys and values grows. Values of 64 numbers, float32.", "pairs", "bytes", bytes_, share=False))
    return found


def findings(summary: Mapping[str, Any], rows: list[Row]) -> list[str]:
    """The headline, from the numbers."""
    words = {name: "the key's own value" if offset == 0 else f"the value {offset} after it" for name, offset in summary["offset_returned"].items() if name.startswith("SKA")}
    returned = ", ".join(f"{name.removeprefix('SKA ')} returns {what}" for name, what in words.items())
    held = ", ".join(f"{count} at r = {name.partition('r=')[2]}" for name, count in summary["most_pairs_at_0.95"].items() if name.startswith("K=0,") and count)
    lines = [f"Asked with a key, {returned}.", f"Most pairs that are recalled at 0.95 or better with K = 0: {held}."]
    sums = ", ".join(str(count) for name, count in summary["most_pairs_at_0.95"].items() if name.startswith("sums,") and count)
    if sums:
        sizes = [{row["rank"]: row["bytes"] for row in rows if row["part"] == "capacity" and row["operator"].startswith(start)} for start in ("SKA K=0", "sums")]
        shares = sorted(sizes[1][rank] / sizes[0][rank] for rank in sizes[0])
        lines.append(f"Plain sums of v k, in {shares[0]:.0%} to {shares[-1]:.0%} of its bytes, hold while keys are random: {sums}.")
    if summary["alike_at_0.5"]:
        fit, plain = (formats.number(next(value for name, value in summary["alike_at_0.5"].items() if name.startswith(start))) for start in ("SKA", "sums"))
        lines.append(f"What the fit is for are keys that are alike: of 32 pairs at a mean cosine of 0.5, K = 0 recalls {fit}, the sums {plain}.")
    return lines


def html(value: Mapping[str, Any]) -> str:
    """The page as one string, from what the benchmark writes."""
    drawn = charts(list(value["rows"]))
    kept = [{name: chart[name] for name in ("x", "y", "kind", "share", "series")} for chart in drawn]
    circumstances = f"{device(value['device'])}; {value['date']}; 1-minute load per core {value['load_per_core']}."
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE).render(
        css=asset("page.css").decode(), charts=drawn, findings=findings(value["summary"], list(value["rows"])), circumstances=circumstances, payload=script_json(kept),
        plotly=base64.b64encode(asset("plotly-basic-4.1.1.min.js.gz")).decode(),
    )  # fmt: skip


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write the page, whole or not at all."""
    store.write_bytes(path, html(value).encode())


__all__ = ["charts", "html", "write"]
