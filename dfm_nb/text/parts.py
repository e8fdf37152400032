"""The files of a run that is under way: what makes it resumable and its output whole or absent.

Beside the final names lie `.bin.part`, `.lengths.part`, `.counts.part` for each key, `<prefix>.skipped.jsonl` and
`<prefix>.progress.json`, which says up to which byte of each file, and of the input, the work is done.
Guarantees: `progress.json` is replaced in one step after the data it speaks of were written, so after SIGKILL the files
are cut back to it and nothing is lost or doubled; the final names appear by renames, `.idx` last.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Iterator

import numpy as np

from dfm_nb.base.files import fsync_replace
from dfm_nb.text.chunk import Encoded
from dfm_nb.text.index import bin_path, idx_path, meta_path, write_index
from dfm_nb.text.input import STDIN, Chunk

_NAMES = ("bin", "lengths", "counts")


@dataclass
class Progress:
    """What is done. `span`, `offset` (bytes), `line` are where the next chunk begins; `sizes` those of the part files."""

    span: int = 0
    offset: int = 0
    line: int = 0
    documents: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    empty_documents: dict[str, int] = field(default_factory=dict)
    blank_lines: int = 0
    skipped: int = 0
    skipped_path: str | None = None
    skipped_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    finished: bool = False


class Parts:
    """The part files, open for appending. Use as `with Parts.open(...) as parts`."""

    def __init__(self, prefix: str, prefixes: dict[str, str], signature: dict):
        self.progress = Progress()
        self._prefix, self._prefixes, self._signature = prefix, prefixes, signature
        self._state = Path(f"{prefix}.progress.json")
        self._skipped = Path(f"{prefix}.skipped.jsonl")
        self._files: dict[str, BinaryIO] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, prefix: str, prefixes: dict[str, str], signature: dict, resume: bool) -> Iterator[Parts]:
        """Open or continue; a state of other inputs, tokenizer or flags is begun anew."""
        parts = cls(prefix, prefixes, signature)
        with parts._lock():
            parts._load(resume)
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
        import fcntl

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

    def _load(self, resume: bool) -> None:
        state = self._read_state() if resume else None
        if state is not None:
            self.progress = state
            if state.finished:
                return
        else:
            self._skipped.unlink(missing_ok=True)
        for key in self._prefixes:
            for name in _NAMES:
                f = open(self._part(key, name), "ab" if state is not None else "wb")
                f.truncate(self.progress.sizes.get(f"{key}.{name}", 0))
                f.seek(0, os.SEEK_END)
                self._files[f"{key}.{name}"] = f
        if state is not None and self._skipped.exists():
            os.truncate(self._skipped, state.skipped_bytes)

    def _read_state(self) -> Progress | None:
        try:
            data = json.loads(self._state.read_text())
        except (FileNotFoundError, ValueError):
            return None
        if data.get("signature") != json.loads(json.dumps(self._signature)):
            return None
        if any(row[0] == STDIN for row in self._signature["inputs"]):
            return None
        progress = Progress(**data["progress"])
        for key in self._prefixes if not progress.finished else ():
            for name in _NAMES:
                path = self._part(key, name)
                if not path.exists() or path.stat().st_size < progress.sizes.get(f"{key}.{name}", 0):
                    return None  # lost with the machine's power: the work is done again
        return progress

    def append(self, chunk: Chunk, encoded: Encoded, bad: list[dict]) -> None:
        """Add a chunk's documents and say that it is done."""
        p = self.progress
        if encoded.documents:
            for key in self._prefixes:
                data = (encoded.tokens[key], encoded.lengths[key], encoded.counts[key])
                for name, value in zip(_NAMES, data):
                    full = f"{key}.{name}"
                    self._files[full].write(value)
                    p.sizes[full] = p.sizes.get(full, 0) + len(value)
                lengths = np.frombuffer(encoded.lengths[key], np.int32)
                p.tokens[key] = p.tokens.get(key, 0) + int(lengths.sum(dtype=np.int64))
                p.empty_documents[key] = p.empty_documents.get(key, 0) + encoded.empty_documents[key]
        if bad:
            with open(self._skipped, "ab") as f:
                for record in bad:
                    p.skipped_bytes += f.write(json.dumps(record).encode() + b"\n")
            p.skipped_path = str(self._skipped)
        p.documents += encoded.documents
        p.blank_lines += encoded.blank_lines
        p.skipped += len(bad)
        p.span, p.offset, p.line = chunk.span, chunk.next_offset, chunk.next_line
        for f in self._files.values():
            f.flush()
        self._save()

    def _save(self) -> None:
        temporary = Path(f"{self._state}.tmp")
        temporary.write_text(json.dumps({"signature": self._signature, "progress": asdict(self.progress)}))
        os.replace(temporary, self._state)

    def finish(self, dtype: np.dtype, meta: dict) -> None:
        """Write the indices beside the parts, bring all to disk, and say that only the renames are left."""
        self._close()
        p = self.progress
        for key, prefix in self._prefixes.items():
            p.tokens.setdefault(key, 0)
            p.empty_documents.setdefault(key, 0)
            with open(self._part(key, "idx"), "wb") as f:
                write_index(f, dtype, self._part(key, "lengths"), self._part(key, "counts"))
                f.flush()
                os.fsync(f.fileno())
            own = {"key": key, "tokens": p.tokens[key], "empty_documents": p.empty_documents[key]}
            Path(f"{prefix}.meta.json.part").write_text(json.dumps({**meta, **own}, indent=1) + "\n")
        p.finished = True
        self._save()

    def publish(self) -> None:
        """Rename to the final names. Safe to repeat from any point."""
        assert self.progress.finished
        for key, prefix in self._prefixes.items():
            binary, index = self._part(key, "bin"), self._part(key, "idx")
            if binary.exists():
                idx_path(prefix).unlink(missing_ok=True)  # an older corpus: its index must not meet the new tokens
                fsync_replace(binary, bin_path(prefix))
            meta = Path(f"{prefix}.meta.json.part")
            if meta.exists():
                os.replace(meta, meta_path(prefix))
            if index.exists():
                os.replace(index, idx_path(prefix))
            for name in ("lengths", "counts"):
                self._part(key, name).unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove every part file: there is nothing to go on from."""
        self._close()
        for key in self._prefixes:
            for name in (*_NAMES, "idx"):
                self._part(key, name).unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def _nothing_to_keep(self) -> bool:
        from_stdin = any(row[0] == STDIN for row in self._signature["inputs"])
        return from_stdin or (self.progress.documents == 0 and not self.progress.finished)

    def _close(self) -> None:
        for f in self._files.values():
            with contextlib.suppress(OSError):  # `append` flushed what counts; a full disk must not stop the tidying
                f.close()
        self._files = {}
