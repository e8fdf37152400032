"""The Open Clip Art Library's drawings, captions and reasons, on a small tree of its form."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pytest
from PIL import Image

from dfm_nb.data.sources import folder as folder_source
from dfm_nb.data.sources import table as table_source

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "scripts")  # the script imports another one from beside it
    script = importlib.import_module("fetch_openclipart")

FREE = "http://web.resource.org/cc/PublicDomain"
SVG = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"
 xmlns:cc="http://web.resource.org/cc/" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><rdf:RDF><cc:Work>
<dc:title>{title}</dc:title><dc:creator><cc:Agent><dc:title>{author}</dc:title></cc:Agent></dc:creator>
<dc:subject><rdf:Bag>{keywords}</rdf:Bag></dc:subject><cc:license rdf:resource="{licence}"/>
</cc:Work></rdf:RDF></metadata></svg>"""


class Library:
    """A tree of SVG and PNG files as the packages hold it."""

    def __init__(self, root: Path):
        self.svg, self.png = root / "svg", root / "png"

    def add(self, file, title="", keywords=(), author="", licence=FREE, colour=(200, 30, 30, 255), size=(40, 20)):
        """A drawing of one filled rectangle in the upper left quarter of its page; `size` is the page's."""
        items = "".join(f"<rdf:li>{k}</rdf:li>" for k in keywords)
        svg, png = self.svg / f"{file}.svg", self.png / f"{file}.png"
        for path in (svg, png):
            path.parent.mkdir(parents=True, exist_ok=True)
        svg.write_text(SVG.format(title=escape(title), author=author, keywords=items, licence=licence))
        image = Image.new("RGBA", size, (0, 0, 0, 0))
        image.paste(colour, (0, 0, size[0] // 2, size[1] // 2))
        image.putpixel((0, 0), (0, 0, 0, colour[3]))  # a drawing of one colour is blank on paper of that colour
        image.save(png)
        return script.read_drawing(svg, self.svg)


@pytest.fixture
def library(tmp_path):
    return Library(tmp_path / "library")


def test_caption_is_the_title_and_keywords_it_does_not_hold(library):
    drawing = library.add(
        "food/bread_01", "Half_Loaf 2", ["", "HASH(0x8a0)", "food", "loaf", "unsorted", "menu"], "Ann"
    )
    assert drawing.keywords == ("food", "loaf", "menu") and drawing.author == "Ann"
    assert script.caption_of(drawing, set()) == "half loaf, food, menu"


@pytest.mark.parametrize(
    "file, title, author, name",
    [
        ("animals/bee_gerald_g._01", "Clipart by Gerald - flower3", "Gerald G.", "bee"),
        ("animals/half_egg_jean-victor_bal_01", "The Set", "Jean-Victor Balin", "half egg"),
        ("people/sm_009", "The Set", "", "the set"),
        ("electronics/cd", "Clipart by Gerald - antenna", "Gerald G.", "cd"),
        ("unsorted/aziendaVendite", "", "", "azienda vendite"),
        ("food/R16", "Fried Egg", "", "fried egg"),
        ("office/pinzatrice_grigia", "Pinzatrice Francesco Rollandin", "Francesco Rollandin", "pinzatrice"),
        ("animals/ragno", "C. Rollandin", "Francesco Rollandin", "ragno"),
    ],
)
def test_name_is_the_file_where_the_title_is_of_a_collection(library, file, title, author, name):
    assert script.name_of(library.add(file, title, author=author), {"The Set"}) == name


def test_picture_fills_a_square_without_its_margin(library):
    library.add("a", size=(400, 200))  # 200 x 100 are drawn
    square = script.picture(library.png / "a.png")
    assert square.size == (256, 256) and square.mode == "RGBA"
    assert square.getchannel("A").getbbox() == (0, 64, 256, 192)


def test_written_tables_name_every_drawing_once(library, tmp_path):
    library.add("animals/cat_01", "Cat", ["animal"])
    library.add("animals/pets/cat_01", "Cat", ["animal"])  # the same pixels
    library.add("animals/dog", "Dog", ["animal"], colour=(30, 200, 30, 255))
    library.add("animals/ghost", "Ghost", colour=(0, 0, 0, 0))
    library.add("animals/gnu", "Gnu", licence="http://creativecommons.org/licenses/GPL/2.0/")
    library.add("shapes/stars/star_5", "Star")
    library.add("computer/home", "Blue iconset")
    for n in range(script.COLLECTION):
        library.add(f"tools/saw_{n}", "Tools I drew", colour=(n, 90, 200, 255))
    out = tmp_path / "out"
    out.mkdir()
    count, left = script.write(library.svg, library.png, out)
    rows = list(csv.DictReader((out / "captions.csv").open(encoding="utf-8")))
    captions = {row["file"]: row["caption"] for row in rows}
    saws = {f"tools/saw_{n}.png": "saw" for n in range(script.COLLECTION)}
    assert captions == {"animals/cat_01.png": "cat, animal", "animals/dog.png": "dog, animal", **saws}
    reasons = {row["drawing"]: row["reason"] for row in csv.DictReader((out / "left_out.csv").open(encoding="utf-8"))}
    assert reasons == {
        "animals/pets/cat_01": "same pixels",
        "animals/ghost": "blank",
        "animals/gnu": "not declared public domain",
        "shapes/stars/star_5": "shapes",
        "computer/home": "icon theme",
    }
    assert count == len(rows) and left.total() == len(reasons)
    assert {row["category"] for row in rows} == {"animals", "tools"}


def test_a_picture_above_pillows_limit_is_left_out(library, monkeypatch):
    library.add("a")
    for limit in (799, 399):  # of 800 pixels: Pillow warns at once the limit and raises at twice
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert script.picture(library.png / "a.png") == "too large"


def test_prepare_reads_the_result_as_folder_and_as_table(library, tmp_path):
    for n, name in enumerate(("ant", "bat", "cat")):
        library.add(f"animals/{name}", name, ["animal"], colour=(80 * n, 90, 200, 255))
    out = tmp_path / "out"
    out.mkdir()
    assert script.write(library.svg, library.png, out, limit=2)[0] == 2
    for source in (folder_source.build(str(out)), table_source.build(str(out / "captions.csv"))):
        clips = [clip for index in range(len(source)) for clip in source.read(index)]
        assert [clip.caption for clip in clips] == ["ant, animal", "bat, animal"]
        assert all(np.shape(clip.video) == (1, 256, 256, 3) for clip in clips)
