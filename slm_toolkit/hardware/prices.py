"""Price: what one GPU costs for an hour, by our dated table or by a user's own file."""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import yaml

from slm_toolkit.base.user_files import read_text, yaml_node
from slm_toolkit.hardware.gpus import find_gpu, gpu_of_name

PRICES_SINCE = "2026"
"older rows of prices.csv are not asked: AWS alone cut its prices by 33 to 44 % in June 2025"

KINDS = ("on-demand", "spot", "reserved", "community")
"reserved: commitments and capacity blocks; community: a private host's machine, RunPod's word"


@dataclass(frozen=True)
class Price:
    """What one GPU costs for an hour, and where the figure comes from."""

    usd_per_gpu_hour: float
    source: str
    "as a report shows it: a phrase with all that the other fields tell"
    kind: str | None = None
    "one of KINDS; None where the user didn't say"
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
    """A user's YAML of prices by canonical GPU name. Raises ValueError with every problem found.

    An entry is a number, `h100-80gb: 2.49`, or a mapping with usd_per_gpu_hour and any of kind, provider,
    as_of and source.
    """
    prices: dict[str, Price] = {}
    problems: list[str] = []
    hints: list[str] = []
    for typed, value in _entries(path):
        entry = value if isinstance(value, dict) else {"usd_per_gpu_hour": value}
        found = [f"{path}: {typed}: {problem}" for problem in _entry_problems(entry)]
        hints += [_ENTRY_HINT] * bool(found)
        try:
            name = gpu_of_name(typed).name
        except ValueError as error:
            unknown, hint = str(error).splitlines()
            found.insert(0, f"{path}: {unknown}")
            hints.append(hint)
        else:
            if name in prices:
                found.insert(0, f"{path}: {typed}: {name} has a price already")
                hints.append("hint: one price for each GPU; another file can hold the others")
        problems += found
        if not found:
            prices[name] = _price_of_entry(entry, path)
    if problems:
        raise ValueError("\n".join([*problems, *dict.fromkeys(hints)]))
    return prices


_KEYS = ("usd_per_gpu_hour", "kind", "provider", "as_of", "source")
_ENTRY_HINT = (
    "hint: an entry is `h100-80gb: 2.49` or `h100-80gb: {usd_per_gpu_hour: 2.49, kind: spot, "
    "provider: MyCloud, as_of: 2026-11-01, source: invoice}`"
)


def _median_price(of_provider: Mapping[str, dict[str, str]], kind: str) -> Price:
    from statistics import median

    prices = sorted(float(row["usd_per_gpu_hour"]) for row in of_provider.values())
    spread = f"${prices[0]:.2f} to ${prices[-1]:.2f}" if len(prices) > 1 else "one price"
    return Price(
        median(prices),
        f"median {kind} price of {PRICES_SINCE} ({spread}: {', '.join(sorted(of_provider))})",
        kind=kind,
        as_of=min(row["as_of"] for row in of_provider.values()),
        low_usd_per_gpu_hour=prices[0],
        high_usd_per_gpu_hour=prices[-1],
    )


def _listed_price(row: dict[str, str]) -> Price:
    usd_per_gpu_hour = float(row["usd_per_gpu_hour"])
    return Price(
        usd_per_gpu_hour,
        f"{row['provider']} {row['instance']}, {row['kind']}, {row['as_of']} ({row['source']})",
        kind=row["kind"],
        provider=row["provider"],
        as_of=row["as_of"],
        low_usd_per_gpu_hour=usd_per_gpu_hour,
        high_usd_per_gpu_hour=usd_per_gpu_hour,
    )


def _newest_of_each_provider(gpu_name: str, kind: str) -> dict[str, dict[str, str]]:
    rows = [
        row
        for row in _table()
        if row["gpu"] == gpu_name and row["kind"] == kind and row["as_of"] >= PRICES_SINCE
    ]
    newest_first = sorted(rows, key=lambda row: float(row["usd_per_gpu_hour"]))
    newest_first.sort(key=lambda row: row["as_of"], reverse=True)
    of_provider: dict[str, dict[str, str]] = {}
    for row in newest_first:
        of_provider.setdefault(row["provider"], row)
    return of_provider


def _provider_of_name(name: str) -> str:
    by_lower = {row["provider"].lower(): row["provider"] for row in _table()}
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


def _entry_problems(entry: dict[str, object]) -> list[str]:
    found = [f"unknown key {key!r}: one of {', '.join(_KEYS)}" for key in entry if key not in _KEYS]
    if "usd_per_gpu_hour" not in entry:
        found.append("usd_per_gpu_hour is missing")
    for key in (key for key in _KEYS if key in entry):
        value = entry[key]
        if key == "usd_per_gpu_hour":
            if not _is_positive_number(value):
                found.append(f"usd_per_gpu_hour is {value!r}: a number above 0")
        elif not isinstance(value, str) or not value.strip():
            found.append(f"{key} is {value!r}: a text")
        elif key == "kind" and value not in KINDS:
            found.append(f"kind is {value!r}: one of {', '.join(KINDS)}")
        elif key == "as_of" and not _is_date(value):
            found.append(f"as_of is {value!r}: a date, month or year as in 2026-11-01, 2026-11, 2026")
    return found


def _price_of_entry(entry: dict[str, str], path: Path) -> Price:
    told = [entry[key] for key in ("provider", "kind", "as_of") if key in entry]
    source = entry.get("source", f"given by {path}")
    return Price(
        float(entry["usd_per_gpu_hour"]),
        f"{source} ({', '.join(told)})" if told else source,
        kind=entry.get("kind"),
        provider=entry.get("provider"),
        as_of=entry.get("as_of"),
    )


def _is_positive_number(value: object) -> bool:
    try:
        return isinstance(value, str) and 0 < float(value) < math.inf
    except ValueError:
        return False


def _is_date(text: str) -> bool:
    try:
        datetime.strptime((text + "-01-01")[:10], "%Y-%m-%d")  # a year, or a year and a month, made whole
    except ValueError:
        return False
    return len(text) in (len("2026"), len("2026-11"), len("2026-11-01"))


@cache
def _table() -> tuple[dict[str, str], ...]:
    with (Path(__file__).parent / "prices.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))
