"""`dfm ...`: thin; each verb is a driver module with `main(argv)`, imported only when asked for.

Other packages add verbs, as the workbench does, by an entry point that names a table like `VERBS`:

    [project.entry-points."dfm_nb.verbs"]
    workbench = "workbench:VERBS"
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from dfm_nb.base.argv import TOLD, guard, mistake, pop_nproc, usage
from dfm_nb.base.installed import entry_points
from dfm_nb.base.torchrun import run_under_torchrun

VERBS: dict[str, tuple[str, str]] = {
    # verb: (module with `main`, one line of help)
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
UNDER_TORCHRUN = {"prepare", "pretrain", "generate", "evaluate"}
PREFLIGHT = {"prepare", "pretrain"}
"""Verbs whose module has `preflight(argv, nproc)`, cheap enough to run before the processes start."""


def verbs() -> dict[str, tuple[str, str]]:
    """`VERBS` and the verbs of other packages; a checkout that is not installed has them in its pyproject.toml."""
    import tomllib
    from importlib.metadata import EntryPoint

    group, project = "dfm_nb.verbs", Path(__file__).parents[1] / "pyproject.toml"
    points = entry_points(group)
    if not points and project.is_file():
        named = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"][group]
        points = [EntryPoint(name, value, group) for name, value in named.items()]
    others = {verb: about for point in points for verb, about in point.load().items()}
    return VERBS | others | VERBS  # no package replaces one of ours


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _main(argv)
    except Exception as error:
        if "--json" in argv:
            text = mistake(error)
            answer = {"exit_code": 1 if text is None else 2, "error": text or f"{type(error).__name__}: {error}"}
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        raise


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage("dfm VERB", verbs()))
        print("\n--json, with any verb but lab: one JSON object on stdout, and everything else on stderr")
        return 0
    if argv[0] == "--version":
        from dfm_nb.base.version import __version__

        print(__version__)
        return 0
    verb, rest = argv[0], list(argv[1:])
    known = VERBS if verb in VERBS else verbs()
    if verb not in known:
        from dfm_nb.base.nearest import meant

        raise ValueError(f"there is no verb {verb!r}; {meant(verb, known, 'see dfm --help')}")
    module, _ = known[verb]
    if "--json" not in rest or {"-h", "--help"} & {*rest}:
        return _run(verb, module, rest)
    result = None
    if hasattr(found := _imported(module), "result"):
        rest.remove("--json")  # the other verbs have the flag, and print their object
        nproc, words = pop_nproc(rest)
        result = functools.partial(found.result, words, *([nproc] if verb == "pretrain" else []))
    return _in_json(lambda: _run(verb, module, rest), result)


def _in_json(run: Callable[[], int], result: Callable[[], dict] | None) -> int:
    """Print one object: `exit_code`, and what is on the disk now or the verb prints. The rest goes to stderr."""
    import tempfile

    sys.stdout.flush()
    out = os.dup(1)
    with tempfile.NamedTemporaryFile() as told, tempfile.TemporaryFile("w+") as printed:
        os.dup2(2 if result else printed.fileno(), 1)  # also of processes that are started
        os.environ[TOLD] = told.name
        try:
            code = run()
            sys.stdout.flush()
            printed.seek(0)
            if error := Path(told.name).read_text(encoding="utf-8"):
                answer = {"error": error}
            elif result:
                answer = {} if code else result()
            else:
                answer, _ = json.JSONDecoder().raw_decode(printed.read() or "{}")
        finally:
            del os.environ[TOLD]
            sys.stdout.flush()
            os.dup2(out, 1)
            os.close(out)
    print(json.dumps({"exit_code": code, **answer}, ensure_ascii=False, default=str), flush=True)
    return code


def _imported(module: str) -> ModuleType:
    """A verb's, without a search for garbage on the way: what torch makes stays, and each search costs up to 0.1 s."""
    if module not in sys.modules:
        gc.disable()
        importlib.import_module(module)
        gc.freeze()
        gc.enable()
    return sys.modules[module]


def _run(verb: str, module: str, rest: list[str]) -> int:
    if verb in UNDER_TORCHRUN:
        nproc, rest = pop_nproc(rest)
        if nproc is not None:
            if verb in PREFLIGHT:
                settled = _imported(module).preflight(rest, nproc)
                if settled is not None:
                    return settled
            return run_under_torchrun([f"--nproc-per-node={nproc}", "-m", module, *rest])
    return _imported(module).main(rest)


def entry() -> None:
    if {*sys.argv[1:2]} & VERBS.keys():  # for what they start; the workbench's verbs start kernels
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    raise SystemExit(guard(main))
