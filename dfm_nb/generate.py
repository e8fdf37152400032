"""Prompts to clips: `dfm generate`, or `torchrun ... -m dfm_nb.generate`. In Python: `Pipeline`.

Each prompt becomes an mp4 (PNG for one frame) and a JSON sidecar, from which `--prompts-file` makes the same clip
again. The starting noise is a function of (seed, prompt index) alone, so batch size, processes and layout do not
matter, to float32 rounding.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from dfm_nb import parallel
from dfm_nb.base import pretrained
from dfm_nb.base.argv import NPROC, ArgumentParser, guard
from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.generation.clip_files import Clips, Generated, check_replay, finished_before, output_path, replay_verdict
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import FLAGS, Request, read_prompts
from dfm_nb.parallel.groups import Layout, mpu


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = ArgumentParser(prog="dfm generate", description="Generate clips with a trained DiT.", epilog=NPROC)
    p.add_argument(
        "--checkpoint-path",
        help=f"run folder, iter_* folder, exported file or packaged model; default: the packaged {pretrained.DEFAULT}",
    )
    p.add_argument("--prompt", action="append", default=[], help="repeat for several")
    p.add_argument(
        "--prompts-file",
        help=".txt with a prompt a line, .jsonl with settings per line, or the .json beside a clip to make it again",
    )
    Request.add_flags(p, FLAGS)
    p.add_argument("--autoguidance-checkpoint", help="a weaker checkpoint that replaces the unconditional estimate")
    p.add_argument("--ema", default="auto", help="relative length of the weight average; auto, or none for raw weights")
    p.add_argument("--mixed-precision", choices=("bf16", "fp32"), help="arithmetic; by default that of the training")
    p.add_argument("--batch-size", type=int, default=16, help="clips generated together; does not change the result")
    p.add_argument("--cp-size", type=int, default=1, help="processes that share each sequence")
    p.add_argument("--tp-size", type=int, default=1, help="processes that share each weight")
    p.add_argument("--pp-size", type=int, default=1, help="processes that share the layers")
    p.add_argument("--tokenizer-path", "--tokenizer-cache-dir", dest="tokenizer_path", help="tokenizer file or folder")
    p.add_argument("--text-encoder-path", "--t5-cache-dir", dest="text_encoder_path", help="text encoder folder")
    p.add_argument("--tokenizer-model", help="may be left out, as the checkpoint knows its tokenizer")
    p.add_argument("--video-save-path", default="out.mp4", help="several clips get idx=I_rank=R_ before the name")
    p.add_argument("--save-latents", action="store_true", help="also write each latent as NAME.safetensors")
    p.add_argument("--overwrite", action="store_true", help="replace existing files")
    p.add_argument("--skip-existing", action="store_true", help="leave out what an interrupted run has finished")
    p.add_argument("--no-memory-check", action="store_true", help="generate although memory seems short")
    return p.parse_args(argv)


def requests_of(args: argparse.Namespace, recommended: dict[str, Any] | None = None) -> list[Request]:
    """Prompts of the command line, then those of the file; a line of a file may set any field of `Request`.

    recommended : what the checkpoint recommends, for what neither sets.
    """
    common = {**(recommended or {}), **Request.given(args), "prompt": ""}
    lines: list[tuple[str, dict]] = [("", {"prompt": p}) for p in args.prompt]
    if args.prompts_file:
        lines += read_prompts(Path(args.prompts_file))
    if not lines:
        raise ValueError("there is nothing to generate: give --prompt TEXT or --prompts-file FILE")
    requests = []
    for i, (where, line) in enumerate(lines):
        try:
            requests.append(Request(**{**common, "index": i, **line}))
            requests[-1].check()
        except (ValueError, FileNotFoundError) as error:
            kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
            raise kind(f"{where}: {error}" if where else str(error)) from None
    uses = Counter(r.index for r in requests)
    if (twice := next((i for i, count in uses.items() if count > 1), None)) is not None:
        raise ValueError(f"two prompts have index {twice}, which names their files and their noise; make them differ")
    return requests


__all__ = ["Clips", "Generated", "Pipeline", "Request", "main", "output_path", "parse", "requests_of"]


# ---- command line -------------------------------------------------------------------------------------------------


def _interrupt_on_sigterm() -> Any:
    """End on SIGTERM as on Ctrl-C: torchrun sends it to the processes that are left. Returns the handler there was."""

    def interrupt(*_signal) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, interrupt)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.overwrite and args.skip_existing:
        raise ValueError("give --overwrite or --skip-existing, not both")
    requests_of(args)  # a wrong flag is said before the checkpoint is looked at, which takes time if it is large
    source = args.checkpoint_path or pretrained.packaged(pretrained.DEFAULT) or pretrained.DEFAULT
    weights = checkpoint.find_weights(source)  # and a wrong path before anything starts
    if args.tokenizer_model:
        name = checkpoint.read_manifest(weights.folder)["tokenizer"]["name"]  # cosmos_cv: Cosmos-0.1-Tokenizer-CV4x8x8
        if not all(word in args.tokenizer_model.lower() for word in name.split("_")):
            given = f"got {args.tokenizer_model!r}; leave it out"
            raise ValueError(f"--tokenizer-model must be {name}, the tokenizer of the checkpoint; {given}")
    requests = requests_of(args, weights.config.generation.model_dump(exclude_none=True))
    ema = None if args.ema == "none" else args.ema if args.ema == "auto" else float(args.ema)
    layout = Layout(args.tp_size, args.pp_size, args.cp_size)
    weaker = checkpoint.find_weights(args.autoguidance_checkpoint) if args.autoguidance_checkpoint else None
    made_by = {
        "checkpoint": weights.identity,
        "ema": ema,
        "autoguidance_checkpoint": weaker.identity if weaker else None,
    }
    sidecar = Path(args.prompts_file) if (args.prompts_file or "").endswith(".json") else None
    if sidecar:
        check_replay(sidecar, requests[-1], made_by)
    parallel.init(layout)
    if not args.checkpoint_path and parallel.rank() == 0:
        here = "; --checkpoint-path model.pth takes the file that lies here" * Path("model.pth").is_file()
        print(f"[INFO] no --checkpoint-path: generating with {pretrained.DEFAULT}, which comes with the package{here}")
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    writes = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    writes = writes and parallel.is_last_pipeline_stage()
    base = Path(args.video_save_path).expanduser().absolute()
    base.parent.mkdir(parents=True, exist_ok=True)
    many = len(requests) > 1 or "RANK" in os.environ
    work = [(output_path(base, r, many), r) for r in requests[dp_rank::dp_size]]
    if args.skip_existing:
        work = [(p, r) for p, r in work if not finished_before(p, r, made_by)]
    existing = [p for p, _ in work if p.exists()]
    if existing and not args.overwrite:
        raise FileExistsError(f"{existing[0]} exists; pass --overwrite, --skip-existing or another --video-save-path")
    pipe = Pipeline.from_checkpoint(
        weights, ema, layout, args.tokenizer_path, args.text_encoder_path, weaker, args.mixed_precision
    )
    pipe.memory_check = not args.no_memory_check
    finished = []
    before = _interrupt_on_sigterm()
    try:
        for i, result in pipe.run([r for _, r in work], args.batch_size, progress=parallel.rank() == 0):
            if writes:
                path = result.save(work[i][0], args.save_latents)
                finished.append(path)
                print(f"[INFO] wrote {path}{replay_verdict(sidecar, path) if sidecar else ''}", flush=True)
    except KeyboardInterrupt:
        if writes:
            names = ", ".join(p.name for p in finished) or "none"
            print(
                f"interrupted: {len(finished)} of {len(work)} clips are finished and kept: {names}; run the same "
                "command with --skip-existing for the rest",
                flush=True,
            )
        return 130
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
