"""The files of a run that is under way: what makes it resumable and its output whole or absent.

Beside the final names lie `.bin.part`, `.lengths.part`, `.counts.part` for each key, `<prefix>.skipped.jsonl`, and
`<prefix>.progress.json`, which says how many bytes of each file, and of the input, are done. It is replaced in one
step after the data that it speaks of: after SIGKILL the files are cut back to it, and nothing is lost or doubled.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Iterator

import numpy as np

from dfm_nb.base.files import fsync_replace, sync
from dfm_nb.text.chunk import Encoded
from dfm_nb.text.index import bin_path, idx_path, meta_path, write_index
from dfm_nb.text.input import STDIN, Chunk

SKIPPED = "skipped"


@dataclass
class Progress:
    """What is done. The next chunk begins at `span`, `offset` (bytes), `line`; `sizes` are those of the part files."""

    span: int = 0
    offset: int = 0
    line: int = 0
    documents: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    empty_documents: dict[str, int] = field(default_factory=dict)
    blank_lines: int = 0
    skipped: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    finished: bool = False


class Parts:
    """The part files, open for appending. Use as `with Parts.open(...) as parts`.

    Parameters
    ----------
    prefix : of the run; prefixes : of each key's corpus
    signature : inputs, tokenizer and flags; a run goes on only where it is the same
    """

    def __init__(self, prefix: str, prefixes: dict[str, str], signature: dict):
        self._prefix, self._prefixes = prefix, prefixes
        self._signature = json.loads(json.dumps(signature))
        self._state = Path(f"{prefix}.progress.json")
        self._paths = {
            f"{key}.{name}": self._part(key, name) for key in prefixes for name in ("bin", "lengths", "counts")
        }
        self._paths[SKIPPED] = Path(f"{prefix}.skipped.jsonl")
        self._files: dict[str, BinaryIO] = {}
        self.progress = Progress(
            tokens=dict.fromkeys(prefixes, 0),
            empty_documents=dict.fromkeys(prefixes, 0),
            sizes=dict.fromkeys(self._paths, 0),
        )

    @property
    def skipped_path(self) -> str | None:
        """Where the skipped lines are listed; None when there are none."""
        return str(self._paths[SKIPPED]) if self.progress.skipped else None

    @classmethod
    @contextlib.contextmanager
    def open(cls, prefix: str, prefixes: dict[str, str], signature: dict, resume: bool) -> Iterator[Parts]:
        """Open or continue; a state of other inputs, tokenizer or flags is begun anew."""
        parts = cls(prefix, prefixes, signature)
        with parts._lock():
            parts._begin(resume)
            try:
                yield parts
            except BaseException:
                if parts._nothing_to_keep():
                    parts.discard()
                raise
            finally:
                parts._close()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        path = Path(f"{self._prefix}.lock")
        while True:
            with open(path, "w") as f:
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(
                        f"another run is writing {self._prefix}; wait for it, or give another --output-prefix"
                    ) from None
                if not path.exists() or os.fstat(f.fileno()).st_ino != path.stat().st_ino:
                    continue  # the run before removed the file between our open and our lock
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return

    def _part(self, key: str, name: str) -> Path:
        return Path(f"{self._prefixes[key]}.{name}.part")

    def _begin(self, resume: bool) -> None:
        state = self._read_state() if resume else None
        if state is not None:
            self.progress = state
        if self.progress.finished:
            return
        for name, path in self._paths.items():
            self._files[name] = open(path, "wb" if state is None else "ab")
            self._files[name].truncate(self.progress.sizes[name])

    def _read_state(self) -> Progress | None:
        try:
            data = json.loads(self._state.read_text())
        except (FileNotFoundError, ValueError):
            return None
        if data.get("signature") != self._signature or self._from_stdin():
            return None
        progress = Progress(**data["progress"])
        if progress.finished:
            return progress
        for name, path in self._paths.items():
            if not path.exists() or path.stat().st_size < progress.sizes[name]:
                return None  # lost with the machine's power: the work is done again
        return progress

    def append(self, chunk: Chunk, encoded: Encoded, bad: list[dict]) -> None:
        """Add a chunk's documents, and one record for each bad line; then say that the chunk is done."""
        p = self.progress
        if encoded.documents:
            for key in self._prefixes:
                self._write(f"{key}.bin", encoded.tokens[key])
                self._write(f"{key}.lengths", encoded.lengths[key])
                self._write(f"{key}.counts", encoded.counts[key])
                p.tokens[key] += int(np.frombuffer(encoded.lengths[key], np.int32).sum(dtype=np.int64))
                p.empty_documents[key] += encoded.empty_documents[key]
        for record in bad:
            self._write(SKIPPED, json.dumps(record).encode() + b"\n")
        p.documents += encoded.documents
        p.blank_lines += encoded.blank_lines
        p.skipped += len(bad)
        p.span, p.offset, p.line = chunk.span, chunk.next_offset, chunk.next_line
        for f in self._files.values():
            f.flush()
        self._save()

    def _write(self, name: str, data: bytes) -> None:
        self._files[name].write(data)
        self.progress.sizes[name] += len(data)

    def _save(self) -> None:
        # Not synced, unlike base.files.write_atomically: it comes with every chunk, and what a power cut takes is only
        # work, which `_read_state` notices.
        temporary = Path(f"{self._state}.tmp")
        temporary.write_text(json.dumps({"signature": self._signature, "progress": asdict(self.progress)}))
        os.replace(temporary, self._state)

    def finish(self, dtype: np.dtype, meta: dict) -> None:
        """Write the indices beside the parts, bring them to disk, and say that only the renames are left."""
        self._close()
        p = self.progress
        for key in self._prefixes:
            index = self._part(key, "idx")
            with open(index, "wb") as f:
                write_index(f, dtype, self._paths[f"{key}.lengths"], self._paths[f"{key}.counts"])
            sync(index)
            own = {"key": key, "tokens": p.tokens[key], "empty_documents": p.empty_documents[key]}
            self._part(key, "meta.json").write_text(json.dumps({**meta, **own}, indent=1) + "\n")
        p.finished = True
        self._save()

    def publish(self) -> None:
        """Rename to the final names, `.idx` last. Safe to repeat from any point."""
        assert self.progress.finished
        for key, prefix in self._prefixes.items():
            binary, meta, index = (self._part(key, name) for name in ("bin", "meta.json", "idx"))
            if binary.exists():
                idx_path(prefix).unlink(missing_ok=True)  # an older corpus: its index must not meet the new tokens
                fsync_replace(binary, bin_path(prefix))
            if meta.exists():
                os.replace(meta, meta_path(prefix))
            if index.exists():
                os.replace(index, idx_path(prefix))
        self._remove_parts()

    def discard(self) -> None:
        """Remove every part file: there is nothing to go on from. A list of skipped lines stays."""
        self._close()
        self._remove_parts()

    def _remove_parts(self) -> None:
        for key in self._prefixes:
            for name in ("bin", "lengths", "counts", "idx", "meta.json"):
                self._part(key, name).unlink(missing_ok=True)
        if not self.progress.skipped:
            self._paths[SKIPPED].unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def _from_stdin(self) -> bool:
        return any(row[0] == STDIN for row in self._signature["inputs"])

    def _nothing_to_keep(self) -> bool:
        return self._from_stdin() or (self.progress.documents == 0 and not self.progress.finished)

    def _close(self) -> None:
        for f in self._files.values():
            with contextlib.suppress(OSError):  # `append` flushed what counts; a full disk must not stop the tidying
                f.close()
        self._files = {}
