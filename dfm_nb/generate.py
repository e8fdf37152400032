"""Prompts to clips: `dfm generate`, or `torchrun ... -m dfm_nb.generate`. In Python: `Pipeline`.

Each prompt becomes an mp4 (PNG for one frame) and a JSON sidecar, from which `--prompts-file` reproduces the clip. The
starting noise depends only on (seed, prompt index), so batch size, processes and layout do not matter, to float32
rounding.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import pretrained
from dfm_nb.base.argv import NPROC, ArgumentParser, guard
from dfm_nb.base.files import check_free
from dfm_nb.base.options import Count, option
from dfm_nb.base.verb import FileVerb, Report
from dfm_nb.checkpoints import folders, loading
from dfm_nb.generation import clip_files
from dfm_nb.generation.pipeline import ModelOptions
from dfm_nb.generation.request import FLAGS, Request, described, of_size, read_prompts
from dfm_nb.parallel.groups import Layout, is_first_of_model, mpu


class GenerateOptions(ModelOptions, FileVerb):
    """Generate clips with a trained DiT."""

    prog = "dfm generate"
    epilog = NPROC
    module = "dfm_nb.generate"
    checkpoint_path: str | None = option(
        None, f"run folder, iter_* folder, exported file or packaged model; default: the packaged {pretrained.DEFAULT}"
    )
    prompt: list[str] = option([], "repeat for several", action="append")
    prompts_file: str | None = option(
        None, ".txt with a prompt per line, .jsonl with settings per line, or a clip's .json to reproduce it"
    )
    size: str | None = option(None, "short for --width and --height", metavar="WIDTHxHEIGHT")
    num_images: Count = option(1, "samples of each prompt, with the seeds that follow --seed")
    batch_size: Count = option(16, "clips generated together; does not change the result")
    cp_size: Count = option(1, "processes that share each sequence")
    tp_size: Count = option(1, "processes that share each weight")
    pp_size: Count = option(1, "processes that share the layers")
    tokenizer_model: str | None = option(None, "not needed, as the checkpoint knows its tokenizer")
    video_save_path: str = option(
        "out.mp4", "NAME.mp4, NAME, or a folder/; several clips get idx=I_rank=R_ in front, seeds seed=S_", output=True
    )
    save_latents: bool = option(False, "also write each latent as NAME.safetensors")
    skip_existing: bool = option(False, "skip what an interrupted run has finished")
    no_memory_check: bool = option(False, "generate even if memory seems too small")
    shared: dict[str, Any] = option(
        {}, "settings of `Request` that all prompts share", python_only=True, plugins="samplers"
    )

    def __init__(self, /, **values: Any):
        shared = {}
        for name in FLAGS:
            value = values.pop(name, None)
            if value is not None:
                shared[name] = value
        if values.get("size"):
            for side in ("height", "width"):
                if side in shared:
                    raise ValueError(f"--size is short for --width and --height; leave out --{side}")
            shared |= of_size(values["size"])
        super().__init__(**{"shared": shared, **values})

    @classmethod
    def parser(cls) -> ArgumentParser:
        parser = super().parser()
        Request.add_flags(parser, FLAGS)
        return parser

    def requests(self, config: cfg.Config | None = None) -> list[Request]:
        """Prompts of the command line, then those of the file; a line of a file may set any field of `Request`.

        config : the checkpoint's, for what neither sets.
        """
        lines = [("", {"prompt": prompt}) for prompt in self.prompt]
        if self.prompts_file:
            lines += read_prompts(Path(self.prompts_file))
        if not lines:
            raise ValueError("there is nothing to generate: give --prompt TEXT or --prompts-file FILE")
        requests = []
        indices = set()
        for i, (where, line) in enumerate(lines):
            try:
                request = Request(**{**self.shared, "index": i, **line})
                request.check()
                if config:
                    request = request.completed(config)
            except (ValueError, FileNotFoundError) as error:
                kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
                raise kind(f"{where}: {error}" if where else str(error)) from None
            if request.index in indices:
                raise ValueError(
                    f"two prompts have index {request.index}, which names their files and their noise; make them differ"
                )
            indices.add(request.index)
            requests += request.variants(self.num_images)
        return requests

    def _base(self, request: Request) -> Path:
        """The name that was asked for; of several samples of a prompt, with the seed."""
        base = clip_files.output_name(self.video_save_path).absolute()
        return base if self.num_images == 1 else base.with_name(f"seed={request.seed}_{base.name}")

    def _announced(self, requests: list[Request], config: cfg.Config) -> Iterator[str]:
        """What is generated, and what of it was not trained."""
        if not self.checkpoint_path:
            yield f"no --checkpoint-path: generating with {pretrained.DEFAULT}, which comes with the package"
        samples = config.samples
        known = f"; most training samples are {described(samples.kinds)}" if samples.kinds else ""
        yield f"generating {described(requests)}{known}"
        if samples.captions and not {"width", "height", "num_video_frames"} & self.shared.keys():
            yield "by default a prompt gets the frames, size and rate of the training caption most like it"
        yield from dict.fromkeys(filter(None, (request.untrained(config) for request in requests)))

    def run(self) -> list[Request]:
        if self.overwrite and self.skip_existing:
            raise ValueError("give --overwrite or --skip-existing, not both")
        folder = clip_files.output_name(self.video_save_path).absolute().parent
        self.requests()  # a wrong flag is said before the checkpoint is read, which takes time if it is large
        weights = loading.find_weights(
            self.checkpoint_path or pretrained.packaged(pretrained.DEFAULT) or pretrained.DEFAULT
        )
        if self.tokenizer_model:
            # cosmos_cv: Cosmos-0.1-Tokenizer-CV4x8x8
            name = folders.read_manifest(weights.folder)["tokenizer"]["name"]
            if not all(word in self.tokenizer_model.lower() for word in name.split("_")):
                raise ValueError(
                    f"--tokenizer-model must be {name}, the tokenizer of the checkpoint; "
                    f"got {self.tokenizer_model!r}; leave it out"
                )
        requests = self.requests(weights.config)
        layout = Layout(self.tp_size, self.pp_size, self.cp_size)
        made_by = {"checkpoint": weights.identity, "ema": self.average}
        sidecar = Path(self.prompts_file or "")
        replays = sidecar.suffix == ".json"
        if replays:
            clip_files.check_replay(sidecar, requests[-1], made_by)
        parallel.init(layout)
        first = parallel.rank() == 0
        if first:
            for line in self._announced(requests, weights.config):
                print(f"[INFO] {line}")
        dp_rank = mpu.get_data_parallel_rank()
        dp_size = mpu.get_data_parallel_world_size()
        writes = is_first_of_model()
        folder.mkdir(parents=True, exist_ok=True)
        many = len(requests) > 1 or "RANK" in os.environ
        paths = []
        work = []
        for request in requests[dp_rank::dp_size]:
            path = clip_files.output_path(self._base(request), request, many)
            if self.skip_existing and clip_files.finished_before(path, request, made_by):
                continue
            paths.append(path)
            work.append(request)
            files = [path, clip_files.sidecar_of(path)]
            if self.save_latents:
                files.append(clip_files.latent_of(path))
            for file in files:
                check_free(file, self.overwrite, "pass --overwrite, --skip-existing or another --video-save-path")
        pipe = self.open(weights, layout)
        pipe.memory_check = not self.no_memory_check
        finished = []
        before = signal.getsignal(signal.SIGTERM)
        with contextlib.suppress(ValueError):  # only the main thread may set a handler
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # torchrun sends it to those that are left
        try:
            for i, clip in pipe.run(work, self.batch_size, progress=first):
                if writes:
                    path = clip.save(paths[i], self.save_latents, self.overwrite)
                    finished.append(path.name)
                    anchor = clip.made_by.get("anchor_caption")
                    how = f", with the training caption {anchor!r} before the prompt (--anchor none)" if anchor else ""
                    verdict = clip_files.replay_verdict(sidecar, path) if replays else ""
                    print(f"[INFO] wrote {path}{how}{verdict}", flush=True)
        except KeyboardInterrupt:
            if not writes:
                raise
            raise KeyboardInterrupt(
                f"interrupted: {len(finished)} of {len(work)} clips are finished and kept: "
                f"{', '.join(finished) or 'none'}; run the same command with --skip-existing for the rest"
            ) from None
        finally:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, before)
        parallel.shutdown()
        return requests

    def report(self, result: list[Request]) -> Report:
        """The files of these prompts, whichever process wrote them."""
        clips = []
        for request in result:
            for many in (False, True):
                path = clip_files.output_path(self._base(request), request, many)
                for file in clip_files.of_any_process(path):
                    clips.append({"index": request.index, "prompt": request.prompt, "file": str(file)})
        return Report({"clips": clips})


main = GenerateOptions.main


if __name__ == "__main__":
    raise SystemExit(guard(main))
