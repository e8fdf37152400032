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

from dfm_nb.base.files import DISK_FULL, read_json, sync
from dfm_nb.text.chunk import Encoded
from dfm_nb.text.indexed import idx_path, meta_path, read_blocks, write_index
from dfm_nb.text.input import STDIN, LineChunk

SKIPPED = "skipped"


@dataclass
class Progress:
    """What is done. The next chunk begins at `span`, `offset` (bytes), `line`; `sizes` are those of the part files.

    When corpora are merged, `span` counts the corpora and `offset` the bytes of the next one's `.bin`.
    """

    span: int = 0
    offset: int = 0
    line: int = 0
    documents: int = 0
    blank_lines: int = 0
    skipped: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    finished: bool = False


class Parts:
    """The part files, open for appending. Use as `with Parts.open(...) as parts`.

    Parameters
    ----------
    prefix : of the run; prefixes : of each key's corpus
    signature : inputs (`input.fingerprint`), tokenizer and flags; a run goes on only where it is the same
    """

    def __init__(self, prefix: str, prefixes: dict[str, str], signature: dict):
        self._prefix, self._prefixes = prefix, prefixes
        self._signature = json.loads(json.dumps(signature))
        self._from_stdin = [STDIN] in self._signature["inputs"]
        self._state = Path(f"{prefix}.progress.json")
        appended = ("bin", "lengths", "counts")
        self._paths = {f"{key}.{name}": self._part(key, name) for key in prefixes for name in appended}
        self._paths[SKIPPED] = Path(f"{prefix}.skipped.jsonl")
        self._files: dict[str, BinaryIO] = {}
        self.progress = Progress(sizes=dict.fromkeys(self._paths, 0))

    @property
    def skipped_path(self) -> str | None:
        """Where the skipped lines are listed; None when there are none."""
        return str(self._paths[SKIPPED]) if self.progress.skipped else None

    @classmethod
    @contextlib.contextmanager
    def open(cls, prefix: str, prefixes: dict[str, str], signature: dict, resume: bool) -> Iterator[Parts]:
        """Open or continue; with other inputs, tokenizer or flags, start from scratch. Makes the prefix's folder."""
        folder = Path(prefix).absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"--output-prefix must be FOLDER/NAME; {folder} is or lies under a file") from None
        parts = cls(prefix, prefixes, signature)
        with parts._lock():
            if resume:
                parts._read_state()
            if not parts.progress.finished:
                for name, path in parts._paths.items():
                    parts._files[name] = open(path, "ab")
                    parts._files[name].truncate(parts.progress.sizes[name])
            try:
                yield parts
            except BaseException as error:
                if isinstance(error, OSError) and error.errno in DISK_FULL:
                    error.filename = error.filename or prefix  # a write that fails does not say where
                if parts._nothing_to_keep():
                    parts._remove_parts()
                raise
            finally:
                for f in parts._files.values():
                    with contextlib.suppress(OSError):  # `write` flushed what counts; the disk may be full
                        f.close()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        path = Path(f"{self._prefix}.lock")
        with open(path, "w") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = os.fstat(f.fileno()).st_nlink > 0  # else a run removed it at its end, after our open
            except BlockingIOError:
                alone = False
            if not alone:
                raise ValueError(f"another run is writing {self._prefix}; change --output-prefix")
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _part(self, key: str, name: str) -> Path:
        return Path(f"{self._prefixes[key]}.{name}.part")

    def _read_state(self) -> None:
        """Go on from the progress of a run with the same inputs, tokenizer and flags, if there is one."""
        data = read_json(self._state)
        if not data or data.get("signature") != self._signature or self._from_stdin:
            return
        progress = Progress(**data["progress"])
        sizes = {name: path.stat().st_size if path.exists() else -1 for name, path in self._paths.items()}
        # Fewer bytes than were done: lost with the machine's power, and the work is done again.
        if progress.finished or all(sizes[name] >= done for name, done in progress.sizes.items()):
            self.progress = progress

    def append(self, chunk: LineChunk, encoded: Encoded, bad: list[dict]) -> None:
        """Add a chunk's documents, and one record for each bad line; then say that the chunk is done."""
        p = self.progress
        skipped = b"".join(json.dumps(record).encode() + b"\n" for record in bad)
        for name, data in {**encoded.files, SKIPPED: skipped}.items():
            self.write(name, data)
        p.documents += encoded.documents
        p.blank_lines += encoded.blank_lines
        p.skipped += len(bad)
        p.span, p.offset, p.line = chunk.span, chunk.next_offset, chunk.next_line
        self.save()

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Add to the part file `name` (`<key>.bin`, `.lengths`, `.counts`); it counts once `save` was called."""
        self._files[name].write(data)
        self._files[name].flush()
        self.progress.sizes[name] += len(data)

    def save(self) -> None:
        """Say that all of `progress` is done."""
        # Not synced, unlike base.files.write_atomically: it comes with every chunk, and what a power cut takes is only
        # work, which `_read_state` notices.
        temporary = Path(f"{self._state}.tmp")
        temporary.write_text(json.dumps({"signature": self._signature, "progress": asdict(self.progress)}))
        os.replace(temporary, self._state)

    def finish(self, dtype: np.dtype, meta: dict | None) -> None:
        """Write the indices beside the parts, bring them to disk, and say that only the renames are left.

        `meta` None: where the tokens come from is not known, and no `.meta.json` is written.
        """
        for key in self._prefixes:
            index, counts = self._part(key, "idx"), self._paths[f"{key}.counts"]
            with open(index, "wb") as f:
                write_index(f, dtype, self._paths[f"{key}.lengths"], counts)
            sync(index)
            if meta is None:
                continue
            own = {
                "key": key,
                "tokens": self.progress.sizes[f"{key}.bin"] // dtype.itemsize,
                "empty_documents": sum(int((block == 0).sum()) for block in read_blocks(counts, np.int32)),
            }
            self._part(key, "meta.json").write_text(json.dumps({**meta, **own}, indent=1) + "\n")
        self.progress.finished = True
        self.save()

    def publish(self) -> None:
        """Rename to the final names, `.idx` last. Safe to repeat from any point."""
        for key, prefix in self._prefixes.items():
            if (tokens := self._part(key, "bin")).exists():
                sync(tokens)
                for older in (idx_path(prefix), meta_path(prefix)):  # must not meet the new tokens
                    older.unlink(missing_ok=True)
            for name in ("bin", "meta.json", "idx"):
                if (part := self._part(key, name)).exists():
                    os.replace(part, f"{prefix}.{name}")
        self._remove_parts()

    def _remove_parts(self) -> None:
        for key in self._prefixes:
            for name in ("bin", "lengths", "counts", "idx", "meta.json"):
                self._part(key, name).unlink(missing_ok=True)
        if not self.progress.skipped:
            self._paths[SKIPPED].unlink(missing_ok=True)
        for state in (f"{self._state}.tmp", self._state):
            Path(state).unlink(missing_ok=True)

    def _nothing_to_keep(self) -> bool:
        empty = not any(size for name, size in self.progress.sizes.items() if name != SKIPPED)
        return self._from_stdin or (empty and not self.progress.finished)
