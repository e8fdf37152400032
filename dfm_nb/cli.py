"""`dfm ...`: thin; each verb is a driver module with `main(argv)`, imported only when asked for.

`VERBS` are the core's. Other rooms and packages add theirs by an entry point that names such a table:

    [project.entry-points."dfm_nb.verbs"]
    workbench = "workbench:VERBS"
"""

import functools
import gc
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from dfm_nb.base.argv import TOLD, guard, meant, mistake, usage
from dfm_nb.base.installed import entry_points

GROUP = "dfm_nb.verbs"
VERBS: dict[str, tuple[str, str]] = {
    # verb: (module with `main`, one line of help)
    "prepare": ("dfm_nb.prepare", "captioned images and clips -> WebDataset shards"),
    "inspect": ("dfm_nb.inspect", "show and check a shard folder: table, checks, contact sheet"),
    "adopt": ("dfm_nb.adopt", "third-party shards -> a complete data set; the tars are not changed"),
    "pretrain": ("dfm_nb.train", "train a DiT on shards"),
    "generate": ("dfm_nb.generate", "prompts -> mp4"),
    "export": ("dfm_nb.export", "consolidated weights from a run or checkpoint"),
    "import": ("dfm_nb.import_", "weights of Wan 2.1 or NeMo DFM's DiT -> a file as dfm export writes"),
    "doctor": ("dfm_nb.doctor", "check this machine: what it has and what is missing"),
}


@functools.cache
def own_verbs() -> dict[str, tuple[str, str]]:
    """`VERBS` and those of this package's other rooms."""
    verbs = dict(VERBS)
    for point in entry_points(GROUP):
        if point.dist is None:
            verbs |= point.load()
    return verbs


def verbs() -> dict[str, tuple[str, str]]:
    """All verbs; a checkout that is not installed has the other packages' in its pyproject.toml."""
    import tomllib
    from importlib.metadata import EntryPoint

    own = own_verbs()
    project = Path(__file__).parents[1] / "pyproject.toml"
    others = [point for point in entry_points(GROUP) if point.dist]
    if not others and project.is_file():
        named = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
        others = [EntryPoint(name, value, GROUP) for name, value in named.items()]
    verbs = dict(own)
    for point in others:
        verbs |= point.load()
    return verbs | own  # no package replaces one of ours


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "--json" in argv and not {"-h", "--help"} & set(argv):
        return _in_json(argv)
    return _run(argv)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage("dfm VERB", verbs()))
        return 0
    if argv[0] == "--version":
        from dfm_nb.base.version import __version__

        print(__version__)
        return 0
    known = own_verbs()
    if argv[0] not in known:
        known = verbs()
    if argv[0] not in known:
        raise ValueError(f"there is no verb {argv[0]!r}; {meant(argv[0], known, 'see dfm --help')}")
    return _imported(known[argv[0]][0]).main(list(argv[1:]))


def _in_json(argv: list[str]) -> int:
    """Print one object: the verb's answer or its error, and `exit_code`.

    File descriptor 1 leads to stderr meanwhile, because libraries and started processes print to it.
    """
    sys.stdout.flush()
    answer: dict = {"exit_code": 130}
    out = os.dup(1)
    with tempfile.NamedTemporaryFile() as told:
        os.dup2(2, 1)
        os.environ[TOLD] = told.name
        try:
            code = _run(argv)
            answer = json.loads(Path(told.name).read_bytes() or "{}") | {"exit_code": code}
            return code
        except Exception as error:
            text = mistake(error)
            answer = {"exit_code": 1 if text is None else 2, "error": text or f"{type(error).__name__}: {error}"}
            raise
        finally:
            del os.environ[TOLD]
            sys.stdout.flush()
            os.dup2(out, 1)
            os.close(out)
            print(json.dumps(answer), flush=True)


def _imported(module: str) -> ModuleType:
    """A verb's, without a search for garbage on the way: what torch makes stays, and each search costs up to 0.1 s."""
    if module not in sys.modules:
        gc.disable()
        importlib.import_module(module)
        gc.freeze()
        gc.enable()
    return sys.modules[module]


def entry() -> None:
    if {*sys.argv[1:2]} & own_verbs().keys():  # for what they start; the workbench's verbs start kernels
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    raise SystemExit(guard(main))
