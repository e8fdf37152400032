import numpy as np
import pytest
import torch

from dfm_nb.model.ema import PowerEMA, combine_weights, power_beta, rebuildable, sigma_rel_to_gamma


@pytest.mark.parametrize("sigma_rel", [0.05, 0.10, 0.25])
def test_gamma_gives_the_asked_relative_length(sigma_rel):
    """Standard deviation of the profile t^gamma on [0, 1], from its moments."""
    g = sigma_rel_to_gamma(sigma_rel)
    mean, square = (g + 1) / (g + 2), (g + 1) / (g + 3)
    assert np.sqrt(square - mean**2) == pytest.approx(sigma_rel, rel=1e-6)


def test_average_weights_are_a_power_of_the_step():
    sigma_rel, steps = 0.2, 2000
    gamma, weights = sigma_rel_to_gamma(sigma_rel), np.zeros(steps)
    for t in range(1, steps + 1):
        beta = power_beta(t, sigma_rel)
        weights *= beta
        weights[t - 1] = 1 - beta
    ideal = np.arange(1, steps + 1) ** gamma
    assert weights.sum() == pytest.approx(1)
    assert np.abs(weights - ideal / ideal.sum()).sum() < 0.01


def test_average_follows_its_definition_and_leaves_the_weights_alone():
    model = torch.nn.Linear(3, 2)
    ema = PowerEMA([model], [0.1])
    want = None
    for t in range(1, 6):
        with torch.no_grad():
            model.weight += 1
        ema.update(t)
        beta = power_beta(t, 0.1)
        want = model.weight.detach().clone() if want is None else beta * want + (1 - beta) * model.weight.detach()
    kept = model.weight.detach().clone()
    torch.testing.assert_close(ema.named(0.1)[0]["weight"], want)
    with ema.applied(0.1):
        torch.testing.assert_close(model.weight.detach(), want)
    assert torch.equal(model.weight.detach(), kept)


def test_other_lengths_are_rebuilt_from_stored_snapshots():
    """A weight that follows sqrt(t): averages of two lengths at 24 times rebuild a third length."""
    steps, lengths, target = 1200, (0.05, 0.15), 0.1
    averages = dict.fromkeys((*lengths, target), 0.0)
    stored = {}
    for t in range(1, steps + 1):
        for s in averages:
            beta = power_beta(t, s)
            averages[s] = beta * averages[s] + (1 - beta) * t**0.5
        if t % 50 == 0:
            stored |= {(t, s): averages[s] for s in lengths}
    weights, error = combine_weights(list(stored), (steps, target))
    assert error < 0.01
    rebuilt = float(weights @ np.array(list(stored.values())))
    assert rebuilt == pytest.approx(averages[target], rel=1e-4)
    assert abs(rebuilt - averages[0.05]) > 10 * abs(rebuilt - averages[target])


def test_lengths_that_can_be_rebuilt_surround_the_stored_ones():
    stored = [(1600, 0.05), (1600, 0.2)]
    ranges = rebuildable(stored, 1600, 0.05)
    assert len(ranges) == 2 and ranges[0][0] < 0.05 < ranges[0][1] < 0.1 < ranges[1][0] < 0.2 < ranges[1][1]
    for low, high in ranges:
        for inside, outside in ((low, low - 0.001), (high, high + 0.001)):
            assert combine_weights(stored, (1600, inside))[1] <= 0.05 < combine_weights(stored, (1600, outside))[1]
    assert combine_weights(stored, (1600, 0.3))[1] == combine_weights(stored, (1600, -0.1))[1] == float("inf")
