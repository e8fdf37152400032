import pytest
import torch

from dfm_nb.model.adaln import RowMap, add_gated, modulate

CASES = {
    "equal": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "mixed": [0, 0, 1, 1, 1, 2, 3, 3, 3, 4],
    "rows in any order": [4, 0, 0, 3, 3, 0],
}


@pytest.mark.parametrize("index", CASES.values(), ids=CASES.keys())
def test_modulation_equals_expanded_tables(index):
    torch.manual_seed(0)
    row = torch.tensor(index)
    x, y = (torch.randn(len(row), 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    shift, scale, gate = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows = RowMap(row)
    ours = add_gated(x, gate, modulate(y, shift, scale, rows), rows)
    wide = [t[row][:, None] for t in (shift, scale, gate)]
    plain = x + wide[2] * (y * (1 + wide[1]) + wide[0])
    torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-14)
    weight = torch.randn_like(ours)
    leaves = (x, y, shift, scale, gate)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), leaves), torch.autograd.grad((plain * weight).sum(), leaves)
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gathered_form_of_cuda_is_the_same():
    row = torch.tensor(CASES["mixed"])
    table, tokens = torch.randn(5, 4), torch.randn(len(row), 1, 4)
    rows = RowMap(row)
    torch.testing.assert_close(rows.expand(table), table[row][:, None])
    torch.testing.assert_close(rows.sum(tokens, 5), torch.zeros(5, 4).index_add_(0, row, tokens[:, 0]))
