"""The table source: every kind of table and of reference, and a server that does what servers do."""

import functools
import io
import json
import threading

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dfm_nb.base import urls, video
from dfm_nb.data.sources import _location, folder, table
from tests.data.sources.test_folder import fault, read
from tests.frames import counting_clip
from tests.json_files import write_lines
from tests.refusals import refused
from tests.servers import Quiet, serving


def png(colour="red", size=(24, 20)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def mp4(tmp_path) -> bytes:
    video.write_mp4(tmp_path / "made.mp4", counting_clip(9), 10)
    return (tmp_path / "made.mp4").read_bytes()


def colour_of(clip):
    return tuple(clip.video[0, 0, 0].tolist())


# ---- a server -----------------------------------------------------------------------------------------------------


ANSWERS = {
    "good": {"body": png("lime")},
    "missing": {"body": b"no", "status": 404, "kind": "text/html"},
    "private": {"body": b"no", "status": 403, "kind": "text/html"},
    "garbage": {"body": b"these are no pixels"},
    "truncated": {"body": png("red")[:-20], "length": len(png("red"))},
    "huge": {"body": png(), "length": 3 << 30},
    "moved": {"status": 302, "Location": "/good.png"},
    "loop": {"status": 302, "Location": "/loop"},
    "inside": {"status": 302, "Location": "http://127.0.0.1:%d/good.png"},
    "inside_by_uri": {"status": 301, "Location": "", "URI": "http://127.0.0.1:%d/good.png"},  # as aiohttp
}


class Handler(Quiet):
    """Answers by path; `server.seen` counts the requests for each."""

    def do_GET(self):
        name = self.path.lstrip("/").partition("?")[0]
        self.server.seen[name] = self.server.seen.get(name, 0) + 1
        kind = name.partition(".")[0].partition("%")[0]
        self.answer(**ANSWERS[kind]) if kind in ANSWERS else getattr(self, kind)()

    def answer(self, body=b"", status=200, kind="image/png", length=None, **headers):
        self.begin(status, Content_Type=kind, Content_Length=str(len(body) if length is None else length), **headers)
        self.wfile.write(body)

    def begin(self, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value.replace("%d", str(self.server.server_port)))
        self.end_headers()

    def endless(self):
        self.begin()
        try:
            for _ in range(2000):
                self.wfile.write(bytes(1 << 16))
        except OSError:
            self.server.hung_up.set()

    def stall(self):
        self.begin(Content_Length="1000")
        self.server.released.wait(10)

    def trickle(self):
        self.begin(Content_Length="1000")
        for _ in range(100):
            self.wfile.write(b"x")
            self.wfile.flush()
            if self.server.released.wait(0.05):
                break


@pytest.fixture
def server(monkeypatch):
    """Its client waits 2 s and asks twice."""
    monkeypatch.setattr(_location, "PAUSES_S", [0.01])
    monkeypatch.setattr(urls, "SILENCE_S", 2)
    monkeypatch.setattr(urls, "_client", functools.cache(urls._client.__wrapped__))
    with serving(Handler, seen={}, released=threading.Event(), hung_up=threading.Event()) as httpd:
        yield httpd
        httpd.released.set()


def served(tmp_path, server, *names, **options):
    """A table of the server's files."""
    path = tmp_path / "t.csv"
    pd.DataFrame({"image_url": [f"{server.url}/{n}" for n in names], "caption": "a caption"}).to_csv(path, index=False)
    return table.build(str(path), **options)


def test_urls_are_fetched(tmp_path, server):
    source = served(tmp_path, server, "good.png", "moved.png", "good näme.png", "good.png?size=2")
    assert [colour_of(read(source, i)[0]) for i in range(4)] == 4 * [(0, 255, 0)]
    assert "good%20n%C3%A4me.png" in server.seen


@pytest.mark.parametrize("name", ["inside", "inside_by_uri"])
def test_a_public_server_cannot_redirect_to_this_machine(name, tmp_path, server, monkeypatch):
    assert colour_of(read(served(tmp_path, server, name))[0]) == (0, 255, 0)  # the table's own URL is there
    server.seen.clear()
    server.url = server.url.replace("127.0.0.1", "localhost")  # stands for a host of the internet
    is_public = urls.is_public
    monkeypatch.setattr(urls, "is_public", lambda url: "//localhost" in url or is_public(url))
    error = fault(served(tmp_path, server, name))
    assert error.reason == "refused" and "127.0.0.1" in error.detail and "good.png" not in server.seen


def test_a_driver_follows_no_redirect_to_this_machine(server, monkeypatch):
    assert folder_fault(f"{server.url}/inside.zip") and "good.png" in server.seen  # no zip, but asked for
    server.seen.clear()
    monkeypatch.setattr(urls, "is_public", lambda url: "//localhost" in url)
    assert folder_fault(f"{server.url.replace('127.0.0.1', 'localhost')}/inside.zip")
    assert "inside.zip" in server.seen and "good.png" not in server.seen


def folder_fault(spec):
    return refused("inside", folder.build, spec)


def test_addresses_of_this_machine_and_its_network_are_not_public():
    private = "127.0.0.1", "0.0.0.0", "10.1.2.3", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]"
    private += "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "[::127.0.0.1]", "224.0.0.1", "[fe80::1%25lo]", "[ff02::1]"
    assert not any(urls.is_public(f"http://user@{host}:8080/x") for host in private)
    assert all(urls.is_public(f"http://{host}/x") for host in ("8.8.8.8", "[2606:4700::1111]", "[64:ff9b::808:808]"))


@pytest.mark.parametrize(
    "name, reason, requests",
    [
        ("missing.png", "missing_file", 1),
        ("garbage.png", "unreadable_image", 1),
        ("huge.png", "too_large", 1),
        ("loop", "refused", None),
        ("private.png", "refused", 1),
        ("truncated.png", "unreachable", 2),
        ("stall.png", "unreachable", 2),
    ],
)
def test_a_fault_of_the_server_is_named_and_retried_when_it_may_pass(name, reason, requests, tmp_path, server):
    error = fault(served(tmp_path, server, name))
    assert error.reason == reason and f"{server.url}/{name}" in error.detail and "row 1 of t.csv" in error.detail
    assert requests is None or server.seen[name] == requests


def test_a_body_without_length_is_cut_at_the_bound(tmp_path, server, monkeypatch):
    monkeypatch.setattr(_location, "MOST_BYTES", 1 << 20)
    assert fault(served(tmp_path, server, "endless.png")).reason == "too_large"
    assert server.hung_up.wait(5)


def test_a_trickle_ends_with_the_attempt(tmp_path, server, monkeypatch):
    monkeypatch.setattr(urls, "TOTAL_S", 0.3)
    assert fault(served(tmp_path, server, "trickle")).reason == "unreachable"


# ---- kinds of table -----------------------------------------------------------------------------------------------

ROWS = [
    {"image": "a.png", "caption": "ein Fälter"},
    {"image": "gone.png", "caption": "gone"},
    {"image": "a.png", "caption": ""},
    {"image": "", "caption": "NA"},
]


def write_table(path, rows):
    frame = pd.DataFrame(rows)
    if path.suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    else:
        frame.to_parquet(path)
    return path


@pytest.fixture
def build(tmp_path):
    """A table of this name, which may be written first."""

    def build(name, rows=None, **options):
        if rows is not None:
            write_table(tmp_path / name, rows)
        return table.build(str(tmp_path / name), **options)

    return build


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_kind_of_table_reads_alike(build, suffix, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    source = build(f"t{suffix}", ROWS)
    assert len(source) == 4
    (clip,) = read(source)
    assert clip.caption == "ein Fälter" and clip.video.shape == (1, 20, 24, 3) and clip.source == "table"
    assert [fault(source, i).reason for i in (1, 2, 3)] == ["missing_file", "no_caption", "no_media"]
    assert "row 2 of t" in fault(source, 1).detail and "gone.png" in fault(source, 1).detail


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_what_spreadsheets_write_is_read_and_a_guess_is_named(separator, encoding, tmp_path, caplog):
    rows = [["image", " caption"], ["a.png", f'"ein{separator} F\xe4lter"'], ["b.png", '"two\r\nlines, ""both"""']]
    content = "".join(separator.join(row) + "\r\n" for row in [*rows, ["c.png"]])
    (tmp_path / "t.csv").write_bytes(content.encode(encoding))
    rows = table.read_rows(tmp_path / "t.csv")
    assert rows == {
        "image": ["a.png", "b.png", "c.png"],
        "caption": [f"ein{separator} F\xe4lter", 'two\r\nlines, "both"', None],
    }
    assert ("t.csv" in caplog.text and "F\xe4lter" in caplog.text) == (encoding == "cp1252")


def test_of_a_list_of_pictures_the_first_is_taken_and_other_things_are_named_shortly(build, tmp_path, caplog):
    images = [[{"bytes": png("blue"), "path": "a"}, {"bytes": png(), "path": "b"}], [], None]
    pq.write_table(pa.table({"image": images, "text": ["a", "b", "c"]}), tmp_path / "t.parquet")
    source = build("t.parquet")
    assert colour_of(read(source)[0]) == (0, 0, 255) and "image" in caplog.text
    assert [fault(source, i).reason for i in (1, 2)] == ["no_media"] * 2
    rows = [{"image": image, "text": "x"} for image in (5, [[1] * 9999], "z" * 9999)]
    source = build("t.jsonl", rows)
    assert [fault(source, i).reason for i in (0, 1)] == ["no_media"] * 2
    assert "int" in fault(source, 0).detail and len(fault(source, 2).detail) < 1000


def test_references_are_paths_file_urls_or_nothing_else(build, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.png").write_bytes(png("blue"))
    path = tmp_path / "sub" / "a b.png"
    refs = ["sub/a b.png", str(path), path.as_uri(), "ftp://example.org/a.png"]
    source = build("t.csv", [{"path": r, "text": "x"} for r in refs])
    assert [colour_of(read(source, i)[0]) for i in range(3)] == [(0, 0, 255)] * 3
    assert fault(source, 3).reason == "bad_url"


def test_image_bytes_in_parquet_are_used_and_the_url_where_there_are_none(build, tmp_path):
    (tmp_path / "b.png").write_bytes(png("blue"))
    empty = {"bytes": None, "path": None}
    images = [{"bytes": png("red"), "path": "x.png"}, None, empty, {"bytes": b"", "path": "b.png"}]
    columns = {"image": images, "image_url": ["unused.png", "b.png", None, None], "caption": ["a", "b", "c", "d"]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=1)
    source = build("t.parquet")
    assert [colour_of(read(source, i)[0]) for i in (0, 1, 3)] == [(255, 0, 0), (0, 0, 255), (0, 0, 255)]
    assert fault(source, 2).reason == "no_media"


def test_raw_bytes_in_parquet_may_be_pictures_or_videos(build, tmp_path):
    clip, times = mp4(tmp_path), pa.array([2**62] * 3, pa.timestamp("us"))  # none of Python's
    old = clip[:4] + b"free" + clip[8:]  # QuickTime without ftyp
    columns = {"image": [png("red"), clip, old], "caption": ["a", 7 * "b", "c"], "time": times}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    source = build("t.parquet")
    assert [read(source, i)[0].video.shape for i in range(3)] == [(1, 20, 24, 3), (9, 32, 32, 3), (9, 32, 32, 3)]


def test_captions_that_are_not_text_are_refused_and_numbers_are_taken(build, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"image": "a.png", "caption": c} for c in (["a", 3], {"en": "a"}, 42, None)]
    source = build("t.jsonl", rows)
    assert [fault(source, i).reason for i in (0, 1, 3)] == ["no_caption"] * 3 and read(source, 2)[0].caption == "42"


def test_captions_and_names_of_any_length_drop_their_row(build, tmp_path):
    rows = [{"image": "a.png", "caption": "x" * (2 << 20)}, {"image": "b" * (1 << 20), "caption": "b"}]
    rows += [{"image": "a.png", "caption": "c", "tags": ["y" * (2 << 20)]}, {"image": "a.png", "caption": "d"}]
    (tmp_path / "a.png").write_bytes(png())
    write_lines(tmp_path / "t.jsonl", rows)
    source = build("t.jsonl")
    for row in range(3):
        error = fault(source, row)
        assert error.reason == ("unreadable_image" if row == 1 else "too_large") and len(error.detail) < 1000
    assert read(source, 3)[0].caption == "d"


@pytest.mark.parametrize("large", [[b"\0" * (80 << 20)], [b"\0" * (1 << 20)] * 80], ids=["compressed", "dictionary"])
def test_a_picture_of_few_bytes_takes_no_memory_for_many(build, tmp_path, large):
    columns = {"image": [png(), *large], "caption": ["a"] * (1 + len(large))}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", compression="zstd", row_group_size=101)
    assert (tmp_path / "t.parquet").stat().st_size < 1 << 20
    assert fault(build("t.parquet")).reason == "too_large"


def test_texts_of_few_bytes_take_no_memory_for_many(build, tmp_path):
    texts = {"image": ["a.png"] * 300, "caption": ["x" * (1 << 20)] * 300}
    pq.write_table(pa.table(texts), tmp_path / "u.parquet", compression="zstd")
    refused(r"u.parquet.*caption", build, "u.parquet")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_a_caption_may_be_a_list_and_tags_a_column(suffix, tmp_path):
    """Of a file, or of a DataFrame. Tags are the caption where there is no other."""
    (tmp_path / "a.png").write_bytes(png())
    image = str(tmp_path / "a.png")
    rows = [
        {"image": image, "caption": [" a red square", "", "red"], "tags": ["red", "square"]},
        {"image": image, "caption": ["one"], "tags": []},
        {"image": image, "caption": [], "tags": ["a", "b"]},
        {"image": image, "caption": None, "tags": None},
    ]
    source = table.build(str(write_table(tmp_path / f"t{suffix}", rows)) if suffix else pd.DataFrame(rows))
    clips = [read(source, i)[0] for i in range(3)]
    assert [(c.caption, c.more_captions) for c in clips] == [("a red square", ["red"]), ("one", []), ("a, b", [])]
    assert [c.tags for c in clips] == [["red", "square"], [], ["a", "b"]] and source.tagged
    assert fault(source, 3).reason == "no_caption" and "row 4" in fault(source, 3).detail


def test_a_row_has_a_weight(build, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"image": "a.png", "caption": "a", "weight": weight} for weight in (None, 3, "0.25", 0, "inf")]
    write_lines(tmp_path / "t.jsonl", rows)
    source = build("t.jsonl")
    assert [read(source, i)[0].weight for i in range(3)] == [1, 3, 0.25]
    assert [fault(source, i).reason for i in (3, 4)] == ["bad_weight"] * 2


def test_identity_follows_references_and_options_and_keys_do_not(tmp_path):
    path = tmp_path / "my table.csv"
    few = table.build(str(write_table(path, ROWS[:2])))
    source = table.build(str(write_table(path, ROWS)))
    keys = [source.item_key(i) for i in range(4)]
    others = [table.build(str(path), clip_frames=9)]
    others.append(table.build(str(write_table(path, [{**row, "image": "x"} for row in ROWS]))))
    first = source.identity()
    assert first == json.loads(json.dumps(first)) and first not in [other.identity() for other in others]
    assert [few.item_key(i) for i in range(2)] == keys[:2] and len(set(keys)) == 4


def test_identity_follows_the_pictures_wherever_they_are(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png("red"))
    inside = lambda colour, text: pa.table({"image": [png(colour)], "text": [text]})  # noqa: E731

    def of(colour, text="x"):
        (tmp_path / "a.png").write_bytes(png(colour))
        pq.write_table(inside(colour, text), tmp_path / "in.parquet")
        paths = write_table(tmp_path / "t.csv", [{"image": "a.png", "text": text}])
        held = [pd.DataFrame({"image": [i], "text": [text]}) for i in (png(colour), Image.new("RGB", (9, 9), colour))]
        return [table.build(spec).identity() for spec in (str(paths), str(tmp_path / "in.parquet"), *held)]

    assert of("red") == of("red")
    for change, key in ((("blue",), "contents_sha256"), (("red", "y"), "captions_sha256")):
        for before, after in zip(of("red"), of(*change)):
            assert {name for name in before if before[name] != after[name]} == {key}


@pytest.mark.parametrize("option, column", [("image_column", "foto"), ("caption_column", "said")])
def test_columns_can_be_chosen(build, option, column, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"image": "gone", "photo": "a.png", "caption": "two", "spoken": "one"}]
    path = str(write_table(tmp_path / "t.csv", rows))
    assert read(table.build(path, image_column="photo", caption_column="spoken"))[0].caption == "one"
    refused(column, table.build, path, **{option: column})
    del rows[0][option.removesuffix("_column")]
    refused(option.replace("_", "-"), build, "t.csv", rows)  # it cannot be guessed


@pytest.mark.parametrize(
    "name, content, where",
    [
        ("t.csv", b"", ""),
        ("t.csv", b"image,caption\n", ""),
        ("t.csv", b"image,caption\na,b\nc,d,e\n", "line 3"),
        ("t.csv", b"image,caption, caption,,\na,b,c,,\n", "caption"),
        ("t.csv", b'image,caption\na,"big\nb,c\n', "line 2"),
        ("t.csv", b'image,caption\na,b\nb,"big\nc,d\nd,"e"\n', "line 3"),
        ("t.csv", b"image,caption\na,\x81\n", "UTF-8"),
        ("t.jsonl", b'{"image": "a"}\n{oops\n', "line 2"),
        ("t.jsonl", b'{"image": "a"}\n{"image": ' + b"[" * 100_000, "line 2"),
        ("t.parquet", b"PAR1 no", ""),
        ("t.xlsx", b"x", ""),
    ],
)
def test_malformed_tables_are_refused(build, name, content, where, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert where in str(refused(name, build, name))


def test_missing_tables_are_refused(tmp_path):
    for name in ("none.csv", ""):
        refused(tmp_path.name, table.build, str(tmp_path / name), error=FileNotFoundError)


def test_columns_of_edit_data_sets_give_a_picture_beside_the_row_s_own(build):
    frame = pd.DataFrame(
        {
            "input_image": [{"bytes": png("blue")}, None],
            "edit_prompt": ["make it red", "a red square"],
            "edited_image": [{"bytes": png("red")}, {"bytes": png("red")}],
            "conditioning_image": [[{"bytes": png("green")}, {"bytes": png("white")}], None],
        }
    )
    source = table.build(frame)
    (pair,), (plain,) = read(source, 0), read(source, 1)
    assert colour_of(pair) == (255, 0, 0) and pair.caption == "make it red" and plain.given == []
    assert [tuple(v[0, 0, 0]) for v in pair.given] == [(0, 0, 255), (0, 128, 0), (255, 255, 255)]
    frame["input_image"] = [{"bytes": b"damaged"}, None]
    assert table.build(frame).identity() != source.identity() and fault(table.build(frame)).reason == "unreadable_image"
