"""Find the smallest changes with which a configuration fits its GPUs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

from slm_toolkit.predict.estimate import Change, Estimate, estimate
from slm_toolkit.predict.setup.setup import Setup, unknown_to_estimates, with_flags
from slm_toolkit.strategy.checked_run import run_problems
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, Strategy, find_strategy

MOST_CHANGES = 3
"changes that are combined if fewer are not enough"
MOST_GPUS = 64
_MOST_MICRO_STEPS = 1024
"times as many micro-steps as before"
_OFFLOADING = ("ds_zero2_offload", "ds_zero3_offload")
_Option = Callable[[Setup], Setup]
_Kind = Callable[[Setup], Iterator[_Option]]


def changes_that_fit(setup: Setup, before: Estimate) -> list[Change]:
    """Return the smallest changes with which a setup that does not fit would fit, the fastest first.

    `before` is the setup's estimate. Model, numerics and, if the numbers allow, the sequences per step stay.
    First come up to four changes on the same GPUs, then one that keeps the strategy, then one that takes
    more GPUs. Of each kind of change only the mildest value that fits is returned. Two are combined only if
    no single one is enough, three only if no two are. Empty if three are not enough.
    """
    flags_only = [_checkpointing, _smaller_batches]
    found = _fewest(setup, before, [*flags_only, _strategies])[:4]
    found += _fewest(setup, before, flags_only)[:1]
    found += _fewest(setup, before, [_more_gpus])[:1]
    return list(dict.fromkeys(found))


def _fewest(setup: Setup, before: Estimate, kinds: list[_Kind]) -> list[Change]:
    """Return the changes that combine the fewest of `kinds`, the fastest first."""
    options = {kind: list(kind(setup)) for kind in kinds}
    for size in range(1, MOST_CHANGES + 1):
        tried = [
            _mildest(setup, before, {kind: options[kind] for kind in combined})
            for combined in itertools.combinations(kinds, size)
        ]
        if found := [change for change in tried if change is not None]:
            return sorted(found, key=lambda change: -(change.speedup or 0.0))
    return []


def _mildest(setup: Setup, before: Estimate, options: dict[_Kind, list[_Option]]) -> Change | None:
    """Return the first combination of one option of each kind that fits, or None."""
    batches = options.get(_smaller_batches, [])

    @functools.cache
    def fitting(combined: tuple[_Option, ...]) -> tuple[Setup, Estimate] | None:
        changed = setup
        for option in combined:
            changed = option(changed)
        if not _has_estimate(changed):
            return None
        after = estimate(changed.launched)
        return (changed, after) if after.verdict == "fits" else None

    for combined in itertools.product(*options.values()):
        # where the smallest batch does not fit, no larger one does
        smallest = tuple(batches[-1] if option in batches else option for option in combined)
        if fitting(smallest) is None or (found := fitting(combined)) is None:
            continue
        changed, after = found
        speedup = None
        if before.tokens_per_second_per_gpu and after.tokens_per_second_per_gpu:
            speedup = after.tokens_per_second_per_gpu / before.tokens_per_second_per_gpu
        host_bytes = after.host_bytes_per_node if changed.strategy.offloads else None
        return Change(_described(setup, changed), speedup, host_bytes)
    return None


def _has_estimate(setup: Setup) -> bool:
    """Return whether the setup can be launched and has a closed form."""
    try:
        launched = setup.launched
        _ = launched.placement
    except ValueError:
        return False
    return not (
        run_problems(setup.config, launched.strategy, setup.spec, num_ranks=setup.num_gpus)
        or (setup.like and setup.like.problems([launched.strategy]))
        or unknown_to_estimates(setup.config, gpu=setup.gpu, spec=setup.spec)
    )


def _described(before: Setup, after: Setup) -> str:
    """Return what differs: `batch 4 instead of 8 with --gradient_accumulation_steps 2`."""
    names = ("gradient_accumulation_steps", "gradient_checkpointing")
    flags = [
        f"--{name} {value}"
        for name in names
        if (value := getattr(after.config, name)) != getattr(before.config, name)
    ]
    if after.strategy != before.strategy:
        flags.append(f"--strategy {after.strategy.name}")
    if after.num_gpus != before.num_gpus:
        flags.append(f"--num_gpus {after.num_gpus}")
    batch, smaller = (setup.config.per_device_train_batch_size for setup in (before, after))
    words = [f"batch {smaller} instead of {batch}"] if smaller != batch else []
    return " with ".join([*words, *([" ".join(flags)] if flags else [])])


# The kinds of changes. Each yields functions that change a setup, the mildest first.


def _checkpointing(setup: Setup) -> Iterator[_Option]:
    later_modes = {"none": ("selective_op", "full"), "selective_op": ("full",), "selective_layer": ("full",)}
    for mode in later_modes.get(setup.config.gradient_checkpointing, ()):
        yield _with_flags(gradient_checkpointing=mode)


def _smaller_batches(setup: Setup) -> Iterator[_Option]:
    """Yield the divisors of the batch, with as many more micro-steps."""
    batch, steps = setup.config.per_device_train_batch_size, setup.config.gradient_accumulation_steps
    for factor in range(2, min(batch, _MOST_MICRO_STEPS) + 1):
        if batch % factor == 0:
            yield _with_flags(
                per_device_train_batch_size=batch // factor, gradient_accumulation_steps=factor * steps
            )


def _strategies(setup: Setup) -> Iterator[_Option]:
    """Yield the strategies that shard or offload more on the same GPUs, the simplest first."""
    names = (*STUDIED_STRATEGIES, *_OFFLOADING) if setup.num_gpus > 1 else _OFFLOADING
    for strategy in _less_simple(setup, names):
        yield _on_gpus(strategy, setup.num_gpus)


def _more_gpus(setup: Setup) -> Iterator[_Option]:
    """Yield two, four, ... times the GPUs; for each number the own strategy, then those that shard more."""
    own = [] if setup.strategy.is_single else [setup.strategy]
    strategies = [*own, *_less_simple(setup, STUDIED_STRATEGIES)]
    count = 2 * setup.num_gpus
    while count <= MOST_GPUS:
        if count <= setup.gpus_per_node or count % setup.gpus_per_node == 0:
            yield from (_on_gpus(strategy, count) for strategy in strategies)
        count *= 2


def _with_flags(**flags: object) -> _Option:
    return lambda setup: with_flags(setup, **flags)


def _less_simple(setup: Setup, names: tuple[str, ...]) -> list[Strategy]:
    """Return the shipped strategies that are less simple than the setup's own, the simplest first."""
    strategies = sorted(map(_shipped, names), key=lambda strategy: strategy.simplicity)
    return [strategy for strategy in strategies if strategy.simplicity > setup.strategy.simplicity]


_shipped = functools.cache(find_strategy)
"a search asks for the same files hundreds of times"


def _on_gpus(strategy: Strategy, num_gpus: int) -> _Option:
    """Return the change to another strategy and number of GPUs.

    More GPUs do fewer micro-steps, else smaller batches, so that a step has as many sequences; if neither
    divides, the step grows.
    """

    def apply(setup: Setup) -> Setup:
        changed, times = setup, num_gpus // setup.num_gpus
        for name in ("gradient_accumulation_steps", "per_device_train_batch_size"):
            if changed is setup and (whole := getattr(setup.config, name)) % times == 0:
                changed = with_flags(setup, **{name: whole // times})
        return dataclasses.replace(changed, strategy=strategy, num_gpus=num_gpus)

    return apply
