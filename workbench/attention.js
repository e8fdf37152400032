// The sentence is shown where it stands, and in the page's title. A button that is pressed and disabled gives the keyboard's
// focus to the next one that works.
function render({ model, el }) {
  let title = null, focused = null;
  el.classList.add("dfm-attention");
  el.style.cssText = "font-weight:600;line-height:1.6";
  function show() {
    const text = model.get("text");
    el.textContent = text;
    if (text && title === null) title = document.title;
    if (title !== null) document.title = text ? `▶ ${text}` : title;
    if (!text) title = null;
  }
  const watcher = new MutationObserver(() => {
    const here = document.activeElement;
    if (focused && focused.disabled && (here === document.body || here === focused))
      focused.closest(".dfm-launcher")?.querySelector("button:enabled")?.focus();
  });
  setTimeout(() => {  // until it is part of the page
    const panel = el.closest(".dfm-launcher");
    panel?.addEventListener("focusin", (event) => { focused = event.target; });
    if (panel) watcher.observe(panel, { subtree: true, attributeFilter: ["disabled"] });
  });
  model.on("change:text", show);
  show();
  return () => { watcher.disconnect(); model.off("change:text", show); };
}
export default { render };
