"""One process of a run, from its process groups to its last checkpoint: resume, step, report, validate, save."""

import contextlib
import functools
import itertools
import math
import os
import shlex
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import plugins
from dfm_nb.base.files import write_atomically
from dfm_nb.base.log import log, start_logging, tqdm
from dfm_nb.base.machine import precision
from dfm_nb.base.metrics import RISEN_ROUNDS, compared_loss
from dfm_nb.base.process import stops
from dfm_nb.base.run import Run
from dfm_nb.checkpoints import folders, loading, saving
from dfm_nb.config import counts, samples
from dfm_nb.data.captioning import LEFT_OUT
from dfm_nb.data.stores import SampleStore
from dfm_nb.model.dit import network_class
from dfm_nb.packs.packs import LatentStatistics, Pack
from dfm_nb.parallel.groups import everyones, layout_of
from dfm_nb.training.batches import data_folder, open_store, packed_loader, with_data
from dfm_nb.training.report import Report, expected
from dfm_nb.training.trainer import Trainer, no_bars
from dfm_nb.training.validation import Samples, Validation
from dfm_nb.training.watchdog import Watchdog

OUT_OF_TIME = -1
"""The reason for stopping that is not a signal."""

AGAIN_S = 3.0
"""A second signal ends the process only after this time: a scheduler and torchrun may both forward the same one."""


def _note(received: dict[int, float], number: int, _frame: object) -> None:
    """The first signal of a kind stops the run after the iteration, a second one ends this process."""
    if number not in received:
        received[number] = time.monotonic()
        # not by the log, because the signal may have interrupted a write to it
        if parallel.rank() == 0:
            said = f"stopping after this iteration; again after {AGAIN_S:g} s ends at once"
            with contextlib.suppress(OSError):  # SIGHUP: the terminal is gone
                os.write(2, f"{signal.Signals(number).name}: {said}\n".encode())
    elif time.monotonic() - received[number] > AGAIN_S:
        # SIGINT does not kill: a notebook's kernel continues
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.kill(os.getpid(), number)


class StopRequest:
    """A signal or the end of `train.exit_duration_s` on any rank stops every rank after the same iteration."""

    def __init__(self, on_signal: bool) -> None:
        self.group = dist.new_group(backend="gloo")  # the flag is on the CPU, also with GPUs
        self._received: dict[int, float] = {}  # when each came
        if on_signal:
            # The handlers reference only this dict. A forked writer of checkpoints sets its own handlers; if it dropped
            # the last reference to a process group, the fork would wait for threads that it does not have.
            for number in stops():
                signal.signal(number, functools.partial(_note, self._received))

    def agreed(self, out_of_time: bool, news: bool) -> tuple[int, int]:
        """Why to stop the run (a signal that some rank received, `OUT_OF_TIME`, or 0), and whether some rank has news.

        The same on every rank.
        """
        flags = torch.tensor([max(self._received, default=0), out_of_time, news])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        received, late, some_news = flags.tolist()
        return received or (OUT_OF_TIME if late else 0), some_news


class BadSamples:
    """The samples that cannot be used, of all ranks: each is reported once; too many stop every rank.

    share : `dataset.max_bad_fraction`. total : samples of the data set.
    """

    def __init__(self, store: SampleStore, share: float, group: dist.ProcessGroup | None = None) -> None:
        self.total = len(store) + len(store.dropped)
        self.limit = share
        self._group = group
        self.found: set[str] = set()
        self.new: list[tuple[str, str]] = []  # of this rank's last step
        self._add(store.dropped)

    def see(self, packs: Sequence[Pack]) -> None:
        """Add those of a step; samples that the user excluded do not count."""
        self.new = []
        for pack in packs:
            self.new += [d for d in pack.dropped if d[0] != LEFT_OUT and d[1] not in self.found]

    def share(self) -> None:
        """Share them: all ranks take part. ValueError if there are too many."""
        self._add(itertools.chain.from_iterable(everyones(self.new, self._group)))

    def _add(self, new: Iterable[tuple[str, str]]) -> None:
        for reason, detail in dict.fromkeys(new):
            if detail not in self.found:
                if parallel.rank() == 0:
                    log.warning("sample left out (%s): %s", reason, detail)
                self.found.add(detail)
        # a single sample does not end a run
        if len(self.found) > max(self.limit * self.total, self.limit > 0):
            raise ValueError(
                f"{len(self.found)} of {self.total} samples cannot be used, and dataset.max_bad_fraction="
                f"{self.limit:g} allows no more: {'; '.join(sorted(self.found)[:3])}; dfm inspect --verify lists all"
            )


class Training:
    """A run as one process sees it: `resume`, then `run`.

    Parameters
    ----------
    resolved : with what the data set decides (`model.in_channels`, `text_dim`, `sigma_data`) filled in.
    run : the run folder. store : samples of the training split.
    """

    def __init__(self, resolved: cfg.Resolved, run: Run, store: SampleStore):
        self.config = resolved.config
        self.folder = run
        self.config_yaml = cfg.to_yaml(resolved)
        c = self.config.checkpoint
        self.iteration = 0
        self.skipped = self.skipped_in_a_row = 0  # steps with NaN or Inf
        self.saved: int | None = None  # iteration of the newest checkpoint that the run itself has
        self.best: tuple[float, int] | None = None  # lowest validation loss, and its iteration
        # iterations after which the order began again, on data that had grown
        self.grown: list[int] = []
        root = c.checkpoint_dir or run.checkpoints
        self.writer = saving.Writer(root, c.keep_last, c.keep_every, c.async_save)
        # rank 0 decides, because a run that still trains may save meanwhile
        named = folders.find(c.load_checkpoint) if c.load_checkpoint and parallel.rank() == 0 else None
        self.resumed_from = everyones(named)[0] if c.load_checkpoint else self._newest()
        self.base, self._source = self._find_base()
        guidance = self.base["guidance"] if self.base else None
        self.trainer = Trainer(self.config, store.empty_text, (self._source, guidance))
        folder = data_folder(self.config)
        self.assets = folders.read_assets(folder) if folder else {}
        self.store = store
        self.report = Report(self.config, run, self.config_yaml)
        self.stop = StopRequest(self.config.train.exit_on_signal)
        self.bad = BadSamples(store, self.config.dataset.max_bad_fraction, self.stop.group)
        self.watchdog: Watchdog | None = None
        limit_s = self.config.dist.hang_timeout_s
        if limit_s and dist.get_world_size() > 1:
            self.watchdog = Watchdog(parallel.store(), parallel.rank(), dist.get_world_size(), limit_s)

    # Both are made at the first round of validation, which a run may not have.

    @functools.cached_property
    def validation(self) -> Validation:
        return Validation(self.config, self.trainer, open_store(self.config, "val"), self.loader.order.settings)

    @functools.cached_property
    def samples(self) -> Samples:
        statistics = self.loader.order.settings.statistics
        held_out = self.validation.store
        stores = [held_out] if held_out.split == "train" else [self.store, held_out]
        return Samples(self.config, self.trainer, self.folder, stores, statistics)

    def resume(self) -> None:
        """Start from `checkpoint.load_checkpoint`, else the newest good one of `checkpoint.load` or of the run, else
        from `checkpoint.pretrained`, else from scratch.
        """
        c = self.config.checkpoint
        if self.resumed_from is not None:
            self._load(self.resumed_from)
            log.info("Resumed from %s at iteration %d", self.resumed_from, self.iteration)
        elif self._source:
            self._open(loading.load_pretrained(self.trainer, self._source, data_folder(self.config)))
            log.info("Started from the weights of %s", c.pretrained)
        else:
            self._open(None)
            if c.load:
                log.info("checkpoint.load=%s has no checkpoint yet: training starts from scratch", c.load)
        self.report.resume(self.iteration)

    def _find_base(self) -> tuple[dict | None, loading.Weights | None]:
        """The record of the weights that the run began with, and the weights where they are still needed.

        A student's teacher is the recorded one, whatever its run did since. Other runs, and students of their own
        frozen base, have these weights in their checkpoint.
        """
        named = self.config.checkpoint.pretrained
        model = self.config.model
        record = loading.weights_in(self.resumed_from).base if self.resumed_from else None
        if record is None and named and (self.resumed_from is None or model.student):
            if self.resumed_from:
                log.warning(
                    "%s does not record its teacher: the student continues with %s of today", self.resumed_from, named
                )
            source = loading.find_weights(named) if parallel.rank() == 0 else None
            # the newest of a run that is being trained
            record = everyones(source and source.record)[0]
            return record, source or loading.recorded(record, named)
        if record and model.student and not model.lora.rank:
            return record, loading.recorded(record, named)
        if record and parallel.rank() == 0 and loading.place_of(record, named) is None:
            log.warning(
                "The weights that the run began with, %s of sha256 %.12s, were removed or replaced; it continues, "
                "because its checkpoint holds what it needs of them",
                record["path"],
                record["sha256"],
            )
        return record, None

    def _newest(self) -> Path | None:
        """The checkpoint to resume from. Rank 0 decides for all ranks, because files can change meanwhile."""
        found = everyones(self._look() if parallel.rank() == 0 else None)[0]
        if found is not None and found.resolve().parent == self.writer.root.resolve():
            self.saved = folders.iteration_of(found.resolve())
        return found

    def _look(self) -> Path | None:
        folder = self.config.checkpoint.load
        if folder:
            with contextlib.suppress(FileNotFoundError):  # none there yet
                return folders.find(folder)
        return folders.usable(self.writer.root)

    def _load(self, folder: Path) -> None:
        source = loading.weights_in(folder)
        loading.check_same_model(source, self.config)
        loading.check_same_optimizer(source, self.config)
        self._open(folders.read_statistics(folder))
        try:
            state = saving.load(self.trainer.pieces(), folder)
            self.iteration = int(state["iteration"])
            self.trainer.steps_taken = int(state["steps_taken"])
            self.skipped = int(state["skipped"])
            self.grown = list(state.get("grown", ()))
            if self.loader.order.has_grown(state["data"]):
                self.grown.append(self.iteration)
                log.info(
                    "The data set has grown to %d samples: their order begins again after iteration %d",
                    len(self.store),
                    self.iteration,
                )
            self.loader.restore(state["data"])
            self.bad.found |= set(state["bad_samples"])
            # held-out samples that were added would be compared with losses without them
            same_data = state["data"].get("contents", self.store.contents) == self.store.contents
            if state["best"] is not None and same_data:
                self._keep(float(state["best"][0]), int(state["best"][1]))
        except (KeyError, TypeError, AttributeError, IndexError) as error:  # checksums do not prove who wrote it
            what = "state.json is damaged, or of an older version, which commit fa46f34c reads"
            raise folders.CheckpointError(f"{folder}: {what} ({error!r}); use another checkpoint") from error
        dataset = data_folder(self.config)
        different = loading.different_encoders(folder, dataset)
        if different:
            raise ValueError(f"a resumed run must keep its {different[0]}; {dataset} has another one: prepare it again")
        for key in cfg.FIELDS:
            before = attrgetter(key)(source.config)
            now = attrgetter(key)(self.config)
            if before != now:
                log.info("%s is %s from iteration %d on; it was %s", key, now, self.iteration + 1, before)

    def _open(self, statistics: LatentStatistics | None) -> None:
        """Open the loader with the latent statistics of the weights; None: with those of the data set.

        Weights keep their statistics, also with new data: a colour must stay the same input.
        """
        trainer = self.trainer
        self.loader = packed_loader(self.config, self.store, trainer.dp_rank, trainer.dp_size, statistics)

    def run(self) -> int:
        """Train to `train.train_iters`, or until a signal or `train.exit_duration_s`; the last state is saved.

        Returns what stopped it, as `StopRequest.agreed`.
        """
        train = self.config.train
        save_interval = self.config.checkpoint.save_interval
        begun = time.monotonic()
        first = self.iteration
        stop = 0
        due = False
        self.folder.tell("first step")
        with tqdm(total=train.train_iters, initial=first, desc="train", unit="it", disable=no_bars()) as bar:
            while self.iteration < train.train_iters and not stop:
                # a process's first step may compile and fill caches, so its time is not limited
                self.step(first=self.iteration == first)
                if self.iteration == first + 1:
                    self.folder.tell("training")
                bar.update()
                if train.eval_interval and train.eval_iters and self.iteration % train.eval_interval == 0:
                    self.validate()
                limit_s = train.exit_duration_s
                out_of_time = limit_s is not None and time.monotonic() - begun > limit_s
                stop, bad = self.stop.agreed(out_of_time, bool(self.bad.new))
                if bad:
                    self.bad.share()
                if save_interval and self.iteration % save_interval == 0 and self.iteration != self.saved:
                    due = True
                # weights that give NaN may never recover
                if due and not stop and not self.skipped_in_a_row:
                    self.save()
                    due = False
                self.writer.poll()  # an asynchronous save may be complete by now
        if self.iteration != self.saved:
            self.save()
        self.writer.close()
        self.loader.close()
        if self.watchdog is not None:
            self.watchdog.close()
        if stop:
            why = "train.exit_duration_s" if stop == OUT_OF_TIME else signal.Signals(stop).name
            log.info("Stopped by %s at iteration %d; saved. The same command resumes from here", why, self.iteration)
            self.report.stopped(self.iteration, why)
        else:
            done = "Done" if self.iteration > first else "Nothing left to do, as train.train_iters is reached"
            log.info("%s: iteration %d is saved in %s", done, self.iteration, self.writer.root)
            if folders.MANIFEST in self.assets:
                log.info("Next: dfm generate --checkpoint-path %s --prompt TEXT", shlex.quote(str(self.folder.path)))
        self.report.close()
        return stop

    def step(self, first: bool = False) -> None:
        """Read packs, train on them and report it. first : of this process, which the watchdog does not watch.

        Raises
        ------
        ValueError : more than `train.max_skipped_steps` steps in a row had NaN, Inf or no sample, or too many are bad.
        """
        started = time.monotonic()
        cpu_s = time.process_time()
        self._beat("loading data", watched=not first)
        packs = self.loader.next_step()
        waited_s = time.monotonic() - started
        self._beat("in a step", watched=not first)
        result = self.trainer.step(packs)
        self._beat("between steps", watched=False)
        self.iteration += 1
        duration_s = time.monotonic() - started
        counts = {
            "samples": self.loader.state()["samples"],
            "data_share": waited_s / duration_s,
            "cpu_cores": (time.process_time() - cpu_s) / duration_s,
        }
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            self.skipped += 1
            self.report.skipped(self.iteration, result, packs)
            counts["skipped"] = self.skipped
        self.folder.check_place()  # before a logger's thread fails at it
        self.report.step(self.iteration, result, packs, duration_s, self.trainer.lr, counts)
        self.bad.see(packs)
        most = self.config.train.max_skipped_steps
        if self.skipped_in_a_row > most:
            raise ValueError(
                f"loss or gradients were NaN or Inf in {self.skipped_in_a_row} steps in a row "
                f"(train.max_skipped_steps={most}); the samples are listed in "
                f"{self.folder.path / 'skipped.jsonl'}; lower optimizer.lr or use mixed_precision=fp32"
            )

    def _beat(self, phase: str, watched: bool) -> None:
        if self.watchdog is not None:
            self.watchdog.beat(phase, self.iteration, watched)

    def validate(self) -> None:
        """Losses on held-out packs and, unless `validation.samples` is off, a sample per data-parallel rank."""
        self.folder.tell("validating")
        record = self.validation.run()
        if self.config.validation.samples:
            self.folder.tell("drawing samples")
            self.report.samples(self.iteration, self.samples.generate(self.iteration))
        self.report.validation(self.iteration, record)
        self._compare(record)
        self.folder.tell("training")

    def _keep(self, loss: float, iteration: int) -> None:
        self.best = loss, iteration
        if self.config.checkpoint.keep_best:
            self.writer.best = iteration

    def _compare(self, record: Mapping[str, Any]) -> None:
        """Remember the best round by the loss of the average that generates; warn once when the loss has risen."""
        loss = float(record[compared_loss(record)])
        if not math.isfinite(loss):
            return
        if self.best is None or loss < self.best[0]:
            self._keep(loss, self.iteration)
            if self.config.checkpoint.keep_best:
                self.save()
        elif self.iteration - self.best[1] == RISEN_ROUNDS * self.config.train.eval_interval and dist.get_rank() == 0:
            log.warning(
                f"Validation loss was best at iteration {self.best[1]} ({self.best[0]:.4f}) and has been higher for "
                f"{RISEN_ROUNDS} rounds: the network now memorizes its training samples"
            )

    def save(self) -> None:
        """Save a checkpoint of this iteration; the run resumes from it bit for bit."""
        self.folder.tell("saving")
        self.writer.rotates = not self.skipped_in_a_row
        data = self.loader.state()
        state = {
            "iteration": self.iteration,
            "steps_taken": self.trainer.steps_taken,
            "skipped": self.skipped,
            "bad_samples": sorted(self.bad.found),
            "best": self.best,
            "base": self.base,
            "grown": self.grown,
            "data": data,
            "consumed_samples": data["samples"],
            "consumed_tokens": data["tokens"],
        }
        statistics = self.loader.order.settings.statistics
        assert statistics is not None
        small = {**self.assets, folders.STATISTICS: folders.statistics_file(statistics)}
        small[samples.FILE] = self.config.samples.file
        self.writer.save(self.trainer.pieces(), self.iteration, state, self.config_yaml, small)
        self.saved = self.iteration
        self.folder.tell("training")


def run(resolved: cfg.Resolved, run_dir: str) -> None:
    """Start this process's groups, train, end them; rank 0 owns the run folder meanwhile.

    Raises
    ------
    KeyboardInterrupt : Ctrl-C stopped it, after it has saved, so that a script or *Run All* ends too.
    """
    config = resolved.config
    parallel.init(layout_of(config.model), timeout_s=config.dist.timeout_s, seed=config.rng.seed)
    rank = parallel.rank()
    start = config.checkpoint
    # an absolute path, because `find` reads it from the run folder in any working directory
    start.checkpoint_dir = start.checkpoint_dir and str(Path(start.checkpoint_dir).resolve())
    folder = Run.create(run_dir) if rank == 0 else Run(Path(run_dir).resolve())
    if rank == 0:
        # before anything else is written, so that a killed run's folder has its record
        folder.claim()
        folder.own(Path(start.checkpoint_dir or folder.checkpoints.resolve()))
    dist.barrier()  # the folder is there
    start_logging(folder.path, rank)
    folder.tell("opening the data")
    try:
        stop = _train(resolved, folder)
    finally:
        folder.release()
    if stop == signal.SIGINT:
        raise KeyboardInterrupt


def _warn_of_large_steps(config: cfg.Config, store: SampleStore) -> None:
    """When a step takes more than the whole data set."""
    t = config.train
    m = config.model
    step = t.global_batch_size * config.dataset.task_encoder_seq_length
    if len(store) >= step:  # a sample has a token or more, and the sizes of many would take memory
        return
    tokens = int(store.voxels(np.arange(len(store))).sum()) // (m.patch_temporal * m.patch_spatial**2)
    if tokens < step:
        log.warning(
            f"A step takes {step} tokens, and all {len(store)} samples have {tokens}: lower train.global_batch_size or "
            "dataset.task_encoder_seq_length, or let --minutes choose them"
        )


def _train(resolved: cfg.Resolved, run: Run) -> int:
    started = time.monotonic()
    store = open_store(resolved.config)
    resolved = with_data(resolved, store)
    # one for all, whatever their processors
    arithmetic = everyones(precision(resolved.config.mixed_precision))[0]
    resolved = resolved.with_derived({"mixed_precision": arithmetic}, "the processor of rank 0")
    unsettled = resolved.config.train.minutes and not resolved.is_dialled
    timed = unsettled and resolved.is_free("train.train_iters")
    if unsettled:
        run.tell("timing iterations")
        resolved = plugins.find("dials", "minutes").settings(resolved, store, dist.get_world_size(), started)
    config = resolved.config
    if parallel.rank() == 0:
        write_atomically(run.config_file, cfg.to_yaml(resolved).encode())
    run.tell("building the model")
    training = Training(resolved, run, store)
    model = config.model
    log.info(
        "%s of %.1f M parameters, %s on %d process(es), %s, %d samples",
        network_class(model).__name__,
        counts.parameter_count(model) / 1e6,
        layout_of(model),
        dist.get_world_size(),
        config.mixed_precision,
        len(store),
    )
    rank = model.lora.rank
    if rank:
        trained = counts.lora_parameter_count(model, rank) / 1e6
        log.info("LoRA rank %d: %.3f M trainable parameters", rank, trained)
    for key in ("condition_frames_prob", "condition_last_prob"):
        if getattr(config.dataset, key) and store.most_frames() == 1:
            log.warning("dataset.%s has no effect: it is for clips, and all samples are pictures", key)
            break
    if not resolved.is_dialled:  # the dial knows, and a few pictures train well in such steps
        _warn_of_large_steps(config, store)
    # the dial, which times them, knows it better
    if config.dataset.path and not timed and not model.student:
        tokens = config.train.train_iters * config.train.global_batch_size * config.dataset.task_encoder_seq_length
        log.info("%s", expected(config, store, tokens))
    for notice in resolved.notices:
        log.info("%s", notice)
    training.resume()
    log.info("Starting pretraining...")
    stop = training.run()
    del training  # models and optimizers first, or gloo aborts at exit
    parallel.shutdown()
    return stop
