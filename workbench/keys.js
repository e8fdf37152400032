// A plain key belongs to the control that has the focus: in JupyterLab "x" on a button would cut the button's cell.
window.dfmKeys ??= ({ target, ctrlKey, metaKey, altKey }) => {
  if (target.closest?.(".dfm-live")) target.toggleAttribute("data-lm-suppress-shortcuts", !(ctrlKey || metaKey || altKey));
};
window.addEventListener("keydown", window.dfmKeys, true);  // the page of a copy may run twice: one function, one listener
