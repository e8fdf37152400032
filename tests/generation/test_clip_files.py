"""`dfm generate` and its files: names, sidecars that make the same clip again, overwriting, interrupts, errors."""

import hashlib
import json
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dfm_nb.base.argv import guard
from dfm_nb.base.video import read_image, read_video, write_mp4
from dfm_nb.generate import GenerateOptions, main
from dfm_nb.generation import clip_files
from dfm_nb.generation.request import Request
from tests.frames import black
from tests.json_files import read_json
from tests.processes import commands, wait_until
from tests.refusals import refused

pytestmark = pytest.mark.slow

SMALL = "--height 32 --width 48 --num-steps 3 --guidance 2".split()


def generate(checkpoint, out, *flags) -> int:
    return guard(main, ["--checkpoint-path", str(checkpoint), "--video-save-path", str(out), *SMALL, *map(str, flags)])


SETTINGS = (
    "--negative-prompt night --num-video-frames 5 --fps 8 --guidance-interval 0.1 30 --guidance-rescale 0.5"
    " --sampler dpmpp_2m_sde --schedule exponential --sigma-max 60 --seed 11"
)


@pytest.mark.parametrize(
    "asked, written",
    [
        ("clip.mp4", "clip.png"),
        ("clip.PNG", "clip.png"),
        ("clip.v2", "clip.v2.png"),
        ("new/", "new/out.png"),
        ("there", "there/out.png"),
        ("a[1]*.mp4", "a[1]*.png"),
    ],
)
def test_a_clip_gets_the_name_that_was_asked_for(asked, written, tmp_path):
    (tmp_path / "there").mkdir()
    one = Request("a", num_video_frames=1)
    path = clip_files.output_path(clip_files.output_name(f"{tmp_path}/{asked}"), one, many=False)
    assert path == tmp_path / written
    assert clip_files.output_path(clip_files.output_name(path), one, many=False) == path


@pytest.mark.parametrize("asked", ["a.gif", "a.JPG", "a.webm"])
def test_a_name_of_another_format_is_refused_before_anything(asked, capsys):
    assert generate("none", asked, "--prompt", "a") == 2
    assert asked in said(capsys)


def test_sidecar_draws_the_same_bits_again(tiny_checkpoint, tmp_path, capsys):
    """Every setting away from its default, in a folder that does not exist yet."""
    out = tmp_path / "deep" / "a.mp4"
    assert generate(tiny_checkpoint, out, "--prompt", "a blue moth", *SETTINGS.split()) == 0
    assert generate(tiny_checkpoint, tmp_path / "b.mp4", "--prompts-file", f"{out}.json") == 0
    assert f"b.mp4, bit for bit the clip of {out}.json" in capsys.readouterr().out
    assert (tmp_path / "b.mp4").read_bytes() == out.read_bytes()
    sidecar, again = (read_json(f"{p}.json") for p in (out, tmp_path / "b.mp4"))
    assert {k for k in sidecar | again if sidecar[k] != again[k]} <= {"elapsed_s", "made_at"}
    frames, fps = read_video(out)
    assert frames.shape == (5, 32, 48, 3) and fps == 8
    assert sidecar["checkpoint"]["sha256"] and sidecar["tokenizer"]["name"] == "pca" and sidecar["layout"] == "DP only"
    sidecar["checkpoint"]["sha256"] = "f00"
    Path(f"{out}.json").write_text(json.dumps(sidecar))
    assert generate(tiny_checkpoint, tmp_path / "c.mp4", "--prompts-file", f"{out}.json") == 2, "of other weights"
    assert f"{out}.json" in said(capsys)


def test_sidecar_knows_what_it_started_from(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start, out = tmp_path / "start.mp4", tmp_path / "a.mp4"
    write_mp4(start, black(5, 32, 48), 12)
    flags = ["--prompt", "a moth", "--num-video-frames", 5, "--init-video", "start.mp4"]
    assert generate(tiny_checkpoint, out, *flags) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = ["--prompts-file", f"{out}.json"]
    assert generate(tiny_checkpoint, tmp_path / "b.mp4", *again) == 0
    first, second = (read_json(tmp_path / f"{name}.mp4.json") for name in "ab")
    assert first["frames_sha256"] == second["frames_sha256"]
    capsys.readouterr()
    write_mp4(start, np.full((5, 32, 48, 3), 200, np.uint8), 12)
    assert generate(tiny_checkpoint, tmp_path / "c.mp4", *again) == 2
    assert "start.mp4" in said(capsys), "another start than the clip's"


def test_hashes_and_latent_of_the_sidecar_are_those_of_the_clip(tiny_checkpoint, tmp_path):
    assert generate(tiny_checkpoint, tmp_path / "a.mp4", "--prompt", "a bee", "--save-latents") == 0
    record = read_json(tmp_path / "a.png.json")
    picture = read_image(tmp_path / "a.png")
    assert hashlib.sha256(picture.tobytes()).hexdigest() == record["frames_sha256"]
    latent = load_file(tmp_path / "a.png.safetensors")["latent"]
    assert latent.shape == (16, 1, 4, 6)
    assert hashlib.sha256(latent.numpy().tobytes()).hexdigest() == record["latent_sha256"]
    recommended = (record["num_steps"], record["guidance"], record["sampler"])
    assert recommended == (3, 2, "unipc_2"), "flags go before what the checkpoint recommends"
    other = "bf16" if record["mixed_precision"] == "fp32" else "fp32"
    assert generate(tiny_checkpoint, tmp_path / "b.mp4", "--prompt", "a bee", "--mixed-precision", other) == 0
    rounded = read_json(tmp_path / "b.png.json")
    assert rounded["mixed_precision"] == other and rounded["latent_sha256"] != record["latent_sha256"]


def test_existing_files_are_kept_unless_asked(tiny_checkpoint, tmp_path, capsys):
    out = tmp_path / "a.png"
    out.write_bytes(b"mine")
    assert generate(tiny_checkpoint, out, "--prompt", "x") == 2
    assert "--overwrite" in said(capsys) and out.read_bytes() == b"mine"
    assert generate(tiny_checkpoint, out, "--prompt", "x", "--tokenizer_model", "Cosmos-Tokenizer-DV") == 2
    assert "pca" in said(capsys), "the tokenizer of the checkpoint"
    assert generate(tiny_checkpoint, out, "--prompt", "x", "--skip-existing") == 2, "it is no clip of this command"
    assert out.read_bytes() == b"mine"
    assert generate(tiny_checkpoint, out, "--prompt", "x", "--overwrite") == 0
    assert read_image(out).shape[-3:] == (32, 48, 3)


def test_skip_existing_draws_what_is_missing(tiny_checkpoint, tmp_path, capsys):
    """Brackets in a name are no pattern."""
    prompts = "--prompt a --prompt b --prompt c".split()
    assert generate(tiny_checkpoint, tmp_path / "o[1].mp4", *prompts) == 0
    first, second, kept = (tmp_path / f"idx={i}_rank=0_o[1].png" for i in range(3))
    for end in ("", ".json"):
        (tmp_path / f"{first.name}{end}").rename(
            tmp_path / f"idx=0_rank=5_o[1].png{end}"
        )  # as another process names it
        (tmp_path / f"{second.name}{end}").rename(tmp_path / f"idx=1_rank=0_o1.png{end}")
    before = kept.stat().st_mtime_ns
    capsys.readouterr()
    assert generate(tiny_checkpoint, tmp_path / "o[1].mp4", *prompts, "--skip-existing") == 0
    assert capsys.readouterr().out.count("wrote") == 1
    asked = GenerateOptions.parse(["--video-save-path", str(tmp_path / "o[1].mp4"), *prompts])
    names = [Path(clip["file"]).name for clip in asked.report(asked.requests()).answer["clips"]]
    assert names == [f"idx={i}_rank={rank}_o[1].png" for i, rank in ((0, 5), (1, 0), (2, 0))]
    assert not first.exists() and kept.stat().st_mtime_ns == before
    assert (tmp_path / f"{second.name}.json").exists()
    assert generate(tiny_checkpoint, tmp_path / "o[1].mp4", *prompts, "--skip-existing", "--seed", 2) == 2


def test_interrupt_keeps_and_names_finished_clips(tiny_checkpoint, tmp_path):
    """By SIGTERM; that Ctrl-C keeps them too is `test_generate`'s."""
    words = ["--checkpoint-path", tiny_checkpoint, "--video-save-path", tmp_path / "o.mp4", *SMALL]
    words += "--num-steps 40 --num-video-frames 5 --batch-size 1".split()
    for i in range(200):
        words += ["--prompt", f"moth {i}"]
    process = commands().start("dfm", "generate", *words)
    wait_until(lambda: process.poll() is not None or len(list(tmp_path.glob("*.mp4.json"))) >= 2, "two clips")
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said, said
    count, names = re.search(r"interrupted: (\d+) of 200 clips are finished and kept: (.*); run", said).groups()
    whole = sorted(p.name.removesuffix(".json") for p in tmp_path.glob("*.mp4.json"))
    assert sorted(names.split(", ")) == whole and int(count) == len(whole) >= 2
    for name in whole:
        assert read_video(tmp_path / name)[0].shape == (5, 32, 48, 3)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], "no half-written file is left"


# ---- errors ---------------------------------------------------------------------------------------------------------


def said(capsys) -> str:
    (text,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
    return text


def test_another_or_a_missing_tokenizer_is_refused_before_drawing(tiny_checkpoint, tmp_path, capsys):
    other, missing = tmp_path / "tokenizer.safetensors", tmp_path / "gone.safetensors"
    newest = max((tiny_checkpoint / "checkpoints").glob("iter_*"))
    tensors = load_file(newest / "tokenizer.safetensors")
    save_file({**tensors, "image.mean": tensors["image.mean"] + 1}, other)
    for path, name in ((other, "--tokenizer-path"), (missing, str(missing))):
        assert generate(tiny_checkpoint, tmp_path / "a.mp4", "--prompt", "x", "--tokenizer-path", path) == 2
        assert name in said(capsys) and not list(tmp_path.glob("*.png"))


def test_out_of_memory_says_what_to_change_and_other_faults_stay(tiny_pipe, monkeypatch):
    network = type(tiny_pipe.chunks[0])
    full_cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), full_cpu):
        monkeypatch.setattr(network, "forward", Mock(side_effect=error))
        refused(
            "--batch-size", tiny_pipe, ["a", "b"], height=64, width=64, num_video_frames=49, num_steps=2, guidance=3.0
        )
    monkeypatch.setattr(network, "forward", Mock(side_effect=RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        tiny_pipe(["a"], num_steps=2)


def test_too_little_memory_is_said_before_drawing(tiny_pipe, monkeypatch):
    monkeypatch.setattr("dfm_nb.generation.pipeline.available_bytes", lambda device: 30 << 20)
    drawn = []
    request = dict(height=256, width=256, num_video_frames=49, num_steps=1, callback=lambda *a: drawn.append(1))
    refused("--no-memory-check", tiny_pipe, ["a", "b", "c", "d"], **request)
    assert not drawn
    assert tiny_pipe(["a"], height=32, width=32, num_steps=1).array().shape == (1, 1, 32, 32, 3), "small ones still fit"


@pytest.mark.parametrize("name", ["a.png", "a.png.json", "a.png.safetensors"])
def test_a_file_with_the_name_of_a_clips_is_kept(name, tmp_path):
    clip = clip_files.Generated(black(1, 8, 8), Request("a"), torch.zeros(16, 1, 1, 1))
    (tmp_path / name).write_text('{"mine": 1}')
    refused(re.escape(name), clip.save, tmp_path / "a.png", latent=True, error=FileExistsError)
    assert (tmp_path / name).read_text() == '{"mine": 1}'
    clip.save(tmp_path / "a.png", latent=True, overwrite=True)
    clip.save(tmp_path / "a.png", latent=True)  # its own
    refused("folder", clip_files.Clips([clip, clip]).save, tmp_path / "b.mp4")
