from types import SimpleNamespace

import torch

from dfm_nb.generation.pipeline import Pipeline


def test_a_prompt_that_loses_something_is_named_once(caplog):
    pipe = Pipeline.__new__(Pipeline)
    pipe._texts = {}
    pipe.text_encoder = SimpleNamespace(
        encode=lambda texts: [torch.zeros(2, 4)] * len(texts),
        lost=lambda text: {"text_cut": "it is cut"} if text == "a long one" else {},
    )
    for _ in range(2):
        pipe.encode_text(["a short one", "a long one"])
    assert [r.args[0] for r in caplog.records] == ["a long one"]
