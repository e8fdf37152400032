"""examples/energon_loader.py on the tiny data set."""

from dfm_nb.config import Config
from dfm_nb.data.stores import ShardStore
from dfm_nb.packs.packs import PackSettings
from examples.energon_loader import pack_loader


def test_energons_own_loader_gives_packs_of_the_same_samples(tiny_data):
    loader = pack_loader(tiny_data, PackSettings(Config()), 64, buffer=20)
    packs = [batch[0] for _, batch in zip(range(4), loader)]
    known = set(ShardStore(tiny_data).keys)
    assert all(p.cu_q[-1] == 64 and set(p.keys) <= known for p in packs)
    assert sum(len(p.keys) for p in packs) > 8
