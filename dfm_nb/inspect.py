"""`dfm inspect DIR`: what a folder of shards holds, whether it is intact, and how it looks; also for shards from elsewhere.

Leaves: a table (or `--json`), a contact sheet of decoded latents with captions, and with `--verify` exit code 1 when something is wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from dfm_nb import plugins, shards, video
from dfm_nb.argv import ArgumentParser, guard
from dfm_nb.records import SampleError


def parse(argv: list[str] | None):
    p = ArgumentParser(prog="dfm inspect", description="Show and check a folder of shards.")
    p.add_argument("folder")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    p.add_argument("--verify", action="store_true", help="decode every sample and recheck every checksum")
    p.add_argument(
        "--contact-sheet", help="PNG to write; default contact_sheet.png in the folder, when latents can be decoded"
    )
    p.add_argument("--samples", type=int, default=24, help="pictures on the contact sheet")
    p.add_argument("--tokenizer-path", help="tokenizer file or folder, when it is not beside the shards")
    return p.parse_args(argv)


def describe(folder: Path) -> dict:
    """Counts, sizes, captions and token statistics from headers and .json parts."""
    tars = sorted(folder.glob("*.tar")) if folder.is_dir() else []
    if not tars:
        raise FileNotFoundError(f"{folder} holds no .tar shards; name a folder that dfm prepare or another writer made")
    entries = [e for tar in tars for e in shards.scan_shard(tar)]
    manifest_path = folder / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.is_file() else None
    sizes = Counter(
        f"{e.meta.get('num_frames', '?')}x{e.meta.get('image_height', '?')}x{e.meta.get('image_width', '?')}"
        for e in entries
    )
    text = [e.meta["text_tokens"] for e in entries if "text_tokens" in e.meta]
    out: dict = {
        "folder": str(folder), "shards": len(tars), "samples": len(entries), "bytes": sum(t.stat().st_size for t in tars),
        "sizes": dict(sizes.most_common(12)), "parts": dict(Counter("+".join(sorted(e.parts)) for e in entries)),
        "duplicate_keys": [k for k, n in Counter(e.key for e in entries).items() if n > 1][:10],
    }  # fmt: skip
    if text:
        out["text_tokens"] = {"min": min(text), "median": int(np.median(text)), "max": max(text)}
    if manifest:
        out |= {k: manifest[k] for k in ("source", "tokenizer", "text_encoder", "counts", "psnr_db")}
        out["drops"] = manifest["drops"][:20]
    return out


def verify(folder: Path, progress: bool = True) -> list[str]:
    """Faults, each a sentence: checksums against the manifest, and every sample decoded."""
    faults = []
    manifest_path = folder / "manifest.json"
    if manifest_path.is_file():
        manifest = json.loads(manifest_path.read_text())
        listed = {s["name"]: s for s in manifest["shards"]}
        for name, s in listed.items():
            path = folder / name
            if not path.is_file():
                faults.append(f"{name} is in the manifest but not in the folder")
            elif path.stat().st_size != s["bytes"]:
                faults.append(f"{name} has {path.stat().st_size} bytes instead of {s['bytes']}")
            elif shards.sha256(path) != s["sha256"]:
                faults.append(f"the content of {name} does not match its checksum")
        faults += [f"{t.name} is not in the manifest" for t in sorted(folder.glob("*.tar")) if t.name not in listed]
    for tar in tqdm(sorted(folder.glob("*.tar")), "verify", unit="shard", disable=not progress):
        try:
            entries = shards.scan_shard(tar)
        except ValueError as error:
            faults.append(str(error))
            continue
        for entry in entries:
            try:
                clip = entry.read()
                if not (torch.isfinite(clip.latent.float()).all() and torch.isfinite(clip.text_emb.float()).all()):
                    faults.append(f"{tar.name}: sample {entry.key} holds NaN or Inf")
            except SampleError as error:
                faults.append(f"{tar.name}: {error.detail}")
    return faults


def sheet(folder: Path, count: int, tokenizer_path: str | None) -> np.ndarray | None:
    """Decoded latents with captions, evenly over the folder; None when the tokenizer is unknown."""
    manifest_path = folder / "manifest.json"
    name = json.loads(manifest_path.read_text())["tokenizer"]["name"] if manifest_path.is_file() else "pca"
    path = tokenizer_path or (folder if (folder / "tokenizer.safetensors").is_file() else None)
    if path is None and name == "pca":
        return None
    tokenizer = plugins.load("tokenizers", name).build(path)
    entries = [e for tar in sorted(folder.glob("*.tar")) for e in shards.scan_shard(tar)]
    chosen = [entries[i * len(entries) // min(count, len(entries))] for i in range(min(count, len(entries)))]
    videos, captions = [], []
    for entry in chosen:
        try:
            clip = entry.read()
        except SampleError:
            continue
        with torch.no_grad():
            pixels = tokenizer.decode(clip.latent.float())[0].clamp(-1, 1)
        videos.append(((pixels + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy())
        captions.append(str(clip.meta.get("caption", entry.key)))
    return video.contact_sheet(videos, captions) if videos else None


def table(d: dict) -> str:
    lines = [f"{d['folder']}: {d['samples']:,} samples in {d['shards']} shards, {d['bytes'] / 2**20:.1f} MiB"]
    lines.append("  frames x height x width: " + ", ".join(f"{k} ({n})" for k, n in d["sizes"].items()))
    lines.append("  parts: " + ", ".join(f"{k} ({n})" for k, n in d["parts"].items()))
    if "text_tokens" in d:
        t = d["text_tokens"]
        lines.append(f"  text tokens: {t['min']} to {t['max']}, median {t['median']}")
    if "counts" in d:
        c = d["counts"]
        lines.append(f"  splits: train {c['train']}, val {c['val']}, test {c['test']}; dropped {c['dropped']}")
        lines += [f"    {reason}: {n}" for reason, n in c["dropped_by_reason"].items()]
        lines.append(
            f"  source {d['source']['name']}, tokenizer {d['tokenizer']['name']}, text encoder {d['text_encoder']['name']}"
        )
        psnr = ", ".join(f"{k} {v:.1f} dB" for k, v in d["psnr_db"].items() if k != "split")
        lines.append(f"  tokenizer PSNR on {d['psnr_db']['split']}: {psnr}")
    if d["duplicate_keys"]:
        lines.append("  keys that occur more than once: " + ", ".join(d["duplicate_keys"]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    folder = Path(args.folder).expanduser()
    found = describe(folder)
    if args.verify:
        found["faults"] = verify(folder, progress=not args.json)
    picture = sheet(folder, args.samples, args.tokenizer_path)
    if picture is not None:
        target = Path(args.contact_sheet) if args.contact_sheet else folder / "contact_sheet.png"
        video.write_png(target, picture)
        found["contact_sheet"] = str(target)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(table(found))
        for fault in found.get("faults", []):
            print(f"  FAULT: {fault}")
        if args.verify and not found["faults"]:
            print("  verified: every checksum and every sample is good")
        print(
            f"  contact sheet: {found['contact_sheet']}"
            if picture is not None
            else "  no contact sheet: the tokenizer is unknown"
        )
    return 1 if found.get("faults") else 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
