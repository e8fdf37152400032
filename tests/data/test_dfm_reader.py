"""Our folders, read as NeMo DFM's `DiTTaskEncoder` reads its own: its sample contract, written anew from its source.

Energon's own loader, decoder and packing bring `.pth`, `.pickle` and `.json` decoded. A latent [1, C, T, H, W] becomes
tokens (T, H/2, W/2) of (2, 2, 1, C) numbers; tokens and text rows are padded to multiples of 64; samples are packed by
first fit, longest first, into `task_encoder_seq_length` tokens.
"""

from dataclasses import dataclass

import pytest
import torch
from einops import rearrange
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SkipSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from dfm_nb import prepare
from dfm_nb.data.stores import EnergonStore

PATCH, MULTIPLE, SEQ_LENGTH, TEXT_ROWS = 2, 64, 512, 512


@dataclass
class DiffusionSample(Sample):
    video: torch.Tensor  # [tokens, 4 C], padded
    context_embeddings: torch.Tensor  # [rows, D], padded
    pos_ids: torch.Tensor
    seq_len_q: torch.Tensor
    seq_len_q_padded: torch.Tensor
    seq_len_kv: torch.Tensor
    seq_len_kv_padded: torch.Tensor
    latent_shape: torch.Tensor
    video_metadata: object


@stateless
def cook(sample: dict) -> dict:
    return {**basic_sample_keys(sample), **{part: sample[part] for part in ("json", "pth", "pickle")}}


def padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, -len(rows) % MULTIPLE))


class TaskEncoder(DefaultTaskEncoder):
    cookers = [Cooker(cook)]

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: dict) -> DiffusionSample:
        latent = sample["pth"]
        if not latent.isfinite().all() or latent.abs().max() > 1e3:
            raise SkipSample()
        latent = latent.squeeze(0)
        c, t, h, w = latent.shape
        tokens = rearrange(latent, "C T (H ph) (W pw) -> (T H W) (ph pw C)", ph=PATCH, pw=PATCH)
        if len(tokens) > SEQ_LENGTH:
            raise SkipSample()
        text = sample["pickle"].cpu().float().numpy()
        text = torch.from_numpy(text[0] if text.shape[0] == 1 else text).to(torch.bfloat16)[:TEXT_ROWS]
        positions = torch.cartesian_prod(torch.arange(t), torch.arange(h // PATCH), torch.arange(w // PATCH))
        lengths = [torch.tensor([n], dtype=torch.int32) for n in (len(tokens), len(text))]
        video, context = padded(tokens), padded(text)
        return DiffusionSample(
            __key__=sample["__key__"],
            __restore_key__=sample["__restore_key__"],
            __subflavors__=sample["__subflavors__"],
            video=video,
            context_embeddings=context,
            pos_ids=padded(positions),
            seq_len_q=lengths[0],
            seq_len_q_padded=torch.tensor([len(video)], dtype=torch.int32),
            seq_len_kv=lengths[1],
            seq_len_kv_padded=torch.tensor([len(context)], dtype=torch.int32),
            latent_shape=torch.tensor([[c, t, h, w]], dtype=torch.int32),
            video_metadata=[sample["json"]],
        )

    def select_samples_to_pack(self, samples: list[DiffusionSample]) -> list[list[DiffusionSample]]:
        bins: list[list[DiffusionSample]] = []
        for sample in sorted(samples, key=lambda s: -len(s.video)):
            room = (b for b in bins if sum(len(s.video) for s in b) + len(sample.video) <= SEQ_LENGTH)
            found = next(room, None)
            if found is None:
                bins.append([sample])
            else:
                found.append(sample)
        return bins

    @stateless
    def pack_selected_samples(self, samples: list[DiffusionSample]) -> DiffusionSample:
        first = vars(samples[0])
        tensors = {k: torch.cat([getattr(s, k) for s in samples]) for k, v in first.items() if torch.is_tensor(v)}
        return DiffusionSample(
            __key__=",".join(s.__key__ for s in samples),
            __restore_key__=(),
            __subflavors__=samples[0].__subflavors__,
            video_metadata=[info for s in samples for info in s.video_metadata],
            **tensors,
        )

    @stateless
    def batch(self, samples: list[DiffusionSample]) -> DiffusionSample:
        return samples[0]  # a batch is one pack

    @stateless
    def encode_batch(self, batch: DiffusionSample) -> DiffusionSample:
        return batch


@pytest.mark.slow
def test_task_encoder_of_nemo_dfm_reads_and_packs_our_folder(tmp_path):
    folder = tmp_path / "data"
    size = ["--num-images", "7", "--num-clips", "3", "--short-side", "32", "--val-fraction", "0"]
    assert prepare.main(["--source", "synthetic", *size, "--output-dir", str(folder)]) == 0
    data = get_train_dataset(
        folder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        packing_buffer_size=10,
        task_encoder=TaskEncoder(),
    )
    store, seen, packs = EnergonStore(folder), {}, iter(get_savable_loader(data))
    while len(seen) < len(store):
        pack = next(packs)
        assert len(pack.video) == len(pack.pos_ids) == pack.seq_len_q_padded.sum() <= SEQ_LENGTH
        q = torch.cat((torch.zeros(1, dtype=torch.int32), pack.seq_len_q_padded.cumsum(0)))
        kv = torch.cat((torch.zeros(1, dtype=torch.int32), pack.seq_len_kv_padded.cumsum(0)))
        for i, key in enumerate(pack.__key__.split(",")):
            seen[key.rpartition("/")[2]] = (
                pack.video[q[i] : q[i] + pack.seq_len_q[i]],
                pack.context_embeddings[kv[i] : kv[i] + pack.seq_len_kv[i]],
                pack.pos_ids[q[i] : q[i] + pack.seq_len_q[i]],
                pack.latent_shape[i].tolist(),
                pack.video_metadata[i],
            )
    assert set(seen) == set(store.keys) and len(store) == 10
    for index, key in enumerate(store.keys):
        clip = store.read(index)
        tokens, text, positions, (c, t, h, w), info = seen[key]
        latent = rearrange(tokens, "(T H W) (ph pw C) -> 1 C T (H ph) (W pw)", T=t, H=h // PATCH, ph=PATCH, pw=PATCH)
        assert clip.latent.dtype == latent.dtype == torch.bfloat16 and c == 16
        assert torch.equal(latent, clip.latent) and positions[-1].tolist() == [t - 1, h // PATCH - 1, w // PATCH - 1]
        length = info["text_tokens"]
        assert len(text) == length and torch.equal(text, clip.text_emb[0])
        assert (info["image_height"], info["image_width"]) == (8 * h, 8 * w) and info["caption"]
