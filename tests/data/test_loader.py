import hashlib
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb.data.loader import PackedLoader
from dfm_nb.data.order import PackOrder
from dfm_nb.data.stores import MockStore
from dfm_nb.packs.packer import PackShape
from dfm_nb.packs.packs import CLEAN_SIGMA, LatentStatistics, PackSettings, caption_of, draw_sample, pack_draws
from dfm_nb.packs.patches import unpatchify
from tests.refusals import refused

SIZES = [(1, 8, 8), (3, 4, 8), (1, 6, 4), (2, 8, 4)]
STATISTICS, EMPTY = LatentStatistics(torch.zeros(1), torch.ones(1)), torch.zeros(2, 6)


def settings(*overrides):
    return PackSettings(cfg.resolve(None, overrides=overrides).config, STATISTICS)


SETTINGS = settings()


def loader(workers):
    store = MockStore(SIZES, text_tokens=5, channels=4, text_dim=6, length=41)
    return PackedLoader(PackOrder(store, SETTINGS, 64, 10), 4, 0, 1, workers)


def digest(packs):
    h = hashlib.sha256()
    for p in packs:
        h.update(json.dumps([p.keys, p.cu_q, p.cu_kv, p.grids]).encode())
        for t in (p.x0, p.noise, p.sigma, p.text.float(), p.positions, p.row):
            h.update(t.numpy().tobytes())
    return h.hexdigest()


def draws(given=SETTINGS, indices=range(6)):
    store = MockStore(SIZES, text_tokens=5, channels=4, text_dim=6)
    return [draw_sample(store.read(i), 0, given, store.empty_text) for i in indices]


def test_pack_holds_each_sample_unchanged_at_its_segment():
    by_key = {d.key: d for d in draws()}
    store = MockStore(SIZES, text_tokens=5, channels=4, text_dim=6)
    latents = {clip.key: store.statistics.to_model(clip.latent[0], 0.5) for clip in map(store.read, range(6))}
    pack = pack_draws(by_key.values(), SETTINGS)
    for i, (key, grid) in enumerate(zip(pack.keys, pack.grids)):
        a, b = pack.cu_q[i], pack.cu_q[i + 1]
        assert torch.equal(unpatchify(pack.x0[a:b], grid, 2), latents[key])
        assert torch.equal(pack.noise[a:b], by_key[key].noise)
        assert torch.equal(pack.text[pack.cu_kv[i] : pack.cu_kv[i + 1]], by_key[key].text)
        assert set(pack.sigma[pack.row[a:b]].tolist()) == {torch.tensor(by_key[key].rows[0].sigma).item()}


def test_the_numbers_of_a_draw_stay_what_they_were():
    """A run that resumes needs the same ones: a setting's own number is drawn after all others."""
    (draw,) = draws(indices=[1])
    assert draw.rows[0].sigma == pytest.approx(3.12397, rel=1e-5)
    assert draw.noise[0, :3].tolist() == pytest.approx([-0.13253, 0.43236, 0.51071], rel=1e-4)


def test_samples_of_a_pack_have_their_own_noise_levels_and_dropout():
    pack = pack_draws(draws(settings("train.caption_dropout=0.5"), range(40)), SETTINGS)
    assert len(set(pack.sigma.tolist())) == 40
    lengths = {b - a for a, b in zip(pack.cu_kv, pack.cu_kv[1:])}
    assert lengths == {2, 5}  # some captions were replaced by the empty one (2 tokens), not all


def test_the_caption_of_an_epoch_follows_from_seed_epoch_and_key_alone():
    """Of three: the first in half of the epochs, each other in a quarter; within five standard deviations."""
    numbers = [torch.full((1, n + 1, 6), float(n)) for n in range(3)]
    clips = [replace(MockStore(SIZES).read(i), text_emb=numbers[0], more_text=numbers[1:]) for i in range(20)]
    chosen = [[len(caption_of(clip, epoch, 3)) for epoch in range(100)] for clip in clips]
    counts = [sum(row.count(length) for row in chosen) for length in (1, 2, 3)]
    assert abs(counts[0] - 1000) < 5 * 500**0.5 and all(abs(n - 500) < 5 * 375**0.5 for n in counts[1:])
    assert chosen == [[len(caption_of(clip, epoch, 3)) for epoch in range(100)] for clip in clips]
    assert len({tuple(row) for row in chosen}) == 20
    assert chosen[0] != [len(caption_of(clips[0], epoch, 4)) for epoch in range(100)]
    given = settings("rng.seed=3", "train.caption_dropout=0")
    assert [len(draw_sample(clips[0], epoch, given, EMPTY).text) for epoch in range(100)] == chosen[0]
    one, three = (draw_sample(c, 0, SETTINGS, EMPTY) for c in (MockStore(SIZES).read(0), clips[0]))
    assert one.rows == three.rows and torch.equal(one.noise, three.noise), "further captions change no other number"


def test_padding_is_a_segment_of_its_own_outside_the_loss():
    some = draws()
    total = sum(len(d.x0) for d in some)
    pack = pack_draws(some, SETTINGS, capacity=total + 7)
    assert pack.cu_q[-2:] == [total, total + 7]
    assert pack.loss_mask[:total].all() and not pack.loss_mask[total:].any()
    assert pack.cu_kv[-1] - pack.cu_kv[-2] == 1 and not pack.text[-1].any()
    assert pack.num_tokens == total


def test_a_clips_first_latent_frame_has_at_least_its_share_of_the_weights():
    pack = pack_draws(draws(), settings("train.first_frame_share=0.6"), capacity=400)
    shares = []
    for start, end, (t, h, w) in zip(pack.cu_q, pack.cu_q[1:], pack.grids):
        first, later = pack.weight[start:end].split([h * w, (t - 1) * h * w])
        assert (later == 1).all() and (t > 1 or (first == 1).all())
        shares.append((t, round(float(first.sum() / (first.sum() + later.sum())), 4)))
    assert set(shares) == {(1, 1.0), (2, 0.6), (3, 0.6)}
    assert torch.equal(pack.weight > 0, pack.loss_mask) and not pack.loss_mask.all()
    half = pack_draws(draws(), settings("train.first_frame_share=0.4"))
    assert half.weight.min() == 1 and half.weight.max() == pytest.approx(4 / 3), "of two frames, half is more"
    plain = pack_draws(draws(), SETTINGS, capacity=400)
    assert torch.equal(plain.weight, plain.loss_mask.float())


def test_pooling_rows_average_their_own_text():
    pack = pack_draws(draws(), SETTINGS, capacity=400)
    assert torch.allclose(pack.pool.sum(1), torch.ones(len(pack.sigma)))
    first = pack.text[: pack.cu_kv[1]].float().mean(0)
    assert torch.allclose(pack.pool[0] @ pack.text.float(), first, atol=1e-6)


def test_lengths_and_rows_are_padded_only_to_their_multiples():
    some = draws()
    plain = pack_draws(some, SETTINGS)
    pack = pack_draws(some, replace(SETTINGS, token_multiple=8, text_multiple=4, row_multiple=16))
    assert pack.cu_q[-1] == -(-sum(len(d.x0) for d in some) // 8) * 8
    assert pack.cu_kv[-1] % 4 == 0
    assert len(pack.sigma) == len(pack.fps) == len(pack.pool) == 16 > len(plain.sigma)
    assert pack.row.max() < len(pack.sigma) and not pack.pool[len(plain.sigma) + 1 :].any()
    assert torch.equal(pack.sigma[: len(plain.sigma)], plain.sigma)


def test_padded_text_alone_is_a_segment_without_tokens():
    """Then there is nothing to modulate: it has no conditioning row, and no sample attends to it."""
    some = draws()
    plain, pack = pack_draws(some, SETTINGS), pack_draws(some, replace(SETTINGS, text_multiple=64))
    assert pack.cu_q == [*plain.cu_q, plain.cu_q[-1]] and pack.cu_kv == [*plain.cu_kv, 64]
    assert torch.equal(pack.sigma, plain.sigma) and not pack.pool[:, plain.cu_kv[-1] :].any()


def test_a_pack_of_the_runs_shape_has_empty_rows_and_segments_at_the_end():
    some = draws()
    plain = pack_draws(some, SETTINGS)
    shaped = replace(SETTINGS, shape=PackShape(text=64, rows=24, segments=20, longest=30))
    pack = pack_draws(some, shaped)
    assert (len(pack.text), len(pack.sigma), len(pack.cu_q), len(pack.cu_kv)) == (64, 24, 21, 21)
    assert pack.cu_q[: len(plain.cu_q)] == plain.cu_q and set(pack.cu_q[len(plain.cu_q) :]) == {plain.cu_q[-1]}
    assert pack.longest == (30, 64)
    assert pack_draws(some, shaped, 640).longest[0] == 640  # its padding is longer


@pytest.mark.parametrize("first, last, rows", [(1, 0, "gn"), (0, 1, "ng"), (1, 1, "gng")])
def test_given_frames_have_their_own_noise_level_and_no_loss(first, last, rows):
    given = settings(f"dataset.condition_frames_prob={first}", f"dataset.condition_last_prob={last}")
    (draw,) = draws(given, [1])
    pack = pack_draws([draw], given)
    (per_frame, grid), clean = (2 * 4, draw.grid), torch.tensor(CLEAN_SIGMA)
    assert [row == "g" for row in rows] == [bool(sigma == clean) for sigma in pack.sigma[: len(rows)]]
    is_given = torch.zeros(grid[0] * per_frame, dtype=torch.bool)
    is_given[:per_frame], is_given[-per_frame:] = bool(first), bool(last)
    assert torch.equal(pack.loss_mask[: len(is_given)], ~is_given)
    assert not pack.noise[: len(is_given)][is_given].any() and pack.noise[: len(is_given)][~is_given].any(1).all()
    assert torch.equal(draw.x0, draws(SETTINGS, [1])[0].x0)


def test_first_and_last_frames_are_given_independently():
    """Of 400 clips of 3 latent frames with probabilities of 1/2 and 1/4."""
    given = settings("dataset.condition_frames_prob=0.5", "dataset.condition_last_prob=0.25")
    store = MockStore([(3, 8, 8)], channels=4, text_dim=6)
    found = Counter()
    for epoch in range(400):
        rows = [row.noisy for row in draw_sample(store.read(0), epoch, given, store.empty_text).rows]
        found[not rows[0], not rows[-1]] += 1
    for ends, share in {(True, True): 1 / 8, (True, False): 3 / 8, (False, True): 1 / 8}.items():
        assert abs(found[ends] / 400 - share) < 4 * (share * (1 - share) / 400) ** 0.5, found


@pytest.mark.parametrize("workers", [0, 2])
def test_restored_loader_goes_on_bit_for_bit(workers):
    one = loader(workers)
    for _ in range(7):
        one.next_step()
    state = json.loads(json.dumps(one.state()))
    want = [digest(one.next_step()) for _ in range(6)]
    two = loader(workers)
    two.restore(state)
    assert [digest(two.next_step()) for _ in range(6)] == want
    one.close()
    two.close()


def test_packs_smaller_than_a_sample_are_refused():
    refused("task_encoder_seq_length=64", PackOrder, MockStore([(1, 16, 16)], channels=4, text_dim=6), SETTINGS, 63, 4)


def test_latent_statistics_invert_and_give_sigma_data():
    latent = torch.randn(2, 3, 16, 16) * torch.tensor([2.0, 3.0])[:, None, None, None] + 1
    flat = latent.flatten(1)
    stats = LatentStatistics(flat.mean(1), flat.std(1))
    seen = stats.to_model(latent, 0.5)
    torch.testing.assert_close(stats.from_model(seen, 0.5), latent)
    torch.testing.assert_close(seen.flatten(1).std(1), torch.tensor([0.5, 0.5]))


def given_draw(*overrides, epoch=0):
    """A sample of 1 x 4 x 4 patches with a picture of 2 x 3 and a clip of 2 x 2 x 2 patches given beside it."""
    given = [torch.full((1, 4, *shape), value) for value, shape in enumerate([(1, 4, 6), (2, 4, 4)], 1)]
    clip = replace(MockStore(SIZES, text_tokens=5, channels=4, text_dim=6).read(0), given=given)
    return clip, draw_sample(clip, epoch, settings(*overrides), EMPTY)


def test_what_is_given_is_clean_without_loss_and_before_the_target_in_time():
    none = ["train.caption_dropout=0", "train.given_dropout=0"]
    clip, draw = given_draw(*none)
    plain = draw_sample(replace(clip, given=[]), 0, settings(*none), EMPTY)
    assert torch.equal(draw.x0[:16], plain.x0) and torch.equal(draw.noise[:16], plain.noise)
    assert not draw.noise[16:].any() and draw.x0[16:22].unique() == 0.5 and draw.x0[22:].unique() == 1.0
    assert torch.equal(draw.positions[:16], plain.positions)
    assert draw.positions[16:, 0].tolist() == [-1.0] * 6 + [-3.0] * 4 + [-2.0] * 4
    pack = pack_draws([draw, plain], SETTINGS, capacity=64)
    assert pack.num_tokens == 46 and pack.cu_q == [0, 16, 46, 64] and pack.loss_mask.sum() == 32
    assert pack.sigma[pack.row[32:46]].unique().tolist() == [torch.tensor(CLEAN_SIGMA).item()]


def test_words_and_what_is_given_are_dropped_apart_and_together():
    """A quarter each with words alone, pictures alone, both and neither; within five standard deviations of 400."""
    found = [given_draw("train.caption_dropout=0.5", "train.given_dropout=0.5", epoch=e)[1] for e in range(400)]
    kinds = [(len(draw.text) == 2, len(draw.x0) == 16) for draw in found]
    assert all(abs(kinds.count((a, b)) - 100) < 5 * 75**0.5 for a in (True, False) for b in (True, False))
