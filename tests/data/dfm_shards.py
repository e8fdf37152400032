"""Shards as NeMo DFM's `prepare_energon_dataset_butterfly.py` writes them, made by its documented layout.

One `rank{r}-%06d.tar` a process through `webdataset.ShardWriter`. A sample has `.pth`, the bf16 latent
[1, 16, T, H, W]; `.pickle`, the bf16 text states [1, 512, D] by way of float16, with zeros after the caption's own; and
`.json` with `image_height` and `image_width`. These are taken from a [B, C, T, H, W] tensor by the positions of
[B, T, H, W]: the first holds the number of frames, and the second the height. There is no caption in it.
"""

import pickle
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from transformers import AutoTokenizer, T5EncoderModel

from tests.data import encoder_files

TEXT_ROWS = 512
CAPTIONS = ("a blue butterfly", "a red butterfly over a meadow", "blue", "a butterfly over a red meadow")


def make(folder: Path) -> None:
    """`cosmos`, `t5`, what the script writes with them, `data`, and `butterflies`."""
    for name in ("cosmos", "t5"):
        (folder / name).mkdir(parents=True)
    encoder_files.save_butterflies(folder / "butterflies")
    Writer(encoder_files.save_cosmos(folder / "cosmos"), encoder_files.save_t5(folder / "t5")).write(folder / "data")


class Writer:
    """The script's two encoders on the CPU. cosmos : a folder with encoder.jit. t5 : a T5 folder."""

    def __init__(self, cosmos: Path, t5: Path):
        self.autoencoder = torch.jit.load(str(cosmos / "encoder.jit"))
        self.tokenizer, self.encoder = AutoTokenizer.from_pretrained(t5), T5EncoderModel.from_pretrained(t5).eval()

    @torch.no_grad()
    def text(self, caption: str) -> torch.Tensor:
        """bfloat16 [1, 512, D], zeros after the caption."""
        batch = self.tokenizer([caption], return_tensors="pt", padding="max_length", max_length=TEXT_ROWS)
        states = self.encoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        length = int(batch.attention_mask.sum())
        out = torch.zeros(1, TEXT_ROWS, states.shape[-1], dtype=torch.bfloat16)
        out[0, :length] = torch.tensor(states[0, :length].numpy().astype(np.float16), dtype=torch.bfloat16)
        return out

    @torch.no_grad()
    def sample(self, index: int, frames: int, height: int, width: int) -> dict:
        video = np.random.default_rng(index).integers(0, 256, (1, 3, frames, 1, 1)) + np.zeros((height, width))
        video = torch.from_numpy(video / 255 * 2 - 1)
        latent = self.autoencoder(video.float())[0]
        return {
            "__key__": f"{index:06}",
            "pth": latent.to(dtype=torch.bfloat16),
            "pickle": pickle.dumps(self.text(CAPTIONS[index % len(CAPTIONS)])),
            "json": {"image_height": video.shape[2], "image_width": video.shape[3]},
        }

    def write(self, folder: Path, counts: tuple[int, ...] = (6, 6), sizes=((1, 32, 48), (1, 48, 32), (5, 32, 32))):
        """`counts` samples of each rank, of (frames, height, width) in turn; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        index = 0
        for rank, count in enumerate(counts):
            with wds.ShardWriter(str(folder / f"rank{rank}-%06d.tar"), maxcount=10000, verbose=0) as sink:
                for _ in range(count):
                    sink.write(self.sample(index, *sizes[index % len(sizes)]))
                    index += 1
        return folder
