"""examples/train_by_hand.py on the tiny data set."""

import pytest

from dfm_nb import config as cfg
from dfm_nb.base.video import read_image
from dfm_nb.data.stores import ShardStore
from dfm_nb.training.batches import packed_loader, with_data
from dfm_nb.training.trainer import Trainer
from examples import train_by_hand
from tests.tiny_run import SIZE

CONSTANT = ["scheduler.lr_decay_style=constant", "scheduler.lr_warmup_iters=0", "dataset.balance_steps=1"]


def test_losses_are_the_trainers_on_the_same_packs(one_rank, tiny_data):
    store = ShardStore(tiny_data)
    config = with_data(cfg.resolve("demo", overrides=[*SIZE, *CONSTANT]), store).config
    trainer, loader = Trainer(config), packed_loader(config, store, 0, 1)
    wanted = [trainer.step(loader.next_step()).loss for _ in range(3)]
    assert train_by_hand.train(store, config, 3)[1] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_the_program_trains_and_samples(one_rank, tiny_data, tmp_path, capsys):
    argv = [str(tiny_data), "--iterations", "2", "--sample", str(tmp_path / "a.png"), *SIZE]
    assert train_by_hand.main(argv) == 0
    assert "iteration 2" in capsys.readouterr().out and read_image(tmp_path / "a.png").std() > 0
