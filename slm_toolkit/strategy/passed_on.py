"""Settings of an accelerate YAML and a DeepSpeed JSON that a launch passes on; all others are refused.

accelerate copies every key of every section to the option with the same name: `log_dir` in any section sets
torchrun's --log_dir. DeepSpeed writes to paths, imports modules and connects to hosts that its JSON names.
So a key is passed on only if passed_on.yaml has it. Sections that only tune DeepSpeed also take unlisted
keys, but with numbers and switches only: these name no path, module or host.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.config.flag_metadata import shortened


def _rules(section: dict[str, Any]) -> dict[str, Any]:
    """Return the rule of each key of a section of passed_on.yaml; None: any value except a mapping."""
    rules: dict[str, Any] = {}
    for names, rule in section.items():
        if names == "any":
            rules |= dict.fromkeys(rule.split())
        else:
            rules |= dict.fromkeys(names.split(), _rules(rule) if isinstance(rule, dict) else rule)
    return rules


_CONTENT = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
YAML_SETTINGS, JSON_SETTINGS, _REASONS = map(
    _rules, (_CONTENT["yaml"], _CONTENT["json"], _CONTENT["reasons"])
)
# prefix that accelerate adds to a section's keys if it is missing
_PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}


@dataclass(frozen=True)
class Refused:
    """A setting that is not passed on."""

    keys: tuple[str, ...]
    "path of keys from the top of the file, as written there"
    value: Any
    known: tuple[str, ...]
    "allowed keys of the section, if this key is not among them; else empty"
    allowed: tuple[str, ...]
    "allowed values, if the key itself is allowed; empty: no value is allowed"

    @property
    def sentence(self) -> str:
        if self.known:
            return f"{self.keys[-1]} is not a known key of {'.'.join(self.keys[:-1]) or 'this file'}"
        return f"{'.'.join(self.keys)} is {shortened(json.dumps(self.value, default=str))}"

    @property
    def why(self) -> str:
        reasons = (_REASONS[key] for key in reversed(self.keys) if key in _REASONS)
        return next(reasons, "it may name a file, a host, a launcher or a module")

    @property
    def change(self) -> str:
        if len(self.allowed) == 1:
            return f"{self.keys[-1]}: {self.allowed[0]}"
        return f"remove {self.keys[-1]}" + f", or use one of {', '.join(self.allowed)}" * bool(self.allowed)


def refused_of_yaml(config: dict[str, Any]) -> list[Refused]:
    """Return the settings of an accelerate YAML that are not passed on to accelerate."""
    return list(_refused(config, YAML_SETTINGS, ()))


def refused_of_json(config: dict[str, Any]) -> list[Refused]:
    """Return the settings of a DeepSpeed JSON that are not passed on; keys like _comment are allowed."""
    refused = _refused(config, JSON_SETTINGS, ())
    return [setting for setting in refused if not setting.keys[-1].startswith(("_", "//", "#"))]


def _refused(content: dict[str, Any], rules: dict[str, Any], above: tuple[str, ...]) -> Iterator[Refused]:
    prefix = _PREFIXES.get(above[-1], "") if above else ""
    for key, value in content.items():
        keys = (*above, str(key))
        name = keys[-1] if keys[-1].startswith(prefix) else f"{prefix}{key}"
        rule = rules.get(name, rules.get("*"))
        inner = rules if rule == "plain" else rule
        is_text = isinstance(value, str | list) and value != "auto"
        if name not in rules and ("*" not in rules or (rule == "plain" and is_text)):
            yield Refused(keys, value, tuple(rules), ())
        elif isinstance(inner, dict):
            if isinstance(value, dict):
                yield from _refused(value, inner, keys)
        elif rule is None:
            if value and isinstance(value, dict):
                yield Refused(keys, value, (), ())
        elif isinstance(rule, list) and value and not _is_of(value, rule):
            yield Refused(keys, value, (), tuple(rule))


def _is_of(value: object, allowed: list[str]) -> bool:
    given = {str(item).lower() for item in (value if isinstance(value, list) else [value])}
    return given <= {word.lower() for word in allowed}
