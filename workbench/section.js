// A heading that opens and closes the part below it: a button, so that the keyboard reaches it.
function render({ model, el }) {
  const button = document.createElement("button");
  button.type = "button";
  button.style.cssText = "display:block;width:100%;text-align:left;padding:6px 8px;margin:2px 0;cursor:pointer;font:inherit;" +
    "font-weight:600;color:inherit;background:var(--jp-layout-color2, #8882);border:1px solid var(--jp-border-color2, #8888)";
  function show() {
    const opened = model.get("display") !== "none";
    button.textContent = `${opened ? "▾" : "▸"} ${model.get("title")}`;
    button.setAttribute("aria-expanded", String(opened));
  }
  button.onclick = () => {
    model.set("display", model.get("display") === "none" ? "" : "none");
    model.save_changes();
  };
  for (const name of ["title", "display"]) model.on(`change:${name}`, show);
  el.append(button);
  show();
  return () => { for (const name of ["title", "display"]) model.off(`change:${name}`, show); };
}
export default { render };
