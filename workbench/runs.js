// A table of runs: a click on a head sorts, words filter, a tick chooses, and tags and note are written.
const short = (v) => String(Number.isInteger(v) ? v : Number(v.toPrecision(5)));

function render({ model, el }) {
  el.classList.add("dfm-runs");
  const filter = document.createElement("input"), table = document.createElement("table");
  filter.placeholder = "filter: words of a row";
  filter.size = 30;
  filter.setAttribute("aria-label", filter.placeholder);
  el.append(filter, table);
  let by = 0, up = 1;
  function add(parent, tag, text) { const made = document.createElement(tag); if (text) made.textContent = text; parent.append(made); return made; }
  function compared(a, b) {
    const [x, y] = [a.cells[by], b.cells[by]];
    if (x === null || y === null) return (x === null) - (y === null);  // what is unknown comes last
    return up * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
  }
  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/), chosen = model.get("chosen");
    const rows = model.get("rows").filter((r) => words.every((w) => [...r.cells, r.tags, r.note].join(" ").toLowerCase().includes(w)));
    table.replaceChildren();
    const head = add(add(table, "thead"), "tr"), body = add(table, "tbody");
    add(head, "th"); add(head, "th");
    model.get("heads").forEach((name, i) => {
      const th = add(head, "th"), button = add(th, "button", name + (i === by ? (up > 0 ? " ↑" : " ↓") : ""));
      if (i === by) th.ariaSort = up > 0 ? "ascending" : "descending";
      button.onclick = () => { up = i === by ? -up : 1; by = i; draw(); };
      if (!i) { add(head, "th", "tags"); add(head, "th", "note"); }
    });
    for (const row of rows.sort(compared)) {
      const tr = add(body, "tr"), tick = add(add(tr, "td"), "input"), place = add(tr, "td");
      tick.type = "checkbox";
      tick.checked = chosen.includes(row.run);
      tick.setAttribute("aria-label", `choose ${row.run}`);
      tick.onchange = () => {
        const others = model.get("chosen").filter((name) => name !== row.run);
        model.set("chosen", tick.checked ? [...others, row.run] : others);
        model.save_changes();
      };
      place.innerHTML = row.thumbnail;  // made and escaped by the kernel
      const [name, ...rest] = row.cells;
      add(tr, "td", name);
      for (const key of ["tags", "note"]) {
        const field = add(add(tr, "td"), "input");
        field.value = row[key];
        field.setAttribute("aria-label", `${key} of ${row.run}`);
        field.onchange = () => { row[key] = field.value; model.send({ run: row.run, tags: row.tags, note: row.note }); };
      }
      for (const cell of rest) add(tr, "td", typeof cell === "number" ? short(cell) : cell);
    }
  }
  filter.oninput = draw;
  model.on("change:rows", draw);
  draw();
  return () => model.off("change:rows", draw);
}
export default { render };
