"""The files of an unfinished run, which make it resumable and its output whole or absent.

Next to the final names are `.bin.part` and the three arrays of `.idx` (`APPENDED`) for each key,
`<prefix>.skipped.jsonl`, and `<prefix>.progress.json`, which records how many bytes of each file, and of the input, are
done. It is replaced atomically after the data are written: after SIGKILL the files are truncated to it, and nothing is
lost or doubled.

    progress has     out.bin.part 4,000 bytes, input at byte 9,000 of file 0
    killed with      out.bin.part 4,700 bytes (a chunk that was not finished)
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

from dfm_nb.base.files import fsync_replace, read_json, sync
from dfm_nb.text.chunk import COUNTS
from dfm_nb.text.indexed import CODES, HEADER, MAGIC, VERSION, bin_path, idx_path, meta_path
from dfm_nb.text.input import START, Position

SKIPPED = "skipped"
APPENDED = ("bin", "lengths", "pointers", "documents")


@dataclass
class Progress:
    """Progress: the input up to `at`, the bytes of each part file, the empty documents of each key.

    A merge counts corpora in `at.span`.
    """

    at: Position = START
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    sizes: dict[str, int] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)


class Parts:
    """The part files, appended to. Use as `with Parts.open(...) as parts`.

    Parameters
    ----------
    prefix : the run's; prefixes : each key's corpus
    signature : inputs, tokenizer and flags; a run with another signature starts from scratch
    """

    def __init__(self, prefix: str, prefixes: dict[str, str], signature: dict):
        self._prefixes, self._signature = prefixes, signature
        self._state = Path(f"{prefix}.progress.json")
        self._paths = {f"{key}.{name}": Path(f"{p}.{name}.part") for key, p in prefixes.items() for name in APPENDED}
        self._paths[SKIPPED] = Path(f"{prefix}.skipped.jsonl")
        self.progress = Progress(sizes=dict.fromkeys(self._paths, 0), empty=dict.fromkeys(prefixes, 0))

    @property
    def skipped_path(self) -> str | None:
        """The file with the skipped lines; None if there are none."""
        return str(self._paths[SKIPPED]) if self.progress.counts["skipped"] else None

    @classmethod
    def signature_of(cls, prefix: str) -> dict | None:
        """The signature of an unfinished run."""
        return read_json(cls(prefix, {}, {})._state).get("signature")

    @classmethod
    @contextlib.contextmanager
    def open(cls, prefix: str, prefixes: dict[str, str], signature: dict) -> Iterator[Self]:
        """Start, or resume a run of the same signature. Creates the prefix's folder."""
        parts = cls(prefix, prefixes, signature)
        parts._check_outputs()
        Path(prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(f"{prefix}.lock").touch()  # FileLock reports a folder in which nothing can be made as a lock that is held
        lock = FileLock(f"{prefix}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"another run is writing {prefix}; change --output-prefix") from None
        try:
            parts._resume()
            for name, path in parts._paths.items():
                with open(path, "ab") as f:
                    f.truncate(parts.progress.sizes[name])
            yield parts
        finally:
            if not parts._state.exists():  # nothing was done, or everything
                parts._remove()
            # before the release, because FileLock cannot lock a file that is gone
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    def _check_outputs(self) -> None:
        """FileExistsError for a corpus of these names that we have no record of."""
        for prefix in () if self._state.exists() else self._prefixes.values():
            found = [path for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
            if found and not meta_path(prefix).exists():
                raise FileExistsError(f"{found[0]} is not from dfm text preprocess; move it, or choose another prefix")

    def _resume(self) -> None:
        """Load the progress of a run with the same signature, if there is one."""
        saved = read_json(self._state)
        if saved.get("signature") == self._signature:
            progress = Progress(**saved["progress"])
            progress.at = Position(*progress.at)
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
            self.write(f"{key}.{name}", array.tobytes())
        self.progress.empty[key] += int((counts == 0).sum())

    def write(self, name: str, data: bytes) -> None:
        """Append to the part file `name`; it counts only after `save`."""
        with open(self._paths[name], "ab") as f:
            f.write(data)
        self.progress.sizes[name] += len(data)

    def save(self) -> None:
        """Record `progress` as done."""
        # Not synced, unlike base.files.fsync_replace: it is called for every chunk, and a power cut loses only
        # work, which `_resume` notices.
        temporary = Path(f"{self._state}.tmp")
        temporary.write_text(json.dumps({"signature": self._signature, "progress": asdict(self.progress)}))
        os.replace(temporary, self._state)

    def finish(self, dtype: np.dtype, meta: dict | None) -> None:
        """Join the parts of the indices, then sync each file to disk and rename it to its final name, `.idx` last.

        `meta` None: the source of the tokens is unknown, and no `.meta.json` is written.
        """
        sizes = self.progress.sizes
        for key, prefix in self._prefixes.items():
            sequences, bounds = sizes[f"{key}.lengths"] // 4, sizes[f"{key}.documents"] // 8 + 1
            with open(f"{prefix}.idx.part", "wb") as f:
                f.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], sequences, bounds))
                for name in APPENDED[1:]:
                    with open(self._paths[f"{key}.{name}"], "rb") as part:
                        shutil.copyfileobj(part, f)
                f.write(struct.pack("<Q", sequences))  # the end of the last document
            sync(self._paths[f"{key}.bin"])
        for key, prefix in self._prefixes.items():
            for older in (idx_path(prefix), meta_path(prefix)):  # must not be used with the new tokens
                older.unlink(missing_ok=True)
            os.replace(self._paths[f"{key}.bin"], bin_path(prefix))
            if meta is not None:
                tokens = sizes[f"{key}.bin"] // dtype.itemsize
                own = {"key": key, "tokens": tokens, "empty_documents": self.progress.empty[key]}
                # not under a random name: the run that resumes after a kill writes to the same one
                Path(f"{prefix}.meta.part").write_text(json.dumps({**meta, **own}, indent=1))
                fsync_replace(Path(f"{prefix}.meta.part"), meta_path(prefix))
            fsync_replace(Path(f"{prefix}.idx.part"), idx_path(prefix))
        self._state.unlink(missing_ok=True)

    def _remove(self) -> None:
        ends = (Path(f"{p}.{kind}.part") for p in self._prefixes.values() for kind in ("idx", "meta"))
        for path in (*self._paths.values(), *ends, Path(f"{self._state}.tmp")):
            if str(path) != self.skipped_path:
                path.unlink(missing_ok=True)
