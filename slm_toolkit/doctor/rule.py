"""Rule: a fault of one setting as data."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slm_toolkit.doctor.case import Case, as_written
from slm_toolkit.doctor.finding import Edit, Finding, fault
from slm_toolkit.strategy.settings import value_at


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
