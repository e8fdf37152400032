"""Wan 2.1 as diffusers keeps it: a folder with transformer/, scheduler/ and vae/, and files of low-rank updates.

Weights are read and written one tensor at a time, by `names`. Updates are written by the names of Wan's own
code, which diffusers and ComfyUI load; those and diffusers' are read.
"""

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dfm_nb.base.files import parsed, read_json, subfolder, write_json
from dfm_nb.checkpoints import tensor_files
from dfm_nb.checkpoints.consolidated import Foreign, as_dtype, check_shapes
from dfm_nb.checkpoints.folders import read_object
from dfm_nb.checkpoints.tensor_files import CheckpointError, Lazy
from dfm_nb.config.schema import Config, ModelConfig
from dfm_nb.config.sizes import LATENT_CHANNELS
from dfm_nb.data.prepared_folder import Statistics
from dfm_nb.integrations.wan.names import Place, places
from dfm_nb.model.build import on_meta
from dfm_nb.model.linear import A, B

CLASS = "WanTransformer3DModel"
SCHEDULER = "UniPCMultistepScheduler"
STEM = "diffusion_pytorch_model"
LORA_FILE = "pytorch_lora_weights.safetensors"
SHARD_BYTES = 5 * 10**9
PARTS = {
    "vae": ["diffusers", "AutoencoderKLWan"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", CLASS],
    "scheduler": ["diffusers", SCHEDULER],
}
"""Folders of a pipeline, and what loads them. The first three no training here changes."""

SIZES = {
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "in_channels",
    "text_dim": "text_dim",
    "eps": "layernorm_epsilon",
}
"""Keys of transformer/config.json that are settings of `model`, by their names here."""
FIXED: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}
"""Keys that have one value in `transformer`, which is also diffusers' default; image to video has others."""
UNUSED = {"attention_head_dim", "rope_max_seq_len", "_diffusers_version", "_name_or_path"}
"""Keys that are read elsewhere, or change nothing."""
FIRST_SIGMA = 1e6
"""Where Wan's scheduler starts: at t = 1 - 1e-6."""


def read(path: Path) -> Foreign | None:
    """A folder of diffusers, or its transformer/, if it is one."""
    folder = path.parent if path.name == "transformer" else path
    if not (folder / "transformer" / "config.json").is_file():
        return None
    return Foreign(settings_of(folder), manifest_of(folder), functools.partial(read_weights, folder))


def settings_of(folder: Path) -> list[str]:
    """Settings as overrides: the network's from transformer/, and of the scheduler what generation recommends."""
    path = folder / "transformer" / "config.json"
    given = read_object(path)
    for key in ("attention_head_dim", *SIZES):
        if not isinstance(given.get(key), int | float):
            raise CheckpointError(f"{path} must have a number as {key}: it is no {CLASS} of diffusers")
    wanted = {**FIXED, "_class_name": CLASS, "out_channels": given["in_channels"]}
    for key in given.keys() - SIZES.keys() - UNUSED:
        if given[key] != wanted.get(key):
            raise ValueError(
                f"{path} must have {key}={json.dumps(wanted.get(key))}, and it has {json.dumps(given[key])}: only Wan "
                "2.1 for text to video can be imported"
            )
    pipeline = read_json(folder / "model_index.json")
    if pipeline.get("transformer_2") not in (None, [None, None]) or pipeline.get("expand_timesteps"):
        raise ValueError(f"{folder} is a Wan 2.2 of two networks or of first frames, which is not supported; use 2.1")
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json")
    shift = scheduler.get("flow_shift", scheduler.get("shift", 3.0))
    if not isinstance(shift, int | float) or not shift > 0:
        raise CheckpointError(f"{folder / 'scheduler'} must have a positive number as flow_shift; it has {shift!r}")
    return [
        "model.variant=wan",
        f"model.P_mean={math.log(shift)}",  # trained at the noise levels that it is sampled at
        *(f"model.{ours}={given[theirs]}" for theirs, ours in SIZES.items()),
        f"model.hidden_size={given['num_attention_heads'] * given['attention_head_dim']}",
        # steps and guidance are those of Wan's own script for text to video; the scheduler's file has neither
        "generation.num_steps=50",
        "generation.guidance=5.0",
        "generation.sampler=unipc_2",
        "generation.schedule=flow",
        f"generation.shift={shift}",
        f"generation.sigma_max={FIRST_SIGMA}",
    ]


def manifest_of(folder: Path) -> dict[str, Any]:
    """What latents and texts mean to it: Wan's encoders, and the statistics in vae/config.json."""
    path = folder / "vae" / "config.json"
    about = read_object(path)
    statistics: dict[str, Any] = {f"latent_{k}": about.get(f"latents_{k}") for k in ("mean", "std")}
    std = [] if Statistics.fault(statistics) else statistics["latent_std"]
    if len(std) != LATENT_CHANNELS or min(std) <= 0:
        raise CheckpointError(f"{path} must have {LATENT_CHANNELS} latents_mean and positive ones as latents_std")
    return {"tokenizer": {"name": "wan_vae"}, "text_encoder": {"name": "umt5"}, **statistics}


# ---- weights --------------------------------------------------------------------------------------------------------


def read_weights(folder: Path, model: ModelConfig) -> Mapping[str, Tensor]:
    """Our tensors by our names, each read when it is asked for, in the type that it is stored in.

    Raises
    ------
    CheckpointError : a file is damaged or missing. ValueError : a weight is missing, unknown or of another shape.
    """
    folder = folder / "transformer"
    index = folder / f"{STEM}.safetensors.index.json"
    listed = read_object(index).get("weight_map") if index.is_file() else None
    files = [f"{STEM}.safetensors"]
    if isinstance(listed, dict):
        files = sorted(set(map(str, listed.values())))
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{index} must name files of its folder; it names {file!r:.80}")
    theirs: dict[str, Tensor] = {}
    for file in files:
        theirs |= tensor_files.open_safetensors(folder / file)[0]
    layers = len({name.split(".")[1] for name in theirs if name.startswith("blocks.")})
    if layers != model.num_layers:  # before a network of as many is made
        raise ValueError(f"{folder} holds {layers} layers (blocks.*); config.json has num_layers={model.num_layers}")
    check_shapes(folder, {name: list(t.shape) for name, t in theirs.items()}, _shapes(model))
    ours = {place.name: place for place in places(model)}
    return Lazy(ours, lambda name: ours[name].ours([theirs[source] for source in ours[name].sources]))


def _shapes(model: ModelConfig) -> dict[str, list[int]]:
    """Of their tensors, by their names."""
    ours = dict(on_meta(model.model_copy(update={"lora": type(model.lora)()})).named_parameters())
    shapes = {}
    for place in places(model):
        for source, tensor in zip(place.sources, place.theirs(ours[place.name]), strict=True):
            shapes[source] = list(tensor.shape)
    return shapes


def write_folder(folder: Path, ours: Mapping[str, Tensor], model: ModelConfig, shift: float) -> None:
    """What `WanPipeline.from_pretrained` opens once vae, text_encoder and tokenizer lie there too.

    ours : weights by our names. shift : of the scheduler.
    """
    import diffusers
    from huggingface_hub import split_torch_state_dict_into_shards

    if (folder / "transformer").exists():
        raise ValueError(f"{folder} holds a transformer already; remove it, or name another folder")
    made_of = {}
    types = {}
    for place in places(model):
        # types now: small objects made between large ones would leave holes that nothing large fits in
        stored_dtype = ours[place.name].dtype
        for i, source in enumerate(place.sources):
            made_of[source] = place, i
            types[source] = stored_dtype

    @functools.lru_cache(1)  # queries, keys and values, one after the other, are of one tensor here
    def together(place: Place) -> list[Tensor]:
        return place.theirs(ours[place.name])

    def one(name: str) -> Tensor:
        place, i = made_of[name]
        return together(place)[i].contiguous()

    to = folder / "transformer"
    to.mkdir(parents=True)
    kinds = {name: (types[name], shape) for name, shape in _shapes(model).items()}
    sizes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in kinds.items()}
    shards = split_torch_state_dict_into_shards(
        sizes, filename_pattern=f"{STEM}{{suffix}}.safetensors", max_shard_size=SHARD_BYTES
    )
    for file, names in shards.filename_to_tensors.items():
        tensor_files.write(to / file, Lazy(names, one), {"format": "pt"}, kinds)
    files: dict[str, dict[str, Any]] = {
        "transformer/config.json": {
            "_class_name": CLASS,
            **FIXED,
            **{theirs: getattr(model, mine) for theirs, mine in SIZES.items()},
            "attention_head_dim": model.hidden_size // model.num_attention_heads,
            "out_channels": model.in_channels,
            "rope_max_seq_len": 1024,
        },
        "scheduler/scheduler_config.json": {
            "_class_name": SCHEDULER,
            "num_train_timesteps": 1000,
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": shift,
        },
        "model_index.json": {"_class_name": "WanPipeline", **PARTS},
    }
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        files[f"transformer/{STEM}.safetensors.index.json"] = index
    subfolder(folder, "scheduler")
    for name, value in files.items():
        if "_class_name" in value:
            value["_diffusers_version"] = diffusers.__version__
        write_json(folder / name, value, indent=2)


def write(output: Path, ours: Mapping[str, Tensor], config: Config, dtype: torch.dtype | None) -> None:
    """The folder of a Wan, or its LoRA adapters alone."""
    model = config.model
    if model.objective != "flow":
        raise ValueError(f"--format diffusers needs model.objective=flow; got {model.objective}")
    if model.lora.rank:
        output.mkdir(parents=True, exist_ok=True)
        adapters = {n: t.to(dtype or t.dtype) for n, t in updates_out(ours, model).items()}
        tensor_files.write(output / LORA_FILE, adapters, {"format": "pt"})
        print(f"[INFO] wrote {output / LORA_FILE}: {len(adapters)} tensors")
        return
    write_folder(output, as_dtype(ours, dtype), model, config.generation.shift)
    print(f"[INFO] wrote {output}: {len(ours)} tensors")


# ---- low-rank updates -----------------------------------------------------------------------------------------------

NATIVE = {
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
"""Linear layers of a block by the names of Wan's own code, by diffusers'."""
_MODULES = {native: name for name, native in NATIVE.items()}
_KEY = re.compile(r"(?:diffusion_model|transformer)\.(blocks\.\d+)\.(.+?)\.(?:lora_)?(A|B|down|up|alpha)(?:\.weight)?")


def updates_out(ours: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Low-rank updates by the names that diffusers and ComfyUI load, with alpha / rank multiplied into B."""
    out = {}
    for place in places(model):
        stem = place.name.removesuffix("weight")
        if stem == place.name or stem + A not in ours:
            continue
        for source, rows in zip(place.sources, place.theirs(model.lora.scale * ours[stem + B]), strict=True):
            block, module = re.fullmatch(r"(blocks\.\d+)\.(.+)\.weight", source).groups()  # type: ignore[union-attr]
            name = f"diffusion_model.{block}.{NATIVE[module]}"
            out[f"{name}.lora_A.weight"] = ours[stem + A].clone()
            out[f"{name}.lora_B.weight"] = rows.contiguous()
    return out


def updates_in(file: Path, model: ModelConfig) -> tuple[int, Mapping[str, Tensor]]:
    """The rank, and updates (float32, alpha = rank) by our names, from a file by diffusers' names or Wan's own.

    Where queries, keys and values have an A each, one A has the rows of all, and B is block-diagonal: a larger rank.

    Raises
    ------
    ValueError : a tensor is unknown, without its other half, or of another shape; it is named.
    """
    updates = _read_updates(file)
    shapes = _shapes(model)
    made: dict[str, Tensor] = {}
    for place in places(model):
        own = [updates.pop(source.removesuffix(".weight"), None) for source in place.sources]
        if not any(own):
            continue
        downs = []
        ups = []
        for source, update in zip(place.sources, own):
            rows, columns = shapes[source]
            a, b = update or (torch.zeros(0, columns), torch.zeros(rows, 0))
            if (a.shape[1:], b.shape) != ((columns,), (rows, len(a))) or len(a) > min(rows, columns):
                raise ValueError(
                    f"{file}: the update of {source} must be [rank, {columns}] and [{rows}, rank] of a rank up to "
                    f"{min(rows, columns)}; it is {list(a.shape)} and {list(b.shape)}: it is of another network"
                )
            downs.append(a)
            ups.append(b)
        # q, k and v with an A of 4 rows each, B_q, B_k, B_v of 4 columns: A [12, in], and B with the three on its
        # diagonal [3 out, 12]. B A is then the three products below one another, which is what one weight holds.
        if all(a.equal(downs[0]) for a in downs):
            down = downs[0]
        else:
            down = torch.cat(downs)
            ups = list(torch.block_diag(*ups).split(list(map(len, ups))))
        stem = place.name.removesuffix("weight")
        made[stem + A] = down
        made[stem + B] = place.ours(ups)
    if updates:
        raise ValueError(
            f"{file} holds an update of {next(iter(updates)):.120}, which no network of these settings has"
        )
    rank = max((len(t) for n, t in made.items() if n.endswith(A)), default=0)
    if not rank:
        raise ValueError(f"{file} holds no low-rank updates")
    ours = dict(on_meta(model.model_copy(update={"lora": type(model.lora)(rank=rank)})).named_parameters())

    def padded(name: str) -> Tensor:
        """To the one rank, with numbers that do nothing; one at a time, as all may be far larger than the file."""
        out = torch.zeros(ours[name].shape)
        given = made.get(name, torch.zeros(0, 0))
        out[: given.shape[0], : given.shape[1]] = given
        return out

    return rank, Lazy((n for n in ours if n.endswith((A, B))), padded)


def _read_updates(file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B in float32, with alpha / rank in B, by diffusers' names of the modules."""
    tensors, about = tensor_files.open_safetensors(file)
    try:
        settings: dict[str, Any] = parsed(about.get("lora_adapter_metadata", "{}"))
        unusual = [k for k, v in settings.items() if v and k.endswith((".alpha_pattern", ".use_rslora", ".use_dora"))]
        alpha_of_all = float(settings.get("transformer.lora_alpha") or 0)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{file} has damaged settings of its updates ({error})") from None
    if unusual:
        raise ValueError(f"{file} sets {unusual[0]}, which cannot be imported; merge it with peft first")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        match = _KEY.fullmatch(key)
        kind = {"down": "A", "up": "B"}.get(match[3], match[3]) if match else ""
        if kind == "alpha":
            whole = value.numel() == 1
        else:
            whole = value.dim() == 2 and value.numel() > 0
        if match is None or not whole:
            kohya = key.startswith("lora_unet_")  # dots of names are lost in its files
            fix = "convert it with musubi-tuner's convert_lora.py --target other" if kohya else "leave it out"
            raise ValueError(f"{file} holds {key!r:.120}, which is no low-rank update of Wan's blocks; {fix}")
        part = parts.setdefault(f"{match[1]}.{_MODULES.get(match[2], match[2])}", {})
        if kind in part:
            raise ValueError(f"{file} holds {key!r:.120} twice, by another name too; keep one")
        part[kind] = value.float()
    out = {}
    for name, part in parts.items():
        if not {"A", "B"} <= part.keys():
            raise ValueError(f"{file} lacks half of the update of {name}")
        rank = len(part["A"])
        # kohya's files have an alpha for each module, diffusers' one for all in the metadata, others alpha = rank
        alpha = float(part.get("alpha", alpha_of_all or rank))
        if not all(t.isfinite().all() for t in (*part.values(), torch.tensor(alpha))):
            raise ValueError(f"{file}: the update of {name} must be finite; it holds NaN or infinity")
        out[name] = part["A"], part["B"] * (alpha / rank)
    return out
