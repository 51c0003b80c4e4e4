"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const fixed = (x, digits) => x.toFixed(digits);
const percent = (p) => (p < 1 && p > 0.9995 ? "<100 %" : fixed(100 * p, p > 0 && p < 1 ? 1 : 0) + " %");
const count = (n) => n.toLocaleString("en-US");
const counted = (n, name) => `${count(n)} ${name}${n === 1 ? "" : "s"}`;
const plural = (n) => counted(n, D.unit);

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (n >= 1024 && unit + 1 < units.length) { n /= 1024; ++unit; }
  return (unit === 0 ? n : fixed(n, n < 10 ? 2 : n < 100 ? 1 : 0)) + " " + units[unit];
}

function make(tag, attributes, text) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function shape(svg, tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  svg.append(node);
  return node;
}

// What the pointer is over, beside it.
const tip = $("tip");
function hover(node, textAt) {
  node.addEventListener("pointermove", (event) => {
    const text = textAt(event);
    tip.style.opacity = text ? 1 : 0;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
  node.addEventListener("pointerleave", () => { tip.style.opacity = 0; });
}

// Devices, numbered through, node after node.
const device = [];
D.nodes.forEach((node, n) => {
  for (let g = 0; g < node.gpus; ++g) {
    device.push({ node: n, gpu: g, alive: node.holds[g], speed: D.speeds[device.length] });
  }
});
const deviceName = (d) => D.nodes[device[d].node].name + " gpu " + device[d].gpu;
const live = device.filter((d) => d.alive).length;

// Tokens by device and expert when replicas share evenly; loads are tokens over the relative speed.
function spread(slots, begin, tokens) {
  const copies = new Array(tokens.length).fill(0);
  for (let d = 0; d < device.length; ++d) {
    if (!device[d].alive) continue;
    for (let s = begin[d]; s < begin[d + 1]; ++s) if (slots[s] >= 0) ++copies[slots[s]];
  }
  const cells = new Map();
  const load = new Array(device.length).fill(0);
  for (let d = 0; d < device.length; ++d) {
    for (let s = begin[d]; s < begin[d + 1]; ++s) {
      const e = slots[s];
      if (e < 0 || copies[e] === 0) continue;
      const share = device[d].alive ? tokens[e] / copies[e] : 0;
      cells.set(d * tokens.length + e, (cells.get(d * tokens.length + e) || 0) + share);
      load[d] += share / device[d].speed;
    }
  }
  const mean = tokens.reduce((a, b) => a + b, 0) / Math.max(live, 1);
  return { cells, load, mean, copies };
}

const views = new Map();
function viewOf(index) {
  if (!views.has(index)) {
    const tokens = D.loads[index];
    const order = tokens.map((_, e) => e).sort((a, b) => tokens[b] - tokens[a] || a - b);
    views.set(index, {
      tokens, order,
      after: spread(D.after[index], D.after_begin, tokens),
      before: D.before ? spread(D.before[index], D.before_begin, tokens) : null,
    });
  }
  return views.get(index);
}

function mix(a, b, t) {
  const channel = (hex, i) => parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16);
  const at = (i) => Math.round(channel(a, i) + (channel(b, i) - channel(a, i)) * t);
  return `rgb(${at(0)},${at(1)},${at(2)})`;
}

function drawHeat(canvas, view, side, top) {
  const data = view[side];
  const width = canvas.clientWidth, rows = view.order.length;
  const height = Math.max(150, Math.min(460, rows * 9));
  const ratio = devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  paint.fillStyle = css("--empty");
  paint.fillRect(0, 0, width, height);
  const w = width / device.length, h = height / rows;
  const row = new Array(rows);
  view.order.forEach((e, i) => { row[e] = i; });
  const low = css("--heat0"), high = css("--heat1");
  for (const [key, tokens] of data.cells) {
    const d = Math.floor(key / rows), e = key % rows;
    paint.fillStyle = mix(low, high, Math.min(1, top > 0 ? tokens / top : 0));
    const gap = Math.min(w, h) > 5 ? 1 : 0;
    paint.fillRect(d * w, row[e] * h, Math.max(w - gap, 0.7), Math.max(h - gap, 0.7));
  }
  paint.fillStyle = css("--soft");
  for (let d = 1; d < device.length; ++d) {
    if (device[d].node !== device[d - 1].node && w * D.nodes[0].gpus > 12) {
      paint.globalAlpha = 0.5;
      paint.fillRect(d * w - 0.5, 0, 1, height);
      paint.globalAlpha = 1;
    }
  }
}

function heatTip(canvas, side) {
  hover(canvas, (event) => {
    const view = viewOf(current), box = canvas.getBoundingClientRect();
    const d = Math.floor((event.clientX - box.left) / box.width * device.length);
    const i = Math.floor((event.clientY - box.top) / box.height * view.order.length);
    const e = view.order[i];
    if (e === undefined || !device[d]) return "";
    const held = view[side].cells.get(d * view.order.length + e);
    return `expert ${e}, ${count(view.tokens[e])} tokens, ${view[side].copies[e]} replicas\n` +
      deviceName(d) + (device[d].alive ? "" : " (dead)") +
      (held === undefined ? ": not here" : `: ${count(Math.round(held))} tokens here`);
  });
}

function axisLine(svg, y, width, left, text) {
  shape(svg, "line", { x1: left, x2: width, y1: y, y2: y, stroke: css("--line") });
  shape(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text);
}

// Smallest of 1, 2, 5 times a power of ten that is at least `least`.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least * (1 - 1e-9));
}

// Ticks at round numbers from 1, at least up to `top`, in at most four steps.
function ticksTo(top) {
  const step = roundStep((top - 1) / 4);
  const steps = Math.ceil((top - 1) / step - 1e-9);
  const digits = Math.max(1, -Math.floor(Math.log10(step) + 1e-9));
  return { values: Array.from({ length: steps + 1 }, (_, i) => 1 + i * step), top: 1 + steps * step, digits };
}

function clear(svg, height) {
  svg.replaceChildren();
  const width = svg.clientWidth || 600;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = height + "px";
  return width;
}

function drawBars() {
  const view = viewOf(current), svg = $("bars"), height = 230, left = 46, bottom = height - 24;
  const width = clear(svg, height);
  const mean = view.after.mean || 1;
  const metrics = D.metrics[D.shown[current]];
  const sides = view.before ? ["before", "after"] : ["after"];
  let top = Math.max(1.1, metrics.bound * 1.05);
  for (const side of sides) for (const load of view[side].load) top = Math.max(top, load / mean * 1.05);
  const y = (value) => bottom - (bottom - 8) * value / top;
  const step = roundStep(top / 4);
  for (let value = 0; value <= top; value += step) axisLine(svg, y(value), width, left, fixed(value, step < 1 ? 1 : 0));
  // More GPUs than columns: each column shows the busiest of its share.
  const columns = Math.min(device.length, Math.floor((width - left) / (3 * sides.length)));
  const slot = (width - left) / columns;
  sides.forEach((side, i) => {
    for (let c = 0; c < columns; ++c) {
      const first = Math.floor(c * device.length / columns), last = Math.floor((c + 1) * device.length / columns);
      const value = Math.max(...view[side].load.slice(first, last)) / mean;
      const bar = Math.max(1, (slot - Math.min(4, slot * 0.3)) / sides.length);
      shape(svg, "rect", {
        x: left + c * slot + i * bar, width: Math.max(bar - (bar > 4 ? 1 : 0), 1), y: y(value),
        height: Math.max(bottom - y(value), 0), rx: bar > 6 ? 2 : 0, fill: css("--" + side),
      });
    }
  });
  shape(svg, "line", {
    x1: left, x2: width, y1: y(metrics.bound), y2: y(metrics.bound), stroke: css("--bound"),
    "stroke-width": 2, "stroke-dasharray": "6 4",
  });
  shape(svg, "text", { x: left, y: height - 6 }, "gpu 0");
  shape(svg, "text", { x: width, y: height - 6, "text-anchor": "end" }, "gpu " + (device.length - 1));
  barsTip.text = (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width - left;
    const d = Math.floor(x / (width - left) * device.length);
    if (x < 0 || !device[d]) return "";
    return deviceName(d) + "\n" + sides.map((side) =>
      `${side}: ${count(Math.round(view[side].load[d] * device[d].speed))} tokens, ${fixed(view[side].load[d] / mean, 2)} of the mean`).join("\n");
  };
}
const barsTip = { text: () => "" };

// A dot per layer: before, after and the bound. The scale shows the state after; what was worse
// before than it reaches is an arrow at its top.
function drawLayers() {
  const svg = $("layers"), height = 200, left = 46, bottom = height - 24, width = clear(svg, height);
  let top = 1.02;
  for (const m of D.metrics) top = Math.max(top, 1 + 1.4 * (Math.max(m.after, m.bound) - 1));
  const ticks = ticksTo(top);
  top = ticks.top;
  const y = (value) => bottom - (bottom - 10) * (Math.min(value, top) - 1) / (top - 1);
  for (const value of ticks.values) axisLine(svg, y(value), width, left, fixed(value, ticks.digits));
  const x = (l) => left + 12 + (width - left - 24) * (D.metrics.length > 1 ? l / (D.metrics.length - 1) : 0.5);
  D.metrics.forEach((m, l) => {
    if (m.before !== null) {
      shape(svg, "line", { x1: x(l), x2: x(l), y1: y(m.before), y2: y(m.after), stroke: css("--line"), "stroke-width": 2 });
      const up = y(m.before);
      if (m.before > top) {
        shape(svg, "path", { d: `M${x(l) - 5},${up + 4}L${x(l) + 5},${up + 4}L${x(l)},${up - 6}Z`, fill: css("--before") });
      } else {
        shape(svg, "circle", { cx: x(l), cy: up, r: 4, fill: css("--before") });
      }
    }
    shape(svg, "line", { x1: x(l) - 6, x2: x(l) + 6, y1: y(m.bound), y2: y(m.bound), stroke: css("--bound"), "stroke-width": 2 });
    shape(svg, "circle", { cx: x(l), cy: y(m.after), r: D.shown[current] === l ? 6 : 4, fill: css("--after"),
      stroke: css("--ink"), "stroke-width": D.shown[current] === l ? 2 : 0 });
  });
  // As many numbers as fit; the axis is named once, at its left end.
  const every = Math.ceil(D.metrics.length * 30 / Math.max(width - left, 30));
  shape(svg, "text", { x: left - 6, y: height - 6, "text-anchor": "end" }, "layer");
  D.metrics.forEach((m, l) => {
    if (l % every === 0) shape(svg, "text", { x: x(l), y: height - 6, "text-anchor": "middle" }, m.layer);
  });
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    let best = 0;
    D.metrics.forEach((_, l) => { if (Math.abs(x(l) - at) < Math.abs(x(best) - at)) best = l; });
    return best;
  };
  svg.onclick = (event) => {
    const index = D.shown.indexOf(nearest(event));
    if (index >= 0) select(index);
  };
  layersTip.text = (event) => {
    const m = D.metrics[nearest(event)];
    return `layer ${m.layer}\n` + (m.before === null ? "" : `before ${fixed(m.before, 3)}\n`) +
      `after ${fixed(m.after, 3)}, bound ${fixed(m.bound, 3)}`;
  };
}
const layersTip = { text: () => "" };

// A line through points {x, y...}: one per name.
function drawLines(svg, points, names, xText, tipText) {
  const height = 220, left = 52, bottom = height - 40, width = clear(svg, height), right = width - 16;
  let top = 1.02;
  for (const p of points) for (const { key } of names) if (p[key] !== undefined) top = Math.max(top, p[key]);
  const ticks = ticksTo(top);
  top = ticks.top;
  const first = points[0].x, last = points[points.length - 1].x;
  const x = (value) => left + (right - left) * (last > first ? (value - first) / (last - first) : 0.5);
  const y = (value) => bottom - (bottom - 10) * (value - 1) / (top - 1);
  for (const value of ticks.values) axisLine(svg, y(value), right, left, fixed(value, ticks.digits));
  for (const { key, color } of names) {
    const own = points.filter((p) => p[key] !== undefined);
    shape(svg, "polyline", { points: own.map((p) => `${x(p.x)},${y(p[key])}`).join(" "), fill: "none",
      stroke: css(color), "stroke-width": 2.5, "stroke-linejoin": "round" });
    for (const p of own) shape(svg, "circle", { cx: x(p.x), cy: y(p[key]), r: 3, fill: css(color) });
  }
  shape(svg, "text", { x: left, y: bottom + 18 }, count(first));
  shape(svg, "text", { x: right, y: bottom + 18, "text-anchor": "end" }, count(last));
  shape(svg, "text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, xText);
  return (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    let best = points[0];
    for (const p of points) if (Math.abs(x(p.x) - at) < Math.abs(x(best.x) - at)) best = p;
    return tipText(best);
  };
}

function drawCurve() {
  if (D.moves_curve.length < 2) return;
  const points = D.moves_curve.map((p) => ({ x: p.moves, mean: p.mean, worst: p.worst }));
  curveTip.text = drawLines($("curve"), points, [{ key: "worst", color: "--before" }, { key: "mean", color: "--after" }],
    "replicas moved", (p) => `${count(p.x)} moves` + (D.expert_bytes ? `, ${bytes(p.x * D.expert_bytes)}` : "") +
      `\nmean ${fixed(p.mean, 3)}, worst layer ${fixed(p.worst, 3)}`);
}
const curveTip = { text: () => "" };

function drawAgeing() {
  if (D.ageing.length < 2) return;
  const points = D.ageing.map((p) => ({ x: p.iteration, after: p.after, before: p.before === null ? undefined : p.before }));
  const names = [{ key: "before", color: "--before" }, { key: "after", color: "--after" }];
  ageingTip.text = drawLines($("ageing"), points, names, "iteration of the token counts", (p) =>
    `iteration ${p.x}\n` + (p.before === undefined ? "" : `before ${fixed(p.before, 3)}\n`) + `after ${fixed(p.after, 3)}`);
}
const ageingTip = { text: () => "" };

// The least balanced layers, with the replicas of their hottest experts.
function fillWorst() {
  const table = $("worst"), head = make("tr");
  for (const name of ["layer", "before", "after", "bound"]) head.append(make("th", {}, name));
  head.append(make("th", { class: "reason" }, "hottest experts"));
  table.append(head);
  const worst = D.shown.map((_, i) => i).sort((a, b) => D.metrics[D.shown[b]].after - D.metrics[D.shown[a]].after);
  for (const i of worst.slice(0, 5)) {
    const m = D.metrics[D.shown[i]], view = viewOf(i), row = make("tr");
    const all = Math.max(view.tokens.reduce((a, b) => a + b, 0), 1);
    const hottest = view.order.slice(0, 3).map((e) => `${e}: ${fixed(100 * view.tokens[e] / all, 1)} %, ` +
      `${view.after.copies[e]} replica${view.after.copies[e] === 1 ? "" : "s"}`).join("; ");
    for (const text of [m.layer, m.before === null ? "–" : fixed(m.before, 3), fixed(m.after, 3), fixed(m.bound, 3)]) {
      row.append(make("td", {}, text));
    }
    row.append(make("td", { class: "reason" }, hottest));
    row.addEventListener("click", () => select(i));
    table.append(row);
  }
}

function drawSurvival() {
  const svg = $("survival"), height = 240, left = 52, bottom = height - 40, width = clear(svg, height);
  const right = width - 96, most = Math.max(...D.survival.map((s) => s.p.length)) - 1;
  const y = (p) => bottom - (bottom - 10) * p, x = (k) => left + (right - left) * k / Math.max(most, 1);
  for (let i = 0; i <= 4; ++i) axisLine(svg, y(i / 4), right, left, 25 * i + " %");
  const every = Math.max(1, roundStep(most / 10));
  for (let k = 0; k <= most; k += every) shape(svg, "text", { x: x(k), y: bottom + 18, "text-anchor": "middle" }, k);
  shape(svg, "text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, `${D.unit}s failed`);
  // Strategies with the same curve share a line and a label; the chosen one is drawn last, on top.
  const groups = new Map();
  for (const curve of D.survival) {
    const key = curve.p.join();
    if (!groups.has(key)) groups.set(key, { p: curve.p, names: [], chosen: false });
    groups.get(key).names.push(curve.name);
    groups.get(key).chosen ||= curve === D.survival[0];
  }
  const curves = [...groups.values()].sort((a, b) => a.chosen - b.chosen);
  for (const { p, chosen } of curves) {
    shape(svg, "polyline", {
      points: p.map((value, k) => `${x(k)},${y(value)}`).join(" "), fill: "none",
      stroke: css(chosen ? "--after" : "--before"), "stroke-width": chosen ? 3 : 1.5, "stroke-linejoin": "round",
    });
    if (chosen) p.forEach((value, k) => shape(svg, "circle", { cx: x(k), cy: y(value), r: 4, fill: css("--after") }));
  }
  // Labels stand where a curve falls below a half, the chosen one first. A label that would cover another, or a line,
  // takes the nearest free place.
  const taken = [];
  const meets = (box) => curves.some(({ p }) => p.some((value, k) => {
    for (let t = 0; k > 0 && t <= 1; t += 0.02) {
      const at = x(k - 1 + t), high = y(p[k - 1] + (value - p[k - 1]) * t);
      if (at > box.x - 3 && at < box.x + box.width + 3 && high > box.y && high < box.y + box.height) return true;
    }
    return false;
  }));
  const covers = (box) => taken.some((o) => box.x < o.x + o.width + 8 && o.x < box.x + box.width + 8 &&
    box.y < o.y + o.height && o.y < box.y + box.height);
  for (const { p, names, chosen } of curves.reverse()) {
    const found = p.findIndex((value) => value < 0.5), k = found < 0 ? p.length - 1 : found;
    const text = names.length > 2 ? `${names[0]} and ${names.length - 1} more` : names.join(", ");
    const at = k > 0 && found > 0 ? k - (0.5 - p[k]) / (p[k - 1] - p[k]) : k;
    const label = shape(svg, "text", { x: x(at) + 8, y: y(Math.max(p[k], 0.5)) - 6,
      class: "name", style: chosen ? `fill:${css("--after")};font-weight:600` : "" }, text);
    const wide = label.getBBox().width, start = [Number(label.getAttribute("x")), Number(label.getAttribute("y"))];
    const places = [];
    for (let dx = -width; dx < width; dx += 12) {
      for (let dy = -bottom; dy < bottom; dy += 12) places.push([start[0] + dx, start[1] + dy, Math.abs(dx) + Math.abs(dy)]);
    }
    places.sort((a, b) => a[2] - b[2]);
    const free = places.find(([px, py]) => {
      const box = { x: px, y: py - 12, width: wide, height: 16 };
      return px >= left && px + wide <= width && py > 14 && py < bottom - 4 && !meets(box) && !covers(box);
    });
    const [px, py] = free || [Math.min(start[0], width - wide), Math.max(start[1], 14)];
    label.setAttribute("x", px);
    label.setAttribute("y", py);
    taken.push({ x: px, y: py - 12, width: wide, height: 16 });
  }
  survivalTip.text = (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    const k = Math.round((at - left) / (right - left) * most);
    if (k < 0 || k > most) return "";
    return `${plural(k)} failed\n` + D.survival.filter((s) => s.p[k] !== undefined)
      .map((s) => `${s.name}: ${percent(s.p[k])}${s.exact ? "" : " (estimate)"}`).join("\n");
  };
}
const survivalTip = { text: () => "" };

function drawRounds() {
  if (!D.rounds) return;
  const svg = $("rounds"), height = 240, left = 46, bottom = height - 40, width = clear(svg, height);
  const most = Math.max(1, ...D.rounds.map((r) => r[0] + r[1] + r[2]));
  const step = Math.max(1, roundStep(most / 4)), top = Math.ceil(most / step) * step;
  const y = (value) => bottom - (bottom - 10) * value / top;
  for (let value = 0; value <= top; value += step) axisLine(svg, y(value), width, left, value);
  const slot = (width - left) / Math.max(D.rounds.length, 1);
  const colors = [css("--near"), css("--after"), css("--far")];
  D.rounds.forEach((round, i) => {
    let base = 0;
    round.forEach((value, reach) => {
      if (value === 0) return;
      shape(svg, "rect", {
        x: left + i * slot + 0.5, width: Math.max(slot - Math.min(2, slot * 0.3), 0.8), y: y(base + value),
        height: Math.max(y(base) - y(base + value) - (base > 0 ? 1 : 0), 0.5), fill: colors[reach],
      });
      base += value;
    });
  });
  shape(svg, "text", { x: left, y: bottom + 18 }, "round 0");
  shape(svg, "text", { x: width, y: bottom + 18, "text-anchor": "end" }, "round " + (D.migration.rounds - 1));
  roundsTip.text = (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width - left;
    const round = D.rounds[Math.floor(at / slot)];
    if (at < 0 || !round) return "";
    const first = Math.floor(at / slot) * D.round_step;
    const name = D.round_step > 1 ? `rounds ${first} to ${first + D.round_step - 1}, mean` : `round ${first}`;
    return `${name}\n${round[0]} inside nodes, ${round[1]} between nodes, ${round[2]} between racks`;
  };
}
const roundsTip = { text: () => "" };

function fillTable() {
  const table = $("table"), head = make("tr"), costs = costColumns();
  const names = ["strategy", "balance", "worst layer", "bound", "any split", "leave node",
    "survives any", `survives ${D.failures}`, "moves", "bytes", "rounds", ...costs.map(([name]) => name), "plan time"];
  for (const name of names) head.append(make("th", {}, name));
  table.append(head);
  for (const r of D.rows) {
    const row = make("tr", r.strategy === D.strategy ? { class: "chosen" } : {});
    row.append(make("td", r.summary ? { title: r.summary } : {}, r.strategy));
    if (r.reason !== undefined) {
      row.append(make("td", { class: "reason", colspan: names.length - 1 }, r.reason));
    } else {
      for (const text of [fixed(r.balance, 3), fixed(r.worst, 3), fixed(r.bound, 3), fixed(r.split, 3),
        percent(r.leave), r.certain, r.p === null ? "–" : percent(r.p), r.moves === null ? "–" : count(r.moves),
        r.moves === null || !D.expert_bytes ? "–" : bytes(r.bytes), r.rounds === null ? "–" : r.rounds,
        ...costs.map(([, text]) => text(r)), fixed(r.ms, r.ms < 10 ? 2 : 0) + " ms"]) row.append(make("td", {}, text));
    }
    table.append(row);
  }
}

function fillTexts() {
  const compared = D.rows.length > 0;
  document.title = $("title").textContent = compared ? "Expert placement: all strategies" : `Expert placement: ${D.strategy}`;
  if (compared) $("chosen").before($("compare"));
  $("chosen").hidden = !compared;
  $("chosen").textContent = `The plan of ${D.strategy}`;
  $("facts").textContent = `${counted(D.metrics.length, "layer")} of ${D.experts} on ` +
    `${counted(D.nodes.length, "node")} with ${counted(device.length, "GPU")}, ` +
    `${counted(D.after_begin[device.length], "slot")} per layer. Token counts: ${D.loads_name}` +
    (D.iteration === null ? "" : `, iteration ${D.iteration}`) + ".";
  const tile = (name, value, note) => {
    const node = make("div", { class: "tile" });
    node.append(make("span", {}, name), make("b", {}, value), make("small", {}, note));
    $("tiles").append(node);
  };
  tile("Balance, busiest GPU / mean", fixed(D.total.after, 3),
    (D.total.before === null ? "" : `${D.before_name}: ${fixed(D.total.before, 3)}; `) + `bound ${fixed(D.total.bound, 3)}`);
  const p = D.survival[0].p, certain = D.total.certain;
  tile("Survives any", certain < 0 ? "nothing" : plural(certain),
    p[certain + 1] === undefined ? "largest number computed" : `${plural(certain + 1)}: ${percent(p[certain + 1])}`);
  tile("Tokens that leave their node", percent(D.total.leave_least),
    `if near replicas come first; ${percent(D.total.leave)} if replicas share evenly`);
  if (D.migration) {
    tile("Moves from the old plan", count(D.migration.transfers),
      (D.expert_bytes ? bytes(D.migration.bytes) + ", " : "") + counted(D.migration.rounds, "round"));
  }
  costTiles(tile);
  fillCosts();
  const moves = D.rounds || D.moves_curve.length > 1;
  $("moves").hidden = !moves;
  $("moves").parentNode.className = moves ? "two" : "";
  $("rounds-part").hidden = !D.rounds;
  $("curve-part").hidden = D.moves_curve.length < 2;
  $("ageing-part").hidden = D.ageing.length < 2;
  if (D.shown.length < D.metrics.length) {
    $("shown").textContent = `Maps of ${D.shown.length} of ${D.metrics.length} layers, the least balanced ones, to keep the page small.`;
  }
  $("before-name").textContent = D.before ? "Before: " + D.before_name : "";
  $("before-figure").hidden = !D.before;
  for (const node of document.querySelectorAll(".of-before")) node.hidden = !D.before;
}

let current = 0;
function drawLayer() {
  const view = viewOf(current), m = D.metrics[D.shown[current]];
  $("which").textContent = `layer ${m.layer}: ` + (m.before === null ? "" : `${fixed(m.before, 3)} → `) + fixed(m.after, 3);
  let top = 0;
  for (const side of ["before", "after"]) {
    if (view[side]) for (const tokens of view[side].cells.values()) top = Math.max(top, tokens);
  }
  // Both maps share a scale that the hottest cells of the worse one do not wash out.
  const scale = Math.min(top, 1.5 * view.after.mean || top);
  $("scale").textContent = `0 to ${count(scale < 10 ? Number(scale.toPrecision(2)) : Math.round(scale))} tokens and more`;
  if (view.before) drawHeat($("heat-before"), view, "before", scale);
  drawHeat($("heat-after"), view, "after", scale);
  drawBars();
}

function select(index) {
  current = index;
  $("layer").value = index;
  drawLayer();
  drawLayers();
}

function drawAll() {
  drawLayer();
  drawLayers();
  drawTimes();
  drawSurvival();
  drawRounds();
  drawCurve();
  drawAgeing();
}

fillTexts();
fillTable();
fillWorst();
$("compare").hidden = D.rows.length === 0;
$("layer").max = D.shown.length - 1;
$("layer").disabled = D.shown.length < 2;
$("layer").addEventListener("input", () => select(Number($("layer").value)));
heatTip($("heat-before"), "before");
heatTip($("heat-after"), "after");
for (const [id, source] of [["bars", barsTip], ["layers", layersTip], ["times", timesTip], ["survival", survivalTip], ["rounds", roundsTip],
  ["curve", curveTip], ["ageing", ageingTip]]) {
  hover($(id), (event) => source.text(event));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let resizing = 0;
addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(drawAll); });
current = D.shown.indexOf(D.worst);
select(Math.max(current, 0));
drawAll();
document.body.dataset.ready = "1";
