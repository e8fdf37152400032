"""Adopting third-party shards: add what is missing without changing the tars.

NeMo DFM's script writes only tars. Here each sample is read and measured once, unusable ones are counted and reported,
and the files that `dfm prepare` would have written are added: indexes, Energon's metadata, the empty caption, the
manifest, and the checksums last. After an intended change of a complete folder, `--reindex` writes only its indexes and
checksums again; its manifest stays.
"""

import itertools
import shlex
import tarfile
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import model_validator

from dfm_nb.base import plugins
from dfm_nb.base.files import Json, check_free, listed_as
from dfm_nb.base.geometry import LATENT_CHANNELS, PX_PER_LATENT, SIDE_MULTIPLE
from dfm_nb.base.log import log
from dfm_nb.base.options import option
from dfm_nb.base.records import SampleError
from dfm_nb.base.verb import Report, Verb
from dfm_nb.data import preparation, prepared_folder, shards
from dfm_nb.data.encoding import latent_sums
from dfm_nb.data.prepared_folder import CHECKSUMS, EMPTY_TEXT, PreparedFolder, write_manifest
from dfm_nb.data.sample_index import described, write_indexes


class AdoptOptions(Verb):
    """Add what is missing to a folder of third-party shards."""

    prog, logs = "dfm adopt", True

    folder: str = option(help="folder with .tar shards; they are not changed", positional=True)
    tokenizer: str | None = option(None, "of the latents: " + ", ".join(plugins.names("tokenizers")))
    text_encoder: str | None = option(None, "of the texts: " + ", ".join(plugins.names("text_encoders")))
    tokenizer_path: str | None = option(None, "its file or folder", flags=("--tokenizer-cache-dir",))
    text_encoder_path: str | None = option(
        None, "its folder; without it the empty caption is one token of zeros", flags=("--t5-cache-dir",)
    )
    val_fraction: float = option(0.0, "share of the samples for validation, in complete shards", ge=0, lt=1)
    allow_outside: bool = option(False, "also read tars outside the folder, by a link; they are then listed")
    device: str = option("cpu", "where the encoders run")
    reindex: bool = option(
        False, "after an intended change of a complete folder: its indexes and checksums again; the manifest stays"
    )

    @model_validator(mode="after")
    def _names_the_encoders(self) -> Self:
        if self.reindex and self.changed().keys() - {"folder", "reindex", "as_json"}:
            raise ValueError("--reindex takes all else from the folder's manifest; leave the other flags out")
        if not (self.reindex or (self.tokenizer and self.text_encoder)):
            raise ValueError("--tokenizer and --text-encoder must name what encoded the shards; give both")
        return self

    def run(self) -> Json:
        """The manifest."""
        if not self.reindex:
            return adopt(self)
        manifest = index_dataset(self.folder)
        log.info("The indexes and checksums of %s are written again", self.folder)
        return manifest

    def report(self, result: Json) -> Report:
        return Report(prepared_folder.summary(self.folder, result))


def adopt(options: AdoptOptions) -> Json:
    """Add to a folder of WebDataset shards the other files that training and generation need.

    Its tars hold samples `.pth` [1, 16, T, H, W], `.pickle` [1, L, D] and `.json`. Without paths of encoders nothing is
    fetched: the manifest has only their names, and the empty caption is one token of zeros, as NeMo DFM replaces
    dropped captions by zeros. An existing `.nv-meta` is kept with its own splits.

    Returns
    -------
    The manifest: counts, drops with reasons, statistics of the latents, shards with checksums.

    Raises
    ------
    ValueError, FileNotFoundError : wrong input; the message has the fix.
    """
    place = PreparedFolder(options.folder)
    tars = shards.find_shards(place.path, options.allow_outside)
    # WebDataset's writer leaves an empty one if the last tar was just full; Energon refuses them
    empty = [tar for tar in tars if tar.stat().st_size <= tarfile.RECORDSIZE and not shards.samples_of(tar)]
    if empty:
        log.warning("skipped %d tar(s) without samples, such as %s; remove them", len(empty), empty[0])
        tars = [tar for tar in tars if tar not in empty]
    if place.held_plan():
        fix = "it needs no adopting" if place.finished else "finish it with --resume"
        raise ValueError(f"{place.path} was made by dfm prepare: {fix}")
    ours = place.records.exists()  # of a run before, which a kill may have ended
    for name in (place.manifest.name, CHECKSUMS, EMPTY_TEXT):
        check_free(place.path / name, ours, "move it away")
    # a wrong path fails now, not after all tars were read
    tokenizer = _build("tokenizer", options, place)
    text_encoder = _build("text_encoder", options, place)
    about: dict[str, dict] = {
        "source": {"name": "adopted"},
        "tokenizer": tokenizer.identity() if tokenizer else {"name": options.tokenizer},
        "text_encoder": text_encoder.identity() if text_encoder else {"name": options.text_encoder},
    }
    with place.turn():
        splits = _splits(place.path, tars, options.val_fraction)
        survey = _Survey(place.path, splits)
        write_indexes(place.path, splits, survey)
        for record in survey.records.values():
            odd = next((drop["detail"] for drop in record.drops if drop["reason"] == "other_text_width"), None)
            if odd and not record.samples:
                what = f"{odd} as in the shards before it"
                raise ValueError(f"{place.path}: text embeddings must have one width; {what}; move such shards away")
        totals = preparation.ShardTotals(survey.records.values())
        if not totals.names["train"]:
            first = totals.drops.named[0]["detail"] if totals.drops.named else "its tars are empty"
            raise ValueError(f"{place.path}: no sample of the train split can be used; the first: {first}")
        if not shards.has_energon_metadata(place.path):
            shards.write_energon_metadata(place.path, splits)
        if hasattr(tokenizer, "save") and (options.tokenizer_path or not place.tokenizer.is_file()):
            tokenizer.save(place.tokenizer)
        _write_empty_caption(place.path, text_encoder, survey.text_dim)
        items = sum(totals.samples.values()) + totals.drops.reasons.total()
        empty_caption = "zeros" if text_encoder is None else "text encoder"
        manifest = totals.manifest(about, items, {"empty_caption": empty_caption})
        names = itertools.chain(*splits.values())
        write_manifest(place.path, manifest, {name: listed_as(place.path / name) for name in names})
    totals.warn()
    said = "one token of zeros, as in NeMo DFM" if text_encoder is None else "the text encoder's own"
    log.info("%d samples in %s; the empty caption is %s", manifest["counts"]["samples"], place.path, said)
    own = "" if manifest["counts"]["val"] else " dataset.use_train_split_for_val=true"
    log.info("Next: dfm pretrain --dataset-path %s%s", shlex.quote(str(place.path)), own)
    return manifest


def index_dataset(folder: str | Path) -> Json:
    """Write the indexes and checksums of a prepared or adopted folder that was changed on purpose.

    Returns
    -------
    The manifest.

    Raises
    ------
    ValueError : wrong input; the message has the fix.
    """
    place = PreparedFolder(folder)
    manifest = prepared_folder.read_manifest(place.path, checked=False)
    if manifest is None or not place.finished:
        fix = f"dfm prepare with --resume, or {shards.how_to_adopt(place.path)}"
        raise ValueError(f"{place.path} lacks manifest.json or checksums.json, so it is not finished; {fix}")
    # those that `dfm adopt` reported; a preparation puts no dropped sample into a tar
    unusable = {drop["key"] for drop in manifest["drops"]}
    with place.turn():
        splits = shards.splits_of(place.path)
        write_indexes(place.path, splits, lambda e: None if e.key in unusable else described(e))
        names = itertools.chain(*splits.values())
        prepared_folder.seal_folder(place.path, {n: listed_as(place.path / n) for n in names})
    return manifest


# ---- the encoders --------------------------------------------------------------------------------


def _build(kind: str, options: AdoptOptions, place: PreparedFolder) -> Any:
    """The plugin with its weights; None if no path was given and the package has no weights."""
    name = getattr(options, kind)
    path = getattr(options, f"{kind}_path")
    module = plugins.load(f"{kind}s", name)
    if kind == "tokenizer":
        beside = plugins.carried(name, place.path)
        path = path or beside
    if path is None and not any(getattr(module, mark, False) for mark in ("CARRIED", "BUNDLED")):
        return None
    plugin = module.build(path, device=options.device)
    if kind == "tokenizer":
        with torch.no_grad():
            plugin.encode(torch.zeros(1, 3, 1, 64, 64))
    return plugin


def _write_empty_caption(folder: Path, encoder: Any, text_dim: int) -> None:
    """text_empty.safetensors [1, L, D]."""
    zeros = torch.zeros(prepared_folder.NO_CAPTION_TOKENS, text_dim, dtype=torch.bfloat16)
    empty_LD = zeros if encoder is None else encoder.encode([""])[0]
    if empty_LD.shape[1] != text_dim:
        raise ValueError(
            f"{folder}: the text encoder must have made the embeddings: it gives {empty_LD.shape[1]} numbers a token "
            f"and the shards hold {text_dim}; name the one that made them with --text-encoder and its path"
        )
    prepared_folder.write_empty_text(folder, empty_LD)


# ---- measuring -----------------------------------------------------------------------------------


class _Survey:
    """Read every sample once, when the index needs its size, and record what a preparation records of its shards."""

    def __init__(self, folder: Path, splits: shards.Splits):
        self.text_dim = 0
        self.records = dict[Path, shards.ShardRecord]()
        for split, names in splits.items():
            for name in names:
                self.records[folder / name] = shards.ShardRecord(name=name, split=split)

    def __call__(self, entry: shards.SampleEntry) -> list[int] | None:
        """Latent T, H, W and text tokens; None if it cannot be used."""
        record = self.records[entry.shard]
        try:
            clip = entry.read(shards.Fits(LATENT_CHANNELS, self.text_dim or None))
            if any(side % (SIDE_MULTIPLE // PX_PER_LATENT) for side in clip.latent.shape[3:]):
                raise SampleError("odd_size", f"sample {clip.key}: latent {list(clip.latent.shape[2:])} has odd sides")
        except SampleError as error:
            detail = f"{record.name}: {error.detail}"
            record.drops.append({"key": entry.key, "shard": record.name, "reason": error.reason, "detail": detail})
            return None
        _, tokens, self.text_dim = clip.text_emb.shape
        record.samples += 1
        record.text_tokens += tokens
        record.latent_sums += latent_sums(clip.latent)
        return [*clip.latent.shape[2:], tokens]


# ---- splits --------------------------------------------------------------------------------------


def _splits(folder: Path, tars: list[Path], val_fraction: float) -> shards.Splits:
    """The shards of each split: those of `.nv-meta`; without it, the smallest ones for validation."""
    names = [tar.relative_to(folder).as_posix() for tar in tars]
    if shards.has_energon_metadata(folder):
        splits = shards.splits_of(folder)
        missing = sorted(set(names).difference(*splits.values()))
        if missing:
            log.warning(
                f"{folder}/.nv-meta leaves out {len(missing)} of the tars, which training will not see ({missing[0]} "
                "...); remove .nv-meta and give the command again to write it for all"
            )
        if val_fraction and not splits["val"]:
            raise ValueError(f"--val-fraction: {folder}/.nv-meta has no validation split; remove it to get one")
        return splits
    if val_fraction and len(tars) < 2:
        raise ValueError("--val-fraction takes complete shards and needs two or more; omit it and validate on train")
    size = {name: tar.stat().st_size for name, tar in zip(names, tars)}
    val = list[str]()
    for name in sorted(names, key=size.__getitem__)[:-1]:
        if sum(size[n] for n in val) < val_fraction * sum(size.values()):
            val.append(name)
    return {"train": [name for name in names if name not in val], "val": val, "test": []}
