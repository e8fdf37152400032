"""Prepare a data set: from captioned images and clips to a folder of shards with a `manifest.json`.

- The source, the number of processes and the settings determine which sample goes into which shard
  (`shard_plan`). A shard is the unit of work: after a kill at any instant `resume` redoes only unfinished shards, and
  the result is byte-identical to an uninterrupted run.
- Every dropped sample is counted by reason and listed in its shard's record; the manifest lists the first
  `NAMED_DROPS`. Kept samples that lack a part of their file or captions are treated alike.
- Memory: an item takes some bytes, a shard half a KiB on rank 0; the hashes by which items are known again take a
  record each where a folder grows, `--reuse` is given, or copies are counted.
"""

import contextlib
import gc
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import model_validator

from dfm_nb.base import plugins, version
from dfm_nb.base.argv import LAUNCHER, NPROC, USER_ERRORS, ArgumentParser, from_launcher
from dfm_nb.base.files import Json, read_json
from dfm_nb.base.log import log, silent, tqdm
from dfm_nb.base.options import Count, Values, fields, option
from dfm_nb.base.records import Clip, SampleError, Source, TextEncoder, Tokenizer
from dfm_nb.base.torchrun import group_of_this_machine
from dfm_nb.base.verb import Report, Verb
from dfm_nb.data import prepared_folder, shards
from dfm_nb.data.captioning import edits_sha256, read_edits
from dfm_nb.data.encoding import (
    Encoders,
    LatentEncoder,
    ReadAhead,
    Reading,
    encode_shards,
    other_captions,
    rewrite_shard,
    to_pixels,
)
from dfm_nb.data.prepared_folder import PreparedFolder
from dfm_nb.data.sample_index import SampleIndex, write_indexes
from dfm_nb.data.shard_plan import (
    VAL_FROM_ITEMS,
    GrownPlans,
    ShardPlan,
    ShardPlans,
    Stock,
    copies_of,
    evenly,
    grow,
    share,
    warn_of_copies,
)
from dfm_nb.data.shards import SPLITS

SHORT_SIDE_PX = 64  # if the tokenizer has no size of its own
FIT_ITEMS = 1500  # items a tokenizer is fitted to, evenly spaced over the training split
TUNE_BYTES = 1 << 30  # of their pixels; --fit-tokenizer does not use what comes after
PSNR_ITEMS = 64
NAMED_DROPS = 10_000
NAMED_WORST = 5
MOST_RANKS = 1 << 20
VAL_FRACTION = 0.05
# with few items, 5 % give a validation loss too noisy to stop by: of 48 items, 6 are held out
# instead of 2
SMALL_VAL_FRACTION, SMALL_BELOW_ITEMS = 0.125, 1000
PATIENCE = timedelta(days=30)  # ranks wait for each other: for the fit, and at the end
T = TypeVar("T")


# ---- settings ------------------------------------------------------------------------------------


class PrepareConfig(Verb):
    """Encode captioned images and clips into WebDataset shards."""

    # plan=True: shards depend on it, so a folder is resumed with equal values only
    prog, epilog, module, logs = "dfm prepare", NPROC, "dfm_nb.prepare", True

    output_dir: str = option(help="folder for the shards", output=True)
    source: str = option("synthetic", "NAME or NAME:SPEC", plugins="sources")
    tokenizer: str | None = option(
        None,
        "encoder of pixels to latents; default: general, or what the source was made for (synthetic: residual)",
        plugins="tokenizers",
        plan=True,
    )
    text_encoder: str = option("minilm", "encoder of captions to embeddings", plugins="text_encoders", plan=True)
    tokenizer_path: str | None = option(
        None, "its file, folder or hub cache; fitted ones need none", flags=("--tokenizer-cache-dir",)
    )
    text_encoder_path: str | None = option(None, "its folder, hub cache or hub id", flags=("--t5-cache-dir",))
    fit_tokenizer: float | None = option(
        None, "minutes to tune a copy of the tokenizer to these pictures (general, residual)", gt=0, plan=True
    )
    short_side: int | None = option(
        None,
        f"px, rounded to a multiple of 16; default: what the tokenizer was made for, else {SHORT_SIDE_PX}; smaller "
        "pictures keep their size unless --upscale is given; synthetic draws at this size",
        ge=16,
    )
    fit: Literal["crop", "crop-top", "crop-bottom", "crop-left", "crop-right", "pad"] = option(
        "crop", "to sides that are multiples of 16: crop (the middle, or from which edge to keep) or pad", plan=True
    )
    upscale: bool = option(False, "also enlarge smaller pictures to --short-side, as NeMo DFM does", plan=True)
    limit: Count | None = option(None, "only the first N items", plan=True)
    val_fraction: float | None = option(
        None, "share of the items, by a hash of their keys; default 0.05, for few items 0.125", ge=0, lt=1, plan=True
    )
    test_fraction: float = option(0.0, "likewise", ge=0, lt=1, plan=True)
    shard_size: Count = option(250, "items per shard: the unit of work and of resuming", plan=True)
    max_text_tokens: Count = option(512, "longer captions are cut", plan=True)
    pad_text_tokens: Count | None = option(None, "pad embeddings to this length, for readers that need it", plan=True)
    tag_captions: Count | None = option(None, "further captions to build from each sample's tags", plan=True)
    flip: bool = option(False, "also encode mirrored training samples, unless a caption says left or right", plan=True)
    workers: Count | None = option(None, "threads that read and resize; default: the cores, 2 to 16 a process")
    device: str | None = option(None, "default: each process its own cuda device where there are any, else cpu")
    resume: bool = option(False, "continue an unfinished output folder")
    overwrite: bool = option(False, "delete the preparation in the output folder")
    reuse: str | None = option(None, "finished folder whose latents are used where files have the same content")
    texts_only: bool = option(False, "encode only changed captions, also from edits.jsonl, and keep all latents")
    options: Values = option({}, "values of the plug-ins' own flags by name", python_only=True)
    table: Any = option(None, "a DataFrame for the source `table`", python_only=True)

    def __init__(self, /, **values: Any):
        flags = plugins.all_flags()
        given = flags(**{name: values.pop(name) for name in flags.model_fields if name in values})
        super().__init__(**{"options": given.changed(), **values})

    @classmethod
    def names(cls) -> list[str]:
        return [*super().names(), *plugins.all_flags().model_fields]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (VAL_FRACTION if self.val_fraction is None else self.val_fraction) + self.test_fraction >= 1:
            raise ValueError("--val-fraction and --test-fraction leave nothing for training; lower them")
        for kind, name in (("tokenizers", self.tokenizer_name), ("text_encoders", self.text_encoder)):
            plugins.options_of(kind, name, self.options)
        if self.fit_tokenizer and not hasattr(self.tokenizer_module, "tune"):
            able = [name for name, module in plugins.load_all("tokenizers").items() if hasattr(module, "tune")]
            raise ValueError(
                f"--fit-tokenizer cannot tune {self.tokenizer_name}; choose --tokenizer {' or '.join(able)}"
            )
        if self.overwrite and (self.resume or self.texts_only):
            raise ValueError("--overwrite deletes what the folder holds; omit --resume and --texts-only")
        if self.reuse and self.flip:
            raise ValueError("--reuse cannot tell which samples --flip mirrored; omit one of them")
        return self

    @classmethod
    def parser(cls) -> ArgumentParser:
        """Also with the flags of the plug-ins, in a group for each kind."""
        parser = super().parser()
        for kind in plugins.PASSED:
            group = parser.add_argument_group(f"flags of {kind.replace('_', ' ')}: {', '.join(plugins.names(kind))}")
            plugins.all_flags().add_flags(group, plugins.flags(kind))
        return parser

    def preflight(self, num_processes: int) -> None:
        with silent():
            Preparation(self, Ranks(world=num_processes)).check()

    def run(self) -> Json:
        """The manifest."""
        return prepare(self)

    def report(self, result: Json) -> Report:
        return Report(prepared_folder.summary(self.output_dir, result))

    def words(self, usual: Values | None = None) -> list[str]:
        """Those of the plug-ins among them."""
        return [*super().words(usual), *plugins.all_flags()(**self.options).words()]

    @property
    def side_px(self) -> int:
        """The short side; by default the tokenizer's own."""
        own: int = getattr(self.tokenizer_module, "SHORT_SIDE_PX", SHORT_SIDE_PX)
        return self.short_side or own

    @property
    def tokenizer_name(self) -> str:
        """`tokenizer`; by default that of the folder if one was begun, else the source's, else `general`."""
        if self.tokenizer:
            return self.tokenizer
        kept = None if self.overwrite else PreparedFolder(self.output_dir).held_plan().get("tokenizer")
        if kept in plugins.names("tokenizers"):  # never a module's name, whose code would run
            return str(kept)
        return str(getattr(self.source_module, "TOKENIZER", "general"))

    @property
    def tokenizer_module(self) -> ModuleType:
        return plugins.load("tokenizers", self.tokenizer_name)

    @property
    def source_module(self) -> ModuleType:
        return plugins.load("sources", plugins.source_and_spec(self.source)[0])

    def open_source(self) -> Source:
        """The source; ValueError for flags that it does not use."""
        name, spec = plugins.source_and_spec(self.source)
        options = plugins.options_of("sources", name, self.options)
        if plugins.takes(self.source_module, "size_px"):
            options["size_px"] = self.side_px
        source = self.source_module.build(spec or None if self.table is None else self.table, **options)
        if not len(source):
            raise ValueError(f"--source {self.source} has no items: there is nothing to prepare")
        if self.tag_captions and not source.tagged:
            raise ValueError(f"--tag-captions needs tags, and --source {self.source} has none; add a column tags")
        return source


# ---- the processes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """This process's rank in the preparation; gloo, because encoders do not communicate."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def from_env(cls) -> Self:
        """From torchrun's environment; one rank without it."""
        return cls(*map(from_launcher, LAUNCHER))

    def __enter__(self) -> Self:
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE, **group_of_this_machine(PATIENCE))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        if self.world > 1 and kind is None:  # after an error, torchrun stops the others
            # if a rank exits while another still communicates with it, gloo aborts that one (in 2
            # of 6 preparations)
            dist.barrier()
            gc.collect()
            dist.destroy_process_group()

    def first(self, function: Callable[[], T]) -> T:
        """`function()` on rank 0 when all arrived; all get the result. A user's error is logged once and ends all."""
        if self.world == 1:
            return function()
        dist.barrier()
        shared: list[Any] = [None, False]  # the result, whether it failed
        error: BaseException | None = None
        if self.rank == 0:
            try:
                shared[0] = function()
            except USER_ERRORS as fault:
                error = fault
                shared[1] = True
        dist.broadcast_object_list(shared, src=0)
        if shared[1]:
            raise error or SystemExit(2)
        return shared[0]

    def device(self, asked: str | None) -> str:
        """The requested device; by default this process's own GPU, or the CPU without one."""
        if asked or not torch.cuda.is_available():
            return asked or "cpu"
        index = self.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return f"cuda:{index}"


# ---- the work ------------------------------------------------------------------------------------


def prepare(config: PrepareConfig) -> Json:
    """This process's part of a preparation, as torchrun numbers it; returns the manifest when all ranks are done."""
    # the folder's lock is released last: after the process group, when every rank has stopped
    # writing
    with contextlib.ExitStack() as turn, Ranks.from_env() as ranks:
        preparation = Preparation(config, ranks)
        folder = preparation.folder

        def claim(plan: Json) -> bool:
            turn.enter_context(folder.turn())
            grown = partial(grow, folder.path, preparation.source, preparation.keys, plan)
            return folder.claim(plan, config.resume, config.overwrite, config.texts_only, grown)

        plan = ranks.first(preparation.check)
        done = plan is None
        if plan is not None:
            with silent(ranks.rank > 0):  # a failure here leaves the folder unchanged
                preparation.load(plan)
            done = ranks.first(lambda: claim(plan))
            if done:
                ranks.first(preparation.agree_on_encoders)
            else:
                preparation.run()
        if done and ranks.rank == 0:
            log.info("%s is already complete", folder.path)
        # read on rank 0 alone: another node may see a new file of a shared folder only later
        return ranks.first(lambda: read_json(folder.manifest))


class Preparation:
    """One process's share of the work: `check` before any, `load` the encoders, `run` once the folder is claimed."""

    plan: Json
    plans: ShardPlans | GrownPlans

    def __init__(self, config: PrepareConfig, ranks: Ranks):
        self.config = config
        self.ranks = ranks
        self.folder = PreparedFolder(config.output_dir)
        self.carried = getattr(config.tokenizer_module, "CARRIED", False)

    # ---- what is prepared

    @cached_property
    def source(self) -> Source:
        """Opened once, because it logs what it skips."""
        return self.config.open_source()

    @property
    def num_items(self) -> int:
        """Number of items that are used."""
        return min(len(self.source), self.config.limit or len(self.source))

    @property
    def keys(self) -> Iterator[str]:
        """Of the items that are used."""
        return map(self.source.item_key, range(self.num_items))

    @property
    def val_share(self) -> float:
        """`val_fraction`, or by default every eighth of the items without a split of their own, if these are few."""
        if self.config.val_fraction is not None:
            return self.config.val_fraction
        drawn = sum(self.source.item_split(index) is None for index in range(self.num_items))
        small = VAL_FROM_ITEMS <= drawn < SMALL_BELOW_ITEMS
        return SMALL_VAL_FRACTION if small and self.config.test_fraction + SMALL_VAL_FRACTION < 1 else VAL_FRACTION

    def check(self) -> Json | None:
        """The plan, before any work; None if the folder already has the finished data set.

        With other paths of encoders the plan is always returned, because the encoders must be loaded and compared.

        Raises
        ------
        ValueError, OSError : the source cannot be used, or the folder must not be written into.
        """
        hashes = np.sort(np.fromiter(map(hash, self.keys), np.int64))
        if (hashes[1:] == hashes[:-1]).any():  # or different keys with one hash
            key, times = Counter(self.keys).most_common(1)[0]
            if times > 1:
                raise ValueError(
                    f"the source names two items {key!r}; keys must be unique: rename or remove one of them"
                )
        config = self.config
        plan = self._settled()
        finished = self.folder.check(plan, config.resume, config.overwrite, config.texts_only)
        made = read_json(self.folder.manifest).get("arguments", {})
        same = all(getattr(config, path) == made.get(path) for path in ("tokenizer_path", "text_encoder_path"))
        return None if finished and same else plan

    def _settled(self) -> Json:
        """The settings that must be equal for a folder to belong to this preparation."""
        config = self.config
        held = {} if config.overwrite else self.folder.held_plan()
        # the shards depend on the number of processes that started; any number may continue
        began = held.get("ranks")
        if type(began) is not int or not 0 < began <= MOST_RANKS:
            began = self.ranks.world
        fraction = self.val_share
        if config.val_fraction is None and held.get("val_fraction") in (VAL_FRACTION, SMALL_VAL_FRACTION):
            fraction = held["val_fraction"]  # as the default was when the folder was begun
        settings = fields(PrepareConfig).items()
        of_encoders = (*plugins.flags("tokenizers"), *plugins.flags("text_encoders"))
        plan = {
            "format": prepared_folder.FORMAT_VERSION,
            "source": self.source.identity(),
            "short_side": config.side_px,
            "ranks": began,
            "edits": edits_sha256(self.folder.path),
            **{name: getattr(config, name) for name, field in settings if field.marks.get("plan")},
            "tokenizer": config.tokenizer_name,
            "val_fraction": fraction,
            **{name: config.options.get(name) for name in of_encoders},
        }
        if plugins.takes(config.source_module, "size_px"):
            del plan["fit"]  # drawn at their size
        # a fitted tokenizer follows from the other settings; a given file does not
        if config.tokenizer_path and self.carried:
            plan["tokenizer_sha256"] = config.tokenizer_module.build(config.tokenizer_path).identity()["sha256"]
        known = ((index, self.source.content(index, hashed=True)) for index in range(self.num_items))
        copies = held.get("copies") if held else copies_of(known)
        if copies:
            plan["copies"] = copies  # with it they are drawn into one split
        texts = held.get("texts", 0) + config.texts_only
        if texts:
            plan["texts"] = texts  # a shard whose record has a smaller number has older captions
        return json.loads(json.dumps(plan))

    def load(self, plan: Json) -> None:
        """Load the weights that exist, so that a wrong path fails now and not after the first batch."""
        config = self.config
        self.plan = plan
        # a source that takes `size_px` draws at that size, so nothing is resized
        side_px = None if plugins.takes(config.source_module, "size_px") else config.side_px
        cores = len(os.sched_getaffinity(0)) // self.ranks.local_world
        self.reading = Reading(
            self.source,
            side_px,
            config.upscale,
            config.workers or max(2, min(16, cores)),
            read_edits(self.folder.path),
            config.tag_captions or 0,
            config.flip,
            config.fit,
        )
        self.device = self.ranks.device(config.device)
        self.text_encoder: TextEncoder = self._build(
            "text_encoders", config.text_encoder, config.text_encoder_path, max_tokens=config.max_text_tokens
        )
        if not self.carried:
            with torch.no_grad():
                self.tokenizer.encode(torch.zeros(1, 3, 1, 64, 64))

    def _build(self, kind: str, name: str, path: str | Path | None, **more: Any) -> Any:
        options = plugins.options_of(kind, name, self.config.options)
        return plugins.load(kind, name).build(path, device=self.device, **more, **options)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, from the folder if its file is next to the shards."""
        path = self.folder.path if self.carried else self.config.tokenizer_path
        return self._build("tokenizers", self.config.tokenizer_name, path)

    def run(self) -> None:
        layout = self.ranks.first(self.folder.layout)
        if layout:
            self.plans = GrownPlans(self.keys, layout)
        else:
            self.plans = ShardPlans(
                self.keys,
                self.plan["val_fraction"],
                self.config.test_fraction,
                self.plan["ranks"],
                self.config.shard_size,
                self.source.item_split,
                self.plan.get("copies", ()),
            )
        if self.ranks.rank == 0 and self.config.val_fraction is None:
            said = "%d of %d items are held out for validation; --val-fraction %g is the default"
            log.info(said, len(self.plans.items_of("val")), self.plans.num_items, self.plan["val_fraction"])
        self.ranks.first(self._provide_tokenizer)
        self.ranks.first(self.agree_on_encoders)
        stocks = [Path(self.config.reuse).expanduser()] if self.config.reuse else []
        for stock in stocks:
            prepared_folder.check_reuse(PreparedFolder(stock), self.plan, self.identities())
        if layout:
            stocks.append(self.folder.path)
            self.ranks.first(self._tell_captions)
        # the samples of an item with --flip depend on its split
        self._encode(None if self.config.flip else Stock(stocks))
        self.ranks.first(self._complete)

    def _tell_captions(self) -> None:
        """Count the samples that keep their older captions; these change by --texts-only alone."""
        if self.config.texts_only:
            return
        others = list(other_captions(self.plans.all(), self.reading, self.folder.path))
        if others:
            said = "%d samples, such as %s, keep their captions, which are now others; encode these with --texts-only"
            log.warning(said, len(others), others[0])

    def agree_on_encoders(self) -> None:
        """ValueError if the folder was begun with others."""
        self.folder.agree_on_encoders(self.identities())

    def identities(self) -> dict[str, dict]:
        """The encoders' identities, with the names that find them again."""
        return {
            "tokenizer": self.tokenizer.identity() | {"name": self.config.tokenizer_name},
            "text_encoder": self.text_encoder.identity() | {"name": self.config.text_encoder},
        }

    # ---- the tokenizer

    def _provide_tokenizer(self) -> None:
        """A small tokenizer's file next to the shards: fitted to them, else a copy of the given or the packaged one."""
        module = self.config.tokenizer_module
        if not self.carried or self.folder.tokenizer.exists():
            return
        if hasattr(module, "fit") and not self.config.tokenizer_path:
            tokenizer = module.fit(self._pixels_to_fit())
        else:
            tokenizer = self._tuned() or module.build(self.config.tokenizer_path)
        tokenizer.save(self.folder.tokenizer)

    def _tuned(self) -> Tokenizer | None:
        """A copy tuned to the training samples; None without `--fit-tokenizer`, or if held-out ones gain nothing."""
        if not self.config.fit_tokenizer:
            return None
        if not any(len(self.plans.items_of(split)) for split in ("val", "test")):
            log.warning(
                "the tokenizer is used as it is: tuning is judged on held-out samples, and there are none; prepare "
                f"{VAL_FROM_ITEMS} pictures or more, with --val-fraction above 0"
            )
            return None
        tokenizer = self._build("tokenizers", self.config.tokenizer_name, self.config.tokenizer_path)
        before = self._psnr(tokenizer)
        videos = []
        for pixels in self._pixels_to_fit():
            videos.append(((pixels + 1) * 127.5).round().byte())
            if sum(video.nbytes for video in videos) > TUNE_BYTES:
                break
        self.config.tokenizer_module.tune(tokenizer, videos, self.config.fit_tokenizer)
        after = self._psnr(tokenizer)
        for when, psnr_db in (("before", before), ("after", after)):
            log.info("%s tuning, %s", when, "; ".join(prepared_folder.psnr_lines(psnr_db)))
        if sum(after[kind] - before[kind] for kind in ("images", "clips") if kind in before) > 0:
            return tokenizer
        log.warning("the tokenizer is used as it is: tuning it brought held-out samples nothing")
        return None

    def _pixels_to_fit(self) -> Iterator[torch.Tensor]:
        """Evenly spaced training items as float32 [3, T, H, W] in [-1, 1]."""
        chosen = evenly(self.plans.items_of("train"), FIT_ITEMS)
        faults = list[str]()
        given = 0
        with tqdm(total=len(chosen), desc=f"fit {self.config.tokenizer_name}", unit="item") as bar:
            for _, pixels in self._pixels(chosen, faults, replace(self.reading, on_item=bar.update)):
                given += 1
                yield pixels
        if not given:
            raise ValueError(f"no sample of {self.config.source} could be used; the first: {''.join(faults[:1])}")

    def _pixels(self, items: list[int], faults: list[str], reading: Reading) -> Iterator[tuple[str, torch.Tensor]]:
        """Keys and clips of items, float32 [3, T, H, W] in [-1, 1]; reasons for unusable ones are added to `faults`."""
        with ReadAhead(reading, items) as ahead:
            for _, result in ahead.take(len(items)):
                if isinstance(result, SampleError):
                    faults.append(result.detail)
                elif isinstance(result, Clip):
                    yield result.key, to_pixels(result.video)

    # ---- encoding

    def _encode(self, stock: Stock | None) -> None:
        """This rank's unfinished shards."""
        rank = self.ranks.rank
        world = self.ranks.world
        plans = [p._replace(texts=self.plan.get("texts", 0)) for p in share(self.plans, rank, world)]
        count = sum(len(p.items) for p in plans)
        line = f"[INFO] Rank {rank} of {world} processing {count} samples\n"
        os.write(1, line.encode())  # in one write, because several ranks share the terminal
        latents = LatentEncoder(self.tokenizer, self.device)
        encoders = Encoders(latents, self.text_encoder, self.config.pad_text_tokens)
        todo = [p for p in plans if self._record(p) is None]
        done = count - sum(len(p.items) for p in todo)
        with tqdm(total=count, initial=done, desc="prepare", unit="item", disable=rank != 0) as bar:
            how = replace(self.reading, stock=stock, on_item=bar.update), encoders, self.folder.path
            # what is new comes first: it may be copied from shards that are rewritten
            encode_shards([p for p in todo if not shards.record_path(self.folder.path, p.name).exists()], *how)
            encode_shards([p for p in todo if self._record(p) is None and not rewrite_shard(p, *how)], *how)

    # ---- completing the folder, on rank 0

    def _complete(self) -> None:
        """Merge the ranks' records; Energon's metadata; the manifest last."""
        totals = ShardTotals(self._records())
        if not totals.full:
            drops = totals.drops
            first = drops.named[0]["detail"] if drops.named else "the source gave no clips"
            if not self.config.texts_only:
                # so that the same command, or another, may follow when the source is mended
                self.folder.clear()
            dropped = drops.reasons.total()
            raise ValueError(f"{self.config.source} gave no usable sample ({dropped} dropped); first: {first}")
        prepared_folder.write_empty_text(self.folder.path, self.text_encoder.encode([""])[0])
        write_indexes(self.folder.path, totals.names)
        shards.write_energon_metadata(self.folder.path, totals.names)
        arguments = self.config.model_dump(exclude={"options", "table", "as_json"}, exclude_none=True)
        arguments |= {"tokenizer": self.config.tokenizer_name, **self.config.options}
        own = {"short_side": self.config.side_px, "ranks": self.plan["ranks"], "plan": self.plan}
        own["arguments"] = arguments
        captions_from = list(self.source.captions_from.values())
        about = {"source": self.plan["source"], "captions_from": captions_from, **self.identities()}
        # a run's statistics stay, and so do the tokenizer and what it was measured on
        if isinstance(self.plans, GrownPlans) or self.config.texts_only:
            before = read_json(self.folder.manifest)
            own |= {name: before[name] for name in ("latent_mean", "latent_std", "psnr_db")}
        else:
            own["psnr_db"] = self._psnr(self.tokenizer)
        manifest = totals.manifest(about, self.plans.num_items, own)
        tars = {r.name: {"bytes": r.bytes, "sha256": r.sha256} for r in totals.full}
        prepared_folder.write_manifest(self.folder.path, manifest, tars)
        totals.warn()
        warn_of_copies(self._records())
        sizes = Counter[str]()
        for split, names in totals.names.items():
            if names:
                own_sizes = SampleIndex(self.folder.path, split).sizes()
                sizes.update({"x".join(map(str, size)): count for size, count in own_sizes.items()})
        kinds = f"{prepared_folder.kinds_line(sizes)} in {len(totals.full)} shards"
        log.info("%s; frames x height x width: %s", kinds, prepared_folder.sizes_line(sizes))
        for line in prepared_folder.psnr_lines(manifest["psnr_db"]):
            log.info(line)
        log.info("Webdataset shards saved to %s/", self.folder.path)

    def _record(self, plan: ShardPlan) -> shards.ShardRecord | None:
        """The record of a shard; None if it is unfinished, or its samples are not those of the plan."""
        record = shards.read_record(self.folder.path, plan.name)
        return record if record and plan.has(record) else None

    def _records(self) -> Iterator[shards.ShardRecord]:
        """The records of all ranks' shards, one at a time."""
        for plan in self.plans.all():
            record = self._record(plan._replace(texts=self.plan.get("texts", 0)))
            if record is None:
                raise ValueError(f"{self.folder.path} lacks {plan.name}; all processes must write to one shared folder")
            yield record

    @torch.no_grad()
    def _psnr(self, tokenizer: Tokenizer) -> Json:
        """Mean PSNR in dB (peak 255) of held-out images and clips through a small tokenizer, and the worst keys.

        The worst also come from training items if few are held out. Not for large tokenizers, which may have to fetch a
        decoder.
        """
        held_out = next(split for split in ("val", "test", "train") if len(self.plans.items_of(split)))
        by_kind = dict[str, list[float]]()
        by_key = dict[str, float]()
        for split in dict.fromkeys((held_out, "train")) if self.carried else ():
            for key, pixels in self._pixels(
                evenly(self.plans.items_of(split), PSNR_ITEMS - len(by_key)), [], self.reading
            ):
                again = tokenizer.decode(tokenizer.encode(pixels[None].to(self.device)))[0].float().cpu().clamp(-1, 1)
                error = ((again - pixels) * 127.5).square().mean().item()
                by_key[key] = 10 * math.log10(255**2 / max(error, 1e-8))
                if split == held_out:
                    by_kind.setdefault("images" if pixels.shape[1] == 1 else "clips", []).append(by_key[key])
        worst = dict(sorted(by_key.items(), key=lambda item: item[1])[:NAMED_WORST])
        means = {kind: sum(v) / len(v) for kind, v in sorted(by_kind.items())}
        return {"split": held_out, **means, "measured": len(by_key), "worst": worst}


class Faults:
    """Dropped samples, or what kept samples lack: all by reason, the first `NAMED_DROPS` and one of each by name."""

    def __init__(self):
        self.named = list[dict[str, str]]()
        self.reasons = Counter[str]()

    def add(self, faults: Iterable[dict[str, str]]) -> None:
        for fault in faults:
            if len(self.named) < NAMED_DROPS or fault["reason"] not in self.reasons:
                self.named.append(fault)
            self.reasons[fault["reason"]] += 1

    def warn(self, what: str) -> None:
        """Say the number by reason, each with an example; the manifest lists all."""
        for reason, n in self.reasons.most_common():
            example = next(fault for fault in self.named if fault["reason"] == reason)
            log.warning("%d sample(s) %s, %s; for example %s: %s", n, what, reason, example["key"], example["detail"])


class ShardTotals:
    """The records of all shards, added up.

    full : records of shards with samples; names and samples : their names, and numbers of samples, by split.
    """

    def __init__(self, records: Iterable[shards.ShardRecord]):
        self.full = []
        self.names: shards.Splits = {split: [] for split in SPLITS}
        self.samples = dict.fromkeys(SPLITS, 0)
        self.drops = Faults()
        self.lost = Faults()
        for record in records:
            self.drops.add(record.drops)
            self.lost.add(record.lost)
            if record.samples:
                # the rest takes memory
                self.full.append(record.model_copy(update={"drops": [], "lost": [], "contents": {}}))
                self.names[record.split].append(record.name)
                self.samples[record.split] += record.samples

    def manifest(self, about: Json, items: int, own: Json) -> Json:
        """The manifest. items : of the source. about : source and encoders. own : the caller's further keys."""
        train = [r for r in self.full if r.split == "train"] or self.full
        # [3, channels]; exact sums, so that the order of the shards does not matter
        count, total, squares = np.apply_along_axis(math.fsum, 0, np.array([r.latent_sums for r in train]))
        mean = total / count
        return {
            "dfm_nb": version.__version__,
            **about,
            "latent_mean": mean.tolist(),
            "latent_std": np.sqrt(np.maximum(squares / count - mean**2, 1e-12)).tolist(),
            "counts": {
                "items": items,
                "samples": sum(self.samples.values()),
                "dropped": self.drops.reasons.total(),
                **self.samples,
                "dropped_by_reason": dict(self.drops.reasons.most_common()),
                "lost_by_reason": dict(self.lost.reasons.most_common()),
                "text_tokens": sum(r.text_tokens for r in self.full),
            },
            "psnr_db": {},
            "drops": self.drops.named,
            "lost": self.lost.named,
            **own,
            "shards": [{"name": r.name, "split": r.split, "samples": r.samples} for r in self.full],
        }

    def warn(self) -> None:
        """Say what was dropped or lost."""
        self.drops.warn("are dropped")
        self.lost.warn("are used but incomplete")
