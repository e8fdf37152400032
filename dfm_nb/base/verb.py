"""The command of a verb: options that run, and whose result is printed as text or as one JSON object."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dfm_nb.base import plugins
from dfm_nb.base.argv import TOLD, forget_launcher, from_launcher, pop_nproc
from dfm_nb.base.log import legible, silent, start_logging
from dfm_nb.base.options import Options, fields, option
from dfm_nb.base.torchrun import run_under_torchrun


class Report(NamedTuple):
    """A result for `--json`, for a terminal ("" if the work has said all), and the exit code."""

    answer: Mapping[str, Any]
    text: str = ""
    exit_code: int = 0


class Verb(Options):
    """Options of a command, and what it does.

    `dfm VERB` is `main`, its Python function `Verb(**flags).run()`, and a form starts `dfm VERB` with `words()`.

        class Export(Verb):
            "Write consolidated weights."
            prog = "dfm export"
            source: str = option(help="run folder", positional=True)

            def run(self) -> Path: ...

            def report(self, result: Path) -> Report:
                return Report({"output": str(result)})

        main = Export.main
    """

    module: ClassVar[str | None] = None
    """What torchrun starts as `-m module` on several processes; None for a verb of one process."""
    own_part: ClassVar[bool] = False
    """Whether a verb of one process may take its part of the work from the environment of a launcher."""
    logs: ClassVar[bool] = False
    """Whether the command line shows log lines."""
    as_json: bool = option(False, "print one JSON object; everything else goes to stderr", flag="--json")

    def __init__(self, /, **values: Any):
        plugins.trust(*(values.get(name) for name, field in fields(type(self)).items() if "plugins" in field.marks))
        super().__init__(**values)

    def run(self) -> Any:
        """Carry out the command."""
        raise NotImplementedError

    def report(self, result: Any) -> Report:
        """What the command line prints of the result."""
        return Report(result)

    def preflight(self, num_processes: int) -> Any:
        """Report mistakes once, before processes start. Anything but None is the result, and none start."""

    @classmethod
    def main(cls, argv: list[str] | None = None) -> int:
        """Run the command line; of several processes rank 0 prints, and all end with the same code.

        The environment of a launcher counts only for verbs that run under torchrun, and only where they are its
        processes: a RANK that was left in a shell must not silence a check.
        """
        nproc, words = pop_nproc(argv) if cls.module else (None, argv)
        if not (cls.own_part or cls.module) or nproc:
            forget_launcher()
        with silent(cls.module is not None and os.environ.get("RANK", "0") != "0"):
            verb = cls.parse(words)
        rank = from_launcher("RANK") if cls.module else 0
        if cls.logs:
            start_logging(rank=rank)
        if nproc is None:
            result = verb.run()
        else:
            result = verb.preflight(nproc)
            if result is None:
                return run_under_torchrun([f"--nproc-per-node={nproc}", "-m", str(cls.module), *(words or ())])
        answer, text, code = verb.report(result)
        if rank:
            return code
        if verb.as_json:
            text = json.dumps({"exit_code": code, **answer}, default=str)
        if verb.as_json and TOLD in os.environ:
            Path(os.environ[TOLD]).write_text(text, encoding="utf-8")
        elif text:
            print(text if verb.as_json else legible(text), flush=True)
        return code


class FileVerb(Verb):
    """A verb that writes files of the names that it is given."""

    overwrite: bool = option(False, "replace existing files")

    def report(self, result: Any) -> Report:
        return Report({"output": str(result)})
