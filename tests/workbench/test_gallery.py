"""Gallery and data set browser: HTML that plays and reads aloud, columns to compare, damaged samples named."""

import base64
import json
import re
import shutil

import numpy as np
import pytest

from dfm_nb.base.video import read_image, write_mp4, write_png
from dfm_nb.data.captioning import EDITS, Edit, read_edits
from dfm_nb.display.dataset import pictures
from dfm_nb.generation.pipeline import Pipeline
from workbench.browser import DatasetBrowser
from workbench.gallery import Gallery, file_stem, grid


def clip(level: int, frames: int = 5) -> np.ndarray:
    return np.full((frames, 32, 48, 3), level, np.uint8)


@pytest.fixture
def files(tmp_path):
    """Two clips with the settings that dfm generate writes, and a picture from elsewhere."""
    for i, name in enumerate(("a", "b")):
        write_mp4(tmp_path / f"{name}.mp4", clip(60 + 100 * i), 8)
        settings = {"prompt": f"a <b>{name}</b> & more", "seed": i, "guidance": 2.5, "num_steps": 18, "sampler": "heun"}
        (tmp_path / f"{name}.mp4.json").write_text(json.dumps(settings))
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
    rows = page.split("<tbody>")[1].split("</tr>")[:-1]
    assert [r.count("<figure") for r in rows] == [2, 1] and [r.count("<td") for r in rows] == [2, 2]
    assert "a &lt;b&gt;a&lt;/b&gt; &amp; more, guidance 1, seed 0" in page


def test_missing_or_unknown_clips_are_named(tmp_path):
    for shown, error, name in (([tmp_path / "x.mp4"], FileNotFoundError, "x.mp4"), ([3], ValueError, "3")):
        with pytest.raises(error, match=name):
            Gallery(shown)
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        DatasetBrowser(tmp_path)


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


def edited(folder) -> DatasetBrowser:
    """A browser that is shown, with its fields for captions."""
    browser = DatasetBrowser(folder)
    browser.widget  # noqa: B018
    browser._editing.value = True
    return browser


def test_captions_are_edited_and_samples_set_aside(tiny_data, tmp_path):
    folder = shutil.copytree(tiny_data, tmp_path / "data")
    browser = edited(folder)
    first, second = browser.entries[:2]
    _, caption, aside = browser._cells.children[0].children
    caption.value = "  a moth,\n at rest"
    browser._cells.children[1].children[2].value = aside.value = True
    assert read_edits(folder) == {
        first.key: Edit(key=first.key, caption="a moth, at rest", left_out=True),
        second.key: Edit(key=second.key, left_out=True),
    }
    assert "changed: 1; set aside: 2" in browser._told.value and "set aside" in browser._samples.value
    again = DatasetBrowser(folder)
    assert again.find("moth rest") == [0] and "set aside: 2" in again.kept_html()
    again.edit(0, "")
    again.edit(1, second.meta["caption"])
    assert read_edits(folder) == {} and not again.edited()


def test_a_button_encodes_changed_captions(tiny_data, tmp_path):
    folder = shutil.copytree(tiny_data, tmp_path / "data")
    browser = edited(folder)
    caption = browser._cells.children[0].children[1]
    assert browser._encode.layout.display == "none"
    before, caption.value = browser.entries[0].read().text_emb, "a moth at rest"
    assert browser._encode.layout.display == "" and browser.pending() == 1
    browser._encode.click()
    assert browser.pending() == 0 and browser._encode.layout.display == "none" and "alert" not in browser._told.value
    entry = DatasetBrowser(folder).entries[0]
    assert entry.meta["caption"] == "a moth at rest" and entry.read().text_emb.shape != before.shape


def test_shards_that_name_a_module_are_not_encoded_again(tiny_data, tmp_path):
    browser = DatasetBrowser(shutil.copytree(tiny_data, tmp_path / "data"))
    browser.manifest["arguments"]["tokenizer"] = "evil:tokenizer"
    with pytest.raises(ValueError, match="evil"):
        browser.encode_captions()
    browser.manifest["arguments"] |= {"tokenizer": "cosmos_cv", "tokenizer_path": str(tmp_path / "data")}
    with pytest.raises(ValueError, match="tokenizer_path"):
        browser.encode_captions()
    del browser.manifest["arguments"]["tokenizer_path"]
    browser.manifest["arguments"] |= {"options": {"allow_outside": True}}
    with pytest.raises(ValueError, match="options"):
        browser.encode_captions()


def test_an_edit_that_cannot_be_kept_is_told(tiny_data, tmp_path):
    browser = edited(shutil.copytree(tiny_data, tmp_path / "data"))
    (tmp_path / "data" / EDITS).mkdir()
    caption = browser._cells.children[0].children[1]
    before, caption.value = caption.value, "a moth"
    assert 'role="alert"' in browser._told.value and caption.value == before


def test_grid_has_a_column_for_each_of_two_pipelines_of_one_checkpoint(tiny_checkpoint, tiny_pipe):
    raw = Pipeline.from_checkpoint(tiny_checkpoint, ema=None)
    packaged = Pipeline.from_pretrained("butterflies")
    columns = grid([tiny_pipe, raw, packaged], "a moth", num_steps=1, height=64, width=64).columns
    assert [len(clips) for clips in columns.values()] == [1, 1, 1]
    folder = raw.folder
    assert list(columns) == [f"checkpoint {folder} (1)", f"checkpoint {folder} (2)", "checkpoint butterflies"]


def test_grid_has_a_column_and_a_row_for_each_value():
    asked = []

    def pipe(prompt, **settings):
        asked.append((prompt, settings))
        return [clip(len(asked), 1)]

    pipe.run = None
    shown = grid(pipe, "a moth", seed=[1, 2, 3], guidance=[1.0, 4.0], num_steps=2)
    assert list(shown.columns) == ["seed 1", "seed 2", "seed 3"]
    assert [(s["seed"], s["guidance"]) for _, s in asked] == [(s, g) for s in (1, 2, 3) for g in (1.0, 4.0)]
    assert all(prompt == "a moth" and s["num_steps"] == 2 for prompt, s in asked)
    assert list(grid(pipe, ["a moth", "a butterfly"]).columns) == ["prompt a moth", "prompt a butterfly"]
    for lists in ({}, {"seed": [1], "guidance": [1.0], "num_steps": [2]}):
        with pytest.raises(ValueError):
            grid(pipe, "a moth", **lists)
