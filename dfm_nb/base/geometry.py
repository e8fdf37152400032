"""Sizes of a clip in pixels and in latents: every rule of the 4x8x8 tokenizers and the network's patch, in one place.

A tokenizer encodes the first frame alone, then every group of 4 frames; 8x8 pixels become one latent pixel. So a
clip has 1 + 4k frames, and with the network's patch of 2 latent pixels its sides are multiples of 16 px.
"""

FRAMES_PER_LATENT = 4
PX_PER_LATENT = 8
LATENT_CHANNELS = 16
SIDE_MULTIPLE = 2 * PX_PER_LATENT
"""Sides in px: one patch of the network is 2 x 2 latent pixels."""
Size = tuple[int, int, int]
"""Frames, height and width, in px or in latent pixels."""


def is_frame_count(frames: int) -> bool:
    """Whether a clip can have this number of frames: 1 + 4k."""
    return frames >= 1 and (frames - 1) % FRAMES_PER_LATENT == 0


def floor_frames(frames: int) -> int:
    """The largest 1 + 4k that is not above `frames`, and at least 1."""
    return 1 + max(0, frames - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT


def round_frames(frames: int) -> int:
    """The nearest 1 + 4k, the larger of two: 9 for 10, 13 for 11."""
    return floor_frames(frames + FRAMES_PER_LATENT // 2)


def nearest_frames(frames: int) -> str:
    """The valid counts around an invalid one, for a message: `9 or 13`."""
    low = floor_frames(frames)
    return f"{low} or {low + FRAMES_PER_LATENT}"


def window_frames(frames: int) -> int:
    """Frames of a window that a tokenizer codes by itself: 5 latent frames at least, as 3 are seen by the next too."""
    if frames < 17 or not is_frame_count(frames):
        raise ValueError(f"must be 1 + 4k frames, 17 or more; got {frames}")
    return frames


def is_side(px: int) -> bool:
    """Whether a clip can have this height or width in px: a positive multiple of 16."""
    return px >= SIDE_MULTIPLE and px % SIDE_MULTIPLE == 0


def nearest_multiples(value: int, step: int) -> str:
    """The positive multiples around a value, for a message: `64 or 80`."""
    down = max(1, value // step) * step
    up = max(1, -(-value // step)) * step
    return f"{down}" if down == up else f"{down} or {up}"


def latent_size(frames: int, height_px: int, width_px: int) -> Size:
    """Latent (T, H, W) of a clip of 1 + 4k frames whose sides are multiples of 8 px."""
    return 1 + (frames - 1) // FRAMES_PER_LATENT, height_px // PX_PER_LATENT, width_px // PX_PER_LATENT


def pixel_size(t: int, h: int, w: int) -> Size:
    """(frames, height, width in px) of a latent; the inverse of `latent_size`."""
    return 1 + (t - 1) * FRAMES_PER_LATENT, h * PX_PER_LATENT, w * PX_PER_LATENT
