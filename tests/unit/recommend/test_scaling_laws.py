"""The scaling law: losses by hand, slopes, and where N and D are in balance."""

import math

import pytest

from slm_toolkit.recommend.scaling_laws import compute_optimal_tokens, loss


def test_the_loss_by_hand() -> None:
    # 1e9 parameters, 1e10 tokens: 482.006 / 10^(9 x 0.34781 = 3.13029) = 482.006 / 1349.86 = 0.357078
    # 2085.434 / 10^(10 x 0.36585 = 3.6585) = 2085.434 / 4555.12 = 0.457822; with 1.81686: 2.631760
    assert loss(1e9, 1e10) == pytest.approx(2.631760, abs=2e-5)


@pytest.mark.parametrize("num_params", [1e8, 40e9])
def test_no_other_split_of_the_flops_has_a_lower_loss(num_params: float) -> None:
    num_tokens = compute_optimal_tokens(num_params)
    lowest = loss(num_params, num_tokens)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert loss(num_params * factor, num_tokens / factor) > lowest


def test_the_optimal_size_grows_with_compute_as_published() -> None:
    """N ~ C^0.513: Besiroglu et al., beta / (alpha + beta)."""
    flops = [num_params * compute_optimal_tokens(num_params) for num_params in (1e9, 1e10)]
    assert 1 / math.log10(flops[1] / flops[0]) == pytest.approx(0.513, abs=0.005)
