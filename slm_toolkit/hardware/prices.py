"""Price: what one GPU costs for an hour, by our dated table or by a user's own file."""

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
"older rows of prices.csv are not asked: AWS alone cut its prices by 33 to 44 % in June 2025"

Kind = Literal["on-demand", "spot", "reserved", "community"]
"reserved: commitments and capacity blocks; community: a private host's machine, RunPod's word"
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Price:
    """What one GPU costs for an hour, and where the figure comes from."""

    usd_per_gpu_hour: float
    source: str
    "as a report shows it: a phrase with all that the other fields tell"
    kind: Kind | None = None
    "None where the user didn't say"
    provider: str | None = None
    "None: a median over providers, or not said"
    as_of: str | None = None
    "a date, month or year as in 2026-09; of a median the oldest"
    low_usd_per_gpu_hour: float | None = None
    "range over the providers that were counted; None for a user's own price"
    high_usd_per_gpu_hour: float | None = None

    def __str__(self) -> str:
        return f"${self.usd_per_gpu_hour:.2f} per GPU-hour, {self.source}"


@cache
def find_price(driver_name: str | None, *, usd_per_gpu_hour: float | None) -> Price | None:
    """The user's own price, else the table's median on-demand price of the driver's GPU, else None."""
    if usd_per_gpu_hour is not None:
        return Price(usd_per_gpu_hour, "given by --usd_per_gpu_hour")
    gpu = find_gpu(driver_name)
    return price_of(gpu.name) if gpu else None


def price_of(
    gpu_name: str,
    *,
    kind: str = "on-demand",
    provider: str | None = None,
    overrides: Mapping[str, Price] | None = None,
) -> Price | None:
    """The user's price in `overrides`, of whatever kind it is, else our table's, else None.

    A named provider's price is its newest since PRICES_SINCE (of one day: the lowest). Without a name it is
    the median of those over providers: a single provider's would make dollars of two GPU types depend on who
    was asked when. Raises ValueError for a GPU, kind or provider that the table doesn't have.
    """
    gpu_name = gpu_of_name(gpu_name).name
    if kind not in KINDS:
        raise ValueError(f"unknown kind of price {kind!r}\nhint: one of {', '.join(KINDS)}")
    if provider is not None:
        provider = _provider_of_name(provider)
    if overrides and gpu_name in overrides:
        return overrides[gpu_name]
    of_provider = _newest_of_each_provider(gpu_name, kind)
    if provider is not None:
        return _listed_price(of_provider[provider]) if provider in of_provider else None
    return _median_price(of_provider, kind) if of_provider else None


def read_prices(path: Path) -> dict[str, Price]:
    """A user's YAML of prices by canonical GPU name. Raises ValueError with a problem of each wrong entry.

    An entry is a number, `h100-80gb: 2.49`, or a mapping with usd_per_gpu_hour and any of kind, provider,
    as_of and source.
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
            hints.append("hint: one price for each GPU; another file can hold the others")
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


def _median_price(of_provider: Mapping[str, _ListedPrice], kind: str) -> Price:
    prices = sorted(row.usd_per_gpu_hour for row in of_provider.values())
    spread = f"${prices[0]:.2f} to ${prices[-1]:.2f}" if len(prices) > 1 else "one price"
    return Price(
        median(prices),
        f"median {kind} price of {PRICES_SINCE} ({spread}: {', '.join(sorted(of_provider))})",
        kind=kind,
        as_of=min(row.as_of for row in of_provider.values()),
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


def _newest_of_each_provider(gpu_name: str, kind: str) -> dict[str, _ListedPrice]:
    rows = [row for row in _table() if row.gpu == gpu_name and row.kind == kind and row.as_of >= PRICES_SINCE]
    newest_first = sorted(rows, key=lambda row: row.usd_per_gpu_hour)
    newest_first.sort(key=lambda row: row.as_of, reverse=True)
    of_provider: dict[str, _ListedPrice] = {}
    for row in newest_first:
        of_provider.setdefault(row.provider, row)
    return of_provider


def _provider_of_name(name: str) -> str:
    by_lower = {row.provider.lower(): row.provider for row in _table()}
    if name.strip().lower() not in by_lower:
        raise ValueError(f"unknown provider {name!r}\nhint: there are {', '.join(sorted(by_lower.values()))}")
    return by_lower[name.strip().lower()]


def _entries(path: Path) -> list[tuple[str, object]]:
    """Names and values in the file's order, a name given twice included; all scalars stay text."""
    hint = _ENTRY_HINT.removeprefix("hint: ")
    root = yaml_node(read_text(path, hint=hint), path, hint=hint)
    if isinstance(root, yaml.MappingNode):
        return [(str(_as_text(key)), _as_text(value)) for key, value in root.value]
    raise ValueError(f"{path} holds no prices\n{_ENTRY_HINT}")


def _as_text(node: yaml.Node) -> object:
    """A node's words, mappings and lists, none of them taken for a number or a date."""
    if isinstance(node, yaml.MappingNode):
        return {str(_as_text(key)): _as_text(value) for key, value in node.value}
    return [_as_text(each) for each in node.value] if isinstance(node, yaml.SequenceNode) else node.value


def _price_of_entry(value: object, path: Path) -> Price:
    entry = value if isinstance(value, dict) else {"usd_per_gpu_hour": value}
    own = converted(entry, _OwnPrice, from_text=True)
    if own.as_of is not None and not _is_date(own.as_of):
        raise ValueError(f"as_of is {own.as_of!r}: a date, month or year as in 2026-11-01, 2026-11, 2026")
    details = ", ".join(filter(None, (own.provider, own.kind, own.as_of)))
    source = own.source or f"given by {path}"
    return Price(
        own.usd_per_gpu_hour,
        f"{source} ({details})" if details else source,
        kind=own.kind,
        provider=own.provider,
        as_of=own.as_of,
    )


def _is_date(text: str) -> bool:
    try:
        datetime.strptime((text + "-01-01")[:10], "%Y-%m-%d")  # a year, or a year and a month, made whole
    except ValueError:
        return False
    return len(text) in (len("2026"), len("2026-11"), len("2026-11-01"))


@cache
def _table() -> tuple[_ListedPrice, ...]:
    return csv_rows(Path(__file__).parent / "prices.csv", _ListedPrice)
