"""Requests from the command line and from files: every wrong value is one sentence with the fix."""

import json

import pytest
import torch

from dfm_nb.base.argv import guard
from dfm_nb.diffusion import samplers
from dfm_nb.generate import parse, requests_of
from dfm_nb.generation.request import Request, read_prompts, request_of


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"height": 100}, "--height must be divisible by 16; got 100; use 96 or 112"),
        ({"width": 8}, "--width must be divisible by 16; got 8; use 16 or 32"),
        ({"num_video_frames": 0}, "--num-video-frames must be positive; got 0"),
        ({"sampler": "magic"}, "--sampler must be one of euler, heun"),
        ({"schedule": "magic"}, "--schedule must be one of karras, exponential, focused"),
        ({"fps": 0}, "--fps must be positive"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"sigma_min": 100.0}, "0 < sigma_min < sigma_max"),
        ({"sigma_levels": (1.0, 2.0, 0.0)}, "must decrease strictly"),
        ({"guidance_interval": (3.0, 1.0)}, "0 <= low < high"),
        ({"guidance_rescale": 1.5}, "--guidance-rescale must be between 0 and 1"),
        ({"init_video": "a.mp4", "strength": 0.0}, "strength must be greater than 0"),
        ({"init_video": "a.mp4", "init_image": "a.png"}, "not both"),
        ({"negative_prompt": "night", "guidance": 1.0}, "--negative-prompt has no effect at --guidance 1"),
        ({"index": -1}, "index must be 0 or more"),
        ({"fps": float("nan")}, "--fps must be positive; got nan"),
        ({"guidance": float("nan")}, "--guidance must be a number; got nan"),
    ],
)
def test_bad_settings_are_refused_with_the_fix(settings, message):
    with pytest.raises(ValueError) as error:
        Request("x", **settings).check()
    assert message in str(error.value)


def arguments(*flags):
    return parse(["--checkpoint-path", "x", *flags])


def test_prompts_file_lines_may_set_fields(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a", "seed": 5}\n\n{"prompt": "b", "num_video_frames": 9, "guidance_interval": [0.2, 3]}\n'
    )
    r = requests_of(arguments("--prompt", "first", "--prompts-file", str(file), "--guidance", "2"))
    assert [(q.prompt, q.seed, q.num_video_frames, q.guidance, q.index) for q in r] == [
        ("first", 1, 1, 2.0, 0),
        ("a", 5, 1, 2.0, 1),
        ("b", 1, 9, 2.0, 2),
    ]
    assert r[2].guidance_interval == (0.2, 3.0) and r[1].guidance_interval is None


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "a", "sede": 5}', "line 2: unknown sede; a line may set autoguidance, fps, guidance"),
        ('{"seed": 5}', "line 2: there is no prompt"),
        ("[1]", "line 2: there is no prompt"),
        ("{prompt}", "line 2 is not JSON"),
        ('{"prompt": "a", "height": 100}', "line 2: --height must be divisible by 16; got 100"),
        ('{"prompt": "a", "num_steps": "20"}', "line 2: num_steps must be int; got '20'"),
        ('{"prompt": "a", "guidance": true}', "line 2: guidance must be float; got True"),
        ('{"prompt": "a", "sigma_levels": [1, "b"]}', "line 2: sigma_levels must be tuple"),
        ('{"prompt": "a", "index": 0}', "two prompts have index 0"),
        ('{"prompt": "a", "init_image": "gone.png"}', "gone.png (--init-image)"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        requests_of(arguments("--prompts-file", str(file)))
    assert message in str(error.value)


def test_text_file_has_a_prompt_a_line_and_a_sidecar_is_a_prompts_file(tmp_path):
    (tmp_path / "p.txt").write_text("a moth \n\n  a bee\n")
    assert [line["prompt"] for _, line in read_prompts(tmp_path / "p.txt")] == ["a moth", "a bee"]
    sidecar = {"prompt": "a", "index": 7, "seed": 3, "guidance_interval": None, "latent_sha256": "ab", "checkpoint": {}}
    (tmp_path / "c.mp4.json").write_text(json.dumps(sidecar))
    (request,) = requests_of(arguments("--prompts-file", str(tmp_path / "c.mp4.json")))
    assert (request.prompt, request.index, request.seed) == ("a", 7, 3)


def test_every_field_of_a_request_can_be_set_by_a_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.mp4").touch()
    flags = [
        "--negative-prompt",
        "n",
        "--height",
        "32",
        "--width",
        "48",
        "--num-video-frames",
        "5",
        "--fps",
        "8",
        "--num-steps",
        "9",
        "--guidance",
        "3",
        "--guidance-interval",
        "0.1",
        "2",
        "--guidance-rescale",
        "0.5",
        "--autoguidance",
        "2",
        "--sampler",
        "euler",
        "--schedule",
        "exponential",
        "--shift",
        "2",
        "--sigma-min",
        "0.01",
        "--sigma-max",
        "70",
        "--rho",
        "5",
        "--sigmas",
        "3",
        "1",
        "0",
        "--seed",
        "4",
        "--init-video",
        "v.mp4",
        "--strength",
        "0.3",
        "--tokenizer-window",
        "17",
    ]
    (r,) = requests_of(arguments("--prompt", "p", *flags))
    default = Request("p")
    same = [name for name in Request.__dataclass_fields__ if getattr(r, name) == getattr(default, name)]
    assert same == ["prompt", "index", "init_image"]
    assert r == request_of(json.loads(json.dumps(r.__dict__))), "a request survives JSON"
    assert r.sigmas().tolist() == [1, 0], "30 % of two steps"
    assert r.init_video == str(tmp_path / "v.mp4"), "a sidecar means the same file in any folder"


def test_frames_are_rounded_to_what_a_tokenizer_codes_and_that_is_said_once(caplog, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "b", "num_video_frames": 246}\n{"prompt": "c"}\n')
    flags = ["--num-video-frames", "250", "--prompt", "a", "--prompts-file", str(file)]
    assert [r.num_video_frames for r in requests_of(arguments(*flags))] == [249, 245, 249]
    assert Request("x", num_video_frames=250) == Request("x", num_video_frames=249)
    said = [r.getMessage() for r in caplog.records if "becomes" in r.getMessage()]
    assert said == [
        f"--num-video-frames {n}: the tokenizer codes 1 and then groups of 4"
        for n in ("250 becomes 249", "246 becomes 245")
    ]


def test_focused_schedule_is_centred_on_the_models_sigma_data():
    request = Request("x", schedule="focused", num_steps=20)
    torch.testing.assert_close(request.sigmas(3.0), samplers.focused_sigmas(20, sigma_data=3.0), rtol=0, atol=0)
    assert torch.equal(request.sigmas(0.5), request.sigmas()) and not torch.equal(request.sigmas(3.0), request.sigmas())
    assert torch.equal(Request("x").sigmas(3.0), samplers.karras_sigmas(35))


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="give --prompt TEXT or --prompts-file FILE"):
        requests_of(arguments())
    with pytest.raises(FileNotFoundError, match="there is no prompts file nowhere.txt"):
        requests_of(arguments("--prompts-file", "nowhere.txt"))


@pytest.mark.parametrize(
    "flags, message", [(["--height", "100"], "use 96 or 112"), (["--num-video-frames", "0"], "must be positive")]
)
def test_bad_sizes_end_the_command_at_once(capsys, tmp_path, flags, message):
    """Before the checkpoint is looked for: this one does not exist."""
    from dfm_nb.generate import main

    assert guard(main, ["--checkpoint-path", str(tmp_path / "none"), "--prompt", "x", *flags]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


def test_prompt_without_checkpoint_is_one_sentence(capsys, tmp_path):
    from dfm_nb.generate import main

    assert guard(main, ["--checkpoint-path", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert "there is no checkpoint at" in capsys.readouterr().err
