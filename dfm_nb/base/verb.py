"""The command of a verb: options that run, and whose result is printed as text or as one JSON object."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dfm_nb.base.argv import TOLD, pop_nproc
from dfm_nb.base.log import start_logging
from dfm_nb.base.options import Options, option
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
    logs: ClassVar[bool] = False
    """Whether the command line shows log lines."""
    as_json: bool = option(False, "print one JSON object; everything else goes to stderr", flag="--json")

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
        """Run the command line; of several processes rank 0 prints."""
        nproc, words = pop_nproc(argv) if cls.module else (None, argv)
        asked, rank = cls.parse(words), int(os.environ.get("RANK", 0))
        if cls.logs:
            start_logging(rank=rank)
        if nproc is None:
            result = asked.run()
        elif (result := asked.preflight(nproc)) is None:
            return run_under_torchrun([f"--nproc-per-node={nproc}", "-m", str(cls.module), *(words or ())])
        if rank:
            return 0
        answer, text, code = asked.report(result)
        if asked.as_json:
            text = json.dumps({"exit_code": code, **answer}, ensure_ascii=False, default=str)
        if asked.as_json and TOLD in os.environ:
            Path(os.environ[TOLD]).write_text(text, encoding="utf-8")
        elif text:
            print(text, flush=True)
        return code
