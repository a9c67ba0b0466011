"""Scaling laws: losses by hand, their slopes, and where N and D are in balance."""

import math

import pytest

from slm_toolkit.model.names import find_model
from slm_toolkit.recommend.scaling_laws import (
    LAWS,
    Law,
    compute_optimal,
    compute_optimal_tokens,
    loss,
    loss_per_token,
    loss_per_usd,
    lowest_loss,
    num_params_of,
    tokens_for_loss,
)

all_laws = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
sizes = pytest.mark.parametrize(("num_params", "num_tokens"), [(1e8, 2e9), (2e9, 1e11), (70e9, 1.4e12)])


def test_every_law_has_a_source() -> None:
    assert all("arXiv" in law.source or "analyzing-chinchilla" in law.source for law in LAWS.values())


def test_chinchillas_loss_by_hand() -> None:
    # 1.69 + 406.4 / (70e9)^0.34 + 410.7 / (1.4e12)^0.28
    # ln 70e9 = 24.97176, x 0.34 = 8.49040, e^ = 4867.8; ln 1.4e12 = 27.96749, x 0.28 = 7.83090, e^ = 2517.2
    # 1.69 + 0.083487 + 0.163158 = 1.936645
    assert loss(LAWS["hoffmann"], 70e9, 1.4e12) == pytest.approx(1.936645, abs=2e-6)


def test_besiroglus_loss_by_hand() -> None:
    # 1e9 parameters, 1e10 tokens: 482.006 / 10^(9 x 0.34781 = 3.13029) = 482.006 / 1349.86 = 0.357078
    # 2085.434 / 10^(10 x 0.36585 = 3.6585) = 2085.434 / 4555.12 = 0.457822; with 1.81686: 2.631760
    assert loss(LAWS["besiroglu"], 1e9, 1e10) == pytest.approx(2.631760, abs=2e-5)


def test_kaplans_loss_by_hand() -> None:
    # N = Nc / 1e5 and D = Dc / 1e4: (1e5)^(0.076 / 0.095 = 0.8) = 1e4, so (1e4 + 1e4)^0.095
    # = 10^0.38 x 2^0.095 = 2.398833 x 1.068066 = 2.562111; with endless tokens 10^0.38
    assert loss(LAWS["kaplan"], 8.8e8, 5.4e9) == pytest.approx(2.562111, abs=2e-6)
    assert lowest_loss(LAWS["kaplan"], 8.8e8) == pytest.approx(2.398833, abs=1e-6)


def test_kaplans_joint_fit_by_hand() -> None:
    # N = Nc / 1e5, endless tokens: 10^0.38; N endless, D = Dc / 1e4: 10^(4 x 0.103) = 10^0.412 = 2.582260
    assert lowest_loss(LAWS["kaplan-joint"], 6.4e8) == pytest.approx(2.398833, abs=1e-6)
    assert loss(LAWS["kaplan-joint"], math.inf, 1.8e9) == pytest.approx(2.582260, abs=1e-6)


def test_hoffmann_counts_all_parameters_and_kaplan_no_vocabulary() -> None:
    # untied slm-100m: 130,569,920 - 2 x 32000 x 832 = 77,321,920
    # tied smollm2-135m: 134,515,008 - 49152 x 576 = 106,203,456
    untied, tied = find_model("slm-100m"), find_model("smollm2-135m")
    for name in ("hoffmann", "hoffmann-unrounded", "besiroglu"):
        assert [num_params_of(LAWS[name], spec) for spec in (untied, tied)] == [130_569_920, 134_515_008]
    for name in ("kaplan", "kaplan-joint"):
        assert [num_params_of(LAWS[name], spec) for spec in (untied, tied)] == [77_321_920, 106_203_456]


@all_laws
@sizes
def test_loss_per_token_is_the_slope_of_the_loss(law: Law, num_params: float, num_tokens: float) -> None:
    step = 1e-4 * num_tokens
    fall = loss(law, num_params, num_tokens - step) - loss(law, num_params, num_tokens + step)
    assert loss_per_token(law, num_params, num_tokens) == pytest.approx(fall / (2 * step), rel=1e-6)


@all_laws
@pytest.mark.parametrize("flops", [1e19, 5.76e23])
def test_no_other_split_of_the_flops_has_a_lower_loss(law: Law, flops: float) -> None:
    num_params, num_tokens = compute_optimal(law, flops)
    assert 6 * num_params * num_tokens == pytest.approx(flops)
    lowest = loss(law, num_params, num_tokens)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert loss(law, num_params * factor, num_tokens / factor) > lowest


@all_laws
def test_the_tokens_of_a_size_and_the_split_of_their_flops_agree(law: Law) -> None:
    num_tokens = compute_optimal_tokens(law, 1e9)
    assert compute_optimal(law, 6 * 1e9 * num_tokens) == pytest.approx((1e9, num_tokens))


def test_hoffmanns_closed_form_of_the_optimum() -> None:
    # N = G (C / 6)^(beta / (alpha + beta)), G = (alpha A / (beta B))^(1 / (alpha + beta))
    # G = (0.34 x 406.4 / (0.28 x 410.7))^(1 / 0.62) = (138.176 / 114.996)^1.612903 = 1.344710
    # C = 6e20: (1e20)^(0.28 / 0.62 = 0.4516129) = 10^9.032258 = 1.077105e9; x G = 1.448394e9
    num_params, _ = compute_optimal(LAWS["hoffmann"], 6e20)
    assert num_params == pytest.approx(1.448394e9, rel=1e-5)


def test_kaplans_optimum_by_hand() -> None:
    # N = Nc / 1e5: k (Nc / N)^k = 0.8 x 1e4 = Dc / D, so D = 5.4e13 / 8e3 = 6.75e9
    assert compute_optimal_tokens(LAWS["kaplan"], 8.8e8) == pytest.approx(6.75e9)


@pytest.mark.parametrize(
    ("name", "exponent"),
    [
        ("hoffmann-unrounded", 0.46),  # Hoffmann et al., table 2, approach 3
        ("besiroglu", 0.513),  # Besiroglu et al., beta / (alpha + beta)
    ],
)
def test_the_optimal_size_grows_with_compute_as_published(name: str, exponent: float) -> None:
    sizes = [compute_optimal(LAWS[name], flops)[0] for flops in (1e20, 1e21)]
    assert math.log10(sizes[1] / sizes[0]) == pytest.approx(exponent, abs=0.005)


@all_laws
@sizes
def test_tokens_for_a_loss_reach_it(law: Law, num_params: float, num_tokens: float) -> None:
    target = loss(law, num_params, num_tokens)
    assert tokens_for_loss(law, num_params, target) == pytest.approx(num_tokens)


@all_laws
@pytest.mark.parametrize("above", [0.0, -0.1, -10.0])
def test_a_loss_out_of_reach_is_refused(law: Law, above: float) -> None:
    lowest = lowest_loss(law, 1e9)
    with pytest.raises(ValueError, match="1e\\+09 parameters never reach a loss of") as caught:
        tokens_for_loss(law, 1e9, lowest + above)
    assert f"\nhint: infinite tokens give {lowest:.4f}; " in str(caught.value)


def test_the_loss_that_a_dollar_takes_off_by_hand() -> None:
    # -dL/dD = beta (B / D^beta) / D = 0.28 x 0.163158 / 1.4e12 = 3.26316e-14 per token (Chinchilla's, above)
    # 8 GPUs at $4.50 are one cent a second: 100,000 tokens/s are 1e7 per dollar; 3.26316e-7 per dollar
    per_usd = loss_per_usd(
        LAWS["hoffmann"], 70e9, 1.4e12, tokens_per_second=100_000, usd_per_gpu_hour=4.5, num_gpus=8
    )
    assert per_usd == pytest.approx(3.26316e-7, rel=1e-5)
