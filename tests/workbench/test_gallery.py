"""Gallery and data set browser: HTML that plays and reads aloud, columns to compare, damaged samples named."""

import base64
import re
import shutil

import numpy as np
import pytest

from dfm_nb.base.run import Run
from dfm_nb.base.video import read_image, write_mp4, write_png
from dfm_nb.data.captioning import EDITS, Edit, read_edits
from dfm_nb.display.dataset import pictures
from tests.json_files import write_json
from tests.refusals import refused
from workbench import browser as browser_module
from workbench.browser import DatasetBrowser, kind_of
from workbench.gallery import Gallery, file_stem


def clip(level: int, frames: int = 5) -> np.ndarray:
    return np.full((frames, 32, 48, 3), level, np.uint8)


@pytest.fixture
def files(tmp_path):
    """Two clips with the settings that dfm generate writes, and a picture from elsewhere."""
    for i, name in enumerate(("a", "b")):
        write_mp4(tmp_path / f"{name}.mp4", clip(60 + 100 * i), 8)
        settings = {"prompt": f"a <b>{name}</b> & more", "seed": i, "guidance": 2.5, "num_steps": 18, "sampler": "heun"}
        write_json(tmp_path / f"{name}.mp4.json", settings)
    write_png(tmp_path / "c.png", clip(10, 1)[0])
    return tmp_path


def test_names_of_files_keep_the_words_of_any_script():
    assert [file_stem(p) for p in ("Рыжий кот!", "一朵红花", "A moth, at ../night", "?")] == [
        "рыжий-кот",
        "一朵红花",
        "a-moth-at-night",
        "clip",
    ]


def test_gallery_shows_prompt_seed_and_settings_escaped(files):
    page = Gallery([files / "a.mp4"]).html()
    assert "a &lt;b&gt;a&lt;/b&gt; &amp; more" in page and "<b>a" not in page
    assert "seed 0, guidance 2.5, 18 steps, heun" in page and page.count("aria-label=") == 1
    assert "seed 0" not in Gallery([files / "a.mp4"], details=False).html()


def test_columns_are_labelled_and_rows_stay_together(files):
    page = Gallery({"guidance 1": [files / "a.mp4", files / "b.mp4"], "guidance <4>": [clip(5)]}).html()
    assert re.findall(r'<th scope="col"[^>]*>([^<]+)</th>', page) == ["guidance 1", "guidance &lt;4&gt;"]
    rows = [row for row in page.split("<tbody>")[1].split("</tr>") if "<figure" in row]
    assert [r.count("<figure") for r in rows] == [2, 1] and [r.count("<td") for r in rows] == [2, 2]
    assert "a &lt;b&gt;a&lt;/b&gt; &amp; more, guidance 1, seed 0" in page


def test_a_row_of_one_prompt_says_it_once_and_its_picture_has_a_line_for_it(files):
    shown = Gallery(
        {"one": [files / "a.mp4", files / "b.mp4"], "two": [files / "a.mp4", files / "b.mp4"]}, details=False
    )
    page = shown.html()
    assert page.count(">a &lt;b&gt;a&lt;/b&gt; &amp; more<") == 1 and "download" not in page
    height, width = read_image(shown.png()).shape[1:3]
    assert height > width > 2 * 128


def test_samples_of_a_training_stand_beside_the_data(tmp_path):
    run = Run(tmp_path)
    refused("no samples", Gallery.of_training, tmp_path)
    for i in (30, 60, 90, 120, 150):
        for name in "abc":
            write_png(run.sample_folder(i) / f"{name}.png", clip(i, 1)[0])
    assert list(Gallery.of_training(tmp_path, prompts=2).columns) == [f"iteration {i}" for i in (30, 60, 90, 150)]
    for name in "ab":
        write_png(run.sample_folder("data") / f"{name}.png", clip(1, 1)[0])
    columns = Gallery.of_training(tmp_path, prompts=2, rounds=9).columns
    assert [len(items) for items in columns.values()] == [2] * 6 and list(columns)[-1] == "your data"
    assert "your data" not in Gallery.of_training(tmp_path, prompts=3).columns, "one is missing"


def test_missing_or_unknown_clips_are_named(tmp_path):
    for shown, error, name in (([tmp_path / "x.mp4"], FileNotFoundError, "x.mp4"), ([3], ValueError, "3")):
        with pytest.raises(error, match=name):
            Gallery(shown)
    refused(str(tmp_path), DatasetBrowser, tmp_path, error=FileNotFoundError)


# ---- the data set browser -----------------------------------------------------------------------------------------


def test_browser_finds_captions_and_turns_pages(tiny_data):
    browser = DatasetBrowser(tiny_data)
    captions = [e.meta["caption"] for e in browser.entries]
    word = captions[0].split()[1].lower()
    assert browser.find(word.upper()) == [i for i, c in enumerate(captions) if word in c.lower()]
    browser.widget  # noqa: B018
    assert browser._page.max == 3 and browser._samples.value.count("<figure") == 12
    for _ in range(3):
        browser._turn(1)
    assert browser._page.value == 3 and browser._samples.value.count("<figure") == 10
    browser._search.value = word
    assert browser._page.value == 1 and f"{len(browser.find(word)):,} samples" in browser._status.value


def test_browser_finds_and_shows_further_captions(tiny_data):
    browser = DatasetBrowser(tiny_data)
    browser.entries[3].meta["more_captions"] = ["a striped zebra", "<b>two</b>"]
    assert browser.find("ZEBRA") == [3] and browser.more_captions(2) == []
    assert "a striped zebra" in (shown := browser.figure(3)) and "&lt;b&gt;two" in shown
    assert browser.shards.describe()["captions"] == browser.about["captions"] + 2


def test_browser_filters_by_split_kind_and_size(tiny_data):
    browser = DatasetBrowser(tiny_data)
    browser.widget  # noqa: B018
    assert browser._back.disabled and not browser._on.disabled
    clips = [i for i, e in enumerate(browser.entries) if e.meta["num_frames"] > 1]
    browser._filters["kind"].value = "clips"
    assert browser._matching == clips and browser._on.disabled and browser._samples.value.count("<video") == 4
    of_splits = [browser.find(split=s) for s in ("train", "val", "test")]
    assert sorted(i for found in of_splits for i in found) == list(range(34)) and of_splits[0]
    counts = browser.manifest["counts"]
    assert [len(found) for found in of_splits] == [counts["train"], counts["val"], counts["test"]]


def test_browser_shows_what_the_tokenizer_decodes_or_the_latent(tiny_data):
    browser = DatasetBrowser(tiny_data)
    index = next(i for i, e in enumerate(browser.entries) if e.meta["num_frames"] == 1)
    sample = browser.entries[index].read()
    for latent, tokenizer in ((False, browser.shards.tokenizer()), (True, None)):
        shown = re.search(r"data:image/png;base64,([^\"]+)", browser.figure(index, latent=latent))[1]
        np.testing.assert_array_equal(read_image(base64.b64decode(shown)), *pictures(sample, tokenizer))


def test_what_is_given_is_shown_before_its_sample_and_counted(tiny_edits):
    browser = DatasetBrowser(tiny_edits)
    shown = re.findall(r"data:image/png;base64,([^\"]+)", browser.figure(0))
    expected = pictures(browser.entries[0].read(), browser.shards.tokenizer())
    assert len(shown) == 2 and (expected[0] != expected[1]).any()
    for data, frames in zip(shown, expected):
        np.testing.assert_array_equal(read_image(base64.b64decode(data)), frames)
    assert browser.about["given"] == len(browser.entries) and "with given pictures" in browser.summary_html()


def test_drops_are_told_by_reason(tiny_data):
    browser = DatasetBrowser(tiny_data)
    browser.about["drops"] = [{"key": f"k{i}", "reason": "too_small", "detail": "8 <px>"} for i in range(25)]
    page = browser.drops_html()
    assert "25 dropped: too_small (25)" in page and "8 &lt;px&gt;" in page and "and 5 more" in page


@pytest.fixture
def own(tiny_data, tmp_path):
    """The data, to be changed."""
    return shutil.copytree(tiny_data, tmp_path / "data")


def edited(folder) -> DatasetBrowser:
    """A browser that is shown, with its fields for captions."""
    browser = DatasetBrowser(folder)
    browser.widget  # noqa: B018
    browser._editing.value = True
    return browser


def test_captions_are_edited_and_samples_set_aside(own):
    browser = edited(own)
    first, second = (browser.entries[i] for i in browser._matching[:2])
    assert [kind_of(entry.meta) for entry in (first, second)] == ["pictures", "clips"], "both on the first page"
    _, caption, aside = browser._cells.children[0].children
    caption.value = "  a moth,\n at rest"
    browser._cells.children[1].children[2].value = aside.value = True
    assert read_edits(own) == {
        first.key: Edit(key=first.key, caption="a moth, at rest", left_out=True),
        second.key: Edit(key=second.key, left_out=True),
    }
    assert "changed: 1; set aside: 2" in browser._told.value and "set aside" in browser._samples.value
    again = DatasetBrowser(own)
    places = [again.entries.index(entry) for entry in (first, second)]
    assert again.find("moth rest") == places[:1] and "set aside: 2" in again.kept_html()
    again.edit(places[0], "")
    again.edit(places[1], second.meta["caption"])
    assert read_edits(own) == {} and not again.edited()


def test_a_button_encodes_changed_captions(own):
    browser = edited(own)
    caption = browser._cells.children[0].children[1]
    assert browser._encode.layout.display == "none"
    before, caption.value = browser.entries[0].read().text_emb, "a moth at rest"
    assert browser._encode.layout.display == "" and browser.pending() == 1
    browser._encode.click()
    assert browser.pending() == 0 and browser._encode.layout.display == "none" and "alert" not in browser._told.value
    entry = DatasetBrowser(own).entries[0]
    assert entry.meta["caption"] == "a moth at rest" and entry.read().text_emb.shape != before.shape


def test_a_caption_goes_back_to_the_sources_also_after_it_was_encoded(own, monkeypatch):
    browser = DatasetBrowser(own)
    source = browser.caption(0)
    browser.edit(0, "a moth")
    prepare = browser_module.prepare_dataset

    # emptied, and another one changed, while it encodes
    def meanwhile(**flags):
        prepare(**flags)
        browser.edit(0, "")
        browser.edit(1, "two moths")

    monkeypatch.setattr(browser_module, "prepare_dataset", meanwhile)
    browser.encode_captions()
    assert browser.entries[0].meta["caption"] == "a moth" and browser.pending() == 2
    assert [browser.caption(i) for i in (0, 1)] == ["", "two moths"]
    monkeypatch.setattr(browser_module, "prepare_dataset", prepare)
    browser.encode_captions()
    assert [browser.caption(i) for i in (0, 1)] == [source, "two moths"] and browser.pending() == 0
    browser.edit(0, "three moths")
    browser.edit(0, "")
    assert browser.pending() == 0 and DatasetBrowser(own).caption(0) == source


def test_shards_that_name_a_module_are_not_encoded_again(own):
    browser = DatasetBrowser(own)
    browser.manifest["arguments"]["tokenizer"] = "evil:tokenizer"
    refused("evil", browser.encode_captions)
    browser.manifest["arguments"] |= {"tokenizer": "cosmos_cv", "tokenizer_path": str(own)}
    refused("tokenizer_path", browser.encode_captions)
    del browser.manifest["arguments"]["tokenizer_path"]
    browser.manifest["arguments"] |= {"options": {"allow_outside": True}}
    refused("options", browser.encode_captions)


def test_an_edit_that_cannot_be_kept_is_told(own):
    browser = edited(own)
    (own / EDITS).mkdir()
    caption = browser._cells.children[0].children[1]
    before, caption.value = caption.value, "a moth"
    assert 'role="alert"' in browser._told.value and caption.value == before
