"""Our folders, read as NeMo DFM's `DiTTaskEncoder` reads its own: its sample contract, written from its source.

Energon's own loader and decoder bring `.pth`, `.pickle` and `.json` decoded. A latent [1, C, T, H, W] becomes tokens
(T, H/2, W/2) of (2, 2, 1, C) numbers, and the text a matrix of at most 512 rows.
"""

from dataclasses import dataclass

import pytest
import torch
from einops import rearrange
from megatron import energon

from dfm_nb import prepare
from dfm_nb.data.stores import EnergonStore

PATCH, SEQ_LENGTH, TEXT_ROWS = 2, 512, 512


@dataclass
class DiffusionSample(energon.Sample):
    video: torch.Tensor  # [tokens, 4 C]
    context_embeddings: torch.Tensor  # [rows, D]
    latent_shape: tuple[int, ...]
    video_metadata: dict


@energon.stateless
def cook(sample: dict) -> dict:
    return {**energon.basic_sample_keys(sample), **{part: sample[part] for part in ("json", "pth", "pickle")}}


class TaskEncoder(energon.DefaultTaskEncoder):
    cookers = [energon.Cooker(cook)]

    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample: dict) -> DiffusionSample:
        latent = sample["pth"]
        if not latent.isfinite().all() or latent.abs().max() > 1e3:
            raise energon.SkipSample()
        latent = latent.squeeze(0)
        tokens = rearrange(latent, "C T (H ph) (W pw) -> (T H W) (ph pw C)", ph=PATCH, pw=PATCH)
        if len(tokens) > SEQ_LENGTH:
            raise energon.SkipSample()
        text = sample["pickle"].cpu().float().numpy()
        text = torch.from_numpy(text[0] if text.shape[0] == 1 else text).to(torch.bfloat16)[:TEXT_ROWS]
        keys = {name: sample[name] for name in ("__key__", "__restore_key__", "__subflavors__")}
        return DiffusionSample(
            **keys, video=tokens, context_embeddings=text, latent_shape=latent.shape, video_metadata=sample["json"]
        )

    @energon.stateless
    def batch(self, samples: list[DiffusionSample]) -> DiffusionSample:
        return samples[0]

    @energon.stateless
    def encode_batch(self, batch: DiffusionSample) -> DiffusionSample:
        return batch


@pytest.mark.slow
def test_task_encoder_of_nemo_dfm_reads_our_folder(tmp_path):
    folder = tmp_path / "data"
    size = ["--num-images", "7", "--num-clips", "3", "--short-side", "32", "--val-fraction", "0"]
    assert prepare.main(["--source", "synthetic", *size, "--output-dir", str(folder)]) == 0
    workers = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    how = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, "task_encoder": TaskEncoder()}
    data = energon.get_train_dataset(folder, worker_config=workers, batch_size=1, **how)
    store, seen, samples = EnergonStore(folder), {}, iter(energon.get_savable_loader(data))
    while len(seen) < len(store):
        sample = next(samples)
        seen[sample.__key__.rpartition("/")[2]] = sample
    assert set(seen) == set(store.keys) and len(store) == 10
    for index, key in enumerate(store.keys):
        clip, sample = store.read(index), seen[key]
        c, t, h, w = sample.latent_shape
        back = "(T H W) (ph pw C) -> 1 C T (H ph) (W pw)"
        latent = rearrange(sample.video, back, T=t, H=h // PATCH, ph=PATCH, pw=PATCH)
        assert clip.latent.dtype == latent.dtype == torch.bfloat16 and c == 16
        assert torch.equal(latent, clip.latent) and torch.equal(sample.context_embeddings, clip.text_emb[0])
        info = sample.video_metadata
        assert len(sample.context_embeddings) == info["text_tokens"] and info["caption"]
        assert (info["image_height"], info["image_width"]) == (8 * h, 8 * w)
