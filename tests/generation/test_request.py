"""Requests from the command line and from files; refusals name the wrong setting and its line."""

import json

import pytest
import torch

from dfm_nb.base import video
from dfm_nb.base.argv import guard
from dfm_nb.checkpoints.loading import find_weights
from dfm_nb.diffusion import samplers
from dfm_nb.generate import GenerateOptions, main
from dfm_nb.generation.request import Request, read_prompts
from tests.frames import black
from tests.json_files import write_json
from tests.refusals import refused


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"height": 100}, "--height"),
        ({"num_video_frames": 0}, "--num-video-frames"),
        ({"sampler": "magic"}, "--sampler"),
        ({"num_steps": 0}, "--num-steps"),
        ({"shift": -1.0}, "--shift"),
        ({"fps": float("nan")}, "--fps"),
        ({"sigma_min": 100.0}, "sigma_min"),
        ({"sigma_levels": (1.0, 2.0, 0.0)}, "decrease"),
        ({"guidance_interval": (3.0, 1.0)}, "low < high"),
        ({"init_video": "a.mp4", "strength": 0.0}, "strength"),
        ({"init_video": "a.mp4", "init_image": "a.png"}, "init-image"),
        ({"negative_prompt": "a\udce9"}, "UTF-8"),  # as a shell gives bytes that are not
        ({"mask": "a.png"}, "--init-video"),
        ({"negative_prompt": "night", "guidance": 1.0}, "--negative-prompt"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, name):
    refused(name, lambda: Request("x", **settings).check())


def arguments(*flags):
    return GenerateOptions.parse(["--checkpoint-path", "x", *map(str, flags)])


def test_prompts_file_lines_may_set_fields(tmp_path):
    file = tmp_path / "p.jsonl"
    lines = [{"prompt": "a", "seed": 5}, {"prompt": "b", "num_video_frames": 9, "guidance_interval": [0.2, 3]}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    r = arguments("--prompt", "first", "--prompts-file", file, "--guidance", "2").requests()
    wanted = [("first", 1, 1, 2.0, 0), ("a", 5, 1, 2.0, 1), ("b", 1, 9, 2.0, 2)]
    assert [(q.prompt, q.seed, q.num_video_frames, q.guidance, q.index) for q in r] == wanted
    assert r[2].guidance_interval == (0.2, 3.0) and r[1].guidance_interval is None


@pytest.mark.parametrize(
    "line, name",
    [
        ('{"prompt": "a", "sede": 5}', "line 2: .*seed"),
        ("[1]", "line 2: .*prompt"),
        ("{prompt}", "line 2 .*JSON"),
        ('{"prompt": "a", "height": 100}', "line 2: --height"),
        ('{"prompt": "a", "index": 0}', "index 0"),
        ('{"prompt": "a", "init_image": "gone.png"}', "gone.png"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, name):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        arguments("--prompts-file", file).requests()


def test_comments_of_a_text_file_are_no_prompts_and_flags_of_other_trainers_are_refused(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("# kohya's\na moth -- red\n  # more\na bee #2, well--known\n")
    assert [line["prompt"] for _, line in read_prompts(file)] == ["a moth -- red", "a bee #2, well--known"]
    for flags in ("--n ugly --w 64", "--ar 16:9"):
        file.write_text(f"a moth\na bee {flags}\n")
        refused(f"line 2.*{flags[:3]}", read_prompts, file)


def test_text_file_has_a_prompt_a_line_and_a_sidecar_is_a_prompts_file(tmp_path):
    (tmp_path / "p.txt").write_text("a moth \n\n  a bee\n")
    assert [line["prompt"] for _, line in read_prompts(tmp_path / "p.txt")] == ["a moth", "a bee"]
    (tmp_path / "p.txt").write_bytes("\ufeffa\u2028 moth\ra\x0bbee\r\nan\x85 ant\n".encode())
    assert [line["prompt"] for _, line in read_prompts(tmp_path / "p.txt")] == ["a moth", "a bee", "an ant"]
    (tmp_path / "p.txt").write_text("a moth\n", encoding="utf-16")
    refused(r"p\.txt.*UTF-8", read_prompts, tmp_path / "p.txt")
    (tmp_path / "p.jsonl").write_text('\ufeff{"prompt": "a\u2028b"}\n')
    assert read_prompts(tmp_path / "p.jsonl")[0][1] == {"prompt": "a\u2028b"}
    (tmp_path / "p.jsonl").rename(tmp_path / "P.JSONL")
    assert read_prompts(tmp_path / "P.JSONL")[0][1] == {"prompt": "a\u2028b"}
    (tmp_path / "p.txt").rename(tmp_path / "p.csv")
    refused(r"p\.csv", read_prompts, tmp_path / "p.csv")  # its header would be a prompt
    sidecar = {"prompt": "a", "index": 7, "seed": 3, "guidance_interval": None, "latent_sha256": "ab", "checkpoint": {}}
    write_json(tmp_path / "c.mp4.json", sidecar)
    (request,) = arguments("--prompts-file", tmp_path / "c.mp4.json").requests()
    assert (request.prompt, request.index, request.seed) == ("a", 7, 3)
    video.write_mp4(tmp_path / "c.mp4", black(1, 32, 32), 8, comment=json.dumps(sidecar))
    _, data = video.compressed(black(1, 32, 32), 1, json.dumps(sidecar))
    (tmp_path / "c.png").write_bytes(data)
    assert [arguments("--prompts-file", tmp_path / f"c.{end}").requests() for end in ("mp4", "png")] == [[request]] * 2


FLAGS = (
    "--negative-prompt n --height 32 --width 48 --num-video-frames 5 --fps 8 --num-steps 9 --guidance 3"
    " --guidance-interval 0.1 2 --guidance-rescale 0.5 --sampler euler --schedule exponential"
    " --shift 2 --sigma-min 0.01 --sigma-max 70 --rho 5 --sigmas 3 1 0 --seed 4 --init-video v.mp4"
    " --strength 0.3 --mask m.png --tokenizer-window 17 --given m.png --given-guidance 1.5 --anchor nearest"
)


def test_every_field_of_a_request_can_be_set_by_a_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.mp4").touch()
    (tmp_path / "m.png").touch()
    (r,) = arguments("--prompt", "p", *FLAGS.split()).requests()
    default = Request("p")
    same = [name for name in Request.model_fields if getattr(r, name) == getattr(default, name)]
    assert same == ["prompt", "index", "init_image", "last_image"]
    assert r == Request(**json.loads(json.dumps(r.model_dump()))), "a request survives JSON"
    assert r.sigmas().tolist() == [1, 0], "30 % of two steps"
    assert r.init_video == str(tmp_path / "v.mp4"), "a sidecar means the same file in any folder"


def test_frames_are_rounded_to_what_a_tokenizer_codes_and_that_is_said_once(caplog, tmp_path):
    flags = "--num-video-frames 250 --prompt a --prompt b".split()
    assert [r.num_video_frames for r in arguments(*flags).requests()] == [249, 249]
    (said,) = (r.getMessage() for r in caplog.records if "--num-video-frames" in r.getMessage())
    assert "250" in said and "249" in said


@pytest.mark.parametrize("flags, name", [(["96"], "WIDTHxHEIGHT"), (["96x64", "--height=32"], "--height")])
def test_a_size_is_width_and_height(flags, name):
    (request,) = arguments("--prompt", "a", "--size", "96x64").requests()
    assert (request.width, request.height) == (96, 64)
    refused(name, arguments, "--prompt", "a", "--size", *flags)


def test_focused_schedule_is_centred_on_the_models_sigma_data():
    request = Request("x", schedule="focused", num_steps=20)
    torch.testing.assert_close(request.sigmas(3.0), samplers.focused_sigmas(20, sigma_data=3.0), rtol=0, atol=0)
    assert torch.equal(Request("x", schedule="karras").sigmas(3.0), samplers.karras_sigmas(14))


def test_nothing_to_draw_and_no_checkpoint_are_named(tmp_path, wrong_use):
    refused("--prompt", arguments().requests)
    refused("nowhere.txt", arguments("--prompts-file", "nowhere.txt").requests, error=FileNotFoundError)
    argv = ["--checkpoint-path", str(tmp_path / "none"), "--prompt", "x"]
    for flags, name in ((["--height=100"], "--height"), (["--promt=y"], "--prompt"), ([], str(tmp_path / "none"))):
        said = wrong_use(guard, main, argv + flags)  # bad sizes are refused before the checkpoint is looked for
        assert name in said and len(said.splitlines()) == 1


def test_packaged_weights_that_record_no_sizes_tell_the_rate_that_they_were_drawn_at():
    config = find_weights("butterflies").config
    assert [Request("x", num_video_frames=n).completed(config).fps for n in (1, 9)] == [12, 12]
