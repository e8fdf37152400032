// A table of runs: a click on a head sorts, words filter, a tick chooses, and tags and note are written. New figures are
// put into the rows that are there: a tick, the focus and a half-written note stay.
const short = (v) => String(Number.isInteger(v) ? v : Number(v.toPrecision(4)));
const NUMBER = /(\d+(?:\.\d+)?(?:e[-+]?\d+)?)/i;

function compared(a, b) {  // lr/0.0005 is before lr/0.001: numbers within a text compare as numbers
  if (typeof a === "number" && typeof b === "number") return a - b;
  const x = String(a).split(NUMBER), y = String(b).split(NUMBER);
  for (let i = 0; i < Math.min(x.length, y.length); i++) {
    const order = i % 2 ? x[i] - y[i] : x[i].localeCompare(y[i]);
    if (order) return order;
  }
  return x.length - y.length;
}

function add(parent, tag, text) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

function render({ model, el }) {
  el.classList.add("dfm-runs");
  const filter = add(el, "input"), table = add(el, "table"), head = add(add(table, "thead"), "tr"), body = add(table, "tbody");
  filter.placeholder = "filter: words of a row";
  filter.setAttribute("aria-label", filter.placeholder);
  const lines = new Map();  // by run
  let by = 0, up = 1;

  function sort(i) {
    up = i === by ? -up : 1;
    by = i;
    draw();
  }

  function drawHead() {
    const heads = model.get("heads");
    if (head.children.length !== heads.length + 4) {
      head.replaceChildren();
      add(head, "th");
      add(head, "th");
      heads.forEach((_, i) => { add(add(head, "th"), "button").onclick = () => sort(i); });
      add(head, "th", "tags");
      add(head, "th", "note");
    }
    heads.forEach((name, i) => {
      const th = head.children[i + 2];
      th.firstChild.textContent = name + (i === by ? (up > 0 ? " ↑" : " ↓") : "");
      th.ariaSort = i === by ? (up > 0 ? "ascending" : "descending") : null;
    });
  }

  function made(run) {
    const tr = document.createElement("tr"), tick = add(add(tr, "td"), "input"), place = add(tr, "td"), cells = [];
    tick.type = "checkbox";
    tick.setAttribute("aria-label", `choose ${run}`);
    tick.onchange = () => {
      const others = model.get("chosen").filter((name) => name !== run);
      model.set("chosen", tick.checked ? [...others, run] : others);
      model.save_changes();
    };
    const fields = {};
    for (const key of ["tags", "note"]) {
      const field = (fields[key] = add(add(tr, "td"), "input"));
      field.setAttribute("aria-label", `${key} of ${run}`);
      field.onkeydown = (event) => { if (event.key === "Enter") field.blur(); };  // JupyterLab keeps Enter from it
      field.onchange = () => {
        model.get("rows").find((row) => row.run === run)[key] = field.value;
        model.send({ name: run, tags: fields.tags.value, note: fields.note.value });
      };
    }
    return { tr, tick, place, cells, fields };
  }

  function fill(line, row) {
    line.tick.checked = model.get("chosen").includes(row.run);
    if (line.html !== row.thumbnail) line.place.innerHTML = line.html = row.thumbnail;  // made and escaped by the kernel
    while (line.cells.length < row.cells.length) {
      line.cells.push(document.createElement("td"));
      line.fields.tags.parentNode.before(line.cells.at(-1));
    }
    while (line.cells.length > row.cells.length) line.cells.pop().remove();
    row.cells.forEach((cell, i) => { line.cells[i].textContent = typeof cell === "number" ? short(cell) : cell; });
    for (const [key, field] of Object.entries(line.fields)) if (field !== document.activeElement) field.value = row[key];
  }

  function ordered(a, b) {
    const [x, y] = [a.cells[by] ?? null, b.cells[by] ?? null];
    if (x === null || y === null) return (x === null) - (y === null);  // what is unknown comes last
    return up * compared(x, y);
  }

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/), rows = model.get("rows");
    drawHead();
    const found = rows.filter((r) => words.every((w) => [...r.cells, r.tags, r.note].join(" ").toLowerCase().includes(w)));
    const trs = found.sort(ordered).map((row) => {
      if (!lines.has(row.run)) lines.set(row.run, made(row.run));
      fill(lines.get(row.run), row);
      return lines.get(row.run).tr;
    });
    const written = body.contains(document.activeElement);  // to move or to hide its row would take the focus away
    const same = trs.length === body.children.length && trs.every((tr, i) => tr === body.children[i]);
    if (!same && !written) body.replaceChildren(...trs);
  }

  filter.oninput = draw;
  for (const name of ["heads", "rows", "chosen"]) model.on(`change:${name}`, draw);
  body.addEventListener("focusout", () => setTimeout(draw));
  draw();
  return () => { for (const name of ["heads", "rows", "chosen"]) model.off(`change:${name}`, draw); };
}
export default { render };
