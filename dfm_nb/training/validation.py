"""Validation between steps: the loss on fixed held-out packs, and samples of fixed captions."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from dfm_nb import config as cfg
from dfm_nb.base import files, metrics, video
from dfm_nb.base.log import log
from dfm_nb.base.run import Run
from dfm_nb.data.loader import build_pack
from dfm_nb.data.order import PackOrder
from dfm_nb.data.stores import SampleStore
from dfm_nb.diffusion import edm
from dfm_nb.generation.clip_files import output_path, write_given
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.packs.packs import LatentStatistics, PackSettings
from dfm_nb.parallel.groups import everyones, is_first_of_model
from dfm_nb.training.batches import data_folder, pack_capacity
from dfm_nb.training.trainer import Trainer

CAPTIONS = 4
"""Of the data that are sampled at each validation: two unseen and two of training; one for each of more replicas."""


class Validation:
    """Fixed held-out packs at stratified fixed noise levels with fixed noise, the same in every round and layout.

    They are the first `train.eval_iters` global batches of the split in a fixed order, as in Megatron; of these, each
    data-parallel rank takes its share.
    """

    def __init__(self, config: cfg.Config, trainer: Trainer, store: SampleStore, settings: PackSettings):
        self.trainer = trainer
        self.store = store
        # without caption dropout and given frames
        without = {
            "train": {"caption_dropout": 0.0, "given_dropout": 0.0},
            "dataset": {"condition_frames_prob": 0.0, "condition_last_prob": 0.0},
        }
        easy = config.model_copy()
        for group, values in without.items():
            setattr(easy, group, getattr(config, group).model_copy(update=values))
        settings = replace(settings, config=easy)
        order = PackOrder(store, settings, pack_capacity(config), config.dataset.packing_buffer_size, shuffle=False)
        t = config.train
        packs = [order.next() for _ in range(t.eval_iters * t.global_batch_size // t.micro_batch_size)]
        # The levels continue from pack to pack, so that every level occurs equally often.
        first_levels = itertools.accumulate(map(len, packs), initial=0)
        # dealt round-robin, so that every layout has the same packs with the same levels
        share = list(zip(packs, first_levels))[trainer.dp_rank :: trainer.dp_size]
        self.packs = [build_pack(order, items) for items, _ in share]
        dropped = [*store.dropped]
        for pack in self.packs:
            dropped += pack.dropped
        for reason, detail in dict.fromkeys(dropped):
            log.warning("validation sample left out (%s): %s", reason, detail)
        m = config.model
        levels = edm.validation_sigmas(config.validation.num_sigmas, m.P_mean, m.P_std, m.times)
        self.sigmas = (levels if trainer.teacher is None else trainer.teacher.levels[:-1]).float()
        for pack, (_, first) in zip(self.packs, share):
            # rows; what is given keeps its level, as in training
            noisy = torch.unique(pack.row[pack.loss_mask])
            pack.sigma[noisy] = self.sigmas[(torch.arange(len(noisy)) + first) % len(self.sigmas)]
        self.packs = trainer.lessons(self.packs)

    def run(self) -> dict[str, object]:
        """val_loss and val_loss_by_sigma of the weights, and the same of each average (val_loss_ema_0.1, ...)."""
        raw = self.trainer.evaluate(self.packs, self.sigmas)
        record = {"val_loss": raw["loss"], "val_loss_by_sigma": raw["by_sigma"], "val_sigmas": self.sigmas.tolist()}
        for sigma_rel in self.trainer.ema.sigma_rels:
            with self.trainer.ema.applied(sigma_rel):
                result = self.trainer.evaluate(self.packs, self.sigmas)
            record[f"val_loss_ema_{sigma_rel:g}"] = result["loss"]
            record[f"val_loss_ema_{sigma_rel:g}_by_sigma"] = result["by_sigma"]
        return record


class Samples:
    """Samples of every round with fixed seeds, from the average that generates, dealt to the data-parallel ranks.

    They are asked for as `dfm generate` does by default. Prompts are `validation.prompts`, and captions of training and
    validation samples in turn, whose embeddings are in the shards; the real samples are written beside them, in
    `samples/data`. If a rank cannot sample, it logs why once; the run continues.

    stores : training and validation samples; the first alone if they are the same.
    """

    def __init__(
        self,
        config: cfg.Config,
        trainer: Trainer,
        run: Run,
        stores: list[SampleStore],
        statistics: LatentStatistics | None,
    ):
        self.config = config
        self.trainer = trainer
        self.run = run
        self.stores = stores
        self.statistics = statistics  # in fine-tuning not those of the folder
        self.requests = dict[Request, str]()  # and the split that a caption is of
        self.off = self._agree(self._prepare)

    def _agree(self, work: Callable[[], object]) -> bool:
        """Do it; return whether it failed on any rank, so that all ranks continue in the same way."""
        failed = None
        try:
            work()
        except Exception as error:  # any error: a run must not end because of a sample
            failed = str(error) or type(error).__name__
        for reason in everyones(failed):
            if reason:
                log.info("No samples at validation: %s (validation.samples=false turns them off)", reason)
                return True
        return False

    def _prepare(self) -> None:
        v = self.config.validation
        folder = data_folder(self.config)
        of = self.trainer.dp_size
        if v.prompts:
            log.info("validation.prompts has %d: %s", len(v.prompts), " | ".join(v.prompts))
        if folder is None:
            raise ValueError("random latents (dataset.mock) have no decoder")
        self.pipeline = Pipeline(
            self.config,
            self.trainer.chunks,
            folder,
            tokenizer_path=self.config.model.vae_cache_folder,
            statistics=self.statistics,
        )
        own = v.model_dump(include={"num_steps", "guidance", "height", "width", "fps"})
        own |= {"sampler": self.config.generation.sampler, "seed": self.config.rng.seed}
        most = max(CAPTIONS, of - len(v.prompts))
        captions = []
        for turn in range(most):
            captions += [(store, turn) for store in self.stores if turn < len(store)]
        captions = captions[:most]
        for index in range(self.trainer.dp_rank, max(len(v.prompts) + len(captions), of), of):
            sample = None
            given: tuple[str, ...] = ()
            if index >= len(v.prompts):
                store, turn = captions[(index - len(v.prompts)) % len(captions)]
                sample = store.read(turn)
                prompt = sample.meta.get("caption") or sample.key
                self.pipeline.remember_text(prompt, sample.text_emb[0])
                shown = [self.pipeline.decode_stored(z[0]) for z in sample.given]
                given = write_given(self.run.sample_folder("given") / f"{index}", shown, sample.fps)
            else:
                prompt = v.prompts[index]
                self.pipeline.encode_text([prompt])
            request = Request(prompt, index, num_video_frames=v.frames, given=given, **own).completed(self.config)
            self.pipeline.check_memory([request])
            self.requests[request] = store.split if sample else ""
            if sample and is_first_of_model():
                real = self.pipeline.decode_stored(sample.latent[0])
                file = output_path(self.run.sample_folder("data") / "sample", request, many=True)
                files.write_atomically(file, video.compressed(real, sample.fps)[1])
        # one process of a replica must not stop where the others continue
        self.pipeline.memory_check = False

    def generate(self, iteration: int) -> list[tuple[int, str, Path]]:
        """Write this round's; returns (index, prompt, file) of every rank's samples, on every rank."""
        done: list[tuple[int, str, Path]] = []
        self.off = self.off or self._agree(lambda: done.extend(self._sample(iteration)))
        return list(itertools.chain.from_iterable(everyones(done)))

    def _sample(self, iteration: int) -> list[tuple[int, str, Path]]:
        ema = self.trainer.ema
        done = []
        length = metrics.generated_with(ema.sigma_rels)
        with contextlib.nullcontext() if length is None else ema.applied(length):
            made = dict(self.pipeline.run(list(self.requests)))
        told = {"checkpoint": {"run": self.run.name, "iteration": iteration}, "ema": "validation"}
        if not is_first_of_model():
            return []
        for i, (request, split) in enumerate(self.requests.items()):
            made[i].made_by = {**told, "caption_of": split}
            path = output_path(self.run.sample_folder(iteration) / "sample", request, many=True)
            done.append((request.index, request.prompt, made[i].save(path)))
        return done
