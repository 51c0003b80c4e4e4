"use strict";
// Times and memory of the plan. The page shows those that were computed.

function timeUnit(seconds) {
  if (seconds >= 1) return { factor: 1, name: "s", long: "seconds" };
  if (seconds >= 1e-3 || seconds === 0) return { factor: 1e3, name: "ms", long: "milliseconds" };
  return { factor: 1e6, name: "µs", long: "microseconds" };
}

function duration(seconds) {
  const unit = timeUnit(seconds), value = seconds * unit.factor;
  return fixed(value, value < 10 ? 2 : value < 100 ? 1 : 0) + "\u00a0" + unit.name;
}

const PARTS = [{ key: "experts", color: "--after", name: "experts" }, { key: "all_to_all", color: "--near", name: "all-to-all" },
  { key: "exposed", color: "--bound", name: "copies and gradients" }];
const layerTime = (t) => PARTS.reduce((sum, part) => sum + t[part.key], 0);

// A stack of the parts for each layer, and a grey bar for plain expert parallelism next to it.
function drawTimes() {
  if (!D.times) return;
  const svg = $("times"), height = 240, left = 52, bottom = height - 24, width = clear(svg, height);
  const layers = D.times.layers, compared = D.times.vanilla !== null;
  let most = 0;
  for (const t of layers) most = Math.max(most, layerTime(t), t.vanilla || 0);
  const unit = timeUnit(most);
  $("times-unit").textContent = unit.long;
  const step = roundStep((most * unit.factor || 1) / 4), steps = Math.max(1, Math.ceil(most * unit.factor / step - 1e-9));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const y = (value) => bottom - (bottom - 10) * value / (step * steps);
  for (let i = 0; i <= steps; ++i) axisLine(svg, y(i * step), width, left, fixed(i * step, digits));
  const slot = (width - left) / layers.length, bar = slot * 0.8 / (compared ? 2 : 1);
  const rect = (x, base, seconds, color) => shape(svg, "rect", {
    x, width: Math.max(bar - (bar > 4 ? 1 : 0), 0.7), y: y((base + seconds) * unit.factor),
    height: Math.max(y(base * unit.factor) - y((base + seconds) * unit.factor), 0), fill: css(color),
  });
  layers.forEach((t, l) => {
    const x = left + (l + 0.1) * slot;
    if (compared) rect(x, 0, t.vanilla, "--before");
    let base = 0;
    for (const part of PARTS) {
      if (t[part.key] > 0) rect(x + (compared ? bar : 0), base, t[part.key], part.color);
      base += t[part.key];
    }
  });
  const every = Math.ceil(layers.length * 30 / Math.max(width - left, 30));
  shape(svg, "text", { x: left - 6, y: height - 6, "text-anchor": "end" }, "layer");
  layers.forEach((_, l) => {
    if (l % every === 0) shape(svg, "text", { x: left + (l + 0.5) * slot, y: height - 6, "text-anchor": "middle" }, D.metrics[l].layer);
  });
  timesTip.text = (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width - left;
    const t = layers[Math.floor(at / slot)];
    if (at < 0 || !t) return "";
    return `layer ${D.metrics[Math.floor(at / slot)].layer}: ${duration(layerTime(t))}\n` +
      PARTS.map((part) => `${part.name} ${duration(t[part.key])}`).join(", ") +
      (compared ? `\nvanilla ${duration(t.vanilla)}` : "");
  };
}
const timesTip = { text: () => "" };

function fillMemory() {
  const table = $("memory"), head = make("tr");
  for (const name of ["plan", "total", "weights", "gradients", "optimizer"]) head.append(make("th", {}, name));
  table.append(head);
  for (const [name, memory] of [[D.strategy, D.memory.gpu], ["copies dropped after each layer", D.memory.rematerialized],
    ["vanilla", D.memory.vanilla]]) {
    if (memory === null) continue;
    const row = make("tr", memory === D.memory.gpu ? { class: "chosen" } : {});
    for (const text of [name, ...[memory.bytes, memory.weight_bytes, memory.gradient_bytes, memory.optimizer_bytes].map(bytes)]) {
      row.append(make("td", {}, text));
    }
    table.append(row);
  }
}

function costTiles(tile) {
  if (D.times) {
    const times = D.times, iteration = `${duration(times.seconds)} per iteration`;
    const dropped = times.rematerialized === null ? "" : `; ${duration(times.rematerialized)} if copies are dropped after each layer`;
    if (times.vanilla === null) {
      tile("Time of an iteration", duration(times.seconds), `${duration(times.other)} of it in other layers${dropped}`);
    } else {
      tile("Speed-up over vanilla", `${fixed(times.speedup, 2)} ×`, `${iteration}; vanilla: ${duration(times.vanilla)}${dropped}`);
    }
  }
  if (D.memory) {
    const { gpu, rematerialized, vanilla } = D.memory;
    tile("Memory of the fullest GPU", bytes(gpu.bytes), [vanilla === null ? "" : `vanilla: ${bytes(vanilla.bytes)}`,
      rematerialized === null ? "" : `${bytes(rematerialized.bytes)} if copies are dropped after each layer`].filter(Boolean).join("; "));
  }
}

function fillCosts() {
  $("costs").hidden = !D.times && !D.memory;
  $("costs-name").textContent = [D.times ? "time" : "", D.memory ? "memory" : ""].filter(Boolean).join(" and ").replace(/^./, (c) => c.toUpperCase());
  $("times-part").hidden = !D.times;
  $("memory-part").hidden = !D.memory;
  if (D.memory) fillMemory();
  for (const node of document.querySelectorAll(".of-vanilla")) node.hidden = !D.times || D.times.vanilla === null;
}

// Columns of the table of strategies: [name, text of a row].
function costColumns() {
  const columns = [["iteration", "seconds", duration], ["speed-up", "speedup", (x) => fixed(x, 2)], ["memory", "memory_bytes", bytes]];
  return columns.filter(([, key]) => D.rows.some((r) => r[key] !== undefined && r[key] !== null))
    .map(([name, key, text]) => [name, (r) => (r[key] === null ? "–" : text(r[key]))]);
}
