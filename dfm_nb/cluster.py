"""A cluster and the jobs on it, as one description that `dfm deploy` renders.

What enters: a YAML file (see deploy/cluster.yaml) and `group.key=value` strings. What leaves: a checked `Cluster`.
Guarantees: every fault of the description is said at once, with the nearest legal key or value; the training settings are checked as
`dfm pretrain` would check them on that many processes. Cost: milliseconds, without torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dfm_nb import config as cfg


@dataclass
class Training:
    """What `dfm pretrain` is told. `overrides` are its `group.key=value` strings."""

    model: str | None = None
    dataset_path: str | None = None
    mock: bool = False
    run_dir: str = "/shared/runs/pretrain"
    recipe: str = "default"
    config_file: str | None = None
    overrides: list[str] = field(default_factory=list)
    max_restarts: int = 3


@dataclass
class Slurm:
    """Where Slurm runs the job. `setup` : shell lines that every node needs, such as activating an environment."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    output: str = "%x-%j.log"
    setup: list[str] = field(default_factory=list)


@dataclass
class Kubernetes:
    """Where Kubernetes runs the job. `claim` : the PersistentVolumeClaim that all pods mount at `mount_path`."""

    namespace: str = "default"
    image: str = "registry.example.com/dfm-nb:0.1"
    image_pull_secret: str | None = None
    claim: str = "shared"
    mount_path: str = "/shared"
    gpu_resource: str = "nvidia.com/gpu"
    shm_gib: int = 16
    node_selector: dict[str, str] = field(default_factory=dict)
    port: int = 29500


@dataclass
class Text:
    """What `dfm text preprocess` is told, and what one of its pods may use. `partitions` : pods of the indexed Job."""

    input: list[str] = field(default_factory=lambda: ["/shared/data/corpus.jsonl"])
    output_prefix: str = "/shared/data/megatron/corpus"
    tokenizer_model: str = "/shared/tokenizer"
    json_keys: list[str] = field(default_factory=lambda: ["text"])
    workers: int = 16
    chunk_size: int = 8192
    append_eod: bool = True
    partitions: int = 8
    memory_gib: int = 32


@dataclass
class Cluster:
    """One description of a cluster and the jobs on it."""

    name: str = "dfm"
    nodes: int = 1
    gpus_per_node: int = 8
    cpus_per_node: int = 16
    memory_gib_per_node: int = 128
    time_limit: str = "24:00:00"
    grace_s: int = 300
    env: dict[str, str] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    slurm: Slurm = field(default_factory=Slurm)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)
    text: Text = field(default_factory=Text)

    @property
    def processes_per_node(self) -> int:
        """One process a GPU; without GPUs one process a node, on gloo."""
        return max(1, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def time_limit_s(self) -> int:
        hours, minutes, seconds = map(int, self.time_limit.split(":"))
        return hours * 3600 + minutes * 60 + seconds

    def train_argv(self) -> list[str]:
        """The arguments of `python -m dfm_nb.train`."""
        t = self.training
        out = ["--recipe", t.recipe] if t.recipe != "default" else []
        out += ["--model", t.model] if t.model else []
        out += ["--mock"] if t.mock else ["--dataset-path", t.dataset_path or ""]
        out += ["--config-file", t.config_file] if t.config_file else []
        return [*out, "--run-dir", t.run_dir, *t.overrides]

    def text_argv(self) -> list[str]:
        """The arguments of `dfm text preprocess`."""
        t = self.text
        return [
            "--input",
            *t.input,
            "--output-prefix",
            t.output_prefix,
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            t.tokenizer_model,
            "--json-keys",
            *t.json_keys,
            "--workers",
            str(t.workers),
            "--chunk-size",
            str(t.chunk_size),
            *["--append-eod"] * t.append_eod,
        ]


# ---- reading and checking -----------------------------------------------------------------------------------------


def _keys(cls: type, prefix: str = "") -> Iterable[str]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _keys(typing.cast(type, hints[f.name]), f"{prefix}{f.name}.")
        else:
            yield prefix + f.name


def _leaves(tree: dict, known: set[str], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known:
            yield from _leaves(value, known, key + ".")
        elif not (value is None and any(k.startswith(key + ".") for k in known)):  # a group with nothing in it
            yield key, value


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Cluster:
    """The description in a YAML file (none: the defaults), with `key=value` strings over it, checked.

    Raises
    ------
    FileNotFoundError : there is no such file. ValueError : all faults, one line each.
    """
    given: dict[str, Any] = {}
    known = set(_keys(Cluster))
    faults = []
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"--config must be a YAML file; there is no {path}; deploy/cluster.yaml is an example"
            )
        try:
            tree = yaml.safe_load(Path(path).read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be YAML; {' '.join(str(error).split())}; correct the file there") from None
        if not isinstance(tree, dict):
            raise ValueError(
                f"{path} must hold keys and values; got {type(tree).__name__}; deploy/cluster.yaml is an example"
            )
        given.update(_leaves(tree, known))
    for text in overrides:
        key, eq, value = text.partition("=")
        if not eq:
            faults.append(f"{text!r} must be key=value, for example nodes=4")
            continue
        given[key.strip()] = yaml.safe_load(value)
    tree = OmegaConf.structured(Cluster)
    for key, value in given.items():
        faults += _assign(tree, key, value, known)
    cluster = typing.cast(Cluster, OmegaConf.to_object(tree)) if not faults else None
    faults += check(cluster) if cluster else []
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ValueError(f"{count} in the description of the cluster" + "".join(f"\n  {f}" for f in faults))
    assert cluster is not None
    return cluster


def _assign(tree: Any, key: str, value: Any, known: set[str]) -> list[str]:
    if key not in known:
        near = difflib.get_close_matches(key, known, 1) or [k for k in known if k.rpartition(".")[2] == key]
        return [f"{key} is not a key; " + (f"did you mean {near[0]}?" if near else f"keys: {', '.join(sorted(known))}")]
    if value is None:
        return []  # nothing written: the default
    if key == "time_limit" and type(value) is int:  # YAML reads 24:00:00 without quotes as 86400
        value = f"{value // 3600}:{value // 60 % 60:02d}:{value % 60:02d}"
    if isinstance(value, dict):
        value = {str(k): "" if v is None else str(v) for k, v in value.items()}
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except OmegaConfBaseException as error:
        return [f"{key}: {str(error).splitlines()[0]}"]
    return []


_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_COUNTS = (
    "nodes",
    "cpus_per_node",
    "memory_gib_per_node",
    "kubernetes.shm_gib",
    "text.workers",
    "text.chunk_size",
    "text.partitions",
    "text.memory_gib",
)


def _value(cluster: Cluster, key: str) -> Any:
    node: Any = cluster
    for name in key.split("."):
        node = getattr(node, name)
    return node


def check(cluster: Cluster) -> list[str]:
    """Every reason why no job can run from this description; [] when there is none."""
    faults = [f"{k} must be at least 1; got {_value(cluster, k)}" for k in _COUNTS if _value(cluster, k) < 1]
    faults += [
        f"{k} must be 0 or more; got {_value(cluster, k)}"
        for k in ("gpus_per_node", "training.max_restarts", "grace_s")
        if _value(cluster, k) < 0
    ]
    for key in ("name", "kubernetes.namespace", "kubernetes.claim"):
        value, limit = _value(cluster, key), 40 if key == "name" else 63
        if not _NAME.fullmatch(value) or len(value) > limit:
            legal = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:limit].strip("-") or "dfm"
            faults.append(
                f"{key} must be a-z, 0-9 and '-', at most {limit} of them; got {value!r}; for example {legal}"
            )
    if not 1024 <= cluster.kubernetes.port <= 65535:
        faults.append(f"kubernetes.port must be from 1024 to 65535; got {cluster.kubernetes.port}")
    if not cluster.kubernetes.mount_path.startswith("/"):
        faults.append(f"kubernetes.mount_path must begin with '/'; got {cluster.kubernetes.mount_path!r}")
    if not re.fullmatch(r"\d{1,4}:[0-5]\d:[0-5]\d", cluster.time_limit):
        faults.append(f'time_limit must be "hours:minutes:seconds", for example "24:00:00"; got {cluster.time_limit!r}')
    elif cluster.grace_s >= cluster.time_limit_s:
        faults.append(f"grace_s must be less than time_limit = {cluster.time_limit_s} s; got {cluster.grace_s}")
    for name in cluster.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            faults.append(f"env: {name!r} is no name of an environment variable; use letters, digits and '_'")
    for key in ("slurm.partition", "slurm.account", "slurm.qos", "slurm.constraint", "slurm.output"):
        if re.search(r"[\s'\"$`]", _value(cluster, key) or ""):
            faults.append(f"{key} must be one word without quotes or '$'; got {_value(cluster, key)!r}")
    return faults + _training_faults(cluster)


def _training_faults(cluster: Cluster) -> list[str]:
    """What `dfm pretrain` would say on that many processes; paths are the cluster's and are not looked for here."""
    t = cluster.training
    faults: list[str] = []
    if not t.mock and not t.dataset_path:
        faults.append("training.dataset_path must name a folder of shards; got nothing; or set training.mock: true")
    if t.mock and t.dataset_path:
        faults.append("training.mock excludes training.dataset_path; got both; drop one of the two")
    if t.config_file and not Path(t.config_file).is_file():
        return faults  # it is on the cluster: `dfm pretrain` checks it there
    if cluster.world_size < 1:
        return faults  # said already
    try:
        model = [f"model.size={t.model}"] if t.model else []
        cfg.resolve(t.recipe, t.config_file, [*model, *t.overrides], world_size=cluster.world_size)
    except cfg.ConfigError as error:
        faults += [f"training: {fault}" for fault in error.faults]
    return faults
