import json
import re
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from dfm_nb import cli
from dfm_nb.base.argv import guard, pop_nproc
from tests.processes import commands
from tests.refusals import refused
from tests.tiny_run import SIZE


@pytest.mark.parametrize("argv", [["--nproc-per-node", "2", "x"], ["x", "--nproc_per_node=2"]])
def test_process_count_is_taken_out_of_the_arguments(argv):
    assert pop_nproc(argv) == (2, ["x"])
    refused("zero", pop_nproc, ["--nproc-per-node", "zero"])


def test_unknown_verb_names_the_nearest(wrong_use):
    assert "'pretrain'" in wrong_use(guard, cli.main, ["pretrian"])


def test_no_package_replaces_a_verb_of_ours(monkeypatch):
    theirs = {verb: ("evil", "") for verb in ("prepare", "evaluate", "plan", "sweep", "text", "mine")}
    package = Mock(dist="evil", load=lambda: theirs)
    points = [package, *cli.entry_points(cli.GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: points)
    assert {verb for verb, (module, _) in cli.verbs().items() if module == "evil"} == {"mine"}


def test_a_flag_given_twice_is_named_unless_it_may_be(caplog):
    """Of two sources the first would be left out in silence."""
    argv = "prepare --source folder:a --source folder:b --output-dir c --short-side 0".split()
    assert guard(cli.main, argv) == 2 and "--source" in caplog.text
    caplog.clear()
    assert guard(cli.main, "generate --prompt a --prompt b --size x".split()) == 2 and not caplog.text


def test_every_verb_prints_json(capsys):
    import importlib

    for verb, (module, _) in cli.verbs().items():
        main = importlib.import_module(module).main
        if verb not in ("lab", "notebook", "text"):  # it has no end; they have commands
            with pytest.raises(SystemExit):
                main(["--help"])
            assert "--json" in capsys.readouterr().out, verb


NOISY = """
import subprocess
from dfm_nb import cli
from dfm_nb.base.verb import Verb

class Noisy(Verb):
    def run(self):
        print("a library", flush=True)
        subprocess.run(["echo", "a child"])
        return {"n": 1}

main = Noisy.main
cli.VERBS["noisy"] = ("__main__", "")
raise SystemExit(cli.main(["noisy", "--json"]))
"""


def test_stdout_is_one_object_whatever_a_library_or_a_child_prints(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    done = commands().run("python", tmp_path / "noisy.py")
    assert json.loads(done.stdout) == {"exit_code": 0, "n": 1}
    assert {"a library", "a child"} <= {*done.stderr.splitlines()}


def test_config_faults_are_said_once_before_torchrun(wrong_use):
    words = "pretrain --nproc-per-node 2 --mock model.tensor_model_parallel_size=4".split()
    error = wrong_use(guard, cli.main, words)
    assert error.count("error:") == 1 and "tensor_model_parallel_size" in error


OUTPUTS = ("prepare --output-dir", "generate --prompt a --video-save-path", "export a --output")


@pytest.mark.parametrize("line", [*OUTPUTS, "text preprocess --input a --tokenizer-model a --output-prefix"])
def test_urls_as_outputs_are_refused_before_anything_is_written(tmp_path, monkeypatch, wrong_use, line):
    monkeypatch.chdir(tmp_path)
    assert "s3://bucket" in wrong_use(guard, cli.main, [*line.split(), "s3://bucket/a.safetensors"])
    assert not list(tmp_path.iterdir())


def test_home_in_an_output_is_not_a_folder_of_that_name(tmp_path, monkeypatch):
    """A shell leaves the ~ of --output=~/a."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert guard(cli.main, ["export", "butterflies-student", "--output=~/a/model.safetensors"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["home"]
    assert (tmp_path / "home" / "a" / "model.safetensors").is_file()


@pytest.mark.parametrize("error", [RuntimeError("the driver is too old"), AssertionError("no CUDA"), None])
def test_doctor_tells_why_torch_uses_no_gpu(tmp_path, monkeypatch, error):
    from dfm_nb.doctor import _cuda

    monkeypatch.setattr("torch.cuda.init", Mock(side_effect=error))
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    ((level, said),) = _cuda()
    assert level == ("MISSING" if error else "ok") and str(error or "CUDA") in said
    monkeypatch.setenv("PATH", "")
    assert not list(_cuda())


@pytest.mark.slow
def test_a_rank_that_loses_another_says_so_in_one_line(tmp_path):
    """Without torchrun, whose SIGTERM may come before the survivor has said anything."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os, signal, sys, torch, torch.distributed as dist\n"
        "from dfm_nb.base.argv import guard\n"
        "def main(argv):\n"
        "    rank = int(sys.argv[1])\n"
        f"    dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=rank, world_size=2)\n"
        "    dist.barrier()\n"
        "    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "sys.exit(guard(main))\n"
    )
    lost, done = commands().start("python", script, 1), commands().run("python", script, 0)
    assert lost.wait(60) == -signal.SIGKILL and done.returncode == 1
    assert re.search(r"^rank 0 ends because it lost another process: .*Connection", done.stderr, re.M)
    assert "RuntimeError" not in done.stderr


def answer(*words: str, code: int = 0) -> dict:
    """What `dfm ... --json` prints on stdout, which is one object and nothing else."""
    done = commands().run("dfm", *words, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == code == said.pop("exit_code"), done.stderr
    return said


@pytest.mark.slow
def test_every_step_from_pictures_to_a_clip_answers_in_json(tmp_path):
    data, run, clip, weights = (str(tmp_path / name) for name in ("data", "run", "a.png", "a.safetensors"))
    flags = ["--num-images=24", "--num-clips=0", "--short-side=32", f"--output-dir={data}"]
    prepared = answer("prepare", "--source=synthetic", *flags)
    assert prepared["folder"] == data and prepared["counts"]["samples"] == 24 and prepared["drops"] == []
    assert answer("adopt", data, "--reindex") == prepared
    train = ["pretrain", f"--dataset-path={data}", f"--run-dir={run}", *SIZE]
    assert answer(*train, "--print-config")["settings"]["model.hidden_size"] == {"value": 48, "from": "command line"}
    two = ("--nproc-per-node=2", "train.global_batch_size=2")
    trained = answer(*train, *two)
    assert (trained["state"], trained["iterations"], trained["stopped_by"]) == ("finished", 3, None)
    assert "hidden_size" in answer(*train, *two, "model.hidden_size=96", code=2)["error"], "a rank found it"
    stopped = answer(*train, "train.train_iters=9", "train.exit_duration_s=0.001")
    assert (stopped["state"], stopped["stopped_by"]) == ("stopped", "train.exit_duration_s")
    assert answer("export", trained["checkpoint"], f"--output={weights}") == {"output": weights}
    assert weights in answer("export", trained["checkpoint"], f"--output={weights}", code=2)["error"], "it exists"
    asked = ["--prompt=a", f"--checkpoint-path={weights}", "--num-video-frames=1", "--height=32", "--width=32"]
    drawn = answer("generate", *asked, "--num-steps=1", f"--video-save-path={clip}")
    assert [c["file"] for c in drawn["clips"]] == [clip] and Path(clip).is_file()
