"""The JSON schema of record.json, made from RunRecord: its names, types and what its docstrings say.

python -m slm_toolkit.record.schema > slm_toolkit/record/record.schema.json
"""

import ast
import dataclasses
import inspect
import json
from typing import Any, get_args, get_origin, get_type_hints

from slm_toolkit.record.run_record import SCHEMA_VERSION, STATUSES, RunRecord

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12. Names that it does not know are allowed: later versions add some."""
    hints, said = get_type_hints(RunRecord), _attribute_docstrings(RunRecord)
    properties = {}
    for f in dataclasses.fields(RunRecord):
        description = {"description": said[f.name]} if f.name in said else {}
        properties[f.name] = {**_of(hints[f.name]), **description}
    properties["status"]["enum"] = list(STATUSES)
    properties["schema_version"] |= {"minimum": 0, "maximum": SCHEMA_VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"record.json of slm_toolkit, version {SCHEMA_VERSION}",
        "description": inspect.getdoc(RunRecord),
        "type": "object",
        "required": [
            f.name
            for f in dataclasses.fields(RunRecord)
            if f.default is f.default_factory is dataclasses.MISSING
        ],
        "properties": properties,
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _of(hint: Any) -> dict[str, Any]:
    """Of `list[float | None]`: an array of numbers and nulls."""
    if hint is Any:
        return {}
    if get_origin(hint) is list:
        return {"type": "array", "items": _of(get_args(hint)[0])}
    if get_origin(hint) is dict:
        values = _of(get_args(hint)[1])
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    kinds = [_of(kind) for kind in get_args(hint)]  # a union
    together: dict[str, Any] = {}
    for kind in kinds:
        together |= kind
    return {**together, "type": [kind["type"] for kind in kinds]}


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """The string that stands under a field, in one line."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        is_docstring = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and is_docstring:
            found[field.target.id] = " ".join(below.value.value.split())
    return found


if __name__ == "__main__":
    print(schema_text(), end="")
