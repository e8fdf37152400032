"""examples/energon_loader.py on the tiny data set."""

from dfm_nb.config import Config
from dfm_nb.data.stores import ShardStore
from dfm_nb.packs.packs import PackSettings
from examples.energon_loader import main, pack_loader


def test_energons_own_loader_gives_packs_of_the_same_samples(tiny_data):
    loader = pack_loader(tiny_data, PackSettings(Config()), 64, buffer=20)
    packs = [batch[0] for _, batch in zip(range(4), loader)]
    known = set(ShardStore(tiny_data).keys)
    assert all(p.cu_q[-1] == 64 and set(p.keys) <= known for p in packs)
    assert sum(len(p.keys) for p in packs) > 8


def test_pairs_come_with_what_is_given(tiny_edits):
    batches = pack_loader(tiny_edits, PackSettings(Config()), 512)
    (pack,) = next(iter(batches))
    tokens, targets = pack.lengths()[0], [t * h * w for t, h, w in pack.grids]
    assert {n / target for n, target in zip(tokens, targets)} == {1, 2}, "some are left out: train.given_dropout"


def test_program_names_the_samples_of_each_pack(tiny_data, capsys):
    assert main([str(tiny_data), "--packs", "2", "--capacity", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("samples in 64 tokens" in line for line in lines)
