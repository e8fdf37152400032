"""What a few bytes of somebody else's file may ask for: refused before it is allocated, or before it takes for ever."""

import json
import os
import tarfile
import tracemalloc
import zipfile
from contextlib import nullcontext
from fractions import Fraction

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from dfm_nb.base import files, limits, video
from dfm_nb.base.records import SampleError
from dfm_nb.checkpoints import exported
from dfm_nb.checkpoints.tensor_files import CheckpointError
from dfm_nb.config.schema import GenerationConfig, TrainConfig, ValidationConfig
from dfm_nb.data import shards
from dfm_nb.data.sources import _media, folder, table
from dfm_nb.data.sources._media import MediaOptions
from dfm_nb.generation.request import Request
from tests.base.test_video import reason_of
from tests.data.sources.test_folder import fault
from tests.frames import black, picture
from tests.json_files import write_lines
from tests.refusals import refused

# ---- tables -------------------------------------------------------------------------------------------------------


def test_cells_that_nobody_wrote_are_bounded(tmp_path):
    (tmp_path / "a.csv").write_text(",".join(f"c{i}" for i in range(50_000)) + "\n" + "1,2\n" * 20_000)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"k{i}": 1}}\n' for i in range(20_000)))
    for path in sorted(tmp_path.iterdir()):
        refused("cells", table.read_rows, path)


def test_rows_that_a_footer_makes_up_are_refused(tmp_path):
    rows = 12_345
    pq.write_table(pa.table({"caption": ["x"] * rows}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    said, huge = bytes((0xF2, 0xC0, 0x01)), bytes((*[0xFE] * 5, 0x01))  # thrift's varints of 2 n: 12,345 and 6e9
    assert said in data[start:]
    footer = data[start:-8].replace(said, huge)
    (tmp_path / "b.parquet").write_bytes(data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    for spec in ("a.parquet", "b.parquet"):
        with nullcontext() if spec[0] == "a" else pytest.raises(ValueError, match="rows"):
            table.read_rows(tmp_path / spec)


# ---- tars ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, size, times", [("x", 1, 3000), ("L", 1, 3000), ("x", 1 << 40, 1)])
def test_headers_of_a_tar_are_its_own_fault(kind, size, times, tmp_path):
    header = tarfile.TarInfo("a")
    header.type, header.size = kind.encode(), size
    block = header.tobuf(tarfile.GNU_FORMAT) + bytes(512)
    (tmp_path / "a.tar").write_bytes(block * times + bytes(1024))
    refused(r"a\.tar is not a readable", shards.samples_of, tmp_path / "a.tar")


# ---- videos -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("movflags, name, at", [("faststart", b"stsz", 12), ("frag_keyframe+empty_moov", b"trun", 8)])
def test_an_mp4_names_no_more_samples_than_it_has_bytes(movflags, name, at, tmp_path):
    with av.open(str(tmp_path / "a.mp4"), "w", options={"movflags": movflags}) as container:
        stream = container.add_stream("libx264", rate=12, options={"bf": "0"})
        stream.width = stream.height = 32
        frames = [av.VideoFrame.from_ndarray(np.full((32, 32, 3), i, np.uint8), format="rgb24") for i in range(9)]
        container.mux([packet for frame in [*frames, None] for packet in stream.encode(frame)])
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    assert len(video.read_video(bytes(data))[0]) == 9
    at += data.index(name)
    assert int.from_bytes(data[at : at + 4]) == 9
    data[at : at + 4] = (85_000_000).to_bytes(4)
    (tmp_path / "b.mp4").write_bytes(data)
    for source in (bytes(data), tmp_path / "b.mp4"):
        refused("85000000", video.read_video, source, error=SampleError)


# ---- steps, JSON --------------------------------------------------------------------------------------------------


def levels(num_steps: int) -> Request:
    return Request("a", sigma_levels=[float(n) for n in range(num_steps, -1, -1)])


STEPPED = [GenerationConfig, ValidationConfig, TrainConfig, lambda **n: Request("a", **n), levels]


@pytest.mark.parametrize("model", STEPPED)
def test_steps_of_a_sampler_are_bounded(model):
    name = "teacher_steps" if model is TrainConfig else "num_steps"
    model(**{name: limits.MOST_STEPS})
    with pytest.raises((ValueError, ValidationError), match=r"10,?000"):
        model(**{name: limits.MOST_STEPS + 1})


@pytest.mark.parametrize("inner", ["[", '{"a":'])
def test_depth_of_json_is_bounded(inner):
    def nested(depth: int) -> str:
        return inner * depth + "1" + {"[": "]"}.get(inner, "}") * depth

    assert files.parsed(nested(limits.MOST_DEPTH - 1)) == json.loads(nested(limits.MOST_DEPTH - 1))
    for depth in (limits.MOST_DEPTH + 1, 900, 100_000):
        refused("levels", files.parsed, nested(depth))


# ---- pixels -------------------------------------------------------------------------------------------------------


def video_of_pixels(path, aspect: Fraction) -> None:
    """An mp4 whose header shows it this much wider."""
    video.write_mp4(path, black(17, 64, 64), 24)
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 44
    content[matrix : matrix + 4] = int(aspect * 65536).to_bytes(4, "big")
    path.write_bytes(content)


def clips_of(folder, clip_frames) -> list:
    return list(MediaOptions(clip_frames=clip_frames).clips(folder / "a.mp4", "a"))


@pytest.mark.parametrize("aspect", [Fraction(200), Fraction(1, 200)])
@pytest.mark.parametrize("clip_frames", [None, 17])
def test_pixels_of_an_absurd_aspect_are_refused(aspect, clip_frames, tmp_path):
    video_of_pixels(tmp_path / "a.mp4", aspect)
    assert reason_of(clips_of, tmp_path, clip_frames, name=r"a\.mp4") == "too_large"
    video_of_pixels(tmp_path / "a.mp4", Fraction(2))
    ((_, frames, *_),) = clips_of(tmp_path, clip_frames)
    assert frames.shape == (17, 64, 128, 3)


def test_a_clip_and_a_frame_are_bounded_as_a_video_is(tmp_path, monkeypatch):
    video.write_mp4(tmp_path / "a.mp4", black(25, 64, 64), 24)
    for frames, fits, most in ((25, 5, 9), (1, 0, 0.5)):
        monkeypatch.setattr(video, "MAX_BYTES", int(most * 64 * 64 * 3))
        for clip_frames in (None, frames):
            assert reason_of(clips_of, tmp_path, clip_frames) in ("too_long", "too_large")
        if fits:
            assert len(clips_of(tmp_path, fits)) == 5


def test_given_pictures_are_bounded_in_number_and_in_all(tmp_path, monkeypatch):
    for name in ("a", "b", "s"):
        picture(tmp_path / f"{name}.png", size=(64, 64))
    rows = [{"file_name": f"{n}.png", "text": n, "source_image": ["s.png"] * m} for n, m in (("a", 16), ("b", 17))]
    write_lines(tmp_path / "metadata.jsonl", rows)
    source = folder.build(str(tmp_path))
    assert [len(clip.given) for clip in source.read(0)] == [16]
    assert fault(source, 1).reason == "too_many_given"
    refused("--given", Request, "a", given=["s.png"] * 17)
    monkeypatch.setattr(_media, "MAX_BYTES", 15 * 64 * 64 * 3)
    assert fault(source).reason == "too_large"


def test_of_given_videos_one_clip_is_in_memory(tmp_path):
    video.write_mp4(tmp_path / "a.mp4", black(81, 128, 128), 24)
    options = MediaOptions(clip_frames=17, stride=1)
    tracemalloc.start()
    beside = options.beside([tmp_path / "a.mp4"] * 2, "a")
    assert all(len(beside(24.0)[0]) == 2 for _ in range(65))
    assert tracemalloc.get_traced_memory()[1] < 10 * 17 * 128 * 128 * 3
    tracemalloc.stop()
    refused("more clips", beside, 24.0, error=SampleError)


# ---- names --------------------------------------------------------------------------------------------------------

NAMES = ["a" * 300 + ".png", "a" * 5000 + ".png", "a/" * 3000 + "a.png", "\ud800.png", "x/\ud83d/a.png", "a\0b.png"]


@pytest.mark.parametrize("name", [*NAMES, "/" + "b" * 300 + "/c.png"], ids=range(7))
def test_a_name_that_no_file_can_have_is_dropped(name, tmp_path):
    picture(tmp_path / "good.png")
    rows = [{"file_name": n, "text": "a cat"} for n in ("good.png", name)]
    write_lines(tmp_path / "metadata.jsonl", rows)
    source = folder.build(str(tmp_path))
    json.dumps(source.identity()).encode()
    for index, file in enumerate(source.files):
        source.item_key(index).encode()
        source.content(index)
        if file == "good.png":
            assert len(list(source.read(index))) == 1
        else:
            with pytest.raises(SampleError):
                list(source.read(index))


# ---- pickles ------------------------------------------------------------------------------------------------------


def pairs(depth: int) -> bytes:
    """Of {pair: 1}: each pair holds the last one twice, so that a hash takes 2 to the power of `depth` steps."""
    again = b"".join(b"q%ch%c\x86" % (i, i) for i in range(depth))
    return b"\x80\x02}NN\x86" + again + b"K\x01s."


# ---- Energon's list of shards -------------------------------------------------------------------------------------

SPLIT = "exclude: {}\nsplit_parts:\n  train: {}\n"
MANY = ["a{0..9999999}", "a{00000001000000..5}", "{a,b}" * 28, "{{0..9}{0..9}}", "{0..999999}{0..999999}"]


@pytest.fixture
def split(tmp_path):
    (tmp_path / ".nv-meta").mkdir()
    return tmp_path / ".nv-meta/split.yaml"


@pytest.mark.parametrize("pattern", MANY)
def test_what_patterns_of_shards_stand_for_is_bounded(pattern, split, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MOST_SHARDS", 1000)
    for excluded, listed in (("[]", f"['{pattern}']"), (f"['{pattern}']", "[]")):
        split.write_text(SPLIT.format(excluded, listed))
        refused("names", shards.splits_of, tmp_path)


def test_patterns_of_shards_are_expanded(split, tmp_path):
    text = SPLIT.format("['b-20241231.tar', 'a-{09..10}.tar']", "['a-{08..11}.tar', 'b-{20241230,20241231}.tar']")
    split.write_text(text)
    names = ["a-08.tar", "a-11.tar", "b-20241230.tar"]
    assert shards.splits_of(tmp_path) == {"train": names, "val": [], "test": []}


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "zero"])
def test_a_list_of_shards_that_is_no_file_is_not_read(make, split, tmp_path):
    make(split)
    refused(r"\.nv-meta", shards.splits_of, tmp_path)


# ---- more pickles -------------------------------------------------------------------------------------------------

ALLOCATING = {
    "a far place of the memo": b"\x80\x02Nr" + (1 << 26).to_bytes(4, "little") + b".",
    "pairs of pairs": pairs(60),
    "bytes that are not there": b"\x80\x05\x96" + (3 << 30).to_bytes(8, "little") + b"abc.",
}


@pytest.mark.parametrize("data", ALLOCATING.values(), ids=ALLOCATING)
def test_a_pickle_of_a_few_bytes_takes_no_memory_and_no_time(data):
    tracemalloc.start()
    try:
        exported.read_pickle(data)
    except Exception as error:
        assert not isinstance(error, MemoryError)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


ODD = {
    "a view of one number": torch.zeros(1).expand(1 << 40),
    "rows that overlap": torch.zeros(1 << 12).as_strided((1 << 11, 1 << 11), (1, 1)),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
}


@pytest.mark.parametrize("tensor", ODD.values(), ids=ODD)
def test_only_plain_tensors_are_read_from_a_pth(tensor, tmp_path):
    torch.save({"w": tensor}, tmp_path / "a.pth")
    refused(r"a\.pth", exported.read_saved, tmp_path / "a.pth", error=CheckpointError)


def test_one_storage_under_many_names_is_refused(tmp_path):
    numbers = torch.zeros(1 << 12)
    torch.save({str(i): numbers for i in range(20)}, tmp_path / "a.pth")
    refused("views", exported.read_saved, tmp_path / "a.pth", error=CheckpointError)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_pth_with_a_key_that_is_hashed_for_ever_is_refused(compression, tmp_path):
    torch.save({"w": torch.zeros(3)}, tmp_path / "a.pth")
    with zipfile.ZipFile(tmp_path / "a.pth") as good, zipfile.ZipFile(tmp_path / "b.pth", "w", compression) as bad:
        for name in good.namelist():
            bad.writestr(name, pairs(60) if name.endswith("data.pkl") else good.read(name))
    refused(r"b\.pth", exported.read_saved, tmp_path / "b.pth", error=CheckpointError)


def test_weights_of_a_module_are_read_from_a_pth(tmp_path):
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2)).bfloat16()
    torch.save(layer.state_dict(), tmp_path / "a.pth")
    found = exported.read_saved(tmp_path / "a.pth")
    assert all(torch.equal(found[name], value) for name, value in layer.state_dict().items())
