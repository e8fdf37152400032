"""The job files themselves: text from a `cluster.Cluster`.

What enters: a checked `Cluster`. What leaves: an sbatch script or Kubernetes objects in YAML, as text.
Guarantees: the training command is one, `torchrun -m dfm_nb.train`, on every kind; a job that is asked to stop saves first and goes on from
there when it runs again; shell words are quoted.
"""

from __future__ import annotations

import shlex
from typing import Any, Callable

import yaml

from dfm_nb.cluster import Cluster

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What torchrun hands on to its workers; its default leaves out SIGUSR1, which Slurm sends before the end."""


def environment(c: Cluster) -> dict[str, str]:
    """Variables of every training process: OpenMP threads, and how long torchrun waits for the last checkpoint."""
    threads = max(1, c.cpus_per_node // c.processes_per_node)
    wait = max(1, c.grace_s * 9 // 10)
    return {"OMP_NUM_THREADS": str(threads), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(wait), **c.env}


def _words(argv: list[str], indent: str = "    ") -> str:
    """A command over several lines: a flag and its values a line."""
    lines: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not lines or ("=" in word and not lines[-1][-1].startswith("--")):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return f" \\\n{indent}".join(" ".join(line) for line in lines)


# ---- Slurm --------------------------------------------------------------------------------------------------------

_SBATCH = """#!/bin/bash
# Training of {name} on {nodes} x {processes} processes; made by `dfm deploy slurm`.
{options}

set -euo pipefail
{setup}{exports}

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# {grace} s before the end Slurm sends SIGUSR1 to this shell; torchrun hands it on, training saves and ends, and the job queues again.
# When an agent ends, the others have as long to end (without --kill-on-bad-exit=0 the first one to have saved would stop the rest).
stopped=0
srun --kill-on-bad-exit=0 --wait={grace} torchrun \\
    --nnodes={nodes} --nproc-per-node={processes} --max-restarts={restarts} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head_node:$port" \\
    --signals-to-handle={signals} \\
    -m dfm_nb.train \\
    {command} &
step=$!
trap 'stopped=1; kill -USR1 "$step"' USR1

code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # the signal ended `wait`, not the step
    code=0
    wait "$step" || code=$?
done
if [ "$stopped" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm(c: Cluster) -> str:
    """A batch script: one torchrun agent a node, c10d rendezvous on the first; saves and queues again before the time is up."""
    s = c.slurm
    options = {
        "job-name": c.name,
        "nodes": c.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": c.cpus_per_node,
        "gpus-per-node": c.gpus_per_node or None,
        "mem": f"{c.memory_gib_per_node}G",
        "time": c.time_limit,
        "partition": s.partition,
        "account": s.account,
        "qos": s.qos,
        "constraint": s.constraint,
        "output": s.output,
        "open-mode": "append",
        "signal": f"B:USR1@{c.grace_s}",
    }
    lines = [f"#SBATCH --{k}={v}" for k, v in options.items() if v is not None]
    lines += ["#SBATCH --requeue"] + ["#SBATCH --exclusive"] * s.exclusive
    return _SBATCH.format(
        name=c.name,
        nodes=c.nodes,
        processes=c.processes_per_node,
        options="\n".join(lines),
        grace=c.grace_s,
        signals=SIGNALS,
        setup="".join(line + "\n" for line in s.setup),
        restarts=c.training.max_restarts,
        command=_words(c.train_argv()),
        exports="\n".join(f"export {k}={shlex.quote(v)}" for k, v in environment(c).items()),
    )


def slurm_text(c: Cluster) -> str:
    """A job array over the partitions of a corpus; the parts are joined by a job that waits for all of them."""
    s, t = c.slurm, c.text
    options = {
        "job-name": f"{c.name}-text",
        "array": f"0-{t.partitions - 1}",
        "ntasks": 1,
        "cpus-per-task": t.workers,
        "mem": f"{t.memory_gib}G",
        "time": c.time_limit,
        "partition": s.partition,
        "account": s.account,
        "qos": s.qos,
        "output": "%x-%A_%a.log",
    }
    lines = [f"#SBATCH --{k}={v}" for k, v in options.items() if v is not None]
    setup = "".join(line + "\n" for line in s.setup)
    return (
        f"#!/bin/bash\n# JSONL to .bin/.idx in {t.partitions} parts; made by `dfm deploy slurm-text`. Afterwards, once:\n"
        f"#   sbatch --dependency=afterok:JOB_ID --wrap={shlex.quote(shlex.join(['dfm', *merge_argv(c)]))}\n"
        + "\n".join([*lines, "#SBATCH --requeue", "", "set -euo pipefail", f"{setup}srun dfm text preprocess \\"])
        + f'\n    {_words(c.text_argv())} \\\n    --partition="$SLURM_ARRAY_TASK_ID/{t.partitions}"\n'
    )


def merge_argv(c: Cluster) -> list[str]:
    """What `dfm` is told to join the parts."""
    return ["text", "merge", "--output-prefix", c.text.output_prefix, "--json-keys", *c.text.json_keys]


# ---- Kubernetes ---------------------------------------------------------------------------------------------------


def _yaml(comment: str, *objects: dict[str, Any]) -> str:
    body = "---\n".join(yaml.safe_dump(o, sort_keys=False, width=120) for o in objects)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body


def _meta(c: Cluster, name: str, stage: str) -> dict[str, Any]:
    return {"name": name, "namespace": c.kubernetes.namespace, "labels": _labels(name, stage)}


def _labels(name: str, stage: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "dfm-nb",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": stage,
    }


def _env(variables: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": k, "value": v} for k, v in variables.items()]


def _resources(cpus: int, memory_gib: int, gpus: dict[str, int] | None = None) -> dict[str, Any]:
    """Equal requests and limits, so that a pod keeps what it has (quality of service "Guaranteed")."""
    amounts: dict[str, Any] = {
        "cpu": str(cpus),
        "memory": f"{memory_gib}Gi",
        **{k: str(n) for k, n in (gpus or {}).items() if n},
    }
    return {"requests": amounts, "limits": dict(amounts)}


def _training_resources(c: Cluster) -> dict[str, Any]:
    return _resources(c.cpus_per_node, c.memory_gib_per_node, {c.kubernetes.gpu_resource: c.gpus_per_node})


def _pod(c: Cluster, container: dict[str, Any], restart: str, shared_memory: bool) -> dict[str, Any]:
    """A pod with the shared claim, and with room in /dev/shm for NCCL and the loaders where it trains."""
    k = c.kubernetes
    mounts, volumes = (
        [{"name": "shared", "mountPath": k.mount_path}],
        [{"name": "shared", "persistentVolumeClaim": {"claimName": k.claim}}],
    )
    spec: dict[str, Any] = {"restartPolicy": restart}
    if shared_memory:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{k.shm_gib}Gi"}})  # type: ignore[dict-item]
        spec["terminationGracePeriodSeconds"] = c.grace_s
    if k.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": k.image_pull_secret}]
    if k.node_selector:
        spec["nodeSelector"] = dict(k.node_selector)
    return {**spec, "containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}


def _torchrun(c: Cluster, *flags: str) -> list[str]:
    """The first process of the container, so that it gets the pod's SIGTERM. Without flags the operator's PET_* variables speak."""
    return ["torchrun", *flags, f"--max-restarts={c.training.max_restarts}", "-m", "dfm_nb.train", *c.train_argv()]


def job(c: Cluster) -> str:
    """An indexed Job, one pod a node, and the headless Service by which they find the first."""
    name, k = f"{c.name}-train", c.kubernetes
    labels = _labels(name, "train")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(c, name, "train"),
        "spec": {
            "clusterIP": "None",
            "selector": labels,
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": k.port}],
        },
    }
    flags = (
        f"--nnodes={c.nodes}",
        f"--nproc-per-node={c.processes_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={name}",
        f"--rdzv-endpoint={name}-0.{name}:{k.port}",
    )
    container = {
        "name": "train",
        "image": k.image,
        "command": _torchrun(c, *flags),
        "env": _env(environment(c)),
        "ports": [{"containerPort": k.port}],
        "resources": _training_resources(c),
    }
    pod = {"subdomain": name, **_pod(c, container, "OnFailure", True)}
    body = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(c, name, "train"),
        "spec": {
            "completions": c.nodes,
            "parallelism": c.nodes,
            "completionMode": "Indexed",
            "backoffLimit": c.training.max_restarts * c.nodes,
            "activeDeadlineSeconds": c.time_limit_s,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return _yaml(f"Training of {c.name} as a plain Kubernetes Job; made by `dfm deploy job`.", service, body)


def trainjob(c: Cluster) -> str:
    """Kubeflow Trainer v2: a TrainingRuntime with the volumes, and the TrainJob that uses it."""
    name, k = f"{c.name}-train", c.kubernetes
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = _pod(c, {"name": "node", "image": k.image}, "OnFailure", True)
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _meta(c, name, "train"),
        "spec": {
            "mlPolicy": {"numNodes": c.nodes, "torch": {}},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": step},
                                "spec": {
                                    "backoffLimit": c.training.max_restarts * c.nodes,
                                    "activeDeadlineSeconds": c.time_limit_s,
                                    "template": {"spec": node},
                                },
                            },
                        }
                    ]
                }
            },
        },
    }
    body = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _meta(c, name, "train"),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {
                "image": k.image,
                "command": _torchrun(c),
                "env": _env(environment(c)),
                "numNodes": c.nodes,
                "numProcPerNode": c.processes_per_node,
                "resourcesPerNode": _training_resources(c),
            },
        },
    }
    return _yaml(f"Training of {c.name} by Kubeflow Trainer v2; made by `dfm deploy trainjob`.", runtime, body)


def pytorchjob(c: Cluster) -> str:
    """Kubeflow Training Operator v1: one master, the other nodes workers."""
    name, k = f"{c.name}-train", c.kubernetes
    container = {
        "name": "pytorch",
        "image": k.image,
        "command": _torchrun(c),
        "env": _env(environment(c)),
        "ports": [{"name": "pytorchjob-port", "containerPort": k.port}],
        "resources": _training_resources(c),
    }
    pod = {"metadata": {"labels": _labels(name, "train")}, "spec": _pod(c, container, "OnFailure", True)}
    pod["spec"].pop("restartPolicy")  # the operator sets it from the replica's
    replica = {"restartPolicy": "OnFailure", "template": pod}
    replicas = {"Master": {"replicas": 1, **replica}}
    if c.nodes > 1:
        replicas["Worker"] = {"replicas": c.nodes - 1, **replica}
    body = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _meta(c, name, "train"),
        "spec": {
            "nprocPerNode": str(c.processes_per_node),
            "runPolicy": {
                "backoffLimit": c.training.max_restarts * c.nodes,
                "activeDeadlineSeconds": c.time_limit_s,
                "cleanPodPolicy": "None",
            },
            "pytorchReplicaSpecs": replicas,
        },
    }
    return _yaml(
        f"Training of {c.name} by the Kubeflow Training Operator v1; made by `dfm deploy pytorchjob`.", _plain(body)
    )


def _plain(value: Any) -> Any:
    """The same without shared parts, which YAML would write as anchors."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _text_job(c: Cluster, name: str, command: list[str], cpus: int, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "preprocessor",
        "image": c.kubernetes.image,
        "command": command,
        "env": _env(
            {"TOKENIZERS_PARALLELISM": "false", **({"JOB_COMPLETIONS": str(c.text.partitions)} if spec else {})}
        ),
        "resources": _resources(cpus, c.text.memory_gib),
    }
    pod = {"metadata": {"labels": _labels(name, "preprocess")}, "spec": _pod(c, container, "OnFailure", False)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(c, name, "preprocess"),
        "spec": {**spec, "backoffLimit": 2, "template": pod},
    }


def text_job(c: Cluster) -> str:
    """One pod that makes the corpus; started again, it goes on from what is done."""
    body = _text_job(c, f"{c.name}-text", ["dfm", "text", "preprocess", *c.text_argv()], c.text.workers)
    return _yaml("JSONL to Megatron .bin/.idx in one pod; made by `dfm deploy text-job`.", body)


def text_indexed_job(c: Cluster) -> str:
    """An indexed Job, a part a pod (`--partition auto` reads JOB_COMPLETION_INDEX)."""
    command = ["dfm", "text", "preprocess", *c.text_argv(), "--partition", "auto"]
    n = c.text.partitions
    body = _text_job(
        c, f"{c.name}-text-parts", command, c.text.workers, completions=n, parallelism=n, completionMode="Indexed"
    )
    note = "Afterwards: `dfm deploy text-merge-job` joins the parts."
    return _yaml(f"JSONL to Megatron .bin/.idx in {n} parts; made by `dfm deploy text-indexed-job`.\n{note}", body)


def text_merge_job(c: Cluster) -> str:
    """One pod that joins the parts, after the indexed Job."""
    body = _text_job(c, f"{c.name}-text-merge", ["dfm", *merge_argv(c)], 1)
    return _yaml(
        "Joins the parts of a corpus; made by `dfm deploy text-merge-job`. First: `dfm deploy text-indexed-job`.", body
    )


KINDS: dict[str, tuple[Callable[[Cluster], str], str, str]] = {
    # kind: (function, one line of help, name of the file)
    "slurm": (slurm, "training on Slurm, an sbatch script", "train.sbatch"),
    "job": (job, "training as a plain Kubernetes Job and a Service", "job.yaml"),
    "trainjob": (trainjob, "training by Kubeflow Trainer v2", "trainjob.yaml"),
    "pytorchjob": (pytorchjob, "training by the Kubeflow Training Operator v1", "pytorchjob.yaml"),
    "text-job": (text_job, "text preprocessing in one pod", "text-job.yaml"),
    "text-indexed-job": (text_indexed_job, "text preprocessing in parts, a pod each", "text-indexed-job.yaml"),
    "text-merge-job": (text_merge_job, "joins the parts", "text-merge-job.yaml"),
    "slurm-text": (slurm_text, "text preprocessing on Slurm, a job array", "text.sbatch"),
}


def render(kind: str, c: Cluster) -> str:
    """The text of a file of this kind (a key of `KINDS`)."""
    return KINDS[kind][0](c)
