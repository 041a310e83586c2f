"use strict";
// Draws the two charts from the JSON in #data. Sets data-drawn on the body when done, data-error
// when something failed.
(() => {
  const body = document.body;
  addEventListener("error", (event) => { body.dataset.error = String(event.message); });
  const byId = (id) => document.getElementById(id);
  const memory = byId("memory"), lanes = byId("lanes"), tip = byId("tip");
  const SVG = memory.namespaceURI;
  const D = JSON.parse(byId("data").textContent);
  const LEFT = 62, RIGHT = 14;
  const COLOURS = new Set(["activation", "weight", "gradient", "state", "input", "temporary",
    "forward", "backward", "update", "recompute", "stall", "copy"]);
  const colour = (kind) => "c-" + (COLOURS.has(kind) ? kind : "other");
  let view = [0, D.end];
  let cursor = -1;      // index into D.times
  let chosen = [0, -1]; // row and span of the lanes chart

  // [Numbers for a person]
  function scaled(value, units) {
    const unit = units.find((u) => Math.abs(value) >= u[1]) || units[units.length - 1];
    const v = value / unit[1];
    return v.toFixed(unit[0] === "B" ? 0 : Math.abs(v) >= 10 ? 1 : 2) + " " + unit[0];
  }
  const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const TIMES = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
  const bytes = (n) => scaled(n, SIZES);
  const seconds = (t) => (t === 0 ? "0 s" : scaled(t, TIMES));

  // Ticks at 1, 2 or 5 times a power of ten of the unit that fits the range.
  function ticks(low, high, count, units) {
    const unit = units.find((u) => high >= u[1]) || units[units.length - 1];
    const raw = (high - low) / unit[1] / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((m) => m * power >= raw * 0.999) * power;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let k = Math.ceil(low / unit[1] / step - 1e-9); k * step * unit[1] <= high; k++) {
      const v = k * step;
      found.push([v * unit[1], v === 0 ? "0" : v.toFixed(digits) + " " + unit[0]]);
    }
    return found;
  }

  // [Drawing]
  function add(parent, tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }
  function html(parent, tag, text, name) {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }
  let width = 0; // of both charts, right edge of the plot included
  let edge = 0;  // where the plot ends
  function measure() {
    width = Math.max(260, Math.round(memory.getBoundingClientRect().width));
    edge = width - RIGHT;
    return width;
  }
  const x = (t) => LEFT + (t - view[0]) / (view[1] - view[0]) * (edge - LEFT);
  const when = (px) => view[0] + (px - LEFT) / (edge - LEFT) * (view[1] - view[0]);
  const clamp = (v, low, high) => Math.min(high, Math.max(low, v));
  function reset(svg, height, id) {
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = height + "px";
    const clip = add(add(svg, "defs", {}), "clipPath", { id });
    add(clip, "rect", { x: LEFT, y: 0, width: edge - LEFT, height });
    return add(svg, "g", {});
  }
  function timeAxis(svg, grid, top, bottom) {
    for (const [t, label] of ticks(view[0], view[1], width < 500 ? 4 : 9, TIMES)) {
      add(grid, "line", { x1: x(t), x2: x(t), y1: top, y2: bottom, class: "grid" });
      const late = x(t) > width - 34;
      add(svg, "text", { x: late ? width : x(t), y: bottom + 17,
        "text-anchor": late ? "end" : "middle" }, label);
    }
  }

  // Index of the last sample at or before t.
  function sampleAt(times, t) {
    let low = 0, high = times.length - 1;
    while (low < high) {
      const mid = (low + high + 1) >> 1;
      if (times[mid] <= t) low = mid; else high = mid - 1;
    }
    return low;
  }
  function range(times) {
    const first = sampleAt(times, view[0]);
    return [first, Math.min(times.length, sampleAt(times, view[1]) + 2)];
  }
  // Memory changes at once and then stays, so the outline is a staircase.
  function stairs(times, values, y, from, to, end) {
    let path = `M${x(times[from]).toFixed(1)},${y(values[from]).toFixed(1)}`;
    for (let i = from + 1; i < to; i++) {
      path += `H${x(times[i]).toFixed(1)}V${y(values[i]).toFixed(1)}`;
    }
    return path + `H${x(to < times.length ? times[to] : end).toFixed(1)}`;
  }

  const totals = D.times.map((_, i) => D.kinds.reduce((sum, k) => sum + k.values[i], 0));
  const measuredTop = D.measured ? D.measured.total.reduce((a, b) => Math.max(a, b), 0) : 0;
  const must = D.lines.filter((l) => l.main).map((l) => l.bytes);
  const floor = Math.max(D.peak.bytes, measuredTop, 1, ...must);
  const shown = D.lines.filter((l) => l.bytes <= floor * 1.5);
  const top = Math.max(floor, ...shown.map((l) => l.bytes)) * 1.1;

  function drawMemory() {
    const height = width < 500 ? 270 : 340, bottom = height - 26, y0 = 10;
    const y = (b) => bottom - b / top * (bottom - y0);
    const grid = reset(memory, height, "clip-memory");
    for (const [b, label] of ticks(0, top, 6, SIZES)) {
      add(grid, "line", { x1: LEFT, x2: edge, y1: y(b), y2: y(b), class: "grid" });
      add(memory, "text", { x: LEFT - 8, y: y(b) + 4, "text-anchor": "end" }, label);
    }
    timeAxis(memory, grid, y0, bottom);
    const plot = add(memory, "g", { "clip-path": "url(#clip-memory)" });
    drawStack(plot, y, bottom);
    drawLines(plot, y);
    drawPeak(plot, y);
    add(memory, "line", { x1: LEFT, x2: edge, y1: bottom, y2: bottom, class: "axis" });
    memory.mark = add(memory, "line",
      { y1: y0, y2: bottom, x1: -9, x2: -9, class: "cursor", visibility: "hidden" });
  }
  function drawStack(plot, y, bottom) {
    if (!D.times.length) return;
    const [from, to] = range(D.times);
    const level = totals.slice();
    for (const kind of D.kinds.slice().reverse()) {
      const outline = stairs(D.times, level, y, from, to, D.predictedEnd);
      const start = x(D.times[from]).toFixed(1);
      add(plot, "path", { d: `${outline}V${bottom}H${start}Z`, class: colour(kind.name) });
      kind.values.forEach((v, i) => { level[i] -= v; });
    }
    if (D.measured && D.measured.times.length) {
      const part = range(D.measured.times);
      const d = stairs(D.measured.times, D.measured.total, y, ...part, D.measured.end);
      add(plot, "path", { d, class: "casing" });
      add(plot, "path", { d, class: "measured" });
    }
  }
  function drawLines(plot, y) {
    for (const line of shown) {
      const name = line.main ? "limit" : "mild";
      const at = { x1: LEFT, x2: edge, y1: y(line.bytes), y2: y(line.bytes) };
      add(plot, "line", { ...at, class: "casing" });
      add(plot, "line", { ...at, class: name, "stroke-width": 2, "stroke-dasharray": "7 5" });
      add(plot, "text", { x: LEFT + 8, y: y(line.bytes) - 6, class: "halo " + name },
        `${line.label} ${bytes(line.bytes)}`);
    }
  }
  function drawPeak(plot, y) {
    if (!D.times.length || D.peak.time < view[0] || D.peak.time > view[1]) return;
    const at = x(D.peak.time), height = y(D.peak.bytes);
    const text = "predicted peak " + bytes(D.peak.bytes), room = text.length * 7.2 + 12;
    add(plot, "circle", { cx: at, cy: height, r: 5, class: "peak" });
    const close = shown.some((l) => Math.abs(y(l.bytes) - height + 4) < 15);
    const left = clamp(at + 9, LEFT + 4, edge - room);
    add(memory, "text", { x: left, y: height + (close ? 20 : -10), class: "strong halo" }, text);
  }

  const rows = D.groups.flatMap((g) => g.lanes.map((lane) => ({ ...lane, group: g.title })));
  const ROW = 48, BAR = 24;
  function drawLanes() {
    const height = rows.length * ROW + 30, bottom = height - 26;
    const grid = reset(lanes, height, "clip-lanes");
    timeAxis(lanes, grid, 4, bottom);
    const plot = add(lanes, "g", { "clip-path": "url(#clip-lanes)" });
    rows.forEach((row, r) => {
      const y = r * ROW + 20;
      const name = D.groups.length > 1 ? `${row.group}: ${row.name}` : row.name;
      add(lanes, "text", { x: LEFT, y: y - 5, class: "strong halo" },
        `${name}, busy ${(100 * row.busy / D.end).toFixed(0)} %`);
      add(plot, "rect", { x: LEFT, y, width: edge - LEFT, height: BAR, class: "trough" });
      row.spans.forEach((span, s) => drawSpan(plot, span, r, s, y));
    });
    add(lanes, "line", { x1: LEFT, x2: edge, y1: bottom, y2: bottom, class: "axis" });
  }
  function drawSpan(plot, [start, end, label, kind], r, s, y) {
    if (end < view[0] || start > view[1]) return;
    const left = Math.max(x(start), LEFT - 2), wide = Math.min(x(end), width) - left;
    const mark = chosen[0] === r && chosen[1] === s ? " chosen" : "";
    const name = `span ${colour(D.spanKinds[kind])}${mark}`;
    add(plot, "rect", { x: left.toFixed(2), y, width: Math.max(wide, 0.7).toFixed(2), height: BAR,
      class: name, "stroke-width": wide > 4 ? 0.6 : 0, "data-at": `${r} ${s}` });
    const text = D.labels[label];
    if (wide > text.length * 6.4 + 8) {
      add(plot, "text", { x: Math.max(left, LEFT) + 5, y: y + 16, class: "on" }, text);
    }
  }

  function drawLegends() {
    const item = (id, name, text) => {
      const node = html(byId(id), "li");
      html(node, "i", undefined, "swatch " + name);
      node.append(text);
    };
    for (const kind of D.kinds) item("memory-legend", colour(kind.name), kind.name);
    if (D.measured) item("memory-legend", "line", "measured, all kinds");
    for (const line of D.lines) {
      const off = shown.includes(line) ? "" : " (above the chart)";
      item("memory-legend", "line dash" + (line.main ? "" : " mild"),
        `${line.label} ${bytes(line.bytes)}${off}`);
    }
    for (const kind of D.spanKinds) item("lanes-legend", colour(kind), kind || "other");
    if (D.thinned) byId("thinned").textContent = ` ${D.thinned} of the shortest bars are left out.`;
  }

  // [Pointer and keyboard]
  function showTip(head, pairs, px, py) {
    tip.replaceChildren();
    html(tip, "b", head);
    for (const [name, value] of pairs) {
      const row = html(tip, "span", name);
      html(row, "em", value);
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = px + 16 + box.width <= innerWidth - 8;
    const left = right ? px + 16 : px - 16 - box.width;
    tip.style.left = clamp(left, 8, Math.max(8, innerWidth - box.width - 8)) + "px";
    tip.style.top = clamp(py + 14, 8, Math.max(8, innerHeight - box.height - 8)) + "px";
  }
  function hideTip() {
    tip.hidden = true;
    if (memory.mark) memory.mark.setAttribute("visibility", "hidden");
  }
  function showMemory(i, px, py) {
    cursor = i;
    const pairs = D.kinds.map((k) => [k.name, bytes(k.values[i])]).reverse();
    pairs.push(["all, predicted", bytes(totals[i])]);
    if (D.measured && D.measured.times.length) {
      const j = sampleAt(D.measured.times, D.times[i]);
      pairs.push(["all, measured", bytes(D.measured.total[j])]);
    }
    const at = clamp(x(D.times[i]), LEFT, edge);
    memory.mark.setAttribute("x1", at);
    memory.mark.setAttribute("x2", at);
    memory.mark.setAttribute("visibility", "visible");
    showTip("at " + seconds(D.times[i]), pairs, px, py);
  }
  function showSpan(r, s, px, py) {
    const [start, end, label, kind] = rows[r].spans[s];
    showTip(D.labels[label], [["on", rows[r].name], ["kind", D.spanKinds[kind] || "other"],
      ["starts at", seconds(start)], ["takes", seconds(end - start)]], px, py);
  }
  const offset = (svg, event) => event.clientX - svg.getBoundingClientRect().left;
  memory.addEventListener("pointermove", (event) => {
    if (!D.times.length || drag) return;
    const t = clamp(when(offset(memory, event)), view[0], view[1]);
    showMemory(sampleAt(D.times, t), event.clientX, event.clientY);
  });
  lanes.addEventListener("pointermove", (event) => {
    const at = event.target.getAttribute("data-at");
    if (!at || drag) return hideTip();
    showSpan(...at.split(" ").map(Number), event.clientX, event.clientY);
  });
  for (const svg of [memory, lanes]) {
    svg.addEventListener("pointerleave", hideTip);
    svg.addEventListener("blur", hideTip);
    svg.addEventListener("pointerdown", startDrag);
    svg.addEventListener("dblclick", () => zoom(0, D.end));
  }

  let drag = null;
  function startDrag(event) {
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    const svg = event.currentTarget, from = offset(svg, event);
    const height = svg.getBoundingClientRect().height;
    drag = add(svg, "rect", { x: from, y: 0, width: 0, height, class: "pick" });
    const span = (e) => {
      const ends = [from, offset(svg, e)].map((v) => clamp(v, LEFT, edge));
      return ends.sort((a, b) => a - b);
    };
    const move = (e) => {
      const [a, b] = span(e);
      drag.setAttribute("x", a);
      drag.setAttribute("width", b - a);
    };
    const drop = (e) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", drop);
      const [a, b] = span(e);
      drag.remove();
      drag = null;
      if (b - a > 6) zoom(when(a), when(b));
    };
    hideTip();
    addEventListener("pointermove", move);
    addEventListener("pointerup", drop);
  }
  function zoom(from, to) {
    const least = D.end / 20000;
    const a = clamp(from, 0, D.end - least);
    view = [a, clamp(to, a + least, D.end)];
    draw();
  }
  function zoomBy(factor) {
    const seen = D.times[cursor], inside = seen >= view[0] && seen <= view[1];
    const middle = inside ? seen : (view[0] + view[1]) / 2;
    zoom(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
  }
  function intoView(start, end) {
    const size = view[1] - view[0];
    if (start >= view[0] && end <= view[1]) return;
    const from = clamp((start + end) / 2 - size / 2, 0, Math.max(0, D.end - size));
    zoom(from, from + size);
  }
  function walkMemory(to) {
    if (!D.times.length) return;
    const i = clamp(to, 0, D.times.length - 1);
    intoView(D.times[i], D.times[i]);
    const box = memory.getBoundingClientRect();
    showMemory(i, box.left + x(D.times[i]), box.top + 20);
  }
  function walkLanes(row, to) {
    if (!rows.length || !rows[row].spans.length) return;
    chosen = [row, clamp(to, 0, rows[row].spans.length - 1)];
    const [start, end] = rows[row].spans[chosen[1]];
    intoView(start, end);
    drawLanes();
    const box = lanes.getBoundingClientRect();
    showSpan(...chosen, box.left + clamp(x(start), LEFT, width - 40), box.top + row * ROW + 44);
  }
  function onLane(delta) {
    if (!rows.length) return;
    const row = clamp(chosen[0] + delta, 0, rows.length - 1);
    const now = rows[chosen[0]].spans[Math.max(0, chosen[1])];
    const near = now ? rows[row].spans.findIndex((span) => span[1] >= now[0]) : 0;
    walkLanes(row, near < 0 ? rows[row].spans.length - 1 : near);
  }
  const jump = (event) => (event.shiftKey ? 10 : 1);
  const shared = { "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2),
    "0": () => zoom(0, D.end), Escape: () => { hideTip(); zoom(0, D.end); } };
  const memoryKeys = { ...shared,
    ArrowLeft: (e) => walkMemory(cursor - jump(e)), ArrowRight: (e) => walkMemory(cursor + jump(e)),
    Home: () => walkMemory(0), End: () => walkMemory(D.times.length - 1),
    p: () => walkMemory(D.peak.index), P: () => walkMemory(D.peak.index) };
  const laneKeys = { ...shared,
    ArrowLeft: (e) => walkLanes(chosen[0], chosen[1] - jump(e)),
    ArrowRight: (e) => walkLanes(chosen[0], chosen[1] + jump(e)),
    ArrowUp: () => onLane(-1), ArrowDown: () => onLane(1),
    Home: () => walkLanes(chosen[0], 0), End: () => walkLanes(chosen[0], Infinity) };
  for (const [svg, keys] of [[memory, memoryKeys], [lanes, laneKeys]]) {
    svg.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key](event);
    });
  }
  byId("zoom-in").addEventListener("click", () => zoomBy(0.5));
  byId("zoom-out").addEventListener("click", () => zoomBy(2));
  byId("zoom-all").addEventListener("click", () => zoom(0, D.end));

  function draw() {
    measure();
    drawMemory();
    drawLanes();
  }
  try {
    drawLegends();
    draw();
    let last = width;
    addEventListener("resize", () => {
      if (measure() === last) return;
      last = width;
      hideTip();
      draw();
    });
    body.dataset.drawn = "yes";
  } catch (error) {
    body.dataset.error = String(error);
    byId("keys").textContent = "The charts could not be drawn: " + error;
  }
})();
