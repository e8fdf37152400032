"""The typed settings: one pydantic model per group, one `option(...)` per key with its default, help text and limits.

Add a setting by adding one line here and reading it where it is used: forms, `--print-config`, the checks and
fine-tuning follow. A network that does not read a setting of `model` fixes its value (`networks.Network.settings`);
`tests/model/test_dit.py` finds a setting that it forgets.
Limits on one key are here; rules between several keys are in `checks`.
"""

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, MultipleOf
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PrivateAttr
from pydantic import Field as PydanticField
from pydantic_core import PydanticCustomError, PydanticKnownError

from dfm_nb.base.limits import MOST_STEPS
from dfm_nb.base.options import Field, fields, option
from dfm_nb.config import networks
from dfm_nb.config.samples import SETTINGS, TrainingSamples

INT_LIMIT = 2**31
"""Upper limit of integers: larger ones are typing errors, and the rules between keys factor these numbers."""


def _whole(value: Any) -> Any:
    """Accept 1e4, which YAML reads as a float."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value >= INT_LIMIT:
        raise PydanticKnownError("less_than", {"lt": INT_LIMIT})
    return value


def _text(value: Any) -> Any:
    """`${...}` and `???` are other tools' placeholders, which are not supported."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise PydanticCustomError("placeholder", "Input should be a value: ${...} and ??? are not supported")
    return value


def _precision(value: Any) -> Any:
    """`bf16_mixed` is Megatron-Bridge's name, and a mapping with `bf16: true` its printed form."""
    return "bf16" if value == "bf16_mixed" or (isinstance(value, dict) and value.get("bf16") is True) else value


Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Int, Ge(1)]
Natural = Annotated[Int, Ge(0)]
Side = Annotated[Int, Ge(16), MultipleOf(16)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, PydanticField(ge=0, le=1)]
Text = Annotated[str, BeforeValidator(_text)]
Place = Annotated[Text, AfterValidator(os.path.expanduser)]  # a shell leaves the ~ of key=~/a
# Below 12^-0.5, the relative width of the mean over all steps: no average of `ema.sigma_rels` is wider.
SigmaRel = Annotated[float, PydanticField(gt=0, lt=0.2886)]
LatentSize = Annotated[list[Count], PydanticField(min_length=3, max_length=3)]
if TYPE_CHECKING:
    Variant = str
else:
    Variant = Literal[networks.names()]
Precision = Annotated[Literal["auto", "fp32", "bf16"], BeforeValidator(_precision)]
Anchor = Literal["none", "nearest"]


class Group(BaseModel):
    """A group of settings; values must have exactly the declared type, and unknown names are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def of_weights(default: Any, help: str, **limits_and_marks: Any) -> Any:
    """A setting that defines the weights."""
    return option(default, help, shape=True, **limits_and_marks)


def of_run(default: Any, help: str, **limits: Any) -> Any:
    """A setting that belongs to the data or the run, whatever the weights."""
    return option(default, help, network=False, **limits)


class LoraConfig(Group):
    rank: Count | None = option(None, "train only LoRA of this rank on attention and MLP; null trains all weights")
    alpha: Positive | None = option(None, "LoRA is scaled by alpha / rank; null: alpha = rank")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        assert self.rank
        return (self.alpha or self.rank) / self.rank


class ModelConfig(Group):
    """The network. Training from weights uses their values of these settings, except for those `of_run`, which belong
    to the data or the run. Those `of_weights` define the weights and cannot differ.
    """

    size: Text | None = option(None, "a row of sizes.py or of a network (DiT-S, ...): sets layers, width and heads")
    variant: Variant = of_weights("dit", "the network, found by name (sets the keys in which it differs)")
    num_layers: Count = of_weights(12, "transformer layers")
    hidden_size: Int = of_weights(384, "width of the residual stream", ge=8)
    num_attention_heads: Count = of_weights(6, "attention heads; must divide hidden_size")
    ffn_hidden_size: Count | None = of_weights(None, "width of the MLP; null: 4 * hidden_size")
    in_channels: Count | None = of_weights(None, "latent channels; null: the data set's", network=False)
    text_dim: Count | None = of_weights(None, "width of the text; null: the data set's", network=False)
    patch_spatial: Count = of_weights(2, "latent pixels per token along height and along width")
    patch_temporal: Count = of_weights(1, "latent frames per token")
    adaln_lora_dim: Count | None = of_weights(None, "rank of the adaLN modulation; null: full rank")
    qk_layernorm: bool = of_weights(True, "RMSNorm on the queries and keys of each head")
    rope: bool = of_weights(False, "RoPE in self attention, in addition to the sine-cosine embedding")
    layernorm_epsilon: float = option(1e-6, "epsilon of every normalisation layer", gt=0, lt=1)
    sigma_data: Positive = option(0.5, "standard deviation of the scaled latents (EDM's sigma_data)")
    # The noise band in which neighbours inform a denoiser, in latents of 512 px pictures and 256 px clips
    # (benchmarks/results/noise_levels.md). Its upper end rises by 0.4 to 0.5 when the sides double, so large clips need
    # strong noise. At 64 px the measurement gives about -0.4 and 1.0, EDM2's values for latents, which the demo uses.
    # EDM's -1.2 and 1.2 (Karras et al. 2022) are for pixels of 32 and 64 px pictures; NeMo DFM has 0 and 1.
    P_mean: float = option(0.2, "mean of ln(sigma) in training")
    P_std: Positive = option(1.4, "standard deviation of ln(sigma) in training")
    objective: Literal["edm", "flow"] = of_weights(
        "edm", "output of the network: EDM's F, or flow matching's velocity (with sigma_data 1)"
    )
    times: Literal["logit-normal", "uniform"] = option(
        "logit-normal",
        "noise levels of training: ln(sigma) normal; or logistic with P_mean and scale P_std, uniform times at 0 and 1",
    )
    student: bool = option(
        False, "a few-step student of checkpoint.pretrained: it learns guidance and generation.num_steps long steps"
    )
    shift_tokens: Count | None = option(
        None, "multiply a sample's noise level by sqrt(its tokens / this), for several sizes"
    )
    text_padding: Count | None = of_weights(
        None, "pad a text with zeros (attended to) to this many rows, and truncate longer ones"
    )
    pooled_text: bool = of_weights(True, "add the mean text embedding to the conditioning vector")
    tensor_model_parallel_size: Count = of_run(1, "TP: processes that share each weight matrix")
    pipeline_model_parallel_size: Count = of_run(1, "PP: processes that share the layers")
    virtual_pipeline_model_parallel_size: Count | None = of_run(
        None, "VPP: interleaved stages per pipeline process; null: one"
    )
    context_parallel_size: Count = of_run(1, "CP: processes that share each sequence")
    sequence_parallel: bool = of_run(False, "SP: split activations between products over the TP ranks")
    attention_backend: Literal["auto", "sdpa", "varlen", "flash_attn"] = of_run(
        "auto", "kernel for packed sequences; auto: the fastest on this machine"
    )
    compile: bool | None = of_run(
        None, "torch.compile the layers for training; null: on a CUDA device whose layout allows it"
    )
    cuda_graph: bool = of_run(False, "forward and backward of a step as one CUDA graph, where the layout allows it")
    recompute_granularity: Literal["selective", "full"] | None = of_run(
        None, "recompute in the backward pass: selective (attention), full (layers), or null (nothing)"
    )
    vae_cache_folder: Place | None = of_run(None, "the tokenizer's folder, for validation samples")
    lora: LoraConfig = LoraConfig()

    @property
    def network(self) -> networks.Network:
        """What is known of it by its variant."""
        return networks.find(self.variant)(self)


class TrainConfig(Group):
    minutes: Positive | None = option(
        None, "training time; it sets iterations, network, packs, noise levels and checkpoints (planner.minutes)"
    )
    train_iters: Count = option(10000, "optimizer steps of the whole run")
    global_batch_size: Count = option(32, "packs per optimizer step over all processes")
    micro_batch_size: Count = option(
        1, "packs per forward: one packed sequence of micro_batch_size * dataset.task_encoder_seq_length tokens"
    )
    eval_interval: Natural = option(500, "iterations between validations; 0 means never")
    eval_iters: Natural = option(8, "global batches per validation; 0 means no validation")
    # the unconditional estimate for guidance is learned from these (Ho & Salimans 2022: 0.1 and 0.2 work equally well)
    caption_dropout: Share = option(0.1, "probability that a sample's caption is replaced by the empty one")
    teacher_guidance: NotNegative | None = option(
        None, "guidance of a student's teacher; null: as its weights recommend"
    )
    teacher_steps: Int = option(
        8,
        "least number of steps of a student's teacher; it takes two or more for each of the student's",
        ge=2,
        le=MOST_STEPS,
    )
    given_dropout: float = option(0.1, "probability that a sample's given pictures are left out", ge=0, le=0.5)
    first_frame_share: float = option(
        0.0,
        "least share that a clip's first latent frame, which is encoded alone, has of the weights of its loss",
        ge=0,
        le=0.9,
    )
    max_skipped_steps: Natural = option(10, "most steps in a row skipped for NaN or Inf; more end the run")
    exit_on_signal: bool = option(True, "on Ctrl-C, SIGTERM or SIGUSR1, save a checkpoint and exit cleanly")
    exit_duration_s: Positive | None = option(None, "save and exit after this time in training")


class OptimizerConfig(Group):
    optimizer: Literal["adam", "muon"] = option(
        "adam", "adam: AdamW; muon: Muon for the matrices of attention and MLP, AdamW for the rest"
    )
    lr: float = option(1e-4, "peak learning rate", gt=0, lt=1)
    min_lr: NotNegative = option(0.0, "learning rate at the end of the decay")
    weight_decay: NotNegative = option(
        0.01, "weight decay of AdamW and Muon; a step multiplies the weights by 1 - lr * weight_decay"
    )
    adam_beta1: float = option(0.9, "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = option(0.99, "AdamW beta 2", ge=0, lt=1)
    adam_eps: Positive = option(1e-8, "AdamW epsilon")
    muon_extra_scale_factor: Positive = option(
        0.2, "root mean square of a Muon update's entries, in units of optimizer.lr; 0.2 is about AdamW's"
    )
    muon_momentum: float = option(0.95, "Nesterov momentum of Muon", ge=0, lt=1)
    muon_num_ns_steps: Count = option(5, "Newton-Schulz iterations of Muon")
    clip_grad: NotNegative = option(1.0, "clip the global gradient norm to this; 0 does not clip")
    use_distributed_optimizer: bool = option(False, "shard the optimizer state over the data-parallel processes")


class SchedulerConfig(Group):
    lr_warmup_iters: Natural | None = option(
        None, "iterations of linear warm-up; null: a tenth of train.train_iters, at most 100"
    )
    lr_decay_iters: Count | None = option(None, "iteration at which min_lr is reached; null: train.train_iters")
    lr_decay_style: Literal["cosine", "linear", "constant"] = option("cosine", "shape of the decay")


class DatasetConfig(Group):
    path: Place | None = option(
        None, "folder with the shards that `dfm prepare` wrote, or its URL (https://, s3://, what fsspec opens)"
    )
    cache_dir: Place | None = option(None, "cache for shards from a server; null: ~/.cache/dfm_nb")
    cache_gib: Positive = option(64.0, "size of that cache in GiB")
    task_encoder_seq_length: Count = option(
        8192, "tokens in a pack, times train.micro_batch_size; no sample may be longer than that"
    )
    packing_buffer_size: Count = option(64, "size of the packing buffer")
    lanes: Natural = option(
        0,
        "maximum number of shard streams, which yield packs in turn, best a multiple of the data-parallel size; "
        "0: one below a million samples, else 256; a resumed run keeps its value",
    )
    lane_window: Count = option(8192, "shuffle window of a lane in samples, if there are several lanes")
    balance_steps: Count = option(
        1, "steps to balance packs over, so that a step's packs cost the same; a resumed run keeps its value"
    )
    num_workers: Natural = option(2, "loader threads per training process; 0 loads in the training thread")
    clip_weight: float = option(
        1.0, "how often a clip is used for each use of a picture, on top of the samples' own weights", ge=0.001, le=1000
    )
    max_bad_fraction: Share = option(
        0.01, "share of samples that may be unusable before the run stops; above 0, one sample always may"
    )
    use_train_split_for_val: bool = option(False, "validate on training samples, when all data are in the train split")
    condition_frames_prob: Share = option(
        0.0, "probability that a clip's first latent frame is given clean, for image-to-video"
    )
    condition_last_prob: Share = option(0.0, "the same of its last latent frame, for --last-image")
    may_grow: bool = option(False, "whether a resumed run continues with its data set when samples were added to it")
    mock: bool = option(False, "train on random latents instead of a data set")
    mock_latent_sizes: list[LatentSize] | None = option(
        None,
        "latent [T, H, W] sizes of mock samples in turn; null: a wide picture that fills a pack alone",
        min_length=1,
    )
    mock_text_tokens: Count | None = option(
        None, "caption tokens of a mock sample; null: 512, or a sixteenth of a pack if that is less"
    )


class CheckpointConfig(Group):
    checkpoint_dir: Place | None = option(None, "folder for checkpoints; null: checkpoints/ in the run folder")
    load: Place | None = option(
        None, "resume from the newest checkpoint of this folder or run, or start from scratch if it has none"
    )
    load_checkpoint: Place | None = option(None, "resume from this run, checkpoint folder or iter_*, which must exist")
    pretrained: Place | None = option(None, "start from these weights with a fresh optimizer and data order")
    save_interval: Natural = option(1000, "iterations between checkpoints; 0 saves at the end only")
    async_save: bool = option(False, "write checkpoints in the background during training")
    keep_last: Natural = option(3, "number of newest checkpoints to keep; 0 keeps all")
    keep_best: bool = option(False, "also save and keep the checkpoint with the lowest validation loss")
    keep_every: Count | None = option(None, "also keep the checkpoints at multiples of this iteration")


class EmaConfig(Group):
    # EDM2's two: from both, `dfm export` reconstructs lengths in between (Karras et al. 2024)
    sigma_rels: list[SigmaRel] = option(
        [0.05, 0.10], "relative widths of the power-function EMAs, below 0.2886; [] keeps none"
    )


class LoggerConfig(Group):
    log_interval: Count = option(10, "iterations between log lines; metrics.jsonl records every iteration")
    report_to: list[Text] | None = option(
        None, "tensorboard, wandb, an entry point, module:name; null: tensorboard, and wandb with a project"
    )
    wandb_project: Text | None = option(None, "Weights & Biases project; null does not log there")
    wandb_exp_name: Text | None = option(None, "Weights & Biases run name; null: the run folder's name")
    wandb_mode: Literal["online", "offline", "disabled"] = option("online", "online, offline (files only) or disabled")


class RngConfig(Group):
    seed: Natural = option(1234, "seed of weights, data order, noise levels and noise")


STUDENT_SAMPLING = {"sampler": "euler", "schedule": "flow", "guidance": 1.0}
"""What a few-step student recommends: it has learned this way of sampling alone."""


class GenerationConfig(Group):
    """A checkpoint's recommendations, the defaults of `dfm generate`, `dfm evaluate`, validation and `Pipeline`."""

    height: Side | None = of_run(None, "px; null: as the training sample whose caption is most like it")
    width: Side | None = of_run(None, "px; null: likewise")
    num_video_frames: Count | None = of_run(None, "frames, 1 + 4 k; null: likewise")
    fps: Positive | None = of_run(None, "frames per second; null: likewise")
    # 14 evaluations are as good as 35 of Heun's (benchmarks/results/sampler_quality.md)
    num_steps: Count = option(14, "recommended sampler steps", le=MOST_STEPS)
    guidance: NotNegative = option(7.0, "guidance strength: D = D_uncond + guidance * (D_cond - D_uncond)")
    sampler: Text = option("unipc_2", "sampler, one of `dfm generate --sampler`")
    schedule: Text = option("focused", "schedule, one of `dfm generate --schedule`")
    shift: Positive = option(1.0, "shift of the schedule, if it is `flow`")
    # 160 times the sigma_data of latents: the first state is noise, whatever the picture (Karras et al. 2022, Table 1)
    sigma_max: Positive = option(80.0, "noise level of the start")
    anchor: Anchor = of_run(
        "none", "nearest: keep the captions of up to 1,000 samples, and put the nearest before a prompt"
    )

    def of_samples(self) -> dict[str, Any]:
        """The size, frames and rate that are set."""
        return self.model_dump(include={*SETTINGS}, exclude_none=True)


class ValidationConfig(Group):
    samples: bool = option(True, "generate samples at each validation, for captions of training and held-out samples")
    prompts: list[Text] = option([], "further prompts to sample: one, or a list as '[\"one, with a comma\", another]'")
    num_steps: Count | None = option(None, "sampler steps; null: generation.num_steps", le=MOST_STEPS)
    guidance: NotNegative | None = option(None, "guidance strength; null: generation.guidance")
    height: Side | None = option(None, "height of the samples; null: as dfm generate by default")
    width: Side | None = option(None, "width of the samples; null: likewise")
    frames: Count | None = option(None, "frames of the samples, 1 + 4 k; null: likewise")
    fps: Positive | None = option(None, "frames per second of the samples; null: likewise")
    num_sigmas: Count = option(8, "fixed noise levels of the validation loss")


class DistConfig(Group):
    timeout_s: Positive = option(1800.0, "a collective that waits longer ends the job")
    hang_timeout_s: NotNegative = option(
        30.0, "end the job and name the rank if a step takes longer, and five times as long as any before; 0: never"
    )


class Config(Group):
    mixed_precision: Precision = option(
        "auto", "arithmetic of the network; auto: bf16 if the machine supports it; the optimizer's weights are fp32"
    )
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    dataset: DatasetConfig = DatasetConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ema: EmaConfig = EmaConfig()
    logger: LoggerConfig = LoggerConfig()
    rng: RngConfig = RngConfig()
    generation: GenerationConfig = GenerationConfig()
    validation: ValidationConfig = ValidationConfig()
    dist: DistConfig = DistConfig()
    _samples: TrainingSamples = PrivateAttr(default_factory=TrainingSamples)

    @property
    def samples(self) -> TrainingSamples:
        """What the training samples have; no setting."""
        return self._samples

    def with_samples(self, samples: TrainingSamples) -> "Config":
        """The same settings on these samples."""
        copy = self.model_copy()
        copy._samples = samples
        return copy


FIELDS: dict[str, Field] = fields(Config)


def marked(mark: str) -> list[str]:
    """Keys of settings that a checkpoint's weights determine.

    mark : "network", settings that training takes from its initial weights; "shape", settings that cannot differ.
    """
    groups = ("model.", "generation.")
    return [k for k, f in FIELDS.items() if k.startswith(groups) and f.marks.get(mark, mark == "network")]
