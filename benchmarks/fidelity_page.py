"""The chart of `zonal bench fidelity`: one HTML file in the style of the reports, with plotly inside and every number
in a table.
"""

from collections.abc import Sequence
from typing import Any

import jinja2

from benchmarks.charts import LOADER
from zonal.report import style
from zonal.report.page import shipped

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>Fidelity of feature maps · Zonal</title><link rel="icon" href="data:,">
<style>{{ css | safe }} .chart { height: 42rem; } select { font: inherit; }</style>
</head>
<body>
<header class="page"><p class="kicker">Zonal benchmark</p><h1>Feature maps of spherical Yat attention</h1>
<p class="headline">Features a token against the relative error of the outputs. Lower and further left is better.</p>
<p class="facts">Filled markers: scores are never negative. Open markers: they can be, so a row's sum may vanish. Dotted line: the mean of all visible values.
Dashed curve: no map that does not look at the data comes nearer to the kernel on vectors without a preferred direction.</p></header>
<main><section>
<p class="controls"><label>Data <select id="panel"></select></label> <label>Mask <select id="mask"></select></label> <label>Table <select id="shown"><option value="one">this data</option><option value="all">all data</option></select></label></p>
<div class="chart" id="chart" role="img" aria-label="Error against the number of features; the table holds the numbers"></div>
<p id="problem" class="notice" hidden></p>
<h3>All numbers</h3>
<div class="scroll"><table>
<thead><tr><th>data</th><th>map</th><th>size</th><th>m</th><th>flops</th><th>scores ≥ 0</th>{% for mask in masks %}<th>{{ mask }}</th>{% endfor %}{% if paper %}<th>paper</th>{% endif %}</tr></thead>
<tbody>
{% for row in rows %}
<tr data-panel="{{ row.panel }}"><td>{{ row.panel }}</td><td>{{ row.family }}</td><td>{{ row.label }}</td><td>{{ row.m }}</td><td>{{ row.flops }}</td><td>{{ "yes" if row.positive else "no" }}</td>
{% for mask in masks %}<td>{{ "%.3g" | format(row[mask].error) }}{% if row[mask].sd is not none %}<small>± {{ "%.1g" | format(row[mask].sd) }}</small>{% endif %}</td>{% endfor %}
{% if paper %}<td>{% if row.paper %}{{ "%.4g" | format(row.paper) }}{% endif %}</td>{% endif %}</tr>
{% endfor %}
</tbody></table></div>
</section></main>
"""  # noqa: E501 (template of a page)
_DRAWING = """  const panel = document.getElementById("panel"), mask = document.getElementById("mask"), shown = document.getElementById("shown");
  const lines = [...document.querySelectorAll("tr[data-panel]")];
  data.panels.forEach((name) => panel.add(new Option(name)));
  data.masks.forEach((name) => mask.add(new Option(name)));
  // 1-2-5 within decades, written plainly: plotly's own logarithmic labels ("2", "5") mislead
  const ticks = (decades) => {
    const values = decades.flatMap((decade) => [1, 2, 5].map((step) => +(step * decade).toPrecision(3)));
    return { tickvals: values, ticktext: values.map(String) };
  };
  function draw() {
    lines.forEach((line) => { line.hidden = shown.value === "one" && line.dataset.panel !== panel.value; });
    const rows = data.rows.filter((row) => row.panel === panel.value);
    const reference = data.references[panel.value];
    const sizes = rows.map((row) => row.m), span = [Math.min(...sizes) / 1.3, Math.max(...sizes) * 1.3];
    const traces = data.families.map((family) => {
      const own = rows.filter((row) => row.family === family.name).sort((a, b) => a.m - b.m);
      const colour = dark.matches ? family.dark : family.light;
      return {
        name: family.name, x: own.map((row) => row.m), y: own.map((row) => row[mask.value].error), mode: "lines+markers",
        line: { color: colour, dash: family.dash, width: 1.5 },
        marker: { size: 9, color: colour, symbol: own.map((row) => family.symbol + (row.positive ? "" : "-open")) },
        text: own.map((row) => `${row.family} (${row.label})<br>m = ${row.m}, error ${row[mask.value].error.toPrecision(3)}`), hoverinfo: "text",
      };
    }).filter((trace) => trace.x.length);
    traces.push({ name: "mean of all values", x: span, y: [reference.average[mask.value], reference.average[mask.value]], mode: "lines", line: { color: css("--soft"), dash: "dot" } });
    traces.push({ name: "bound", x: reference.bound.m, y: reference.bound.error, mode: "lines", line: { color: css("--soft"), dash: "dash" } });
    const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true, type: "log" };
    Plotly.react("chart", traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: css("--sans"), size: 12, color: css("--soft") },
      margin: { l: 56, r: 12, t: 12, b: 46 }, hovermode: "closest",
      xaxis: { ...axis, title: { text: "features a token" }, range: span.map(Math.log10), ...ticks([1, 10, 100, 1000]) },
      yaxis: { ...axis, title: { text: "relative error of the outputs" }, range: [-2, 0.5], ...ticks([0.01, 0.1, 1]) },
    }, { responsive: true, displaylogo: false, displayModeBar: false });
  }
  panel.addEventListener("change", draw);
  mask.addEventListener("change", draw);
  shown.addEventListener("change", draw);
  dark.addEventListener("change", draw);
  draw();
})();
</script>
</body>
</html>
"""  # noqa: E501 (template of a page)


def _panel(row: dict[str, Any]) -> str:
    return f"{row['input']}, d = {row['dim']}, eps = {row['eps']:g}, T = {row['length']}"


def html(rows: Sequence[dict[str, Any]]) -> str:
    """The page as one string. rows: as the benchmark writes them, the references among them."""
    masks = [name for name in ("causal", "bidirectional") if any(name in row for row in rows)]
    points = [{**row, "panel": _panel(row)} for row in rows if row["family"] != "reference"]
    references = {_panel(row): row for row in rows if row["family"] == "reference"}
    names = list(dict.fromkeys(row["family"] for row in points))
    # more families than looks: the second round of colours is dashed, with the markers of others
    count = len(style.LOOKS)
    families = []
    for index, name in enumerate(names):
        look, again = style.LOOKS[index % count], index // count
        symbol = style.LOOKS[(index + 4 * again) % count].symbol
        families.append(
            {
                "name": name,
                "light": look.light,
                "dark": look.dark,
                "symbol": symbol,
                "dash": "dashdot" if again else look.dash,
            }
        )
    kept = [{key: row[key] for key in ("panel", "family", "label", "m", "positive", *masks)} for row in points]
    payload = {
        "masks": masks,
        "panels": list(references),
        "references": {key: {"average": row["average"], "bound": row["bound"]} for key, row in references.items()},
        "families": families,
        "rows": kept,
    }
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_HEAD + LOADER + _DRAWING).render(
        masks=masks, rows=points, paper=any("paper" in row for row in points), **shipped(payload)
    )


__all__ = ["html"]
