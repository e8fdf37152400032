"""`cosmos_cv`: nvidia/Cosmos-0.1-Tokenizer-CV4x8x8, the published TorchScript encoder.jit and decoder.jit.

Video [B, 3, 1 + 4k, H, W] in [-1, 1] becomes latents [B, 16, 1 + k, H/8, W/8], and back; bfloat16 on CUDA, float32 on
CPU. Only the half that is used is loaded. Memory is bounded by a window of frames (and, when asked, a spatial tile).
Windows overlap: latents that saw enough of the past are kept, those at a window's start are thrown away.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from dfm_nb.base.files import sha256
from dfm_nb.base.geometry import FRAMES_PER_LATENT, PX_PER_LATENT, check_codable, check_latents, latent_size
from dfm_nb.base.plugins import Flag

FLAGS = (Flag("tile_px", "cosmos_cv: encode in overlapping tiles of this many px a side; default whole frames", int),)
SHORT_SIDE_PX = 512
HUB_ID = "nvidia/Cosmos-0.1-Tokenizer-CV4x8x8"
SPATIAL, TEMPORAL = PX_PER_LATENT, FRAMES_PER_LATENT
WINDOW_LATENTS = 13  # 49 frames, the length the tokenizer was trained with
OVERLAP_LATENTS = 3
TILE_OVERLAP = 8  # latent pixels
_checksum = functools.cache(sha256)


def _find(name: str, path: str | Path | None) -> Path:
    """encoder.jit or decoder.jit: in a folder, a cache folder, or on the hub."""
    hub_id, cache = HUB_ID, None
    if path is not None:
        folder = Path(path)
        if (folder / name).is_file():
            return folder / name
        if folder.is_dir():
            cache = str(folder)
        else:
            hub_id = str(path)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, name, cache_dir=cache))
    except Exception as error:
        where = f" in {path}" if path else ""
        raise FileNotFoundError(
            f"{name} of {HUB_ID} was not found{where} and cannot be fetched ({type(error).__name__}); "
            f"where there is a network, run `hf download {HUB_ID} encoder.jit decoder.jit --local-dir DIR`, "
            "then pass --tokenizer-cache-dir DIR"
        ) from None


def _windows(count: int, size: int, overlap: int) -> list[tuple[int, int, int]]:
    """(start, stop, how many leading entries to drop) of windows over `count` latent frames."""
    if count <= size:
        return [(0, count, 0)]
    out, start = [(0, size, 0)], size - overlap
    while out[-1][1] < count:
        stop = min(start + size, count)
        out.append((start, stop, overlap))
        start = stop - overlap
    return out


class CosmosCV:
    """See the module; bfloat16 on CUDA, else float32.

    path : a folder with encoder.jit and decoder.jit, a hub cache folder, a hub id, or None for the default cache.
    tile_px : encode and decode in tiles of this many pixels a side (a multiple of 8), blended where they overlap.
    """

    name = "cosmos_cv"

    def __init__(self, path: str | Path | None = None, device: str = "cpu", tile_px: int | None = None):
        if tile_px is not None and (tile_px % SPATIAL or tile_px < 2 * TILE_OVERLAP * SPATIAL):
            raise ValueError(
                f"tile_px must be a multiple of 8 and at least {2 * TILE_OVERLAP * SPATIAL}; got {tile_px}"
            )
        self.path, self.device = path, torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.tile = tile_px // SPATIAL if tile_px else None
        self._halves: dict[str, torch.jit.ScriptModule] = {}
        self._files: dict[str, Path] = {}

    def _half(self, name: str):
        if name not in self._halves:
            self._files[name] = _find(f"{name}.jit", self.path)
            try:
                module = torch.jit.load(str(self._files[name]), map_location=self.device)
            except RuntimeError as error:
                why = str(error).strip().split("\n")[0]
                raise ValueError(f"{self._files[name]} is not a TorchScript file ({why}); fetch it again") from None
            self._halves[name] = module.to(self.dtype).eval()
        return self._halves[name]

    @torch.no_grad()
    def _call(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = self._half(name)(x.to(self.device, self.dtype))
        return (out if isinstance(out, torch.Tensor) else out[0]).float()

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """[B, 3, 1 + 4k, H, W] in [-1, 1] -> float32 [B, 16, 1 + k, H/8, W/8]."""
        check_codable(video.shape)
        parts = []
        for start, stop, drop in _windows(latent_size(*video.shape[2:])[0], WINDOW_LATENTS, OVERLAP_LATENTS):
            frames = video[:, :, TEMPORAL * start : TEMPORAL * (stop - 1) + 1]
            parts.append(self._tiled("encoder", frames, SPATIAL, 1)[:, :, drop:])
        return torch.cat(parts, 2)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, 16, 1 + k, h, w] -> float32 [B, 3, 1 + 4k, 8h, 8w]."""
        return torch.cat(list(self.decode_windows(latents)), 2)

    def decode_windows(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """`decode` in pieces along time, one window's frames each."""
        check_latents(latents.shape)
        for start, stop, drop in _windows(latents.shape[2], WINDOW_LATENTS, OVERLAP_LATENTS):
            frames = self._tiled("decoder", latents[:, :, start:stop], 1, SPATIAL)
            yield frames[:, :, TEMPORAL * (drop - 1) + 1 if drop else 0 :]

    def _tiled(self, name: str, x: torch.Tensor, unit_in: int, unit_out: int) -> torch.Tensor:
        """Run a half, in spatial tiles when asked; `unit_*` is the size of a latent pixel going in and coming out."""
        h, w = x.shape[-2] // unit_in, x.shape[-1] // unit_in
        if self.tile is None or max(h, w) <= self.tile:
            return self._call(name, x)
        total = weight = torch.empty(0)
        rows, columns = (_windows(n, self.tile, TILE_OVERLAP) for n in (h, w))
        for top, bottom, _ in rows:
            for left, right, _ in columns:
                part = self._call(name, x[..., top * unit_in : bottom * unit_in, left * unit_in : right * unit_in])
                down, across = (_ramp(n, TILE_OVERLAP * unit_out).to(part) for n in part.shape[-2:])
                ramp = down[:, None] * across
                if not total.numel():  # the first part says what channels and frames come out
                    total = part.new_zeros(*part.shape[:-2], h * unit_out, w * unit_out)
                    weight = part.new_zeros(h * unit_out, w * unit_out)
                window = (..., slice(top * unit_out, bottom * unit_out), slice(left * unit_out, right * unit_out))
                total[window] += part * ramp
                weight[window] += ramp
        return total / weight

    def identity(self) -> dict:
        """Name, origin and the sha256 of each half that was loaded."""
        return {
            "name": self.name,
            "version": HUB_ID,
            "files": {n: _checksum(p) for n, p in sorted(self._files.items())},
        }


def _ramp(length: int, overlap: int) -> torch.Tensor:
    """1 in the middle, falling linearly towards both ends over `overlap`; never 0."""
    edge = (torch.arange(length) + 1.0).clamp(max=overlap) / overlap
    return torch.minimum(edge, edge.flip(0))


build = CosmosCV
