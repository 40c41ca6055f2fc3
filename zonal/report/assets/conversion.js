// a model before and after its conversion: perplexity by position, harm by layer, training
(async function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = (title) => ({ title: { text: title }, gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, ticks: "", automargin: true });
  const layout = (x, y) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", font: { family: css("--sans"), size: 12, color: css("--soft") },
    hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { family: css("--sans"), size: 12, color: css("--ink") }, align: "left" },
    margin: { l: 52, r: 12, t: 8, b: 44 }, xaxis: axis(x), yaxis: axis(y), showlegend: false, legend: { orientation: "h", y: 1.12 },
  });
  const settings = { responsive: true, displaylogo: false, displayModeBar: false };
  const draws = {
    positions(holder) {
      const tones = ["--ink", "--soft", "--accent"], names = Object.keys(data.positions);
      const traces = names.map((name, i) => ({
        name: name, mode: "lines+markers", line: { color: css(tones[names.length === 1 ? 0 : i]), width: 2 }, x: data.positions[name].map(([from, to]) => `${from}–${to}`),
        y: data.positions[name].map((row) => row[2]), hovertemplate: `${name}<br>%{x} tokens before: %{y:.2f}<extra></extra>`,
      }));
      window.Plotly.react(holder, traces, { ...layout("tokens before", "perplexity"), showlegend: true }, settings);
    },
    harms(holder) {
      const colors = data.harms.map((_, i) => css(data.chosen.includes(i) ? "--accent" : "--soft"));
      const trace = { type: "bar", x: data.harms.map((_, i) => i), y: data.harms, marker: { color: colors }, hovertemplate: "layer %{x}: %{y:+.4f} nats<extra></extra>" };
      window.Plotly.react(holder, [trace], layout("layer", "nats a token"), settings);
    },
    transfer: (holder) => curve(holder, data.transfer, "error"),
    distillation: (holder) => curve(holder, data.distillation, "nats a token"),
  };
  function curve(holder, points, name) {
    const trace = { mode: "lines", line: { color: css("--accent"), width: 2 }, x: points.map((p) => p[0]), y: points.map((p) => p[1]), hovertemplate: `step %{x}: %{y:.4f}<extra></extra>` };
    const found = layout("step", name);
    window.Plotly.react(holder, [trace], { ...found, yaxis: { ...found.yaxis, type: "log" } }, settings);
  }
  const unpacked = await unpackPlotly();
  if (!unpacked) {
    const box = document.getElementById("problem");
    box.textContent = "This browser is too old to unpack the curves (it lacks DecompressionStream). The tables hold the numbers.";
    box.hidden = false;
  }
  function draw() {
    if (unpacked) document.querySelectorAll("[data-chart]").forEach((holder) => draws[holder.dataset.chart](holder));
    document.documentElement.dataset.drawn = "true";
  }
  dark.addEventListener("change", draw);
  draw();
})();
