"""What a record must hold so that a report can count with it: the types of RunRecord, sizes, lengths."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import orjson

from slm_toolkit.base.user_files import MOST_LEVELS
from slm_toolkit.config.run_config import CHECKPOINTING_SYNONYMS, FLAGS, RunConfig
from slm_toolkit.model.from_config import MOST_LAYERS, is_size
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.record.memory_timeline import PARTS
from slm_toolkit.record.numerics import Numerics
from slm_toolkit.record.run_record import STATUSES, RunRecord
from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.strategy.deepspeed_json import check_shape
from slm_toolkit.strategy.strategy import check_sections

LARGEST = 1e18
"of any number: products of a few stay finite, and int64, which Parquet has, holds it"
Fits = Callable[[Any], bool]


def wrong_fields(content: dict[str, Any]) -> list[str]:
    """Names of fields that no report could count with, of a record that has all that are required."""
    known, asked, model = _of_record(), content["asked"], content["model"]
    if wrong := _misfits(known, content):
        return wrong
    if content["status"] not in STATUSES:
        wrong.append("status")
    wrong += [f"asked.{name}" for name in _misfits(_ASKED, asked)]
    if "config" not in asked:
        wrong.append("asked.config")
    if not wrong:
        wrong += [f"asked.config.{name}" for name in _wrong_in_config(orjson.dumps(asked["config"]))]
        files = [asked.get(name) for name in ("accelerate_config", "deepspeed_config")]
        wrong += [f"asked.{name}" for name in _wrong_in_files(orjson.dumps(files))]
    wrong += [f"model.{name}" for name in _wrong_in_model(orjson.dumps(model))]
    for name, fits in _NESTED.items():
        if (value := content.get(name)) is not None and not fits(value):
            wrong.append(name)
    return wrong or _unequal(content)


@cache
def _wrong_in_config(text: bytes) -> list[str]:
    """Found once for all launches of a run."""
    config = orjson.loads(text)
    nested = [name for name, value in config.items() if isinstance(value, dict | list)]  # no flag is
    return [*_misfits(_of_config(), config), *(_ALWAYS_ASKED - config.keys()), *nested]


@cache
def _wrong_in_model(text: bytes) -> list[str]:
    model = orjson.loads(text)
    return [*_misfits(_of_model(), model), *(_ALWAYS_IN_MODEL - model.keys())]


@cache
def _wrong_in_files(text: bytes) -> list[str]:
    """What the run's own YAML and JSON said: they were read once, and must still be what can be read."""
    accelerate, deepspeed = orjson.loads(text)
    path, found = Path("record.json"), []
    try:
        check_sections(accelerate or {}, path)
    except ValueError:
        found.append("accelerate_config")
    try:
        check_shape(deepspeed or {}, path)
        has_stage = ((deepspeed or {}).get("zero_optimization") or {}).get("stage", 0) in (0, 1, 2, 3)
    except ValueError:
        has_stage = False
    if not has_stage:
        found.append("deepspeed_config")
    return found


def may_be_deep(content: Any) -> Any:
    """The part of a record whose types say nothing of what lies in it; the rest is seen by `wrong_fields`."""
    return {name: content[name] for name in _free() & content.keys()} if type(content) is dict else content


@cache
def _free() -> frozenset[str]:
    return frozenset(name for name, hint in _of(RunRecord).items() if "Any" in str(hint))


def is_deep(value: Any) -> bool:
    """Whether mappings and lists lie so deep in one another that those who write them out would give up."""
    level = 0
    now = [value]
    while now:
        now = [
            below
            for at in now
            for below in (at.values() if type(at) is dict else at)
            if type(below) is dict or type(below) is list
        ]
        level += 1
        if level > MOST_LEVELS:
            return True
    return False


def _unequal(content: dict[str, Any]) -> list[str]:
    """Series of the same steps that are not equally long, steps that took no time, and ranks of no number."""
    steps, wrong = content.get("step_seconds") or [], []
    if content["status"] == "ok" and content.get("world_size") is None:
        wrong.append("world_size")
    if len(set(map(len, steps))) > 1 or any(seconds and min(seconds) <= 0 for seconds in steps):
        wrong.append("step_seconds")
    phases = content.get("phase_seconds") or []
    if phases and (
        len(phases) != len(steps)
        or any(len(series) != len(steps[0]) for of_rank in phases for series in of_rank.values())
    ):
        wrong.append("phase_seconds")
    return wrong


def _number(kinds: set[type], least: float) -> Fits:
    return lambda value: type(value) in kinds and least <= value <= LARGEST


def _numbers(kinds: set[type], least: float) -> Fits:
    """Of a list of them, in a tenth of the time that one call for each would take."""
    has_none = type(None) in kinds

    def fits(values: Any) -> bool:
        if type(values) is not list or not kinds.issuperset(map(type, values)):
            return False
        known = [value for value in values if value is not None] if has_none else values
        return not known or (least <= min(known) and max(known) <= LARGEST)

    return fits


_FLOAT, _INT = {float, int}, {int}  # JSON writes 3.0 as 3 in some hands


@cache
def fits_of(hint: Any, least: float = 0.0) -> Fits:
    """Whether a value read from JSON is what a type hint says, and no number in it too small or too large."""
    if hint is Any:
        return lambda value: True
    if hint in (float, int):
        return _number(_FLOAT if hint is float else _INT, least)
    if hint in (str, bool, type(None)):
        return lambda value: type(value) is hint
    kind, of = get_origin(hint), get_args(hint)
    if kind is UnionType:
        several = [fits_of(each, least) for each in of if each is not type(None)]
        if len(several) == 1 and type(None) in of:
            (fits,) = several
            return lambda value: value is None or fits(value)
        return lambda value: any(fits(value) for fits in several) or (value is None and type(None) in of)
    if kind is list:
        names = set(get_args(of[0])) if get_origin(of[0]) is UnionType else {of[0]}
        if names & {float, int} and names <= {float, int, type(None)}:
            plain = _FLOAT if float in names else _INT
            return _numbers(plain | (names & {type(None)}), least)
        each = fits_of(of[0], least)
        return lambda value: type(value) is list and all(map(each, value))
    assert kind is dict, hint
    each = fits_of(of[1], least)
    return lambda value: type(value) is dict and all(map(each, value.values()))


def _shape(hints: dict[str, Any], required: frozenset[str] = frozenset()) -> Fits:
    """Of an object with these names and perhaps others."""

    of_names = {name: fits_of(hint) for name, hint in hints.items()}

    def fits(value: Any) -> bool:
        return type(value) is dict and value.keys() >= required and not _misfits(of_names, value)

    return fits


def _misfits(of_names: dict[str, Fits], value: dict[str, Any]) -> list[str]:
    return [name for name, each in value.items() if name in of_names and not of_names[name](each)]


def _of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _of_record() -> dict[str, Fits]:
    losses = ("losses", "losses_by_dataset", "eval_losses", "eval_losses_by_set")
    divisors = ("world_size", "num_machines", "num_cores", "tokens_per_step")
    least = dict.fromkeys(losses, -LARGEST) | dict.fromkeys(divisors, 1.0)
    return {name: fits_of(hint, least.get(name, 0.0)) for name, hint in _of(RunRecord).items()}


@cache
def _of_model() -> dict[str, Fits]:
    counts = {name: _number(_INT, 1) for name in _ALWAYS_IN_MODEL if name != "name"}
    counts["num_layers"] = lambda value: is_size(value) and value <= MOST_LAYERS  # counted one by one
    return {name: fits_of(hint) for name, hint in _of(ModelSpec).items()} | counts


@cache
def _of_config() -> dict[str, Fits]:
    found = {name: fits_of(hint) for name, hint in _of(RunConfig).items()}
    for field in dataclasses.fields(RunConfig):
        if (choices := FLAGS[field.name].choices) is not None:  # of a newer version there are others
            known = (*choices, *FLAGS[field.name].synonyms, field.default)
            found[field.name] = lambda value, known=known: value in known
    checkpointing = ("none", "full", "selective_op", "selective_layer", *CHECKPOINTING_SYNONYMS)
    found["gradient_checkpointing"] = lambda value: str(value).lower() in checkpointing
    for name in ("seq_len", "per_device_train_batch_size", "gradient_accumulation_steps"):
        found[name] = _number(_INT, 1)
    return found


_ASKED: dict[str, Fits] = {
    "config": fits_of(dict[str, Any]),
    "num_processes": _number(_INT, 1),
    "files": fits_of(dict[str, Any]),
    "accelerate_config": fits_of(dict[str, Any] | None),
    "deepspeed_config": fits_of(dict[str, Any] | None),
}
_ALWAYS_ASKED = frozenset(("seq_len", "numerics", "gradient_checkpointing", "per_device_train_batch_size"))
_ALWAYS_IN_MODEL = frozenset(
    (*(f.name for f in dataclasses.fields(ModelSpec) if f.default is dataclasses.MISSING), "num_params")
)
_PEAK = {"phase": str, "module": str, "num_bytes": int, "parts": dict[str, int], "modules": dict[str, int]}
_GPU_WATCH = {
    "energy_joules": list[float] | None,
    "utilization": list[int] | None,
    "clock_mhz": list[int] | None,
    "throttle_reasons": dict[str, int] | None,
    "used_bytes_before": int | None,
    "num_processes_before": int | None,
    "allocator": dict[str, int] | None,
}
_RAM = ("total_bytes", "least_available_bytes", "swapped_out_bytes")


_has_peak = _shape(_PEAK, frozenset(_PEAK))


def _at_peak(value: Any) -> bool:
    return _has_peak(value) and value["parts"].keys() <= set(PARTS)


def _list_of(each: Fits) -> Fits:
    return lambda value: type(value) is list and all(map(each, value))


_ANATOMY = _of(Anatomy)
_anatomy = _shape(_ANATOMY, frozenset(_ANATOMY))
_NESTED: dict[str, Fits] = {
    "anatomy": lambda value: len(value) == len(_ANATOMY) and _anatomy(value),
    "numerics": _shape(_of(Numerics)),
    "memory_at_peak": _at_peak,
    "gpu_watch": _list_of(_shape(_GPU_WATCH)),
    "datasets": _list_of(_shape({"name": str, "packing": str}, frozenset({"name", "packing"}))),
    "host_ram": _shape({}, frozenset(_RAM)),
    "deepspeed_estimate": _shape({}, frozenset({"gpu_bytes"})),
}
