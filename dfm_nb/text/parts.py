"""The files of an unfinished run, which make it resumable and its output whole or absent.

They are in the folder `<prefix>.unfinished`: `.bin` and the three arrays of `.idx` (`APPENDED`) for each key, the
skipped lines, and `progress.json`, which records how many bytes of each file, and of the input, are done. It is
replaced atomically after the data are written: after SIGKILL the files are truncated to it; nothing is lost or doubled.

    progress has     out.bin 4,000 bytes, input at byte 9,000 of file 0
    killed with      out.bin 4,700 bytes (a chunk that was not finished)
    the next run     truncates it to 4,000 and resumes at byte 9,000
"""

import contextlib
import json
import os
import shutil
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Iterator, Self

import numpy as np
from filelock import FileLock, Timeout
from pydantic import NonNegativeInt, TypeAdapter

from dfm_nb.base.files import appending, check_free, naming, read_json, subfolder, sync, write_atomically, write_json
from dfm_nb.text.chunk import COUNTS
from dfm_nb.text.indexed import CODES, HEADER, MAGIC, VERSION, bin_path, idx_path, meta_path
from dfm_nb.text.input import START, Position

SKIPPED = "skipped"
APPENDED = ("bin", "lengths", "pointers", "documents")


@dataclass
class Progress:
    """Progress: the bytes of each part file, the empty documents of each key, the input up to `at`.

    A merge counts corpora in `at.span`.
    """

    sizes: dict[str, NonNegativeInt]
    empty: dict[str, int]
    at: Position = START
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))


class Parts:
    """The part files, appended to. Use as `with Parts.open(...) as parts`.

    Parameters
    ----------
    prefix : the run's; prefixes : each key's corpus
    signature : inputs, tokenizer and flags; a run with another signature starts from scratch
    """

    def __init__(self, prefix: str, prefixes: dict[str, str], signature: dict):
        self._prefixes = prefixes
        self._signature = signature
        self._folder = Path(f"{prefix}.unfinished")
        self._skips = Path(f"{prefix}.skipped.jsonl")
        self._state = self._folder / "progress.json"
        self._paths = {}
        for key, corpus in prefixes.items():
            for name in APPENDED:
                self._paths[f"{key}.{name}"] = self._part(corpus, name)
        if "merge" not in signature:  # which skips no line
            self._paths[SKIPPED] = self._folder / SKIPPED
        self.progress = Progress(dict.fromkeys(self._paths, 0), dict.fromkeys(prefixes, 0))

    def _part(self, prefix: str, name: str) -> Path:
        return self._folder / f"{Path(prefix).name}.{name}"

    @property
    def skipped_path(self) -> str | None:
        """The file with the skipped lines; None if there are none."""
        return str(self._skips) if self.progress.counts["skipped"] else None

    @classmethod
    def signature_of(cls, prefix: str) -> dict | None:
        """The signature of an unfinished run."""
        return read_json(cls(prefix, {}, {})._state).get("signature")

    @classmethod
    @contextlib.contextmanager
    def open(cls, prefix: str, prefixes: dict[str, str], signature: dict) -> Iterator[Self]:
        """Start, or resume a run of the same signature. Creates the prefix's folder."""
        parts = cls(prefix, prefixes, signature)
        folder = parts._folder
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        parts._check_outputs()
        subfolder(folder.parent, folder.name)
        if not parts._state.exists():  # before the lock, without which somebody else's folder is not ours
            parts._record({})
        lock = FileLock(folder / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"another run is writing {prefix}; change --output-prefix") from None
        try:
            parts._resume()
            for name, path in parts._paths.items():
                with appending(path) as f:
                    f.truncate(parts.progress.sizes[name])
            with naming(folder):
                yield parts
        finally:
            if "progress" not in read_json(parts._state):  # nothing was done, or everything
                shutil.rmtree(folder, ignore_errors=True)
            lock.release()

    def _check_outputs(self) -> None:
        """FileExistsError for a name that is taken, and no record of ours names it."""
        fix = "move it, or choose another prefix"
        begun = "signature" in read_json(self._state)
        check_free(self._folder, begun or not any(self._folder.glob("[!.]*")), fix)
        for prefix in self._prefixes.values():
            ours = "empty_documents" in read_json(meta_path(prefix))
            for path in (bin_path(prefix), idx_path(prefix), meta_path(prefix)):
                check_free(path, ours, fix)
            if SKIPPED in self._paths:
                check_free(self._skips, ours or begun, fix)

    def _resume(self) -> None:
        """Take up the progress of a run with the same signature."""
        saved = read_json(self._state)
        if saved.get("signature") == self._signature and "progress" in saved:
            with contextlib.suppress(ValueError, KeyError):  # it may be anything
                progress = TypeAdapter(Progress).validate_python(saved["progress"])
                # Fewer bytes than recorded: lost in a power cut, so the work is done again.
                if all(p.exists() and p.stat().st_size >= progress.sizes[name] for name, p in self._paths.items()):
                    self.progress = progress

    def append(self, key: str, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Append documents.

        Parameters
        ----------
        tokens : of all sequences; lengths : int32, tokens of each sequence
        counts : int32, sequences of each document (0 for an empty one)

        Documents ["a b c"], [""] and ["a", "b c"] of uint16 after 10 tokens in 4 sequences have lengths 3, 1, 2 and
        counts 1, 0, 2, hence pointers 20, 26, 28 and documents 4, 5, 5.
        """
        sizes = self.progress.sizes
        pointers = sizes[f"{key}.bin"] + (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.itemsize
        documents = sizes[f"{key}.lengths"] // 4 + np.cumsum(counts, dtype=np.int64) - counts
        for name, array in zip(APPENDED, (tokens, lengths, pointers, documents)):
            self.write(f"{key}.{name}", array)
        self.progress.empty[key] += int((counts == 0).sum())

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        """Append to the part file `name`; it counts only after `save`."""
        with appending(self._paths[name]) as f:
            self.progress.sizes[name] += f.write(data)

    def save(self) -> None:
        """Record `progress` as done."""
        self._record({"progress": asdict(self.progress)})

    def _record(self, done: dict) -> None:
        # Not synced: it is called for every chunk, and a power cut loses only work, which `_resume` notices.
        write_atomically(self._state, json.dumps({"signature": self._signature, **done}).encode(), durable=False)

    def finish(self, dtype: np.dtype, meta: dict | None) -> None:
        """Join the parts of the indices, then sync each file to disk and rename it to its final name, `.idx` last.

        `meta` None: the source of the tokens is unknown, and no `.meta.json` is written.
        """
        sizes = self.progress.sizes
        for key, prefix in self._prefixes.items():
            sequences = sizes[f"{key}.lengths"] // 4
            bounds = sizes[f"{key}.documents"] // 8 + 1
            with appending(self._part(prefix, "idx")) as f:
                f.truncate(0)
                f.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], sequences, bounds))
                for name in APPENDED[1:]:
                    with open(self._paths[f"{key}.{name}"], "rb") as part:
                        shutil.copyfileobj(part, f)
                f.write(struct.pack("<Q", sequences))  # the end of the last document
            if meta is not None:
                tokens = sizes[f"{key}.bin"] // dtype.itemsize
                own = {"key": key, "tokens": tokens, "empty_documents": self.progress.empty[key]}
                write_json(self._part(prefix, "meta.json"), {**meta, **own}, indent=1)
            for kind in ("bin", "idx"):
                sync(self._part(prefix, kind))
        if self.skipped_path:
            os.replace(self._paths[SKIPPED], self._skips)
        elif SKIPPED in self._paths:
            self._skips.unlink(missing_ok=True)  # of a run before
        for prefix in self._prefixes.values():
            idx_path(prefix).unlink(missing_ok=True)  # must not be used with the new tokens
            if meta is None:
                meta_path(prefix).unlink(missing_ok=True)
            else:  # before the tokens, whose record it is
                os.replace(self._part(prefix, "meta.json"), meta_path(prefix))
            os.replace(self._part(prefix, "bin"), bin_path(prefix))
            os.replace(self._part(prefix, "idx"), idx_path(prefix))
        self._state.unlink()
