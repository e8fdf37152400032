"""`dfm ...`: thin; each verb is a driver module with `main(argv)`, imported only when asked for.

Other packages add verbs, as the workbench does, by an entry point that names a table like `VERBS`:

    [project.entry-points."dfm_nb.verbs"]
    workbench = "workbench:VERBS"
"""

import gc
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from dfm_nb.base.argv import TOLD, guard, mistake, usage
from dfm_nb.base.installed import entry_points

Verbs = dict[str, tuple[str, str]]
"""verb: (module with `main`, one line of help)"""
VERBS: Verbs = {
    "prepare": ("dfm_nb.prepare", "captioned images and clips -> WebDataset shards"),
    "inspect": ("dfm_nb.inspect", "show and check a shard folder: table, checks, contact sheet"),
    "adopt": ("dfm_nb.adopt", "third-party shards -> a complete data set; the tars are not changed"),
    "index": ("dfm_nb.index", "the index with which training opens shards; prepare and adopt write it"),
    "pretrain": ("dfm_nb.train", "train a DiT on shards"),
    "sweep": ("dfm_nb.sweep_", "train every combination of settings, and compare them"),
    "generate": ("dfm_nb.generate", "prompts -> mp4"),
    "evaluate": ("dfm_nb.evaluate", "measure a checkpoint against its captions"),
    "export": ("dfm_nb.export", "consolidated weights from a run or checkpoint"),
    "import": ("dfm_nb.import_", "weights of Wan 2.1 or NeMo DFM's DiT -> a file as dfm export writes"),
    "text": ("dfm_nb.text.commands", "JSONL -> Megatron .bin/.idx: preprocess, inspect, verify, merge"),
    "plan": ("dfm_nb.plan", "layouts that fit a model on some GPUs, with memory and relative time"),
    "doctor": ("dfm_nb.doctor", "check this machine: what it has and what is missing"),
}


def verbs() -> Verbs:
    """`VERBS` and the verbs of other packages; a checkout that is not installed has them in its pyproject.toml."""
    import tomllib
    from importlib.metadata import EntryPoint

    group = "dfm_nb.verbs"
    project = Path(__file__).parents[1] / "pyproject.toml"
    points = entry_points(group)
    if not points and project.is_file():
        listed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"][group]
        points = [EntryPoint(name, value, group) for name, value in listed.items()]
    table = dict(VERBS)
    for point in points:
        table |= point.load()
    return table | VERBS  # no package replaces one of ours


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
    known = VERBS if argv[0] in VERBS else verbs()
    if argv[0] not in known:
        from dfm_nb.base.nearest import meant

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
            print(json.dumps(answer, ensure_ascii=False), flush=True)


def _imported(module: str) -> ModuleType:
    """A verb's, without a search for garbage on the way: what torch makes stays, and each search costs up to 0.1 s."""
    if module not in sys.modules:
        gc.disable()
        importlib.import_module(module)
        gc.freeze()
        gc.enable()
    return sys.modules[module]


def entry() -> None:
    if sys.argv[1:2] and sys.argv[1] in VERBS:  # for what they start; the workbench's verbs start kernels
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    raise SystemExit(guard(main))
