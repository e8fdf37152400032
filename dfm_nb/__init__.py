"""dfm_nb: from captioned images and clips to a trained text-to-video Diffusion Transformer and finished mp4s.

The pipeline, in order; each arrow is a module:

    sources -> tokenizers + text_encoders -> shards -> dataset (packing) -> dit + edm -> train (checkpoint)
            -> generate (samplers) -> tokenizers -> video

and, for text, `text.corpus` (JSONL -> Megatron .bin/.idx) and `text.blend` (weighted blends, the packed loader).
"""

__version__ = "0.2.0"
