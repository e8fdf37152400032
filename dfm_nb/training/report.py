"""What a run reports: log lines on every rank; `metrics.jsonl`, and what its loggers write, on rank 0.

TensorBoard and Weights & Biases are loggers (`integrations.loggers`). To add one, write one function, a `Logger`: in a
package by an entry point of `dfm_nb.loggers`, or anywhere as `logger.report_to='[module:name]'`.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import plugins
from dfm_nb.base.files import appending
from dfm_nb.base.log import log
from dfm_nb.base.machine import GIB
from dfm_nb.base.metrics import Metrics, read_metrics
from dfm_nb.base.run import Run
from dfm_nb.config import counts, sizes
from dfm_nb.config.schema import LoggerConfig
from dfm_nb.data.stores import SampleStore
from dfm_nb.packs.packs import Pack
from dfm_nb.parallel.groups import layout_of
from dfm_nb.training.trainer import StepResult

PASSES = {140: "85 to 100 %", 35: "25 to 93 %"}
"""Pictures that came back from their captions in runs with at least that many passes (docs/own-pictures.md)."""

Values = Mapping[str, "float | Sample"]
Logger = Callable[[Run, LoggerConfig, Mapping[str, object]], Generator[None, tuple[int, Values], None]]
"""A logger is one generator function of the run, the settings of loggers, and those that are shown with the run.

    def to_csv(run, config, settings):
        with open(run.path / "log.csv", "a") as file:
            while True:
                iteration, values = yield
                ...

Each `yield` gives an iteration and its values by name, numbers or a `Sample`; at the end of the run the generator is
closed. A logger that returns before its first `yield` is skipped, and logs the reason itself. One that raises later is
not used any more.
"""


class Sample(NamedTuple):
    """A finished sample; `path` is its .mp4 or .png."""

    caption: str
    path: Path


class Loggers:
    """Send scalars and samples to the loggers of `logger.report_to`.

    Parameters
    ----------
    settings : shown with the run in Weights & Biases.

    A resumed run logs the iterations after its checkpoint again, which these services tolerate. A file that is appended
    to must be truncated in `Report.resume`, as `metrics.jsonl` is.
    """

    def __init__(self, config: LoggerConfig, run: Run, settings: Mapping[str, object]):
        names = config.report_to
        if names is None:
            names = ["tensorboard", "wandb"] if config.wandb_project else ["tensorboard"]
        chosen: dict[str, Logger] = {name: plugins.find("loggers", name) for name in names}
        self._open = []
        for name, logger in chosen.items():
            opened = logger(run, config, settings)
            if not isinstance(opened, Generator):
                raise ValueError(f"logger.report_to: {name} must be a generator function; see dfm_nb.training.report")
            with contextlib.suppress(StopIteration):  # it is skipped
                next(opened)
                self._open.append(opened)

    def scalars(self, iteration: int, record: Mapping[str, object]) -> None:
        """Every finite number of a metrics record; validation losses by noise level as one series for each."""
        self._send(iteration, {k: float(v) for k, v in _flat(record).items() if math.isfinite(v)})

    def sample(self, iteration: int, index: int, caption: str, path: Path) -> None:
        """A finished sample, the `index`-th of its round; `path` is its .mp4 or .png."""
        self._send(iteration, {f"samples/{index}": Sample(caption, path)})

    def _send(self, iteration: int, values: Values) -> None:
        self._of_each(lambda logger: logger.send((iteration, values)))

    def close(self) -> None:
        self._of_each(lambda logger: logger.close())

    def _of_each(self, do: Callable[[Generator[None, Any, None]], object]) -> None:
        for logger in [*self._open]:
            try:
                do(logger)
            except Exception as error:  # for example, a service cannot be reached: training must continue
                log.warning("logger %s failed and is not used any more: %r", getattr(logger, "__name__", ""), error)
                self._open.remove(logger)


class Report:
    """Everything that a run writes, except checkpoints and samples."""

    def __init__(self, config: cfg.Config, run: Run, config_yaml: str):
        self.config = config
        self.run = run
        self.rank = parallel.rank()
        if self.rank == 0:
            self.metrics = Metrics(run.metrics_file)
            self.loggers = Loggers(config.logger, run, {"config": config_yaml})
        self.begun = time.monotonic()

    def resume(self, iteration: int) -> None:
        """Drop records after `iteration`, and continue the elapsed time from there.

        A file to which a logger appends rows must be truncated here too, because they are written again.
        """
        self.begun = time.monotonic()
        if self.rank == 0:
            self.metrics.truncate(iteration)
            earlier = read_metrics(self.run.metrics_file)
            if earlier:
                self.begun -= earlier[-1].get("elapsed_s", 0.0)

    def step(
        self, iteration: int, result: StepResult, packs: Sequence[Pack], duration_s: float, lr: float, counts: dict
    ) -> None:
        """A training step.

        result : over all ranks.
        counts : further entries of the record: samples and skipped steps so far, over all ranks; and of this process
            the share of the step that it waited for data, and the CPU cores that it used.
        packs : this rank's own, so sums over them are its share.
        """
        record = {
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / duration_s,
            "elapsed_s": time.monotonic() - self.begun,
            **_speed(self.config, packs, duration_s),
            **_memory(),
            **counts,
        }
        dropped = sum(len(p.dropped) for p in packs)
        if dropped:
            record["dropped"] = dropped
        self._write(iteration, record)
        total = self.config.train.train_iters
        if iteration % self.config.logger.log_interval == 0 or iteration in (1, total):
            at = f"Iteration {iteration:>{max(4, len(str(total)) - 1)}}/{total}, Loss: {result.loss:.3f}, LR: {lr:.2e}"
            speed = f"tokens per s: {int(record['tokens_per_s']):,}, grad norm: {result.grad_norm:.4g}"
            log.info("%s, %s, ETA: %.1f min", at, speed, (total - iteration) * duration_s / 60)

    def skipped(self, iteration: int, result: StepResult, packs: Sequence[Pack]) -> None:
        """A step with NaN or Inf, or without a usable sample: warn, and list its samples in `skipped.jsonl`."""
        keys = []
        dropped = []
        for pack in packs:
            keys += pack.keys
            dropped += [detail for _, detail in pack.dropped]
        if result.tokens:
            log.warning("Iteration %d skipped: loss %s, gradient norm %s", iteration, result.loss, result.grad_norm)
        else:
            log.warning("Iteration %d skipped: none of its samples can be used: %s", iteration, "; ".join(dropped))
        with appending(self.run.path / "skipped.jsonl", "a") as f:
            entry = {"iteration": iteration, "rank": self.rank, "keys": keys, "dropped": dropped}
            f.write(json.dumps(entry) + "\n")

    def stopped(self, iteration: int, why: str) -> None:
        """Record that a signal or a setting ended the run before its last iteration."""
        if self.rank == 0:
            elapsed_s = time.monotonic() - self.begun
            self.metrics.write({"iteration": iteration, "elapsed_s": elapsed_s, "stopped_by": why})

    def validation(self, iteration: int, record: Mapping[str, object]) -> None:
        """A round of validation, as `Validation.run` gives it."""
        averages = []
        for key, value in record.items():
            if key.startswith("val_loss_ema") and isinstance(value, float):
                averages.append(f"{key.removeprefix('val_loss_')} {value:.4f}")
        # `ema.sigma_rels: []` keeps none
        shown = f" ({', '.join(averages)})" if averages else ""
        log.info("Validation at iteration %d: %.4f%s", iteration, record["val_loss"], shown)
        self._write(iteration, record)

    def samples(self, iteration: int, samples: Sequence[tuple[int, str, Path]]) -> None:
        """(index, prompt, file) of generated samples."""
        if self.rank == 0:
            for sample in samples:
                self.loggers.sample(iteration, *sample)

    def close(self) -> None:
        """Close the loggers, and draw the plots of the run."""
        if self.rank == 0:
            self.loggers.close()
            for plot in plugins.load_all("plots").values():
                plot(self.run)

    def _write(self, iteration: int, record: Mapping[str, object]) -> None:
        if self.rank == 0:
            self.metrics.write({"iteration": iteration, **record})
            self.loggers.scalars(iteration, record)


def _flat(record: Mapping[str, object]) -> dict[str, float]:
    """Numbers by name; `X_by_sigma` lists become X/sigma_0.02, ... with the levels of `val_sigmas`."""
    out: dict[str, float] = {}
    levels: Any = record.get("val_sigmas")
    for name, value in record.items():
        if isinstance(value, (int, float)) and name != "iteration":
            out[name] = value
        elif isinstance(value, list) and name.endswith("_by_sigma"):
            title = name.removesuffix("_by_sigma")
            out |= {f"{title}/sigma_{s:.3g}": v for s, v in zip(levels, value) if v is not None}
    return out


def _speed(config: cfg.Config, packs: Sequence[Pack], duration_s: float) -> dict[str, float]:
    """Model TFLOP/s of this process from true segment lengths, and MFU where the device's peak is known."""
    flops = sum(counts.model_flops(config.model, *p.lengths()) for p in packs)
    # tp, pp and cp share the work of these packs
    per_s = flops / duration_s / layout_of(config.model).model_size
    out = {"tflops_per_s": per_s / 1e12}
    if parallel.device().type == "cuda":
        peak = sizes.peak_flops(torch.cuda.get_device_name())
        if peak:
            out["mfu"] = per_s / peak
    return out


def _memory() -> dict[str, float]:
    """Memory of this process, and on a GPU the most that its tensors have taken so far."""
    out = {"memory_gib": psutil.Process().memory_info().rss / GIB}
    if parallel.device().type == "cuda":
        out["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
    return out


def epoch_tokens(config: cfg.Config, store: SampleStore) -> list[np.ndarray]:
    """Tokens in an epoch, of each still and of each clip."""
    m = config.model
    tokens = store.voxels(slice(None)) / (m.patch_temporal * m.patch_spatial**2)
    weights = store.weights(config.dataset.clip_weight)
    if weights is not None:
        tokens = tokens * weights
    return [tokens[store.of_kind(still)] for still in (True, False)]


def expected(config: cfg.Config, store: SampleStore, tokens: float) -> str:
    """What that many tokens of training are for the samples, and what that has given."""
    stills, clips = epoch_tokens(config, store)
    epoch = stills.sum() + clips.sum()
    epochs = tokens / epoch
    uses = {"picture": (len(stills), epochs), "clip": (len(clips), epochs * config.dataset.clip_weight)}
    parts = []
    for kind, (count, n) in uses.items():
        if count:
            parts.append(f"about {format(n, '.0f' if n >= 1 else '.2f')} over each {kind}")
    seen = next((share for least, share in PASSES.items() if epochs >= least), None)
    gave = f"No run of fewer than {min(PASSES)} was measured"
    if seen:
        gave = f"In measured runs of that many passes, {seen} of the pictures came back from their captions"
    of_stills = f". {gave} (docs/own-pictures.md)" if len(stills) else ""
    share = clips.sum() / epoch
    work = f"; clips take {share:.0%} of the work" if 0 < share < 1 else ""
    return f"Passes of training: {', '.join(parts)}{work}{of_stills}"
