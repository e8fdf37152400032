"""`dfm plan`: which layouts of a model fit a number of GPUs, what each holds per GPU, whose step is the shortest."""

import json
from dataclasses import replace
from typing import Any, Literal

from dfm_nb import config as cfg
from dfm_nb.base.options import option
from dfm_nb.base.verb import Report, Verb
from dfm_nb.config import notation, sizes
from dfm_nb.planner.layouts import GpuLayout, Load
from dfm_nb.planner.ranking import MARGIN, Ranking, fed, rank
from dfm_nb.planner.step_cost import MACHINES, Machine, parameters

_USUAL = cfg.Config()
FAST_HEADS = (64, 128)  # channels that FlashAttention's kernels are made for
MachineName = Literal["a100-80", "h100", "h200", "b200", "gb200", "gb300"]


class PlanOptions(Verb):
    """Layouts of a model on a number of GPUs: memory per GPU and time of a step."""

    prog = "dfm plan"
    model: str = option(help=f"a size: {', '.join(sizes.SIZES)}")
    seq_length: int = option(_USUAL.dataset.task_encoder_seq_length, "tokens of a pack", gt=0)
    gpus: int = option(8, "processes, one per GPU", gt=0)
    machine: MachineName = option("h100", "the GPU, whose memory and rates are those of its data sheet")
    gpus_per_node: int | None = option(None, "GPUs that NVLink joins; default: the machine's", gt=0)
    mixed_precision: Literal["bf16", "fp32"] = option("bf16", "arithmetic")
    global_batch_size: int = option(_USUAL.train.global_batch_size, "packs of a step")
    samples: int = option(Load.samples, "samples in a pack", gt=0)
    text_tokens: int = option(Load.text_tokens, "of a caption, without model.text_padding", gt=0)
    overrides: notation.Overrides = option([], "as for dfm pretrain", positional=True, metavar="group.key=value")

    def hardware(self) -> Machine:
        machine = MACHINES[self.machine]
        return replace(machine, gpus_per_node=self.gpus_per_node or machine.gpus_per_node)

    def workload(self) -> tuple[cfg.Config, Load]:
        """The settings, and the packs of a step."""
        if self.samples > self.seq_length:
            raise ValueError(f"--samples must be at most --seq-length = {self.seq_length}; got {self.samples}")
        overrides = [
            f"model.size={self.model}",
            f"mixed_precision={self.mixed_precision}",
            f"dataset.task_encoder_seq_length={self.seq_length}",
            f"train.global_batch_size={self.global_batch_size}",
            *self.overrides,
        ]
        config = fed(cfg.resolve(None, overrides=overrides))
        return config, Load.of(config, self.samples, self.text_tokens)

    def run(self) -> Ranking:
        return rank(*self.workload(), self.gpus, self.hardware())

    def report(self, result: Ranking) -> Report:
        config, load = self.workload()
        count, trained = parameters(config.model, GpuLayout())
        text = (
            f"{config.model.size}, {count / 1e6:,.0f} M parameters, {trained / 1e6:,.1f} M trained, packs of "
            f"{load.tokens} tokens, {load.packs} a step, {config.mixed_precision}, on GPUs of "
            f"{result.gpu_memory_gib:g} GiB ({MARGIN:.0%} left free)"
        )
        head = config.model.hidden_size // config.model.num_attention_heads
        others = [str(config.model.hidden_size // d) for d in FAST_HEADS if config.model.hidden_size % d == 0]
        if head not in FAST_HEADS and others:
            text += (
                f"\nFlashAttention pads heads of {head} channels; those of 64 and 128 are faster: "
                f"model.num_attention_heads={' or '.join(others)}"
            )
        return Report({"layouts": json.loads(result.to_frame().to_json(orient="records"))}, f"{text}\n{result}")


main = PlanOptions.main


def plan_layouts(model: str, **flags: Any) -> Ranking:
    """Every legal layout of a model on some GPUs: the shortest step first, and of equal ones the one of least memory.

    Parameters
    ----------
    model : a size, for example "DiT-XL".
    **flags : those of `dfm plan` with underscores (`gpus`, `machine`, `seq_length`, ...), and
        `overrides`, more settings as ["group.key=value"] or {"group.key": value}.

    Raises
    ------
    ValueError : a number is not positive, a setting is wrong, or no layout is legal (with the faults of plain DP).

    >>> plan_layouts("DiT-S", gpus=2, overrides={"model.num_layers": 4}).to_frame()  # doctest: +SKIP
    """
    return PlanOptions(model=model, **flags).run()
