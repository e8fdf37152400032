import pytest
import torch

from dfm_nb.packs.patches import patchify


@pytest.mark.parametrize(
    "shape, fix",
    [
        ((1, 8, 8), r"got 1x8x8; choose clips of 5, 13, 21, ... frames and no stills, or model.patch_temporal=1"),
        ((3, 8, 8), r"got 3x8x8; choose clips of 5, 13, 21"),
        ((2, 9, 8), r"got 2x9x8; choose image sides divisible by 16 px"),
    ],
)
def test_latent_that_does_not_divide_names_the_side_at_fault(shape, fix):
    with pytest.raises(ValueError, match=fix):
        patchify(torch.zeros(4, *shape), 2, 2)


@pytest.mark.parametrize("frames", [5, 13, 21])
def test_clips_that_the_message_names_divide(frames):
    assert len(patchify(torch.zeros(4, 1 + (frames - 1) // 4, 2, 2), 2, 2)) == (1 + (frames - 1) // 4) // 2
