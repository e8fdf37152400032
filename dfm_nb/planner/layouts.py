"""The layout of training over GPUs (`GpuLayout`), and the input of each step (`Load`)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from dfm_nb.base.machine import precision
from dfm_nb.config.checks import divisors
from dfm_nb.config.schema import Config

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Load:
    """The input of a step: packs of `tokens` tokens from `samples` samples, `packs` of them over all processes.

    cpu : attention is one SDPA call for each run of equal segments, as on CPU, instead of one kernel for the pack. The
        estimate is for one run; the results of several would be joined by a copy.
    """

    tokens: int
    samples: int = 1
    text_tokens: int = 512
    packs: int = 32
    bytes_per_number: int = 2
    ema_averages: int = 2
    cpu: bool = False

    @classmethod
    def of(cls, config: Config, samples: int, text_tokens: int, cpu: bool = False) -> Self:
        """The load of these settings. text_tokens : length of a sample's caption if `model.text_padding` is null."""
        return cls(
            tokens=config.train.micro_batch_size * config.dataset.task_encoder_seq_length,
            samples=samples,
            text_tokens=config.model.text_padding or text_tokens,
            packs=config.train.global_batch_size // config.train.micro_batch_size,
            bytes_per_number=4 if precision(config.mixed_precision) == "fp32" else 2,
            ema_averages=len(config.ema.sigma_rels),
            cpu=cpu,
        )

    @property
    def text(self) -> int:
        """Text tokens of a pack."""
        return self.text_tokens * self.samples

    @property
    def rows(self) -> int:
        """Conditioning rows of a pack; a last segment for padding counts as one more."""
        return self.samples + 1


@dataclass(frozen=True)
class GpuLayout:
    """A layout: degrees of tensor, context, pipeline and data parallelism, with sharding and recomputation."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    distributed_optimizer: bool = False
    recompute: str = "none"

    @classmethod
    def of(cls, config: Config, processes: int) -> Self:
        """The layout of these settings over a number of processes."""
        m = config.model
        tp = m.tensor_model_parallel_size
        cp = m.context_parallel_size
        pp = m.pipeline_model_parallel_size
        dp = max(1, processes // (tp * cp * pp))
        sharded = config.optimizer.use_distributed_optimizer
        return cls(tp, cp, pp, dp, m.sequence_parallel, sharded, m.recompute_granularity or "none")

    def __str__(self) -> str:
        degrees = {"TP": self.tp, "CP": self.cp, "PP": self.pp, "DP": self.dp}
        words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1] or ["one GPU"]
        if self.sp:
            words.append("SP")
        if self.distributed_optimizer:
            words.append("distributed optimizer")
        return " ".join([*words, f"recompute {self.recompute}"])

    def overrides(self) -> list[str]:
        """The settings of `dfm pretrain` for this layout."""
        granularity = "null" if self.recompute == "none" else self.recompute
        return [
            f"model.tensor_model_parallel_size={self.tp}",
            f"model.sequence_parallel={str(self.sp).lower()}",
            f"model.context_parallel_size={self.cp}",
            f"model.pipeline_model_parallel_size={self.pp}",
            f"optimizer.use_distributed_optimizer={str(self.distributed_optimizer).lower()}",
            f"model.recompute_granularity={granularity}",
        ]

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def local_tokens(self, load: Load) -> int:
        """Tokens of a pack in a rank's matrix products: t."""
        return load.tokens // self.cp

    def outside_tokens(self, load: Load) -> int:
        """Tokens of a rank between the products, where sequence parallelism splits them over TP."""
        return self.local_tokens(load) // (self.tp if self.sp else 1)


def layouts(gpus: int) -> Iterator[GpuLayout]:
    """Every way to split `gpus` processes; SP needs TP, and a distributed optimizer needs several replicas."""
    for tp in divisors(gpus):
        for cp in divisors(gpus // tp):
            for pp in divisors(gpus // tp // cp):
                dp = gpus // tp // cp // pp
                sp = (False, True) if tp > 1 else (False,)
                sharded = (False, True) if dp * cp > 1 else (False,)
                for flags in itertools.product(sp, sharded, RECOMPUTE):
                    yield GpuLayout(tp, cp, pp, dp, *flags)
