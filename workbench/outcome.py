"""What a torchrun job printed, and why it ended, from its output and exit code.

A user's error (`error: ...`) has priority over an exception, and a rank's own exception over those that follow from it.
"""

from __future__ import annotations

import re
import signal

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)")
_SECOND_HAND = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "Broken pipe")
_FIRST = re.compile(r"^rank (\d+) failed first", re.M)
"""As `dfm_nb.base.torchrun` prints for ranks other than 0."""


def clean_lines(text: str) -> list[str]:
    """Non-empty lines without colour codes; only the last state of a progress bar."""
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in _ESCAPES.sub("", text).split("\n"))
    return [line for line in lines if line.strip()]


def explain(output: str, exit_code: int) -> str:
    """The cause of a failure.

    >>> explain("[INFO] start\\nerror: --limit must be at least 1; got 0\\n", 2)
    '--limit must be at least 1; got 0'
    """
    lines, first = clean_lines(output), _FIRST.search(output)
    where = f" (rank {first[1]})" if first else ""
    for i, line in enumerate(lines):
        if line.startswith("error: "):
            more = lines[i + 1 :]
            indented = next((n for n, text in enumerate(more) if not text.startswith("  ")), len(more))
            return "\n".join([line.removeprefix("error: "), *more[:indented]])
    raised = [m[1] for line in lines if (m := _EXCEPTION.match(line))]
    own = [r for r in raised if not any(s in r for s in _SECOND_HAND)]
    if own:
        return own[0] + where
    if exit_code < 0:
        name = {s.value: s.name for s in signal.Signals}.get(-exit_code, f"signal {-exit_code}")
        return f"a process was ended by {name}" + "; the machine may have run out of memory" * (name == "SIGKILL")
    return (raised or lines or [f"no output, exit code {exit_code}"])[-1] + where
