"""Generated clips as objects and files: names, the sidecar that reproduces a clip, files of earlier runs.

A clip is NAME.mp4 or NAME.png, with NAME.mp4.json next to it. The sidecar is written last: a clip with one is finished.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from dfm_nb import parallel
from dfm_nb.base import plugins, video
from dfm_nb.base.files import StrPath, check_free, local, plain, read_json, sha256, write_atomically, write_json
from dfm_nb.data.sources._media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from dfm_nb.generation.request import Request, read_prompts


def _display() -> Any:
    """What shows clips in a notebook; training and `dfm generate` never load it."""
    return plugins.find("displays", "notebook")


@dataclass(repr=False)
class Generated:
    """A finished sample: frames uint8 [T, H, W, 3], its request, and its latent float32 [C, T, H, W] (normalised).

    made_by : entries of its sidecar: weights, layout, versions. elapsed_s : seconds since its run began.
    """

    frames: np.ndarray
    request: Request
    latent: torch.Tensor
    made_by: Mapping[str, Any] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def save(self, path: StrPath, latent: bool = False, overwrite: bool = False) -> Path:
        """Write the clip as .mp4 (one frame as .png), and a sidecar that reproduces it. path : see `output_name`.

        The sidecar NAME.mp4.json is a `--prompts-file` of `dfm generate`. It is written last: a clip with one is
        complete. Returns the clip's path.

        Parameters
        ----------
        latent : also write NAME.mp4.safetensors with the latent.
        overwrite : also replace files that are no clip with a sidecar of ours, else FileExistsError.
        """
        path = output_path(output_name(path), self.request, many=False)
        sidecar = sidecar_of(path)
        ours = overwrite or "frames_sha256" in read_json(sidecar)
        for file in (path, sidecar, *([latent_of(path)] if latent else ())):
            check_free(file, ours)
        sidecar.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.encoded()[1])
        if latent:
            write_atomically(latent_of(path), save({"latent": self.latent.contiguous()}))
        record = {
            **settings_of(self.request),
            **self.made_by,
            "elapsed_s": round(self.elapsed_s, 3),
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "latent_sha256": hashlib.sha256(self.latent.numpy().tobytes()).hexdigest(),
            "frames_sha256": hashlib.sha256(self.frames.tobytes()).hexdigest(),
        }
        write_json(sidecar, record, indent=1)
        return path

    def encoded(self) -> tuple[str, bytes]:
        """(media type, bytes) of its file, with its settings inside, which `read_prompts` reads."""
        return video.compressed(self.frames, self.request.fps, json.dumps(settings_of(self.request)))

    def show(self) -> None:
        """Play it in the notebook."""
        Clips([self]).show()

    def _repr_png_(self) -> bytes:
        return Clips([self])._repr_png_()

    def _repr_html_(self) -> str:
        """An inline player (a picture for one frame)."""
        return _display().inline_html(self.frames, self.request.fps, self.request.prompt)

    def __repr__(self) -> str:
        t, h, w, _ = self.frames.shape
        return f"Generated({self.request.prompt!r}: {t} frames of {h} x {w} px, seed {self.request.seed})"


class Clips(list):
    """Generated samples (or previews); a notebook plays them in a row."""

    @property
    def frames(self) -> list[np.ndarray]:
        """uint8 [T, H, W, 3] of each clip."""
        return [clip.frames for clip in self]

    def array(self) -> np.ndarray:
        """uint8 [N, T, H, W, 3]; the sizes must agree."""
        return np.stack(self.frames)

    def save(self, folder: StrPath) -> list[Path]:
        """`Generated.save` into a folder as 0.mp4, 1.mp4, ...; returns the paths."""
        if Path(folder).suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
            raise ValueError(f"clips are saved into a folder, and {folder} is a file's name; one: clips[0].save(...)")
        digits = len(str(len(self) - 1))
        return [clip.save(Path(folder, f"{i:0{digits}}.mp4")) for i, clip in enumerate(self)]

    def show(self) -> None:
        """Play them in the notebook, each with its prompt."""
        _display().show_output(self._repr_html_(), self._repr_png_())

    def _repr_html_(self) -> str:
        return _display().row_html(clip._repr_html_() for clip in self)

    def _repr_png_(self) -> bytes:
        return _display().sheet_png([(clip.frames, clip.request.prompt) for clip in self])


def output_name(path: StrPath) -> Path:
    """The path that was asked for, without .mp4 or .png: `a.mp4` and `a` give `a`; `a.v2` stays; a folder `a/` gives
    `a/out`.

    Raises
    ------
    ValueError : it ends as a picture or video of another kind does.
    """
    name = local(path)
    if os.fspath(path).endswith("/") or name.is_dir():
        return name / "out"
    suffix = name.suffix.lower()
    if suffix in (".mp4", ".png"):
        return name.with_suffix("")
    if suffix in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
        raise ValueError(f"a clip is saved as .mp4 and a single frame as .png; got {path}; leave the ending out")
    return name


def output_path(base: Path, request: Request, many: bool) -> Path:
    """NAME.mp4 for one prompt in one process, else idx=I_rank=R_NAME.mp4; .png for one frame.

    base : from `output_name`.
    """
    name = base.name + (".png" if request.num_video_frames == 1 else ".mp4")
    if many:
        name = f"idx={request.index}_rank={parallel.rank()}_{name}"
    return base.with_name(name)


def of_any_process(path: Path) -> list[Path]:
    """The existing files of this prompt, whichever process wrote them."""
    name = re.sub(r"^(idx=\d+_rank=)\d+_", r"\1\\d+_", re.escape(path.name))
    return [file for file in path.parent.iterdir() if re.fullmatch(name, file.name)]


def sidecar_of(path: Path) -> Path:
    return Path(f"{path}.json")


def latent_of(path: Path) -> Path:
    return Path(f"{path}.safetensors")


def write_given(stem: Path, videos: Sequence[np.ndarray], fps: float) -> tuple[str, ...]:
    """Files of pictures and clips, uint8 [T, H, W, 3], for `Request.given`: STEM-0.png or .mp4, and so on."""
    paths = []
    for i, frames in enumerate(videos):
        suffix = ".png" if len(frames) == 1 else ".mp4"
        paths.append(f"{stem}-{i}{suffix}")
        write_atomically(paths[-1], video.compressed(frames, fps)[1])
    return tuple(paths)


def read_clip(path: Path) -> Generated:
    """A clip that was saved with its latent; the frames are those of the file.

    Raises
    ------
    FileNotFoundError, ValueError : a file of it is missing, or is not ours.
    """
    sidecar = plain(sidecar_of(path))
    ((_, settings),) = read_prompts(sidecar)
    request = Request(**settings)
    latent = load(plain(latent_of(path)).read_bytes())["latent"]
    still = request.num_video_frames == 1
    frames = video.read_image(path) if still else video.read_video(path)[0]
    return Generated(frames, request, latent, read_json(sidecar))


def settings_of(request: Request) -> dict:
    """The request as in its sidecar: its fields, and the hashes of the files that it starts from."""
    hashes = [sha256(Path(path)) for path in request.inputs]
    return {**request.model_dump(), "init_sha256": " ".join(hashes) or None}


def finished_before(path: Path, request: Request, made_by: Mapping) -> bool:
    """Whether `path`, or the same prompt's file of another process, exists with a sidecar of exactly this request.

    made_by : the sidecar's other inputs of a clip: checkpoint and ema.
    """
    wanted = json.loads(json.dumps({**settings_of(request), **made_by}))
    for clip in of_any_process(path):
        record = read_json(sidecar_of(clip))
        if wanted == {name: record.get(name) for name in wanted}:
            return True
    return False


def check_replay(sidecar: Path, request: Request, made_by: Mapping) -> None:
    """ValueError if a sidecar's clip has other weights or another input. made_by : as for `finished_before`."""
    record = read_json(sidecar)
    now = {**settings_of(request), **made_by}
    inputs = f"the file {' '.join(request.inputs)}"
    for name, what in {"checkpoint": "--checkpoint-path", "ema": "--ema", "init_sha256": inputs}.items():
        before = _sha256_of(record.get(name, now[name])) or "none"
        given = _sha256_of(now[name]) or "none"
        if before != given:
            raise ValueError(f"{what} must be that of the clip of {sidecar}, {before}; got {given}")


def _sha256_of(value: Any) -> Any:
    """The checksum of a file's entry; any other value is itself."""
    return value.get("sha256") if isinstance(value, dict) else value


def replay_verdict(sidecar: Path, path: Path) -> str:
    """Whether the clip at `path`, made again from a sidecar, has the same bits; the end of the line that reports it."""
    before = read_json(sidecar).get("latent_sha256")
    if before is None:  # it is of no clip
        return ""
    if before == read_json(sidecar_of(path)).get("latent_sha256"):
        return f", bit for bit the clip of {sidecar}"
    return f"; its latent differs from that of {sidecar}"
