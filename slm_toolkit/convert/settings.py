"""A configuration on its way from one form to another: each setting knows the key it was said in."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FATES = {  # what becomes of a key, and how the account calls it, in the order of the account
    "carried": "carried over",
    "nearest": "carried over to the nearest there is",
    "no counterpart": "no counterpart",
    "default": "nothing to write",
    "ignored": "read by nobody in the source either",
    "stays": "stays with the script",
    "added": "added",
}
TRUE, FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")  # accelerate's


@dataclass(frozen=True)
class Setting:
    """A key and its value in accelerate's or DeepSpeed's words, and the key of the source that said it."""

    section: str
    "launch, fsdp, groups (parallelism_config), deepspeed (the JSON), plugin (the YAML beside it), arguments"
    path: tuple[str, ...]
    value: Any
    source: str = ""
    "the key as the source has it; empty for what no key of the source said"
    said: Any = None
    "the value in the source; None: the key is absent and its default counts"
    why: str = ""
    fate: str = "carried"


@dataclass(frozen=True)
class KeyAccount:
    """What became of one key of the source."""

    key: str
    value: Any
    fate: str
    "one of FATES"
    to: tuple[str, ...] = ()
    "`key: value` of the result"
    why: str = ""


@dataclass(frozen=True)
class Ranks:
    """How many ranks the configuration is for, in all and on a node; None where nobody says it."""

    num: int | None
    per_node: int | None


@dataclass(frozen=True)
class Draft:
    """A configuration taken apart into settings, with the account so far."""

    name: str
    engine: str
    "single, ddp, fsdp or deepspeed"
    ranks: Ranks
    settings: tuple[Setting, ...]
    rows: tuple[KeyAccount, ...] = ()
    is_trainers: bool = False
    "came from TrainingArguments: the script is a Trainer's"
    json_path: Path | None = None
    "the DeepSpeed JSON that the settings of section deepspeed were read from"
    json_key: str = ""
    "the key that named that file"
    script: tuple[str, ...] = ()
    "the user's script and its own arguments, where the source is a command"
    environment: tuple[str, ...] = ()
    "NAME=value words before such a command that have nothing to do with sharding"


def account_of(setting: Setting, fate: str, *to: str, why: str = "") -> KeyAccount:
    """What became of the key that said a setting."""
    return KeyAccount(setting.source, setting.said, fate, to, why or setting.why)


def of_section(settings: Iterable[Setting], section: str) -> list[Setting]:
    return [setting for setting in settings if setting.section == section]


def value_of(settings: Iterable[Setting], section: str, *path: str) -> Any:
    """The value of one setting; None where it is not there."""
    found = (s.value for s in settings if s.section == section and s.path == path)
    return next(found, None)


def deepspeed_settings(config: dict[str, Any], before: str = "") -> list[Setting]:
    """Settings of a DeepSpeed JSON; `before`: what goes before each key in the account."""
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(
            f"zero_optimization is {zero!r}\nhint: it holds settings: compare with ds_configs/zero2.json"
        )
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage is {zero['stage']!r}\nhint: 0, 1, 2 or 3")
    return [Setting("deepspeed", path, value, before + ".".join(path), value) for path, value in flat(config)]


def init_flag(settings: Iterable[Setting]) -> list[Setting]:
    """zero3_init_flag where nobody says it: true at stage 3, for accelerate and for transformers."""
    settings = list(settings)
    if of_key(settings, "plugin", "zero3_init_flag") or stage_of(settings) != 3:
        return []
    return [Setting("plugin", ("zero3_init_flag",), True, "deepspeed_config.zero3_init_flag")]


def stage_of(settings: Iterable[Setting]) -> int:
    return value_of(settings, "deepspeed", "zero_optimization", "stage") or 0


def of_key(settings: Iterable[Setting], section: str, key: str) -> list[Setting]:
    """The settings whose last key it is."""
    return [setting for setting in settings if setting.section == section and setting.path[-1] == key]


def flat(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every leaf of nested settings with its path."""
    leaves = []
    for key, value in config.items():
        path = (*before, str(key))
        leaves += flat(value, path) if isinstance(value, dict) and value else [(path, value)]
    return leaves


def nested(leaves: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """The opposite of `flat`."""
    config: dict[str, Any] = {}
    for path, value in leaves:
        inner = config
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return config


def ranks_of(num_processes: int | None, num_machines: int | None, gpus_per_node: int | None) -> Ranks:
    """Without `gpus_per_node` the machines share the ranks."""
    shared = None if num_processes is None else num_processes // (num_machines or 1)
    return Ranks(num_processes, gpus_per_node or shared)


def ranks_per_node(ranks: Ranks, key: str) -> int:
    """Raises ValueError where the key needs it and nobody said how many ranks there are."""
    if ranks.per_node is None:
        raise ValueError(
            f"{key} is the ranks of a node: how many?\nhint: --num_processes N, --gpus_per_node K"
        )
    return ranks.per_node


def hybrid_settings(
    ranks: Ranks, shard: int, *, source: str, said: Any, why: str, fate: str
) -> list[Setting]:
    """Hybrid shard in groups of `shard` ranks; nothing where that is all of them."""
    if ranks.num is None:
        raise ValueError(f"{source} {said}: of how many ranks?\nhint: --num_processes N")
    if type(shard) is not int or shard < 1:
        raise ValueError(f"{source} {said} is no number of ranks\nhint: a whole number of at least 1")
    copies, left = divmod(ranks.num, shard)
    if left or not copies:
        raise ValueError(
            f"{source} {said}: {ranks.num} ranks are no whole number of groups of {shard}\n"
            "hint: --num_processes N, --gpus_per_node K"
        )
    if copies == 1:
        return []
    sizes = {"dp_replicate_size": copies, "dp_shard_size": shard}
    return [
        Setting("groups", (f"parallelism_config_{name}",), size, source, said, why, fate)
        for name, size in sizes.items()
    ]


def truth(value: Any, key: str) -> bool:
    """true or false, also of the words that accelerate takes for them."""
    word = str(value).lower()
    if word not in (*TRUE, *FALSE):
        raise ValueError(f"{key} is {value!r}\nhint: true or false")
    return word in TRUE
