"""`cosmos_cv`: nvidia/Cosmos-0.1-Tokenizer-CV4x8x8, the published TorchScript encoder.jit and decoder.jit.

Video [B, 3, 1 + 4k, H, W] in [-1, 1] becomes latents [B, 16, 1 + k, H/8, W/8], and back, in the file's own arithmetic;
a bfloat16 file runs in float32 on CPU. Only the half that is used is loaded.

Both halves are causal, and their temporal attention sees every earlier frame. So clips are coded whole, unless memory
is short or `tokenizer_window` asks for windows: those overlap, but frames before a window are forgotten, and what
follows the first window differs from a one-pass result.
"""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch import Tensor

from dfm_nb.base import geometry, hub
from dfm_nb.base.files import sha256
from dfm_nb.base.log import log
from dfm_nb.base.machine import GIB, available_bytes
from dfm_nb.base.options import Options, option


class Flags(Options):
    tokenizer_window: Annotated[int, AfterValidator(geometry.window_frames)] | None = option(
        None, "cosmos_cv: encode in overlapping windows of this many frames; default: whole clips if memory allows"
    )


SHORT_SIDE_PX = 512
HUB_ID = "nvidia/Cosmos-0.1-Tokenizer-CV4x8x8"
HOW_TO_FETCH = (
    f"with internet access, run `hf download {HUB_ID} encoder.jit decoder.jit --local-dir DIR`, "
    "then pass --tokenizer-cache-dir DIR"
)
HALVES = ("decoder", "encoder")
SPATIAL, TEMPORAL = geometry.PX_PER_LATENT, geometry.FRAMES_PER_LATENT
VALUES_PER_PX = 96
VALUES_PER_PAIR = 3
"""Values held per pixel. The decoder's tensors are 32, the encoder's 20 (the published source at full width); with the
workspace of convolutions a process grew by up to 91. Spatial attention holds pairs of latent pixels."""
WINDOW_FRAMES = 49  # of a clip that does not fit whole
OVERLAP_LATENTS = 3  # of a window, seen again by the next
Half = tuple[torch.jit.ScriptModule, torch.dtype]
"""The encoder or the decoder, and the dtype that it takes."""
_checksum = functools.cache(sha256)


def memory_bytes(latent_frames: int, area: int, bytes_per_number: int) -> int:
    """Bytes that a half needs for a clip (or its tiles) with `area` latent pixels per frame."""
    per_frame = TEMPORAL * SPATIAL**2 * VALUES_PER_PX + area * VALUES_PER_PAIR
    return latent_frames * area * per_frame * bytes_per_number


def _in_float32(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """A half-precision trace in float32: its parameters, and the dtypes that tracing wrote into the code as numbers.

    torch has no bfloat16 pooling on CPU, and no public way to change a trace: `.float()` leaves `x.to(dtype=15)` in
    its graph. So each argument named dtype is replaced there, through `_c` and `_C.parse_schema` of torch 2.13.
    """
    half = {5, 15}  # float16 and bfloat16, as TorchScript numbers dtypes; 6 is float32
    for part in module.modules():
        code: Any = part._c
        for method in code._method_names():
            graph = code._get_method(method).graph
            for node in (n for n in list(graph.nodes()) if not n.kind().startswith("prim::")):
                arguments = torch._C.parse_schema(node.schema()).arguments
                for i, (argument, value) in enumerate(zip(arguments, node.inputs())):
                    if argument.name == "dtype" and value.toIValue() in half:
                        graph.setInsertPoint(node)
                        node.replaceInput(i, graph.insertConstant(6))
    return module.float()


class CosmosCV:
    """See the module.

    path : a folder with encoder.jit and decoder.jit, a hub cache folder (made when it is not there), or None for the
        default cache.
    tokenizer_window : encode and decode in windows of this many frames (1 + 4k, 17 or more); None: whole clips where
        memory allows, else 49.
    """

    name = "cosmos_cv"

    def __init__(self, path: str | Path | None = None, device: str = "cpu", tokenizer_window: int | None = None):
        self.path = path
        self.device = torch.device(device)
        self.window = tokenizer_window
        self._halves: dict[str, Half] = {}
        # clips of one size are coded alike
        self._fits: dict[tuple[str, geometry.Size], bool] = {}

    def _file(self, name: str) -> Path:
        """encoder.jit or decoder.jit: in the folder `path`, else from the hub, with `path` as the cache folder."""
        folder = Path(self.path).expanduser() if self.path is not None else None
        if folder is not None and (folder / f"{name}.jit").is_file():
            return folder / f"{name}.jit"
        return hub.hub_file(HUB_ID, f"{name}.jit", HOW_TO_FETCH, cache_dir=folder)

    def _half(self, name: str) -> Half:
        """The module and the dtype that it takes; ValueError when a probe of 5 frames does not come out right."""
        if name not in self._halves:
            path = self._file(name)
            pixels, latents = [1, 3, 5, 64, 64], [1, geometry.LATENT_CHANNELS, 2, 8, 8]
            given, wanted = (pixels, latents) if name == "encoder" else (latents, pixels)
            try:
                module = torch.jit.load(str(path), map_location=self.device).eval()
                dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
                if self.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
                    module, dtype = _in_float32(module), torch.float32
                made = list(self._run((module, dtype), torch.zeros(given)).shape)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                why = str(error).strip().split("\n")[-1]
                raise ValueError(f"{path} does not load or run on {self.device} ({why}); fetch it again") from None
            if made != wanted:
                raise ValueError(
                    f"{path} is not the {name} of {HUB_ID}, which makes {wanted} of {given}, not {made}; fetch it again"
                )
            self._halves[name] = module, dtype
        return self._halves[name]

    @torch.no_grad()
    def _run(self, half: Half, x: Tensor) -> Tensor:
        """What a half makes of x, float32."""
        module, dtype = half
        out = module(x.to(self.device, dtype))
        return (out if isinstance(out, Tensor) else out[0]).float()

    def encode(self, video: Tensor) -> Tensor:
        """[B, 3, 1 + 4k, H, W] in [-1, 1] -> float32 [B, 16, 1 + k, H/8, W/8]."""
        parts = []
        for start, stop, drop in self._windows("encoder", geometry.latent_size(*video.shape[2:])):
            frames = video[:, :, TEMPORAL * start : TEMPORAL * (stop - 1) + 1]
            parts.append(self._run(self._half("encoder"), frames)[:, :, drop:])
        return torch.cat(parts, 2)

    def decode(self, latents: Tensor) -> Tensor:
        """[B, 16, 1 + k, h, w] -> float32 [B, 3, 1 + 4k, 8h, 8w]."""
        return torch.cat(list(self.decode_windows(latents)), 2)

    def decode_windows(self, latents: Tensor, window: int | None = None) -> Iterator[Tensor]:
        """`decode` in pieces along time, one window's frames each. window : as `tokenizer_window`."""
        t, h, w = latents.shape[2:]
        for start, stop, drop in self._windows("decoder", (t, h, w), window):
            frames = self._run(self._half("decoder"), latents[:, :, start:stop])
            yield frames[:, :, TEMPORAL * (drop - 1) + 1 if drop else 0 :]

    def _windows(self, name: str, size: geometry.Size, window: int | None = None) -> list[tuple[int, int, int]]:
        """(start, stop, how many leading latent frames to drop) of each window of a clip whose latents are [t, h, w].

        Of 10 latent frames in windows of 5 that overlap by 3: (0, 5, 0), (2, 7, 3), (4, 9, 3), (6, 10, 3).
        """
        count = size[0]
        frames = window or self.window
        if frames is None:
            frames = geometry.pixel_size(*size)[0] if self._fits_whole(name, size) else WINDOW_FRAMES
        latents = geometry.latent_size(frames, SPATIAL, SPATIAL)[0]
        # a clip that is shorter than the overlap is one window
        starts = range(0, max(1, count - OVERLAP_LATENTS), max(1, latents - OVERLAP_LATENTS))
        return [(start, min(start + latents, count), OVERLAP_LATENTS if start else 0) for start in starts]

    def _fits_whole(self, name: str, size: geometry.Size) -> bool:
        """Whether free memory holds a clip of this size; decided once for each size, with a warning if it does not."""
        if (name, size) not in self._fits:
            t, h, w = size
            needed = memory_bytes(t, h * w, self._half(name)[1].itemsize)
            free = available_bytes(self.device)
            self._fits[name, size] = needed <= free
            pixels = geometry.pixel_size(*size)
            if needed > free and pixels[0] > WINDOW_FRAMES:
                log.warning(
                    f"a clip of {'x'.join(map(str, pixels))} (frames, px) does not fit the {name} whole "
                    f"({needed / GIB:.3g} GiB estimated, {free / GIB:.3g} free), so it is coded in windows of "
                    f"{WINDOW_FRAMES} frames, which changes what follows the first; --tokenizer-window sets how many"
                )
        return self._fits[name, size]

    def identity(self) -> dict:
        """Name, origin and the sha256 of both halves, each and together, whichever is used."""
        files = {name: _checksum(self._file(name)) for name in HALVES}
        both = hashlib.sha256("".join(files.values()).encode()).hexdigest()
        return {"name": self.name, "version": HUB_ID, "sha256": both, "files": files}


build = CosmosCV
