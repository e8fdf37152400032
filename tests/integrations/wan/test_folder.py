"""`dfm import` and `dfm export` of Wan: diffusers' files in and out, and diffusers' own pipeline as the judge."""

import re
import shutil

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from dfm_nb import cli, parallel
from dfm_nb.base.argv import guard
from dfm_nb.checkpoints import loading
from dfm_nb.diffusion import samplers
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import requests_of_keywords
from tests.integrations.wan.pipeline_folder import save_wan
from tests.json_files import change_json, read_json, write_json

SIZE = dict(height=32, width=48, num_frames=5)
PROMPT = "a blue butterfly over a meadow"
TURNED = "to_q to_k to_v to_out.0 ffn.net.0.proj ffn.net.2".split()


@pytest.fixture(scope="module")
def wan(make_once):
    return make_once("wan", save_wan)


@pytest.fixture(scope="module")
def ours(wan, tmp_path_factory):
    return imported(wan, tmp_path_factory.mktemp("wan") / "ours")


def imported(source, output, *flags):
    assert cli.main(["import", str(source), "--output", str(output), *map(str, flags)]) == 0
    return output


def export(source, output, *flags):
    assert cli.main(["export", str(source), "--format", "diffusers", "--output", str(output), *map(str, flags)]) == 0
    return output


def state(folder):
    out = {}
    for file in (folder / "transformer").glob("*.safetensors"):
        out |= load_file(file)
    return out


class ExactTimes(UniPCMultistepScheduler):
    """Tells the network the times that it steps between; diffusers' rounds them down to whole thousandths."""

    def set_timesteps(self, *args, **kwargs):
        super().set_timesteps(*args, **kwargs)
        self.timesteps = 1000 * self.sigmas[:-1]


def clip_of_diffusers(pipe: WanPipeline, noise, texts=None):
    """Normalised latent [16, T, h, w]. texts : states of the prompt and of "" in place of the text encoder's."""
    pipe.set_progress_bar_config(disable=True)
    settings = dict(num_inference_steps=4, guidance_scale=5.0, latents=noise[None], output_type="latent")
    prompts = dict(prompt=PROMPT, negative_prompt="")
    if texts:
        padded = (torch.nn.functional.pad(t.float(), (0, 0, 0, 512 - len(t)))[None] for t in texts)
        prompts = dict(zip(("prompt_embeds", "negative_prompt_embeds"), padded))
    return pipe(**prompts, **SIZE, **settings).frames[0]


@pytest.mark.slow
@torch.no_grad()
def test_clip_is_that_of_diffusers_pipeline(wan, ours):
    """With what the checkpoint recommends: Wan's UniPC, shift and guidance."""
    theirs = WanPipeline.from_pretrained(wan)
    theirs.scheduler = ExactTimes.from_config(theirs.scheduler.config)
    noise = torch.randn(16, 2, 4, 6, generator=torch.Generator().manual_seed(5))
    pipe = Pipeline.from_checkpoint(ours, tokenizer_path=wan, text_encoder_path=wan, mixed_precision="fp32")
    assert pipe.recommended["num_steps"] == 50 and pipe.recommended["sampler"] == "unipc_2"
    (request,) = requests_of_keywords([PROMPT], {**SIZE, "num_steps": 4, "sigma_min": 3 / 999})
    request = request.completed(pipe.config)
    texts = pipe.encode_text([PROMPT, ""])
    for text, said in zip(texts, (PROMPT, "")):
        (states,) = theirs._get_t5_prompt_embeds(said)
        torch.testing.assert_close(states[: len(text)], text.float(), rtol=0, atol=0.02 * states.abs().max().item())
        assert not states[len(text) :].any(), "ours are bfloat16 and not padded"
    want = clip_of_diffusers(theirs, noise, texts).double()
    times = theirs.scheduler.sigmas.double()
    sigmas = times / (1 - times)
    torch.testing.assert_close(request.sigmas(pipe.sigma_data), sigmas, rtol=0.1, atol=0)  # theirs are float32 times
    torch.testing.assert_close(request.sigmas(pipe.sigma_data)[1:], sigmas[1:], rtol=1e-3, atol=0)
    start = (1 + sigmas[0]) * noise.double()[None]
    got = samplers.SAMPLERS[request.sampler](pipe.denoiser([request]), start, sigmas)[0]
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())
    vae = theirs.vae
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    pixels = vae.decode(want[None].float() * std + mean).sample[0].clamp(-1, 1)
    frames = ((pixels.permute(1, 2, 3, 0) + 1) * 127.5).round()
    assert (torch.from_numpy(pipe.decode(got)).float() - frames).abs().max() <= 1
    parallel.shutdown()


@pytest.mark.slow
def test_export_gives_back_the_bits_that_were_imported(wan, ours, tmp_path):
    back = export(ours, tmp_path / "back")
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.copytree(wan / part, back / part)
    before, after = state(wan), state(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[n]) and t.dtype == after[n].dtype for n, t in before.items())
    pipes = [WanPipeline.from_pretrained(f) for f in (wan, back)]
    noise = torch.randn(16, 2, 4, 6)
    assert torch.equal(*(clip_of_diffusers(p, noise) for p in pipes))
    for part in ("vae", "scheduler"):
        one, two = ({k: v for k, v in getattr(p, part).config.items() if k[0] != "_"} for p in pipes)
        assert one == two
    bare = export(ours, tmp_path / "bare", "--dtype", "bf16")
    assert {t.dtype for t in state(bare).values()} == {torch.bfloat16}


@pytest.mark.slow
def test_several_files_with_an_index(wan, ours, tmp_path, monkeypatch):
    from dfm_nb.integrations.wan import folder

    monkeypatch.setattr(folder, "SHARD_BYTES", 100_000)
    back = export(ours, tmp_path / "back")
    files = sorted(p.name for p in (back / "transformer").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
    network = WanTransformer3DModel.from_pretrained(back / "transformer")
    assert all(torch.equal(p, state(wan)[n]) for n, p in network.state_dict().items())


# ---- every key ------------------------------------------------------------------------------------------------------


def change_config(part, **values):
    return lambda folder: change_json(folder / part, values)


def change_weights(change):
    def changed(folder):
        file = sorted((folder / "transformer").glob("*.safetensors"))[0]
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return changed


def cut(folder):
    file = sorted((folder / "transformer").glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def leave_folder(folder):
    index = next((folder / "transformer").glob("*.index.json"))
    value = read_json(index)
    value["weight_map"][next(iter(value["weight_map"]))] = "../vae/diffusion_pytorch_model.safetensors"
    write_json(index, value)


FAULTS = {
    "lacks the weight": change_weights(lambda t: t.popitem()),
    "novel": change_weights(lambda t: t.update(novel=torch.ones(2))),
    "must have shape": change_weights(lambda t: t.update({k: v[..., :1].contiguous() for k, v in t.items()})),
    "float16": change_weights(lambda t: t.update({k: v.double() for k, v in t.items()})),
    "damaged": cut,
    "index.json": leave_folder,
    "image_dim": change_config("transformer/config.json", image_dim=1280),
    "num_layers": change_config("transformer/config.json", num_layers=100_000),
    "Wan 2.2": change_config("model_index.json", transformer_2=["diffusers", "X"]),
    "latents_std": change_config("vae/config.json", latents_std=[0.0] * 16),
    "flow_shift": change_config("scheduler/scheduler_config.json", flow_shift="3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refusals_name_what_is_wrong(wan, tmp_path, wrong_use, name):
    folder = shutil.copytree(wan, tmp_path / "wan", ignore=shutil.ignore_patterns("text_encoder", "tokenizer"))
    FAULTS[name](folder)
    assert name in wrong_use(guard, cli.main, ["import", str(folder), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out" / "model.safetensors").exists()


# ---- low-rank updates -----------------------------------------------------------------------------------------------


def peft_updates(network):
    """Random updates by diffusers' own names, an A for each of queries, keys and values."""
    network.add_adapter(LoraConfig(r=4, lora_alpha=6.0, target_modules=TURNED))
    g = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)


def transformer_output(network):
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        x, text = torch.randn(1, 16, 2, 4, 6, generator=g), torch.randn(1, 9, 64, generator=g)
        return network(x, torch.tensor([300.0]), text).sample


def merged(source, folder, *flags):
    """The network that diffusers opens from our export, with updates added to its weights."""
    return WanTransformer3DModel.from_pretrained(export(source, folder, *flags) / "transformer")


@pytest.mark.slow
def test_updates_of_others_come_in_and_go_out(wan, ours, tmp_path):
    pipe = WanPipeline.from_pretrained(wan)
    base = transformer_output(pipe.transformer)
    peft_updates(pipe.transformer)
    want = transformer_output(pipe.transformer)
    assert (want - base).abs().max() > 0.1
    about = pipe.transformer.peft_config["default"].to_dict()
    layers = get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(tmp_path / "theirs", layers, transformer_lora_adapter_metadata=about)
    file = tmp_path / "theirs" / "pytorch_lora_weights.safetensors"
    both = imported(file, tmp_path / "both", "--base", ours)
    model = loading.find_weights(both).config.model
    assert model.lora.rank == 12, "queries, keys and values have 4 each"
    torch.testing.assert_close(transformer_output(merged(both, tmp_path / "merged")), want, rtol=0, atol=1e-5)
    # out again, by the names of Wan's own code
    apart = export(both, tmp_path / "apart", "--lora", "apart") / "pytorch_lora_weights.safetensors"
    names = load_file(apart)
    assert len(names) == 2 * 2 * 10
    assert "diffusion_model.blocks.1.cross_attn.k.lora_A.weight" in names
    again = WanPipeline.from_pretrained(wan)
    again.load_lora_weights(apart)
    torch.testing.assert_close(transformer_output(again.transformer), want, rtol=0, atol=1e-5)
    third = imported(apart, tmp_path / "third", "--base", ours)
    torch.testing.assert_close(transformer_output(merged(third, tmp_path / "m3")), want, rtol=0, atol=1e-5)


UNKNOWN = {
    "diffusion_model.blocks.0.norm3.lora_A.weight": (4, 64),  # no module of ours
    "diffusion_model.blocks.7.ffn.0.lora_A.weight": (4, 64),  # half of a pair
    "diffusion_model.blocks.0.ffn.2.lora_A.weight": (4,),
    "diffusion_model.blocks.0.ffn.0.alpha": (2,),
    "transformer.blocks.0.ffn.net.0.proj.lora_A.weight": (4, 64),  # twice
    "diffusion_model.blocks.0.ffn.0.lora_down.weight": (4, 65),
}


def test_every_key_of_updates_is_accounted_for(ours, tmp_path, wrong_use):
    file = tmp_path / "lora.safetensors"
    stem = "diffusion_model.blocks.0.ffn.0"
    good = {f"{stem}.lora_down.weight": torch.ones(4, 64), f"{stem}.lora_up.weight": torch.ones(96, 4)}
    argv = ["import", str(file), "--base", str(ours), "--output", str(tmp_path / "out")]
    for key, shape in UNKNOWN.items():
        save_file(good | {key: torch.ones(shape)}, file)
        assert re.search(r"blocks[._]\d", key)[0] in wrong_use(guard, cli.main, argv)
    save_file(good | {"lora_unet_blocks_0_ffn_0.lora_down.weight": torch.ones(4, 64)}, file)
    assert "convert_lora.py" in wrong_use(guard, cli.main, argv)
    save_file({f"{stem}.lora_down.weight": torch.ones(65, 64), f"{stem}.lora_up.weight": torch.ones(96, 65)}, file)
    assert "blocks.0.ffn" in wrong_use(guard, cli.main, argv), "a rank above the weight's own"
    for about in ("[" * 100_000, '{"transformer.lora_alpha": 1' + "0" * 400 + "}", '{"transformer.lora_alpha": NaN}'):
        save_file(good, file, {"lora_adapter_metadata": about})
        assert str(file) in wrong_use(guard, cli.main, argv)
    save_file(good | {f"{stem}.alpha": torch.tensor(2.0)}, file)
    imported(file, tmp_path / "out", "--base", ours)
    updates = loading.read_lora(tmp_path / "out" / "model.safetensors")
    assert updates["decoder.layers.0.mlp.linear_fc1.lora_B"].eq(0.5).all()
    assert not updates["decoder.layers.1.mlp.linear_fc1.lora_B"].any()


def test_no_source_is_replaced(ours, tmp_path, wrong_use):
    base = shutil.copytree(ours, tmp_path / "base")
    file = tmp_path / "lora.safetensors"
    save_file({"a": torch.ones(1)}, file)
    for output in (base, file):
        words = ["import", str(file), "--base", str(base), "--output", str(output)]
        assert str(output) in wrong_use(guard, cli.main, words)
    assert "--base" in wrong_use(guard, cli.main, ["import", str(file), "--output", str(tmp_path / "out")])
