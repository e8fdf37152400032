"""One notebook, run from its first cell to its last without a front end, on papermill.

The cell tagged `parameters` holds lines `name: type = default  # help`. Unknown names and values of another type are
refused before a kernel starts. The source notebook is not touched.
"""

import contextlib
import inspect
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from dfm_nb import config as cfg
from dfm_nb.base.argv import meant
from dfm_nb.base.files import MARK, check_free, naming, write_atomically
from dfm_nb.base.options import must
from dfm_nb.config import notation
from workbench.place import RESULT_TYPE, add_to_jupyter

SHOWN = "text/html text/markdown image/svg+xml image/png image/jpeg text/latex text/plain".split()
"""Of several forms of an output a page has the first of these, and of none of them nothing."""
_NO_SCRIPT = "data:text/javascript,"
"""Replaces require.js and MathJax, which nbconvert's page fetches; ours has no formulas and no live widgets."""
KINDS = {kind.__name__: kind for kind in (int, float, bool, str, list, dict)}
"""The types that a parameter may have."""
_OR_NONE = re.compile(r"""^(\w+\s*:\s*["']?)([^=#|]+?)\s*\|\s*None(["']?\s*)=""", re.M)


def as_type(name: str, kind: Any, value: Any, strict: bool = False) -> Any:
    """A parameter's value in its type; ValueError if it does not fit. strict : text is not accepted as a number."""
    try:
        return TypeAdapter(kind).validate_python(value, strict=strict)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"parameter {name!r} {must(fault['msg'])}; got {fault['input']!r}") from None


@dataclass(frozen=True)
class Parameter:
    """One line of a notebook's parameters cell: `name: type = default  # help`."""

    name: str
    type: str
    default: str
    help: str

    @property
    def kind(self) -> Any:
        """The type, without entries and None; that of the default if none is given."""
        name = self.type.removeprefix("Optional[").rstrip("]").partition("[")[0]
        return KINDS.get(name, str if self.default[:1] in ("'", '"') else None)

    def read(self, text: str) -> Any:
        """A command-line value converted to this type; ValueError if it does not fit."""
        if self.type.startswith("Optional[") and text in ("None", "null"):
            return None
        value: Any = text
        if self.kind is not str:
            with contextlib.suppress(ValueError):  # then it is text
                value = notation.read(text)
        return as_type(self.name, self.kind, value) if self.kind else value


@dataclass
class Outcome:
    """How a run ended: `error` is "" when every cell ran; `results` is what the notebook published."""

    report: Path | None
    error: str
    results: dict[str, Any]


def parameters(notebook: str | Path) -> dict[str, Parameter]:
    """The parameters of a notebook, by name.

    Raises
    ------
    FileNotFoundError, ValueError : no such file, or not a notebook, or papermill is not installed.
    """
    path = existing(notebook)
    try:
        import papermill
    except ImportError:
        raise ValueError("papermill is not installed; pip install 'dfm_nb[notebook]'") from None
    with _errors_of_libraries(path):
        read = papermill.iorw.load_notebook_node(str(path))
        unknown = {cell.cell_type for cell in read.cells} - {"code", "markdown", "raw"}
        if unknown:  # it would not be run
            raise ValueError(f"a cell must be code, markdown or raw; one is {min(unknown)!r}")
        tagged = [cell for cell in read.cells if "parameters" in cell.metadata.tags]
        if len(tagged) > 1:  # values are set after the first one, and the second sets its own again
            raise ValueError(f"one cell must be tagged parameters, {len(tagged)} are; remove the tag from the others")
        for cell in tagged:  # papermill knows no `|`
            cell.source = _OR_NONE.sub(r"\1Optional[\2]\3=", cell.source)
        listed = papermill.inspect_notebook(read)
    return {name: Parameter(name, p["inferred_type_name"], p["default"], p["help"]) for name, p in listed.items()}


@contextlib.contextmanager
def _errors_of_libraries(notebook: Path) -> Iterator[None]:
    """Make what papermill, nbformat and Jupyter raise for a notebook or its kernel a ValueError."""
    import nbformat
    from jupyter_client.kernelspec import NoSuchKernel
    from papermill.exceptions import PapermillException, PapermillExecutionError

    wrong = (ValueError, KeyError, AttributeError, TypeError, RecursionError)
    foreign = (*wrong, PapermillException, nbformat.ValidationError)
    try:
        yield
    except PapermillExecutionError:  # a cell's own error
        raise
    except NoSuchKernel as error:
        fix = "choose one of `jupyter kernelspec list` in JupyterLab and save"
        raise ValueError(f"{notebook}: there is no kernel {error.name!r} on this machine; {fix}") from None
    except foreign as error:
        why = first_fault(str(error)) or type(error).__name__
        fix = "open it in JupyterLab, choose a kernel and save"
        raise ValueError(f"{notebook} is not a notebook that can be run ({why}); {fix}") from None


def _literal(path: Path) -> str:
    """A path for papermill, which replaces `{name}` in paths."""
    return str(path).replace("{", "{{").replace("}", "}}")


def check_parameters(
    settings: Mapping[str, Any] | None = None,
    *,
    recipe: str = "demo",
    num_processes: int = 1,
    prepare: Mapping[str, Any] | None = None,
    generate: Mapping[str, Any] | None = None,
) -> None:
    """Check the parameters of the calling notebook: their annotated types, and the settings that use them.

    Parameters
    ----------
    settings : {group.key: value} of a training with this recipe on `num_processes`.
    prepare : {flag: value} of `dfm prepare`. generate : {flag: value} of `dfm generate`.

    Raises
    ------
    ValueError : the first error.

    >>> check_parameters({"train.train_iters": 300})      # doctest: +SKIP
    """
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    space = frame.f_back.f_globals
    for name, kind in space.get("__annotations__", {}).items():
        with contextlib.suppress(PydanticUserError, NameError):  # a variable of another type, in a later cell
            as_type(name, kind, space[name], strict=True)
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1; got {num_processes}")
    overrides = [f"{key}={notation.write_value(value)}" for key, value in (settings or {}).items()]
    cfg.resolve(recipe, overrides=overrides, world_size=num_processes)
    if prepare is not None:
        from workbench.form import PrepareForm

        PrepareForm("-", prepare).check()
    if generate is not None:
        from dfm_nb.generation.request import Request

        Request("", **generate).check()


def existing(notebook: str | Path) -> Path:
    """The path of an existing notebook."""
    path = Path(notebook).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no notebook {path}")
    return path


def convert(given: Mapping[str, str], known: Mapping[str, Parameter], notebook: str | Path = "the notebook") -> dict:
    """Text values converted to the types of the notebook's parameters.

    Raises
    ------
    ValueError : a name that is not a parameter (with the closest one), or a value of another type.
    """
    for name in given:
        if name not in known:
            hint = meant(name, known, f"it has {', '.join(known) or 'no cell tagged parameters'}", 0.5)
            raise ValueError(f"{notebook} has no parameter {name!r}; {hint}")
    return {name: known[name].read(text) for name, text in given.items()}


def execute(
    notebook: str | Path,
    output: str | Path,
    values: Mapping[str, Any],
    *,
    progress: bool = True,
    report: bool = True,
    cwd: str | Path | None = None,
    overwrite: bool = False,
) -> Outcome:
    """Run a notebook; the executed copy is kept even if a cell fails.

    Parameters
    ----------
    values : typed parameters, as from `convert`. progress : print which cell runs, and its output.
    cwd : the kernel's working directory; default: this process's.

    Raises
    ------
    FileExistsError : the copy's name or its page's is taken by a file that no run wrote, without `overwrite`.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    source = existing(notebook)
    target = Path(output).expanduser()
    if target.suffix != ".ipynb" or target.resolve() == source.resolve():
        raise ValueError(f"--output must be another notebook, OUT.ipynb; got {target}")
    recorded = f'"output_path": {json.dumps(str(target), ensure_ascii=False)}'  # by papermill
    check_free(target, overwrite, mark=recorded)
    if report:
        check_free(target.with_suffix(".html"), overwrite, mark=MARK)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():  # papermill would write through it
        target.unlink()
    log = logging.getLogger("papermill")
    error = ""
    if progress:  # it prints which cell it executes and the cell's output
        log.handlers = [logging.StreamHandler(sys.stdout)]
        log.setLevel(logging.INFO)
    add_to_jupyter("JUPYTER_PATH")
    try:
        # Sockets in a folder: TCP ports are chosen before the kernel binds them, and another process may take one.
        with tempfile.TemporaryDirectory(prefix="dfm_nb-", ignore_cleanup_errors=True) as sockets:
            own = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
            started = {"progress_bar": False, "log_output": progress, "cwd": cwd, "config": own}
            with naming(target), _errors_of_libraries(source):
                papermill.execute_notebook(_literal(source), _literal(target), dict(values), **started)
    except PapermillExecutionError as failed:
        error = f"{failed.ename}: {first_fault(failed.evalue)} (In [{failed.exec_count}])"
    except RuntimeError as failed:  # of nbclient and jupyter_client: the kernel ended
        error = f"{first_fault(str(failed))}{_running(target)}; often the machine ran out of memory"
    page = None
    if report and target.exists():
        try:
            page = write_report(target, source.parent)
        except Exception as failed:  # nbconvert's own: the executed notebook is there
            print(f"no report: {failed}", file=sys.stderr, flush=True)
    return Outcome(page, error, published(target))


def _running(notebook: Path) -> str:
    """Which cell of a notebook ran when its kernel ended."""
    code = [cell for cell in _cells(notebook) if cell["cell_type"] == "code"]
    last = 0
    for number, cell in enumerate(code, 1):
        if cell["metadata"].get("papermill", {}).get("start_time"):
            last = number
    return f" in code cell {last} of {len(code)}" if last else ""


def _cells(notebook: Path) -> list[dict[str, Any]]:
    """The cells of an executed notebook; [] if there is none."""
    return json.loads(notebook.read_text())["cells"] if notebook.exists() else []


def write_report(notebook: str | Path, pictures: Path | None = None) -> Path:
    """`NAME.html` next to `NAME.ipynb`, without live widgets, which would need a downloaded script.

    pictures : where the paths of pictures in the text start; default: the notebook's folder.
    """
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    path = Path(notebook)
    executed = nbformat.read(path, as_version=4)
    executed.metadata.pop("widgets", None)
    own = Config({"CoalesceStreamsPreprocessor": {"enabled": True}})  # one line of a redrawn bar
    own.NbConvertBase.display_data_priority = SHOWN
    exporter = HTMLExporter(config=own, embed_images=True, require_js_url=_NO_SCRIPT, mathjax_url=_NO_SCRIPT)
    about = {"name": path.stem, "path": str(pictures or path.parent)}
    body, _ = exporter.from_notebook_node(executed, {"metadata": about})
    page = path.with_suffix(".html")
    write_atomically(page, (body + MARK).encode())
    return page


def first_fault(message: str) -> str:
    """One line of an exception's message: its last, or, if that starts a list, the list's first entry.

    >>> first_fault("log\\n2 faults in the configuration\\n  train_iters must be 1\\n  lr must be positive")
    'train_iters must be 1 (2 faults in the configuration)'
    """
    heading = entry = ""  # the last line that is not indented, and the first one below it
    for line in filter(str.strip, message.splitlines()):
        if not heading or not line.startswith("  "):
            heading = line.strip()
            entry = ""
        elif not entry:
            entry = line.strip()
    return f"{entry} ({heading})" if entry else heading


def published(notebook: str | Path) -> dict[str, Any]:
    """What an executed notebook published with `workbench.publish`; later values win."""
    results: dict[str, Any] = {}
    for cell in _cells(Path(notebook)):
        for output in cell.get("outputs", []):
            results |= output.get("data", {}).get(RESULT_TYPE, {})
    return results
