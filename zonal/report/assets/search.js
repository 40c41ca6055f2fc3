// the move graph: how far a regime lies from the start against what it costs
(async function () {
  const graph = JSON.parse(document.getElementById("data").textContent);
  const box = document.getElementById("problem");
  if (!(await unpackPlotly())) {
    box.textContent = "This browser is too old to unpack the picture (it lacks DecompressionStream). All numbers are in the tables.";
    box.hidden = false;
    return;
  }
  const holder = document.querySelector(".chart"), dark = window.matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function lines(edges, style) {
    const x = [], y = [];
    for (const edge of edges) {
      x.push(graph.nodes[edge.from].x, graph.nodes[edge.to].x, null);
      y.push(graph.nodes[edge.from].y, graph.nodes[edge.to].y, null);
    }
    return { x: x, y: y, mode: "lines", line: style, hoverinfo: "skip" };
  }
  function draw() {
    const shade = (node) => (node.winner ? css("--accent") : node.visited ? css("--ink") : css("--soft"));
    const middle = (edge, axis) => (graph.nodes[edge.from][axis] + graph.nodes[edge.to][axis]) / 2;
    const nodes = graph.nodes, edges = graph.edges;
    const traces = [
      lines(edges.filter((edge) => !edge.walked), { color: css("--line"), width: 1.4 }),
      lines(edges.filter((edge) => edge.walked), { color: css("--accent"), width: 3 }),
      { x: edges.map((edge) => middle(edge, "x")), y: edges.map((edge) => middle(edge, "y")), mode: "markers", marker: { size: 9, opacity: 0 }, hoverinfo: "text", text: edges.map((edge) => edge.text) },
      {
        x: nodes.map((node) => node.x), y: nodes.map((node) => node.y), mode: "markers", hoverinfo: "text", text: nodes.map((node) => node.text),
        error_y: { type: "data", array: nodes.map((node) => node.sd || 0), color: css("--line"), thickness: 1.2, width: 3 },
        marker: { size: nodes.map((node) => (node.winner ? 17 : node.last ? 11 : 7)), symbol: nodes.map((node) => (node.winner ? "star" : node.last ? "circle" : "circle-open")), color: nodes.map(shade), line: { width: 1.5, color: nodes.map(shade) } },
      },
    ];
    const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, ticks: "", automargin: true };
    window.Plotly.react(holder, traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest", font: { family: css("--sans"), size: 12, color: css("--soft") },
      margin: { l: 56, r: 12, t: 12, b: 46 },
      hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { family: css("--sans"), size: 12, color: css("--ink") }, align: "left" },
      xaxis: { ...axis, tickvals: graph.ticks, title: { text: "Moves from the start" } }, yaxis: { ...axis, title: { text: graph.measured } },
    }, { responsive: true, displaylogo: false, displayModeBar: false });
    document.documentElement.dataset.drawn = "true";
  }
  dark.addEventListener("change", draw);
  draw();
})();
