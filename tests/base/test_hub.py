"""What comes from the hub, or as from there, is data."""

import io
import sys

from dfm_nb.base.hub import tokenizer_of
from dfm_nb.text import tokenizer
from tests.json_files import write_json
from tests.refusals import refused


def test_a_tokenizers_own_code_is_refused_and_nobody_is_asked(tmp_path, monkeypatch):
    (tmp_path / "x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass X: pass\n")
    config = {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": [None, "x.X"]}}
    write_json(tmp_path / "tokenizer_config.json", config)
    for load in (tokenizer_of, tokenizer.load):
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
        refused(tmp_path.name, load, tmp_path)
        assert sys.stdin.read() == "y\n" and not (tmp_path / "ran").exists()
