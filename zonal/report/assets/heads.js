// what the heads of a model score: shares, singular values, and maps of pairs
(async function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const rgb = (name) => [1, 3, 5].map((at) => parseInt(css(name).slice(at, at + 2), 16));
  const FORBIDDEN = 255;

  function map(canvas) {
    const found = data.maps[canvas.dataset.head][canvas.dataset.map], levels = Uint8Array.from(atob(found.levels), (c) => c.charCodeAt(0));
    const size = data.tokens.length, none = rgb("--paper"), most = rgb("--ink"), high = rgb("--accent"), low = dark.matches ? [110, 168, 220] : [40, 96, 152];
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d"), image = context.createImageData(size, size);
    levels.forEach((level, i) => {
      const share = level / (FORBIDDEN - 1), far = found.signed ? Math.abs(2 * share - 1) : share, end = !found.signed ? most : share < 0.5 ? low : high;
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = Math.round(none[c] + far * (end[c] - none[c]));
      image.data[4 * i + 3] = level === FORBIDDEN ? 0 : 255;
    });
    context.putImageData(image, 0, 0);
    canvas.onmousemove = (event) => {
      const box = canvas.getBoundingClientRect(), at = (share) => Math.min(size - 1, Math.floor(size * share));
      const t = at((event.clientY - box.top) / box.height), s = at((event.clientX - box.left) / box.width), level = levels[t * size + s];
      const value = level === FORBIDDEN ? "forbidden" : (found.low + (level / (FORBIDDEN - 1)) * (found.high - found.low)).toPrecision(3);
      canvas.title = `query ${t + 1} ${data.tokens[t]}\nkey ${s + 1} ${data.tokens[s]}\n${value}`;
    };
  }

  const base = () => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest", font: { family: css("--sans"), size: 12, color: css("--soft") },
    hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { family: css("--sans"), size: 12, color: css("--ink") }, align: "left" },
  });
  const axis = () => ({ gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, ticks: "", automargin: true });
  const settings = { responsive: true, displaylogo: false, displayModeBar: false };

  function shares(holder) {
    const names = data.heads.map((head) => head.name), tones = { rows: "--line", columns: "--accent", interaction: "--ink" };
    const traces = Object.entries(tones).map(([part, tone]) => ({
      type: "bar", orientation: "h", x: data.heads.map((head) => head[part]), y: names, marker: { color: css(tone) }, hoverinfo: "text", textposition: "none",
      text: data.heads.map((head) => `<b>${head.name}</b><br>${part} ${(100 * head[part]).toFixed(1)} %`),
    }));
    window.Plotly.react(holder, traces, {
      ...base(), barmode: "stack", bargap: 0.35, margin: { l: 40, r: 28, t: 6, b: 34 }, xaxis: { ...axis(), range: [0, 1], tickformat: ".0%" },
      yaxis: { ...axis(), type: "category", autorange: "reversed", showgrid: false },
    }, settings);
  }

  function spectrum(holder) {
    const heads = data.heads.filter((head) => String(head.layer) === holder.dataset.layer);
    const traces = heads.map((head, i) => {
      let sum = 0;
      const y = head.spectrum.map((share) => (sum += share));
      return {
        x: y.map((_, rank) => rank + 1), y: y, mode: "lines", line: { color: css("--accent"), width: 2 }, opacity: 1 - (0.65 * i) / Math.max(1, heads.length - 1), hoverinfo: "text",
        text: y.map((share, rank) => `<b>head ${head.head}</b><br>rank ${rank + 1}: ${(100 * share).toFixed(1)} %`),
      };
    });
    window.Plotly.react(holder, traces, {
      ...base(), margin: { l: 40, r: 8, t: 6, b: 38 }, xaxis: { ...axis(), type: "log", dtick: "D2", title: { text: "rank" } }, yaxis: { ...axis(), range: [0, 1.02], tickformat: ".0%" },
    }, settings);
  }

  const unpacked = await unpackPlotly();
  if (!unpacked) {
    const box = document.getElementById("problem");
    box.textContent = "This browser is too old to unpack the curves (it lacks DecompressionStream). Shares and nats are in the tables.";
    box.hidden = false;
  }
  function draw() {
    document.querySelectorAll("canvas").forEach(map);
    if (unpacked) {
      document.querySelectorAll('[data-chart="shares"]').forEach(shares);
      document.querySelectorAll('[data-chart="spectrum"]').forEach(spectrum);
    }
    document.documentElement.dataset.drawn = "true";
  }
  dark.addEventListener("change", draw);
  draw();
})();
