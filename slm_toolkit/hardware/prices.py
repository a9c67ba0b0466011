"""Price: the cost of one GPU for one hour, from our dated table or from the user."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from slm_toolkit.base.typed_files import Positive, converted, csv_rows
from slm_toolkit.base.user_files import read_text, yaml_of
from slm_toolkit.hardware.gpus import find_gpu, gpu_of_name

PRICES_SINCE = "2026"
"older rows of prices.csv are ignored: AWS, for example, cut its prices by 33 to 44 % in June 2025"
_HINT = "--prices takes dollars per GPU-hour, or a YAML with entries such as `h100-80gb: 2.49`"


@dataclass(frozen=True)
class Price:
    """The cost of one GPU for one hour, and its source; on a CPU, of one process."""

    usd_per_gpu_hour: float
    source: str
    "text for reports"
    is_of_process: bool = False
    "without a GPU: the cost of one process for one hour"

    def __str__(self) -> str:
        what = "process-hour (there is no GPU)" if self.is_of_process else "GPU-hour"
        return f"${self.usd_per_gpu_hour:.2f} per {what}, {self.source}"


OwnPrices = float | Mapping[str, Price]
"a user's price of every GPU, or prices by our name of the GPU"


def own_prices(text: str) -> OwnPrices:
    """Return the value of `--prices`: dollars, or the prices of a YAML. Raises ValueError."""
    try:
        usd = float(text)
    except ValueError:
        return _read_prices(Path(text))
    if not 1e-6 <= usd <= 1e6:  # which reports can show
        raise ValueError(f"{text} is not a price per GPU-hour: 0.000001 to 1000000\nhint: {_HINT}")
    return usd


def find_price(driver_name: str | None, prices: OwnPrices | None = None) -> Price | None:
    """Return `price_of` the GPU with this name of its driver; None for an unknown GPU without own price.

    `driver_name`: None without a GPU, where the user's number is the price of one process.
    """
    gpu = find_gpu(driver_name)
    if gpu is None:
        known = isinstance(prices, float)
        return Price(prices, "given by --prices", is_of_process=driver_name is None) if known else None
    return price_of(gpu.name, prices)


def price_of(gpu_name: str, prices: OwnPrices | None = None) -> Price | None:
    """Return the user's price, else our table's, else None. Raises ValueError for an unknown GPU.

    The table's is the median over providers of their newest on-demand price since PRICES_SINCE (the lowest of
    that day), because comparing two GPU types by single prices would compare providers.
    """
    gpu_name = gpu_of_name(gpu_name).name
    if isinstance(prices, float):
        return Price(prices, "given by --prices")
    return prices[gpu_name] if prices and gpu_name in prices else _median_price(gpu_name)


@cache
def _median_price(gpu_name: str) -> Price | None:
    rows = [row for row in _table() if row.gpu == gpu_name and row.as_of >= PRICES_SINCE]
    newest_last = sorted(rows, key=lambda row: (row.as_of, -row.usd_per_gpu_hour))
    by_provider = {row.provider: row.usd_per_gpu_hour for row in newest_last}
    if not by_provider:
        return None
    usd = sorted(by_provider.values())
    spread = f"${usd[0]:.2f} to ${usd[-1]:.2f}" if len(usd) > 1 else "one price"
    median = (usd[len(usd) // 2] + usd[(len(usd) - 1) // 2]) / 2
    return Price(
        median, f"median on-demand price of {PRICES_SINCE} ({spread}: {', '.join(sorted(by_provider))})"
    )


def _read_prices(path: Path) -> dict[str, Price]:
    entries = yaml_of(read_text(path, what="prices", hint=_HINT), path, hint=_HINT)
    if not isinstance(entries, dict):
        raise ValueError(f"{path} contains no prices\nhint: {_HINT}")
    prices = {}
    for gpu_name, usd in entries.items():
        try:
            prices[gpu_of_name(gpu_name).name] = Price(converted(usd, Positive), f"given by {path}")
        except ValueError as error:
            raise ValueError(f"{path}: {gpu_name}: {error}\nhint: {_HINT}") from None
    return prices


class _ListedPrice(msgspec.Struct, frozen=True):
    """One row of prices.csv."""

    gpu: str
    provider: str
    instance: str
    kind: Literal["on-demand"]
    usd_per_gpu_hour: Positive
    as_of: str
    source: str


@cache
def _table() -> tuple[_ListedPrice, ...]:
    return csv_rows(Path(__file__).parent / "prices.csv", _ListedPrice)
