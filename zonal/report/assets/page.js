(async function () {
  const comparisons = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
  const narrow = () => window.matchMedia("(max-width: 44rem)").matches;

  function problem(text) {
    const box = document.getElementById("problem");
    box.textContent = text;
    box.hidden = false;
  }

  for (const button of document.querySelectorAll(".copy")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  // ---- plotly, from the compressed copy in this file -------------------------------------------------------------
  if (!(await unpackPlotly())) {
    problem("This browser is too old to unpack the charts (it lacks DecompressionStream). All numbers are in the tables.");
    return;
  }

  // ---- theme ------------------------------------------------------------------------------------------------------
  function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function colour(operator) { return css("--" + operator.key); }
  function faint(hex, alpha) {
    const n = parseInt(hex.slice(1), 16);
    return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
  }
  function layout(extra) {
    const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, ticks: "", automargin: true, fixedrange: narrow() };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: css("--sans"), size: 12, color: css("--soft") },
      margin: { l: 48, r: 12, t: 12, b: 42 }, dragmode: narrow() ? false : "zoom",
      hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { family: css("--sans"), size: 12, color: css("--ink") }, align: "left" },
      xaxis: { ...axis }, yaxis: { ...axis },
    };
    for (const key of Object.keys(extra)) {
      base[key] = key === "xaxis" || key === "yaxis" ? { ...base[key], ...extra[key] } : extra[key];
    }
    return base;
  }
  const title = (text) => ({ text: text, font: { size: 12 }, standoff: 8 });

  // ---- numbers ----------------------------------------------------------------------------------------------------
  function bytes(value) {
    const units = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
    for (const [size, unit] of units) if (value >= size) return `${+(value / size).toPrecision(3)} ${unit}`;
    return `${value} B`;
  }
  const tokens = (n) => (n >= 1024 && n % 1024 === 0 ? `${n / 1024}k` : `${n}`);
  const short = (x) => (x === null || x === undefined ? "–" : Math.abs(x) >= 0.001 || x === 0 ? x.toFixed(3) : x.toExponential(1));
  const spread = (mean, sd) => (sd === null || sd === undefined ? short(mean) : `${short(mean)} ± ${short(sd)}`);
  function byteTicks(values) {
    const low = Math.floor(Math.log2(Math.min(...values))), high = Math.ceil(Math.log2(Math.max(...values)));
    const step = Math.max(1, Math.ceil((high - low) / (narrow() ? 4 : 6)));
    const ticks = [];
    for (let e = low; e <= high + step - 1; e += step) ticks.push(2 ** e);
    return { tickvals: ticks, ticktext: ticks.map(bytes) };
  }
  // 1-2-5 within decades, written plainly: plotly's own logarithmic labels ("2", "5") mislead
  function logTicks(values) {
    const good = values.filter((v) => v > 0);
    if (!good.length) return {};
    const low = Math.floor(Math.log10(Math.min(...good))), high = Math.ceil(Math.log10(Math.max(...good)));
    const ticks = [];
    for (let e = low; e <= high; e++) for (const m of high - low > 3 ? [1] : [1, 2, 5]) ticks.push(m * 10 ** e);
    return { tickvals: ticks, ticktext: ticks.map((t) => `${+t.toPrecision(3)}`) };
  }

  // ---- charts -----------------------------------------------------------------------------------------------------
  const visible = (comparison) => comparison.operators.filter((operator) => !hidden.has(operator.key));
  const choice = (section, name) => section.querySelector(`input[name="${section.id}-${name}"]:checked`).value;
  const marker = (operator, size) => ({ symbol: operator.symbol, size: size, color: colour(operator), maxdisplayed: 9 });

  function curve(comparison, section, element) {
    const x = element.dataset.x, [source, metric] = choice(section, "y").split(".");
    const every = choice(section, "lines") === "seeds", log = choice(section, "scale") === "log";
    const traces = [], shown = [];
    const unit = x === "steps" ? "step" : "seconds";
    for (const operator of visible(comparison)) {
      const data = operator[source];
      if (!data || !data[metric]) continue;
      const line = { color: colour(operator), width: 2, dash: operator.dash };
      const text = (value, at, seed) => `<b>${operator.label}</b>${seed === undefined ? "" : ` seed ${seed}`}<br>${unit} ${at}<br>${value}`;
      if (every) {
        for (const run of data.seeds) {
          const at = x === "steps" ? data.steps : run.seconds;
          shown.push(...run[metric]);
          traces.push({ x: at, y: run[metric], mode: "lines", line: { ...line, width: 1.3 }, hoverinfo: "text", text: run[metric].map((v, i) => text(short(v), at[i], run.seed)) });
        }
        continue;
      }
      const { mean, sd } = data[metric], at = data[x];
      shown.push(...mean);
      if (sd.some((v) => v !== null)) {
        const up = mean.map((m, i) => m + (sd[i] || 0)), down = mean.map((m, i) => m - (sd[i] || 0));
        const share = metric === "accuracy", ceiling = share ? 1 : Infinity;
        const floor = log ? Math.min(...mean.filter((v) => v > 0)) / 3 : share ? 0 : -Infinity;
        traces.push({ x: [...at, ...[...at].reverse()], y: [...up.map((v) => Math.min(v, ceiling)), ...down.map((v) => Math.max(v, floor)).reverse()], fill: "toself", fillcolor: faint(colour(operator), 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip" });
      }
      const mode = source === "validation" ? "lines+markers" : "lines";
      traces.push({ x: at, y: mean, mode: mode, line: line, marker: marker(operator, 7), hoverinfo: "text", text: mean.map((v, i) => text(spread(v, sd[i]), at[i])) });
    }
    const yTitle = { "validation.loss": "Held-out loss", "validation.accuracy": "Held-out accuracy", "training.loss": "Training loss" }[`${source}.${metric}`];
    const y = log ? { type: "log", ...logTicks(shown) } : metric === "accuracy" ? { tickformat: ".4~f" } : {};
    return [traces, { xaxis: { title: title(x === "steps" ? "Training steps" : "Seconds of training"), rangemode: "tozero" }, yaxis: { title: title(yTitle), ...y } }];
  }

  function slice(comparison, section, element) {
    const name = element.dataset.slice, traces = [];
    const numbers = comparison.operators.flatMap((o) => (o.slices[name] ? o.slices[name].x : []));
    const numeric = numbers.every((v) => Number(v) > 0);
    for (const operator of visible(comparison)) {
      const data = operator.slices[name];
      if (!data) continue;
      traces.push({
        x: numeric ? data.x.map(Number) : data.x, y: data.mean, mode: "lines+markers", line: { color: colour(operator), width: 2, dash: operator.dash }, marker: marker(operator, 8),
        error_y: { type: "data", array: data.sd.map((v) => v || 0), visible: data.sd.some((v) => v), color: colour(operator), thickness: 1.2, width: 3 },
        hoverinfo: "text", text: data.mean.map((v, i) => `<b>${operator.label}</b><br>${data.x[i]} ${name === "pairs" ? "pairs" : name === "length" ? "tokens" : ""}<br>${spread(v, data.sd[i])}`),
      });
    }
    const ticks = [...new Set(numbers)];
    const axis = numeric ? { type: "log", tickvals: ticks.map(Number), ticktext: ticks } : { type: "category" };
    return [traces, { xaxis: { ...axis, title: title({ pairs: "Key-value pairs", length: "Tokens" }[name] || name) }, yaxis: { title: title("Accuracy"), tickformat: ".4~f" } }];
  }

  // accuracy against length on one task, for the chosen number of pairs; a dotted line ends what training saw
  function transfer(comparison, section, element) {
    const chosen = section.querySelector(`input[name="${section.id}-pairs"]:checked`), task = element.dataset.task, traces = [], lengths = new Set();
    for (const operator of visible(comparison)) {
      const found = operator.transfer.find((line) => line.task === task && (!chosen || line.pairs === Number(chosen.value)));
      if (!found) continue;
      found.x.forEach((v) => lengths.add(v));
      traces.push({
        x: found.x, y: found.mean, mode: "lines+markers", line: { color: colour(operator), width: 2, dash: operator.dash }, marker: marker(operator, 7),
        error_y: { type: "data", array: found.sd.map((v) => v || 0), visible: found.sd.some((v) => v), color: colour(operator), thickness: 1, width: 2 },
        hoverinfo: "text", text: found.mean.map((v, i) => `<b>${operator.label}</b><br>${found.pairs} pairs, ${found.x[i]} tokens<br>${spread(v, found.sd[i])}`),
      });
    }
    const ticks = [...lengths].sort((a, b) => a - b);
    const shapes = comparison.trained ? [{ type: "line", x0: comparison.trained, x1: comparison.trained, y0: 0, y1: 1, yref: "paper", line: { color: css("--soft"), width: 1, dash: "dot" } }] : [];
    return [traces, {
      shapes: shapes, margin: { l: 34, r: 6, t: 6, b: 38 },
      xaxis: { type: "log", tickvals: ticks, ticktext: ticks.map(tokens), title: title("Tokens") }, yaxis: { range: [-0.04, 1.04], tickformat: ".1~f" },
    }];
  }

  function memory(comparison, section, element) {
    const shown = visible(comparison).filter((operator) => operator.memory.x.length);
    const all = comparison.operators.flatMap((operator) => operator.memory.y);
    const names = shown.map((operator) => operator.label);
    element.style.height = `${70 + 46 * shown.length}px`;
    const traces = [], annotations = [];
    shown.forEach((operator) => {
      const { x, y } = operator.memory, flat = new Set(y).size === 1;
      traces.push({
        x: y, y: y.map(() => operator.label), mode: "lines+markers", line: { color: colour(operator), width: 2.5 }, marker: marker(operator, 11),
        hoverinfo: "text", text: y.map((v, i) => `<b>${operator.label}</b><br>${tokens(x[i])} tokens: ${bytes(v)}`),
      });
      if (flat) {
        annotations.push({ x: Math.log10(y[0]), y: operator.label, text: `${bytes(y[0])} at any length`, showarrow: false, yshift: 17, xanchor: y[0] > Math.sqrt(Math.min(...all) * Math.max(...all)) ? "right" : "left", xshift: -6, font: { size: 11, color: css("--soft") } });
      } else {
        y.forEach((v, i) => annotations.push({ x: Math.log10(v), y: operator.label, text: tokens(x[i]), showarrow: false, yshift: 17, font: { size: 11, color: css("--soft") } }));
      }
    });
    const low = Math.log10(Math.min(...all)), high = Math.log10(Math.max(...all)), room = Math.max(0.3, (high - low) * 0.07);
    return [traces, {
      annotations: annotations, margin: { l: 20, r: 12, t: 18, b: 42 },
      xaxis: { type: "log", ...byteTicks(all), range: [low - room, high + room], title: title("Bytes a sequence, logarithmic") },
      yaxis: { type: "category", categoryorder: "array", categoryarray: [...names].reverse(), tickfont: { color: css("--ink") }, range: [-0.6, names.length - 0.3], showgrid: false },
    }];
  }

  // where each label goes, beside its point or "" where no side is free: its colour and symbol still name the point
  function labelPlaces(points, labels, element) {
    const range = (values) => [Math.min(...values), Math.max(...values) - Math.min(...values) || 1];
    const [x0, dx] = range(points.map((p) => p.x)), [y0, dy] = range(points.map((p) => p.y));
    const wide = 0.7 * element.clientWidth, high = 0.7 * element.clientHeight, line = 15, room = 9;
    const at = points.map((p) => ({ x: (wide * (p.x - x0)) / dx, y: (high * (y0 + dy - p.y)) / dy }));
    const taken = at.map(({ x, y }) => [x - room, y - room, x + room, y + room]);
    const free = (box) => box[0] > -0.15 * wide && box[2] < 1.15 * wide && taken.every((o) => box[2] < o[0] || o[2] < box[0] || box[3] < o[1] || o[3] < box[1]);
    return at.map(({ x, y }, index) => {
      const width = 6.6 * labels[index].length;
      const boxes = {
        "top center": [x - width / 2, y - room - line - 1, x + width / 2, y - room - 1], "bottom center": [x - width / 2, y + room + 1, x + width / 2, y + room + line + 1],
        "middle right": [x + room + 1, y - line / 2, x + room + width, y + line / 2], "middle left": [x - room - width, y - line / 2, x - room - 1, y + line / 2],
      };
      const side = Object.keys(boxes).find((name) => free(boxes[name])) || "";
      if (side) taken.push(boxes[side]);
      return side;
    });
  }

  // the headline number of each operator against something else of it: x, words for the pointer, and the axis of x
  function against(comparison, element, read, words, xaxis) {
    const traces = [], shown = visible(comparison).filter((operator) => operator.metric && read(operator));
    const at = xaxis.type === "log" ? (operator) => Math.log(read(operator)) : read;
    const places = labelPlaces(shown.map((operator) => ({ x: at(operator), y: (comparison.higher ? 1 : -1) * operator.metric.mean })), shown.map((operator) => operator.label), element);
    for (const [index, operator] of shown.entries()) {
      const { mean, sd } = operator.metric;
      traces.push({
        x: [read(operator)], y: [mean], mode: "markers+text", marker: { ...marker(operator, 12) }, text: [places[index] && operator.label], textposition: places[index] || "top center", textfont: { color: colour(operator), size: 12 }, cliponaxis: false,
        error_y: { type: "data", array: [sd || 0], visible: Boolean(sd), color: colour(operator), thickness: 1.3, width: 4 },
        hoverinfo: "text", hovertext: [`<b>${operator.label}</b><br>${spread(mean, sd)}<br>${words(read(operator))}`],
      });
    }
    return [traces, {
      margin: { l: 48, r: 16, t: 26, b: 42 }, xaxis: xaxis,
      yaxis: { title: title(comparison.higher ? "Accuracy (better ↑)" : "Held-out loss (better ↓)"), autorange: comparison.higher ? true : "reversed" },
    }];
  }

  function tradeoff(comparison, section, element) {
    const all = comparison.operators.filter((o) => o.speed).map((o) => o.speed);
    const room = (Math.max(...all) - Math.min(...all)) * 0.18 || all[0] * 0.1;
    return against(comparison, element, (o) => o.speed, (v) => `${Math.round(v).toLocaleString("en")} tokens a second`, {
      title: title("Training tokens a second (faster →)"), range: [Math.max(0, Math.min(...all) - room), Math.max(...all) + room], tickformat: "~s",
    });
  }

  // at the shortest length that memory is recorded for
  function state(comparison, section, element) {
    const all = comparison.operators.filter((o) => o.memory.y.length).map((o) => o.memory.y[0]);
    const low = Math.log10(Math.min(...all)), high = Math.log10(Math.max(...all)), room = Math.max(0.3, (high - low) * 0.18);
    return against(comparison, element, (o) => o.memory.y[0], (v) => `${bytes(v)} a sequence`, {
      type: "log", ...byteTicks(all), range: [low - room, high + room], title: title("Bytes a sequence, logarithmic (less ←)"),
    });
  }

  function sweep(comparison) {
    const traces = [], rates = new Set();
    for (const operator of visible(comparison)) {
      const data = operator.sweep;
      if (!data) continue;
      const x = data.x.map(Number), chosen = x.indexOf(data.chosen);
      x.forEach((v) => rates.add(v));
      traces.push({
        x: x, y: data.mean, mode: "lines+markers", line: { color: colour(operator), width: 2, dash: operator.dash }, marker: { symbol: operator.symbol, size: 8, color: colour(operator) },
        error_y: { type: "data", array: data.sd.map((v) => v || 0), visible: data.sd.some((v) => v), color: colour(operator), thickness: 1.2, width: 3 },
        hoverinfo: "text", text: data.mean.map((v, i) => `<b>${operator.label}</b><br>learning rate ${data.x[i]}<br>${spread(v, data.sd[i])}`),
      });
      if (chosen >= 0) traces.push({ x: [x[chosen]], y: [data.mean[chosen]], mode: "markers", marker: { symbol: "circle-open", size: 19, color: colour(operator), line: { width: 2 } }, hoverinfo: "skip" });
    }
    const ticks = [...rates].sort((a, b) => a - b);
    return [traces, { xaxis: { type: "log", tickvals: ticks, ticktext: ticks.map(String), title: title("Learning rate") }, yaxis: { title: title(comparison.higher ? "Accuracy" : "Held-out loss") } }];
  }

  function kernel(comparison, section, element) {
    const operator = comparison.operators.find((o) => o.key === element.dataset.operator);
    const panel = operator.kernels[Number(element.dataset.panel)];
    const traces = [], count = panel.heads.length;
    const distinct = new Set(panel.heads.map((head) => head.join())).size;
    (distinct === 1 ? panel.heads.slice(0, 1) : panel.heads).forEach((head, i) => {
      const tone = faint(colour(operator), distinct === 1 ? 1 : 1 - (0.62 * i) / Math.max(1, count - 1));
      const name = distinct === 1 ? "every head" : `head ${i + 1}`;
      if (panel.before && panel.before[i].join() !== head.join()) {
        traces.push({ x: panel.x, y: panel.before[i], mode: "lines", line: { color: tone, width: 1.2, dash: "dot" }, hoverinfo: "text", text: panel.x.map((v, j) => `${name}, before training<br>Φ(${v}) = ${panel.before[i][j]}`) });
      }
      traces.push({ x: panel.x, y: head, mode: "lines", line: { color: tone, width: 2 }, hoverinfo: "text", text: panel.x.map((v, j) => `${name}<br>Φ(${v}) = ${head[j]}`) });
    });
    return [traces, { margin: { l: 34, r: 6, t: 6, b: 26 }, xaxis: { nticks: 5, zeroline: true, zerolinecolor: css("--line") }, yaxis: { nticks: 5, zeroline: true, zerolinecolor: css("--line") } }];
  }

  function addPanel(holder, operator, where, kind, index) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), chart = document.createElement("div");
    caption.textContent = `${operator.label}, ${where}`;
    caption.style.color = `var(--${operator.key})`;
    chart.className = "chart";
    Object.assign(chart.dataset, { chart: kind, operator: operator.key, panel: String(index) });
    figure.dataset.panelOf = operator.key;
    figure.append(caption, chart);
    holder.append(figure);
  }

  // one small panel for each operator and layer; one for all layers where nothing differs
  function addKernels(comparison, holder) {
    for (const operator of comparison.operators) {
      if (!operator.kernels.length) continue;
      const same = operator.kernels.length > 1 && new Set(operator.kernels.map((p) => JSON.stringify([p.heads, p.before]))).size === 1;
      operator.kernels.slice(0, same ? 1 : undefined).forEach((panel, index) => addPanel(holder, operator, same ? "every layer" : `layer ${panel.layer}`, "kernel", index));
    }
  }

  function addSpectra(comparison, holder) {
    for (const operator of comparison.operators) {
      const spectra = operator.diagnostics ? operator.diagnostics.spectra : [];
      spectra.forEach((panel, index) => addPanel(holder, operator, `layer ${panel.layer}`, "spectrum", index));
    }
  }

  // ---- distances: their weights while training, and where keys lie -----------------------------------------------------
  const group = (index) => css(`--group${index % 7}`);
  const spaceNames = (comparison) => [...new Set(comparison.operators.flatMap((o) => (o.geometry ? o.geometry.layers.flatMap((layer) => Object.keys(layer.weights)) : [])))];
  const groupNames = (comparison) => comparison.operators.find((o) => o.embeddings).embeddings.groups;

  // which colour is what, once above all panels
  function addKey(holder, names) {
    const key = document.createElement("p");
    key.className = "key";
    names.forEach((name, index) => {
      const entry = document.createElement("span");
      entry.textContent = name;
      entry.style.setProperty("--c", `var(--group${index % 7})`);
      key.append(entry);
    });
    holder.before(key);
  }

  function addGeometry(comparison, holder) {
    addKey(holder, spaceNames(comparison));
    for (const operator of comparison.operators) {
      (operator.geometry ? operator.geometry.layers : []).forEach((layer, index) => {
        addPanel(holder, operator, `weights, layer ${layer.layer}`, "weights", index);
        if (layer.curvature) addPanel(holder, operator, `curvature, layer ${layer.layer}`, "curvature", index);
      });
    }
  }

  function lines(steps, heads, tone, name, what) {
    return heads.map((head, i) => ({
      x: steps, y: head, mode: "lines", line: { color: faint(tone, 1 - (0.6 * i) / Math.max(1, heads.length - 1)), width: 1.8 },
      hoverinfo: "text", text: head.map((v, j) => `${name}, head ${i + 1}<br>step ${steps[j]}<br>${what} ${v}`),
    }));
  }

  function weights(comparison, section, element) {
    const { steps, layers } = comparison.operators.find((o) => o.key === element.dataset.operator).geometry;
    const all = spaceNames(comparison);
    const traces = Object.entries(layers[Number(element.dataset.panel)].weights).flatMap(([name, heads]) => lines(steps, heads, group(all.indexOf(name)), name, "weight"));
    return [traces, { margin: { l: 34, r: 6, t: 6, b: 38 }, xaxis: { nticks: 5, title: title("Training steps") }, yaxis: { nticks: 5, rangemode: "tozero" } }];
  }

  function curvature(comparison, section, element) {
    const operator = comparison.operators.find((o) => o.key === element.dataset.operator), { steps, layers } = operator.geometry;
    const traces = lines(steps, layers[Number(element.dataset.panel)].curvature, colour(operator), "curvature", "");
    return [traces, { margin: { l: 34, r: 6, t: 6, b: 38 }, xaxis: { nticks: 5, title: title("Training steps") }, yaxis: { range: [-1.05, 1.05], nticks: 5, zeroline: true, zerolinecolor: css("--line") } }];
  }

  function addEmbeddings(comparison, holder) {
    addKey(holder, groupNames(comparison));
    for (const operator of comparison.operators) {
      const places = operator.embeddings ? operator.embeddings.spaces.filter((space) => space.head === 1) : [];
      places.forEach((space, index) => addPanel(holder, operator, `${space.name}, layer ${space.layer}`, "embedding", index));
    }
  }

  function embedding(comparison, section, element) {
    const { spaces, groups, group: of, tokens: texts } = comparison.operators.find((o) => o.key === element.dataset.operator).embeddings;
    const chosen = section.querySelector(`input[name="${section.id}-head"]:checked`), place = spaces.filter((space) => space.head === 1)[Number(element.dataset.panel)];
    const { x, y, curvature: bent, share } = spaces.find((space) => space.layer === place.layer && space.name === place.name && space.head === Number(chosen ? chosen.value : 1)) || place;
    const traces = groups.map((name, i) => {
      const at = of.flatMap((g, j) => (g === i ? [j] : []));
      const text = at.map((j) => `${texts[j].replace(/&/g, "&amp;").replace(/</g, "&lt;")}<br>${name}`);
      return { x: at.map((j) => x[j]), y: at.map((j) => y[j]), mode: "markers", marker: { size: 5, color: group(i), opacity: 0.75 }, hoverinfo: "text", text: text };
    }).filter((trace) => trace.x.length);
    const shapes = bent ? [{ type: "circle", x0: -1, x1: 1, y0: -1, y1: 1, line: { color: css("--soft"), width: 1 }, layer: "below" }] : [];
    const axis = { nticks: 5, zeroline: true, zerolinecolor: css("--line"), ...(bent ? { range: [-1.06, 1.06] } : {}) };
    return [traces, { shapes: shapes, margin: { l: 30, r: 6, t: 6, b: 38 }, xaxis: { ...axis, title: title(`${Math.round(100 * share)}% of their spread is seen`) }, yaxis: { ...axis, scaleanchor: "x", scaleratio: 1 } }];
  }

  // ---- inside the memories ----------------------------------------------------------------------------------------
  const looked = (comparison) => visible(comparison).filter((operator) => operator.diagnostics);

  function spectrum(comparison, section, element) {
    const operator = comparison.operators.find((o) => o.key === element.dataset.operator);
    const { heads } = operator.diagnostics.spectra[Number(element.dataset.panel)];
    const turn = Array.from({ length: 121 }, (_, i) => (2 * Math.PI * i) / 120);
    const traces = [{ x: turn.map(Math.cos), y: turn.map(Math.sin), mode: "lines", line: { color: css("--soft"), width: 1 }, hoverinfo: "skip" }];
    heads.forEach(({ head, re, im }, i) => {
      const tone = faint(colour(operator), 1 - (0.6 * i) / Math.max(1, heads.length - 1));
      traces.push({
        x: re, y: im, mode: "markers", marker: { size: 6, color: tone, line: { width: 0.5, color: css("--raised") } },
        hoverinfo: "text", text: re.map((x, j) => `head ${head}<br>${x} ${im[j] < 0 ? "−" : "+"} ${Math.abs(im[j])}i<br>modulus ${short(Math.hypot(x, im[j]))}`),
      });
    });
    const far = Math.max(1.12, ...heads.flatMap(({ re, im }) => re.map((x, j) => 1.06 * Math.hypot(x, im[j]))));
    const axis = { range: [-far, far], nticks: 5, zeroline: true, zerolinecolor: css("--line") };
    return [traces, { margin: { l: 30, r: 6, t: 6, b: 26 }, xaxis: axis, yaxis: { ...axis, scaleanchor: "x", scaleratio: 1 } }];
  }

  function bars(comparison, section, element) {
    const quantity = element.dataset.quantity, shown = looked(comparison).filter((operator) => operator.diagnostics.bars[quantity]);
    const log = quantity !== "effective_rank", names = new Set();
    const values = shown.flatMap((operator) => operator.diagnostics.bars[quantity].y).filter((v) => v > 0);
    const traces = shown.map((operator) => {
      const { x, y } = operator.diagnostics.bars[quantity];
      x.forEach((name) => names.add(name));
      return { type: "bar", x: x, y: y, marker: { color: colour(operator) }, hoverinfo: "text", textposition: "none", text: y.map((v, i) => `<b>${operator.label}</b><br>layer ${x[i].split(".")[0]}, head ${x[i].split(".")[1]}<br>${v}`) };
    });
    const most = Math.max(0, ...shown.map((operator) => operator.diagnostics.bars[quantity].most || 0));
    const shapes = most ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: most, y1: most, line: { color: css("--soft"), width: 1, dash: "dash" } }] : [];
    // bars on a logarithmic axis begin a little below the smallest
    const low = Math.log10(Math.min(...values)), high = Math.log10(Math.max(...values));
    const y = log && values.length ? { type: "log", ...logTicks(values), range: [low - Math.max(0.2, (high - low) * 0.15), high + 0.1] } : { rangemode: "tozero", ...(most ? { range: [0, most * 1.06] } : {}) };
    return [traces, { barmode: "group", shapes: shapes, xaxis: { type: "category", categoryorder: "array", categoryarray: [...names].sort((a, b) => Number(a.split(".")[0]) - Number(b.split(".")[0]) || Number(a.split(".")[1]) - Number(b.split(".")[1])), title: title("Layer.head") }, yaxis: y }];
  }

  function leverage(comparison) {
    const traces = looked(comparison).filter((operator) => operator.diagnostics.leverage).map((operator) => {
      const { x, y } = operator.diagnostics.leverage, half = (x[1] - x[0]) / 2;
      const text = y.map((v, i) => `<b>${operator.label}</b><br>leverage ${+(x[i] - half).toFixed(3)} to ${+(x[i] + half).toFixed(3)}<br>${(100 * v).toFixed(1)}% of keys`);
      // the outer bins reach to 0 and 1
      const whole = (each, first, last) => [first, ...each, last];
      return {
        x: whole(x, 0, 1), y: whole(y, y[0], y.at(-1)), mode: "lines", line: { color: colour(operator), width: 2, dash: operator.dash, shape: "hvh" }, fill: "tozeroy", fillcolor: faint(colour(operator), 0.12),
        hoverinfo: "text", text: whole(text, text[0], text.at(-1)),
      };
    });
    return [traces, { xaxis: { range: [0, 1], title: title("Leverage") }, yaxis: { rangemode: "tozero", tickformat: ".0%", title: title("Share of keys") } }];
  }

  function capacity(comparison) {
    const traces = [], shown = looked(comparison).filter((operator) => operator.diagnostics.capacity), all = [], best = [];
    for (const operator of shown) {
      const { x, mean, low, high } = operator.diagnostics.capacity;
      all.push(...x);
      best.push(...high);
      if (high.some((v, i) => v !== low[i])) traces.push({ x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], fill: "toself", fillcolor: faint(colour(operator), 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip" });
      traces.push({ x: x, y: mean, mode: "lines+markers", line: { color: colour(operator), width: 2, dash: operator.dash }, marker: marker(operator, 8), hoverinfo: "text", text: mean.map((v, i) => `<b>${operator.label}</b><br>${x[i]} keys stored<br>${v} recalled (${low[i]} to ${high[i]} over heads)`) });
    }
    const most = Math.max(0, ...all), top = Math.max(0, ...best);
    traces.unshift({ x: [0, most], y: [0, most], mode: "lines", line: { color: css("--soft"), width: 1, dash: "dash" }, hoverinfo: "skip" });
    return [traces, { xaxis: { rangemode: "tozero", title: title("Keys stored") }, yaxis: { range: [0, top * 1.12 || 1], title: title("Keys recalled, estimate") } }];
  }

  const builders = { curve, slice, transfer, memory, tradeoff, state, sweep, kernel, weights, curvature, embedding, spectrum, bars, leverage, capacity };
  const adders = { panels: addKernels, spectra: addSpectra, geometry: addGeometry, embeddings: addEmbeddings };
  const sections = comparisons.map((comparison) => [comparison, document.getElementById(comparison.id)]);
  for (const [comparison, section] of sections) {
    for (const [name, add] of Object.entries(adders)) {
      const holder = section.querySelector(`[data-${name}]`);
      if (holder) add(comparison, holder);
    }
  }

  async function draw(only) {
    for (const [comparison, section] of sections) {
      for (const figure of section.querySelectorAll("[data-panel-of]")) figure.hidden = hidden.has(figure.dataset.panelOf);
      for (const element of section.querySelectorAll(".chart")) {
        if (only && !only(element, section)) continue;
        const [traces, extra] = builders[element.dataset.chart](comparison, section, element);
        await window.Plotly.react(element, traces, layout(extra), config);
      }
    }
    document.documentElement.dataset.drawn = "true";
  }

  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const key = chip.dataset.operator;
      if (!hidden.delete(key)) hidden.add(key);
      chip.setAttribute("aria-pressed", String(!hidden.has(key)));
      draw((element) => !["kernel", "spectrum", "weights", "curvature", "embedding"].includes(element.dataset.chart));
    });
  }
  for (const [, section] of sections) {
    for (const controls of section.querySelectorAll(".controls")) {
      controls.addEventListener("change", () => draw((element, within) => within === section && element.dataset.chart === controls.dataset.forChart));
    }
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  window.addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
  await draw();
})().catch((error) => {
  const box = document.getElementById("problem");
  box.textContent = `The charts could not be drawn (${error.message}). All numbers are in the tables.`;
  box.hidden = false;
  console.error(error);
});
