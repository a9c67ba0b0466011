"""TrainingArguments as settings in accelerate's and DeepSpeed's words."""

from pathlib import Path
from typing import Any

from slm_toolkit.conversion.fsdp_keys import fsdp_settings
from slm_toolkit.conversion.settings import Draft, Ranks, Row, Setting, deepspeed_settings, init_flag, truth
from slm_toolkit.conversion.trainer_keys import ARGUMENTS_READ, FSDP1_ONLY, FSDP_KEYS, SHARDING, XLA_KEYS
from slm_toolkit.secret_words import hidden
from slm_toolkit.user_files import is_file, json_of, read_text, typed_path

_MARKS = (
    *("fsdp", "fsdp_config", "deepspeed", "output_dir", "per_device_train_batch_size", "learning_rate"),
    *("num_train_epochs", "max_steps"),
)
_NAMES = {key.trainer: key.accelerate for key in FSDP_KEYS if key.trainer}
_NAMES |= {key.removeprefix("fsdp_"): key for key in FSDP1_ONLY if key != "fsdp_sharding_strategy"}
"transformers' names in fsdp_config: accelerate's"
_SCRIPTS = "an argument of the script's, whatever shards"
_JSON_HINT = "transformers reads JSON there"
_XLA = "TPUs' own sharding, which accelerate's YAML cannot ask for"


def is_training_arguments(config: dict[str, Any]) -> bool:
    """Whether a file holds TrainingArguments; bf16 is a word there, and a section in a DeepSpeed JSON."""
    words = [config.get(key) for key in ("bf16", "fp16")]
    return any(key in config for key in _MARKS) or any(isinstance(word, bool) for word in words)


def is_fsdp_config(config: dict[str, Any]) -> bool:
    """Whether a file is what --fsdp_config takes."""
    return any(key.removeprefix("fsdp_") in _NAMES for key in config)


def read_trainer(
    config: dict[str, Any],
    name: str,
    launch: list[Setting],
    ranks: Ranks,
    *,
    folder: Path,
    more: tuple[Setting, ...] = (),
) -> Draft:
    """The settings of TrainingArguments; files that they name are looked for here and in `folder`.

    `more`: what the environment and the launcher of a command say beside them.
    """
    has_fsdp, has_deepspeed = bool(config.get("fsdp")), bool(config.get("deepspeed"))
    if has_fsdp and has_deepspeed:
        raise ValueError(
            "fsdp and deepspeed are both asked for\nhint: the Trainer refuses that: leave out one"
        )
    rows = [
        Row(key, hidden(key, value), "stays", (), _SCRIPTS)
        for key, value in config.items()
        if key not in ARGUMENTS_READ
    ]
    settings = [*launch, *more, *_compilation(config)]
    if "use_cpu" in config:
        settings.append(
            Setting("launch", ("use_cpu",), truth(config["use_cpu"], "use_cpu"), "use_cpu", config["use_cpu"])
        )
    if has_deepspeed:
        asked, path = _loaded(config["deepspeed"], "deepspeed", folder)
        rows += [Row(k, config[k], "stays", (), _SCRIPTS) for k in ("bf16", "fp16") if k in config]
        settings.append(
            Setting("launch", ("distributed_type",), "DEEPSPEED", "deepspeed", _short(config["deepspeed"]))
        )
        settings += deepspeed_settings(asked, before="deepspeed." if path is None else "")
        settings += init_flag(settings)
        return Draft(name, "deepspeed", ranks, tuple(settings), tuple(rows), True, path, "deepspeed")
    settings += _precision(config)
    if has_fsdp:
        asked, path = _loaded(config.get("fsdp_config") or {}, "fsdp_config", folder)
        if path is not None:
            rows.append(
                Row(
                    "fsdp_config",
                    config["fsdp_config"],
                    "default",
                    (),
                    "its keys are accounted for one by one",
                )
            )
        settings.append(Setting("launch", ("distributed_type",), "FSDP", "fsdp", config["fsdp"]))
        said, found = _fsdp_keys(asked, config["fsdp"])
        engine, of_fsdp, of_keys = fsdp_settings(said, ranks, is_trainers=True)
        return Draft(name, engine, ranks, (*settings, *of_fsdp), (*rows, *found, *of_keys), True)
    if config.get("fsdp_config"):
        rows.append(Row("fsdp_config", config["fsdp_config"], "ignored", (), "read only where fsdp is on"))
    engine = "single" if ranks.num == 1 else "ddp"
    return Draft(name, engine, ranks, tuple(settings), tuple(rows), True)


def _short(value: Any) -> Any:
    """A file's name as it is, settings as their number."""
    return value if isinstance(value, str) and not value.startswith("{") else "settings"


def _fsdp_keys(asked: dict[str, Any], fsdp: Any) -> tuple[dict[str, tuple[Any, str]], list[Row]]:
    """accelerate's names of what fsdp_config says, and of the words that --fsdp took until transformers 5."""
    said, rows = {}, []
    for key, value in asked.items():
        name, source = key.removeprefix("fsdp_"), f"fsdp_config.{key}"
        if name in XLA_KEYS:
            rows.append(Row(source, value, "no counterpart" if value else "default", (), _XLA))
        else:
            said[_NAMES.get(name, f"unknown {name}")] = (value, source)
    if fsdp is True:
        return said, rows
    is_fsdp1 = str(said.get("fsdp_version", (2, ""))[0]) == "1"
    for word in map(str, fsdp) if isinstance(fsdp, list) else str(fsdp).split():
        source = f"fsdp {word}"
        if word == "offload":
            said.setdefault("fsdp_offload_params", (True, source))
        elif word == "auto_wrap":
            rows.append(Row(source, True, "default", (), "transformers wraps by layer anyway"))
        elif word.upper() in SHARDING and (is_fsdp1 or word in ("full_shard", "shard_grad_op")):
            value = word if is_fsdp1 else word == "full_shard"
            said.setdefault("fsdp_reshard_after_forward", (value, source))
        else:
            only = " without fsdp_config.version 1 (FSDP1)" if word in map(str.lower, SHARDING) else ""
            raise ValueError(
                f"transformers refuses --fsdp {word}{only}\n"
                "hint: full_shard, shard_grad_op, offload, auto_wrap; or --fsdp alone, true in a file"
            )
    return said, rows


def _precision(config: dict[str, Any]) -> list[Setting]:
    asked = {key: truth(config[key], key) for key in ("bf16", "fp16") if config.get(key) is not None}
    if all(asked.get(key) for key in ("bf16", "fp16")):
        raise ValueError("bf16 and fp16 are both true\nhint: one of them")
    return [
        Setting(
            "launch",
            ("mixed_precision",),
            key,
            key,
            config[key],
            "the script may keep the argument: they agree",
        )
        for key, is_on in asked.items()
        if is_on
    ]


def _compilation(config: dict[str, Any]) -> list[Setting]:
    """torch_compile and its two options as accelerate's dynamo_config."""
    backend, mode = config.get("torch_compile_backend"), config.get("torch_compile_mode")
    settings = []
    if truth(config.get("torch_compile") or False, "torch_compile") or backend or mode:
        source = "torch_compile_backend" if backend else "torch_compile"
        word = str(backend or "inductor").upper()
        settings.append(
            Setting("launch", ("dynamo_config", "dynamo_backend"), word, source, config.get(source))
        )
    if mode:
        settings.append(Setting("launch", ("dynamo_config", "dynamo_mode"), mode, "torch_compile_mode", mode))
    return settings


def _loaded(value: Any, key: str, folder: Path) -> tuple[dict[str, Any], Path | None]:
    """The settings that an argument holds, names, or spells as JSON; and the file they came from."""
    if isinstance(value, dict):
        return value, None
    text, path = str(value), None
    if not text.startswith("{"):
        found = [p for p in (typed_path(text), folder / text) if is_file(p)]
        if not found:
            raise ValueError(
                f"{key}: no such file: {text}\nhint: looked for from {Path.cwd()} and beside the source"
            )
        path = found[0]
        text = read_text(path, hint=_JSON_HINT)
    config = json_of(text, f"{key}: {path or text}", hint=_JSON_HINT)
    if not isinstance(config, dict):
        raise ValueError(f"{key} is {config!r}\nhint: it holds settings, or names a file of them")
    return config, path
