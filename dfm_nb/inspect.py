"""`dfm inspect DIR`: what a folder of shards contains, whether it is intact, and how it looks.

Third-party shards work too: tars of `.pth`, `.pickle` and `.json` samples. No code from the data is run, and only the
contact sheet is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dfm_nb.base import video
from dfm_nb.base.files import MARK, UNWRITABLE, check_free
from dfm_nb.base.options import option
from dfm_nb.base.verb import FileVerb, Report
from dfm_nb.data.prepared_folder import CHECKSUMS, kinds_line, psnr_lines, sizes_line
from dfm_nb.data.shards import how_to_adopt
from dfm_nb.display.dataset import InspectedShards


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
        shards = InspectedShards(Path(self.folder).expanduser(), progress=not self.as_json)
        about = Inspection(shards.describe(), verified=self.verify)
        faults = shards.faults
        if self.verify:
            faults = faults + shards.verify()
        if self.verify or faults:
            about["faults"] = faults
        about["contact_sheet"] = self._draw(shards)
        return about

    def _draw(self, shards: InspectedShards) -> str:
        """Write the contact sheet; returns its path, or the reason why there is none."""
        if not self.samples or not shards.entries:
            return "none"
        why = "the tokenizer is unknown: see --tokenizer and --tokenizer-path"
        try:
            tokenizer = shards.tokenizer(self.tokenizer, self.tokenizer_path)
        except FileNotFoundError as error:  # its weights are not on this machine
            if self.tokenizer or self.tokenizer_path:
                raise
            tokenizer = None
            why = str(error)
        picture = shards.sheet(self.samples, tokenizer)
        if picture is None:
            return "none, as no sample can be read"
        target = Path(self.contact_sheet or shards.folder / "contact_sheet.png")
        ours = not self.contact_sheet and (shards.folder / CHECKSUMS).is_file()
        check_free(target, self.overwrite or ours, mark=MARK)
        try:
            video.write_png(target, picture)
        except OSError as error:
            if self.contact_sheet or error.errno not in UNWRITABLE:
                raise
            return f"none, as {shards.folder} cannot be written; pass --contact-sheet OUT.png"
        return f"{target} (in false colours: {why})" if tokenizer is None else str(target)

    def report(self, result: Inspection) -> Report:
        return Report(result, repr(result), int(bool(result.get("faults"))))


main = InspectOptions.main


class Inspection(dict):
    """Counts, sizes, statistics and `faults`; shown as the table of `dfm inspect`, one finding a line."""

    def __repr__(self) -> str:
        parts = ", ".join(f"{part or 'none of ours'} ({n})" for part, n in self["parts"].items())
        lines = [
            f"{self['folder']}: {self['samples']:,} samples in {self['shards']} shards, "
            f"{self['bytes'] / 2**20:.1f} MiB",
            f"  parts: {parts}",
        ]
        lines += [f"  {name}: {text}" for name, text in figures(self).items()]
        counts = self.get("counts")
        if counts:
            lines += _named(counts["dropped_by_reason"], self["drops"])
            lost = counts.get("lost_by_reason")
            if lost:
                lines += ["  used but incomplete:", *_named(lost, self.get("lost", ()))]
            origins = self.get("captions_from")
            if origins:
                lines.append("  captions: " + "; ".join(origins))
            lines.append(
                f"  source {self['source']['name']}, tokenizer {self['tokenizer']['name']}, "
                f"text encoder {self['text_encoder']['name']}"
            )
            lines += [f"  {line}" for line in psnr_lines(self["psnr_db"])]
        else:
            lines.append(f"  no manifest.json, so encoders and statistics are unknown: {how_to_adopt(self['folder'])}")
        if self["duplicate_keys"]:
            lines.append("  keys that occur more than once: " + ", ".join(self["duplicate_keys"]))
        lines += [f"  FAULT: {fault}" for fault in self.get("faults", ())]
        if self["verified"] and not self["faults"]:
            lines.append("  verified: every checksum and every sample is good")
        lines.append(f"  contact sheet: {self['contact_sheet']}")
        return "\n".join(lines)


def figures(d: dict) -> dict[str, str]:
    """Sizes, captions and splits in words."""
    lines = {
        "kinds": kinds_line(d["sizes"]),
        "frames x height x width": sizes_line(d["sizes"]),
        "different captions": f"{d['captions']:,}",
    }
    if d["given"]:
        lines["with given pictures"] = f"{d['given']:,}"
    if "text_tokens" in d:
        lines["text tokens"] = "{min} to {max}, median {median}".format(**d["text_tokens"])
    if "counts" in d:
        lines["splits"] = "train {train}, val {val}, test {test}; dropped {dropped}".format(**d["counts"])
    return lines


def _named(counts: dict[str, int], samples: Iterable[dict[str, str]]) -> Iterator[str]:
    """A line for each reason, with the first keys that have it."""
    for reason, n in counts.items():
        keys = [sample["key"] for sample in samples if sample["reason"] == reason][:3]
        more = f" and {n - 3} more" if n > 3 else ""
        yield f"    {reason}: {n} ({', '.join(keys)}{more})"


def inspect_dataset(folder: str | os.PathLike, **flags: Any) -> Inspection:
    """The content of a folder of shards, or of one shard. With `verify=True`, `faults` covers every sample.

    Parameters
    ----------
    **flags : the flags of `dfm inspect` with underscores (`verify`, `samples`, `contact_sheet`, `tokenizer`, ...).

    >>> inspect_dataset("data", verify=True, samples=0)  # doctest: +SKIP
    """
    return InspectOptions(folder=os.fspath(folder), **flags).run()
