"""Prompts to clips: `dfm generate`, or `torchrun ... -m dfm_nb.generate`. In Python: `Pipeline`.

Each prompt becomes an mp4 (PNG for one frame) and a JSON sidecar, from which `--prompts-file` reproduces the clip. The
starting noise depends only on (seed, prompt index), so batch size, processes and layout do not matter, to float32
rounding.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import pretrained
from dfm_nb.base.argv import NPROC, guard
from dfm_nb.base.options import option
from dfm_nb.checkpoints import folders, loading
from dfm_nb.generation import clip_files
from dfm_nb.generation.pipeline import ModelOptions
from dfm_nb.generation.request import FLAGS, Request, check_sampler, described, read_prompts
from dfm_nb.parallel.groups import Layout, is_first_of_model, mpu


class GenerateOptions(ModelOptions):
    """Generate clips with a trained DiT."""

    prog, epilog = "dfm generate", NPROC
    checkpoint_path: str | None = option(
        None, f"run folder, iter_* folder, exported file or packaged model; default: the packaged {pretrained.DEFAULT}"
    )
    prompt: list[str] = option([], "repeat for several", action="append")
    prompts_file: str | None = option(
        None, ".txt with a prompt per line, .jsonl with settings per line, or a clip's .json to reproduce it"
    )
    batch_size: int = option(16, "clips generated together; does not change the result", ge=1)
    cp_size: int = option(1, "processes that share each sequence", ge=1)
    tp_size: int = option(1, "processes that share each weight", ge=1)
    pp_size: int = option(1, "processes that share the layers", ge=1)
    tokenizer_model: str | None = option(None, "not needed, as the checkpoint knows its tokenizer")
    video_save_path: str = option(
        "out.mp4", "NAME.mp4, NAME, or a folder/; several clips get idx=I_rank=R_ before the name", output=True
    )
    save_latents: bool = option(False, "also write each latent as NAME.safetensors")
    overwrite: bool = option(False, "replace existing files")
    skip_existing: bool = option(False, "skip what an interrupted run has finished")
    no_memory_check: bool = option(False, "generate even if memory seems too small")

    def find_weights(self) -> loading.Weights:
        """The checkpoint's; a wrong path is said before anything starts."""
        usual = pretrained.packaged(pretrained.DEFAULT) or pretrained.DEFAULT
        return loading.find_weights(self.checkpoint_path or usual)


def parse(argv: list[str] | None) -> tuple[GenerateOptions, dict[str, Any]]:
    """The options of the command, and the settings of `Request` that all prompts share."""
    parser = GenerateOptions.parser()
    Request.add_flags(parser, FLAGS)
    args = vars(parser.parse_args(argv))
    shared = {name: value for name in FLAGS if (value := args.pop(name)) is not None}
    return GenerateOptions(**args), shared


def requests_of(asked: GenerateOptions, shared: dict[str, Any], config: cfg.Config | None = None) -> list[Request]:
    """Prompts of the command line, then those of the file; a line of a file may set any field of `Request`.

    config : the checkpoint's, for what neither sets.
    """
    lines: list[tuple[str, dict]] = [("", {"prompt": p}) for p in asked.prompt]
    if asked.prompts_file:
        lines += read_prompts(Path(asked.prompts_file))
    if not lines:
        raise ValueError("there is nothing to generate: give --prompt TEXT or --prompts-file FILE")
    requests = []
    for i, (where, line) in enumerate(lines):
        try:
            # a line counts above the flags, so the same module must be named there
            check_sampler(line, "the file", shared if line.get("sampler") == shared.get("sampler") else {})
            request = Request(**{**shared, "index": i, **line})
            requests.append(request.completed(config) if config else request)
            request.check()
        except (ValueError, FileNotFoundError) as error:
            kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
            raise kind(f"{where}: {error}" if where else str(error)) from None
    uses = Counter(r.index for r in requests)
    if (twice := next((i for i, count in uses.items() if count > 1), None)) is not None:
        raise ValueError(f"two prompts have index {twice}, which names their files and their noise; make them differ")
    return requests


def result(argv: list[str]) -> dict[str, Any]:
    """What `--json` prints: the files of these prompts, whichever process wrote them."""
    asked, shared = parse(argv)
    base = clip_files.output_name(asked.video_save_path).absolute()
    found: list[dict[str, Any]] = []
    # which may recommend clips; large weights take long to find
    config = None if "num_video_frames" in shared else asked.find_weights().config
    for r in requests_of(asked, shared, config):
        files = [f for many in (False, True) for f in clip_files.of_any_process(clip_files.output_path(base, r, many))]
        found += [{"index": r.index, "prompt": r.prompt, "file": str(f)} for f in files]
    return {"clips": found}


def main(argv: list[str] | None = None) -> int:
    asked, shared = parse(argv)
    if asked.overwrite and asked.skip_existing:
        raise ValueError("give --overwrite or --skip-existing, not both")
    base = clip_files.output_name(asked.video_save_path).absolute()
    requests_of(asked, shared)  # a wrong flag is said before the checkpoint is read, which takes time if it is large
    weights = asked.find_weights()
    if asked.tokenizer_model:
        name = folders.read_manifest(weights.folder)["tokenizer"]["name"]  # cosmos_cv: Cosmos-0.1-Tokenizer-CV4x8x8
        if not all(word in asked.tokenizer_model.lower() for word in name.split("_")):
            given = f"got {asked.tokenizer_model!r}; leave it out"
            raise ValueError(f"--tokenizer-model must be {name}, the tokenizer of the checkpoint; {given}")
    requests = requests_of(asked, shared, weights.config)
    layout = Layout(asked.tp_size, asked.pp_size, asked.cp_size)
    weaker = loading.find_weights(asked.autoguidance_checkpoint) if asked.autoguidance_checkpoint else None
    guide = weaker.identity if weaker else None
    made_by = {"checkpoint": weights.identity, "ema": asked.average, "autoguidance_checkpoint": guide}
    sidecar = Path(asked.prompts_file) if asked.prompts_file and asked.prompts_file.endswith(".json") else None
    if sidecar:
        clip_files.check_replay(sidecar, requests[-1], made_by)
    parallel.init(layout)
    if not asked.checkpoint_path and parallel.rank() == 0:
        print(f"[INFO] no --checkpoint-path: generating with {pretrained.DEFAULT}, which comes with the package")
    if parallel.rank() == 0:
        own, taken = weights.config.generation, " and ".join(dict.fromkeys(map(described, requests)))
        known = " and ".join(dict.fromkeys(map(described, (own, own.other)))) if own.other.num_video_frames else ""
        print(f"[INFO] generating {taken}" + (f"; most training samples are {known}" if known else ""))
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    writes = is_first_of_model()
    base.parent.mkdir(parents=True, exist_ok=True)
    many = len(requests) > 1 or "RANK" in os.environ
    work = [(clip_files.output_path(base, r, many), r) for r in requests[dp_rank::dp_size]]
    if asked.skip_existing:
        work = [(p, r) for p, r in work if not clip_files.finished_before(p, r, made_by)]
    existing = [f for p, _ in work for f in clip_files.files_of(p, asked.save_latents) if f.exists()]
    if existing and not asked.overwrite:
        raise FileExistsError(f"{existing[0]} exists; pass --overwrite, --skip-existing or another --video-save-path")
    for path, _ in work:
        clip_files.check_sidecar(path)
    pipe = asked.open(weights, layout, weaker)
    pipe.memory_check = not asked.no_memory_check
    finished = []
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(ValueError):  # only the main thread may set a handler
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # torchrun sends it to those that are left
    try:
        for i, result in pipe.run([r for _, r in work], asked.batch_size, progress=parallel.rank() == 0):
            if writes:
                path = result.save(work[i][0], asked.save_latents)
                finished.append(path)
                print(f"[INFO] wrote {path}{clip_files.replay_verdict(sidecar, path) if sidecar else ''}", flush=True)
    except KeyboardInterrupt:
        if writes:
            names = ", ".join(p.name for p in finished) or "none"
            kept = f"{len(finished)} of {len(work)} clips are finished and kept: {names}"
            print(f"interrupted: {kept}; run the same command with --skip-existing for the rest", flush=True)
        return 130
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, before)
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
