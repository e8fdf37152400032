"""The most that a file of somebody else's may ask for. Readers compare with it before they allocate."""

MOST_STEPS = 10_000
"""Of a sampler; a checkpoint, a sidecar or the comment of a picture may name any number."""
MOST_GIVEN = 16
"""Pictures and clips given with a sample: sets of edits have one to five, models take up to ten."""
MAX_BYTES = 1 << 30
"""Decoded pixels of a picture, animation, video or clip, or of all that is given with a sample."""
MAX_ASPECT = 8.0
"""Of a picture, and of a pixel of a video, which players make square."""
MOST_BYTES = 1 << 28
"""Of a file that is read whole; a JSON object takes eight times its own bytes in memory."""
MOST_CELLS = 1 << 24
"""Of a table whose rows name few of its columns; 128 MiB."""
MOST_ROWS = 1 << 25
"""Of a parquet file; those of LAION have 18 million."""
MOST_HEADER = 100 * 10**6
"""Bytes of the header of a `.safetensors`; the limit of safetensors itself."""
MOST_TEXT = 1 << 20
"""Characters of a caption with its tags; bytes of a sample's .json or of a configuration, which are parsed slowly."""
MOST_SHARDS = 1 << 17
"""Names that patterns such as `a-{000..127}.tar` stand for."""
MOST_DEPTH = 100
"""Of JSON. Parsers go to about 1,000, and printing or checking the value then fails."""
MOST_LAYERS = 1000
"""Of a network; the numbers of a tensor of [N, 0] take no bytes."""
MOST_PACKS = 1 << 17
"""In a window of steps, which are planned together when training starts or resumes."""
