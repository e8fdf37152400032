# ruff: noqa
"""Train the tokenizer `general` on a GPU: as it ran, three times on one H100 (benchmarks/results/tokenizer.md).

    python scripts/train_tokenizer.py PICTURES --out a --minutes 7.6 --start 0 --of 22
    python scripts/train_tokenizer.py PICTURES --out b --minutes 8.3 --start 7.6 --of 23 --lr 0.0027 --px 1.3 --resume a
    python scripts/train_tokenizer.py PICTURES --out c --minutes 8.8 --start 15.9 --of 24.7 --lr 0.003 --px 1.3 \\
        --share 0.9 --strong 1.2 --resume b

PICTURES is what pack_pictures.py writes; it needs resvg-py, and DejaVu from matplotlib. Pictures, textures, text and
flat colours are put together at random on the GPU; clips are such pictures that move, are cut or are animations.
Latents are whitened by the batch, and a share of the samples gets strong noise on them.
"""

import argparse
import io
import json
import lzma
import math
import pathlib
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from dfm_nb.data.tokenizers import residual
from dfm_nb.data.tokenizers.pca import PCATokenizer
from dfm_nb.data.tokenizers.residual import ResidualTokenizer, Shape

S = 192
p = argparse.ArgumentParser()
p.add_argument("pictures", type=pathlib.Path)
p.add_argument("--minutes", type=float, default=8)
p.add_argument("--start", type=float, default=0)
p.add_argument("--of", type=float, default=17)
p.add_argument("--out", type=pathlib.Path, required=True)
p.add_argument("--resume", type=pathlib.Path)
p.add_argument("--device", default="cuda")
p.add_argument("--small", action="store_true")
p.add_argument("--lr", type=float, default=3e-3)
p.add_argument("--shape", default="{}")
p.add_argument("--strong", type=float, default=1.0)
p.add_argument("--share", type=float, default=0.6)
p.add_argument("--px", type=float, default=1.0)
p.add_argument("--seed", type=int, default=0)
p.add_argument("--workers", type=int, default=14)
a = p.parse_args()
HERE = a.pictures
dev = a.device
T0 = time.time()
a.out.mkdir(parents=True, exist_ok=True)


def say(*x):
    print(f"{time.time() - T0:6.1f}s", *x, flush=True)


def fit(im, side):
    """RGBA uint8 [S, S, 4] with the picture in the corner's `side` px, and its height and width."""
    im = im.convert("RGBA")
    k = side / max(im.size)
    if k < 1 or k > 1.5:
        im = im.resize([max(1, round(v * min(k, 3))) for v in im.size], Image.LANCZOS)
    out = np.zeros((S, S, 4), np.uint8)
    b = np.asarray(im)[:S, :S]
    out[: b.shape[0], : b.shape[1]] = b
    return out, b.shape[0], b.shape[1]


def svg(job):
    text, side = job
    try:
        import re

        import resvg_py

        m = re.search(r'viewBox="([-\d.e]+)[ ,]+([-\d.e]+)[ ,]+([\d.e]+)[ ,]+([\d.e]+)"', text)
        w, h = (float(m[3]), float(m[4])) if m else (1.0, 1.0)
        kw = {"width": side} if w >= h else {"height": side}
        b = resvg_py.svg_to_bytes(svg_string=text, **kw)
        im = Image.open(io.BytesIO(bytes(b))).convert("RGBA")
        if np.asarray(im)[..., 3].mean() < 8:
            return None
        return fit(im, side)
    except BaseException:
        return None


def webp(f):
    return fit(Image.open(f), 160)


def photo(f):
    im = Image.open(f).convert("RGB")
    out = []
    rng = random.Random(str(f))
    pano = "pano" in str(f)
    for i in range(40 if pano else 24):
        w, h = im.size
        s = int(rng.uniform(0.25, 0.8) * min(w, h)) if not pano else int(rng.uniform(0.35, 0.7) * h)
        s = max(s, min(S, min(w, h))) if s < 150 else s
        x = rng.randint(0, w - s)
        y = rng.randint(0, h - s) if not pano else rng.randint(int(0.1 * h), max(int(0.1 * h), int(0.9 * h) - s))
        out.append(fit(im.crop((x, y, x + s, y + s)), S))
    return out


def strip(f):
    im = Image.open(f).convert("RGBA")
    n = int(f.name[1:3])
    h = im.height // n
    return [fit(im.crop((0, i * h, im.width, i * h + h)), im.width) for i in range(n)]


def text(seed):
    rng = random.Random(seed)
    fonts = list((pathlib.Path(__import__("matplotlib").get_data_path()) / "fonts/ttf").glob("DejaVu*.ttf"))
    im = Image.new("RGBA", (S, S))
    d = ImageDraw.Draw(im)
    y = rng.randint(0, 12)
    if rng.random() < 0.3:
        d.rectangle((0, 0, S, S), fill=tuple(rng.randint(0, 255) for _ in range(3)))
    c = tuple(rng.choice((0, 255, rng.randint(0, 255))) for _ in range(3))
    px = rng.choice((9, 11, 14, 18, 26, 40, 64))
    f = ImageFont.truetype(str(rng.choice(fonts)), px)
    while y < S:
        d.text(
            (rng.randint(-4, 10), y),
            " ".join(
                "".join(
                    rng.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?")
                    for _ in range(rng.randint(1, 9))
                )
                for _ in range(12)
            ),
            font=f,
            fill=c,
        )
        y += int(px * 1.3)
    return np.asarray(im), S, S


def stills_and_strips():
    """Lists of (picture, h, w, kind), and [(first index, frames)] of strips."""
    items, strips = [], []
    with ProcessPoolExecutor(a.workers) as pool:
        icons = json.loads(lzma.decompress((HERE / "icons.json.xz").read_bytes()))
        clip = json.loads(lzma.decompress((HERE / "clipart.json.xz").read_bytes()))
        if a.small:
            icons, clip = random.Random(0).sample(icons, 30), clip[:30]
        say(len(icons), "icons", len(clip), "clip art")
        for (k, _), r in zip(icons, pool.map(svg, [(s, 128) for _, s in icons], chunksize=32)):
            if r:
                items.append((*r, "held_icons" if k == "marketeq" else "icons"))
        for i, r in enumerate(pool.map(svg, [(s, 176) for s in clip], chunksize=16)):
            if r:
                items.append((*r, "held_drawings" if i < 100 else "drawings"))
        say(len(items), "vector pictures")
        f3 = sorted(HERE.glob("f3/*.webp"))
        ph = sorted((HERE / "pano").glob("*.webp")) + sorted((HERE / "photo").glob("*.*"))
        if a.small:
            f3, ph = f3[:4], ph[9::24]
        for r in pool.map(webp, f3, chunksize=16):
            items.append((*r, "fluent"))
        for f, rs in zip(ph, pool.map(photo, ph)):
            held = any(f.name.startswith(h) for h in ("venice", "lobby", "b_courtyard", "cheetah2", "coffee"))
            items += [(*r, "held_photos" if held else "photos") for r in rs]
        for r in pool.map(text, range(4 if a.small else 800), chunksize=16):
            items.append((*r, "text"))
        st = sorted(HERE.glob("strips/*.webp"))
        if a.small:
            st = st[::60]
        for f, rs in zip(st, pool.map(strip, st, chunksize=4)):
            if len(rs) > 1:
                strips.append((len(items), len(rs)))
            items += [(*r, "butterflies" if f.name[0] == "b" else "anim") for r in rs]
    return items, strips


def leaves(n, g):
    """Dead leaves with power-law sizes, each with a colour, a slope and noise: [n, 3, S, S] in 0..1."""
    y, x = torch.meshgrid(torch.arange(S, device=dev) / S, torch.arange(S, device=dev) / S, indexing="ij")
    R = lambda *s: torch.rand(*s, device=dev, generator=g)
    tex = noise(n, g)
    im = tex.clone()
    base = R(n, 3, 1, 1)
    sat = R(n, 1, 1, 1)
    for i in range(12 if a.small else 350):
        r = 0.5 * (0.012 + R(n, 1, 1) ** 3 * 0.6)
        cx, cy, t = R(n, 1, 1) * 1.2 - 0.1, R(n, 1, 1) * 1.2 - 0.1, R(n, 1, 1) * 6.28
        u, v = (x - cx) * t.cos() + (y - cy) * t.sin(), (y - cy) * t.cos() - (x - cx) * t.sin()
        asp = 0.25 + R(n, 1, 1) * 0.75
        v = v / asp
        d = torch.where(R(n, 1, 1) < 0.6, (u * u + v * v).sqrt(), torch.maximum(u.abs(), v.abs())) - r
        m = (0.5 - d * S * 0.7).clamp(0, 1)[:, None]
        c = base + (R(n, 3, 1, 1) - 0.5) * (0.4 + 1.2 * sat)
        c = (
            c
            + (u[:, None] * (R(n, 3, 1, 1) - 0.5) * 3) * R(n, 1, 1, 1)
            + (tex.roll(i * 7, 3) - 0.5) * R(n, 1, 1, 1) ** 2
        )
        im = im * (1 - m) + c.clamp(0, 1) * m
    return im.clamp(0, 1)


def noise(n, g):
    """Coloured 1/f^a noise, [n, 3, S, S] in 0..1."""
    f = torch.fft.fftfreq(S, device=dev)
    f = (f[:, None] ** 2 + f[None, : S // 2 + 1] ** 2).sqrt()
    f[0, 0] = 1
    al = 0.8 + 1.4 * torch.rand(n, 1, 1, 1, device=dev, generator=g)
    z = torch.fft.irfft2(torch.fft.rfft2(torch.randn(n, 3, S, S, device=dev, generator=g)) / f**al, s=(S, S))
    z = z / z.std((1, 2, 3), keepdim=True)
    mix = torch.randn(n, 3, 3, device=dev, generator=g) * 0.5 + torch.randn(n, 1, 3, device=dev, generator=g)
    z = torch.einsum("nij,njhw->nihw", mix, z)
    z = z / z.std((1, 2, 3), keepdim=True)
    return (
        torch.rand(n, 3, 1, 1, device=dev, generator=g)
        + z * (0.08 + 0.25 * torch.rand(n, 1, 1, 1, device=dev, generator=g))
    ).clamp(0, 1)


class Data:
    def __init__(self):
        items, strips = stills_and_strips()
        say(len(items), "pictures", len(strips), "strips")
        self.g = g = torch.Generator(dev).manual_seed(a.seed + int(a.start * 60) + 1)
        kinds = [k for *_, k in items]
        hw = [(h, w) for _, h, w, _ in items]
        pics = torch.from_numpy(np.stack([i[0] for i in items])).permute(0, 3, 1, 2).contiguous()
        n = 4 if a.small else 256
        made = [f(n, g) for f in ([leaves, noise] if a.small else [leaves] * 10 + [noise] * 4) for _ in range(1)]
        made = (torch.cat(made) * 255 + 0.5).byte()
        made = torch.cat((made, torch.full_like(made[:, :1], 255)), 1)
        kinds += ["leaves"] * len(made)
        hw += [(S, S)] * len(made)
        self.levels = [torch.cat((pics.to(dev), made))]
        rgba = self.levels[0]
        for i in range(0, len(rgba), 1024):  # premultiplied
            x = rgba[i : i + 1024]
            x[:, :3] = (x[:, :3].float() * x[:, 3:].float() / 255 + 0.5).byte()
        for _ in range(2):
            self.levels.append(
                torch.cat([(F.avg_pool2d(x.float(), 2) + 0.5).byte() for x in self.levels[-1].split(1024)])
            )
        self.hw = torch.tensor(hw, device=dev).float()
        self.strips = torch.tensor(strips, device=dev).reshape(-1, 2)
        weights = {
            "icons": 3.0,
            "drawings": 2.5,
            "fluent": 1.2,
            "photos": 4.0,
            "text": 0.9,
            "leaves": 2.5,
            "butterflies": 1.5,
            "anim": 0.4,
        }
        count = {k: kinds.count(k) for k in set(kinds)}
        say(count)
        self.p = torch.tensor([weights.get(k, 0) / count[k] for k in kinds], device=dev)
        self.opaque = torch.tensor([{"photos": 1.0, "leaves": 1.0}.get(k, 0) / count[k] for k in kinds], device=dev)
        self.held = {
            k[5:]: [i for i, x in enumerate(kinds) if x == k][: 4 if a.small else 96]
            for k in count
            if k.startswith("held")
        }
        self.nstrips = len(strips)

    def rand(self, *s):
        return torch.rand(*s, device=dev, generator=self.g)

    def pick(self, p, n):
        return torch.multinomial(p, n, True, generator=self.g)

    def look(self, idx, level, scale, cx, cy, ang, size, flip):
        """Windows [n, 4, h, w] in 0..1 of pictures idx at `scale` source pixels a pixel, centred at (cx, cy) of 0..1 of the picture."""
        L = self.levels[level]
        side = L.shape[-1]
        h, w = size
        hw = self.hw[idx] / 2**level
        x = torch.arange(w, device=dev) - (w - 1) / 2
        y = torch.arange(h, device=dev) - (h - 1) / 2
        s = (scale / 2**level)[:, None, None]
        yy, xx = torch.meshgrid(y, x, indexing="ij")
        xx = xx * flip[:, None, None]
        co, si = ang.cos()[:, None, None], ang.sin()[:, None, None]
        gx = (cx * hw[:, 1])[:, None, None] + s * (co * xx - si * yy)
        gy = (cy * hw[:, 0])[:, None, None] + s * (si * xx + co * yy)
        full = (hw[:, 0] * hw[:, 1] >= (side * side) * 0.98)[:, None, None]  # photographs have no outside: reflect
        refl = lambda v: (v % (2 * side) - side).abs().neg() + side
        gx, gy = (
            torch.where(full, refl(gx).clamp(0.5, side - 0.5), gx),
            torch.where(full, refl(gy).clamp(0.5, side - 0.5), gy),
        )
        grid = torch.stack((gx, gy), -1) * (2 / side) - 1
        return F.grid_sample(L[idx].float() / 255, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    def layer(self, p, B, T, size, zoom, whole, moving):
        """[B, T, 4, h, w]: pictures of probability p that move, change or stand still."""
        level = int(torch.randint(0, 3, (1,)).item()) if zoom is None else zoom
        idx = self.pick(p, B)[:, None].repeat(1, T)
        if T > 1 and self.nstrips and p is self.p:
            k = torch.randint(0, self.nstrips, (B,), device=dev, generator=self.g)
            first, n = self.strips[k].T
            step = torch.arange(T, device=dev)
            run = first[:, None] + torch.minimum(step[None], n[:, None] - 1)
            idx = torch.where((self.rand(B) < 0.4)[:, None], run, idx)
        cut = (self.rand(B) < 0.2)[:, None] & (torch.arange(T, device=dev)[None] >= (self.rand(B)[:, None] * T))
        idx = torch.where(cut, self.pick(p, B)[:, None], idx)
        hw = self.hw[idx[:, 0]]
        fits = hw.amax(1) / min(size)
        scale = torch.where(
            self.rand(B) < whole, fits * (0.8 + 0.6 * self.rand(B)), 2.0**level * (0.6 + 0.9 * self.rand(B))
        ).clamp(0.35, 5)
        c = lambda: self.rand(B)[:, None] * 0.6 + 0.2
        t = torch.arange(T, device=dev)[None] / 8
        v = lambda k: k * moving * torch.randn(B, 1, device=dev, generator=self.g) * (self.rand(B) < 0.8)[:, None] * t
        cx, cy = c() + v(0.35), c() + v(0.35)
        sc = scale[:, None] * torch.exp(v(0.15))
        an = (self.rand(B)[:, None] - 0.5) * 0.2 * (self.rand(B)[:, None] < 0.3) + v(0.2)
        flip = torch.where(self.rand(B) < 0.5, 1.0, -1.0)[:, None].repeat(1, T)
        lv = 2 if scale.median() > 3 else 1 if scale.median() > 1.5 else 0
        f = lambda z: z.expand(B, T).reshape(-1)
        return self.look(f(idx), lv, f(sc), f(cx), f(cy), f(an), size, f(flip)).unflatten(0, (B, T))

    def ground(self, B, T, size):
        """Flat colours, gradients and textures [B, T, 3, h, w]."""
        h, w = size
        sat = self.rand(B, 3, 1, 1)
        sat = torch.where(self.rand(B, 1, 1, 1) < 0.35, (sat > 0.5).float() * (1 - 0.12 * self.rand(B, 1, 1, 1)), sat)
        kind = self.rand(B, 1, 1, 1)
        flat = torch.where(kind < 0.3, torch.ones_like(sat), torch.where(kind < 0.36, torch.zeros_like(sat), sat))
        th = self.rand(B, 1, 1, 1) * 6.28
        y = torch.linspace(-0.5, 0.5, h, device=dev)[:, None]
        x = torch.linspace(-0.5, 0.5, w, device=dev)[None]
        ramp = (x * th.cos() + y * th.sin() + 0.5).clamp(0, 1)
        grad = flat + (self.rand(B, 3, 1, 1) - flat) * ramp * (self.rand(B, 1, 1, 1) < 0.3)
        return grad[:, None].expand(B, T, 3, h, w)

    def batch(self, B, T, size):
        """Video [B, 3, T, h, w] in -1..1."""
        g = self.ground(B, T, size)
        bg = self.layer(self.opaque, B, T, size, None, 0.3, 1.0)
        use = (self.rand(B) < 0.25).float()[:, None, None, None, None]
        g = g * (1 - use) + use * bg[:, :, :3]
        fg = self.layer(self.p, B, T, size, None, 0.5, 0.7)
        on = (self.rand(B) < 0.93).float()[:, None, None, None, None]
        x = fg[:, :, :3] * on + g * (1 - fg[:, :, 3:] * on)
        if random.random() < 0.5:  # a second thing
            f2 = self.layer(self.p, B, T, size, None, 0.7, 1.0)
            on = (self.rand(B) < 0.5).float()[:, None, None, None, None]
            a2 = f2[:, :, 3:] * on
            keep = (a2.mean((2, 3, 4), keepdim=True) < 0.6).float()
            x = f2[:, :, :3] * on * keep + x * (1 - a2 * keep)
        # colours: a turn of hue, saturation, contrast, brightness, for half
        th = (self.rand(B) * 2 - 1) * math.pi
        co, si = th.cos(), th.sin()
        k = 1 / 3
        q = math.sqrt(k)
        rot = (
            co[:, None, None] * torch.eye(3, device=dev)
            + (1 - co)[:, None, None] * k
            + si[:, None, None] * q * torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=dev)
        )
        grey = torch.full((3, 3), k, device=dev)
        st = (0.5 + 1.1 * self.rand(B))[:, None, None]
        m = rot @ (grey + st * (torch.eye(3, device=dev) - grey))
        m = torch.where((self.rand(B) < 0.5)[:, None, None], m, torch.eye(3, device=dev))
        x = torch.einsum("bij,btjhw->btihw", m, x)
        some = (self.rand(B) < 0.4).float()[:, None, None, None, None]
        con = 1 + some * (self.rand(B)[:, None, None, None, None] - 0.6) * 0.9
        x = ((x - 0.5) * con + 0.5 + some * (self.rand(B)[:, None, None, None, None] - 0.5) * 0.3).clamp(0, 1)
        x = torch.where((self.rand(B) < 0.1)[:, None, None, None, None], 1 - x, x)
        return x.transpose(1, 2).contiguous() * 2 - 1


PXS = ((64, 64, 8), (96, 96, 4), (128, 128, 2), (64, 96, 1), (96, 64, 1), (48, 48, 1))


def shapes(rng):
    h, w, _ = rng.choices(PXS, [s[2] for s in PXS])[0]
    t = rng.choice((5, 9, 9, 9, 13, 17))
    px = h * w / 4096
    return (h, w), t, max(4, round(a.px * 224 / px)), max(2, round(a.px * 84 * 3 / (1 + t // 4) / px))


def cast():
    return torch.autocast(dev, torch.bfloat16, enabled=dev == "cuda")


def raw(m, x):
    with cast():
        e = m.encoder(x)
    return m.pca.encode(x) + e.float().transpose(1, 2)


def lift(m, z):
    base = m.pca.decode(z)
    with cast():
        return m.decoder(z.transpose(1, 2), base).float()


def spread_of(zs):
    out = []
    for k in (0, 1):
        v = torch.cat([(z[:, :, :1] if k == 0 else z[:, :, 1:]).transpose(0, 1).flatten(1) for z in zs], 1)
        out.append((v.mean(1), v.std(1)))
    return out


def frames(x):
    return x.transpose(1, 2).flatten(0, 1)


def loss_of(y, x):
    rmse = ((y - x).square().flatten(1).mean(1) + 1e-5).sqrt().mean()
    fy, fx = frames(y), frames(x)
    e = fy - fx
    with torch.no_grad():
        mu = F.avg_pool2d(fx, 5, 1, 2, count_include_pad=False)
        sd = F.avg_pool2d((fx - mu).square(), 5, 1, 2, count_include_pad=False).sum(1, keepdim=True).sqrt()
        w = 1 / (F.max_pool2d(sd, 3, 1, 1) + 0.05)
    gr = sum((e.diff(dim=d).abs() * w.narrow(d, 1, w.shape[d] - 1)).mean() for d in (2, 3))
    low = F.avg_pool2d(e, 8).abs().mean()
    return rmse + 0.03 * ((e.abs() * w).mean() + 1.5 * gr) + 0.3 * low


def start(m):
    for b in (x for x in m.modules() if isinstance(x, residual.Block)):
        for c, gain in ((b.inner, 1.7), (b.outer, 0.3)):
            torch.nn.init.normal_(c.weight, std=gain / c.weight[0].numel() ** 0.5)
            torch.nn.init.zeros_(c.bias)
    for n, q in m.decoder.named_parameters():
        if "head" in n:
            torch.nn.init.zeros_(q)
    torch.nn.init.normal_(m.encoder.head.weight, std=0.5 / m.shape.width**0.5)


class Muon:
    """Orthogonal steps for the blocks' kernels (all of one shape together), after Jordan 2024."""

    def __init__(self, ps):
        self.by = {}
        [self.by.setdefault(tuple(q.flatten(1).shape), []).append(q) for q in ps]
        self.buf = {k: torch.zeros(len(v), *k, device=dev) for k, v in self.by.items()}

    @torch.no_grad()
    def step(self, lr):
        for k, ps in self.by.items():
            g = torch.stack([q.grad.flatten(1) for q in ps]).float()
            b = self.buf[k]
            b.lerp_(g, 0.05)
            u = g.lerp(b, 0.95)
            x = u.bfloat16() if dev == "cuda" else u
            tr = k[0] > k[1]
            x = x.mT if tr else x
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):
                A = x @ x.mT
                x = 3.4445 * x + (-4.7750 * A + 2.0315 * A @ A) @ x
            x = (x.mT if tr else x).float() * (0.2 * max(k) ** 0.5)
            for q, d in zip(ps, x):
                q.mul_(1 - lr * 0.01).sub_(d.view_as(q), alpha=lr)


@torch.no_grad()
def psnr(tok, x, noise=0.0, seed=5):
    g = torch.Generator(dev).manual_seed(seed)
    out = []
    for v in x.split(16):
        z = tok.encode(v)
        y = tok.decode(z + noise * torch.randn(z.shape, device=dev, generator=g)).clamp(-1, 1)
        out.append(-10 * ((y - v).square().flatten(1).mean(1) / 4 + 1e-9).log10())
    return torch.cat(out).mean().item()


def held_sets(d):
    sets = {}
    g = d.g
    d.g = torch.Generator(dev).manual_seed(77)
    for k, i in d.held.items():
        if not i:
            continue
        for px in (64,) if a.small else (64, 128):
            idx = torch.tensor(i, device=dev)
            n = len(i)
            one = torch.ones(n, device=dev)
            sc = d.hw[idx].amax(1) / px
            lv = 1 if px == 64 else 0
            v = d.look(idx, lv, sc, one * 0.5, one * 0.5, one * 0, (px, px), one)
            sets[f"{k} {px}"] = ((v[:, :3] + 1 - v[:, 3:]) * 2 - 1)[:, :, None]
            if k == "photos" and px == 64:
                t = torch.arange(9, device=dev)[None] / 8
                r = lambda q: q.expand(n, 9).reshape(-1)
                cx = 0.4 + 0.2 * d.rand(n, 1) + 0.3 * (d.rand(n, 1) - 0.5) * t
                c = d.look(
                    r(idx[:, None]),
                    0,
                    r(one[:, None] * 1.4),
                    r(cx),
                    r(one[:, None] * 0.5),
                    r(one[:, None] * 0),
                    (64, 64),
                    r(one[:, None]),
                )
                sets["clips 64"] = (c[:, :3].unflatten(0, (n, 9)).transpose(1, 2) * 2 - 1)[:48]
    d.g = g
    return sets


def hues():
    import colorsys

    c = [colorsys.hsv_to_rgb(h / 16, s, v) for h in range(16) for s, v in ((1, 1), (1, 0.5), (0.5, 1), (0.6, 0.6))]
    return (
        (torch.tensor(c[:4] if a.small else c, device=dev)[:, :, None, None, None] * 2 - 1)
        .expand(-1, -1, 1, 64, 64)
        .contiguous()
    )


@torch.no_grad()
def report(tok, sets, name):
    row = {k: [round(psnr(tok, v, n), 2) for n in (0.0, 0.1, 0.3)] for k, v in sets.items()}
    x = hues()
    e = (tok.decode(tok.encode(x)).clamp(-1, 1).mean((2, 3, 4)) - x.mean((2, 3, 4))).abs().max().item() * 127.5
    say(name, json.dumps(row), "hues", round(e, 1))


def main():
    torch.manual_seed(a.seed + int(a.start))
    random.seed(a.seed + int(a.start))
    rng = random.Random(a.seed + int(a.start * 60))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    d = Data()
    sets = held_sets(d)
    old = residual.build(device=dev)
    report(old, sets, "before")
    del old
    sh = Shape(
        **(
            {
                "width": 128,
                "fine_width": 128,
                "encoder_blocks": 3,
                "decoder_blocks": 4,
                "encoder_fine_blocks": 2,
                "decoder_fine_blocks": 3,
            }
            | json.loads(a.shape)
        )
    )
    say(sh)
    if a.resume and (a.resume / "model.pt").exists():
        s = torch.load(a.resume / "model.pt", map_location=dev, weights_only=True)
        m = ResidualTokenizer(PCATokenizer(s["pca"], dev), Shape(**s["shape"])).to(dev)
        m.load_state_dict(s["model"])
        say("resumed from", a.resume)
    else:
        vids = []
        with torch.no_grad():
            for _ in range(1 if a.small else 40):
                vids += list(d.batch(16, 9, (64, 64)).cpu()) + list(d.batch(64, 1, (64, 64)).cpu())
        m = ResidualTokenizer(PCATokenizer.fit(vids), sh)
        start(m)
        m = m.to(dev)
        m.pca = PCATokenizer(m.pca.tensors, dev)
        say("pca")
    m.train().requires_grad_(True)
    m = m.to(memory_format=torch.channels_last) if dev == "cuda" else m
    named = dict(m.named_parameters())
    kern = [q for n, q in named.items() if q.ndim == 4 and ("coarse" in n or "fine." in n)]
    ids = {id(q) for q in kern}
    muon = Muon(kern)
    adam = torch.optim.AdamW(
        [q for q in named.values() if id(q) not in ids], lr=a.lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    ema = {n: q.detach().clone() for n, q in named.items()}
    if a.resume and (a.resume / "ema.pt").exists():
        for n, v in torch.load(a.resume / "ema.pt", map_location=dev, weights_only=True).items():
            ema[n].copy_(v)
        mo = torch.load(a.resume / "mom.pt", map_location=dev, weights_only=False)
        for k in muon.buf:
            muon.buf[k].copy_(mo["muon"][k].float())
        adam.load_state_dict(mo["adam"])
    say(sum(q.numel() for q in named.values()) / 1e6, "M parameters")

    def save():
        torch.save({"model": m.state_dict(), "pca": m.pca.tensors, "shape": asdict(m.shape)}, a.out / "model.pt")
        torch.save(ema, a.out / "ema.pt")
        torch.save(
            {"muon": {k: v.bfloat16() for k, v in muon.buf.items()}, "adam": adam.state_dict()}, a.out / "mom.pt"
        )

    def averaged():
        w = ResidualTokenizer(m.pca, m.shape).to(dev)
        w.load_state_dict(m.state_dict() | ema)
        w.requires_grad_(False).eval()
        with torch.no_grad():
            gg = d.g
            d.g = torch.Generator(dev).manual_seed(99)
            rs = random.getstate()
            random.seed(9)
            w.mean.zero_()
            w.scale.fill_(1)
            zs = []
            for _ in range(6 if not a.small else 1):
                zs += [
                    raw(w, d.batch(128 if not a.small else 8, 1, (64, 64))),
                    raw(w, d.batch(48 if not a.small else 4, 9, (64, 64))),
                ]
            st = spread_of([z for z in zs])
            w.mean.copy_(torch.stack([s[0] for s in st]))
            w.scale.copy_(torch.stack([s[1] for s in st]))
            d.g = gg
            random.setstate(rs)
        return w

    begin = time.time()
    end = begin + a.minutes * 60
    step = 0
    last = begin
    lastlog = begin
    seen = 0
    acc = []
    while time.time() < end:
        prog = (a.start + (time.time() - begin) / 60) / a.of
        lr = a.lr * min((step + 1) / 100, 1) * (1 if prog < 0.35 else max(0.01, (1 - prog) / 0.65))
        size, t, ns, nc = shapes(rng)
        with torch.no_grad():
            xs = [d.batch(ns, 1, size), d.batch(nc, t, size)]
        zs = [raw(m, x) for x in xs]
        st = spread_of(zs)
        loss = 0
        logs = []
        pen = sum(s[0].square().mean() * 0.01 + (s[1] - 1).square().mean() * 0.01 for s in st)
        for x, z in zip(xs, zs):
            B = len(z)
            most = torch.where(torch.rand(B, device=dev) < a.share, a.strong, 0.1)
            am = (most * torch.rand(B, device=dev))[:, None, None, None, None]
            sd = torch.cat((st[0][1][:, None], st[1][1][:, None].expand(-1, z.shape[2] - 1)), 1)[None, :, :, None, None]
            y = lift(m, z + am * sd * torch.randn_like(z))
            l = loss_of(y, x)
            loss = loss + l
            logs.append(l.detach())
        (loss + pen).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        muon.step(lr)
        for gr in adam.param_groups:
            gr["lr"] = lr
        adam.step()
        adam.zero_grad(set_to_none=True)
        for q in kern:
            q.grad = None
        dec = min(0.9985, 1 - 1 / (step + 2)) if not a.resume else 0.9985
        torch._foreach_lerp_(list(ema.values()), [q.detach() for q in named.values()], 1 - dec)
        step += 1
        seen += ns + nc
        acc.append(torch.stack(logs))
        if step in (5, 20, 100) or time.time() - lastlog > 20:
            v = torch.stack(acc).mean(0).tolist()
            acc = []
            lastlog = time.time()
            say(
                f"step {step} seen {seen} lr {lr:.5f} stills {v[0]:.4f} clips {v[1]:.4f} {step / (time.time() - begin):.1f}/s",
                f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if dev == "cuda" else "",
            )
        if time.time() - last > 75 or (step == 30 and not a.resume):
            save()
            w = averaged()
            report(w, sets, f"step {step}")
            w.save(a.out / "residual.safetensors")
            last = time.time()
    save()
    w = averaged()
    report(w, sets, f"end {step}")
    w.save(a.out / "residual.safetensors")
    rows = []
    for k in ("photos 64", "icons 64", "drawings 64", "clips 64"):
        v = sets[k][:10]
        if len(v) < 10:
            continue
        rows += [torch.cat(list(q[:, :, q.shape[2] // 2].clamp(-1, 1)), 2) for q in (v, w.decode(w.encode(v)))]
    if rows:
        Image.fromarray(((torch.cat(rows, 1).permute(1, 2, 0) + 1) * 127.5).clamp(0, 255).byte().cpu().numpy()).save(
            a.out / "sheet.png"
        )
    b = d.batch(24, 1, (96, 96))[:, :, 0]
    im = torch.cat([torch.cat(list(b[i : i + 8]), 2) for i in (0, 8, 16)], 1)
    Image.fromarray(((im.permute(1, 2, 0) + 1) * 127.5).clamp(0, 255).byte().cpu().numpy()).save(a.out / "batch.png")
    c = d.batch(6, 9, (64, 64))
    im = torch.cat([torch.cat(list(q.unbind(1)), 2) for q in c], 1)
    Image.fromarray(((im.permute(1, 2, 0) + 1) * 127.5).clamp(0, 255).byte().cpu().numpy()).save(a.out / "clips.png")


if __name__ == "__main__":
    main()
