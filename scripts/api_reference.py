"""`make docs`: the API reference from the docstrings, with pdoc.

Every public module of `dfm_nb` and `workbench` is rendered to static HTML with a search index. Warnings of pdoc are
errors.
"""

import pkgutil
import warnings
from pathlib import Path

import dfm_nb
import workbench

PACKAGES = (dfm_nb, workbench)
FOLDER = Path(__file__).parents[1] / "build/docs/api"
ENTRY_POINTS = ("__main__", "supervisor")  # run as files, without an API


def all_modules() -> list[str]:
    """Names of all modules, packages first."""
    found = []
    for package in PACKAGES:
        inside = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        found += [package.__name__, *(module.name for module in inside)]
    return found


def is_public(name: str) -> bool:
    """Whether no part of the name begins with an underscore, and the module is not only a script."""
    parts = name.split(".")
    return not any(p.startswith("_") for p in parts) and parts[-1] not in ENTRY_POINTS


def main() -> None:
    import pdoc

    pdoc.render.configure(docformat="numpy", footer_text=f"dfm_nb {dfm_nb.__version__}", show_source=False)
    names = all_modules()
    hidden = ["!" + name.replace(".", r"\.") + "$" for name in names if not is_public(name)]
    for package in PACKAGES:  # their names are loaded on first use
        vars(package).update({name: getattr(package, name) for name in package.__all__})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="pdoc")
        # pdoc reads a package's modules from its __all__ if there is one; these two list functions and classes
        top = [name for name in names if name.count(".") < 2 and is_public(name)]
        pdoc.pdoc(*top, *hidden, output_directory=FOLDER)
    print(f"{len(names) - len(hidden)} modules: {FOLDER / 'index.html'}")


if __name__ == "__main__":
    main()
