"""dfm_nb and workbench write files by `dfm_nb.base.files` alone, which follows no link and leaves no half of a file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITERS = (
    "write_text write_bytes copyfile copyfileobj copy2 copytree move save_file savefig imsave tofile savez".split()
)
WRITERS += ["savez_compressed", "to_parquet"]
"""Functions and methods that write a file; also `open` for writing and `save` of what is not ours."""
OURS = re.compile(r"plots|parts|self|writer|clip|video|result|tokenizer|encoders\[|canvas|super\(|made\[")
"""What has a `save` of its own, or one that writes no file."""
MEMORY = re.compile(r"out|buffer|\(out := io\.BytesIO\(\)\)")
EXCEPTIONS = {
    ("dfm_nb/base/files.py", "write_bytes"): "the writer itself",
    ("dfm_nb/base/argv.py", "write_text"): "the file that our own launcher made for its answer",
    ("dfm_nb/base/verb.py", "write_text"): "the same",
    ("dfm_nb/base/video.py", "open"): "PyAV, in `replacing`",
    ("dfm_nb/checkpoints/tensor_files.py", "open"): "in `replacing`",
    ("dfm_nb/checkpoints/consolidated.py", "save"): "of torch, in `replacing`",
    ("dfm_nb/checkpoints/exported.py", "write_bytes"): "into a temporary folder that was just made",
    ("dfm_nb/text/parts.py", "copyfileobj"): "into an opened part",
}
"""By file and name, with the reason."""


def ways_to_write(code: str) -> Iterator[str]:
    """The name of each call that may write a file by itself; mode `x` follows no link."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [ast.unparse(argument) for argument in (*node.args, *(k.value for k in node.keywords))]
        if any(map(MEMORY.fullmatch, given)) or any(k.arg == "fileobj" for k in node.keywords):
            continue
        opens = name in ("open", "fdopen") and any(re.fullmatch(r"'[rbt]*[wa+][wa+bt]*'", text) for text in given)
        saves = name == "save" and isinstance(node.func, ast.Attribute) and not OURS.match(ast.unparse(node.func.value))
        if opens or (saves and given) or name in WRITERS:
            yield name


def test_files_are_written_in_one_place():
    found = set()
    for top in ("dfm_nb", "workbench"):
        for path in (ROOT / top).rglob("*.py"):
            found |= {(path.relative_to(ROOT).as_posix(), name) for name in ways_to_write(path.read_text("utf-8"))}
    assert not found - EXCEPTIONS.keys(), "use dfm_nb.base.files: replacing, write_atomically, appending"
    assert not EXCEPTIONS.keys() - found, "remove the exception"
