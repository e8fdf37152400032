"""What a data set holds: decoded samples with captions, a histogram of lengths, what was dropped and why.

It writes nothing, and reads and decodes only the samples of the page that is shown. A damaged sample is named in its
place. Pictures are decoded with the tokenizer that the manifest names; a folder may bring one of tensors only.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from pathlib import Path
from typing import Any

from dfm_nb import inspect
from dfm_nb.base import video
from dfm_nb.base.geometry import LATENT_CHANNELS
from dfm_nb.base.plots import PALETTE
from dfm_nb.base.records import SampleError
from dfm_nb.data.shards import Fits

PAGE = 12
DROPS_SHOWN = 20


class DatasetBrowser:
    """Look through shards.

    Parameters
    ----------
    data_dir : a folder with shards, or one tar. tokenizer, tokenizer_path : for shards without a manifest.

    Raises
    ------
    FileNotFoundError : there are no shards.

    >>> DatasetBrowser("data/first")      # doctest: +SKIP
    """

    def __init__(self, data_dir: str | Path, tokenizer: str | None = None, tokenizer_path: str | None = None):
        self.place = Path(data_dir).expanduser()
        tars = inspect.find_shards(self.place)
        self.folder = self.place if self.place.is_dir() else self.place.parent
        self.manifest = inspect.read_manifest(self.folder)
        self.entries, self.faults = inspect.scan(tars, progress=False)
        # what a tokenizer can decode, known without reading a sample
        self.fits = Fits(LATENT_CHANNELS if self.manifest or tokenizer or tokenizer_path else None)
        self.about = inspect.describe(self.place, tars, self.entries, self.manifest)
        self._tokenizer_names = (tokenizer, tokenizer_path)
        self._tokenizer: Any = None
        self._tokenizer_note: str | None = None
        self._figures: dict[int, str] = {}
        self._box: Any = None

    # ---- samples --------------------------------------------------------------------------------------------------

    def find(self, words: str = "") -> list[int]:
        """Positions of the samples whose caption or key has all these words, in any order and case."""
        wanted = words.lower().split()
        return [
            i
            for i, e in enumerate(self.entries)
            if all(w in f"{e.meta.get('caption', '')} {e.key}".lower() for w in wanted)
        ]

    def figure(self, index: int) -> str:
        """One sample as HTML: clip or picture, caption, sizes; or why it cannot be read."""
        if index not in self._figures:
            self._figures[index] = self._figure(index)
        return self._figures[index]

    def _figure(self, index: int) -> str:
        from workbench.gallery import Gallery, Item

        entry = self.entries[index]
        try:
            clip = entry.read(self.fits)
        except SampleError as error:
            return (
                f'<div role="alert" style="width:160px;font-size:12px"><b>Damaged:</b> {html.escape(str(error))}</div>'
            )
        tokenizer = self._load_tokenizer()
        frames = inspect.false_colours(clip) if tokenizer is None else inspect.decoded(clip, tokenizer)
        kind, data = video.compressed(frames, float(clip.meta.get("fps") or 12.0))
        caption = clip.meta.get("caption") or entry.key
        shape = "x".join(map(str, clip.latent.shape[1:]))
        about = (
            f"{entry.key} · {length_of(entry.meta)} frame(s) · latent {shape} · {clip.text_emb.shape[1]} text tokens"
        )
        shown = Gallery([Item(kind, data, {"prompt": caption})], width_px=160, details=False).html()
        small = f'<div style="font-size:11px;line-height:1.35;opacity:.75">{html.escape(about)}</div>'
        return f'<div style="width:160px">{shown}{small}</div>'

    def _load_tokenizer(self) -> Any:
        if self._tokenizer_note is None:
            self._tokenizer_note = ""
            try:
                self._tokenizer = inspect.build_tokenizer(self.folder, self.manifest, *self._tokenizer_names)
                if self._tokenizer is None:
                    self._tokenizer_note = (
                        "in false colours: the tokenizer is unknown; pass tokenizer= and tokenizer_path="
                    )
            except (FileNotFoundError, ValueError) as error:
                self._tokenizer_note = f"in false colours: {error}"
        return self._tokenizer

    def samples_html(self, indices: list[int]) -> str:
        cells = "".join(self.figure(i) for i in indices)
        note = (
            f'<div style="opacity:.75">{html.escape(self._tokenizer_note or "")}</div>' if self._tokenizer_note else ""
        )
        return f'{note}<div style="display:flex;flex-wrap:wrap;gap:12px">{cells or "no sample has these words"}</div>'

    # ---- the whole ------------------------------------------------------------------------------------------------

    def lengths(self) -> dict[int, int]:
        """Pixel frames of a sample -> how many samples have so many."""
        return dict(sorted(Counter(length_of(e.meta) for e in self.entries).items()))

    def summary_html(self) -> str:
        """Counts, sizes, encoders, faults."""
        d = self.about
        rows = [("samples", f"{d['samples']:,} in {d['shards']} shards"), ("size", f"{d['bytes'] / 2**20:.1f} MiB")]
        rows.append(("frames x height x width", ", ".join(f"{k} ({n})" for k, n in d["sizes"].items())))
        rows.append(("different captions", f"{d['captions']:,}"))
        if "text_tokens" in d:
            t = d["text_tokens"]
            rows.append(("text tokens", f"{t['min']} to {t['max']}, median {t['median']}"))
        for name in ("source", "tokenizer", "text_encoder"):
            if name in d:
                rows.append((name.replace("_", " "), str(d[name]["name"])))
        if "counts" in d:
            c = d["counts"]
            rows.append(("splits", f"train {c['train']}, val {c['val']}, test {c['test']}"))
        rows += [("fault", f) for f in self.faults]
        cells = "".join(
            f'<tr><th scope="row" style="text-align:left;padding-right:1em">{html.escape(a)}</th>'
            f'<td style="text-align:left">{html.escape(b)}</td></tr>'
            for a, b in rows
        )
        head = f"<caption style='text-align:left;font-weight:600'>{html.escape(str(self.place))}</caption>"
        return f"<table>{head}{cells}</table>"

    def drops_html(self) -> str:
        """Every reason with its count, and the first keys."""
        drops = self.about.get("drops", [])
        if not drops:
            return (
                "<p>No sample was dropped.</p>"
                if self.manifest
                else "<p>There is no manifest, so drops are not known.</p>"
            )
        reasons = Counter(d["reason"] for d in drops)
        counted = ", ".join(f"{html.escape(r)} ({n})" for r, n in reasons.most_common())
        cell = '<td style="text-align:left">{}</td>'
        rows = "".join(
            f"<tr>{''.join(cell.format(html.escape(str(d.get(k, '')))) for k in ('key', 'reason', 'detail'))}</tr>"
            for d in drops[:DROPS_SHOWN]
        )
        more = f"<p>and {len(drops) - DROPS_SHOWN} more in manifest.json</p>" if len(drops) > DROPS_SHOWN else ""
        head = "".join(f'<th scope="col" style="text-align:left">{h}</th>' for h in ("key", "reason", "detail"))
        return f"<p>{len(drops)} dropped: {counted}</p><table><tr>{head}</tr>{rows}</table>{more}"

    def html(self, samples: int = PAGE) -> str:
        """All of it without controls, for a notebook that is only read."""
        n = len(self.entries)
        spread = [i * n // min(samples, n) for i in range(min(samples, n))]
        return f"{self.summary_html()}{histogram_svg(self.lengths())}{self.samples_html(spread)}{self.drops_html()}"

    def _repr_html_(self) -> str:
        return self.html()

    @property
    def widget(self) -> Any:
        """Tabs: samples with pages and search; lengths; drops."""
        if self._box is None:
            self._build()
        return self._box

    def _build(self) -> None:
        import ipywidgets as w

        self._search = w.Text(description="caption has", placeholder="words", continuous_update=False)
        self._page = w.BoundedIntText(
            value=1, min=1, max=self._pages(), description="page", layout=w.Layout(width="11em")
        )
        back = w.Button(icon="arrow-left", description="Back", tooltip="Previous page", layout=w.Layout(width="auto"))
        on = w.Button(icon="arrow-right", description="Next", tooltip="Next page", layout=w.Layout(width="auto"))
        back.on_click(lambda _b: self._turn(-1))
        on.on_click(lambda _b: self._turn(1))
        self._found, self._samples = w.HTML(), w.HTML()
        self._page.observe(lambda _c: self._paint(), names="value")
        self._search.observe(lambda _c: self._searched(), names="value")
        samples = w.VBox([w.HBox([self._search, back, self._page, on, self._found]), self._samples])
        pages = [w.HTML(self.summary_html()), samples, w.HTML(histogram_svg(self.lengths())), w.HTML(self.drops_html())]
        self._box = w.Tab(pages, titles=("Summary", "Samples", "Lengths", "Drops"))
        self._box.selected_index = 1
        self._box.add_class("dfm-browser")
        self._paint()

    def _pages(self) -> int:
        words = self._search.value if hasattr(self, "_search") else ""
        return max(1, math.ceil(len(self.find(words)) / PAGE))

    def _turn(self, by: int) -> None:
        self._page.value = min(self._page.max, max(1, self._page.value + by))

    def _searched(self) -> None:
        self._page.max = self._pages()
        self._page.value = 1
        self._paint()

    def _paint(self) -> None:
        found = self.find(self._search.value)
        first = (self._page.value - 1) * PAGE
        self._found.value = f'<span role="status">{len(found):,} samples, {self._page.max} pages</span>'
        self._samples.value = self.samples_html(found[first : first + PAGE])


def length_of(meta: dict) -> int:
    """Pixel frames of a sample; 1 when its .json does not say."""
    return meta.get("num_frames") or 1


def histogram_svg(counts: dict[int, int], width: int = 560, height: int = 200) -> str:
    """Bars with their counts written on top, named for screen readers; colours follow the theme."""
    if not counts:
        return "<p>No samples.</p>"
    said = html.escape("; ".join(f"{n} samples of {k} frame(s)" for k, n in counts.items()), quote=True)
    top, bottom, step = 28, height - 36, (width - 20) / len(counts)
    bar, highest = min(70.0, step * 0.75), max(counts.values())
    parts = []
    for i, (k, n) in enumerate(counts.items()):
        x, y = 10 + (i + 0.5) * step, bottom - (bottom - top) * n / highest
        size = f'width="{bar:.1f}" height="{max(1.0, bottom - y):.1f}"'
        parts.append(f'<rect x="{x - bar / 2:.1f}" y="{y:.1f}" {size} fill="{PALETTE[0]}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y - 5:.1f}" text-anchor="middle">{n:,}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{k}</text>')
    axis = f'<text x="{width / 2}" y="{height - 3}" text-anchor="middle">frames of a sample</text>'
    style = (
        f"max-width:{width}px;width:100%;fill:currentColor;font-size:11px;color:var(--jp-content-font-color1, inherit)"
    )
    head = f'<svg role="img" aria-label="{said}" viewBox="0 0 {width} {height}" style="{style}"><title>{said}</title>'
    return f"{head}{''.join(parts)}{axis}</svg>"
