"""Prompts to clips: `dfm generate`, or `torchrun ... -m dfm_nb.generate`. In Python: `Pipeline`.

Each prompt becomes an mp4 (PNG for one frame) and a JSON sidecar, from which `--prompts-file` reproduces the clip. The
starting noise depends only on (seed, prompt index), so batch size, processes and layout do not matter, to float32
rounding.
"""

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import pretrained
from dfm_nb.base.argv import NPROC, ArgumentParser, guard
from dfm_nb.base.files import check_free
from dfm_nb.base.options import option
from dfm_nb.base.verb import FileVerb, Report
from dfm_nb.checkpoints import folders, loading
from dfm_nb.generation import clip_files
from dfm_nb.generation.pipeline import ModelOptions
from dfm_nb.generation.request import FLAGS, Request, described, of_size, read_prompts
from dfm_nb.parallel.groups import Layout, is_first_of_model, mpu


class GenerateOptions(ModelOptions, FileVerb):
    """Generate clips with a trained DiT."""

    prog, epilog, module = "dfm generate", NPROC, "dfm_nb.generate"
    checkpoint_path: str | None = option(
        None, f"run folder, iter_* folder, exported file or packaged model; default: the packaged {pretrained.DEFAULT}"
    )
    prompt: list[str] = option([], "repeat for several", action="append")
    prompts_file: str | None = option(
        None, ".txt with a prompt per line, .jsonl with settings per line, or a clip's .json to reproduce it"
    )
    size: str | None = option(None, "short for --width and --height", metavar="WIDTHxHEIGHT")
    num_images: int = option(1, "samples of each prompt, with the seeds that follow --seed", ge=1)
    batch_size: int = option(16, "clips generated together; does not change the result", ge=1)
    cp_size: int = option(1, "processes that share each sequence", ge=1)
    tp_size: int = option(1, "processes that share each weight", ge=1)
    pp_size: int = option(1, "processes that share the layers", ge=1)
    tokenizer_model: str | None = option(None, "not needed, as the checkpoint knows its tokenizer")
    video_save_path: str = option(
        "out.mp4", "NAME.mp4, NAME, or a folder/; several clips get idx=I_rank=R_ before the name", output=True
    )
    save_latents: bool = option(False, "also write each latent as NAME.safetensors")
    skip_existing: bool = option(False, "skip what an interrupted run has finished")
    no_memory_check: bool = option(False, "generate even if memory seems too small")
    shared: dict[str, Any] = option({}, "settings of `Request` that all prompts share", python_only=True)

    def __init__(self, /, **values: Any):
        shared = {name: value for name in FLAGS if (value := values.pop(name, None)) is not None}
        if size := values.get("size"):
            if taken := {"width", "height"} & shared.keys():
                raise ValueError(f"--size is short for --width and --height; leave out --{min(taken)}")
            shared |= of_size(size)
        super().__init__(**{"shared": shared, **values})

    @classmethod
    def parser(cls) -> ArgumentParser:
        parser = super().parser()
        Request.add_flags(parser, FLAGS)
        return parser

    def find_weights(self) -> loading.Weights:
        """The checkpoint's; a wrong path is said before anything starts."""
        usual = pretrained.packaged(pretrained.DEFAULT) or pretrained.DEFAULT
        return loading.find_weights(self.checkpoint_path or usual)

    def requests(self, config: cfg.Config | None = None) -> list[Request]:
        """Prompts of the command line, then those of the file; a line of a file may set any field of `Request`.

        config : the checkpoint's, for what neither sets.
        """
        shared = self.shared
        lines: list[tuple[str, dict]] = [("", {"prompt": p}) for p in self.prompt]
        if self.prompts_file:
            lines += read_prompts(Path(self.prompts_file))
        if not lines:
            raise ValueError("there is nothing to generate: give --prompt TEXT or --prompts-file FILE")
        requests = []
        for i, (where, line) in enumerate(lines):
            try:
                request = Request(**{**shared, "index": i, **line})
                requests.append(request.completed(config) if config else request)
                request.check()
            except (ValueError, FileNotFoundError) as error:
                kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
                raise kind(f"{where}: {error}" if where else str(error)) from None
        uses = Counter(r.index for r in requests)
        if (twice := next((i for i, count in uses.items() if count > 1), None)) is not None:
            raise ValueError(
                f"two prompts have index {twice}, which names their files and their noise; make them differ"
            )
        return [variant for request in requests for variant in request.variants(self.num_images)]

    def _base(self, request: Request) -> Path:
        """The name that was asked for; of several samples of a prompt, with the seed."""
        base = clip_files.output_name(self.video_save_path).absolute()
        return base if self.num_images == 1 else base.with_name(f"seed={request.seed}_{base.name}")

    def run(self) -> list[Request]:
        if self.overwrite and self.skip_existing:
            raise ValueError("give --overwrite or --skip-existing, not both")
        folder = clip_files.output_name(self.video_save_path).absolute().parent
        self.requests()  # a wrong flag is said before the checkpoint is read, which takes time if it is large
        weights = self.find_weights()
        if self.tokenizer_model:
            # cosmos_cv: Cosmos-0.1-Tokenizer-CV4x8x8
            name = folders.read_manifest(weights.folder)["tokenizer"]["name"]
            if not all(word in self.tokenizer_model.lower() for word in name.split("_")):
                given = f"got {self.tokenizer_model!r}; leave it out"
                raise ValueError(f"--tokenizer-model must be {name}, the tokenizer of the checkpoint; {given}")
        requests = self.requests(weights.config)
        layout = Layout(self.tp_size, self.pp_size, self.cp_size)
        made_by = {"checkpoint": weights.identity, "ema": self.average}
        sidecar = Path(self.prompts_file) if self.prompts_file and self.prompts_file.endswith(".json") else None
        if sidecar:
            clip_files.check_replay(sidecar, requests[-1], made_by)
        parallel.init(layout)
        if not self.checkpoint_path and parallel.rank() == 0:
            print(f"[INFO] no --checkpoint-path: generating with {pretrained.DEFAULT}, which comes with the package")
        if parallel.rank() == 0:
            own = weights.config.generation
            known = f"; most training samples are {described((own, own.other))}" if own.other.num_video_frames else ""
            print(f"[INFO] generating {described(requests)}{known}")
            if (own.captions or own.other.captions) and not {
                "width",
                "height",
                "num_video_frames",
            } & self.shared.keys():
                print("[INFO] by default a prompt gets the frames, size and rate of the training caption most like it")
            for said in dict.fromkeys(said for r in requests if (said := r.untrained(weights.config))):
                print(f"[INFO] {said}")
        dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        writes = is_first_of_model()
        folder.mkdir(parents=True, exist_ok=True)
        many = len(requests) > 1 or "RANK" in os.environ
        work = [(clip_files.output_path(self._base(r), r, many), r) for r in requests[dp_rank::dp_size]]
        if self.skip_existing:
            work = [(p, r) for p, r in work if not clip_files.finished_before(p, r, made_by)]
        for path, _ in work:
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
            for i, result in pipe.run([r for _, r in work], self.batch_size, progress=parallel.rank() == 0):
                if writes:
                    path = result.save(work[i][0], self.save_latents, self.overwrite)
                    finished.append(path)
                    print(
                        f"[INFO] wrote {path}{clip_files.replay_verdict(sidecar, path) if sidecar else ''}", flush=True
                    )
        except KeyboardInterrupt:
            if writes:
                names = ", ".join(p.name for p in finished) or "none"
                kept = f"{len(finished)} of {len(work)} clips are finished and kept: {names}"
                text = f"interrupted: {kept}; run the same command with --skip-existing for the rest"
                raise KeyboardInterrupt(text) from None
            raise
        finally:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, before)
        parallel.shutdown()
        return requests

    def report(self, result: list[Request]) -> Report:
        """The files of these prompts, whichever process wrote them."""
        paths = [(r, clip_files.output_path(self._base(r), r, many)) for r in result for many in (False, True)]
        found = [(r, file) for r, path in paths for file in clip_files.of_any_process(path)]
        return Report({"clips": [{"index": r.index, "prompt": r.prompt, "file": str(file)} for r, file in found]})


main = GenerateOptions.main


if __name__ == "__main__":
    raise SystemExit(guard(main))
