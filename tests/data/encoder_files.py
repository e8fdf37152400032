"""Small encoders saved in the published formats, so that the real loading code runs without a download."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class CosmosEncoder(nn.Module):
    """Causal in time: the latent of the first frame, then the mean of every four."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        pooled = F.avg_pool3d(x, (1, 8, 8))
        first = pooled[:, :, :1]
        rest = pooled[:, :, 1:]
        b, c, t, h, w = rest.shape
        rest = rest.reshape(b, c, t // 4, 4, h, w).mean(3)
        z = torch.cat((first, rest), 2)
        return (z.repeat(1, 6, 1, 1, 1)[:, :16],)


class CosmosDecoder(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = z[:, :3].repeat_interleave(8, 3).repeat_interleave(8, 4)
        return torch.cat((x[:, :, :1], x[:, :, 1:].repeat_interleave(4, 2)), 2)


def save_cosmos(folder: Path) -> Path:
    """encoder.jit and decoder.jit."""
    torch.jit.script(CosmosEncoder()).save(str(folder / "encoder.jit"))
    torch.jit.script(CosmosDecoder()).save(str(folder / "decoder.jit"))
    return folder


def save_t5(folder: Path) -> Path:
    """A random T5 of width 16 with a tokenizer of nine words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = ["<pad>", "</s>", "<unk>", "a", "blue", "red", "butterfly", "over", "meadow"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(words), d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    T5EncoderModel(config).save_pretrained(folder)
    return folder
