// Draws `data` into an SVG whenever it changes; the mouse or the arrow keys move a cursor that reads out values.
const NS = "http://www.w3.org/2000/svg";

function node(parent, name, attributes, text) {
  const el = document.createElementNS(NS, name);
  for (const [k, v] of Object.entries(attributes)) el.setAttribute(k, v);
  if (text !== undefined) el.textContent = text;
  parent.appendChild(el);
  return el;
}

function short(v) {
  const a = Math.abs(v);
  if (v === 0) return "0";
  if (a >= 1e5 || a < 1e-4) return v.toExponential(1);
  return String(Number(v.toPrecision(4)));
}

function scale(values, log, from, to, pad) {
  let ok = log ? values.filter((v) => v > 0) : values;
  if (!ok.length) ok = [1, 2];
  const f = log ? Math.log10 : (v) => v;
  let lo = Math.min(...ok.map(f)), hi = Math.max(...ok.map(f));
  const room = hi > lo ? (hi - lo) * pad : Math.abs(hi) * 0.1 || 1;
  if (pad || hi === lo) { lo -= room; hi += room; }
  const at = (v) => from + ((f(Math.max(v, log ? 1e-30 : -Infinity)) - lo) / (hi - lo)) * (to - from);
  return { at, ticks: log ? logTicks(lo, hi) : ticks(lo, hi) };
}

function ticks(lo, hi) {
  const raw = (hi - lo) / 6, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const out = [];
  for (let k = Math.ceil(lo / step); k * step <= hi; k++) out.push(k * step);
  return out;
}

function logTicks(lo, hi) {
  const out = [];
  for (let p = Math.floor(lo); p <= Math.ceil(hi); p++)
    for (const m of hi - lo < 1.5 ? [1, 2, 5] : [1]) {
      const t = Math.log10(m) + p;
      if (t >= lo && t <= hi) out.push(10 ** t);
    }
  return out;
}

function render({ model, el }) {
  el.classList.add("dfm-plot");
  const svg = node(el, "svg", { role: "img", tabindex: "0" });
  const readout = document.createElement("div");
  readout.className = "readout";
  readout.setAttribute("aria-live", "polite");
  el.appendChild(readout);
  let cursor = null, sx = null, points = [], asked = 0;

  function draw() {
    asked = 0;
    if (!el.clientWidth) return;  // hidden, or not on the page yet: the watcher asks again when it has a width
    const w = Math.max(260, el.clientWidth), h = model.get("height");
    const box = { left: 52, right: w - 10, top: 40, bottom: h - 34 };
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
    svg.setAttribute("height", h);
    svg.setAttribute("aria-label", model.get("summary") + ". Arrow keys read out values.");
    const data = model.get("data");
    sx = scale(data.flatMap((s) => s.x), model.get("log_x"), box.left, box.right, 0);
    const sy = scale(data.flatMap((s) => s.y), model.get("log_y"), box.bottom, box.top, 0.06);
    points = data.filter((s) => s.style !== "faint");
    const title = node(svg, "text", { x: box.left, y: 13, class: "title" }, model.get("title"));
    if (model.get("y_label")) node(svg, "text", { x: box.left + title.getComputedTextLength() + 8, y: 13 }, model.get("y_label"));
    node(svg, "text", { x: box.right, y: h - 4, "text-anchor": "end" }, model.get("x_label"));
    for (const t of data.length ? sy.ticks : []) {
      node(svg, "line", { x1: box.left, x2: box.right, y1: sy.at(t), y2: sy.at(t), class: "grid" });
      node(svg, "text", { x: box.left - 6, y: sy.at(t) + 4, "text-anchor": "end" }, short(t));
    }
    for (const t of data.length ? sx.ticks : []) node(svg, "text", { x: sx.at(t), y: box.bottom + 15, "text-anchor": "middle" }, short(t));
    node(svg, "line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "axis" });
    let legend = box.left;
    for (const s of data) {
      const path = s.x.map((x, i) => `${i ? "L" : "M"}${sx.at(x).toFixed(1)},${sy.at(s.y[i]).toFixed(1)}`).join("");
      const faint = s.style === "faint";
      if (s.style === "points" || s.x.length === 1)
        s.x.forEach((x, i) => node(svg, "circle", { cx: sx.at(x), cy: sy.at(s.y[i]), r: 3.5, fill: s.color }));
      else
        node(svg, "path", { d: path, fill: "none", stroke: s.color, "stroke-width": faint ? 0.8 : 2, opacity: faint ? 0.35 : 1,
                            "stroke-dasharray": faint ? "" : s.dash });
      if (faint) continue;
      if (s.style === "points") node(svg, "circle", { cx: legend + 9, cy: 25, r: 3.5, fill: s.color });
      else node(svg, "line", { x1: legend, x2: legend + 18, y1: 25, y2: 25, stroke: s.color, "stroke-width": 2, "stroke-dasharray": s.dash });
      node(svg, "text", { x: legend + 23, y: 29 }, s.name);
      legend += 36 + 6.3 * s.name.length;
    }
    if (!data.length) node(svg, "text", { x: (box.left + box.right) / 2, y: h / 2, "text-anchor": "middle", opacity: 0.7 }, "no points yet");
    if (cursor !== null) node(svg, "line", { x1: sx.at(cursor), x2: sx.at(cursor), y1: box.top, y2: box.bottom, class: "cursor" });
  }

  function ask() { if (!asked) asked = requestAnimationFrame(draw); }

  function nearest(s, x) {
    let best = 0;
    s.x.forEach((v, i) => { if (Math.abs(v - x) < Math.abs(s.x[best] - x)) best = i; });
    return best;
  }

  function show(x) {
    cursor = x;
    readout.textContent = x === null ? "" : `${model.get("x_label")} ${short(x)}: ` +
      points.map((s) => {
        const i = nearest(s, x), there = s.x[i] === x ? "" : ` (at ${short(s.x[i])})`;
        return `${s.name} ${short(s.y[i])}${there}`;
      }).join(", ");
    ask();
  }

  function atMouse(event) {
    if (!points.length) return;
    const r = svg.getBoundingClientRect(), px = ((event.clientX - r.left) / r.width) * svg.viewBox.baseVal.width;
    const xs = points[0].x;
    show(xs.reduce((a, b) => (Math.abs(sx.at(b) - px) < Math.abs(sx.at(a) - px) ? b : a)));
  }

  function atKey(event) {
    if (!points.length || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    const xs = points[0].x, here = cursor === null ? xs.length : nearest(points[0], cursor);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: xs.length - 1 }[event.key];
    show(event.key === "Escape" ? null : xs[Math.min(xs.length - 1, Math.max(0, to))]);
  }

  svg.addEventListener("mousemove", atMouse);
  svg.addEventListener("mouseleave", () => show(null));
  svg.addEventListener("keydown", atKey);
  const watcher = new ResizeObserver(ask);
  watcher.observe(el);
  for (const name of ["data", "log_x", "log_y", "height", "title", "y_label"]) model.on(`change:${name}`, ask);
  draw();
  return () => { watcher.disconnect(); if (asked) cancelAnimationFrame(asked); };
}

export default { render };
