// A plain key belongs to the control of an output that has the focus: in JupyterLab "x" on a button or link would cut its cell.
window.dfmKeys ??= ({ target, ctrlKey, metaKey, altKey }) => {
  if (target.closest?.(".jp-OutputArea-output")) target.toggleAttribute("data-lm-suppress-shortcuts", !(ctrlKey || metaKey || altKey));
};
window.addEventListener("keydown", window.dfmKeys, true);  // the page of a copy may run twice: one function, one listener
