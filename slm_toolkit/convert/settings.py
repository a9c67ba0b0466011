"""Draft: a configuration as settings, each with the key of the source file that set it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FATES = {  # what happens to a key, and the heading in the account, in the order of the account
    "carried": "carried over",
    "nearest": "carried over to the nearest setting",
    "no counterpart": "no counterpart",
    "default": "nothing to write",
    "ignored": "ignored in the source too",
    "added": "added",
}
TRUE, FALSE = (
    ("y", "yes", "t", "true", "on", "1"),
    ("n", "no", "f", "false", "off", "0"),
)  # accelerate's words


@dataclass(frozen=True)
class Setting:
    """A key and value by accelerate's or DeepSpeed's name, and the key of the source that set it."""

    section: str
    "launch, fsdp, groups (parallelism_config), deepspeed (the JSON), plugin (the YAML's section)"
    path: tuple[str, ...]
    value: Any
    source: str = ""
    "the key in the source; empty if no key of the source set it"
    source_value: Any = None
    "the value in the source; None: the key is absent and its default applies"
    why: str = ""
    fate: str = "carried"


@dataclass(frozen=True)
class KeyAccount:
    """What happened to one key of the source."""

    key: str
    value: Any
    fate: str
    "one of FATES"
    to: tuple[str, ...] = ()
    "`key: value` of the result"
    why: str = ""


@dataclass(frozen=True)
class Ranks:
    """The number of ranks, in all and per node; None: unknown."""

    num: int | None
    per_node: int | None


@dataclass(frozen=True)
class Draft:
    """A configuration as a list of settings, with the rows of the account so far."""

    name: str
    engine: str
    "single, ddp, fsdp or deepspeed"
    ranks: Ranks
    settings: tuple[Setting, ...]
    rows: tuple[KeyAccount, ...] = ()
    json_path: Path | None = None
    "the file from which the settings of section deepspeed were read"
    json_key: str = ""
    "the key that named that file"


def account_of(setting: Setting, fate: str, *to: str, why: str = "") -> KeyAccount:
    """Return the account's row for the key that set a setting."""
    return KeyAccount(setting.source, setting.source_value, fate, to, why or setting.why)


def of_section(settings: Iterable[Setting], section: str) -> list[Setting]:
    return [setting for setting in settings if setting.section == section]


def value_of(settings: Iterable[Setting], section: str, *path: str) -> Any:
    """Return the value of one setting; None if it is absent."""
    values = (s.value for s in settings if s.section == section and s.path == path)
    return next(values, None)


def deepspeed_settings(config: dict[str, Any]) -> list[Setting]:
    """Return the settings of a DeepSpeed JSON."""
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(
            f"zero_optimization is {zero!r}\nhint: it is a section of settings: compare with "
            "ds_configs/zero2.json"
        )
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage is {zero['stage']!r}\nhint: use 0, 1, 2 or 3")
    return [Setting("deepspeed", path, value, ".".join(path), value) for path, value in flat(config)]


def init_flag(settings: Iterable[Setting]) -> list[Setting]:
    """Return zero3_init_flag if it is absent at stage 3: accelerate and transformers then use true."""
    settings = list(settings)
    if of_key(settings, "plugin", "zero3_init_flag") or stage_of(settings) != 3:
        return []
    return [Setting("plugin", ("zero3_init_flag",), True, "deepspeed_config.zero3_init_flag")]


def stage_of(settings: Iterable[Setting]) -> int:
    return value_of(settings, "deepspeed", "zero_optimization", "stage") or 0


def of_key(settings: Iterable[Setting], section: str, key: str) -> list[Setting]:
    """Return the settings of a section whose path ends with `key`."""
    return [setting for setting in settings if setting.section == section and setting.path[-1] == key]


def flat(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return every leaf of nested settings with its path."""
    leaves = []
    for key, value in config.items():
        path = (*before, str(key))
        leaves += flat(value, path) if isinstance(value, dict) and value else [(path, value)]
    return leaves


def nested(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Build nested settings from leaves: the inverse of `flat`."""
    config: dict[str, Any] = {}
    for path, value in leaves:
        inner = config
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return config


def ranks_of(num_processes: int | None, num_machines: int | None, gpus_per_node: int | None) -> Ranks:
    """Return the ranks; without `gpus_per_node`, all machines have the same number."""
    shared = None if num_processes is None else num_processes // (num_machines or 1)
    return Ranks(num_processes, gpus_per_node or shared)


def ranks_per_node(ranks: Ranks, key: str) -> int:
    """Return the ranks per node. Raises ValueError, which names the key that needs them, if unknown."""
    if ranks.per_node is None:
        raise ValueError(
            f"{key} means the ranks of a node, but their number is unknown\n"
            "hint: give --num_processes N and --gpus_per_node K"
        )
    return ranks.per_node


def hybrid_settings(
    ranks: Ranks, shard: int, *, source: str, source_value: Any, why: str, fate: str
) -> list[Setting]:
    """Return the settings of a hybrid shard in groups of `shard` ranks; empty if one group has all ranks."""
    if ranks.num is None:
        raise ValueError(
            f"{source} {source_value}: the number of ranks is unknown\nhint: give --num_processes N"
        )
    if type(shard) is not int or shard < 1:
        raise ValueError(
            f"{source} is {source_value}, not a number of ranks\nhint: use a whole number of at least 1"
        )
    copies, left = divmod(ranks.num, shard)
    if left or not copies:
        raise ValueError(
            f"{source} {source_value}: {ranks.num} ranks can't be divided into groups of {shard}\n"
            "hint: change --num_processes N or --gpus_per_node K"
        )
    if copies == 1:
        return []
    sizes = {"dp_replicate_size": copies, "dp_shard_size": shard}
    return [
        Setting("groups", (f"parallelism_config_{name}",), size, source, source_value, why, fate)
        for name, size in sizes.items()
    ]


def truth(value: Any, key: str) -> bool:
    """Return a value as a bool; it may be any word that accelerate reads as true or false."""
    word = str(value).lower()
    if word not in (*TRUE, *FALSE):
        raise ValueError(f"{key} is {value!r}\nhint: use true or false")
    return word in TRUE
