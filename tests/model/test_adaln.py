import pytest
import torch

from dfm_nb.model.adaln import Rows, add_gated, modulate

CASES = {
    "equal": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "mixed": [0, 0, 1, 1, 1, 2, 3, 3, 3, 4],
    "rows in any order": [4, 0, 0, 3, 3, 0],
}


@pytest.mark.parametrize("gathered", [False, True], ids=["runs of the CPU", "gathered, as on CUDA"])
@pytest.mark.parametrize("index", CASES.values(), ids=CASES.keys())
def test_modulation_equals_expanded_tables(index, gathered):
    torch.manual_seed(0)
    row = torch.tensor(index)
    x, y = (torch.randn(len(row), 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    shift, scale, gate = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows = Rows.of(row, 6, x.dtype)
    if gathered:
        rows = Rows(row, (row == torch.arange(6)[:, None]).to(x.dtype), None)
    ours = add_gated(x, gate, modulate(y, shift, scale, rows), rows)
    wide = [t[row] for t in (shift, scale, gate)]
    plain = x + wide[2] * (y * (1 + wide[1]) + wide[0])
    torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-14)
    weight = torch.randn_like(ours)
    leaves = (x, y, shift, scale, gate)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), leaves), torch.autograd.grad((plain * weight).sum(), leaves)
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
