function render({ model, el }) {
  const label = document.createElement("label"), name = document.createElement("span");
  const range = document.createElement("input"), shown = document.createElement("output");
  el.classList.add("dfm-slider");
  range.type = "range";
  shown.ariaHidden = "true";  // the range input announces its value itself
  name.textContent = model.get("label");
  function fill() {
    for (const key of ["min", "max", "step", "value"]) range[key] = model.get(key);
    shown.textContent = model.get("value");
  }
  range.addEventListener("input", () => { model.set("value", Number(range.value)); model.save_changes(); });
  for (const key of ["min", "max", "value"]) model.on("change:" + key, fill);
  label.append(name, range, shown);
  el.append(label);
  fill();
}
export default { render };
