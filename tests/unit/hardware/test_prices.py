"""Prices: the table's medians, one provider's, and a user's own file."""

from pathlib import Path

import pytest
from conftest import H100

from slm_toolkit.hardware.gpus import gpus
from slm_toolkit.hardware.prices import Price, _table, find_price, own_prices, price_of


def test_every_price_has_a_source_a_date_and_a_gpu() -> None:
    for row in _table():
        assert row.source
        assert row.as_of[:2] == "20"
        assert row.gpu in {gpu.name for gpu in gpus()}


def test_the_default_price_is_the_median_of_the_providers_newest_on_demand_ones() -> None:
    # prices.csv, h100-80gb, on-demand since 2026: AWS 6.88, Azure 12.29, CoreWeave 6.155, GCP 10.9791, Lambda
    # 3.99 (2026-09-20, not 3.78 of May), Modal 3.9492, Nebius 3.85, RunPod 3.49; in the middle 3.99 and 6.155
    price = find_price(H100)
    assert price.usd_per_gpu_hour == pytest.approx((3.99 + 6.155) / 2)
    assert price.source == (
        "median on-demand price of 2026 "
        "($3.49 to $12.29: AWS, Azure, CoreWeave, GCP, Lambda, Modal, Nebius, RunPod)"
    )


def test_the_users_own_price_comes_before_the_table() -> None:
    price = find_price(H100, 2.0)
    assert str(price) == "$2.00 per GPU-hour, given by --prices"


@pytest.mark.parametrize("driver", ["GeForce GTX 1080", None])
def test_an_unknown_gpu_has_no_price(driver: str | None) -> None:
    assert find_price(driver) is None


def test_a_gpu_without_a_price_of_2026_has_none() -> None:
    assert price_of("a40") is None
    with pytest.raises(ValueError, match="unknown GPU 'h100'\nhint: did you mean h100-80gb"):
        price_of("h100")


def test_a_users_file_gives_prices_by_canonical_name(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("H100 80GB: 2.49\nl4: 1\n")
    own = own_prices(str(path))
    assert own == {"h100-80gb": Price(2.49, f"given by {path}"), "l4": Price(1.0, f"given by {path}")}
    assert price_of("h100-80gb", own) is own["h100-80gb"]
    assert price_of("a100-40gb", own) == price_of("a100-40gb")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *[(f"l4: {usd}", "l4: ") for usd in ("0", "nan", "inf", "1e999", "true", "", "free")],
        *[("", "contains no prices"), ("- l4", "contains no prices"), ("l4: {usd", "is not YAML at line")],
    ],
)
def test_a_price_is_a_finite_number_above_zero(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{problem}.*\nhint: --prices takes"):
        own_prices(str(path))
