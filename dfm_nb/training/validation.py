"""What a run looks at between steps: the loss on fixed held-out packs, and samples of fixed prompts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from dfm_nb import config as cfg
from dfm_nb.base.run import Run
from dfm_nb.data.loader import PackBuilder, PackPlan
from dfm_nb.data.stores import EnergonStore, MockStore
from dfm_nb.diffusion import edm
from dfm_nb.generation.clip_files import output_path, save
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.parallel.groups import is_first_of_model
from dfm_nb.training.batches import pack_capacity, pack_settings
from dfm_nb.training.trainer import Trainer


class Validation:
    """Fixed held-out packs at stratified fixed noise levels with fixed noise, the same in every round and layout."""

    def __init__(self, config: cfg.Config, trainer: Trainer, store: EnergonStore | MockStore):
        self.trainer, self.num_sigmas = trainer, config.validation.num_sigmas
        settings = replace(pack_settings(config), caption_dropout=0.0, condition_frames_prob=0.0)
        plan = PackPlan(store, settings, pack_capacity(config), config.dataset.packing_buffer_size, shuffle=False)
        rank, size = trainer.dp_rank, trainer.dp_size
        plans = [plan.next() for _ in range(config.train.eval_iters * size)][rank::size]
        builder = PackBuilder(store, settings)
        self.packs = [builder.build(p, plan.capacity) for p in plans]
        self.sigmas = edm.validation_sigmas(self.num_sigmas, config.model.P_mean, config.model.P_std).float()
        self.levels = []  # of each pack: int64 [R], the noise level of each of its samples
        first = rank  # ranks begin at different levels, and each goes through all of them in turn
        for pack, samples in zip(self.packs, plans):
            level = (torch.arange(len(pack.sigma)) + first) % self.num_sigmas
            pack.sigma = self.sigmas[level]
            self.levels.append(level)
            first += len(samples)

    def run(self) -> dict[str, object]:
        """val_loss and val_loss_by_sigma of the weights, and the same of each average (val_loss_ema_0.1, ...)."""
        raw = self.trainer.evaluate(self.packs, self.levels, self.num_sigmas)
        record = {"val_loss": raw["loss"], "val_loss_by_sigma": raw["by_sigma"], "val_sigmas": self.sigmas.tolist()}
        for sigma_rel in self.trainer.ema.sigma_rels:
            with self.trainer.ema.applied(sigma_rel):
                result = self.trainer.evaluate(self.packs, self.levels, self.num_sigmas)
            record[f"val_loss_ema_{sigma_rel:g}"] = result["loss"]
            record[f"val_loss_ema_{sigma_rel:g}_by_sigma"] = result["by_sigma"]
        return record


class PromptSamples:
    """`validation.prompts` generated with fixed seeds, one per data-parallel rank, from the longest average."""

    def __init__(self, config: cfg.Config, trainer: Trainer, run: Run):
        assert config.dataset.path is not None  # without a data set there is no tokenizer and no prompt
        self.config, self.trainer, self.name = config, trainer, run.name
        folder = Path(config.dataset.path)
        self.pipeline = Pipeline(config, trainer.chunks, folder, tokenizer_path=config.model.vae_cache_folder)

    def generate(self, iteration: int, folder: Path) -> list[tuple[int, str, Path]]:
        """Write this round to `folder`; returns (index, prompt, file) of every rank's sample, on every rank."""
        v, ema, index = self.config.validation, self.trainer.ema, self.trainer.dp_rank
        request = Request(
            v.prompts[index % len(v.prompts)],
            index=index,
            height=v.height,
            width=v.width,
            num_video_frames=v.frames,
            fps=v.fps,
            num_steps=v.num_steps,
            guidance=v.guidance,
            seed=self.config.rng.seed,
        )
        with ema.applied(max(ema.sigma_rels)) if ema.sigma_rels else contextlib.nullcontext():
            ((_, result),) = self.pipeline.run([request])
        done = None
        if is_first_of_model():
            path = output_path(folder / "sample.mp4", request, many=True)
            save(result, path, {"run": self.name, "iteration": iteration}, "validation", 0.0)
            done = index, request.prompt, path
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, done)
        return [sample for sample in everyone if sample is not None]
