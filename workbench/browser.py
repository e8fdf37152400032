"""Browser of a data set: decoded samples with captions, counts and sizes, what was dropped and why.

It reads and decodes only the samples on the current page. A damaged sample is reported in its place. Pictures are
decoded with the tokenizer in the manifest; one from the folder itself may consist of tensors only. The browser writes
only `edits.jsonl`: edited captions and excluded samples (`dfm_nb.data.edits`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as w

from dfm_nb import prepare_dataset
from dfm_nb.base import plugins, video
from dfm_nb.base.geometry import LATENT_CHANNELS
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.options import fields
from dfm_nb.base.records import SampleError
from dfm_nb.data.edits import EDITS, Edit, read_edits, write_edit
from dfm_nb.data.inspection import InspectedShards, pictures, size_of
from dfm_nb.data.preparation import PrepareConfig
from dfm_nb.data.shard_plan import evenly
from dfm_nb.data.shards import Fits, how_to_adopt
from dfm_nb.inspect import figures
from workbench.controls import table_html
from workbench.gallery import Gallery, Item
from workbench.live import Live, fault_html

PAGE, SIDE_PX, GAP_PX = 12, 160, 12
DROPS_SHOWN = 20
KINDS = {"pictures": lambda frames: frames == 1, "clips": lambda frames: frames > 1}
LEGEND = "latent: channels x frames x height x width, which a model learns; text tokens: the caption as vectors"
FOLLOWS = "From its next start, training skips samples that are set aside."
NO_CAPTION = "<style>.dfm-browser textarea{font-size:12px}.widget-gridbox figcaption{display:none}</style>"
"""Where the caption is a field, the figure shows none."""


class DatasetBrowser(Live):
    """Browse shards, edit captions, exclude samples.

    Parameters
    ----------
    data_dir : a folder with shards, or one tar.

    Raises
    ------
    FileNotFoundError : there are no shards.

    >>> DatasetBrowser("data/first")      # doctest: +SKIP
    """

    def __init__(self, data_dir: str | Path):
        self._read(Path(data_dir).expanduser())

    def _read(self, place: Path) -> None:
        self.found = InspectedShards(place)
        self.manifest, self.entries = self.found.manifest, self.found.entries
        # what a tokenizer can decode, known without reading a sample
        self.fits = Fits(LATENT_CHANNELS if self.manifest else None)
        self.about = self.found.describe()
        self.edits = read_edits(self.found.folder)
        split_of = {s["name"]: s["split"] for s in (self.manifest or {}).get("shards", [])}
        self.splits = [split_of.get(e.shard.name, "") for e in self.entries]

    # ---- edits ----------------------------------------------------------------------------------------------------

    def caption(self, index: int) -> str:
        """The edited caption, else the prepared one."""
        entry = self.entries[index]
        edit = self.edits.get(entry.key)
        return (edit and edit.caption) or entry.meta.get("caption") or ""

    def more_captions(self, index: int) -> list[str]:
        """The further ones, which are the source's."""
        return self.entries[index].meta.get("more_captions") or []

    def is_set_aside(self, index: int) -> bool:
        edit = self.edits.get(self.entries[index].key)
        return edit is not None and edit.left_out

    def edit(self, index: int, caption: str, set_aside: bool = False) -> None:
        """Change a sample's caption or exclude it; written to `edits.jsonl` at once.

        caption : one line; "" for that of the source.
        """
        entry, said = self.entries[index], " ".join(caption.split())
        before = self.edits.get(entry.key) or Edit(key=entry.key)
        as_it_was = said == entry.meta.get("caption") and before.caption is None
        edit = Edit(key=entry.key, caption=None if as_it_was else said or None, left_out=set_aside)
        write_edit(self.found.folder, edit)
        self.edits = read_edits(self.found.folder)

    def edited(self) -> str:
        """The number of edits and what follows; "" without edits."""
        captions = sum(edit.caption is not None for edit in self.edits.values())
        aside = sum(edit.left_out for edit in self.edits.values())
        new = f"; captions not yet encoded: {n}" if (n := self.pending()) else ""
        return f"captions changed: {captions}; set aside: {aside} ({EDITS}){new}. {FOLLOWS}" if self.edits else ""

    def pending(self) -> int:
        """The number of changed captions that training does not read yet."""
        edits = ((self.edits.get(e.key), e.meta.get("caption")) for e in self.entries)
        return sum(edit is not None and edit.caption not in (None, caption) for edit, caption in edits)

    def encode_captions(self) -> None:
        """Encode the changed captions: `dfm prepare --texts-only` with the arguments that the shards were made with.

        Raises
        ------
        ValueError, OSError : the source has gone; or the shards name a plug-in that is not installed, weights or a
            source elsewhere, which would run code or read what the user did not choose.
        """
        made = dict((self.manifest or {}).get("arguments", {}))
        named = {f"{kind}s": str(made.get(kind, "")) for kind in ("source", "tokenizer", "text_encoder")}
        elsewhere = sorted({"tokenizer_path", "text_encoder_path", "allow_outside", "options"} & made.keys())
        elsewhere += [named["sources"]] if "://" in named["sources"] else []
        named["sources"] = plugins.source_and_spec(named["sources"])[0]
        elsewhere += [name or f"no {kind[:-1]}" for kind, name in named.items() if name not in plugins.names(kind)]
        if elsewhere:
            why = f"{self.found.place} names {', '.join(elsewhere)}: no plug-in here, or a path or server elsewhere"
            raise ValueError(f"{why}; run dfm prepare --texts-only with your arguments")
        # where and on what it runs is not the manifest's to say
        planned = {name for name, field in fields(PrepareConfig).items() if "plan" in field.marks}
        told = {
            name: made[name] for name in {"source", "short_side", *planned, *plugins.flags("sources")} & made.keys()
        }
        prepare_dataset(**told, output_dir=self.found.folder, texts_only=True)
        self._read(self.found.place)

    # ---- samples --------------------------------------------------------------------------------------------------

    def find(self, words: str = "", split: str = "", kind: str = "", size: str = "") -> list[int]:
        """Positions of the samples whose captions and key hold all these words, in any order and case.

        split : "train", "val" or "test". kind : "pictures" or "clips". size : as in the summary, "9x64x64".
        """
        wanted = words.lower().split()
        return [
            i
            for i, e in enumerate(self.entries)
            if all(word in " ".join([self.caption(i), e.key, *self.more_captions(i)]).lower() for word in wanted)
            and split in ("", self.splits[i])
            and (not kind or KINDS[kind](e.meta.get("num_frames") or 1))  # a .json may not say
            and size in ("", size_of(e.meta))
        ]

    def figure(self, index: int, latent: bool = False) -> Html:
        """One sample as HTML: what is given, clip or picture, caption, sizes; or why it cannot be read.

        latent : the latent in false colours instead of the picture that it decodes to.
        """
        entry = self.entries[index]
        try:
            clip = entry.read(self.fits)
        except SampleError as error:
            return fault_html(str(error), what="Damaged")
        shown = pictures(clip, None if latent else self._decoder[0])
        caption, aside = self.caption(index) or entry.key, self.is_set_aside(index)
        shape = "x".join(map(str, clip.latent.shape[1:]))
        about = f"{'set aside · ' * aside}{entry.key} · latent {shape} · {clip.text_emb.shape[1]} text tokens"
        about = " · or: ".join([about, *self.more_captions(index)])
        named = zip([*["given"] * len(clip.given), caption], shown)
        items = [Item(*video.compressed(frames, clip.fps), {"name": name}) for name, frames in named]
        side, (_, height, width, _) = SIDE_PX // len(items) - GAP_PX * (len(items) > 1), shown[-1].shape
        width = round(side * min(1, width / height))  # the longer side fits its place
        gallery = Gallery(items, width_px=width, details=False).html()
        figure = '<div style="opacity:{}">{}<div style="font-size:11px;line-height:1.35;opacity:.75">{}</div></div>'
        return fill(figure, 0.4 if aside else 1, gallery, about)

    @functools.cached_property
    def _decoder(self) -> tuple[Any, str]:
        """The tokenizer of the shards; or None, and why they are shown in false colours."""
        try:
            tokenizer = self.found.tokenizer()
        except (FileNotFoundError, ValueError) as error:
            return None, f"in false colours: {error}"
        return tokenizer, "" if tokenizer else f"in false colours: {how_to_adopt(self.found.folder)}"

    def grid_html(self, figures: list[Html], latent: bool = False) -> Html:
        if not figures:
            return fill("no matching sample")
        notes = [fill("{}<br>", note) for note in (not latent and self._decoder[1], LEGEND) if note]
        style = f"display:grid;grid-template-columns:repeat(auto-fill,{SIDE_PX}px);gap:12px;align-items:start"
        grid = '<div style="font-size:12px;opacity:.75">{}</div><div style="{}">{}</div>'
        return fill(grid, notes, style, figures)

    # ---- the whole ------------------------------------------------------------------------------------------------

    def summary_html(self) -> Html:
        """Counts, sizes, encoders, faults."""
        d = self.about
        size = f"{d['samples']:,} in {d['shards']} shards, {d['bytes'] / 2**20:.1f} MiB"
        rows = [("samples", size), *figures(d).items()]
        rows += [(n.replace("_", " "), d[n]["name"]) for n in ("source", "tokenizer", "text_encoder") if n in d]
        rows += [("changed by hand", said)] if (said := self.edited()) else []
        return table_html([*rows, *(("fault", fault) for fault in self.found.faults)], caption=str(self.found.place))

    def drops_html(self) -> Html:
        """Every reason with its count, and the first keys."""
        if not self.manifest:
            return fill("<p>There is no manifest, so drops are unknown.</p>")
        drops = self.about.get("drops", [])
        counted = ", ".join(f"{reason} ({n})" for reason, n in Counter(d["reason"] for d in drops).most_common())
        heads = ("key", "reason", "detail")
        table = table_html(([str(d.get(h, "")) for h in heads] for d in drops[:DROPS_SHOWN]), heads) if drops else ""
        more = f"and {len(drops) - DROPS_SHOWN} more in manifest.json" if len(drops) > DROPS_SHOWN else ""
        said = f"{len(drops)} dropped{f': {counted}' if drops else ''}"
        return fill("<p>{}</p>{}<p>{}</p>", said, table, more)

    def kept_html(self) -> str:
        if "widget" in vars(self):
            return fill("{}{}", self.summary_html(), Html(self._samples.value))
        figures = [self.figure(i) for i in evenly(range(len(self.entries)), PAGE)]
        return fill("{}{}{}", self.summary_html(), self.grid_html(figures), self.drops_html())

    def __repr__(self) -> str:
        return f"DatasetBrowser({str(self.found.place)!r}, {len(self.entries):,} samples)"

    @functools.cached_property
    def widget(self) -> Any:
        """Tabs: samples with pages and search; summary; drops."""
        auto, flow = w.Layout(width="auto"), w.Layout(flex_flow="row wrap", overflow="visible")
        words = "words of the caption"
        self._search = w.Text(placeholder=words, tooltip=words, continuous_update=False)
        self._filters = {}
        sizes = dict.fromkeys(size_of(e.meta) for e in self.entries)
        for name, found in {"split": sorted({*self.splits} - {""}), "kind": KINDS, "size": sizes}.items():
            options, tip = [(f"any {name}", ""), *((c, c) for c in found)], f"Only samples of this {name}"
            place = w.Layout(width="auto", display="" if len(found) > 1 else "none")
            self._filters[name] = w.Dropdown(options=options, tooltip=tip, layout=place)
        tips = ["What the tokenizer makes of the latent", "The latent itself, its 16 channels in false colours"]
        looks = [("decoded", False), ("latent", True)]
        self._looks = w.ToggleButtons(options=looks, tooltips=tips, style={"button_width": "auto"})
        self._page = w.BoundedIntText(value=1, min=1, tooltip="Page", layout=w.Layout(width="5em"))
        self._back = w.Button(icon="arrow-left", tooltip="Previous page", layout=auto)
        self._on = w.Button(icon="arrow-right", tooltip="Next page", layout=auto)
        self._back.on_click(lambda _b: self._turn(-1))
        self._on.on_click(lambda _b: self._turn(1))
        self._status, self._told, self._samples = w.HTML(), w.HTML(), w.HTML()
        tip = "Change captions, set samples aside"
        self._editing = w.ToggleButton(description="edit", icon="pencil", tooltip=tip, layout=auto)
        tip = "dfm prepare --texts-only: training reads changed captions after it"
        self._encode = w.Button(description="encode changed captions", tooltip=tip, layout=w.Layout(width="auto"))
        self._encode.on_click(lambda _b: self._pressed_encode())
        columns = f"repeat(auto-fill, {SIDE_PX + 8}px)"  # margins
        self._cells = w.GridBox(layout=w.Layout(grid_template_columns=columns, grid_gap="12px"))
        for control in (self._page, self._looks, self._editing):
            control.observe(lambda _c: self._paint(), names="value")
        for control in (self._search, *self._filters.values()):
            control.observe(lambda _c: self._searched(), names="value")
        looking = w.HBox([self._search, *self._filters.values(), self._looks, self._editing], layout=flow)
        paging = w.HBox([self._back, self._page, self._on, self._status], layout=flow)
        pages = {
            "Samples": w.VBox([looking, paging, self._told, self._encode, self._samples, self._cells]),
            "Summary": w.HTML(self.summary_html()),
            "Drops": w.HTML(self.drops_html()),
        }
        box = w.Tab([*pages.values()], titles=[*pages], selected_index=0)
        box.add_class("dfm-browser")
        self._searched()
        return box

    def _turn(self, by: int) -> None:
        self._page.value += by  # stays within its bounds

    def _searched(self) -> None:
        self._found = self.find(self._search.value, **{name: f.value for name, f in self._filters.items()})
        self._page.max = max(1, math.ceil(len(self._found) / PAGE))
        if self._page.value == 1:
            self._paint()
        else:
            self._page.value = 1  # paints

    def _paint(self) -> None:
        page, last = self._page.value, self._page.max
        self._back.disabled, self._on.disabled = page == 1, page == last
        shown = self._found[(page - 1) * PAGE : page * PAGE]
        self._figures = [self.figure(i, self._looks.value) for i in shown]
        self._cells.children = [self._cell(*c) for c in enumerate(shown)] if self._editing.value else []
        self._samples.layout.display = "none" if self._editing.value else ""
        self._show()

    def _show(self, fault: str = "") -> None:
        said = f"of {self._page.max:,} pages; {len(self._found):,} samples"
        self._status.value = fill('<span role="status">{}</span>', said)
        self._told.value = fault_html(fault, what="Not kept") or fill("<small>{}</small>", self.edited())
        self._encode.layout.display = "" if self.pending() else "none"
        self._samples.value = self.grid_html(self._figures, self._looks.value)
        self.keep()

    def _try(self, action: Callable[[], None]) -> str:
        """Run an edit of a control; the message of its error."""
        try:
            action()
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _pressed_encode(self) -> None:
        self._encode.disabled = True  # until it has ended, a few seconds
        try:
            fault = self._try(self.encode_captions)
        finally:
            self._encode.disabled = False
        self._paint()
        self._show(fault)

    def _cell(self, place: int, index: int) -> Any:
        """A figure of the page with its caption to change, and a box to set it aside."""
        wide = w.Layout(width="auto")
        tip = "Caption; empty: that of the source"
        caption = w.Textarea(self.caption(index), tooltip=tip, continuous_update=False, rows=3, layout=wide)
        aside = w.Checkbox(self.is_set_aside(index), description="set aside", indent=False, layout=wide)
        picture = w.HTML(NO_CAPTION + self._figures[place])

        def changed(_change: Any) -> None:
            fault = self._try(lambda: self.edit(index, caption.value, aside.value))
            caption.value, aside.value = self.caption(index), self.is_set_aside(index)
            self._figures[place] = self.figure(index, self._looks.value)
            picture.value = NO_CAPTION + self._figures[place]
            self._show(fault)

        for control in (caption, aside):
            control.observe(changed, names="value")
        return w.VBox([picture, caption, aside])
