"""What a preparation settles before any work."""

import pytest

from dfm_nb.data.preparation import Preparation, PrepareConfig, Ranks
from dfm_nb.data.prepared_folder import PreparedFolder
from dfm_nb.offline import residual
from tests.frames import picture
from tests.refusals import refused


def check(config):
    return Preparation(config, Ranks()).check()


class Items(list):
    def __init__(self, count, split=None):
        super().__init__(range(count))
        self.item_split = lambda index: split if index < count // 2 else None


@pytest.mark.parametrize(
    "count, split, settings, share",
    [
        (19, None, {}, 0.05),
        (20, None, {}, 0.125),
        (1000, None, {}, 0.05),
        (1000, None, {"limit": 500}, 0.125),
        (1998, "test", {}, 0.125),
        (38, "test", {}, 0.05),
        (500, None, {"test_fraction": 0.9}, 0.05),
    ],
)
def test_an_eighth_of_few_items_without_a_split_is_held_out(count, split, settings, share):
    preparation = Preparation(PrepareConfig(output_dir="d", **settings), Ranks())
    preparation.source = Items(count, split)
    assert preparation.val_share == share


@pytest.fixture
def config(tmp_path):
    picture(tmp_path / "source/a.bmp")
    return PrepareConfig(source=f"folder:{tmp_path}/source", output_dir=str(tmp_path / "data"), resume=True)


@pytest.mark.parametrize(
    "name, content, key",
    [
        ("a.txt", b"a cat", "captions_sha256"),
        ("a.bmp", None, "contents_sha256"),
        ("metadata.csv", b"file,text\na.bmp,x", "captions_sha256"),
    ],
)
def test_what_was_begun_with_other_captions_or_pictures_is_not_resumed(name, content, key, config, tmp_path):
    with (folder := PreparedFolder(config.output_dir)).turn():
        folder.claim(check(config), True, False)
    assert check(config)
    path = tmp_path / "source" / name
    path.write_bytes(content or path.read_bytes().replace(b"\xff", b"\xfe"))
    refused(key, check, config, error=FileExistsError)


def test_drawn_pictures_are_not_fitted():
    assert "fit" not in check(PrepareConfig(output_dir="d"))


def test_the_default_share_that_a_folder_was_begun_with_stays(config):
    with (folder := PreparedFolder(config.output_dir)).turn():
        folder.claim(check(config) | {"val_fraction": 0.125}, True, False)
    assert check(config)["val_fraction"] == 0.125
    refused("val_fraction", check, config.replace(val_fraction=0.05), error=FileExistsError)


def test_the_default_tokenizer_is_that_of_the_folder_or_the_source(config):
    """`general` for pictures of any kind; a folder that was begun keeps its own."""
    assert PrepareConfig(output_dir="d").tokenizer_name == "residual"
    default = config.replace(tokenizer=None)
    assert check(default)["tokenizer"] == "general"
    with (folder := PreparedFolder(config.output_dir)).turn():
        folder.claim(check(default.replace(tokenizer="residual")), True, False)
    assert check(default)["tokenizer"] == "residual"
    assert default.replace(overwrite=True, resume=False).tokenizer_name == "general"


def test_the_weights_of_a_carried_tokenizer_that_was_named_belong_to_the_plan(config):
    plan = check(config.replace(tokenizer="residual", tokenizer_path=str(residual.ASSET)))
    assert plan["tokenizer_sha256"] == residual.build().identity()["sha256"]
