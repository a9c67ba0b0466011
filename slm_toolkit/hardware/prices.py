"""Price: the cost of one GPU for one hour, from our dated table or from a user's file."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import msgspec
import yaml

from slm_toolkit.base.typed_files import Positive, Text, converted, csv_rows
from slm_toolkit.base.user_files import read_text, yaml_node
from slm_toolkit.hardware.gpus import find_gpu, gpu_of_name

PRICES_SINCE = "2026"
"older rows of prices.csv are ignored: AWS, for example, cut its prices by 33 to 44 % in June 2025"

Kind = Literal["on-demand", "spot", "reserved", "community"]
"reserved: commitments and capacity blocks; community: RunPod's term for a private host's machine"
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Price:
    """The cost of one GPU for one hour, and its source; on a CPU, of one process."""

    usd_per_gpu_hour: float
    source: str
    "text for reports; it repeats the other fields"
    kind: Kind | None = None
    "None if the user gave no kind"
    provider: str | None = None
    "None for a median over providers, or if the user gave no provider"
    as_of: str | None = None
    "a date, month or year such as 2026-09; for a median, the oldest date"
    low_usd_per_gpu_hour: float | None = None
    "lowest price of the providers in the median; None for a user's own price"
    high_usd_per_gpu_hour: float | None = None
    is_of_process: bool = False
    "without a GPU: the cost of one process for one hour"

    def __str__(self) -> str:
        what = "process-hour (there is no GPU)" if self.is_of_process else "GPU-hour"
        return f"${self.usd_per_gpu_hour:.2f} per {what}, {self.source}"


@cache
def find_price(driver_name: str | None, *, usd_per_gpu_hour: float | None) -> Price | None:
    """Return the user's own price, else the table's median on-demand price of the GPU, else None.

    `driver_name` is the GPU's name as the driver reports it; None without a GPU, where the user's price is
    that of one process.
    """
    if usd_per_gpu_hour is not None:
        is_of_process = driver_name is None
        return Price(usd_per_gpu_hour, "given by --usd_per_gpu_hour", is_of_process=is_of_process)
    gpu = find_gpu(driver_name)
    return price_of(gpu.name) if gpu else None


def price_of(
    gpu_name: str,
    *,
    kind: str = "on-demand",
    provider: str | None = None,
    overrides: Mapping[str, Price] | None = None,
) -> Price | None:
    """Return the user's price in `overrides`, whatever its kind, else our table's price, else None.

    With `provider`, the table's price is that provider's newest since PRICES_SINCE (the lowest of that day).
    Without `provider`, it is the median of these prices over all providers, because comparing two GPU types
    by single prices would compare providers. Raises ValueError for a GPU or kind that does not exist, or a
    provider that the table doesn't have.
    """
    gpu_name = gpu_of_name(gpu_name).name
    if kind not in KINDS:
        raise ValueError(f"unknown kind of price {kind!r}\nhint: use {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if provider is not None:
        provider = _provider_of_name(provider)
    if overrides and gpu_name in overrides:
        return overrides[gpu_name]
    newest_rows = _newest_row_by_provider(gpu_name, kind)
    if provider is not None:
        return _listed_price(newest_rows[provider]) if provider in newest_rows else None
    return _median_price(newest_rows, kind) if newest_rows else None


def read_prices(path: Path) -> dict[str, Price]:
    """Return the prices of a user's YAML, by our name of the GPU.

    An entry is a number, `h100-80gb: 2.49`, or a mapping with usd_per_gpu_hour and any of kind, provider,
    as_of and source. Raises one ValueError with a problem for each wrong entry.
    """
    prices: dict[str, Price] = {}
    problems: list[str] = []
    hints: list[str] = []
    for gpu_name, value in _entries(path):
        try:
            name = gpu_of_name(gpu_name).name
        except ValueError as error:
            unknown, hint = str(error).splitlines()
            problems.append(f"{path}: {unknown}")
            hints.append(hint)
            continue
        if name in prices:
            problems.append(f"{path}: {gpu_name}: {name} has a price already")
            hints.append("hint: give each GPU one price; put other prices into another file")
            continue
        try:
            prices[name] = _price_of_entry(value, path)
        except ValueError as error:
            problems.append(f"{path}: {gpu_name}: {error}")
            hints.append(_ENTRY_HINT)
    if problems:
        raise ValueError("\n".join([*problems, *dict.fromkeys(hints)]))
    return prices


class _ListedPrice(msgspec.Struct, frozen=True):
    """One row of prices.csv."""

    gpu: str
    provider: str
    instance: str
    kind: Kind
    usd_per_gpu_hour: Positive
    as_of: str
    source: str


class _OwnPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a user's file."""

    usd_per_gpu_hour: Positive
    kind: Kind | None = None
    provider: Text | None = None
    as_of: Text | None = None
    source: Text | None = None


_ENTRY_HINT = (
    "hint: an entry is `h100-80gb: 2.49` or `h100-80gb: {usd_per_gpu_hour: 2.49, kind: spot, "
    "provider: MyCloud, as_of: 2026-11-01, source: invoice}`; kinds are " + ", ".join(KINDS)
)


def _median_price(newest_rows: Mapping[str, _ListedPrice], kind: str) -> Price:
    prices = sorted(row.usd_per_gpu_hour for row in newest_rows.values())
    spread = f"${prices[0]:.2f} to ${prices[-1]:.2f}" if len(prices) > 1 else "one price"
    return Price(
        median(prices),
        f"median {kind} price of {PRICES_SINCE} ({spread}: {', '.join(sorted(newest_rows))})",
        kind=kind,
        as_of=min(row.as_of for row in newest_rows.values()),
        low_usd_per_gpu_hour=prices[0],
        high_usd_per_gpu_hour=prices[-1],
    )


def _listed_price(row: _ListedPrice) -> Price:
    return Price(
        row.usd_per_gpu_hour,
        f"{row.provider} {row.instance}, {row.kind}, {row.as_of} ({row.source})",
        kind=row.kind,
        provider=row.provider,
        as_of=row.as_of,
        low_usd_per_gpu_hour=row.usd_per_gpu_hour,
        high_usd_per_gpu_hour=row.usd_per_gpu_hour,
    )


def _newest_row_by_provider(gpu_name: str, kind: str) -> dict[str, _ListedPrice]:
    rows = [row for row in _table() if row.gpu == gpu_name and row.kind == kind and row.as_of >= PRICES_SINCE]
    newest_first = sorted(rows, key=lambda row: row.usd_per_gpu_hour)
    newest_first.sort(key=lambda row: row.as_of, reverse=True)
    newest_rows: dict[str, _ListedPrice] = {}
    for row in newest_first:
        newest_rows.setdefault(row.provider, row)
    return newest_rows


def _provider_of_name(name: str) -> str:
    by_lower = {row.provider.lower(): row.provider for row in _table()}
    if name.strip().lower() not in by_lower:
        providers = ", ".join(sorted(by_lower.values()))
        raise ValueError(f"unknown provider {name!r}\nhint: the table has {providers}")
    return by_lower[name.strip().lower()]


def _entries(path: Path) -> list[tuple[str, object]]:
    """Return the file's names and values in its order, with repeated names; all scalars stay text."""
    hint = _ENTRY_HINT.removeprefix("hint: ")
    root = yaml_node(read_text(path, hint=hint), path, hint=hint)
    if isinstance(root, yaml.MappingNode):
        return [(str(_as_text(key)), _as_text(value)) for key, value in root.value]
    raise ValueError(f"{path} contains no prices\n{_ENTRY_HINT}")


def _as_text(node: yaml.Node) -> object:
    """Return a node as mappings, lists and text; no text is parsed as a number or a date."""
    if isinstance(node, yaml.MappingNode):
        return {str(_as_text(key)): _as_text(value) for key, value in node.value}
    return [_as_text(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else node.value


def _price_of_entry(value: object, path: Path) -> Price:
    entry = value if isinstance(value, dict) else {"usd_per_gpu_hour": value}
    price = converted(entry, _OwnPrice, from_text=True)
    if price.as_of is not None and not _is_date(price.as_of):
        raise ValueError(
            f"as_of is {price.as_of!r}, not a date, month or year such as 2026-11-01, 2026-11, 2026"
        )
    details = ", ".join(filter(None, (price.provider, price.kind, price.as_of)))
    source = price.source or f"given by {path}"
    return Price(
        price.usd_per_gpu_hour,
        f"{source} ({details})" if details else source,
        kind=price.kind,
        provider=price.provider,
        as_of=price.as_of,
    )


def _is_date(text: str) -> bool:
    try:
        datetime.strptime((text + "-01-01")[:10], "%Y-%m-%d")  # completes a year or a month
    except ValueError:
        return False
    return len(text) in (len("2026"), len("2026-11"), len("2026-11-01"))


@cache
def _table() -> tuple[_ListedPrice, ...]:
    return csv_rows(Path(__file__).parent / "prices.csv", _ListedPrice)
