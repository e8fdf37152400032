"""The recipes that come with the package."""

from dfm_nb import config as cfg


def test_demo_in_bfloat16_differs_in_precision_length_and_decay_alone():
    plain, bf16 = (cfg.resolve(name, None, ["dataset.path=data"], training=False) for name in ("demo", "demo_bf16"))
    differing = {key: bf16.get(key) for key in cfg.fields() if plain.get(key) != bf16.get(key)}
    assert differing == {
        "mixed_precision": "bf16",
        "train.train_iters": 1600,
        "scheduler.lr_decay_iters": 1600,
        "train.eval_interval": 800,
        "checkpoint.save_interval": 800,
        "dataset.task_encoder_seq_length": 1024,
        "optimizer.weight_decay": 4,
    }
