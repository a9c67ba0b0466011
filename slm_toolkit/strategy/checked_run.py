"""CheckedRun: the settings of a run, checked in one place that knows every contradiction between them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.config.flag_metadata import field_problems
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import check_adapter_base
from slm_toolkit.strategy.settings import PREFIX, product_problem, value_at
from slm_toolkit.strategy.strategy import Strategy, is_shipped, micro_steps


@dataclass(frozen=True)
class CheckedRun:
    """A run whose settings don't contradict each other."""

    config: RunConfig
    spec: ModelSpec
    strategy: Strategy
    "without the optimizer and scheduler of a DeepSpeed JSON, which the flags replace"
    num_ranks: int
    taken_out: str | None
    "a line for the user that names what was removed from the JSON"


def run_problems(
    config: RunConfig,
    strategy: Strategy | None = None,
    spec: ModelSpec | None = None,
    *,
    num_ranks: int | None = None,
    **launch: Any,
) -> list[str]:
    """Return a sentence for each contradiction in the settings of a run. What is None is not checked.

    `launch`: what `contradictions` knows of the launch, `mixed_precision` and `has_gpu`.
    """
    problems = config.problems()
    if strategy is not None:
        problems += contradictions(strategy, config, num_processes=num_ranks, **launch)
        problems += parallel_problems(strategy, num_ranks=num_ranks)
    if spec is not None:
        problems += kernel_problems(spec, config)
    return list(dict.fromkeys(problems))


def checked_run(
    config: RunConfig, spec: ModelSpec, strategy: Strategy, *, num_ranks: int, **launch: Any
) -> CheckedRun:
    """Return the run. Raises one ValueError with all `run_problems`, or for a model that can't be trained."""
    problems = [*passed_on_problems(strategy), *_launch_problems(strategy, config)]
    problems += run_problems(config, strategy, spec, num_ranks=num_ranks, **launch)
    if problems:
        raise all_of(problems)
    check_adapter_base(config, spec)
    deepspeed = strategy.deepspeed_config or {}
    removed = [name for name in _SECTIONS if name in deepspeed]
    if not removed:
        return CheckedRun(config, spec, strategy, num_ranks, None)
    file = Path(strategy.deepspeed_config_file or strategy.path or strategy.name).name
    line = f"note: removed from {file}: {' and '.join(removed)}. The flags decide for all strategies"
    kept = {key: value for key, value in deepspeed.items() if key not in removed}
    strategy = dataclasses.replace(strategy, deepspeed_config=kept)
    return CheckedRun(config, spec, strategy, num_ranks, line)


# of a DeepSpeed JSON: the script creates the optimizer and sets the learning rate from its flags
_SECTIONS = ("optimizer", "scheduler")
_USUAL_HINT = "`--help all` explains each flag"


def all_of(problems: list[str], *, verb: str | None = None) -> ValueError:
    """Return one error with all problems, each once, and the hints of those that have one."""
    usual = f"`slm {verb} --help all` explains each flag" if verb else _USUAL_HINT
    parted = [problem.partition("\nhint: ")[::2] for problem in problems]
    lines = dict.fromkeys(line for lines, _ in parted for line in lines.splitlines())
    hints = dict.fromkeys(hint for _, hint in parted if hint not in ("", _USUAL_HINT)) or [usual]
    return ValueError("\n".join(lines) + "\nhint: " + "; ".join(hints))


def contradictions(
    strategy: Strategy,
    config: RunConfig,
    *,
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    has_gpu: bool = True,
) -> list[str]:
    """Return a sentence for each setting of a strategy that contradicts the flags.

    `num_processes`: number of ranks; None: the JSON's `train_batch_size` is not checked.
    `mixed_precision`: the value of the launcher's option or variable; None: the files' value applies.
    """
    deepspeed = strategy.deepspeed_config or {}
    precision = mixed_precision or strategy.mixed_precision
    in_json = json_contradictions(strategy, config, num_processes, precision)
    problems = []
    if problem := precision_problem(precision, config, has_gpu=has_gpu):
        in_json.pop("fp16.enabled", None)  # the same problem
        source = "" if precision == strategy.mixed_precision else "accelerate's --mixed_precision: "
        problems.append(source + problem)
    problems += [f'{sentence}: write "auto", so that the flags decide' for sentence in in_json.values()]
    problems += [
        f"the DeepSpeed JSON has {path}: {why}"
        for path, why in _NOT_RUN.items()
        if _is_on(value_at(deepspeed, path.split(".")))
    ]
    if deepspeed.get("optimizer"):
        kind = value_at(deepspeed, ("optimizer", "type"))
        if config.numerics == "stock":
            problems.append(
                "the DeepSpeed JSON's optimizer needs other numerics than --numerics stock: remove it"
            )
        elif str(kind).lower() not in ("adam", "adamw"):
            problems.append(f"the DeepSpeed JSON's optimizer is {kind}: remove it, and choose with --optim")
    problems += field_problems(config, strategy)
    fake = config.rehearse is not None and not has_gpu
    problems += [f"--rehearse without a GPU: {why}" for why in (_not_faked(strategy, config) if fake else ())]
    return [f"{strategy.path or strategy.name}: {problem}" for problem in problems]


# parts that would change nothing, or more than the strategy, and that estimates would not count
_NOT_RUN = {  # by path in a DeepSpeed JSON; from deepspeed 0.19.8, none was tried on a GPU
    "compile.deepcompile": "DeepCompile begins when a script calls engine.compile(), and slm_toolkit does "
    "not: remove it; --kernels compiled compiles the layers",
    "tensor_parallel.autotp_size": "slm_toolkit does not run tensor parallelism: remove it",
    "zero_optimization.zenflow": "ZenFlow applies most gradients some steps later, so its losses are not "
    "those of other strategies: remove it",
    "zero_optimization.offload_optimizer.super_offload": "slm_toolkit does not run SuperOffload: remove it",
}


def _is_on(value: Any) -> bool:
    """Return whether a switch is on, a section is there, or a number of ranks is above one."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value > 1 if is_number else value is True or isinstance(value, Mapping)


def _not_faked(strategy: Strategy, config: RunConfig) -> list[str]:
    """Return the settings that tensors without memory don't have, or would measure wrongly."""
    cases = (
        (config.compiles, f"--kernels {config.kernels}: fake tensors can't be compiled"),
        (config.packing not in ("auto", "concat"), f"--packing {config.packing} needs documents"),
        (config.peft == "qlora", "--peft qlora: fake tensors can't be quantized"),
        (strategy.offloads, f"{strategy.name}: fake tensors are all on the CPU"),
    )
    return [f"{sentence}; use `slm estimate`, or rehearse on a GPU" for applies, sentence in cases if applies]


def precision_problem(mixed_precision: str | None, config: RunConfig, *, has_gpu: bool = True) -> str | None:
    """Return why a run can't compute in this mixed precision, and what to do; None if it can."""
    if mixed_precision == "fp8":
        return "mixed precision fp8 is not supported: remove it; --fp8 tensorwise trains in float8"
    if config.numerics == "stock":
        if mixed_precision == "fp16" and not has_gpu:
            return "mixed precision fp16 needs a GPU: on a CPU accelerate computes in fp32"
    elif mixed_precision in ("bf16", "fp16") and mixed_precision != config.computes_in:
        other = "fp16" if mixed_precision == "fp16" else "aligned"
        return (
            f"mixed precision is {mixed_precision}, but --numerics {config.numerics} computes in "
            f"{config.computes_in}: use --numerics {other} for {mixed_precision}, or remove it"
        )
    return None


def json_contradictions(
    strategy: Strategy, config: RunConfig, num_ranks: int | None, precision: str | None
) -> dict[str, str]:
    """Return a sentence for each DeepSpeed key whose value contradicts the flags; "auto" never does.

    Under `--numerics stock` the JSON's clipping and accumulation apply, as in a user's own script.
    """
    batch, numerics = config.per_device_train_batch_size, f"--numerics {config.numerics}"
    in_bf16 = config.computes_in == "bf16" and precision != "fp16"
    expected = {
        "train_micro_batch_size_per_gpu": ("--per_device_train_batch_size", batch),
        "bf16.enabled": (numerics, in_bf16),
    }
    if config.numerics != "stock":
        expected |= {
            "gradient_accumulation_steps": (
                "--gradient_accumulation_steps",
                config.gradient_accumulation_steps,
            ),
            "gradient_clipping": ("--max_grad_norm", config.max_grad_norm),
            "fp16.enabled": (numerics, config.computes_in == "fp16"),
        }
    if num_ranks is not None:
        product = batch * micro_steps(strategy, config) * num_ranks
        expected["train_batch_size"] = ("batch x micro-steps x ranks", product)
    values = {key: value_at(strategy.deepspeed_config, key.split(".")) for key in expected}
    return {
        key: f"DeepSpeed's settings have {key} {str(values[key]).lower()}, {source} says {str(right).lower()}"
        for key, (source, right) in expected.items()
        if values[key] not in (None, "auto", right)
    }


# Groups of ranks.


def parallel_problems(strategy: Strategy, *, num_ranks: int | None = None) -> list[str]:
    """Return why a strategy's `parallelism_config` can't run; with `num_ranks`, check the product too."""
    section = (strategy.accelerate_config or {}).get("parallelism_config") or {}
    where = f"{strategy.path or strategy.name}: parallelism_config"
    problems = [
        f"{where}.{name}: accelerate does not read this key: write {PREFIX}{name}"
        for name in section
        if not name.startswith(PREFIX)
    ]
    sizes = strategy.parallel_sizes
    problems += [f"{where}: {sentence}" for sentence in not_run_yet(sizes)]
    if num_ranks is None or strategy.path is None:
        return problems
    # the groups of a shipped file are fitted to the ranks
    is_fitted = not strategy.is_fsdp2 or is_shipped(Path(strategy.path))
    if problem := None if is_fitted else product_problem(sizes, num_ranks):
        problems.append(f"{where}: {problem}: the product must be the number of ranks")
    if num_ranks % (secondary := strategy.sharding.secondary_ranks):
        problems.append(f"{where}: zero_hpz_partition_size {secondary} with {num_ranks} ranks: not divided")
    return problems


def check_groups(strategy: Strategy, *, num_ranks: int | None = None) -> None:
    """Raise one ValueError with all `parallel_problems`."""
    if problems := parallel_problems(strategy, num_ranks=num_ranks):
        raise ValueError("\n".join(problems) + "\nhint: set dp_replicate_size and dp_shard_size only")


def not_run_yet(sizes: Mapping[str, int]) -> list[str]:
    """Return a sentence for each kind of parallelism that slm_toolkit does not run."""
    kinds = {"tp_size": "tensor", "cp_size": "context", "sp_size": "sequence"}
    return [
        f"{name} {sizes[name]}: slm_toolkit does not run {kind} parallelism"
        for name, kind in kinds.items()
        if sizes.get(name, 1) > 1
    ]


# What a launch would do with the files' settings.


def _launch_problems(strategy: Strategy, config: RunConfig) -> list[str]:
    """Return a sentence for each setting of the files with which a launch fails, or trains something else."""
    settings = strategy.accelerate_config or {}
    precision, dynamo = settings.get("mixed_precision"), settings.get("dynamo_config") or {}
    backend = settings.get("dynamo_backend") or dynamo.get("dynamo_backend") or dynamo.get("backend") or "no"
    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    gathers = str(value_at(strategy.deepspeed_config, gather.split("."))).lower() == "true"
    cases = (
        (  # without quotes `no` is false in YAML, and accelerate fails on it
            precision not in (None, "no", "bf16", "fp16", "fp8"),
            f"mixed_precision is {precision}: write 'no' in quotes, bf16, fp16 or fp8",
        ),
        (
            str(backend).lower() != "no",
            f"dynamo_backend {backend} compiles this strategy only: remove it, and use --kernels compiled",
        ),
        (
            strategy.is_zero_3 and config.saves_model and not gathers,
            f"{gather} is not true, so the model can't be saved after the last step: write true",
        ),
    )
    name = strategy.path or strategy.name
    hint = f"`slm doctor --strategy {name}` explains it; --fix writes a corrected copy"
    return [f"{name}: {sentence}\nhint: {hint}" for applies, sentence in cases if applies]


def check_passed_on(strategy: Strategy) -> None:
    """Raise one ValueError with all settings that are not passed on to accelerate or DeepSpeed."""
    if problems := passed_on_problems(strategy):
        raise ValueError("\n".join(problems))


def passed_on_problems(strategy: Strategy) -> list[str]:
    """Return one text, with a hint, if settings of the files are not passed on."""
    from slm_toolkit.strategy.passed_on import refused_of_json, refused_of_yaml  # its lists take time to read

    json_path = strategy.deepspeed_config_file or strategy.path
    lines = [
        f"{file}: {setting.sentence}: {setting.why}. Change: {setting.change}"
        for file, settings in (
            (strategy.path, refused_of_yaml(strategy.accelerate_config or {})),
            (json_path, refused_of_json(strategy.deepspeed_config or {})),
        )
        for setting in settings
    ]
    hint = f"`slm doctor --strategy {strategy.path} --fix DIR` writes corrected copies"
    return ["\n".join(lines) + f"\nhint: nothing is launched with such settings; {hint}"] if lines else []
