"""Prices: the table's medians, one provider's, and a user's own file."""

from pathlib import Path

import pytest
from conftest import H100

from slm_toolkit.hardware.gpus import gpus
from slm_toolkit.hardware.prices import Price, _table, find_price, price_of, read_prices


def written(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text)
    return path


def test_every_price_has_a_source_a_date_and_a_gpu() -> None:
    for row in _table():
        assert row.source
        assert row.as_of[:2] == "20"
        assert row.gpu in {gpu.name for gpu in gpus()}


def test_the_default_price_is_the_median_of_the_providers_newest_on_demand_ones() -> None:
    # prices.csv, h100-80gb, on-demand since 2026: AWS 6.88, Azure 12.29, CoreWeave 6.155, GCP 10.9791, Lambda
    # 3.99 (2026-09-20, not 3.78 of May), Modal 3.9492, Nebius 3.85, RunPod 3.49; in the middle 3.99 and 6.155
    price = find_price(H100, usd_per_gpu_hour=None)
    assert price.usd_per_gpu_hour == pytest.approx((3.99 + 6.155) / 2)
    assert price.source == (
        "median on-demand price of 2026 "
        "($3.49 to $12.29: AWS, Azure, CoreWeave, GCP, Lambda, Modal, Nebius, RunPod)"
    )
    assert (price.kind, price.provider, price.as_of) == (
        "on-demand",
        None,
        "2026",
    )  # Nebius has the year alone
    assert (price.low_usd_per_gpu_hour, price.high_usd_per_gpu_hour) == (3.49, 12.29)


def test_the_users_own_price_comes_before_the_table() -> None:
    price = find_price(H100, usd_per_gpu_hour=2.0)
    assert str(price) == "$2.00 per GPU-hour, given by --usd_per_gpu_hour"
    assert (price.kind, price.provider, price.as_of, price.low_usd_per_gpu_hour) == (None, None, None, None)


@pytest.mark.parametrize("driver", ["GeForce GTX 1080", None])
def test_an_unknown_gpu_has_no_price(driver: str | None) -> None:
    assert find_price(driver, usd_per_gpu_hour=None) is None


def test_a_gpus_name_and_its_drivers_name_find_the_same_price() -> None:
    assert price_of("H100 80GB") == find_price(H100, usd_per_gpu_hour=None)


@pytest.mark.parametrize(
    ("kind", "usd_per_gpu_hour", "num_providers"),
    [
        ("spot", (2.4638 + 6.571) / 2, 2),  # CoreWeave, GCP
        ("reserved", 4.858, 1),  # GCP's three years, not its one year for 7.673; AWS's blocks are of 2024
        ("community", 2.69, 1),  # RunPod
    ],
)
def test_other_kinds_have_medians_too(kind: str, usd_per_gpu_hour: float, num_providers: int) -> None:
    price = price_of("h100-80gb", kind=kind)
    assert price.usd_per_gpu_hour == pytest.approx(usd_per_gpu_hour)
    assert price.kind == kind
    assert ("one price" in price.source) == (num_providers == 1)


def test_a_named_provider_gives_its_newest_price() -> None:
    # Lambda: 3.78 of 2026-05; on 2026-09-20 3.99 in a node of eight and 4.29 alone
    price = price_of("h100-80gb", provider="lambda")
    assert (price.usd_per_gpu_hour, price.provider, price.as_of) == (3.99, "Lambda", "2026-09-20")
    assert price.source.startswith("Lambda H100 SXM 8x (per GPU), on-demand, 2026-09-20 (")


def test_a_provider_without_such_a_price_of_2026_gives_none() -> None:
    assert price_of("h100-80gb", provider="Lambda", kind="spot") is None
    assert price_of("a100-80gb", provider="Azure") is None  # 4.0963, of 2024
    assert price_of("a40") is None


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"gpu_name": "h100"}, "unknown GPU 'h100'\nhint: did you mean h100-80gb or h100-80gb-pcie?"),
        (
            {"gpu_name": "l4", "kind": "preemptible"},
            "unknown kind of price 'preemptible'\nhint: use on-demand,",
        ),
        (
            {"gpu_name": "l4", "provider": "Amazon"},
            "unknown provider 'Amazon'\nhint: the table has AWS, Azure, ",
        ),
    ],
)
def test_what_the_table_does_not_have_is_refused(asked: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        price_of(**asked)
    assert str(caught.value).startswith(problem)


def test_a_users_file_gives_prices_by_canonical_name(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "H100 80GB: 2.49\n"
        "a100-40gb: {usd_per_gpu_hour: 1.10, kind: spot, provider: MyCloud, as_of: 2026-11-01, "
        "source: invoice}\n"
        "l4: {usd_per_gpu_hour: 1, as_of: 2026-11}\n",
    )
    assert read_prices(path) == {
        "h100-80gb": Price(2.49, f"given by {path}"),
        "a100-40gb": Price(
            1.10, "invoice (MyCloud, spot, 2026-11-01)", kind="spot", provider="MyCloud", as_of="2026-11-01"
        ),
        "l4": Price(1.0, f"given by {path} (2026-11)", as_of="2026-11"),
    }


def test_a_users_price_holds_whatever_kind_or_provider_is_asked_for() -> None:
    own = {"h100-80gb": Price(2.49, "invoice")}
    assert price_of("h100-80gb", kind="spot", provider="AWS", overrides=own) is own["h100-80gb"]
    assert price_of("a100-40gb", overrides=own) == price_of("a100-40gb")


def test_the_problems_of_all_entries_are_named_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "h100: 2.49\n"
        "l4: -1\n"
        "L4: .inf\n"
        "l40s: 0.50\n"
        "L40S: 0.60\n"
        "a40: {kind: spot}\n"
        "l4: {usd_per_gpu_hour: 1, kind: cheap}\n"
        "l4: {usd_per_gpu_hour: 1, provider: ''}\n"
        "l4: {usd_per_gpu_hour: 1, as_of: 2026-13-01}\n"
        "l4: {usd_per_gpu_hour: 1, colour: red}\n"
        "b200: {usd_per_gpu_hour: $6}\n"
        "h200: [1, 2]\n",
    )
    with pytest.raises(ValueError, match="unknown GPU") as caught:
        read_prices(path)
    lines = str(caught.value).splitlines()
    hints = [line for line in lines if line.startswith("hint: ")]
    assert [line.removeprefix(f"{path}: ") for line in lines if line not in hints] == [
        "unknown GPU 'h100'",
        "l4: invalid field: usd_per_gpu_hour (expected float > 0.0)",
        "L4: invalid field: usd_per_gpu_hour (expected float, got str)",
        "L40S: l40s has a price already",
        "a40: missing field: usd_per_gpu_hour",
        "l4: invalid field: kind (invalid enum value 'cheap')",
        "l4: invalid field: provider (expected str of length >= 1)",
        "l4: as_of is '2026-13-01', not a date, month or year such as 2026-11-01, 2026-11, 2026",
        "l4: object contains unknown field colour",
        "b200: invalid field: usd_per_gpu_hour (expected float, got str)",
        "h200: invalid field: usd_per_gpu_hour (expected float, got array)",
    ]
    assert hints[0].startswith("hint: did you mean h100-80gb or h100-80gb-pcie? There are ")
    assert hints[1].startswith("hint: an entry is `h100-80gb: 2.49` or ")
    assert hints[2] == "hint: give each GPU one price; put other prices into another file"
    assert lines[-3:] == hints


@pytest.mark.parametrize("usd", ["0", "nan", "inf", "1e999", "true", "", "free"])
def test_a_price_is_a_finite_number_above_zero(usd: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"l4: invalid field: usd_per_gpu_hour \(.*\nhint: an entry is"):
        read_prices(written(tmp_path, f"l4: {usd}\n"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "contains no prices"), ("- l4\n", "contains no prices"), ("l4: {usd\n", "is not YAML at line 2")],
)
def test_a_file_without_prices_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{problem}.*\nhint: an entry is"):
        read_prices(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't read .*none.yaml: .*\nhint: "):
        read_prices(tmp_path / "none.yaml")
