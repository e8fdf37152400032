"""dfm_nb: from captioned images and clips to a trained text-to-video Diffusion Transformer and finished mp4s.

The pipeline, in order; each arrow is a module:

    sources -> tokenizers + text_encoders -> shards -> dataset (packing) -> dit + edm -> train (checkpoint)
            -> generate (samplers) -> tokenizers -> video

and, for text, `text.corpus` (JSONL -> Megatron .bin/.idx) and `text.blend` (weighted blends, the packed loader).
"""

import warnings

from dfm_nb import _megatron_import

__version__ = "0.1.0"

# megatron-core says at import what this project does without
warnings.filterwarnings("ignore", message=".*(Transformer Engine|TransformerEngine|Apex).*", category=UserWarning)
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed).*")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(megatron|torch\.jit).*")
warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning)
_megatron_import.install()
