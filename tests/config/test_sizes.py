"""The table of sizes, and the DiT paper's counts."""

import pytest

from dfm_nb.config import sizes


@pytest.mark.parametrize("name, millions", [("DiT-S", 33.0), ("DiT-B", 130.5), ("DiT-L", 458.1), ("DiT-XL", 675.1)])
def test_sizes_without_cross_attention_are_those_of_the_dit_paper(name, millions):
    """The paper counts 4 latent channels, 1,000 classes and six modulation vectors, no text and no q/k norms."""
    row = sizes.SIZES[name]
    h, layers = row["hidden_size"], row["num_layers"]
    attention, mlp, adaln = 4 * h * h + 4 * h, 8 * h * h + 5 * h, 6 * h * h + 6 * h
    embedders = (16 * h + h) + (256 * h + h + h * h + h) + 1001 * h
    learned_sigma_final = (2 * h * h + 2 * h) + (32 * h + 32)
    count = layers * (attention + mlp + adaln) + embedders + learned_sigma_final
    assert count / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize("text", ["DiT-XL", "dit-xl", "DiT-XL/2", " dit-xl/2 "])
def test_find_size_forgives_case_and_patch_suffix(text):
    assert sizes.find_size(text) == "DiT-XL"


def test_peaks_are_found_by_the_gpus_name():
    assert sizes.peak_flops("NVIDIA H100 80GB HBM3") == 989e12 > sizes.peak_flops("NVIDIA H100 PCIe")
    assert sizes.peak_flops("NVIDIA GeForce RTX 4090") is None
