"""A training from top to bottom, in one process: shards, packs, loss, step, average, sample.

    python examples/train_by_hand.py data/first --iterations 300 --sample sample.png

`dfm pretrain` does the same through megatron-core's optimizer and schedule, which also split the work, and it can be
stopped and resumed; the losses on the same packs are equal (tests/examples/test_train_by_hand.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import plugins, video
from dfm_nb.data.loader import build_pack
from dfm_nb.data.order import PackOrder, StepOrder
from dfm_nb.data.stores import ShardStore
from dfm_nb.diffusion import edm, samplers
from dfm_nb.generation.guided import BatchDenoiser
from dfm_nb.model.build import build_chunks
from dfm_nb.model.ema import power_beta
from dfm_nb.model.pack_slice import PackSlice
from dfm_nb.packs.packs import Pack
from dfm_nb.training.batches import pack_capacity, pack_settings, with_data

SIGMA_REL = 0.05
"""Length of the average, relative to the run: its first half weighs less than 1 in 100,000."""


def loss_sum(network: torch.nn.Module, pack: Pack, sigma_data: float) -> tuple[torch.Tensor, int]:
    """The sum of the token losses of a pack, and the number of tokens that count.

    A pack is one sequence of many samples; every row of tokens has its own noise level (Karras et al. 2022, Eq. 7, 8).
    """
    part = PackSlice.of(pack, torch.device("cpu"))
    sigma_S1 = pack.sigma[pack.row][:, None]  # of each token
    x_Sp = pack.x0 + sigma_S1 * pack.noise  # tokens of p numbers: a patch of the latent
    F_x = network(edm.c_in(sigma_S1, sigma_data) * x_Sp, edm.c_noise(pack.sigma), part)
    loss_S = edm.loss(F_x, pack.x0, pack.noise, sigma_S1, sigma_data).mean(-1)
    return (loss_S * pack.loss_mask).sum(), int(pack.loss_mask.sum())


def parameter_groups(network: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Matrices with weight decay; vectors, such as biases and scales of norms, without."""
    parameters = list(network.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def train(store: ShardStore, config: cfg.Config, iterations: int) -> tuple[torch.nn.Module, list[float]]:
    """The network with its averaged weights, and the loss of each iteration."""
    parallel.init()  # megatron-core's layers ask for groups, also in one process
    _, (network,) = build_chunks(config.model, "fp32", config.rng.seed)
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        parameter_groups(network, o.weight_decay), lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps
    )
    average = [p.detach().clone() for p in network.parameters()]
    # the order of packs is a function of the data and the seed, so that a run could resume at any of them
    d = config.dataset
    settings = pack_settings(config, store.statistics)
    capacity = pack_capacity(config)
    order = PackOrder(store, settings, capacity, d.packing_buffer_size, lanes=d.lanes, lane_window=d.lane_window)
    steps = StepOrder(order, config.train.global_batch_size, 1)
    losses = []
    for iteration in range(1, iterations + 1):
        total, tokens = 0.0, 0
        for items in steps.next():
            loss, count = loss_sum(network, build_pack(order, items), config.model.sigma_data)
            loss.backward()
            total += loss.item()
            tokens += count
        for p in network.parameters():
            p.grad /= tokens  # the mean over the tokens of all packs, however many each has
        torch.nn.utils.clip_grad_norm_(network.parameters(), o.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        beta = power_beta(iteration, SIGMA_REL)
        with torch.no_grad():
            for mean, p in zip(average, network.parameters()):
                mean.lerp_(p, 1 - beta)
        losses.append(total / tokens)
        print(f"iteration {iteration}: loss {losses[-1]:.4f}", flush=True)
    with torch.no_grad():
        for mean, p in zip(average, network.parameters()):
            p.copy_(mean)
    return network, losses


def sample(network: torch.nn.Module, store: ShardStore, config: cfg.Config, num_steps: int = 18) -> torch.Tensor:
    """A sample for the caption and size of the first stored one, decoded: uint8 [T, H, W, 3]."""
    clip = store.read(0)
    shape = clip.latent.shape[1:]
    start = torch.zeros(shape, dtype=torch.float64)
    denoise = BatchDenoiser(
        [network], config.model, torch.device("cpu"), [clip.text_emb[0]], [start], clip.meta["fps"], (0, 0), [[]]
    )
    sigmas = samplers.karras_sigmas(num_steps)
    noise = torch.randn(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x0 = samplers.find("heun")(denoise, noise * sigmas[0], sigmas)[0]
    name = store.manifest["tokenizer"]["name"]
    module, path = plugins.load_saved("tokenizers", name, plugins.carried(name, store.folder))
    tokenizer = module.build(path, device="cpu")
    pixels = tokenizer.decode(store.statistics.from_model(x0, config.model.sigma_data)[None])[0]
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="a folder of dfm prepare")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--sample", default="sample.png", help="PNG of the first frame of a sample")
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help="settings, as of dfm pretrain")
    args = parser.parse_intermixed_args(argv)
    store = ShardStore(args.data)
    config = with_data(cfg.resolve("demo", overrides=args.overrides), store).config
    network, _ = train(store, config, args.iterations)
    video.write_png(args.sample, sample(network, store, config)[0].numpy())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
