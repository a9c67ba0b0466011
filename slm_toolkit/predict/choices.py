"""Choose what the flags leave to us: the kernels and the batch, the same for every row of a comparison."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from importlib.util import find_spec
from itertools import compress, product
from math import inf
from typing import Any

from slm_toolkit.config.run_config import DEFAULT_BATCH, FLAGS, KERNEL_SETS, RunConfig
from slm_toolkit.hardware.gpus import Gpu, find_gpu, gpus_here, num_cores
from slm_toolkit.hardware.machine import has_compiler
from slm_toolkit.model.model_spec import ModelSpec, flops_per_token
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.estimate import LARGEST_BATCH_TRIED, Estimate, estimate
from slm_toolkit.predict.setup.other_trainers import OtherTrainer
from slm_toolkit.predict.setup.setup import Deployment, setup_of
from slm_toolkit.strategy.checked_run import run_problems
from slm_toolkit.strategy.strategy import Strategy, sequences_per_step

_USUAL = Deployment()
_COMPILE_SECONDS = 10
"of the first step on an H100: 9.3, 9.3 and 17.6 s for three models (results/h100-80gb, 2026-11-27)"
_FOREVER = 10**9
"steps of a comparison on a GPU, and of a run there whose length nobody gave"
_COMPILE_SECONDS_ON_CPU = 20
"of the first step of slm-10m on two cores, without torch's cache (docs/accuracy.md, 2026-11-28)"
_CPU_FLOPS, _CPU_GAIN = 1.1e11, 1.07
"""FLOPs per second of one core (AMD EPYC) in bf16 with fused kernels, and how much faster compiled ones are:
1.05 times for slm-10m, 1.09 times with a vocabulary of 32,000 (same place)"""
_LEAST_GAIN = 1.03
"times the tokens per second; a batch twice as large that gains less is not worth its memory"
_SURE = 0.95
"probability with which a chosen batch fits"
_BATCH = "per_device_train_batch_size"


def choices(
    configs: Sequence[RunConfig],
    strategies: Sequence[Strategy],
    *,
    gpu: Gpu | None,
    has_gpu: bool,
    num_gpus: int,
    gpus_per_node: int = 8,
    is_comparison: bool = False,
    runs_here: bool = False,
    like: OtherTrainer | None = None,
    deployment: Deployment = _USUAL,
) -> tuple[dict[str, Any], list[str]]:
    """Return --kernels and the batch, if a config leaves them to us, and a line for each: what and why.

    The values are the same for all rows. `configs`: as the flags gave them. `gpu`: None if unknown.
    `runs_here`: this machine needs a compiler and Triton. Raises ValueError for an unknown model.
    """
    free = [name for name in ("kernels", _BATCH) if any(_leaves(config, name) for config in configs)]
    if not free:
        return {}, []
    chosen: dict[str, Any] = {"kernels": "plain", _BATCH: DEFAULT_BATCH}
    notes = []

    def filled(**flags: Any) -> list[RunConfig]:
        return [with_choices(config, {**chosen, **flags}, has_gpu=has_gpu) for config in configs]

    specs = [find_model(config.model) for config in filled()]

    def rows_with(**flags: Any) -> list[Estimate]:
        sizes = (num_gpus, gpus_per_node, gpu, like, deployment)
        runs = product(zip(filled(**flags), specs, strict=True), strategies)
        return [
            estimate(setup_of(spec, strategy, config, *sizes).launched) for (config, spec), strategy in runs
        ]

    missing = _missing_here(has_gpu) if runs_here else set()
    both = [allowed_kernels(name, filled(), specs, strategies, missing) for name in ("fused", "compiled")]
    fused, compiled = both
    chosen["kernels"], why = compiled, "without an estimate of its speed"
    if not has_gpu:
        saved = _saved_on_cpu(filled()[0], specs[0], strategies[0], num_gpus)
        chosen["kernels"] = compiled if saved > _COMPILE_SECONDS_ON_CPU else fused
        why = f"because compiling takes about {_COMPILE_SECONDS_ON_CPU} s and saves about {saved:.0f} s here"
    with suppress(ValueError):  # no closed form for one of the rows
        for kernels in () if gpu is None else (compiled, fused):
            chosen["kernels"] = kernels
            if _BATCH in free:
                chosen[_BATCH], limit = _batch(lambda size: rows_with(**{_BATCH: size}))
                notes = [f"batch: {chosen[_BATCH]} per GPU, because {limit}"]
            sets = ("plain", fused, kernels)
            plain, uncompiled, best = (_seconds(rows_with(kernels=name)) for name in sets)
            why = f"an estimated {plain / best:.2f} times as fast as plain"
            num_steps = _FOREVER if is_comparison else _num_steps(filled(), strategies[0], num_gpus)
            pays = num_steps * (uncompiled - best) >= _COMPILE_SECONDS * len(specs) * len(strategies)
            if pays or "kernels" not in free:
                break
    if "kernels" in free and (runs_here or gpu is not None or not has_gpu):
        notes.append(f"kernels: {chosen['kernels']}, {why}")
    return {name: chosen[name] for name in free}, notes


def completed(
    config: RunConfig, strategy: Strategy, *, has_gpu: bool, num_ranks: int
) -> tuple[RunConfig, list[str]]:
    """Return the config of a run on this machine, or on several like it, with all defaults, and the lines."""
    names = gpus_here() if has_gpu else ()
    has_gpu = has_gpu or config.rehearse is not None  # a rehearsal stands for GPUs
    chosen, notes = choices(
        [config],
        [strategy],
        gpu=find_gpu(names[0]) if names else None,
        has_gpu=has_gpu,
        num_gpus=config.rehearse or num_ranks,
        gpus_per_node=max(1, len(names)),
        runs_here=True,
    )
    return with_choices(config, chosen, has_gpu=has_gpu), notes


def given_with(chosen: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given flags, each a value or a list of values, with these values of those left to us."""
    lists = {name: given.get(name) for name in chosen}
    return given | {
        name: [value if each == FLAGS[name].default else each for each in lists[name]]
        if isinstance(lists[name], list)
        else value
        for name, value in chosen.items()
    }


def with_choices(config: RunConfig, chosen: dict[str, Any], *, has_gpu: bool = True) -> RunConfig:
    """Return the config with these values of the flags that it leaves to us, and all other defaults."""
    left = {name: value for name, value in chosen.items() if _leaves(config, name)}
    return dataclasses.replace(config, **left).with_defaults(has_gpu=has_gpu)


def _leaves(config: RunConfig, name: str) -> bool:
    return getattr(config, name) == FLAGS[name].default


def allowed_kernels(
    name: str,
    configs: Sequence[RunConfig],
    specs: Sequence[ModelSpec],
    strategies: Sequence[Strategy],
    missing: Set[str] = frozenset(),
) -> str:
    """Return the value of --kernels with the parts that all allow, and none that is `missing`."""
    missing = {*missing, "compile"} if any(config.rehearse for config in configs) else missing

    def num_problems(kernels: str) -> list[int]:
        changed = [dataclasses.replace(config, kernels=kernels) for config in configs]
        runs = product(zip(changed, specs, strict=True), strategies or [None])
        return [len(run_problems(config, strategy, spec)) for (config, spec), strategy in runs]

    plain = num_problems("plain")
    parts = [part for part in KERNEL_SETS[name] if part not in missing and num_problems(part) == plain]
    return FLAGS["kernels"].joined(parts)


def _missing_here(has_gpu: bool) -> set[str]:
    """Return the parts of --kernels for which this machine lacks a compiler or Triton."""
    missing = set() if has_compiler() else {"compile"}
    if has_gpu and (missing or find_spec("triton") is None):
        missing.add("triton")
    return missing


def _saved_on_cpu(config: RunConfig, spec: ModelSpec, strategy: Strategy, num_ranks: int) -> float:
    """Return the seconds that compiled kernels save over fused ones in a run on this machine's CPU."""
    sequences = sequences_per_step(config, strategy, num_ranks)
    tokens = (config.with_steps(sequences).steps_asked or 0) * sequences * config.seq_len  # 0 with epochs
    flops = tokens * flops_per_token(spec, seq_len=config.seq_len)
    return (1 - 1 / _CPU_GAIN) * flops / (_CPU_FLOPS * num_cores())


def _num_steps(configs: list[RunConfig], strategy: Strategy, num_ranks: int) -> int:
    """Return the steps of the longest run."""
    sizes = [sequences_per_step(config, strategy, num_ranks) for config in configs]
    asked = [config.with_steps(size).max_steps for config, size in zip(configs, sizes, strict=True)]
    return max(steps or _FOREVER for steps in asked)


def _batch(rows_with: Callable[[int], list[Estimate]]) -> tuple[int, str]:
    """Return the largest power of two that fits and still gains, and why it is no larger.

    A row that does not even fit with one sequence does not count.
    """
    batch, rows = 1, rows_with(1)
    counts = [_is_sure(row) for row in rows]
    time = _seconds(compress(rows, counts))
    if time == inf:
        return DEFAULT_BATCH, "the network between the nodes is unknown"
    while batch < LARGEST_BATCH_TRIED and any(counts):
        rows = list(compress(rows_with(2 * batch), counts))
        gain = 2 * time / _seconds(rows)
        if not all(map(_is_sure, rows)):
            return batch, f"{2 * batch} may not fit under every strategy"
        if gain < _LEAST_GAIN:
            return batch, f"{2 * batch} gains only {100 * (gain - 1):.1f} %"
        batch, time = 2 * batch, _seconds(rows)
    return batch, "no larger one is tried" if any(counts) else "one sequence may not fit"


def _is_sure(row: Estimate) -> bool:
    return (row.fit_probability or 0) >= _SURE


def _seconds(rows: Iterable[Estimate]) -> float:
    """Return the time of a step of each row, together; infinite if one is unknown."""
    return sum(inf if row.step_seconds is None else row.step_seconds for row in rows)
