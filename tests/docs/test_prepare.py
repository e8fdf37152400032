"""docs/prepare.md: every bash and python block runs, in order, on tiny data."""

import shutil

import pytest
import torch
import webdataset as wds
from PIL import Image
from safetensors.torch import load_file

from dfm_nb.base import video
from dfm_nb.butterflies import synthetic
from dfm_nb.data import shards
from tests.docs.docs_pages import Page, desk
from tests.json_files import read_json

PAGE = Page("docs/prepare.md")


def make_inputs(folder):
    """photos/, photos.csv, videos/ of the page."""
    (folder / "photos" / "more").mkdir(parents=True)
    (folder / "videos").mkdir()
    sizes = {"morpho.jpg": (90, 130), "monarch.png": (100, 80), "swallowtail.jpg": (70, 70)}
    for seed, (name, size) in enumerate({**sizes, "more/red_admiral.webp": (66, 99)}.items()):
        Image.fromarray(synthetic.render({}, seed, *size)[0]).save(folder / "photos" / name)
    rows = [f'photos/morpho.jpg,"blue, on a leaf",{i}' for i in range(5)]
    (folder / "photos.csv").write_text("\n".join(["picture,description,number", *rows]) + "\n")
    for seed in range(2):
        video.write_mp4(folder / "videos" / f"wing_beat_{seed}.mp4", synthetic.render({}, seed, 48, 64, 34), fps=24)


def make_hub(folder, hub):
    """What the page downloads, by its names on the hub."""
    names = {"cosmos": "nvidia/Cosmos-0.1-Tokenizer-CV4x8x8", "t5": "google-t5/t5-11b"}
    names["butterflies"] = "huggan/smithsonian_butterflies_subset/data"
    for part, name in names.items():
        shutil.copytree(hub / part, folder / name)
    t5 = folder / names["t5"]
    (t5 / "spiece.model").touch()
    torch.save(load_file(t5 / "model.safetensors"), t5 / "pytorch_model.bin")  # the one format for torch there is
    (t5 / "model.safetensors").rename(t5 / "tf_model.h5")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_block_of_the_page_runs(tmp_path, theirs):
    make_inputs(tmp_path)
    hub = make_hub(tmp_path / "hub", theirs)
    shutil.copytree(theirs / "data", tmp_path / "nemo_webdataset")
    here = desk(tmp_path, hub=hub)
    said = here.run_page(PAGE)

    data = tmp_path / "data"
    read = lambda name: read_json(tmp_path / name / "manifest.json")  # noqa: E731
    assert read("data/first")["counts"]["samples"] == 46 and read("data/table")["counts"]["samples"] == 3
    tagged = [e for tar in sorted((data / "tagged").glob("*.tar")) for e in shards.samples_of(tar)]
    assert len(tagged) == 24 and all(e.meta["more_captions"] for e in tagged)
    assert read("data/videos")["counts"]["samples"] == 2 * 2  # 17 frames at 12 a second: clips from frames 0 and 8
    butterflies = read("butterfly_webdataset")
    assert butterflies["tokenizer"]["name"] == "cosmos_cv" and butterflies["text_encoder"]["name"] == "t5"
    assert butterflies["short_side"] == 512 and butterflies["counts"]["samples"] == 6
    nodes = read("data/nodes")
    assert nodes["ranks"] == 2 and {s["name"][:5] for s in nodes["shards"]} == {"rank0", "rank1"}
    padded = next(iter(wds.WebDataset(str(data / "for-nemo" / "rank0-000000.tar"), shardshuffle=False).decode()))
    assert padded["pickle"].shape == (1, 512, 384) and (length := padded["json"]["text_tokens"]) < 30
    assert shards.samples_of(data / "for-nemo" / "rank0-000000.tar")[0].read().text_emb.shape == (1, length, 384)
    assert read("data/flawed")["counts"]["dropped_by_reason"] == {"missing_file": 1, "unreadable_image": 1}
    assert "gone.png" in said and "broken.jpg" in said
    assert read("nemo_webdataset")["counts"]["samples"] == 12
    assert "every checksum and every sample is good" in said
