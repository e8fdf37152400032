"""The typed settings: one dataclass per group, one `option(...)` per key with its help text and its limits.

What enters: nothing. What leaves: `Config`, whose defaults are the lowest layer of `config.resolve`. Everything a form,
`--print-config` or a validator needs to know about a key is in `field.metadata`; limits on one key live here, limits
that join several keys live in `_config_checks`. Add a setting by adding one line, and read it somewhere.
"""

# ruff: noqa: RUF009
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field with a help text and limits.

    Parameters
    ----------
    default : the value when no layer sets the key; a list is copied for every instance.
    help : one line for `--print-config` and for the tooltip of a form.
    **limits : `ge`, `gt`, `le`, `lt` (bounds of a number, or of each entry of a list), `choices` (legal strings),
        `multiple_of`, `min_items`, `entry_len` (length of each inner list), `unit`, `aliases` (full dotted names that
        mean this key), `synonyms` (other spellings of a value).
    """
    metadata = {"help": help, **limits}
    if isinstance(default, list):
        return field(
            default_factory=lambda: [list(v) if isinstance(v, list) else v for v in default], metadata=metadata
        )
    return field(default=default, metadata=metadata)


@dataclass
class LoraConfig:
    rank: int | None = option(
        None, "train only low-rank updates of this rank on the attention and MLP layers; null trains all weights", ge=1
    )
    alpha: float | None = option(None, "the updates are scaled by alpha / rank; null means alpha = rank", gt=0)


@dataclass
class ModelConfig:
    size: str | None = option(
        None, "a row of sizes.py (DiT-S, DiT-B, DiT-L, DiT-XL, ...): sets layers, width and heads"
    )
    num_layers: int = option(12, "transformer layers", ge=1)
    hidden_size: int = option(384, "width of the trunk", ge=8)
    num_attention_heads: int = option(6, "attention heads; must divide hidden_size", ge=1)
    ffn_hidden_size: int | None = option(None, "width of the MLP; null means 4 * hidden_size", ge=1)
    in_channels: int | None = option(None, "latent channels; null means those of the data set", ge=1)
    text_dim: int | None = option(None, "width of the text embedding; null means that of the data set", ge=1)
    patch_spatial: int = option(2, "latent pixels per token along height and along width", ge=1)
    patch_temporal: int = option(1, "latent frames per token", ge=1)
    adaln_lora_dim: int | None = option(None, "rank of the adaLN modulation; null means full rank", ge=1)
    qk_layernorm: bool = option(True, "RMSNorm on the queries and keys of each head")
    rope: bool = option(
        False,
        "rotary position embedding on the queries and keys of self attention, beside the sine-cosine embedding that is added",
    )
    layernorm_epsilon: float = option(1e-6, "epsilon of every normalisation", gt=0, lt=1)
    sigma_data: float | None = option(
        None, "standard deviation of the latents (EDM); null means the data set's statistics", gt=0
    )
    P_mean: float = option(-1.2, "mean of ln(sigma) in training")
    P_std: float = option(1.2, "standard deviation of ln(sigma) in training", gt=0)
    pooled_text: bool = option(True, "the mean text embedding joins the conditioning vector")
    tensor_model_parallel_size: int = option(1, "TP: processes that share each weight matrix", ge=1)
    pipeline_model_parallel_size: int = option(1, "PP: processes that share the layers", ge=1)
    virtual_pipeline_model_parallel_size: int | None = option(
        None, "interleaved stages per pipeline process; null means one", ge=1
    )
    context_parallel_size: int = option(1, "CP: processes that share each sequence", ge=1)
    sequence_parallel: bool = option(False, "split activations outside the matrix products over the TP processes")
    attention_backend: str = option(
        "auto",
        "packed attention: auto picks the fastest that this machine has",
        choices=("auto", "sdpa", "sdpa_loop", "varlen", "flash_attn", "flex"),
    )
    recompute_granularity: str | None = option(
        None,
        "recompute activations in backward: null, selective (attention) or full (layers)",
        choices=("selective", "full"),
    )
    vae_cache_folder: str | None = option(None, "folder with the tokenizer's files, to decode validation samples")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class TrainConfig:
    train_iters: int = option(10000, "optimizer steps of the whole run", ge=1)
    global_batch_size: int = option(32, "packs per optimizer step over all processes", ge=1, unit="packs")
    micro_batch_size: int = option(
        1, "packs per forward: one packed sequence of micro_batch_size * dataset.task_encoder_seq_length tokens", ge=1
    )
    eval_interval: int = option(500, "validate every so many iterations; 0 never", ge=0)
    eval_iters: int = option(8, "packs per validation round and process", ge=1)
    caption_dropout: float = option(0.1, "chance that a sample's caption is replaced by the empty one", ge=0, le=1)
    max_skipped_steps: int = option(10, "stop after so many steps skipped for NaN or Inf, in a row", ge=0)
    exit_on_signal: bool = option(
        True, "on SIGTERM or SIGUSR1 save a checkpoint and exit cleanly", aliases=("train.exit_signal_handler",)
    )
    exit_duration_s: float | None = option(None, "save and exit after so many seconds of training", gt=0, unit="s")


@dataclass
class OptimizerConfig:
    optimizer: str = option(
        "adam",
        "adam: AdamW; muon: Muon for the matrices of attention and MLP, AdamW for the rest",
        choices=("adam", "muon"),
    )
    lr: float = option(1e-4, "peak learning rate", gt=0)
    min_lr: float = option(0.0, "learning rate at the end of the decay", ge=0)
    weight_decay: float = option(
        0.01,
        "weight decay of AdamW and Muon, in units of the learning rate: weights fade over 1 / (lr * weight_decay) steps",
        ge=0,
    )
    adam_beta1: float = option(0.9, "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = option(0.99, "AdamW beta 2", ge=0, lt=1)
    adam_eps: float = option(1e-8, "AdamW epsilon", gt=0)
    muon_extra_scale_factor: float = option(
        0.2, "root mean square of a Muon update's entries, in units of optimizer.lr; 0.2 is about AdamW's", gt=0
    )
    muon_momentum: float = option(0.95, "momentum of Muon, applied as Nesterov's", ge=0, lt=1)
    muon_num_ns_steps: int = option(5, "Newton-Schulz iterations of Muon", ge=1)
    clip_grad: float = option(1.0, "largest global gradient norm; 0 does not clip", ge=0)
    use_distributed_optimizer: bool = option(False, "share the optimizer's state over the data-parallel processes")


@dataclass
class SchedulerConfig:
    lr_warmup_iters: int | None = option(
        None, "iterations of linear warm-up; null means a tenth of train.train_iters, at most 100", ge=0
    )
    lr_decay_iters: int | None = option(
        None, "iteration at which min_lr is reached; null means train.train_iters", ge=1
    )
    lr_decay_style: str = option("cosine", "shape of the decay", choices=("cosine", "linear", "constant"))


@dataclass
class DatasetConfig:
    path: str | None = option(None, "folder with the shards that `dfm prepare` wrote")
    task_encoder_seq_length: int = option(
        8192, "tokens in a pack; no sample may be longer", ge=1, unit="tokens", aliases=("dataset.seq_length",)
    )
    packing_buffer_size: int = option(64, "samples looked at together when packing", ge=1)
    num_workers: int = option(2, "loader processes per training process; 0 loads in the training process", ge=0)
    use_train_split_for_val: bool = option(False, "validate on training samples, when all data are in the train split")
    condition_frames_prob: float = option(
        0.0, "chance that a clip's first latent frame is given clean, for image-to-video", ge=0, le=1
    )
    mock: bool = option(False, "random latents instead of a data set")
    mock_latent_sizes: list[list[int]] = option(
        [[1, 8, 8], [3, 8, 8], [1, 12, 8]],
        "latent [T, H, W] that the mock set cycles through",
        ge=1,
        min_items=1,
        entry_len=3,
    )
    mock_text_tokens: int = option(12, "caption tokens of a mock sample", ge=1)


@dataclass
class CheckpointConfig:
    checkpoint_dir: str | None = option(
        None, "where checkpoints go; null means checkpoints/ in the run folder", aliases=("checkpoint.save",)
    )
    load_checkpoint: str | None = option(
        None, "resume from this run, checkpoint folder or iter_* folder", aliases=("checkpoint.load",)
    )
    pretrained: str | None = option(None, "start from these weights with a fresh optimizer and data order")
    save_interval: int = option(1000, "save every so many iterations; 0 only at the end", ge=0)
    async_save: bool = option(False, "write checkpoints while training goes on")
    keep_last: int = option(3, "newest checkpoints kept; 0 keeps all", ge=0)
    keep_every: int | None = option(None, "also keep the checkpoints at multiples of this iteration", ge=1)


@dataclass
class EmaConfig:
    sigma_rels: list[float] = option(
        [0.05, 0.10], "relative widths of the power-function averages; [] keeps none", gt=0, lt=0.2886
    )


@dataclass
class LoggerConfig:
    log_interval: int = option(
        10, "a log line and a metrics record every so many iterations", ge=1, aliases=("train.log_interval",)
    )
    tensorboard: bool = option(True, "write TensorBoard events under tensorboard/ in the run folder")
    wandb_project: str | None = option(None, "Weights & Biases project; null does not log there")
    wandb_exp_name: str | None = option(None, "Weights & Biases run name; null means the run folder's name")
    wandb_mode: str = option(
        "online",
        "online, offline (files only) or disabled",
        choices=("online", "offline", "disabled"),
        synonyms={"False": "disabled"},
    )


@dataclass
class RngConfig:
    seed: int = option(1234, "seed of weights, data order, noise levels and noise", ge=0, lt=2**31)


@dataclass
class ValidationConfig:
    prompts: list[str] = option([], "prompts sampled after each validation; [] draws no sample")
    num_steps: int = option(18, "sampler steps", ge=1)
    guidance: float = option(3.0, "D = D_uncond + guidance * (D_cond - D_uncond)", ge=0)
    height: int = option(64, "height of the samples", ge=16, multiple_of=16, unit="px")
    width: int = option(64, "width of the samples", ge=16, multiple_of=16, unit="px")
    frames: int = option(1, "frames of the samples: 1 + 4 k", ge=1, unit="frames")
    fps: float = option(24.0, "frames per second of the samples", gt=0)
    num_sigmas: int = option(8, "fixed noise levels of the validation loss", ge=1)


@dataclass
class DistConfig:
    timeout_s: float = option(1800.0, "a collective that waits longer ends the job", gt=0, unit="s")
    hang_timeout_s: float = option(
        30.0,
        "a step that takes longer, and five times longer than any before, ends the job with the rank named; 0: never",
        ge=0,
        unit="s",
    )


@dataclass
class Config:
    mixed_precision: str = option(
        "bf16",
        "arithmetic of the network; weights and preconditioning stay fp32",
        choices=("fp32", "bf16"),
        synonyms={"bf16_mixed": "bf16", "32": "fp32"},
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    rng: RngConfig = field(default_factory=RngConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    dist: DistConfig = field(default_factory=DistConfig)
