"""One process of a run: the loop around `Trainer`, validation, and everything a run writes."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.log import iteration_line, log, start_logging
from dfm_nb.base.metrics import Metrics, read_metrics
from dfm_nb.base.plots import plot_loss
from dfm_nb.base.run import Run
from dfm_nb.checkpoints import saving
from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.config import sizes
from dfm_nb.data.loader import PackBuilder, PackedLoader, PackPlan
from dfm_nb.data.stores import EnergonStore, MockStore
from dfm_nb.diffusion import edm
from dfm_nb.generation.clip_files import output_path, save
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.model.linear import lora_parameter_count
from dfm_nb.packs.packs import SIGMA_DATA, PackSettings
from dfm_nb.parallel.groups import layout_of, mpu
from dfm_nb.training.loggers import Loggers
from dfm_nb.training.trainer import StepResult, Trainer
from dfm_nb.training.watchdog import Watchdog

TEXT_MULTIPLE, ROW_MULTIPLE = 64, 8
"""Packs pad text tokens and conditioning rows to these, so that shapes come again (`benchmarks/pack_shapes.py`)."""


class StopRequest:
    """SIGTERM or SIGUSR1 on any rank stops every rank after the same iteration."""

    def __init__(self, enabled: bool) -> None:
        self.received = 0
        self._group = dist.new_group(backend="gloo")
        for number in (signal.SIGTERM, signal.SIGUSR1) if enabled else ():
            signal.signal(number, self._note)

    def _note(self, number, _frame) -> None:
        self.received = number

    def agreed(self) -> int:
        """The signal that some rank has received, 0 for none; the same answer on every rank."""
        flag = torch.tensor([self.received])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return int(flag)


def pack_settings(config: cfg.Config) -> PackSettings:
    layout = layout_of(config.model)
    return PackSettings.of(
        config,
        token_multiple=layout.token_multiple(),
        text_multiple=math.lcm(layout.text_multiple(), TEXT_MULTIPLE),
        row_multiple=ROW_MULTIPLE,
    )


def open_store(config: cfg.Config, split: str = "train"):
    d = config.dataset
    if d.mock:
        return MockStore(
            d.mock_latent_sizes, d.mock_text_tokens, config.model.in_channels or 16, config.model.text_dim or 384
        )
    if split == "val" and d.use_train_split_for_val:
        split = "train"
    return EnergonStore(d.path, split, progress=parallel.rank() == 0)


def pack_capacity(config: cfg.Config) -> int:
    return config.train.micro_batch_size * config.dataset.task_encoder_seq_length


def packed_loader(config: cfg.Config, store, dp_rank: int, dp_size: int) -> PackedLoader:
    plan = PackPlan(store, pack_settings(config), pack_capacity(config), config.dataset.packing_buffer_size)
    packs_per_step = config.train.global_batch_size // config.train.micro_batch_size
    return PackedLoader(plan, packs_per_step, dp_rank, dp_size, config.dataset.num_workers)


class Validation:
    """Fixed held-out packs at stratified fixed noise levels with fixed noise, the same in every round and layout."""

    def __init__(self, config: cfg.Config, trainer: Trainer, store):
        self.trainer, self.num_sigmas = trainer, config.validation.num_sigmas
        settings = replace(pack_settings(config), caption_dropout=0.0, condition_frames_prob=0.0)
        plan = PackPlan(store, settings, pack_capacity(config), config.dataset.packing_buffer_size, shuffle=False)
        plans = [plan.next() for _ in range(config.train.eval_iters * trainer.dp_size)]
        builder = PackBuilder(store, settings)
        self.packs = [builder.build(p, plan.capacity) for p in plans[trainer.dp_rank :: trainer.dp_size]]
        self.sigmas = edm.validation_sigmas(self.num_sigmas, config.model.P_mean, config.model.P_std).float()
        self.index, first = [], 0
        for pack, size in zip(self.packs, map(len, plans[trainer.dp_rank :: trainer.dp_size])):
            level = (torch.arange(len(pack.sigma)) + first + trainer.dp_rank) % self.num_sigmas
            pack.sigma = self.sigmas[level]
            self.index.append(level)
            first += size

    def run(self) -> dict[str, object]:
        """val_loss and val_loss_by_sigma of the weights, and the same of each average (val_loss_ema_0.1, ...)."""
        raw = self.trainer.evaluate(self.packs, self.index, self.num_sigmas)
        record = {"val_loss": raw["loss"], "val_loss_by_sigma": raw["by_sigma"], "val_sigmas": self.sigmas.tolist()}
        for sigma_rel in self.trainer.ema.sigma_rels:
            with self.trainer.ema.applied(sigma_rel):
                result = self.trainer.evaluate(self.packs, self.index, self.num_sigmas)
            record[f"val_loss_ema_{sigma_rel:g}"] = result["loss"]
            record[f"val_loss_ema_{sigma_rel:g}_by_sigma"] = result["by_sigma"]
        return record


class Training:
    """One process of a run: the loop around `Trainer`, and everything it writes."""

    def __init__(self, resolved: cfg.Resolved, run: Run, store):
        self.resolved, self.config, self.run = resolved, resolved.config, run
        self.rank, self.config_yaml = parallel.rank(), cfg.to_yaml(resolved)
        self.trainer = Trainer(self.config)
        self.loader = packed_loader(self.config, store, self.trainer.dp_rank, self.trainer.dp_size)
        c = self.config.checkpoint
        root = Path(c.checkpoint_dir) if c.checkpoint_dir else run.checkpoints
        self.writer = saving.Writer(root, c.keep_last, c.keep_every, c.async_save, say=log.info)
        self.assets = checkpoint.read_assets(self.config.dataset.path) if self.config.dataset.path else {}
        self._pipeline: Pipeline | None = None
        self.iteration = self.skipped_in_a_row = self.skipped = 0
        self._saved: int | None = None  # iteration of the run's own checkpoint that this process goes on from
        self.validation: Validation | None = None
        self.metrics = Metrics(run.metrics_file) if self.rank == 0 else None
        self.loggers = Loggers(self.config.logger, run, {"config": self.config_yaml}) if self.rank == 0 else None
        self.stop = StopRequest(self.config.train.exit_on_signal)
        self.elapsed_s = 0.0
        limit_s, world = self.config.dist.hang_timeout_s, dist.get_world_size()
        self.watchdog = Watchdog(parallel.store(), self.rank, world, limit_s).start() if limit_s and world > 1 else None

    def resume(self) -> None:
        """From `checkpoint.load_checkpoint`, else from the newest good checkpoint of the run; else from nothing."""
        c = self.config.checkpoint
        if c.load_checkpoint:
            folder = checkpoint.find(c.load_checkpoint)
        else:
            found = [None]
            if self.rank == 0:
                found = [checkpoint.usable(self.writer.root, log.warning)]
            dist.broadcast_object_list(found, src=0)
            folder = found[0]
            self._saved = None if folder is None else checkpoint.iteration_of(folder)
        if folder is not None:
            source = checkpoint.weights_in(folder)
            checkpoint.check_same_model(source, self.config)
            checkpoint.check_same_optimizer(source, self.config)
            state = saving.load(self.trainer.pieces(), folder)
            self.iteration, self.trainer.steps_taken = state["iteration"], state["steps_taken"]
            self.skipped = state["skipped"]
            self.loader.restore(state["data"])
            log.info("Resumed from %s at iteration %d", folder, self.iteration)
        elif c.pretrained:
            checkpoint.load_pretrained(self.trainer, Path(c.pretrained))
            log.info("Started from the weights of %s", c.pretrained)
        if self.metrics is not None:
            self.metrics.truncate(self.iteration)
            earlier = read_metrics(self.run.metrics_file)
            self.elapsed_s = earlier[-1].get("elapsed_s", 0.0) if earlier else 0.0

    def save(self) -> None:
        state = {
            "iteration": self.iteration,
            "steps_taken": self.trainer.steps_taken,
            "skipped": self.skipped,
            "data": self.loader.state(),
            "consumed_samples": self.loader.state()["samples"],
            "consumed_tokens": self.loader.state()["tokens"],
        }
        self.writer.save(self.trainer.pieces(), self.iteration, state, self.config_yaml, self.assets)

    def validate(self, val_store) -> dict[str, object]:
        if self.validation is None:
            self.validation = Validation(self.config, self.trainer, val_store())
        record = self.validation.run()
        if self.config.validation.prompts and self.assets:
            self.draw_samples()
        return record

    def draw_samples(self) -> None:
        """One sample per data-parallel rank with fixed prompts and seeds, from the longest average, to samples/iter_*/."""
        v, t = self.config.validation, self.trainer
        if self._pipeline is None:
            folder = Path(self.config.dataset.path)
            self._pipeline = Pipeline(self.config, t.chunks, folder, tokenizer_path=self.config.model.vae_cache_folder)
        prompt = v.prompts[t.dp_rank % len(v.prompts)]
        request = Request(
            prompt,
            index=t.dp_rank,
            height=v.height,
            width=v.width,
            num_video_frames=v.frames,
            fps=v.fps,
            num_steps=v.num_steps,
            guidance=v.guidance,
            seed=self.config.rng.seed,
        )
        with t.ema.applied(max(t.ema.sigma_rels)) if t.ema.sigma_rels else contextlib.nullcontext():
            ((_, result),) = self._pipeline.run([request])
        done = None
        if (
            mpu.get_tensor_model_parallel_rank()
            == mpu.get_context_parallel_rank()
            == mpu.get_pipeline_model_parallel_rank()
            == 0
        ):
            path = output_path(self.run.sample_folder(self.iteration) / "sample.mp4", request, many=True)
            save(result, path, {"run": self.run.name, "iteration": self.iteration}, "validation", 0.0)
            done = request.index, prompt, str(path)
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, done)
        if self.loggers is not None:
            for index, caption, path in filter(None, everyone):
                self.loggers.sample(self.iteration, index, caption, Path(path))

    def loop(self, val_store) -> int:
        """Train to `train.train_iters`; returns the exit code."""
        t, every = self.config.train, self.config.checkpoint.save_interval
        begun = time.monotonic()
        bar = tqdm(
            total=t.train_iters,
            initial=self.iteration,
            desc="train",
            unit="it",
            disable=self.rank != 0 or not sys.stderr.isatty(),
        )
        first, last_saved = self.iteration, self._saved
        signalled = 0
        while self.iteration < t.train_iters and not signalled:
            started = time.monotonic()
            # the first step of a process may compile and fill caches
            self.beat("loading data", watched=self.iteration > first)
            packs = self.loader.next_step()
            self.beat("in a step", watched=self.iteration > first)
            result = self.trainer.step(packs)
            self.beat("between steps", watched=False)
            self.iteration += 1
            duration = time.monotonic() - started
            self._note(result, packs, duration, self.elapsed_s + time.monotonic() - begun)
            bar.update()
            if t.eval_interval and self.iteration % t.eval_interval == 0:
                self._write(self.validate(val_store), kind="val")
            signalled = self.stop.agreed()
            if t.exit_duration_s and time.monotonic() - begun > t.exit_duration_s:
                signalled = signalled or -1
            if every and self.iteration % every == 0 and not signalled:
                self.save()
                last_saved = self.iteration
            self.writer.poll()
        bar.close()
        if self.iteration != last_saved:
            self.save()
        self.writer.close()
        self.loader.close()
        if self.watchdog is not None:
            self.watchdog.close()
        if signalled:
            why = signal.Signals(signalled).name if signalled > 0 else "train.exit_duration_s"
            log.info("Stopped by %s at iteration %d; saved. The same command goes on from here", why, self.iteration)
        if self.loggers is not None:
            self.loggers.close()
        if self.rank == 0:
            plot_loss(read_metrics(self.run.metrics_file), self.run.loss_png, self.run.name)
        return 0

    def beat(self, phase: str, watched: bool) -> None:
        if self.watchdog is not None:
            self.watchdog.beat(phase, self.iteration, watched)

    def _note(self, result: StepResult, packs, duration_s: float, elapsed_s: float) -> None:
        tokens_per_s = result.tokens / duration_s
        record = {
            "loss": result.loss,
            "lr": self.trainer.lr,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            "tokens_per_s": tokens_per_s,
            "elapsed_s": elapsed_s,
            "samples": self.loader.state()["samples"],
            **self._speed(packs, duration_s),
        }
        dropped = [d for p in packs for d in p.dropped]
        for reason, detail in dropped:
            log.warning("sample left out (%s): %s", reason, detail)
        if dropped:
            record["dropped"] = len(dropped)
        if result.skipped:
            self._note_skip(result, packs)
            record["skipped"] = self.skipped
        else:
            self.skipped_in_a_row = 0
        self._write(record)
        if self.iteration % self.config.logger.log_interval == 0 or self.iteration == 1:
            left_s = (self.config.train.train_iters - self.iteration) * duration_s
            more = {"tokens_per_s": int(tokens_per_s), "grad_norm": result.grad_norm, "ETA": f"{left_s / 60:.1f} min"}
            log.info(
                iteration_line(self.iteration, self.config.train.train_iters, result.loss, self.trainer.lr, **more)
            )
        if self.skipped_in_a_row > self.config.train.max_skipped_steps:
            raise ValueError(
                f"loss or gradients were NaN or Inf in {self.skipped_in_a_row} steps in a row "
                f"(train.max_skipped_steps={self.config.train.max_skipped_steps}); the samples are listed in "
                f"{self.run.path / 'skipped.jsonl'}; lower optimizer.lr or use mixed_precision=fp32"
            )

    def _note_skip(self, result: StepResult, packs) -> None:
        self.skipped += 1
        self.skipped_in_a_row += 1
        keys = [k for p in packs for k in p.keys]
        log.warning("Iteration %d skipped: loss %s, gradient norm %s", self.iteration, result.loss, result.grad_norm)
        with (self.run.path / "skipped.jsonl").open("a") as f:
            f.write(json.dumps({"iteration": self.iteration, "rank": self.rank, "keys": keys}) + "\n")

    def _speed(self, packs, duration_s: float) -> dict[str, float]:
        """Model TFLOP/s of this process from true segment lengths, and MFU where the peak is known."""
        flops = 0
        for p in packs:
            q = [b - a for a, b in zip(p.cu_q, p.cu_q[1:])][: len(p.keys)]
            kv = [b - a for a, b in zip(p.cu_kv, p.cu_kv[1:])][: len(p.keys)]
            flops += sizes.model_flops(self.config, q, kv)
        per_s = flops / duration_s / self.trainer.layout.model_size
        out = {"tflops_per_s": per_s / 1e12}
        if self.trainer.device.type == "cuda":
            if peak := sizes.peak_flops(torch.cuda.get_device_name()):
                out["mfu"] = per_s / peak
        return out

    def _write(self, record: dict, kind: str = "train") -> None:
        if kind == "val":
            averaged = ", ".join(
                f"{k[9:]} {v:.4f}" for k, v in record.items() if k.startswith("val_loss_ema") and isinstance(v, float)
            )
            log.info("Validation at iteration %d: %.4f (%s)", self.iteration, record["val_loss"], averaged)
        if self.metrics is not None:
            self.metrics.write({"iteration": self.iteration, **record})
        if self.loggers is not None:
            self.loggers.scalars(self.iteration, record)


def run(resolved: cfg.Resolved, run_dir: str) -> int:
    """Start this process's groups, train, end them; rank 0 owns the run folder meanwhile. Returns the exit code."""
    config = resolved.config
    parallel.init(layout_of(config.model), timeout_s=config.dist.timeout_s, seed=config.rng.seed)
    rank = parallel.rank()
    folder = Run.create(run_dir) if rank == 0 else Run(Path(run_dir).resolve())
    dist.barrier()
    start_logging(folder, rank)
    if rank == 0:
        folder.claim()
    try:
        return _train(resolved, folder)
    finally:
        if rank == 0:
            folder.release()


def _train(resolved: cfg.Resolved, run: Run) -> int:
    store = open_store(resolved.config)
    derived = {"model.in_channels": store.channels, "model.text_dim": store.text_dim, "model.sigma_data": SIGMA_DATA}
    resolved = resolved.with_derived(derived, "the data set")
    config = resolved.config
    if parallel.rank() == 0:
        run.save_config(cfg.to_yaml(resolved))
    training = Training(resolved, run, store)
    total = sizes.parameter_count(config)
    log.info(
        "DiT of %.1f M parameters, %s on %d process(es), %s, %d samples",
        total / 1e6,
        layout_of(config.model),
        dist.get_world_size(),
        config.mixed_precision,
        len(store),
    )
    if config.model.lora.rank:
        trained = lora_parameter_count(config.model)
        log.info("Low-rank updates (rank %d): %.3f M parameters are trained", config.model.lora.rank, trained / 1e6)
    training.resume()
    log.info("Starting pretraining...")
    code = training.loop(lambda: open_store(config, "val"))
    del training
    parallel.shutdown()
    return code
