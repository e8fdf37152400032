"""docs/wan.md: every bash and python block runs, in order, on a small Wan with random weights and clips of 5 frames."""

import pytest

from dfm_nb.base.video import read_video, write_mp4
from dfm_nb.butterflies import synthetic
from dfm_nb.checkpoints import loading
from tests.docs.docs_pages import Page, desk
from tests.integrations.wan.pipeline_folder import save_wan
from tests.tiny_run import losses

PAGE = Page("docs/wan.md")
SHORT = {"train.train_iters": 2, "dataset.task_encoder_seq_length": 160}
SMALL = {
    "--clip-frames 81": "--clip-frames 5",
    "clip_frames=81": "clip_frames=5",
    "--height 480 --width 832 --num-video-frames 81": "--height 32 --width 48 --num-video-frames 5 --num-steps 2",
    "height=480, width=832, num_frames=81": "height=32, width=48, num_frames=5, num_steps=2",
    "checkpoint.pretrained=wan-": " ".join(f"{k}={v}" for k, v in SHORT.items()) + " checkpoint.pretrained=wan-",
    '"checkpoint.pretrained": weights': f'"checkpoint.pretrained": weights, **{SHORT}',
}
"""Sizes and lengths of the page, and what they are here."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_of_the_page_runs(tmp_path, make_once):
    wan = make_once("wan", save_wan)
    clips = tmp_path / "clips"
    clips.mkdir()
    for i, attributes in enumerate(synthetic.seen_combinations()[:3]):
        write_mp4(clips / f"{i}.mp4", synthetic.render(attributes, i, 32, 48, 7), 16)
        (clips / f"{i}.txt").write_text(synthetic.caption_for(attributes, 0))
    (tmp_path / "hub" / "Wan-AI").mkdir(parents=True)
    (tmp_path / "hub" / "Wan-AI" / "Wan2.1-T2V-1.3B-Diffusers").symlink_to(wan)
    here = desk(tmp_path, hub=tmp_path / "hub")
    here.tool("pip", "#!/bin/sh\n")
    for language, code in PAGE.blocks:
        for word, small in SMALL.items():
            code = code.replace(word, small)
        here.run(language, code)
    assert read_video(tmp_path / "clip.mp4")[0].shape == (5, 32, 48, 3)
    config = loading.find_weights(tmp_path / "runs" / "wan").config
    assert (config.model.objective, config.model.lora.rank, config.generation.sampler) == ("flow", 16, "unipc_2")
    for name in ("wan", "wan-style", "python"):
        found = losses(tmp_path / "runs" / name)
        assert found and all(x == x for x in found)
