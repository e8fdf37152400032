"""Training step: packed DiT on megatron-core against a plain PyTorch DiT of the same shape on padded batches.

    python benchmarks/train_step.py [--rounds 7] [--size DiT-S] [--cases NAME ...]

The plain one is what the DiT paper's code does, with text: one batch padded to its longest sample and caption, boolean
masks, torch SDPA, AdamW, gradient clipping. Both see the same samples on one thread, interleaved in one run: in fp32,
and in bf16 if the CPU multiplies it in hardware (the plain one under `torch.autocast`). The figure compared is useful
tokens (without padding) per second of CPU time. Prints a table and writes benchmarks/results/train_step.{json,md}.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks import report
from benchmarks.report import timed
from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.machine import fast_bf16
from dfm_nb.data.loader import build_pack
from dfm_nb.data.order import PackOrder
from dfm_nb.data.stores import MockStore
from dfm_nb.diffusion import edm
from dfm_nb.model.positions import factorised_sincos
from dfm_nb.training.batches import pack_settings
from dfm_nb.training.trainer import Trainer

SMALL_MIX = [[1, 8, 8], [1, 8, 12], [3, 8, 8], [1, 12, 8], [5, 8, 8], [1, 6, 6]]
CASES = {
    # name: (latent sizes, tokens a step, steps a round)
    "equal sizes, 64 px (16 tokens each)": ([[1, 8, 8]], 1024, 3),
    "equal sizes, 256 px (256 tokens each)": ([[1, 32, 32]], 4096, 1),
    "mixed sizes, 48 to 96 px, 1 to 5 latent frames": (SMALL_MIX, 1024, 3),
}


class PlainLayer(nn.Module):
    def __init__(self, h: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.q, self.kv, self.cross = nn.Linear(h, h), nn.Linear(h, 2 * h), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.adaln = nn.Linear(h, 9 * h)
        self.q_norm, self.k_norm = nn.RMSNorm(h // heads), nn.RMSNorm(h // heads)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, cond, text, mask, text_mask):
        s1, c1, g1, s2, c2, g2, s3, c3, g3 = self.adaln(F.silu(cond))[:, None].chunk(9, -1)
        norm = lambda x, s, c: F.layer_norm(x, x.shape[-1:]) * (1 + c) + s  # noqa: E731
        q, k, v = map(self.split, self.qkv(norm(x, s1, c1)).chunk(3, -1))
        a = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, mask)
        x = x + g1 * self.proj(a.transpose(1, 2).flatten(2))
        q = self.split(self.q(norm(x, s2, c2)))
        k, v = map(self.split, self.kv(text).chunk(2, -1))
        a = F.scaled_dot_product_attention(q, k, v, text_mask)
        x = x + g2 * self.cross(a.transpose(1, 2).flatten(2))
        return x + g3 * self.fc2(F.gelu(self.fc1(norm(x, s3, c3))))


class PlainDiT(nn.Module):
    """One sample a row, padded."""

    def __init__(self, m):
        super().__init__()
        h, p = m.hidden_size, m.in_channels * m.patch_temporal * m.patch_spatial**2
        self.h = h
        self.x, self.text = nn.Linear(p, h), nn.Linear(m.text_dim, h)
        self.text_norm, self.pool = nn.RMSNorm(h), nn.Linear(h, h)
        self.sigma = nn.Sequential(nn.Linear(256, h), nn.SiLU(), nn.Linear(h, h))
        self.fps = nn.Sequential(nn.Linear(256, h), nn.SiLU(), nn.Linear(h, h))
        self.layers = nn.ModuleList(PlainLayer(h, m.num_attention_heads) for _ in range(m.num_layers))
        self.final_adaln, self.final = nn.Linear(h, 2 * h), nn.Linear(h, p)

    @staticmethod
    def wave(v):
        angle = v[:, None] * torch.logspace(-1, 2, 128)
        return torch.cat((angle.cos(), angle.sin()), -1)

    def forward(self, b):
        text = self.text_norm(self.text(b["text"]))
        weight = b["text_valid"][..., None] / b["text_valid"].sum(1)[:, None, None]
        cond = self.sigma(self.wave(b["c_noise"])) + self.fps(self.wave(b["fps"].log() / 4))
        cond = cond + self.pool((text * weight).sum(1))
        x = self.x(b["x"]) + b["position"]
        mask, text_mask = b["valid"][:, None, None], b["text_valid"][:, None, None].bool()
        for layer in self.layers:
            x = layer(x, cond, text, mask, text_mask)
        shift, scale = self.final_adaln(F.silu(cond))[:, None].chunk(2, -1)
        return self.final(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)


def padded_batch(pack, h: int) -> dict:
    """The samples of a pack as rows padded to the longest, as a plain training loop would collate them."""
    n = len(pack.keys)
    spans = list(zip(pack.cu_q, pack.cu_q[1:]))[:n]
    texts = list(zip(pack.cu_kv, pack.cu_kv[1:]))[:n]
    longest, longest_text = max(b - a for a, b in spans), max(b - a for a, b in texts)
    rows = lambda t, s, length: torch.stack([F.pad(t[a:b].float(), (0, 0, 0, length - (b - a))) for a, b in s])  # noqa: E731
    sigma = pack.sigma[:n]
    s = sigma[:, None, None]
    x0, noise = rows(pack.x0, spans, longest), rows(pack.noise, spans, longest)
    position = rows(factorised_sincos(pack.positions, h), spans, longest)
    return {
        "x": edm.c_in(s, 0.5) * (x0 + s * noise),
        "target": edm.effective_target(x0, noise, s, 0.5),
        "position": position,
        "valid": torch.stack([torch.arange(longest) < b - a for a, b in spans]),
        "text": rows(pack.text, texts, longest_text),
        "text_valid": torch.stack([(torch.arange(longest_text) < b - a).float() for a, b in texts]),
        "c_noise": edm.c_noise(sigma),
        "fps": pack.fps[:n],
    }


def plain_step(model, optimizer, batch, precision: str) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        output = model(batch)
    loss = (output.float() - batch["target"]).square().mean(-1)[batch["valid"]].mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def compare(name: str, precision: str, rounds: int, size: str) -> dict:
    sizes, capacity, steps = CASES[name]
    overrides = [
        f"model.size={size}",
        f"mixed_precision={precision}",
        "dataset.mock=true",
        "model.in_channels=16",
        "model.text_dim=384",
        "model.sigma_data=0.5",
        f"dataset.task_encoder_seq_length={capacity}",
        "train.global_batch_size=1",
        "ema.sigma_rels=[]",
    ]
    config = cfg.resolve(None, overrides=overrides).config
    trainer = Trainer(config)
    store = MockStore(sizes, text_tokens=16)
    order = PackOrder(store, pack_settings(config, store.statistics), capacity, 64)
    packs = [build_pack(order, order.next()) for _ in range(steps)]
    batches = [padded_batch(p, config.model.hidden_size) for p in packs]
    plain = PlainDiT(config.model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    packed_s, plain_s = [], []
    for r in range(rounds + 2):  # two warm-ups
        a = sum(timed(lambda p=p: trainer.step([p]), time.process_time) for p in packs)
        b = sum(timed(lambda q=q: plain_step(plain, optimizer, q, precision), time.process_time) for q in batches)
        if r >= 2:
            packed_s.append(a)
            plain_s.append(b)
    tokens = sum(p.num_tokens for p in packs)
    waste = 1 - tokens / sum(q["x"].shape[0] * q["x"].shape[1] for q in batches)
    packed, unpacked = tokens / statistics.median(packed_s), tokens / statistics.median(plain_s)
    return {
        "case": name,
        "precision": precision,
        "tokens_a_step": capacity,
        "packed_tokens_per_s": packed,
        "plain_tokens_per_s": unpacked,
        "ratio": packed / unpacked,
        "padding_of_plain": waste,
        "parameters": sum(p.numel() for p in plain.parameters()),
        "rounds": rounds,
        "packed_s": packed_s,
        "plain_s": plain_s,
    }


def main() -> None:
    parser = report.arguments(__doc__, rounds=7, size="DiT-S")
    parser.add_argument("--cases", nargs="*", choices=CASES, metavar="NAME", help=f"of: {'; '.join(CASES)}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = report.machine()
    parallel.init()
    precisions = ["fp32", "bf16"][: 1 + fast_bf16()]
    rows = [compare(name, p, args.rounds, args.size) for p in precisions for name in args.cases or CASES]
    head = ["samples", "precision", "tokens a step", "packed, tokens/s", "plain padded, tokens/s", "ratio"]
    cells = []
    for r in rows:
        rates = [f"{r['packed_tokens_per_s']:,.0f}", f"{r['plain_tokens_per_s']:,.0f}", f"{r['ratio']:.2f}"]
        cells.append([r["case"], r["precision"], f"{r['tokens_a_step']:,}", *rates, f"{r['padding_of_plain']:.0%}"])
    text = (
        f"Model {args.size}, CPU time, medians of {args.rounds} interleaved rounds. {report.sentence(about)}.\n\n"
        + report.table([*head, "padding in the plain batch"], cells)
    )
    report.save("train_step", {"machine": about, "rows": rows}, text, args.output_dir)
    parallel.shutdown()


if __name__ == "__main__":
    main()
