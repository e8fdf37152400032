"""`dfm inspect DIR`: what a folder of shards contains, whether it is intact, and how it looks.

Third-party shards work too: tars of `.pth`, `.pickle` and `.json` samples. No code from the data is run, and only the
contact sheet is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dfm_nb.base import video
from dfm_nb.base.files import MARK, UNWRITABLE, check_free
from dfm_nb.base.options import option
from dfm_nb.base.verb import FileVerb, Report
from dfm_nb.data.inspection import InspectedShards
from dfm_nb.data.prepared_folder import CHECKSUMS, DROPS, REASONS, fits, kinds_line, psnr_lines, sizes_line
from dfm_nb.data.shards import how_to_adopt


class InspectOptions(FileVerb):
    """Show and check a folder of shards, or one shard."""

    prog = "dfm inspect"
    folder: str = option(help="folder, or a .tar", positional=True)
    verify: bool = option(False, "decode every sample and recheck every checksum")
    contact_sheet: str | None = option(None, "PNG to write; default contact_sheet.png in the folder", output=True)
    samples: int = option(24, "pictures on the contact sheet; 0 for none", ge=0)
    tokenizer: str | None = option(None, "tokenizer that decodes the latents, for shards without a manifest")
    tokenizer_path: str | None = option(None, "its file or folder", flags=("--tokenizer-cache-dir",))

    def run(self) -> Inspection:
        found = InspectedShards(Path(self.folder).expanduser(), progress=not self.as_json)
        about = Inspection(found.describe(), verified=self.verify)
        faults = found.faults + (found.verify() if self.verify else [])
        if self.verify or faults:
            about["faults"] = faults
        about["contact_sheet"] = _draw(self, found)
        return about

    def report(self, result: Inspection) -> Report:
        return Report(result, repr(result), int(bool(result.get("faults"))))


main = InspectOptions.main


class Inspection(dict):
    """Counts, sizes, statistics and `faults`; shown as the table of `dfm inspect`."""

    def __repr__(self) -> str:
        return table(self)


def figures(d: dict[str, Any]) -> dict[str, str]:
    """Sizes, captions and splits in words."""
    found = {"kinds": kinds_line(d["sizes"]), "frames x height x width": sizes_line(d["sizes"])}
    found["different captions"] = f"{d['captions']:,}"
    if d["given"]:
        found["with given pictures"] = f"{d['given']:,}"
    if "text_tokens" in d:
        found["text tokens"] = "{min} to {max}, median {median}".format(**d["text_tokens"])
    if "counts" in d:
        found["splits"] = "train {train}, val {val}, test {test}; dropped {dropped}".format(**d["counts"])
    return found


def _named(counts: dict[str, int], samples: list[dict[str, str]]) -> Iterator[str]:
    """A line for each reason, with the first keys that have it."""
    for reason, n in counts.items():
        keys = [sample["key"] for sample in samples if sample["reason"] == reason][:3]
        yield f"    {reason}: {n} ({', '.join(keys)}{f' and {n - 3} more' if n > 3 else ''})"


def table(d: dict[str, Any]) -> str:
    """The findings, one per line."""
    lines = [f"{d['folder']}: {d['samples']:,} samples in {d['shards']} shards, {d['bytes'] / 2**20:.1f} MiB"]
    lines.append("  parts: " + ", ".join(f"{k or 'none of ours'} ({n})" for k, n in d["parts"].items()))
    lines += [f"  {name}: {text}" for name, text in figures(d).items()]
    if "counts" in d:
        lines += _named(d["counts"]["dropped_by_reason"], d["drops"])
        lost = d["counts"].get("lost_by_reason")
        if lost and fits(lost, REASONS) and fits(d["lost"], DROPS):
            lines += ["  used but incomplete:", *_named(lost, d["lost"])]
        origins = d.get("captions_from")
        if origins and fits(origins, [str]):
            lines.append("  captions: " + "; ".join(origins))
        named = (f"{k.replace('_', ' ')} {d[k]['name']}" for k in ("source", "tokenizer", "text_encoder"))
        lines.append("  " + ", ".join(named))
        lines += [f"  {line}" for line in psnr_lines(d["psnr_db"])]
    else:
        lines.append(f"  no manifest.json, so encoders and statistics are unknown: {how_to_adopt(d['folder'])}")
    if d["duplicate_keys"]:
        lines.append("  keys that occur more than once: " + ", ".join(d["duplicate_keys"]))
    lines += [f"  FAULT: {fault}" for fault in d.get("faults", ())]
    if d["verified"] and not d["faults"]:
        lines.append("  verified: every checksum and every sample is good")
    lines.append(f"  contact sheet: {d['contact_sheet']}")
    return "\n".join(lines)


def inspect_dataset(folder: str | os.PathLike, **flags: Any) -> Inspection:
    """The content of a folder of shards, or of one shard. With `verify=True`, `faults` covers every sample.

    Parameters
    ----------
    **flags : the flags of `dfm inspect` with underscores (`verify`, `samples`, `contact_sheet`, `tokenizer`, ...).

    >>> inspect_dataset("data", verify=True, samples=0)  # doctest: +SKIP
    """
    return InspectOptions(folder=os.fspath(folder), **flags).run()


def _draw(asked: InspectOptions, found: InspectedShards) -> str:
    """Write the contact sheet; returns its path, or the reason why there is none."""
    if not asked.samples or not found.entries:
        return "none"
    why = "the tokenizer is unknown: see --tokenizer and --tokenizer-path"
    try:
        tokenizer = found.tokenizer(asked.tokenizer, asked.tokenizer_path)
    except FileNotFoundError as error:  # its weights are not on this machine
        if asked.tokenizer or asked.tokenizer_path:
            raise
        tokenizer, why = None, str(error)
    picture = found.sheet(asked.samples, tokenizer)
    if picture is None:
        return "none, as no sample can be read"
    target = Path(asked.contact_sheet or found.folder / "contact_sheet.png")
    ours = not asked.contact_sheet and (found.folder / CHECKSUMS).is_file()
    check_free(target, asked.overwrite or ours, mark=MARK)
    try:
        video.write_png(target, picture)
    except OSError as error:
        if asked.contact_sheet or error.errno not in UNWRITABLE:
            raise
        return f"none, as {found.folder} cannot be written; pass --contact-sheet OUT.png"
    return str(target) + (f" (in false colours: {why})" if tokenizer is None else "")
