"""Finding: one fault of a configuration, with its reason and the change that corrects it.

Rule: such a fault as data.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slm_toolkit.doctor.case import Case, as_written
from slm_toolkit.strategy.settings import value_at

SEVERITIES = ("wrong", "unwise", "could be faster")
"wrong: the launch fails, does not do what a setting says, or wastes most of its money"


REMOVE = None
"the value of an Edit that removes its key"


@dataclass(frozen=True)
class Edit:
    """One change of a setting in a strategy's file."""

    file: str
    "yaml or json"
    keys: tuple[str, ...]
    "the path of keys from the top of the file"
    value: Any
    "the value to write, or REMOVE"

    @property
    def key(self) -> str:
        return ".".join(self.keys)


def in_yaml(key: str, value: Any) -> Edit:
    """Return an edit of the accelerate YAML; dots separate the parts of `key`."""
    return Edit("yaml", tuple(key.split(".")), value)


def in_json(key: str, value: Any) -> Edit:
    """Return an edit of the DeepSpeed JSON; dots separate the parts of `key`."""
    return Edit("json", tuple(key.split(".")), value)


@dataclass(frozen=True)
class Finding:
    """One fault. `sentence`, `why` and `change` are shown to the user. None: the field does not apply."""

    name: str
    "a stable identifier that scripts may match"
    severity: str
    "one of SEVERITIES"
    sentence: str
    "the fault, with the value that causes it"
    why: str
    change: str
    "a key and its value, a flag, or a command"
    file: str | None = None
    key: str | None = None
    strategy: str | None = None
    gpu: str | None = None
    speedup: float | None = None
    "tokens/s after the change divided by tokens/s before it"
    edits: tuple[Edit, ...] = ()
    "the changes that `--fix` makes; empty if editing files does not correct the fault"


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
    speedup: float | None = None,
) -> Finding:
    """Return a finding; `file`, `key` and `change` follow from the edits unless they are given.

    `then` is appended to the text of the change, for example an alternative. `examine` fills in the file's
    path and the strategy.
    """
    place = edits[0] if edits else None
    return Finding(
        name=name,
        severity=severity,
        sentence=sentence,
        why=why,
        change=(change_by(edits) if change is None else change) + then,
        file=file or (place and place.file),
        key=key or (place and place.key),
        speedup=speedup,
        edits=edits,
    )


wrong, unwise, slow = partial(fault, "wrong"), partial(fault, "unwise"), partial(fault, "could be faster")


def with_value(content: Any, keys: tuple[str, ...], value: Any) -> Any:
    """Return a copy of `content` with `value` at `keys`; missing mappings on the path are created.

    A mapping whose last key is removed is removed, too.
    """
    mapping = dict(content) if isinstance(content, dict) else {}
    first, *rest = keys
    if rest:
        value = with_value(mapping.get(first), tuple(rest), value) or REMOVE
    if value is REMOVE:
        mapping.pop(first, None)
    else:
        mapping[first] = value
    return mapping


def change_by(edits: Sequence[Edit]) -> str:
    """Describe the edits: `key: value` for each written key, and the names of the removed keys."""
    written = []
    for edit in edits:
        is_plain = edit.file == "yaml" and isinstance(edit.value, str)
        if edit.value is not REMOVE:
            written.append(f"{edit.keys[-1]}: {edit.value if is_plain else json.dumps(edit.value)}")
    removed = ", ".join(edit.keys[-1] for edit in edits if edit.value is REMOVE)
    if removed:
        written.append(f"without {removed}" if written else f"remove {removed}")
    return ", ".join(written)


def gravest_first(findings: list[Finding]) -> list[Finding]:
    """Return the findings without repetitions, by severity, then largest speedup, then as they were found."""
    unique = {(f.name, f.sentence, f.file, f.strategy, f.gpu): f for f in findings}
    return sorted(unique.values(), key=lambda f: (SEVERITIES.index(f.severity), -(f.speedup or 0)))


def as_json(finding: Finding) -> dict[str, Any]:
    """Return the finding's fields. An edit has `file`, `key` (with dots) and `value` (null removes)."""
    edits = [{"file": edit.file, "key": edit.key, "value": edit.value} for edit in finding.edits]
    return {**vars(finding), "edits": edits}


@dataclass(frozen=True)
class Rule:
    """`why` and `sentence` may name {key}, {value}, {case}, {spec} and {gib}, the model's weights in bf16."""

    severity: str
    name: str
    key: str
    "the path of keys, with dots"
    is_fault: Callable[[Case, Any], object]
    "True for a case and the key's value that are at fault; the value is None if the key is absent"
    write: Any
    "the value that corrects the fault, or a function of the case that returns it"
    why: str
    then: str = ""
    sentence: str = "{key} is {value}"
    change: str | None = None
    "what to do if no value in the file corrects the fault"


def faults_by(
    rules: Iterable[Rule],
    case: Case,
    settings: Mapping[str, Any],
    *,
    edit: Callable[[str, Any], Edit] | None,
    shown: Callable[[Case, str, Any], str] = lambda case, key, value: as_written(value),
) -> Iterator[Finding]:
    """Yield a finding for each rule that `settings` break. `edit`: None if they are in no file."""
    for rule in rules:
        value = value_at(settings, rule.key.split("."))
        if not rule.is_fault(case, value):
            continue
        key = rule.key.split(".")[-1]
        facts = {"key": key, "value": shown(case, key, value), "case": case, "spec": case.spec}
        facts["gib"] = 2 * case.spec.num_params / 2**30
        change = edit(rule.key, rule.write(case) if callable(rule.write) else rule.write) if edit else None
        yield fault(
            rule.severity,
            rule.name,
            rule.sentence.format(**facts),
            *([] if rule.change else [change]),
            why=rule.why.format(**facts),
            change=rule.change,
            then=rule.then,
            file=change.file if change else None,
            key=change.key if change else None,
        )
