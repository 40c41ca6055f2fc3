"""The page of a benchmark: curves and bars with every number in a table beside them, one HTML file with plotly
inside.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2

from zonal.evaluation import spread
from zonal.report import formats, style
from zonal.report.page import shipped
from zonal.report.table import device

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{{ title }} · Zonal</title><link rel="icon" href="data:,">
<style>{{ css | safe }} .chart { height: 20rem; }</style>
</head>
<body>
<header class="page"><p class="kicker">Zonal benchmark</p><h1>{{ heading }}</h1>
{% for line in findings %}<p class="headline">{{ line }}</p>
{% endfor %}<p class="facts">{{ about }} {{ circumstances }}</p></header>
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
"""  # noqa: E501 (template of a page)
LOADER = """<footer class="page"><p>Charts are drawn with plotly.js (MIT licence), which this file carries.</p></footer>
<script type="application/json" id="data">{{ payload | safe }}</script>
<script type="text/plain" id="plotly">{{ plotly }}</script>
<script>
"use strict";
(async function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (typeof DecompressionStream === "undefined") {
    const box = document.getElementById("problem");
    box.textContent = "This browser is too old to unpack the charts. All numbers are in tables.";
    box.hidden = false;
    return;
  }
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const element = document.createElement("script");
  element.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(element);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
"""  # noqa: E501 (template of a page)
"""What every page ends with: its data, and a script that unpacks plotly, to which a page adds what it draws."""
_DRAWING = """  function draw() {
    document.querySelectorAll(".chart").forEach((holder) => {
      const chart = data[Number(holder.dataset.chart)];
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
      const kinds = { category: { type: "category" }, linear: { type: "linear" }, log: logarithmic };
      Plotly.react(holder, traces, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: css("--sans"), size: 12, color: css("--soft") },
        margin: { l: 56, r: 12, t: 12, b: 46 }, hovermode: "closest", barmode: "group", showlegend: true,
        xaxis: { ...axis, ...kinds[chart.axis], title: { text: chart.x } },
        yaxis: { ...axis, title: { text: chart.y }, ...(chart.range ? { range: chart.range } : chart.share ? { range: [0, 1.04], tickformat: ".1~f" } : { type: "log" }) },
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
"""  # noqa: E501 (template of a page)
_PAGE = _HEAD + LOADER + _DRAWING

Row = Mapping[str, Any]


def series(
    rows: Iterable[Row],
    name: Callable[[Row], str],
    x: str,
    y: Callable[[Row], float],
    text: Callable[[float], str],
    looks: Mapping[str, style.Look],
) -> list[dict[str, Any]]:
    """One curve a name, a point a value of ``x``: the mean over rows that share both, with their spread. looks: of
    names that have one; others get those that are left.
    """
    found: dict[str, dict[Any, list[float]]] = {}
    for row in rows:
        found.setdefault(name(row), {}).setdefault(row[x], []).append(y(row))
    made = []
    for index, (label, points) in enumerate(found.items()):
        look = looks.get(label, style.LOOKS[(len(looks) + index) % len(style.LOOKS)])
        totals = [spread(values) for values in points.values()]
        texts = [
            text(total.mean) + (f" ± {text(total.deviation)}" if total.deviation is not None else "")
            for total in totals
        ]
        made.append(
            {
                "name": label, "x": list(points), "y": [total.mean for total in totals],
                "sd": [total.deviation or 0 for total in totals], "text": texts,
                "light": look.light, "dark": look.dark, "symbol": look.symbol, "dash": look.dash,
            }
        )  # fmt: skip
    return made


def chart(
    title: str, about: str, x: str, y: str, series: list[dict[str, Any]], *, kind: str = "line", share: bool = True,
    shown: bool = False,
    axis: str | None = None, span: tuple[float, float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A chart and its table. share: y runs from 0 to 1, else it is drawn logarithmically, unless ``span`` says from
    where to where. axis: of x, ``category``, ``linear`` or ``log``; None chooses. shown: the table stands open.
    """
    ticks = list(dict.fromkeys(value for one in series for value in one["x"]))
    rows = [
        (one["name"], [dict(zip(one["x"], one["text"], strict=True)).get(value, formats.MISSING) for value in ticks])
        for one in series
    ]
    axis = axis or ("category" if kind == "bar" or 0 in ticks else "log")
    return {
        "title": title, "about": about, "x": x, "y": y, "series": series, "kind": kind, "share": share, "open": shown,
        "ticks": ticks, "rows": rows,
        "axis": axis, "range": span,
    }  # fmt: skip


def html(
    title: str,
    heading: str,
    about: str,
    findings: Sequence[str],
    charts: Sequence[dict[str, Any]],
    value: Mapping[str, Any],
) -> str:
    """The page as one string. findings: its headline, line by line. value: what the benchmark wrote, for its
    circumstances.
    """
    kept = [{name: chart[name] for name in ("x", "y", "kind", "share", "series", "axis", "range")} for chart in charts]
    circumstances = f"{device(value['device'])}; {value['date']}; 1-minute load per core {value['load_per_core']}."
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_PAGE)
    return template.render(
        title=title, heading=heading, about=about, charts=charts, findings=findings, circumstances=circumstances,
        **shipped(kept),
    )  # fmt: skip


__all__ = ["Row", "chart", "html", "series"]
