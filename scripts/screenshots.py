"""Screenshots of the workbench for the docs: JupyterLab in headless Chromium with the output of `make demo`.

    python scripts/screenshots.py [--demo runs/demo] [--other RUN] [--output docs/images] [--only studio form]

It writes workbench_NAME.png, of at most 100 kB, for each part of the workbench in about two minutes, and needs Chromium
and playwright.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CELLS = {
    "monitor": """
from workbench import Monitor

Monitor("demo/train").show()
""",
    "runs": """
from workbench import Monitor, Runs

display(Runs("two"))
Monitor("two")
""",
    "gallery": """
from dfm_nb import Pipeline
from workbench import Gallery

pipe = Pipeline.from_pretrained("butterflies")
prompts = [
    "A plain orange monarch flapping its wings in the sky.",
    "A plain yellow swallowtail flapping its wings over sand.",
]
Gallery({f"guidance {g}": pipe(prompts, guidance=g, num_video_frames=9, seed=3) for g in (1, 2, 4)})
""",
    "data": """
from workbench import DatasetBrowser

DatasetBrowser("demo/data")
""",
    "studio": """
from workbench import Studio

studio = Studio("butterflies", num_video_frames=9)
for prompt in ("A yellow swallowtail over sand.", "A spotted orange monarch over a meadow, wings wide open."):
    studio.draw(prompt, seed=1)
studio
""",
    "form": """
from workbench import ConfigForm

ConfigForm(["train.train_iters", "model.size", "optimizer.lr"], {"optimizer.lr": -1, "train.train_iters": 700},
           recipe="demo", run_dir="runs/first")
""",
}
ERROR = '[data-mime-type="application/vnd.jupyter.error"]'
SHOWN = {
    "monitor": ".dfm-monitor .dfm-plot path",
    "runs": ".dfm-monitor .dfm-plot path",
    "gallery": "video",
    "data": ".dfm-browser [role=status]",
    "studio": ".dfm-studio video",
    "form": ".dfm-form",
}


def take(names: list[str], project: Path, private: Path, output: Path) -> None:
    from playwright.sync_api import sync_playwright

    from dfm_nb.base.video import read_image
    from dfm_nb.display import small_png
    from tests.browser.lab_page import FLAGS, LabServer, NotebookPage, find_browser, write_notebook

    browser = find_browser()
    if browser is None:
        raise SystemExit("error: Chromium was not found; install Debian's package chromium")
    for name in names:
        write_notebook(project / f"{name}.ipynb", CELLS[name])
    with LabServer(project, private) as server, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, headless=True, args=FLAGS)
        for name in names:
            page = chromium.new_page(viewport={"width": 1180, "height": 900})
            notebook = NotebookPage(page, server, f"{name}.ipynb")
            notebook.hide_sides()
            notebook.run_cell(0)
            notebook.cell(0).locator(f"{SHOWN[name]}, {ERROR}").first.wait_for(timeout=300_000)
            notebook.wait_idle(300)
            page.wait_for_timeout(2000)  # until images and videos are decoded
            if errors := notebook.errors():
                raise SystemExit(errors[0])
            (output / f"workbench_{name}.png").write_bytes(small_png(read_image(page.screenshot())[0]))
            print(output / f"workbench_{name}.png")
            page.close()
        chromium.close()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--demo", type=Path, default=Path("runs/demo"))
    p.add_argument("--other", type=Path, default=Path("runs/demo/train"), help="a second run, for the picture of two")
    p.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    p.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS), metavar="NAME")
    args = p.parse_args()
    if not (args.demo / "train").is_dir():
        p.error(f"{args.demo} has no finished demo; run `make demo` first")
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "butterflies"
        project.mkdir()
        (project / "demo").symlink_to(args.demo.resolve())
        for name, run in (("demo", args.demo / "train"), ("other", args.other)):
            shutil.copytree(run, project / "two" / name)  # a link would show its target's path
        args.output.mkdir(parents=True, exist_ok=True)
        take(args.only, project, Path(folder) / "private", args.output)


if __name__ == "__main__":
    main()
