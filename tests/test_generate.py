"""The pipeline in one process: geometry, guidance, reproducibility, previews, long clips; weights mean nothing."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

from dfm_nb.base.video import read_image, write_png
from dfm_nb.config.schema import GenerationConfig
from dfm_nb.generate import main as generate_main
from dfm_nb.generation.pipeline import Preview
from dfm_nb.generation.request import Request
from tests.frames import black
from tests.refusals import refused

pytestmark = pytest.mark.slow

PROMPTS = [f"a {c} butterfly over a meadow" for c in ("red", "blue", "green", "white")]
SIZE = {"image_height": "height", "image_width": "width", "num_frames": "num_video_frames", "fps": "fps"}
FAST = {"height": 32, "width": 48, "num_video_frames": 1, "fps": 8.0, "num_steps": 3, "guidance": 2.0}


def test_what_the_checkpoint_recommends_is_used_where_nothing_else_is_said(tiny_pipe, tiny_data):
    from dfm_nb.data.stores import ShardStore

    own = {"guidance": 3.0, "schedule": "flow", "num_steps": 8}  # the demo recipe's
    store = ShardStore(tiny_data)
    sizes = Counter(tuple(store.read(i).meta[k] for k in SIZE) for i in range(len(store)))
    usual = dict(zip(SIZE.values(), sizes.most_common(1)[0][0]))
    default = GenerationConfig().model_dump(exclude_none=True)
    assert tiny_pipe.recommended == default | own | usual
    unsized = Request("two robots play chess", width=96).completed(tiny_pipe.config)
    assert {name: getattr(unsized, name) for name in usual} == usual | {"width": 96}
    assert Request("", schedule="karras").completed(tiny_pipe.config).num_steps == default["num_steps"]
    ((request,), (other,)) = (
        [c.request for c in tiny_pipe(PROMPTS[:1], height=32, width=32, **given)]
        for given in ({}, {"num_inference_steps": 2, "sampler": "euler"})
    )
    assert (request.num_steps, request.guidance, request.sampler) == (8, 3.0, "unipc_2")
    assert (other.num_steps, other.guidance, other.sampler) == (2, 3.0, "euler")


def test_same_request_gives_the_same_latent_and_another_one_another(tiny_pipe):
    r = Request(PROMPTS[0], **FAST)
    first = tiny_pipe.sample_latents([r])
    assert torch.equal(first, tiny_pipe.sample_latents([r]))
    for other in ({"seed": 2}, {"index": 1}, {"negative_prompt": "night"}):
        assert not torch.allclose(first, tiny_pipe.sample_latents([Request(PROMPTS[0], **FAST, **other)]))


def test_the_nearest_training_caption_comes_before_a_prompt_that_is_none(tiny_pipe, tiny_data, monkeypatch, caplog):
    from dfm_nb.data.stores import ShardStore, anchors

    def drawn(**asked):
        return [
            made for _, made in sorted(tiny_pipe.run([Request(p, i, **FAST, **asked) for i, p in enumerate(asked_for)]))
        ]

    Request("a", anchor="nearest").completed(tiny_pipe.config)
    assert "--anchor" in caplog.text, "it has no effect here"
    known = anchors(ShardStore(tiny_data))
    asked_for = [known.texts[3], "a mauve moth of the night"]
    today = drawn()
    with_anchors = tiny_pipe.config.samples.model_copy(update={"anchors": known})
    monkeypatch.setattr(tiny_pipe, "config", tiny_pipe.config.with_samples(with_anchors))
    of_training, other = drawn(anchor="nearest")
    assert torch.equal(of_training.latent, today[0].latent) and "anchor_caption" not in of_training.made_by
    near = other.made_by["anchor_caption"]
    assert near in known.texts and not torch.equal(other.latent, today[1].latent)
    asked_for[1] = f"{near} {asked_for[1]}"
    for off in ({}, {"anchor": "none"}):
        written_out = drawn(**off)
        torch.testing.assert_close(written_out[1].latent, other.latent, rtol=1e-4, atol=1e-4)
        assert torch.equal(written_out[0].latent, today[0].latent)


def test_long_clip_is_decoded_in_bounded_pieces(tiny_pipe):
    """121 frames: pieces of at most 16 frames, put together what one decode of the whole gives."""
    latent = torch.randn(16, 31, 4, 6, generator=torch.Generator().manual_seed(0))
    raw = tiny_pipe.scale.from_model(latent, 0.5)[None]
    pieces = [p.shape[2] for p in tiny_pipe.tokenizer.decode_windows(raw)]
    assert max(pieces) == 16 and sum(pieces) == 121
    whole = ((tiny_pipe.tokenizer.decode(raw)[0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
    frames = tiny_pipe.decode(latent)
    assert frames.shape == (121, 32, 48, 3) and (frames == whole).all()


def test_previews_come_every_k_steps_and_end_in_the_clip(tiny_pipe):
    seen = []

    def callback(step, num_steps, clips):
        seen.append((step, num_steps, [c.request.prompt for c in clips], clips.array()))

    settings = {**FAST, "num_steps": 7, "sampler": "euler"}
    clips = tiny_pipe(PROMPTS[:2], callback=callback, preview_every=3, **settings)
    assert [(s, n) for s, n, _, _ in seen] == [(3, 7), (6, 7), (7, 7)]
    assert all(p == PROMPTS[:2] and f.shape == (2, 1, 32, 48, 3) and f.dtype == np.uint8 for _, _, p, f in seen)
    assert (seen[-1][3] == clips.array()).all(), "Euler's last estimate is the sample"
    assert (seen[0][3] != clips.array()).any()
    assert (tiny_pipe(PROMPTS[:2], **settings).array() == clips.array()).all(), "watching changes nothing"


def test_previews_that_nobody_looks_at_are_not_decoded(tiny_pipe, monkeypatch):
    decoded = []
    decode = type(tiny_pipe).decode
    monkeypatch.setattr(type(tiny_pipe), "decode", lambda self, *given: decoded.append(1) or decode(self, *given))
    look = lambda step, steps, clips: step == 2 and clips[0].frames  # noqa: E731
    tiny_pipe(PROMPTS[:2], callback=look, **{**FAST, "num_steps": 4})
    assert len(decoded) == 1 + 2


@pytest.mark.parametrize("frames", [1, 5, 9, 13])
def test_a_preview_decodes_its_middle_frame_without_the_frames_after_it(tiny_pipe, frames):
    request = Request("a moth", height=32, width=48, num_video_frames=frames)
    preview = Preview(tiny_pipe, request, torch.randn(16, *request.latent_grid))
    assert np.abs(preview.middle.astype(int) - preview.frames[frames // 2]).max() <= 1


def test_interrupted_pipeline_remembers_finished_clips(tiny_pipe):
    def stop(step, num_steps, clips):
        if clips[0].request.index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_pipe(PROMPTS, batch_size=2, callback=stop, **FAST)
    assert [c.request.prompt for c in tiny_pipe.finished] == PROMPTS[:2]
    assert tiny_pipe.finished.array().shape == (2, 1, 32, 48, 3)


def test_settings_other_than_the_prompt_go_into_batches_of_their_own(tiny_pipe):
    requests = [
        Request(PROMPTS[0], index=0, **FAST),
        Request(PROMPTS[1], index=1, **{**FAST, "height": 64}),
        Request(PROMPTS[2], index=2, seed=9, **FAST),
        Request(PROMPTS[3], index=3, negative_prompt="night", **FAST),
    ]
    done = dict(tiny_pipe.run(requests))
    assert [done[i].frames.shape[1] for i in range(4)] == [32, 64, 32, 32]
    for i in (1, 2, 3):
        (alone,) = tiny_pipe.sample_latents([done[i].request]).float()
        torch.testing.assert_close(done[i].latent, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flag, key", [("init_image", "condition_frames_prob"), ("last_image", "condition_last_prob")])
def test_given_frames_need_a_model_trained_for_them(tiny_pipe, tmp_path, flag, key):
    write_png(tmp_path / "a.png", black(32, 48))
    refused(
        f"dataset.{key}", tiny_pipe, PROMPTS[0], **{flag: str(tmp_path / "a.png")}, **FAST | {"num_video_frames": 5}
    )


def test_prompts_are_cut_where_the_training_captions_were(tiny_pipe, monkeypatch):
    """The data set was prepared with --max-text-tokens 4, say: generation takes that from its manifest."""
    monkeypatch.setitem(tiny_pipe.manifest["text_encoder"], "max_tokens", 4)
    monkeypatch.delitem(vars(tiny_pipe), "text_encoder", raising=False)
    monkeypatch.setattr(tiny_pipe, "_texts", {})
    (text,) = tiny_pipe.encode_text(["a red butterfly over a meadow in the evening"])
    assert len(text) == 4


def test_each_picture_of_a_prompt_has_a_seed_and_a_file_of_its_own(tiny_checkpoint, tiny_pipe, tmp_path, capsys):
    """As from Python; a size that was not trained is said with those that were."""
    flags = ["--checkpoint-path", str(tiny_checkpoint), "--prompt", "a bee", "--num-steps", "1", "--num-images", "2"]
    flags += ["--size", "64x32", "--seed", "7", "--video-save-path", str(tmp_path / "b.png")]
    assert generate_main(flags) == 0
    assert re.search("64x32 px was not trained; trained sizes: .*48x32", capsys.readouterr().out)
    names = [f"idx=0_rank=0_seed={seed}_b.png" for seed in (7, 8)]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == names
    own = tiny_pipe("a bee", num_steps=1, width=64, height=32, num_images=2, seed=7).frames
    assert all(np.array_equal(read_image(tmp_path / name), frames) for name, frames in zip(names, own))
