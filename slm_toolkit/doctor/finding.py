"""Finding: one thing that is wrong or unwise in a configuration, why, and the change that mends it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import yaml

SEVERITIES = ("wrong", "unwise", "could be faster")
"wrong: does not run, does other than it says, or wastes most of what is paid"
TOPICS = (
    *("security", "launch", "fsdp", "deepspeed", "flags", "versions", "machine", "environment"),
    *("alignment", "memory", "network", "strategy", "kernels"),
)

TRAINS_ALL_THE_SAME = frozenset(
    [
        *("zero3-never-releases", "no-wrap-policy", "size-based-wrap", "offload-param-below-stage-3"),
        *("nvme-below-stage-3", "fsdp-version-missing", "reshard-ignored-by-fsdp1", "use-cpu"),
        *("sharding-strategy-ignored", "ignored-section", "compiled-by-yaml", "accumulation-differs"),
        *("clipping-differs", "zero1-becomes-another-optimizer", "fp8-emulated", "gpu-without-bf16"),
        *("nccl-p2p-disabled", "nccl-ib-disabled", "cuda-launch-blocking", "distributed-debug"),
        *("no-memory-caching", "dynamo-disabled", "interface-absent", "launcher-variables"),
    ]
)
"""names of wrong findings that a launch may survive, slowly or otherwise than its files say: `slm compare`
prints them and measures; what ran stands in the record"""


class Special(Enum):
    """What an edit does that is no value."""

    REMOVE = "remove"
    KEEP_LAST = "keep the last"
    "of a key that stands several times"

    def __repr__(self) -> str:
        return self.value


REMOVE, KEEP_LAST = Special.REMOVE, Special.KEEP_LAST


@dataclass(frozen=True)
class Edit:
    """One setting to change: of a file of a strategy, or of the flags."""

    file: str
    "yaml, json or flags"
    keys: tuple[str, ...]
    "from the top of the file down, or a flag's name"
    value: Any
    "to write there, or one of Special"

    @property
    def key(self) -> str:
        return ".".join(self.keys)


def in_yaml(key: str, value: Any) -> Edit:
    """An edit of the accelerate YAML; `key` with dots."""
    return Edit("yaml", tuple(key.split(".")), value)


def in_json(key: str, value: Any) -> Edit:
    """An edit of the DeepSpeed JSON; `key` with dots."""
    return Edit("json", tuple(key.split(".")), value)


@dataclass(frozen=True)
class Finding:
    """One thing to know. What it is, its reason and its change are sentences; None: it has no such place."""

    name: str
    "stable: scripts may look for it"
    topic: str
    "one of TOPICS"
    severity: str
    "one of SEVERITIES"
    sentence: str
    "what it is, with the value"
    why: str
    change: str
    "a key and its value, a flag, or a command"
    file: str | None = None
    key: str | None = None
    strategy: str | None = None
    gpu: str | None = None
    speedup: float | None = None
    "tokens/s after the change over before"
    edits: tuple[Edit, ...] = ()
    "what `--fix` does; none where no file can mend it"

    @property
    def is_mended_by_files(self) -> bool:
        return any(edit.file != "flags" for edit in self.edits)


def fault(
    severity: str,
    name: str,
    sentence: str,
    *edits: Edit,
    why: str,
    change: str | None = None,
    then: str = "",
    file: str | None = None,
    key: str | None = None,
    topic: str = "",
) -> Finding:
    """A finding whose file, key and change follow from its edits, where they are not given.

    `then`: words after the change, such as another way. `examine` fills in the path of the file, the strategy
    and the topic.
    """
    place = edits[0] if edits and edits[0].file != "flags" else None
    return Finding(
        name=name,
        topic=topic,
        severity=severity,
        sentence=sentence,
        why=why,
        change=(change_by(edits) if change is None else change) + then,
        file=file or (place and place.file),
        key=key or (place and place.key),
        edits=edits,
    )


wrong, unwise, slow = partial(fault, "wrong"), partial(fault, "unwise"), partial(fault, "could be faster")


def change_by(edits: Sequence[Edit]) -> str:
    """What the edits do: `key: value` of each that is written, and the names of those that are removed."""
    written = [
        f"{edit.keys[-1]}: {_as_written(edit)}" for edit in edits if not isinstance(edit.value, Special)
    ]
    removed = ", ".join(edit.keys[-1] for edit in edits if edit.value is REMOVE)
    if any(edit.value is KEEP_LAST for edit in edits):
        return f"keep one {edits[0].keys[-1]}"
    if removed:
        written.append(f"without {removed}" if written else f"remove {removed}")
    return ", ".join(written)


def _as_written(edit: Edit) -> str:
    """As JSON, but a word as YAML has it: quoted where it would be read as something else."""
    is_word = isinstance(edit.value, str) and edit.file == "yaml" and yaml.safe_load(edit.value) == edit.value
    return edit.value if is_word else json.dumps(edit.value)


def gravest_first(found: list[Finding]) -> list[Finding]:
    """Each finding once, by severity, then by topic, then by what the change gives."""

    def gravity(finding: Finding) -> tuple[int, int, float]:
        of_topic = TOPICS.index(finding.topic)
        return SEVERITIES.index(finding.severity), of_topic, -(finding.speedup or 0)

    unique: dict[tuple, Finding] = {}
    for f in found:
        unique.setdefault((f.name, f.sentence, f.file, f.strategy, f.gpu), f)
    return sorted(unique.values(), key=gravity)


def as_json(finding: Finding) -> dict[str, Any]:
    """The finding's fields; of an edit the file, the key with dots, and the value, null for a removed key."""
    edits = [
        {
            "file": edit.file,
            "key": edit.key,
            "value": None
            if edit.value is REMOVE
            else str(edit.value.value)
            if isinstance(edit.value, Special)
            else edit.value,
        }
        for edit in finding.edits
    ]
    return {**vars(finding), "edits": edits}
