// Draws `data` into an SVG whenever it changes; the mouse or the arrow keys move a cursor that reads out values. A drag
// zooms in: the kernel then sends the points of that stretch. A double click shows all.
const NS = "http://www.w3.org/2000/svg";

function node(parent, name, attributes, text) {
  const el = document.createElementNS(NS, name);
  for (const [k, v] of Object.entries(attributes)) el.setAttribute(k, v);
  if (text !== undefined) el.textContent = text;
  parent.appendChild(el);
  return el;
}

const SECONDS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];

const power = (v, digits) => v.toExponential(digits).replace("+", "");

function short(v) {
  if (v === 0) return "0";
  if (Math.abs(v) < 1e-4) return power(v, 1);
  if (Math.abs(v) >= 1e9) return power(v, 3);
  return String(Number.isInteger(v) ? v : Number(v.toPrecision(4)));
}

function tickText(v, step) {  // as many digits as tell neighbours apart: 80k, 100k, 2.5e12
  if (v === 0) return "0";
  const a = Math.abs(v), [unit, name] = [[1e6, "M"], [1e4, "k"]].find(([u]) => a >= u) || [1, ""];
  const scaled = name === "k" ? 1e3 : unit, digits = (w) => Math.max(0, Math.min(20, -Math.floor(Math.log10(w) + 1e-9)));
  if (a < 1e-4 || a >= 1e9) return power(v, step ? digits(step / 10 ** Math.floor(Math.log10(a))) : 0);
  return (step ? (v / scaled).toFixed(digits(step / scaled)) : String(Number((v / scaled).toPrecision(4)))) + name;
}

function clock(s, step) {  // 1:05 in hours and minutes, or below a minute's step in minutes and seconds
  const [big, small] = step >= 60 ? [3600, 60] : [60, 1];
  return `${Math.floor(s / big)}:${String(Math.floor((s % big) / small)).padStart(2, "0")}`;
}

function scale(values, log, from, to, pad, ends, time) {
  let ok = log ? values.filter((v) => v > 0) : values;
  if (!ok.length) ok = [1, 2];
  const f = log ? Math.log10 : (v) => v;
  let lo = Math.min(...ok.map(f)), hi = Math.max(...ok.map(f));
  if (ends && ends.length) [lo, hi] = ends.map(f);
  const room = hi > lo ? (hi - lo) * pad : Math.abs(hi) * 0.1 || 1;
  if (pad || hi === lo) { lo -= room; hi += room; }
  const at = (v) => from + ((f(Math.max(v, log ? 1e-30 : -Infinity)) - lo) / (hi - lo)) * (to - from);
  const back = (px) => { const v = lo + ((px - from) / (to - from)) * (hi - lo); return log ? 10 ** v : v; };
  if (log) return { at, back, ticks: logTicks(lo, hi) };
  const raw = (hi - lo) / 6, power = 10 ** Math.floor(Math.log10(raw)), out = [];
  const step = (time && raw > 0.5 && SECONDS.find((s) => s >= raw)) || [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  for (let k = Math.ceil(lo / step); k * step <= hi; k++) out.push(k * step);
  return { at, back, ticks: out, step };
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
  const foot = document.createElement("div"), readout = document.createElement("div");
  foot.className = "foot";
  readout.className = "readout";
  readout.setAttribute("aria-live", "polite");
  foot.append(readout);
  el.append(foot);
  const clip = `dfm-clip-${Math.random().toString(36).slice(2)}`;
  let cursor = null, sx = null, sy = null, points = [], asked = 0, drag = null;

  function button(text, title, press) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.title = title;
    made.addEventListener("click", press);
    foot.append(made);
    return made;
  }
  const all = button("Show all", "Zoom out; a double click does the same", () => zoom([]));
  const log = button("log", "Logarithm of the vertical axis", () => { model.set("log_y", !model.get("log_y")); model.save_changes(); });
  button("PNG", "Download the picture", () => model.send("png"));
  function download(sent, buffers) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(buffers, { type: sent.kind }));
    link.download = sent.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  function zoom(range) { show(null); model.set("zoom", range); model.save_changes(); }

  function draw() {
    asked = 0;
    if (!el.clientWidth) return;  // hidden, or not on the page yet: the watcher asks again when it has a width
    const w = Math.max(260, el.clientWidth);
    const data = model.get("data"), range = model.get("zoom");
    const legend = model.get("legend") && data.filter((s) => s.style !== "faint").length > 1;
    let row = legend ? 0 : -1, to = 52;  // of the legend, which wraps
    const places = data.map((s) => {
      if (s.style === "faint" || !legend) return null;
      const size = 36 + 6.3 * s.name.length;
      if (to > 52 && to + size > w - 18) { row += 1; to = 52; }
      to += size;
      return { x: to - size, y: 25 + 15 * row };
    });
    const h = model.get("height") + 15 * Math.max(0, row), box = { left: 52, right: w - 18, top: 40 + 15 * row, bottom: h - 34 };
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
    svg.setAttribute("height", h);
    svg.setAttribute("aria-label", model.get("summary") + ". Arrow keys read out values.");
    all.hidden = !range.length;
    log.setAttribute("aria-pressed", String(model.get("log_y")));
    const time = model.get("x_label") === "seconds";
    const seen = (s) => s.y.filter((_, i) => !range.length || (s.x[i] >= range[0] && s.x[i] <= range[1]));
    sx = scale(data.flatMap((s) => s.x), model.get("log_x"), box.left, box.right, 0, range, time);
    sy = scale(data.flatMap(seen), model.get("log_y"), box.bottom, box.top, 0.06);
    const cut = node(svg, "clipPath", { id: clip });
    node(cut, "rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 });
    const drawing = node(svg, "g", { "clip-path": `url(#${clip})` });
    points = data.filter((s) => s.style !== "faint");
    const title = node(svg, "text", { x: box.left, y: 13, class: "title" }, model.get("title"));
    if (model.get("y_label")) node(svg, "text", { x: box.left + title.getComputedTextLength() + 8, y: 13 }, model.get("y_label"));
    const clocked = time && sx.step >= 1, unit = sx.step >= 60 ? "h:min" : "min:s";
    node(svg, "text", { x: box.right, y: h - 4, "text-anchor": "end" }, clocked ? unit : model.get("x_label"));
    for (const t of data.length ? sy.ticks : []) {
      node(svg, "line", { x1: box.left, x2: box.right, y1: sy.at(t), y2: sy.at(t), class: "grid" });
      node(svg, "text", { x: box.left - 6, y: sy.at(t) + 4, "text-anchor": "end" }, tickText(t, sy.step));
    }
    for (const t of data.length ? sx.ticks : []) node(svg, "text", { x: sx.at(t), y: box.bottom + 15, "text-anchor": "middle" },
      clocked ? clock(t, sx.step) : tickText(t, sx.step));
    node(svg, "line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "axis" });
    for (const [at, s] of data.entries()) {
      if (!s.x.length) continue;
      const path = s.x.map((x, i) => `${i ? "L" : "M"}${sx.at(x).toFixed(1)},${sy.at(s.y[i]).toFixed(1)}`).join("");
      const faint = s.style === "faint";
      const low = Math.min(...s.y);
      for (const i of s.cut) {
        const x = sx.at(s.x[i]), y = sy.at(s.y[i]), up = s.y[i] > low;
        node(drawing, "path", { d: `M${x - 4},${y}h8l-4,${up ? -6 : 6}z`, fill: s.color });
      }
      if (s.style === "points" || s.x.length === 1)
        s.x.forEach((x, i) => node(drawing, "circle", { cx: sx.at(x), cy: sy.at(s.y[i]), r: 3.5, fill: s.color }));
      else
        node(drawing, "path", { d: path, class: faint ? "faint" : "", fill: "none", stroke: s.color, "stroke-width": faint ? 0.8 : 2,
                            "stroke-dasharray": faint ? "" : s.dash });
      if (!places[at]) continue;
      const { x, y } = places[at];
      if (s.style === "points") node(svg, "circle", { cx: x + 9, cy: y, r: 3.5, fill: s.color });
      else node(svg, "line", { x1: x, x2: x + 18, y1: y, y2: y, stroke: s.color, "stroke-width": 2, "stroke-dasharray": s.dash });
      node(svg, "text", { x: x + 23, y: y + 4 }, s.name);
    }
    if (!data.length) node(svg, "text", { x: (box.left + box.right) / 2, y: h / 2, "text-anchor": "middle", opacity: 0.7 }, "no points yet");
    if (cursor !== null) {
      node(drawing, "line", { x1: sx.at(cursor), x2: sx.at(cursor), y1: box.top, y2: box.bottom, class: "cursor" });
      for (const s of points) {
        const i = nearest(s, cursor);
        node(drawing, "circle", { cx: sx.at(s.x[i]), cy: sy.at(s.y[i]), r: 4, fill: "none", stroke: s.color, "stroke-width": 2 });
      }
    }
    if (drag) {
      const [a, b] = drag.map((px) => Math.min(box.right, Math.max(box.left, px)));
      node(svg, "rect", { x: Math.min(a, b), y: box.top, width: Math.abs(b - a), height: box.bottom - box.top, class: "drag" });
    }
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
        // a point that is drawn within a pixel of the cursor is the cursor's own
        const i = nearest(s, x), there = Math.abs(sx.at(s.x[i]) - sx.at(x)) < 1 ? "" : ` (at ${short(s.x[i])})`;
        return `${s.name} ${short(s.y[i])}${there}`;
      }).join(", ");
    ask();
  }

  function place(event) {
    const r = svg.getBoundingClientRect();
    return ((event.clientX - r.left) / r.width) * svg.viewBox.baseVal.width;
  }

  function atMouse(event) {
    if (!points.length) return;
    if (drag) { drag[1] = place(event); ask(); return; }
    const px = place(event), xs = points[0].x;
    show(xs.reduce((a, b) => (Math.abs(sx.at(b) - px) < Math.abs(sx.at(a) - px) ? b : a)));
  }

  function dragEnds() {
    if (!drag) return;
    const [a, b] = drag;
    drag = null;
    if (Math.abs(a - b) > 5) zoom([sx.back(Math.min(a, b)), sx.back(Math.max(a, b))]);
    else ask();
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
  svg.addEventListener("mousedown", (event) => { if (points.length && !event.button) drag = [place(event), place(event)]; });
  svg.addEventListener("dblclick", () => zoom([]));
  window.addEventListener("mouseup", dragEnds);
  svg.addEventListener("mouseleave", () => show(null));
  svg.addEventListener("keydown", atKey);
  const watcher = new ResizeObserver(ask);
  watcher.observe(el);
  model.on("msg:custom", download);
  model.on("change:x_label", () => show(null));  // another axis has other values
  for (const name of ["data", "legend", "log_x", "log_y", "height", "title", "x_label", "y_label", "zoom"]) model.on(`change:${name}`, ask);
  draw();
  return () => { watcher.disconnect(); window.removeEventListener("mouseup", dragEnds); model.off("msg:custom", download); if (asked) cancelAnimationFrame(asked); };
}

export default { render };
