// Run All as a film. JupyterLab stands at the last cell meanwhile; so, until the reader's first key, click or scroll, this
// brings into view each new picture (or error) for some seconds, else the launcher that waits or trains, else the newest
// output, and at the end the last picture. A cell that runs or waits for its turn has the prompt [*].
{
  const PICTURE = 'video, canvas, img:not(table img, .dfm-monitor img), [data-mime-type="application/vnd.jupyter.error"]';
  const BUSY = ".dfm-attention:not(:empty), .mod-warning:enabled";  // it asks, or Stop works
  const page = document.currentScript.closest(".jp-Notebook"), waiting = new Set(), done = new Set(), seen = new Set();
  const has = (cell, what) => [...cell.querySelectorAll(what)].some((one) => one.checkVisibility());  // a copy is hidden
  let shown = null, until = 0;

  function next() {
    const pictured = [...done].filter((cell) => has(cell, PICTURE)), fresh = pictured.find((cell) => !seen.has(cell));
    if (fresh) {
      seen.add(fresh);
      until = Date.now() + 3000;
    }
    const launcher = !fresh && [...page.querySelectorAll(".dfm-launcher")].find((one) => has(one, BUSY));
    const newest = waiting.size ? [...done].findLast((cell) => has(cell, ".jp-OutputArea-output")) : pictured.at(-1);
    return launcher || (fresh || newest)?.querySelector(".jp-Cell-outputArea");
  }

  function look() {
    for (const cell of page.querySelectorAll(".jp-CodeCell")) {
      const prompt = cell.querySelector(".jp-InputPrompt")?.textContent;  // far cells may be empty, by a setting of JupyterLab
      if (prompt?.includes("*")) waiting.add(cell);
      else if (prompt && waiting.delete(cell)) done.add(cell);
    }
    if (Date.now() > until) shown = next() || shown;
    if (!shown) return;
    const long = shown.matches(".dfm-launcher") || shown.offsetHeight > 0.8 * page.clientHeight;
    shown.style.scrollMarginTop = "7em";  // below the last lines of its cell
    shown.scrollIntoView({ block: long ? "start" : "center" });
  }

  const looks = page && setInterval(() => (page.isConnected ? look() : end()), 500);
  function end() { clearInterval(looks); }
  for (const what of ["keydown", "pointerdown", "touchmove", "wheel"]) window.addEventListener(what, end, { capture: true, once: true });
}
