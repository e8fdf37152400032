import pytest
import torch

from dfm_nb.packs.patches import patchify


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 9, 8)])
def test_latent_that_does_not_divide_is_refused(shape):
    with pytest.raises(ValueError, match="x".join(map(str, shape))):
        patchify(torch.zeros(4, *shape), 2, 2)
