"""Apply the edits of findings to a strategy's files."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.safe_files import write_beside
from slm_toolkit.doctor.case import Case, Files, with_json
from slm_toolkit.doctor.finding import Edit, Finding, with_value


def edits_of(findings: list[Finding]) -> list[Edit]:
    """Return the edits of all findings in order; skip a finding that changes a key of an earlier edit."""
    chosen: list[Edit] = []
    for finding in findings:
        if not any(_touch(edit, done) for edit in finding.edits for done in chosen):
            chosen += finding.edits
    return chosen


def _touch(edit: Edit, other: Edit) -> bool:
    key, other_key = (f"{each.file}.{each.key}." for each in (edit, other))
    return edit != other and (key.startswith(other_key) or other_key.startswith(key))


def mended(case: Case, edits: list[Edit]) -> Case:
    """Return the case after `edits`; no file is written."""
    files = case.files
    config, deepspeed = files.config, files.deepspeed
    for edit in edits:
        if edit.file == "yaml" and files.yaml_text:
            config = with_value(config, edit.keys, edit.value)
        elif edit.file == "json" and files.json_text:
            deepspeed = with_value(deepspeed, edit.keys, edit.value)
    files = dataclasses.replace(files, config=config, deepspeed=deepspeed)
    if files.json_path is None:  # the corrected YAML may name a JSON that can be read
        files = with_json(files)
    return dataclasses.replace(case, files=files)


def write_mended(before: Files, after: Files, folder: Path) -> dict[Path, Path]:
    """Write the corrected YAML, and the JSON that it then names, into `folder`; return each with its source.

    Raises ValueError if a file exists, or if the folder can't be written.
    """
    texts, sources = {}, {}
    json_path = folder / after.json_path.name if after.json_path is not None else None
    if before.yaml_text:
        config, named = after.config, ("deepspeed_config", "deepspeed_config_file")
        if json_path is not None and json_path.resolve() != after.json_path.resolve():
            config = with_value(config, named, str(json_path))
        path = folder / before.yaml_path.name  # accelerate also reads its config from JSON
        texts[path] = _as_json(config) if path.suffix == ".json" else as_yaml(config, before.yaml_text)
        sources[path] = before.yaml_path
    if json_path is not None and after.json_text:
        texts[json_path], sources[json_path] = _as_json(after.deepspeed), after.json_path
    return {path: sources[path] for path in write_beside(texts, flag="--fix")}


def _as_json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def as_yaml(content: Any, text: str) -> str:
    """Return the content as YAML, with the comments that `text` has above and behind the same keys."""
    key_of_line = re.compile(r"(\s*)([\w.-]+)\s*:")
    above: dict[str, list[str]] = {}
    behind: dict[str, str] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if key := key_of_line.match(line):
            comment = re.search(r"\s+#.*", line)
            above.setdefault(key[2], []).extend(waiting)
            behind[key[2]], waiting = comment[0] if comment else "", []
        elif line.lstrip().startswith("#"):
            waiting.append(line.strip())
    lines = []
    for line in yaml.safe_dump(content, sort_keys=False, width=1000).splitlines():
        if key := key_of_line.match(line):
            lines += [key[1] + comment for comment in above.pop(key[2], [])]
            line += behind.pop(key[2], "")
        lines.append(line)
    return "\n".join([*lines, *waiting, ""])
