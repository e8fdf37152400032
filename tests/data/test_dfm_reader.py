"""Our folders, read as NeMo DFM's `DiTTaskEncoder` reads its own: its sample contract, written from its source.

Energon's own loader and decoder bring `.pth`, `.pickle` and `.json` decoded: a latent [1, C, T, H, W] of numbers below
1,000, with an even H and W, and a text of at most 512 rows.
"""

from dataclasses import dataclass

import pytest
import torch
from megatron import energon

from dfm_nb.data.stores import ShardStore


@dataclass
class Decoded(energon.Sample):
    latent: torch.Tensor
    text: torch.Tensor
    info: dict


@energon.stateless
def cook(raw: dict) -> Decoded:
    return Decoded(**energon.basic_sample_keys(raw), latent=raw["pth"], text=raw["pickle"], info=raw["json"])


class TaskEncoder(energon.DefaultTaskEncoder):
    cookers = [energon.Cooker(cook)]

    @energon.stateless
    def batch(self, samples: list[Decoded]) -> Decoded:
        return samples[0]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tiny_data", "tiny_edits"])
def test_task_encoder_of_nemo_dfm_reads_our_folder(folder, request):
    """It does not look at what is given beside a sample."""
    tiny_data = request.getfixturevalue(folder)
    workers = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    how = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, "task_encoder": TaskEncoder()}
    data = energon.get_train_dataset(tiny_data, worker_config=workers, batch_size=1, **how)
    store, seen, samples = ShardStore(tiny_data), {}, iter(energon.get_savable_loader(data))
    while len(seen) < len(store):
        sample = next(samples)
        seen[sample.__key__.rpartition("/")[2]] = sample
    assert set(seen) == set(store.keys) and len(store) > 10
    for index, key in enumerate(store.keys):
        clip, sample = store.read(index), seen[key]
        *_, h, w = sample.latent.shape
        assert torch.equal(sample.latent, clip.latent) and torch.equal(sample.text, clip.text_emb)
        assert sample.latent.dtype == torch.bfloat16 and sample.latent.shape[:2] == (1, 16)
        assert sample.latent.abs().max() < 1e3 and h % 2 == w % 2 == 0
        assert sample.text.shape[1] == sample.info["text_tokens"] <= 512 and sample.info["caption"]
        assert (sample.info["image_height"], sample.info["image_width"]) == (8 * h, 8 * w)
