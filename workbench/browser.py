"""Browser of a data set: decoded samples with captions, counts and sizes, what was dropped and why.

It reads and decodes only the samples on the current page. A damaged sample is reported in its place. Pictures are
decoded with the tokenizer in the manifest; one from the folder itself may consist of tensors only. The browser writes
only `edits.jsonl`: edited captions and excluded samples (`dfm_nb.data.captioning`).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as w

from dfm_nb import prepare_dataset
from dfm_nb.base import plugins, video
from dfm_nb.base.markup import Html, fill
from dfm_nb.base.options import fields
from dfm_nb.data.captioning import EDITS, Edit, edits_sha256, read_edits, write_edit
from dfm_nb.data.preparation import PrepareConfig
from dfm_nb.data.shards import how_to_adopt
from dfm_nb.display.dataset import InspectedShards, pictures, size_of
from dfm_nb.inspect import figures
from workbench.controls import FLOW, button, on_change, table_html
from workbench.gallery import Gallery, Item
from workbench.live import Live, fault_html

PAGE = 12
"""Samples a page."""
SIDE_PX = 160
GAP_PX = 12
DROPS_SHOWN = 20
AUTO = {"width": "auto"}
KINDS = ("pictures", "clips")
LEGEND = "Below each caption: the key, and the latent's channels x frames x height x width."
SAMPLE = (
    '<div data-key="{}" style="opacity:{}">{}'
    '<div style="font-size:11px;line-height:1.35;opacity:.75;overflow-wrap:anywhere">{}</div></div>'
)
DOWNLOAD = fill(
    '<button type="button" class="jupyter-button" style="width:auto" onclick="{}">download these</button>',
    "for(const one of this.closest('.dfm-browser').querySelectorAll('[data-key]')){"
    "const {src}=[...one.querySelectorAll('video,img:not(video img)')].at(-1),link=document.createElement('a');"
    "link.href=src;link.download=one.dataset.key+(src.startsWith('data:video')?'.mp4':'.png');link.click()}",
)
"""Saves the pictures and clips of the page, which holds their bytes; a browser may ask once."""
FOLLOWS = "From its next start, training skips samples that are set aside."
NO_CAPTION = "<style>.dfm-browser textarea{font-size:12px}.widget-gridbox figcaption{display:none}</style>"
"""Where the caption is a field, the figure shows none."""


def _menu(name: str, choices: Sequence[str]) -> Any:
    """A filter of the samples; hidden where there is nothing to choose."""
    options = [(f"any {name}", ""), *zip(choices, choices)]
    layout = AUTO if len(choices) > 1 else {"display": "none"}
    return w.Dropdown(options=options, tooltip=f"Only samples of this {name}", layout=layout)


def kind_of(meta: dict[str, Any]) -> str:
    """Picture or clip; a sample's .json may not say, and it counts as a picture."""
    return "clips" if (meta.get("num_frames") or 1) > 1 else "pictures"


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
        self._encoding = False
        self._read(Path(data_dir).expanduser())

    def _read(self, path: Path) -> None:
        self.shards = InspectedShards(path)
        self.manifest = self.shards.manifest
        self.entries = self.shards.entries
        self.about = self.shards.describe()
        self._read_edits()
        split_of = {shard["name"]: shard["split"] for shard in (self.manifest or {}).get("shards", [])}
        self.splits = [split_of.get(entry.shard.name, "") for entry in self.entries]

    # ---- edits ----------------------------------------------------------------------------------------------------

    def _read_edits(self) -> None:
        self.edits = read_edits(self.shards.folder)
        applied = (self.manifest or {}).get("plan", {}).get("edits")
        self._unencoded = {}  # changed captions that the shards do not have, by key; "" for that of the source
        if edits_sha256(self.shards.folder) != applied:
            for entry in self.entries:
                edit = self.edits.get(entry.key)
                if edit and edit.caption not in (None, entry.meta.get("caption")):
                    self._unencoded[entry.key] = edit.caption

    def caption(self, index: int) -> str:
        """The edited caption, else the prepared one."""
        entry = self.entries[index]
        return self._unencoded.get(entry.key, entry.meta.get("caption") or "")

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
        entry = self.entries[index]
        text: str | None = " ".join(caption.split())
        before = self.edits.get(entry.key)
        stored = entry.meta.get("caption")
        if before is None or before.caption is None:
            if text in ("", stored):
                text = None  # as it was
        elif not text and entry.key in self._unencoded and before.caption and not self._encoding:
            text = None  # the shards have that of the source
        write_edit(self.shards.folder, Edit(key=entry.key, caption=text, left_out=set_aside))
        self._read_edits()

    def edited(self) -> str:
        """The number of edits and what follows; "" without edits."""
        if not self.edits:
            return ""
        edits = self.edits.values()
        captions = sum(edit.caption is not None for edit in edits)
        aside = sum(edit.left_out for edit in edits)
        text = f"captions changed: {captions}; set aside: {aside} ({EDITS})"
        pending = self.pending()
        if pending:
            text += f"; captions not yet encoded: {pending}"
        return f"{text}. {FOLLOWS}"

    def pending(self) -> int:
        """The number of changed captions that training does not read yet."""
        return len(self._unencoded)

    def encode_captions(self) -> None:
        """Encode the changed captions: `dfm prepare --texts-only` with the arguments that the shards were made with.

        Raises
        ------
        ValueError, OSError : the source has gone; or the shards name a plug-in that is not installed, weights or a
            source elsewhere, which would run code or read what the user did not choose.
        """
        arguments = dict((self.manifest or {}).get("arguments", {}))
        source = str(arguments.get("source"))
        ours = (
            plugins.source_and_spec(source)[0] in plugins.names("sources")
            and "://" not in source
            and arguments.get("tokenizer") in plugins.names("tokenizers")
            and arguments.get("text_encoder") in plugins.names("text_encoders")
        )
        if not ours or arguments.keys() & {"tokenizer_path", "text_encoder_path", "allow_outside", "options"}:
            why = f"with {arguments} it names a plug-in that is not installed here, or a path or server elsewhere"
            raise ValueError(f"{self.shards.place}: {why}; run dfm prepare --texts-only with your arguments")
        # where and on what it runs is not the manifest's to say
        allowed = {"source", "short_side", *plugins.flags("sources")}
        allowed.update(name for name, field in fields(PrepareConfig).items() if "plan" in field.marks)
        planned = {name: value for name, value in arguments.items() if name in allowed}
        self._encoding = True  # an edit may come meanwhile
        try:
            prepare_dataset(**planned, output_dir=self.shards.folder, texts_only=True)
            self._read(self.shards.place)
        finally:
            self._encoding = False

    # ---- samples --------------------------------------------------------------------------------------------------

    def find(self, words: str = "", split: str = "", kind: str = "", size: str = "") -> list[int]:
        """Positions of the samples whose captions and key hold all these words, in any order and case.

        split : "train", "val" or "test". kind : "pictures" or "clips". size : as in the summary, "9x64x64".
        """
        matching = []
        for i, entry in enumerate(self.entries):
            text = " ".join([self.caption(i), entry.key, *self.more_captions(i)]).lower()
            if (
                all(word in text for word in words.lower().split())
                and split in ("", self.splits[i])
                and (not kind or kind == kind_of(entry.meta))
                and size in ("", size_of(entry.meta))
            ):
                matching.append(i)
        return matching

    def _mixed(self, indices: Sequence[int]) -> list[int]:
        """The same samples with pictures and clips in proportion on each page, and both on the first."""
        placed: list[tuple[float, int]] = []
        for kind in KINDS:
            those = [index for index in indices if kind_of(self.entries[index].meta) == kind]
            placed += [(place / len(those), index) for place, index in enumerate(those)]
        return [index for _, index in sorted(placed)]

    def figure(self, index: int, latent: bool = False) -> Html:
        """One sample as HTML: what is given, clip or picture, caption, sizes; or why it cannot be read.

        latent : the latent in false colours instead of the picture that it decodes to.
        """
        entry = self.entries[index]
        try:
            clip = entry.read(self.shards.fits)
        except ValueError as error:
            return fault_html(str(error), what="Damaged")
        shape = "x".join(map(str, clip.latent.shape[1:]))
        about = f"{entry.key} · {shape}"
        opacity = "1"
        if self.is_set_aside(index):
            about = f"set aside · {about}"
            opacity = "0.4"
        about = " · or: ".join([about, *self.more_captions(index)])
        shown = pictures(clip, None if latent else self._decoder[0])
        names = ["given"] * len(clip.given) + [self.caption(index) or entry.key]
        items = [Item(*video.compressed(frames, clip.fps), {"name": name}) for name, frames in zip(names, shown)]
        side = SIDE_PX
        if len(items) > 1:
            side = SIDE_PX // len(items) - GAP_PX
        height, width = shown[-1].shape[1:3]
        width_px = round(side * min(1, width / height))  # the longer side fits
        gallery = Gallery(items, width_px, details=False).html()
        return fill(SAMPLE, entry.key, opacity, gallery, about)

    @functools.cached_property
    def _decoder(self) -> tuple[Any, str]:
        """The tokenizer of the shards; or None, and why they are shown in false colours."""
        try:
            tokenizer = self.shards.tokenizer()
        except (FileNotFoundError, ValueError) as error:
            return None, f"in false colours: {error}"
        return tokenizer, "" if tokenizer else f"in false colours: {how_to_adopt(self.shards.folder)}"

    def grid_html(self, figures: list[Html], latent: bool = False) -> Html:
        if not figures:
            return fill("no matching sample")
        notes = ["" if latent else fill("{}<br>", self._decoder[1]), LEGEND]
        style = f"display:grid;grid-template-columns:repeat(auto-fill,{SIDE_PX}px);gap:12px;align-items:start"
        grid = '<div style="font-size:12px;opacity:.75">{}</div><div style="{}">{}</div>'
        return fill(grid, notes, style, figures)

    # ---- the whole ------------------------------------------------------------------------------------------------

    def summary_html(self) -> Html:
        """Counts, sizes, encoders, faults."""
        d = self.about
        size = f"{d['samples']:,} in {d['shards']} shards, {d['bytes'] / 2**20:.1f} MiB"
        rows = [("folder", str(self.shards.place)), ("samples", size), *figures(d).items()]
        for part in ("source", "tokenizer", "text_encoder"):
            if part in d:
                rows.append((part.replace("_", " "), d[part]["name"]))
        if self.edits:
            rows.append(("changed by hand", self.edited()))
        for fault in self.shards.faults:
            rows.append(("fault", fault))
        return table_html(rows)

    def drops_html(self) -> Html:
        """Every reason with its count, and the first keys."""
        if not self.manifest:
            return fill("<p>There is no manifest, so drops are unknown.</p>")
        drops = self.about.get("drops", [])
        if not drops:
            return fill("<p>Nothing was dropped.</p>")
        reasons = Counter(drop["reason"] for drop in drops)
        counted = ", ".join(f"{reason} ({n})" for reason, n in reasons.most_common())
        rows = [(drop.get("key", ""), drop["reason"], drop.get("detail", "")) for drop in drops[:DROPS_SHOWN]]
        table = table_html(rows, ("key", "reason", "detail"))
        more = f"and {len(drops) - DROPS_SHOWN} more in manifest.json" if len(drops) > DROPS_SHOWN else ""
        return fill("<p>{}</p>{}<p>{}</p>", f"{len(drops)} dropped: {counted}", table, more)

    def kept_html(self) -> str:
        if "widget" in vars(self):
            return fill("{}{}", self.summary_html(), Html(self._samples.value))
        figures = [self.figure(i) for i in self.shards.chosen(PAGE)]
        return fill("{}{}{}", self.summary_html(), self.grid_html(figures), self.drops_html())

    def __repr__(self) -> str:
        return f"DatasetBrowser({str(self.shards.place)!r}, {len(self.entries):,} samples)"

    @functools.cached_property
    def widget(self) -> Any:
        """Tabs: samples with pages and search; summary; drops."""
        words = "words of the caption"
        self._search = w.Text(placeholder=words, tooltip=words, continuous_update=False)
        self._filters = {
            "split": _menu("split", sorted({*self.splits} - {""})),
            "kind": _menu("kind", KINDS),
            "size": _menu("size", list(dict.fromkeys(size_of(entry.meta) for entry in self.entries))),
        }
        tip = "The latent itself, its 16 channels in false colours, instead of what the tokenizer makes of it"
        self._latents = w.ToggleButton(description="latents", icon="eye", tooltip=tip, layout=AUTO)
        self._page = w.BoundedIntText(value=1, min=1, tooltip="Page", layout={"width": "5em"})
        self._back = button("", lambda: self._turn(-1), icon="arrow-left", tooltip="Previous page")
        self._on = button("", lambda: self._turn(1), icon="arrow-right", tooltip="Next page")
        self._status = w.HTML()
        self._told = w.HTML()
        self._samples = w.HTML()
        tip = "Change captions, set samples aside"
        self._editing = w.ToggleButton(description="edit", icon="pencil", tooltip=tip, layout=AUTO)
        tip = "dfm prepare --texts-only: training reads changed captions after it"
        self._encode = button("encode changed captions", self._pressed_encode, tooltip=tip)
        self._progress = w.Output()
        columns = f"repeat(auto-fill, {SIDE_PX + 8}px)"  # margins
        self._cells = w.GridBox(layout={"grid_template_columns": columns, "grid_gap": "12px"})
        on_change(self._paint, self._page, self._latents, self._editing)
        on_change(self._searched, self._search, *self._filters.values())
        looking = w.HBox([self._search, *self._filters.values(), self._latents, self._editing], layout=FLOW)
        paging = w.HBox([self._back, self._page, self._on, self._status], layout=FLOW)
        samples = w.VBox([looking, paging, self._told, self._encode, self._progress, self._samples, self._cells])
        pages = [samples, w.HTML(self.summary_html()), w.HTML(self.drops_html())]
        box = w.Tab(pages, titles=["Samples", "Summary", "Drops"], selected_index=0)
        box.add_class("dfm-browser")
        self._searched()
        return box

    def _turn(self, by: int) -> None:
        self._page.value += by  # stays within its bounds

    def _searched(self) -> None:
        chosen = {name: menu.value for name, menu in self._filters.items()}
        self._matching = self._mixed(self.find(self._search.value, **chosen))
        self._page.max = max(1, math.ceil(len(self._matching) / PAGE))
        if self._page.value == 1:
            self._paint()
        else:
            self._page.value = 1  # paints

    def _paint(self) -> None:
        page = self._page.value
        self._back.disabled = page == 1
        self._on.disabled = page == self._page.max
        shown = self._matching[(page - 1) * PAGE : page * PAGE]
        self._figures = [self.figure(index, self._latents.value) for index in shown]
        cells = []
        if self._editing.value:
            cells = [self._cell(position, index) for position, index in enumerate(shown)]
        self._cells.children = cells
        self._samples.layout.display = "none" if self._editing.value else ""
        self._show()

    def _show(self, fault: str = "") -> None:
        counts = f"of {self._page.max:,} pages; {len(self._matching):,} samples"
        self._status.value = fill('<span role="status">{}</span> {}', counts, DOWNLOAD)
        self._told.value = fault_html(fault, what="Not kept") or fill("<small>{}</small>", self.edited())
        self._encode.layout.display = "" if self.pending() else "none"
        self._samples.value = self.grid_html(self._figures, self._latents.value)
        self.keep()

    def _try(self, action: Callable[[], None]) -> str:
        """Run an edit of a control; the message of its error."""
        try:
            action()
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _pressed_encode(self) -> None:
        self._encode.disabled = True
        try:
            with self._progress:  # the bar of dfm prepare
                fault = self._try(self.encode_captions)
        finally:
            self._encode.disabled = False
            self._progress.outputs = ()
        self._paint()
        self._show(fault)

    def _cell(self, position: int, index: int) -> Any:
        """A figure of the page with its caption to change, and a box to set it aside."""
        tip = "Caption; empty: that of the source"
        caption = w.Textarea(self.caption(index), tooltip=tip, continuous_update=False, rows=3, layout=AUTO)
        aside = w.Checkbox(self.is_set_aside(index), description="set aside", indent=False, layout=AUTO)
        picture = w.HTML(NO_CAPTION + self._figures[position])

        def changed() -> None:
            fault = self._try(lambda: self.edit(index, caption.value, aside.value))
            caption.value = self.caption(index)
            aside.value = self.is_set_aside(index)
            self._figures[position] = self.figure(index, self._latents.value)
            picture.value = NO_CAPTION + self._figures[position]
            self._show(fault)

        on_change(changed, caption, aside)
        return w.VBox([picture, caption, aside])
