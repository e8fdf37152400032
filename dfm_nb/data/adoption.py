"""Making shards that someone else wrote whole, without touching the tars.

NeMo DFM's script writes tars and nothing beside them. Here each sample is read once and measured, what cannot be used
is counted and named, and the files that `dfm prepare` would have written are added: Energon's metadata, the empty
caption, the manifest. What was measured of a shard is its record `.dfm/<shard>.json`, so a second call reads only tars
that are new or have changed; the manifest comes last.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from dfm_nb import __version__
from dfm_nb.base import plugins
from dfm_nb.base.files import read_json, sha256, write_atomically
from dfm_nb.base.geometry import LATENT_CHANNELS, PX_PER_LATENT, SIDE_MULTIPLE
from dfm_nb.base.log import log
from dfm_nb.base.progress import tqdm
from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.data import shards
from dfm_nb.data.encoding import latent_sums
from dfm_nb.data.index import write_indexes
from dfm_nb.data.preparation import FORMAT_VERSION, merged_statistics, warn_of_drops
from dfm_nb.data.prepared_folder import MANIFEST, PreparedFolder, fits, write_manifest
from dfm_nb.data.shard_plan import SPLITS
from dfm_nb.data.shards import shards_of
from dfm_nb.data.stores import NO_CAPTION_TOKENS

RECORD: dict[str, Any] = {name: int for name in ("items", "samples", "bytes", "mtime_ns", "text_tokens", "text_dim")}
RECORD |= {"sha256": str, "measured": {}, "latent_sums": [[float]], "drops": MANIFEST["drops"]}
"""What is read of a shard's record, by its types; one that has something else is made again."""


def adopt_dataset(
    folder: str | Path,
    tokenizer: str,
    text_encoder: str,
    tokenizer_path: str | None = None,
    text_encoder_path: str | None = None,
    val_fraction: float = 0.0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Add to a folder of WebDataset shards what training and generation need beside them.

    Parameters
    ----------
    folder : holds tars of samples `.pth` [1, 16, T, H, W], `.pickle` [1, L, D] and `.json`. They stay as they are.
    tokenizer, text_encoder : names of the plugins that made the latents and the text embeddings.
    tokenizer_path, text_encoder_path : their weights. Without them nothing is fetched: the manifest holds the name
        alone, and the empty caption is one token of zeros, as NeMo DFM drops captions.
    val_fraction : share of the samples to keep for validation, in whole shards; an existing `.nv-meta` is kept with
        its own splits.

    Returns
    -------
    The manifest: counts, what cannot be used and why, statistics of the latents, shards with checksums.

    Raises
    ------
    ValueError, FileNotFoundError : one sentence with what must hold and how to mend it.
    """
    place = PreparedFolder(folder)
    tars = shards.find_shards(place.path)
    if place.held_plan() is not None:
        fix = "it needs no adopting" if place.manifest.is_file() else "finish it with --resume"
        raise ValueError(f"{place.path} was made by dfm prepare: {fix}")
    if not 0 <= val_fraction < 1:
        raise ValueError(f"--val-fraction must be at least 0 and below 1; got {val_fraction}")
    wanted = {"tokenizer": (tokenizer, tokenizer_path), "text_encoder": (text_encoder, text_encoder_path)}
    # a wrong path shows now, not after all tars were read
    encoders = {kind: _build(f"{kind}s", *given, place, device) for kind, given in wanted.items()}
    with place.turn(), place.full_disk_explained():
        return _adopt(place, tars, wanted, encoders, val_fraction)


def _adopt(place: PreparedFolder, tars: list[Path], wanted: dict, encoders: dict, val_fraction: float) -> dict:
    records = _measure_all(place, tars)
    drops = [drop for record in records for drop in record["drops"]]
    if len(drops) == sum(record["items"] for record in records):
        first = drops[0]["detail"] if drops else "the tars are empty"
        raise ValueError(f"{place.path}: no sample can be used; the first: {first}")
    width = _text_width(records)
    if hasattr(encoders["tokenizer"], "save") and (wanted["tokenizer"][1] or not place.tokenizer.is_file()):
        encoders["tokenizer"].save(place.tokenizer)
    held = read_json(place.manifest) or {}
    about = {}
    for kind, (name, _) in wanted.items():
        known = held.get(kind, {}) if held.get(kind, {}).get("name") == name else {"name": name}
        about[kind] = encoders[kind].identity() if encoders[kind] is not None else known
    splits = _splits(place.path, records, val_fraction)
    train = [r for r in records if splits[r["name"]] == "train" and r["samples"]]
    if not train:
        raise ValueError(f"{place.path}: the train split of .nv-meta has no sample that can be used; remove .nv-meta")
    mean, std = merged_statistics(train)
    write_indexes(place.path, {r["name"]: r["sha256"] for r in records}, adopted=True, keep=True)
    same_encoder = held.get("text_encoder") == about["text_encoder"]
    manifest = {
        "format_version": FORMAT_VERSION,
        "dfm_nb": __version__,
        "source": {"name": "adopted"},
        **about,
        "latent_mean": mean,
        "latent_std": std,
        "counts": {
            "items": sum(r["items"] for r in records),
            "samples": sum(r["samples"] for r in records),
            "dropped": len(drops),
            **{part: sum(r["samples"] for r in records if splits[r["name"]] == part) for part in SPLITS},
            "dropped_by_reason": dict(Counter(d["reason"] for d in drops).most_common()),
            "text_tokens": sum(r["text_tokens"] for r in records),
        },
        "psnr_db": {},
        "drops": drops,
        "empty_caption": _write_empty_caption(
            place.path, encoders["text_encoder"], width, held.get("empty_caption") if same_encoder else None
        ),
        "shards": [
            {"split": splits[r["name"]], **{k: r[k] for k in ("name", "samples", "bytes", "sha256")}} for r in records
        ],
    }
    write_manifest(place.path, manifest)
    _report(manifest, place.path, {kind: plugin is not None for kind, plugin in encoders.items()})
    return manifest


# ---- the encoders -------------------------------------------------------------------------------------------------


def _build(kind: str, name: str, path: str | None, place: PreparedFolder, device: str) -> Any:
    """The plugin, with its weights seen to be there; None when they were not named and the package has none."""
    module = plugins.load(kind, name)
    carried = getattr(module, "CARRIED", False)
    if kind == "tokenizers" and place.tokenizer.is_file():
        if not carried:
            raise ValueError(f"{place.tokenizer} is not of the tokenizer {name}, which has its own files; remove it")
        path = path or str(place.tokenizer)
    if path is None and not carried and not getattr(module, "BUNDLED", False):
        return None
    plugin = module.build(path, device=device)
    if kind == "tokenizers":
        with torch.no_grad():
            plugin.encode(torch.zeros(1, 3, 1, 64, 64))
    return plugin


def _write_empty_caption(folder: Path, encoder: Any, width: int, held: str | None) -> str:
    """text_empty.safetensors [1, L, D]; returns where it is from. held : where the one that is there is from."""
    path = folder / "text_empty.safetensors"
    if encoder is None and held and path.is_file():
        return held
    empty = torch.zeros(NO_CAPTION_TOKENS, width, dtype=torch.bfloat16) if encoder is None else encoder.encode([""])[0]
    if empty.shape[1] != width:
        raise ValueError(
            f"{folder}: the text encoder must have made the embeddings: it gives {empty.shape[1]} numbers a token and "
            f"the shards hold {width}; name the one that made them with --text-encoder and its path"
        )
    data = save({"text_emb": empty[None].contiguous()})
    if not path.is_file() or path.read_bytes() != data:
        write_atomically(path, data)
    return "zeros" if encoder is None else "text encoder"


# ---- measuring ----------------------------------------------------------------------------------------------------


def _measure_all(place: PreparedFolder, tars: list[Path]) -> list[dict]:
    """A record for each tar; those that are known are not read again."""
    sizes = {tar: tar.stat().st_size for tar in tars}
    records = []
    with tqdm(total=sum(sizes.values()), desc="adopt", unit="B", unit_scale=True) as bar:
        for tar in tars:
            name = tar.relative_to(place.path).as_posix()
            record, end = read_json(shards.record_path(place.path, name)) or {}, bar.n + sizes[tar]
            now = [sizes[tar], tar.stat().st_mtime_ns]
            if not fits(record, RECORD) or [record["bytes"], record["mtime_ns"]] != now:
                record = {**_measure(tar, name, bar), "bytes": now[0], "mtime_ns": now[1]}
                path = shards.record_path(place.path, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(record).encode())
            bar.update(end - bar.n)
            records.append(record)
    return records


def _measure(tar: Path, name: str, bar: Any) -> dict:
    """What a preparation notes of its own shards, and the size and true text length of each sample."""
    sums, measured, drops = np.zeros((3, LATENT_CHANNELS)), {}, []
    text_tokens, width = 0, None
    entries = shards.scan_shard(tar)
    for entry in entries:
        bar.update(sum(size for _, size in entry.parts.values()))
        try:
            clip = entry.read(shards.Fits(LATENT_CHANNELS, width))
            _check_sides(clip)
        except SampleError as error:
            drops.append({"key": entry.key, "shard": name, "reason": error.reason, "detail": f"{name}: {error.detail}"})
            continue
        _, tokens, width = clip.text_emb.shape
        measured[entry.key] = [*clip.latent.shape[2:], tokens]
        sums += latent_sums(clip.latent)
        text_tokens += tokens
    return {
        "name": name,
        "items": len(entries),
        "samples": len(measured),
        "sha256": sha256(tar),
        "drops": drops,
        "latent_sums": sums.tolist(),
        "text_tokens": text_tokens,
        "text_dim": width or 0,
        "measured": measured,  # latent T, H, W and text tokens by key
    }


def _check_sides(clip: EncodedClip) -> None:
    if any(side % (SIDE_MULTIPLE // PX_PER_LATENT) for side in clip.latent.shape[3:]):
        raise SampleError("odd_size", f"sample {clip.key}: latent {list(clip.latent.shape[2:])} has odd sides")


def _text_width(records: list[dict]) -> int:
    """The one width of all embeddings."""
    widths = {r["text_dim"]: r["name"] for r in records if r["samples"]}
    if len(widths) > 1:
        listed = " and ".join(f"{width} in {name}" for width, name in widths.items())
        raise ValueError(f"all text embeddings must have one width; there is {listed}: move the shards of one away")
    return next(iter(widths))


# ---- splits -------------------------------------------------------------------------------------------------------


def _splits(folder: Path, records: list[dict], val_fraction: float) -> dict[str, str | None]:
    """The split of each shard, None for those that `.nv-meta` leaves out; writes `.nv-meta` when it is not there."""
    if not shards.has_energon_metadata(folder):
        val = _validation_shards(records, val_fraction)
        names = [r["name"] for r in records]
        shards.write_energon_metadata(folder, {"train": [n for n in names if n not in val], "val": val, "test": []})
    found: dict[str, str | None] = {r["name"]: None for r in records}
    found |= {shard.name: part for part in SPLITS for shard in shards_of(folder, part)}
    if missing := [r["name"] for r in records if found[r["name"]] is None]:
        log.warning(
            "%s/.nv-meta leaves out %d of the tars, which training will not see (%s ...); remove .nv-meta and give "
            "the command again to have it made for all",
            *(folder, len(missing), missing[0]),
        )
    if val_fraction and "val" not in found.values():
        raise ValueError(f"--val-fraction: {folder}/.nv-meta has no validation split; remove it to have one made")
    return found


def _validation_shards(records: list[dict], fraction: float) -> list[str]:
    """The smallest shards, up to about this share of the samples: Energon splits by shard."""
    if not fraction:
        return []
    if len(records) < 2:
        raise ValueError("--val-fraction takes whole shards and needs two or more; leave it out and validate on train")
    chosen, samples, total = [], 0, sum(r["samples"] for r in records)
    for record in sorted(records, key=lambda r: r["samples"])[:-1]:
        if samples >= fraction * total:
            break
        chosen.append(record["name"])
        samples += record["samples"]
    return chosen


# ---- what is said -------------------------------------------------------------------------------------------------


def _report(manifest: dict, folder: Path, loaded: dict[str, bool]) -> None:
    warn_of_drops(manifest)
    counts = manifest["counts"]
    for kind, here in loaded.items():
        if not here and len(manifest[kind]) == 1:
            word = kind.replace("_", " ")
            log.info("The %s is known by its name, %s: its weights were not named", word, manifest[kind]["name"])
    zeros = manifest["empty_caption"] == "zeros"
    log.info("The empty caption is %s", "one token of zeros, as in NeMo DFM" if zeros else "the text encoder's own")
    log.info("%d samples in %d shards: %s", counts["samples"], len(manifest["shards"]), folder)
    own = "" if counts["val"] else " dataset.use_train_split_for_val=true"
    log.info("Next: dfm pretrain --dataset-path %s%s", folder, own)
