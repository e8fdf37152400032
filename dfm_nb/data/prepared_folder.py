"""The folder that a preparation writes: which preparation it belongs to, whether it is finished, and its lock.

A folder with other files is never written into; only one preparation at a time writes into a folder.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from dfm_nb.base import files
from dfm_nb.base.files import (
    CHECKSUMS,
    Json,
    local,
    plain,
    read_json,
    remove_temporaries,
    subfolder,
    unlinked,
    write_atomically,
    write_json,
)
from dfm_nb.base.run import turn
from dfm_nb.data import shards
from dfm_nb.data.shard_plan import Layout
from dfm_nb.data.shards import SPLITS, Form

FORMAT_VERSION = 2
"""Version of manifest, checksums and index."""

TOKENIZER = "tokenizer.safetensors"
EMPTY_TEXT = "text_empty.safetensors"
# one zero token replaces the empty caption of encoders that are not available
NO_CAPTION_TOKENS = 1
INDEX = ".index.arrow"
"""Suffix of a split's index (`dfm_nb.data.sample_index`)."""

_INDEXES = [f"{split}{INDEX}" for split in SPLITS]
OWN_FILES = (CHECKSUMS, "manifest.json", TOKENIZER, EMPTY_TEXT, *_INDEXES, *shards.NV_META)
"""Files that a preparation writes next to the shards; without the first two the folder is unfinished."""

ALSO_LISTED = ("manifest.json", TOKENIZER, EMPTY_TEXT, *_INDEXES, ".nv-meta/split.yaml")
"""Other files that `CHECKSUMS` lists if they exist: what readers use, and the members of each split."""

MEND = "restore it; if you changed it on purpose, run `dfm adopt {} --reindex`"

Finite = Annotated[float, Field(gt=-1e38, lt=1e38)]


class Statistics(Form):
    """Of the latents, by channel."""

    latent_mean: Annotated[list[Finite], Field(min_length=1)]
    latent_std: list[Annotated[Finite, Field(ge=0)]]

    @model_validator(mode="after")
    def _are_of_one_length(self) -> Self:
        if len(self.latent_mean) != len(self.latent_std):
            raise ValueError("latent_mean and latent_std must have one length")
        return self


class Named(Form):
    name: str


class Encoded(Statistics):
    """A manifest beside weights."""

    tokenizer: Named
    text_encoder: Named


class Drop(Form):
    key: str
    reason: str


class Counts(Form):
    train: int
    val: int
    test: int
    dropped: int
    dropped_by_reason: dict[str, int]
    lost_by_reason: dict[str, int] = {}


class Shard(Named):
    split: str


class Manifest(Encoded):
    """A manifest beside shards."""

    source: Named
    counts: Counts
    psnr_db: dict
    drops: list[Drop]
    lost: list[Drop] = []
    captions_from: list[str] = []
    shards: list[Shard] = []


_SHARD = re.compile(r"rank\d+-\d{6,}\.tar")


def write_manifest(folder: Path, manifest: Json, tars: Mapping[str, Json]) -> None:
    """Write `manifest.json`, then the checksums, which mark the folder as finished. tars : see `seal_folder`."""
    # the name of a folder may be no UTF-8: JSON then has its bytes as \udcXX
    text = json.dumps({"format_version": FORMAT_VERSION, **manifest}, indent=1, ensure_ascii=False)
    write_atomically(folder / "manifest.json", text.encode("utf-8", "backslashreplace"))
    seal_folder(folder, tars)


def seal_folder(folder: Path, tars: Mapping[str, Json]) -> None:
    """Write the checksums of the shards and the files next to them. tars : `files.listed_as` of each."""
    own = {name: files.listed_as(folder / name) for name in ALSO_LISTED if (folder / name).is_file()}
    files.seal(folder / CHECKSUMS, {**own, **tars})


def read_checksums(folder: Path) -> dict[str, Json]:
    """The checksums that `seal_folder` wrote; FileNotFoundError if there are none."""
    if (folder / CHECKSUMS).is_file():
        return files.read_listing(folder / CHECKSUMS)
    raise FileNotFoundError(
        f"{folder} is not a finished data set: {CHECKSUMS} is missing; make one with `dfm prepare "
        f"--output-dir {folder}`; if it has shards of another tool, {shards.how_to_adopt(folder)}"
    )


def summary(folder: str, manifest: Json) -> Json:
    """The folder, its number of samples, and the dropped ones with reasons."""
    return {"folder": os.path.expanduser(folder), "counts": manifest["counts"], "drops": manifest["drops"]}


def psnr_lines(psnr_db: Json) -> list[str]:
    """A line with the tokenizer's PSNR on held-out samples, and one with the worst samples; [] if none was measured."""
    lines = []
    parts = {f"tokenizer PSNR on {psnr_db.get('split')}": psnr_db}
    parts[f"worst of {psnr_db.get('measured')}"] = psnr_db.get("worst", {})
    for name, values in parts.items():
        pairs = values.items() if isinstance(values, dict) else ()
        said = ", ".join(f"{key} {db:.1f} dB" for key, db in pairs if isinstance(db, float))
        if said:
            lines.append(f"{name}: {said}")
    return lines


def sizes_line(sizes: Mapping[str, int]) -> str:
    """Frames, height and width of all samples, the most frequent first: `1x64x64 (280), 17x64x96 (14)`."""
    return ", ".join(f"{size} ({n:,})" for size, n in sorted(sizes.items(), key=lambda item: -item[1]))


def kinds_line(sizes: Mapping[str, int]) -> str:
    """`280 images, 14 clips`."""
    images = clips = 0
    for size, count in sizes.items():
        if size.startswith("1x"):
            images += count
        elif not size.startswith("?"):  # third-party shards may not say
            clips += count
    return f"{images:,} images, {clips:,} clips"


def read_manifest(folder: Path, checked: bool = True) -> Json | None:
    """`manifest.json`; None if there is none.

    Parameters
    ----------
    checked : it and the other small files must match their checksums.

    Raises
    ------
    ValueError, FileNotFoundError : they do not, or it has no finite statistics.
    """
    path = folder / "manifest.json"
    here = path.is_file()
    if checked and (here or (folder / CHECKSUMS).is_file()):
        listed = read_checksums(folder)
        names = {name for name in (path.name, TOKENIZER, EMPTY_TEXT) if os.path.lexists(folder / name)}
        names |= {name for name in listed if not name.endswith((".tar", INDEX))}
        files.check(folder, listed, sorted(names), MEND.format(folder))
    manifest = read_json(path)
    fault = Manifest.fault(manifest) if here else ""
    if fault:
        raise ValueError(f"{path} is damaged ({fault}); prepare or adopt the data again")
    return manifest or None


class PreparedFolder:
    """See the module. `plan` : the settings that must be equal for a folder to belong to a preparation."""

    def __init__(self, path: str | Path):
        self.path = local(path)
        self.records = self.path / shards.RECORDS
        self.plan_file = self.records / "plan.json"
        self.manifest = self.path / "manifest.json"
        self.tokenizer = self.path / TOKENIZER

    def held_plan(self) -> Json:
        """The plan of the folder's preparation, finished or not; {} if there is none."""
        held = read_json(self.plan_file)
        held.pop("layout", None)
        return held or read_json(self.manifest).get("plan", {})

    def layout(self) -> Layout | None:
        """The shards of a folder that grew."""
        return read_json(self.plan_file).get("layout")

    @property
    def finished(self) -> bool:
        return self.manifest.is_file() and (self.path / CHECKSUMS).is_file()

    def grows(self, plan: Json) -> bool:
        """Whether the source of the finished preparation has other items, and all else is equal."""
        held = self.held_plan()
        # not the checksums, which are removed before a kill may come
        if not held or read_json(self.manifest).get("plan") != held:
            return False
        equal = _without(held, OF_ITEMS, LISTED) == _without(plan, OF_ITEMS, LISTED)
        return equal and _without(held, OF_ITEMS, SOURCE_CAPTIONS) != _without(plan, OF_ITEMS, SOURCE_CAPTIONS)

    def check(self, plan: Json, resume: bool, overwrite: bool, texts_only: bool = False) -> bool:
        """Whether the folder already has the finished preparation; raises if it must not be written into.

        texts_only : captions may differ, and are always encoded.
        """
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"--output-dir {self.path} is a file; choose a folder")
        held = self.held_plan()
        if not held:
            if texts_only:
                raise ValueError(f"--texts-only needs a preparation, and {self.path} has none; omit it")
            # A notebook's launcher may log into the folder. With --overwrite any other file is
            # refused, because the user may mean another folder.
            own = {shards.RECORDS, "launch.json", "launch.log", ".launch.lock"}
            there = {p.name for p in self.path.glob("*")} - own
            made = {n for n in there if n in (".nv-meta", *OWN_FILES) or n.endswith((".tar", INDEX))}
            others = there if overwrite else made
            if others:
                raise FileExistsError(
                    f"{self.path} holds {min(others)}, which dfm prepare did not make; choose another --output-dir or "
                    "move it away (to train on shards as they are: dfm adopt)"
                )
            return False
        if overwrite or (not texts_only and self.grows(plan)):
            return False
        more = _differences(_without(held, OF_CAPTIONS, SOURCE_CAPTIONS), _without(plan, OF_CAPTIONS, SOURCE_CAPTIONS))
        differ = more if texts_only else _differences(held, plan)
        if differ:
            fix = "choose another --output-dir or pass --overwrite"
            if not more:
                fix = f"pass --texts-only, as captions alone differ, or {fix}"
            raise FileExistsError(f"{self.path} already holds another data set ({differ}); {fix}")
        if not (self.finished or resume or texts_only):
            raise FileExistsError(f"{self.path} is unfinished; pass --resume to continue or --overwrite to start again")
        return self.finished and not texts_only

    def claim(
        self,
        plan: Json,
        resume: bool,
        overwrite: bool,
        texts_only: bool = False,
        grown: Callable[[], Layout] | None = None,
    ) -> bool:
        """`check`, then mark the folder as ours; True if nothing is left to do. The caller holds its `turn`.

        grown : gives the shards, if the source has grown.
        """
        if self.check(plan, resume, overwrite, texts_only):
            return True
        if overwrite:
            self.clear()
        layout = grown() if grown and not texts_only and self.grows(plan) else self.layout()
        for place in (self.path, self.records, self.path / ".nv-meta"):
            remove_temporaries(place)
        if layout:
            plan = {**plan, "layout": layout}
        # unfinished until the new captions or samples are written
        (self.path / CHECKSUMS).unlink(missing_ok=True)
        write_json(self.plan_file, plan)
        return False

    def clear(self) -> None:
        """Delete the files that the records list, then the records; the lock stays, because we hold it."""
        records = list(self.records.glob("*.json"))
        listed = {path.name.removesuffix(".json") for path in records}
        manifest = read_json(self.manifest)
        if not Manifest.fault(manifest):  # the folder was copied without its records
            listed |= {shard["name"] for shard in manifest.get("shards", ())}
        names = [name for name in listed if _SHARD.fullmatch(name)]
        for name in (*OWN_FILES, *names, *(f"{name}.idx" for name in names)):
            (self.path / name).unlink(missing_ok=True)
        for path in records:
            path.unlink()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lock the folder, after waiting for another preparation; does nothing on a file system without locks."""
        self.path.mkdir(parents=True, exist_ok=True)
        unlinked(self.path / ".nv-meta")
        subfolder(self.path, shards.RECORDS)
        with turn(self.records / "lock", f"another process is writing to {self.path}"):
            yield

    def agree_on_encoders(self, identities: dict[str, dict]) -> None:
        """The encoders must be those that the preparation began with; `identities` are by kind."""
        path = self.records / "encoders.json"
        now = json.loads(json.dumps(identities))
        held = read_json(path) or {k: v for k, v in read_json(self.manifest).items() if k in now}
        if not held:
            write_json(path, now)
            return
        differ = _differences(held, now)
        if differ:
            raise ValueError(f"{self.path} was started with other encoders ({differ}); pass the same or --overwrite")


LISTED = (
    "files rows listing_sha256 contents_sha256 captions_sha256 splits splits_sha256 weights_sha256 given_sha256"
).split()
"""What a source's identity says of its items."""
SOURCE_CAPTIONS = "caption_column caption_lines captions_sha256".split()
"""What it says of their captions."""
OF_ITEMS = ("copies", "edits")
OF_CAPTIONS = ("edits", "tag_captions", "texts")
"""Settings that follow from items, and that only change captions."""

OF_SAMPLES = "format short_side fit upscale max_text_tokens pad_text_tokens background clip_frames fps stride".split()
"""Settings, of the plan and of its source, that latents and embeddings depend on, besides the encoders."""


def of_latents(encoder: Json) -> Json:
    """An encoder's identity; that of a tokenizer with a tuned decoder is that of the one with the same latents."""
    own = {**encoder}
    latents = own.pop("latents", None)
    return own | {"sha256": latents} if latents else own


def check_reuse(folder: PreparedFolder, plan: Json, encoders: Json) -> None:
    """ValueError if the samples of a folder are not those that this plan and these encoders would give."""
    made = folder.held_plan()
    about = read_json(folder.manifest)
    if not (made and folder.finished):
        raise ValueError(f"--reuse {folder.path} must be a finished data set; pass an --output-dir of dfm prepare")

    def settings(of: Json, by: Json) -> Json:
        said = of["source"] | of
        own = {name: said.get(name) for name in OF_SAMPLES}
        return own | {kind: of_latents(by.get(kind) or {}) for kind in encoders}

    differ = _differences(settings(made, about), json.loads(json.dumps(settings(plan, encoders))))
    if differ:
        raise ValueError(f"--reuse {folder.path} must have equal settings ({differ}); omit --reuse or pass the same")


def _without(plan: Json, settings: Sequence[str], of_source: Sequence[str]) -> Json:
    """A plan without some settings, and without something that its source says."""
    source = {name: value for name, value in plan.get("source", {}).items() if name not in of_source}
    return {name: value for name, value in plan.items() if name not in settings} | {"source": source}


def _differences(held: Json, now: Json, inside: str = "") -> str:
    """The first four settings that differ, those of an object by `name.setting`."""
    differ = []
    for name in sorted(now.keys() | held.keys()):
        a = held.get(name)
        b = now.get(name)
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            differ.append(_differences(a, b, f"{inside}{name}."))
        elif a != b:
            differ.append(f"{inside}{name}: {json.dumps(a)[:80]} there, {json.dumps(b)[:80]} now")
    return "; ".join(differ[:4])


def write_empty_text(root: Path, text_LD: torch.Tensor) -> None:
    """Store the embedding of the empty caption."""
    write_atomically(root / EMPTY_TEXT, save({"text_emb": text_LD[None].contiguous()}))


def read_empty_text(root: Path, text_dim: int | None = None) -> torch.Tensor:
    """The stored embedding [L, D] of the empty caption; one zero token of `text_dim` if the folder has none.

    Raises
    ------
    ValueError : the file is damaged, of another width than `text_dim`, or missing while that is None.
    """
    path = root / EMPTY_TEXT
    if text_dim and not path.is_file():
        return torch.zeros(NO_CAPTION_TOKENS, text_dim, dtype=torch.bfloat16)
    try:
        text = load_file(plain(path))["text_emb"]
        finite = text.is_floating_point() and text.float().isfinite().all()
        if text.ndim != 3 or 0 in text.shape or not finite:
            raise ValueError("it must be finite numbers [1, L, D]")
        if text_dim not in (None, text.shape[2]):
            raise ValueError(f"it is {text.shape[2]} wide, the captions {text_dim}")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}); restore it") from None
    return text[0]
