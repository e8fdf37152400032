"""Deployment files: the examples are current, the objects obey the published schemas, and the commands in them run."""

import copy
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from dfm_nb import deploy
from dfm_nb.base.argv import guard
from dfm_nb.cluster import Cluster, load
from dfm_nb.deploy_files import KINDS, render
from dfm_nb.train import parse as parse_training

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "deploy" / "cluster.yaml"
KUBERNETES = ("1.29", "1.33", "1.37")
MANIFESTS = [kind for kind, (_, _, name) in KINDS.items() if name.endswith(".yaml")]


def cluster(*overrides: str) -> Cluster:
    return load(CONFIG, overrides)


def objects(kind: str, *overrides: str) -> list[dict]:
    return list(yaml.safe_load_all(render(kind, cluster(*overrides))))


def pods(kind: str, *overrides: str) -> list[dict]:
    """Every pod specification in the objects of a kind."""
    found = []

    def walk(node):
        if isinstance(node, dict):
            if "containers" in node:
                found.append(node)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(objects(kind, *overrides))
    return found


# ---- examples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_kept_example_is_what_is_rendered_now(kind):
    path = ROOT / "deploy" / "examples" / KINDS[kind][2]
    assert path.read_text() == render(kind, cluster()), (
        "run: dfm deploy all --config deploy/cluster.yaml --output-dir deploy/examples"
    )


def test_examples_folder_holds_nothing_else():
    assert {p.name for p in (ROOT / "deploy" / "examples").iterdir()} == {name for _, _, name in KINDS.values()}


def test_every_key_of_the_example_is_a_key():
    assert cluster().training.model == "DiT-XL" and cluster().world_size == 16


# ---- published schemas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("kind", [k for k in MANIFESTS if "job" in k and k not in ("trainjob", "pytorchjob")])
def test_kubernetes_objects_obey_the_strict_schemas(kind, version):
    from kubernetes_validate import validate

    for item in objects(kind):
        validate(item, version, strict=True)


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_pods_of_kubeflow_jobs_obey_the_strict_schema(kind):
    from kubernetes_validate import validate

    found = pods(kind)
    assert found
    for spec in found:
        spec = {"restartPolicy": "OnFailure", **spec}
        validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, KUBERNETES[-1], strict=True
        )


def test_a_misspelt_key_is_found_by_the_schema():
    from kubernetes_validate import validate

    job = objects("text-job")[0]
    job["spec"]["backofLimit"] = 3
    with pytest.raises(Exception, match="backofLimit"):
        validate(job, KUBERNETES[-1], strict=True)


def test_trainer_objects_obey_kubeflows_published_types():
    """Kubeflow's own models drop what they do not know: what comes back must be what went in."""
    from kubeflow_trainer_api import models

    types = {"TrainJob": models.TrainerV1alpha1TrainJob, "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}
    for item in objects("trainjob"):
        assert types[item["kind"]].from_dict(copy.deepcopy(item)).to_dict() == item
    broken = objects("trainjob")[1]
    broken["spec"]["trainer"]["numProcesses"] = 8
    assert types["TrainJob"].from_dict(copy.deepcopy(broken)).to_dict() != broken


PYTORCHJOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["nprocPerNode", "pytorchReplicaSpecs", "runPolicy"],
    "properties": {
        "nprocPerNode": {"type": "string"},
        "runPolicy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "activeDeadlineSeconds": {"type": "integer"},
                "backoffLimit": {"type": "integer"},
                "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                "suspend": {"type": "boolean"},
            },
        },
        "pytorchReplicaSpecs": {
            "type": "object",
            "additionalProperties": False,
            "required": ["Master"],
            "patternProperties": {
                "^(Master|Worker)$": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["replicas", "restartPolicy", "template"],
                    "properties": {
                        "replicas": {"type": "integer", "minimum": 1},
                        "template": {"type": "object"},
                        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                    },
                }
            },
        },
    },
}
"""The fields of PyTorchJob's specification in kubeflow-training 1.9.4; `nprocPerNode` is text there."""


def test_pytorchjob_has_the_operators_fields_and_container_name():
    import jsonschema

    (job,) = objects("pytorchjob")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    jsonschema.validate(job["spec"], PYTORCHJOB)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] + replicas["Worker"]["replicas"] == cluster().nodes
    assert {c["name"] for p in pods("pytorchjob") for c in p["containers"]} == {"pytorch"}, (
        "the operator looks for this name"
    )
    assert set(objects("pytorchjob", "nodes=1")[0]["spec"]["pytorchReplicaSpecs"]) == {"Master"}


# ---- the commands in the files ------------------------------------------------------------------------------------


def torchrun_words(kind: str, *overrides: str) -> list[str]:
    """The torchrun command of a training file, as words."""
    if kind == "slurm":
        script = render(kind, cluster(*overrides)).replace("\\\n", " ")
        line = next(x for x in script.splitlines() if x.startswith("srun "))
        words = shlex.split(
            line.replace("$head_node:$port", "n1:29500").replace("$SLURM_JOB_ID", "7").removesuffix("&")
        )
        return words[words.index("torchrun") :]
    commands = [o["spec"]["trainer"]["command"] for o in objects(kind, *overrides) if o["kind"] == "TrainJob"]
    return (commands or [c["command"] for p in pods(kind, *overrides) for c in p["containers"]])[0]


TRAINING = ["slurm", "job", "trainjob", "pytorchjob"]


@pytest.mark.parametrize("kind", TRAINING)
def test_training_command_is_understood_by_torchrun_and_by_dfm(kind):
    from torch.distributed.run import get_args_parser

    words = torchrun_words(kind)
    args = get_args_parser().parse_args(words[1:])
    assert words[0] == "torchrun" and args.module and args.training_script == "dfm_nb.train" and args.max_restarts == 3
    if kind in ("slurm", "job"):
        assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", "8", "c10d")
    training = parse_training(args.training_script_args)
    assert (training.model, training.run_dir) == ("DiT-XL", "/shared/runs/dit-xl")
    assert "model.tensor_model_parallel_size=2" in training.overrides


@pytest.mark.parametrize("kind", ["job", "trainjob", "pytorchjob"])
def test_pod_has_the_gpus_memory_and_time_to_save(kind):
    spec = objects(kind)[-1]["spec"]
    resources = (
        spec["trainer"]["resourcesPerNode"] if kind == "trainjob" else pods(kind)[0]["containers"][0]["resources"]
    )
    assert resources["limits"] == resources["requests"] == {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert pods(kind)[0]["terminationGracePeriodSeconds"] == 300
    volumes = {v["name"]: v for v in pods(kind)[0]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert {m["name"] for m in pods(kind)[0]["containers"][0]["volumeMounts"]} == set(volumes)
    env = {
        e["name"]: e["value"]
        for e in (spec["trainer"]["env"] if kind == "trainjob" else pods(kind)[0]["containers"][0]["env"])
    }
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 300, "torchrun must give up before the pod is killed"


def test_pods_of_the_job_find_the_first_by_the_service():
    service, job = objects("job")
    spec = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= spec["metadata"]["labels"].items()
    assert spec["spec"]["subdomain"] == service["metadata"]["name"]
    endpoint = next(w for w in torchrun_words("job") if w.startswith("--rdzv-endpoint=")).partition("=")[2]
    assert (
        endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    )
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"] == 2


SBATCH = {
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "cpus-per-task",
    "gpus-per-node",
    "mem",
    "time",
    "partition",
    "account",
    "qos",
    "constraint",
    "output",
    "open-mode",
    "signal",
    "requeue",
    "exclusive",
    "array",
}
"""Options of sbatch that Slurm 22.05 was seen to take."""


@pytest.mark.parametrize("kind", ["slurm", "slurm-text"])
def test_batch_script_is_shell_and_its_options_are_sbatchs(kind):
    text = render(kind, cluster("slurm.account=lab", "slurm.qos=high", "slurm.constraint=h200"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.removeprefix("#SBATCH --").partition("=")[0] for line in lines if line.startswith("#SBATCH")]
    assert all(not line.startswith("#SBATCH") for line in lines[first:]), (
        "sbatch stops reading options at the first command"
    )
    assert set(options) <= SBATCH and len(options) == len(set(options)) and "account" in options


def test_words_with_spaces_and_quotes_survive_the_shell():
    value = 'validation.prompts=[a cat\'s "eye", $HOME `x`]'
    c = cluster()
    c.training.overrides = [value]
    line = render("slurm", c).replace("\\\n", " ").split("dfm_nb.train", 1)[1].split(" &\n")[0]
    out = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True).stdout
    assert value in out.splitlines()


# ---- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("nodez=2", "did you mean nodes?"),
        ("slurm.partitoin=x", "did you mean slurm.partition?"),
        ("nodes=two", "nodes: Value 'two'"),
        ("nodes=0", "nodes must be at least 1; got 0"),
        ("name=My_Job", "for example my-job"),
        ('time_limit="1 day"', '"hours:minutes:seconds"'),
        ("grace_s=90000", "grace_s must be less than time_limit"),
        ("slurm.partition='gpu; rm'", "slurm.partition must be one word"),
        ("training.dataset_path=", "set training.mock: true"),
        ("training.model=DiT-Q", "model.size"),
        ("training.overrides=[model.tensor_model_parallel_size=3]", "must divide model.num_attention_heads"),
        ("training.overrides=[model.hiden_size=3]", "did you mean model.hidden_size?"),
        ("kubernetes.port=80", "from 1024 to 65535"),
        ("env={1A: x}", "no name of an environment variable"),
    ],
)
def test_fault_is_one_sentence_with_the_fix(override, words, capsys):
    assert guard(deploy.main, ["slurm", "--config", str(CONFIG), override]) == 2
    out, error = capsys.readouterr()
    assert words in error and "Traceback" not in error and out == ""


def test_time_limit_may_be_written_without_quotes(tmp_path):
    (tmp_path / "c.yaml").write_text("time_limit: 1:30:00\ntraining: {mock: true}\n")
    assert load(tmp_path / "c.yaml").time_limit == "1:30:00"
    assert load(CONFIG, ["time_limit=100:00:00"]).time_limit_s == 360000


def test_all_faults_are_said_at_once(capsys):
    assert guard(deploy.main, ["job", "--config", str(CONFIG), "nodes=0", "name=A_b", "text.workers=0"]) == 2
    assert capsys.readouterr().err.count("\n  ") >= 3


def test_unknown_kind_and_missing_file_are_named(capsys, tmp_path):
    assert guard(deploy.main, ["slrum"]) == 2 and "did you mean slurm?" in capsys.readouterr().err
    assert (
        guard(deploy.main, ["job", "--config", str(tmp_path / "no.yaml")]) == 2 and "no.yaml" in capsys.readouterr().err
    )
    (tmp_path / "bad.yaml").write_text("nodes: [1\n")
    assert (
        guard(deploy.main, ["job", "--config", str(tmp_path / "bad.yaml")]) == 2
        and "must be YAML" in capsys.readouterr().err
    )
    assert guard(deploy.main, ["all"]) == 2 and "--output-dir" in capsys.readouterr().err


# ---- the files at work --------------------------------------------------------------------------------------------

TINY = (
    "[model.num_layers=2,model.hidden_size=48,model.num_attention_heads=4,model.in_channels=4,model.text_dim=24,mixed_precision=fp32,"
    "dataset.task_encoder_seq_length=96,dataset.num_workers=0,train.global_batch_size=4,train.train_iters={iterations},train.eval_interval=0,"
    "logger.tensorboard=false,logger.log_interval=1,checkpoint.save_interval=0,scheduler.lr_decay_style=constant,scheduler.lr_warmup_iters=0]"
)

SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[0]
tasks = [subprocess.Popen(words, env=dict(os.environ, SLURM_NODEID=str(i))) for i in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
signal.signal(signal.SIGUSR1, lambda *_: [t.send_signal(signal.SIGUSR1) for t in tasks])
sys.exit(max(t.wait() for t in tasks))
"""

SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$SCONTROL_LOG"; fi
"""


def tiny_cluster(run: Path, iterations: int) -> list[str]:
    return [
        "gpus_per_node=0",
        "cpus_per_node=1",
        "training.mock=true",
        "training.dataset_path=",
        "training.model=",
        "slurm.setup=[]",
        "grace_s=60",
        f"training.run_dir={run}",
        f"training.overrides={TINY.format(iterations=iterations)}",
    ]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """PATH with this Python's torchrun and, before it, stand-ins for Slurm's commands."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "SCONTROL_LOG": str(tmp_path / "scontrol.log"), **more}


def losses(run: Path) -> dict[int, float]:
    from dfm_nb.base.metrics import read_metrics

    file = run / "metrics.jsonl"
    return {r["iteration"]: r["loss"] for r in read_metrics(file) if "loss" in r} if file.exists() else {}


@pytest.mark.slow
def test_batch_script_saves_before_the_end_queues_again_and_goes_on(tmp_path):
    """The script on two stand-in nodes: SIGUSR1 to the batch shell, as Slurm sends it, then the job's second life."""
    from dfm_nb.checkpoints import saving
    from dfm_nb.checkpoints import weights as checkpoint

    run, script = tmp_path / "run", tmp_path / "train.sbatch"
    script.write_text(render("slurm", cluster(*tiny_cluster(run, 40))))
    env = environment(tmp_path, SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID=str(os.getpid()))
    batch = subprocess.Popen(
        ["bash", str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 120
    while len(losses(run)) < 5 and batch.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    batch.send_signal(signal.SIGUSR1)
    output, _ = batch.communicate(timeout=120)
    stopped = max(losses(run))
    assert stopped < 40 and f"Stopped by SIGUSR1 at iteration {stopped}; saved" in output, output
    assert saving.read_state(checkpoint.find(run))["iteration"] == stopped
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {os.getpid()}\n"

    again = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stdout + again.stderr
    assert sorted(losses(run)) == list(range(1, 41))
    assert (tmp_path / "scontrol.log").read_text().count("requeue") == 1, "a job that is done does not queue again"


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_torchrun_takes_its_place_from_the_operators_variables(kind, monkeypatch):
    """Kubeflow hands torchrun its arguments as PET_* variables: the command must not say otherwise."""
    from torch.distributed.run import get_args_parser

    place = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "n1",
        "PET_MASTER_PORT": "29500",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    args = get_args_parser().parse_args(torchrun_words(kind)[1:])
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert (args.master_addr, args.master_port) == ("n1", 29500)


def test_indexed_job_and_merge_give_the_bytes_of_the_single_job(tmp_path, monkeypatch):
    import json

    from dfm_nb import cli

    from .text_tokenizers import build, save

    tokenizer = save(build("gpt2"), tmp_path / "tokenizer")
    lines = [json.dumps({"text": f"document {i} of the quick brown fox"}) for i in range(50)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")

    def command(kind: str, prefix: str) -> tuple[list[str], dict[str, str]]:
        settings = [
            f"text.input=[{tmp_path / 'corpus.jsonl'}]",
            f"text.output_prefix={tmp_path / prefix}",
            f"text.tokenizer_model={tokenizer}",
            "text.workers=1",
            "text.partitions=3",
        ]
        (container,) = pods(kind, *settings)[0]["containers"]
        assert container["command"][0] == "dfm"
        return container["command"][1:], {e["name"]: e["value"] for e in container["env"]}

    assert cli.main(command("text-job", "whole")[0]) == 0
    argv, env = command("text-indexed-job", "parts")
    monkeypatch.setenv("JOB_COMPLETIONS", env["JOB_COMPLETIONS"])
    for index in range(3):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        assert cli.main(argv) == 0
    assert cli.main(command("text-merge-job", "parts")[0]) == 0
    for ending in ("bin", "idx"):
        whole, parts = (tmp_path / f"{name}_text_document.{ending}" for name in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes() and whole.stat().st_size > 100
