"""`dfm import` takes over what NeMo DFM writes, whole or not at all, and runs nothing of it."""

import io

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async, state_dict_saver

from dfm_nb import cli, parallel
from dfm_nb.base.argv import guard
from dfm_nb.checkpoints import loading
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.parallel.megatron_cpu import STAND_IN
from tests.attacks.checkpoint_files import Evil
from tests.distributed.layouts import make_trainer
from tests.integrations.nemo_dfm.reference import random_network
from tests.refusals import refused

TINY = ["--tokenizer", "residual", "--text-encoder", "minilm"]
SIZE = dict(height=32, width=48, num_video_frames=5, num_steps=3, guidance=2.0)


@pytest.fixture(scope="module")
def theirs():
    return random_network().state_dict()


def consolidated(folder, state):
    """As the reference page makes it of the ranks' state dicts; Transformer Engine adds its extra states."""
    file = folder / "model.pth"
    extra = {"module.decoder.layers.0.mlp.linear_fc1._extra_state": torch.empty(0, dtype=torch.uint8)}
    torch.save({"module." + k: v.bfloat16() for k, v in state.items()} | extra, file)
    return file


def torch_dist(folder, state, mark=None):
    """As Megatron-Bridge saves: all layers of a weight in one tensor, with an optimizer's state and pickled objects."""
    parallel.init()
    sharded = {}
    for key, value in state.items():
        value, offsets, axes = value.bfloat16(), (), 0
        name = key
        if key.startswith("decoder.layers."):
            _, _, layer, inner = key.split(".", 3)
            name, offsets, axes = f"decoder.layers.{inner}", ((0, int(layer), 2),), 1
        name = f"module.{name}"
        sharded[key] = ShardedTensor.from_rank_offsets(name, value, *offsets, prepend_axis_num=axes)
        key_of_moment = f"optimizer.state.exp_avg.{name}"
        moment = ShardedTensor.from_rank_offsets(key_of_moment, value.float(), *offsets, prepend_axis_num=axes)
        sharded[f"exp_avg.{key}"] = moment
    sharded["rng"] = ShardedObject("rng_state", mark or {"seed": 1}, (1, 1), (0, 0))
    extra = "module.decoder.layers.mlp.linear_fc1._extra_state"
    sharded["extra"] = ShardedObject(extra, io.BytesIO(b"x"), (1,), (0,))
    target = folder / "iter_0000010"
    target.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for module in (async_utils, filesystem_async, state_dict_saver):  # they name CUDA outright
            patch.setattr(module, "torch", STAND_IN)
        dist_checkpointing.save(sharded, str(target))
    parallel.shutdown()
    return folder


def imported(source, output):
    assert cli.main(["import", str(source), "--output", str(output), *TINY]) == 0
    return output


@pytest.mark.slow
@pytest.mark.parametrize("form", ["model.pth", "torch_dist"])
def test_imported_file_alone_generates(theirs, tmp_path, form):
    mark = tmp_path / "ran"
    if form == "torch_dist":
        source = torch_dist(tmp_path / "run", theirs, Evil(mark))
    else:
        source = consolidated(tmp_path, theirs)
    file = imported(source, tmp_path / "butterflies.safetensors")
    assert not mark.exists()
    config = loading.find_weights(file).config
    assert config.model.num_layers == 2 and config.model.num_attention_heads == 4 and config.model.variant == "dfm"
    pipe = Pipeline.from_checkpoint(file, mixed_precision="fp32")
    assert pipe.recommended["fps"] == 30, "whatever the clip, as it was trained"
    assert torch.equal(pipe.scale.mean, torch.zeros(16)) and torch.equal(pipe.scale.std, torch.ones(16))
    assert not pipe.encode_text([""])[0].any()
    want = theirs["decoder.layers.1.mlp.linear_fc2.weight"].bfloat16().float()
    assert torch.equal(pipe.chunks[0].decoder.layers[1].mlp.linear_fc2.weight, want)
    (clip,) = pipe([""], **SIZE)
    assert clip.frames.shape == (5, 32, 48, 3) and clip.latent.isfinite().all() and clip.latent.std() > 0.1
    parallel.shutdown()


FAULTS = {
    "decoder.layers.1": lambda s: s.pop("decoder.layers.1.cross_attention.linear_q.weight"),
    "logvar.weight": lambda s: s.update({"logvar.weight": torch.ones(3)}),
    "final.bias": lambda s: s.update({"final_layer_linear.bias": torch.ones(32)}),
    "pos_embedder": lambda s: s.pop("pos_embedder.pos_embedding.weight"),
    "'args'": lambda s: s.update({"args": 3}),
    "decoder.layers.novel": lambda s: s.update({"decoder.layers.novel": torch.empty(10**8, 0)}),  # no byte in the file
    "model.pth": lambda s: s.update({"novel": torch.zeros(1).expand(1 << 40)}),
    "q_layernorm": lambda s: s.update({"decoder.layers.0.full_self_attention.q_layernorm.weight": torch.empty(0)}),
    "decoder.layers.0": lambda s: s.pop("decoder.layers.0.full_self_attention.q_layernorm.weight"),
}


def test_every_key_is_accounted_for(theirs, tmp_path, wrong_use):
    """Keys without wrappers."""
    for name, change in FAULTS.items():
        state = dict(theirs)
        change(state)
        torch.save(state, tmp_path / "model.pth")
        error = wrong_use(
            guard, cli.main, ["import", str(tmp_path / "model.pth"), "--output", str(tmp_path / "out.pth")]
        ).strip()
        assert name in error and "\n" not in error and not (tmp_path / "out.pth").exists()


@pytest.mark.slow
def test_training_goes_on_from_imported_weights(one_rank, theirs, tmp_path):
    file = imported(consolidated(tmp_path, theirs), tmp_path / "start.pth")
    like = ["model.variant=dfm", "model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4"]
    like += ["model.in_channels=16", "model.text_dim=24", "model.adaln_lora_dim=256", "model.rope=false"]
    trainer, loader = make_trainer([*like, "train.global_batch_size=1"])
    loading.load_pretrained(trainer, file)
    first = trainer.step(loader.next_step()).loss
    assert first == first and trainer.step(loader.next_step()).loss != first
    other, _ = make_trainer(["model.in_channels=16", "train.global_batch_size=1"])
    refused("model.variant", loading.load_pretrained, other, file)
