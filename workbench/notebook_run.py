"""One notebook, run from its first cell to its last without a front end, on papermill.

The cell tagged `parameters` holds lines `name: type = default  # help`. Unknown names and values of another type are
refused before a kernel starts. The source notebook is not touched.
"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dfm_nb.base.nearest import nearest
from workbench.parameters import WORDS
from workbench.place import RESULT_TYPE, kernel_encryption

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Parameter:
    """One line of a notebook's parameters cell: `name: type = default  # help`."""

    name: str
    type: str
    default: str
    help: str

    @property
    def plain(self) -> str:
        """The default as a command line has it: a text without its quotes."""
        return str(ast.literal_eval(self.default)) if self.type == "str" else self.default


@dataclass
class Outcome:
    """How a run ended: `error` is "" when every cell ran; `results` is what the notebook published."""

    output: Path
    report: Path | None
    duration_s: float
    error: str = ""
    results: dict[str, Any] = field(default_factory=dict)


def parameters(notebook: str | Path) -> dict[str, Parameter]:
    """The parameters of a notebook, by name.

    Raises
    ------
    FileNotFoundError, ValueError : no such file, or not a notebook.
    """
    import papermill

    path = existing(notebook)
    try:
        found = papermill.inspect_notebook(str(path))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a notebook that can be read ({error})") from None
    return {
        name: Parameter(name, _type_of(p["inferred_type_name"], p["default"]), p["default"], p["help"])
        for name, p in found.items()
    }


def existing(notebook: str | Path) -> Path:
    """The path; FileNotFoundError names the notebooks that are there instead."""
    path = Path(notebook).expanduser()
    if path.is_file():
        return path
    beside = sorted(p.name for p in path.parent.glob("*.ipynb")) if path.parent.is_dir() else []
    near = nearest(path.name, beside, 0.4)
    hint = f"; did you mean {path.parent / near}?" if near else f"; {path.parent} has {', '.join(beside) or 'none'}"
    raise FileNotFoundError(f"there is no notebook {path}{hint}")


def _type_of(annotation: str, default: str) -> str:
    base = annotation.partition("[")[0].strip()
    if base in WORDS:
        return base
    try:
        value = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return "any"
    return type(value).__name__ if type(value).__name__ in WORDS else "any"


def convert(given: Mapping[str, str], known: Mapping[str, Parameter], notebook: str | Path = "the notebook") -> dict:
    """Text values as the types that the notebook's parameters have.

    Raises
    ------
    ValueError : a name that is not a parameter (with the nearest one), or a value of another type.
    """
    return {name: _converted(_known(name, known, notebook), text) for name, text in given.items()}


def _known(name: str, known: Mapping[str, Parameter], notebook: str | Path) -> Parameter:
    if name in known:
        return known[name]
    if not known:
        raise ValueError(f"{notebook} has no parameter {name!r}: no cell is tagged parameters")
    near = nearest(name, known, 0.5)
    hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known)}"
    raise ValueError(f"{notebook} has no parameter {name!r}; {hint}")


def _converted(p: Parameter, text: str) -> Any:
    wrong = (
        f"parameter {p.name!r} must be {WORDS.get(p.type, 'a Python value')}; got {text!r}; its default is {p.default}"
    )
    if p.type == "str":
        return text
    if p.type == "bool":
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(wrong)
        return text.lower() in _TRUE
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if p.type == "any":
            return text
        raise ValueError(wrong) from None
    if p.type == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if p.type == "int" and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e3 is how people write a thousand
    if p.type == "list" and isinstance(value, tuple):
        value = list(value)
    if p.type != "any" and type(value).__name__ != p.type:
        raise ValueError(wrong)
    return value


def execute(
    notebook: str | Path,
    output: str | Path,
    values: Mapping[str, Any],
    *,
    progress: bool = True,
    report: bool = True,
    cwd: str | Path | None = None,
) -> Outcome:
    """Run a notebook; the executed copy is kept whether or not a cell fails.

    Parameters
    ----------
    values : typed parameters, as `convert` gives them. progress : print each cell's title and what it prints.
    cwd : the kernel's working directory; default: this process's.
    """
    import papermill
    from papermill.exceptions import PapermillException, PapermillExecutionError
    from traitlets.config import Config

    from workbench.notebook_report import Narrator, write_report

    source, target = existing(notebook), Path(output).expanduser()
    if target.resolve() == source.resolve():
        raise ValueError(f"--output must not be the notebook itself; got {target}")
    if target.suffix != ".ipynb":
        raise ValueError(f"--output must end in .ipynb; got {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    started, error = time.monotonic(), ""
    config = Config({"KernelManager": {"transport_encryption": kernel_encryption()}})
    with Narrator(source, bool(values), progress) as narrator:
        try:
            papermill.execute_notebook(
                str(source),
                str(target),
                dict(values),
                progress_bar=False,
                log_output=progress,
                cwd=cwd,
                autosave_cell_every=30,
                config=config,
            )
        except PapermillExecutionError as failed:
            error = f"{failed.ename}: {first_fault(failed.evalue)} ({narrator.place(failed.cell_index + 1)})"
        except PapermillException as failed:
            error = str(failed) or type(failed).__name__
    done = Outcome(target, None, time.monotonic() - started, error, published(target))
    done.report = write_report(target) if report and target.exists() else None
    return done


def first_fault(message: str) -> str:
    """One line of an exception's message: its last, or, where a list hangs below that, the first entry.

    >>> first_fault("log\\n2 faults in the configuration\\n  train_iters must be 1\\n  lr must be positive")
    'train_iters must be 1 (2 faults in the configuration)'
    """
    lines = [line for line in message.splitlines() if line.strip()] or [""]
    at = max((i for i, line in enumerate(lines) if not line.startswith("  ")), default=0)
    return f"{lines[at + 1].strip()} ({lines[at].strip()})" if lines[at + 1 :] else lines[at].strip()


def published(notebook: str | Path) -> dict[str, Any]:
    """What an executed notebook published with `workbench.publish`; later values win."""
    path = Path(notebook)
    if not path.exists():
        return {}
    out: dict[str, Any] = {}
    for cell in json.loads(path.read_text()).get("cells", []):
        for shown in cell.get("outputs", []):
            out |= shown.get("data", {}).get(RESULT_TYPE, {})
    return out


def summary(known: Sequence[Parameter]) -> str:
    """A table of parameters for `--help-parameters`."""
    width = max((len(p.name) for p in known), default=0)
    return "\n".join(f"  {p.name:<{width}}  {p.type:<5}  {p.default:<24}  {p.help}" for p in known)
