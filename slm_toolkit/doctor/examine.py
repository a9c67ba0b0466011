"""Collect all findings of a case: its faults, also those that appear only after corrections, and advice."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from slm_toolkit.doctor.case import Case, is_of_cpus
from slm_toolkit.doctor.deepspeed_faults import deepspeed_faults, flag_faults
from slm_toolkit.doctor.finding import Finding, fault, gravest_first, slow, unwise, wrong
from slm_toolkit.doctor.fix import edits_of, mended
from slm_toolkit.doctor.machine_faults import environment_faults, host_ram_faults, machine_faults
from slm_toolkit.doctor.yaml_faults import fsdp_faults, key_faults, launch_faults
from slm_toolkit.hardware.gpus import Gpu, gpu_of_name
from slm_toolkit.predict.bottleneck import WORTH_SAYING, alignment_gain, levers, misaligned_widths
from slm_toolkit.predict.estimate import estimate, largest_batch
from slm_toolkit.predict.flag_checks import placement_problems
from slm_toolkit.predict.setup.setup import Deployment, Setup, known_to_estimates, unlike_the_model
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.settings import product_problem
from slm_toolkit.strategy.strategy import Strategy, find_strategy, is_shipped, strategy_of

_CHECKS = (
    key_faults,
    launch_faults,
    fsdp_faults,
    deepspeed_faults,
    flag_faults,
    machine_faults,
    environment_faults,
)
_MOST_ROUNDS = 6
"rounds of corrections; a corrected fault may have hidden others"


@dataclass(frozen=True)
class Examined:
    """A case, its findings, and the case with corrected files."""

    case: Case
    corrected: Case
    found: list[Finding]
    strategy: Strategy | None
    "the strategy of the corrected case; None if a launch would still refuse the corrected files"


def examine(case: Case) -> Examined:
    """Check the keys, flags, machine and environment of a case; nothing is estimated.

    A fault may hide others: a wrong distributed_type hides all faults of the engine's section. So the checks
    are repeated on the corrected files.
    """
    findings_so_far: list[Finding] = []
    corrected = case
    for _ in range(_MOST_ROUNDS):
        seen = {(f.name, f.key, f.file) for f in findings_so_far}
        current = gravest_first([_located(f, corrected) for check in _CHECKS for f in check(corrected)])
        findings_so_far += [f for f in current if (f.name, f.key, f.file) not in seen]
        edits = edits_of(current)
        if not edits:
            break
        corrected = mended(corrected, edits)
    strategy, refusals = _strategy(corrected)
    findings_so_far += [_located(finding, corrected) for finding in refusals]
    return Examined(case, corrected, findings_so_far, strategy)


def examine_all(
    cases: list[Case], *, deployment_of: Callable[[Gpu], Deployment]
) -> tuple[list[Examined], list[Finding], list[str]]:
    """Return each examined case, all findings (gravest first), and notes on what was not checked."""
    notes: list[str] = []
    setups, found = [], []
    examined_cases = [examine(case) for case in cases]
    for examined in examined_cases:
        found += examined.found
        for setup in _setups(examined, deployment_of=deployment_of, notes=notes):
            setups.append(setup)
            short = host_ram_faults(examined.case, setup)
            found += [_located(finding, examined.corrected) for finding in short]
    notes = [f"note: {note}" for note in dict.fromkeys(notes)]
    return examined_cases, gravest_first(found + _advice(setups)), notes


def _located(finding: Finding, case: Case) -> Finding:
    """Fill in a finding's file path (its sentence then lacks it) and its strategy."""
    json_path = case.files.json_path if finding.file == "json" else None
    return dataclasses.replace(
        finding,
        sentence=finding.sentence.removeprefix(f"{case.files.yaml_path}: "),
        file=str(json_path or case.files.yaml_path) if finding.file else None,
        strategy=case.name if finding.file or finding.edits else None,
    )


def _strategy(case: Case) -> tuple[Strategy | None, list[Finding]]:
    """Read the corrected files as a launch would; return the strategy, or what the launch would refuse."""
    try:
        content = case.files.deepspeed if case.has_json else None
        strategy = strategy_of(case.config, case.files.yaml_path, content)
    except ValueError as error:
        sentences, _, hint = str(error).partition("\nhint: ")
        refused = partial(wrong, "refused", why="a launch stops with this error", change=hint, file="yaml")
        return None, [refused(line) for line in sentences.splitlines()]
    strategy = dataclasses.replace(strategy, name=case.name)
    count, per_node = case.num_ranks, min(case.num_ranks, case.gpus_per_node)
    sizes = product_problem(strategy.parallel_sizes, count)
    try:
        if strategy.is_fsdp2 and sizes and not is_shipped(case.files.yaml_path):
            undivided = [f"parallelism_config: {sizes}"]
        else:
            undivided = placement_problems([strategy], num_gpus=[count], gpus_per_node=per_node)
    except ValueError:  # there is no estimate of this strategy: `_setups` adds a note
        undivided = []
    contradicted = contradictions(strategy, case.flags, num_processes=None if strategy.is_single else count)
    change = "remove the flag, or use another strategy"
    refusals = [("flag-contradiction", line, change) for line in contradicted]
    refusals += [("groups-do-not-divide", line, "another --num_gpus") for line in undivided]
    return (None if undivided else strategy), [
        wrong(name, line, why="the trainer refuses to start", change=change, file="yaml")
        for name, line, change in refusals
    ]


def _setups(
    examined: Examined, *, deployment_of: Callable[[Gpu], Deployment], notes: list[str]
) -> Iterator[Setup]:
    """Yield a setup of the corrected case per GPU type; skip setups that can't be estimated, with a note."""
    case, spec = examined.corrected, examined.corrected.spec
    if examined.strategy is None:
        return
    if is_of_cpus(case.config):
        notes.append(f"{case.name} trains on CPUs: its memory and speed are not checked")
        return
    notes += unlike_the_model(spec, case.flags.seq_len)
    for gpu in map(gpu_of_name, case.gpu_names):
        config, unknown = known_to_estimates(case.flags, gpu=gpu, spec=spec)
        notes += unknown
        sizes = {"num_gpus": case.num_ranks, "gpus_per_node": case.gpus_per_node}
        setup = Setup(spec, examined.strategy, config, **sizes, gpu=gpu, deployment=deployment_of(gpu))
        try:
            row = estimate(setup.launched)
        except ValueError as error:
            notes.append(str(error).splitlines()[0])
            continue
        if row.tokens_per_second is None and not setup.strategy.offloads:
            notes.append(f"the network between nodes of {gpu.name} is not known: give it with --network")
        yield setup


# Advice from estimates: what is wrong, unwise or slow on the given GPUs.

_CLEARLY_FASTER = 1.05
"speedup; estimates are not accurate enough to compare smaller differences"
_MUCH_FASTER = 1.15


def _needless(setup: Setup) -> Iterator[Finding]:
    """Report offload and sharding that the model does not need; the paper recommends DDP first."""
    spec, strategy, gpus = setup.spec.name, setup.strategy, f"{setup.num_gpus} x {setup.gpu.name}"
    if strategy.offloads:
        shard = "full_shard" if strategy.reshard_after_forward else "shard_grad_op"
        kept = find_strategy(f"ds_zero{strategy.zero_stage}" if strategy.is_deepspeed else f"fsdp_{shard}")
        row = estimate(dataclasses.replace(setup, strategy=kept).launched)
        if row.verdict == "fits":
            yield unwise(
                "offload-of-what-fits",
                f"{spec} fits on {gpus} without offload: {row.peak_allocated_bytes / 2**30:.1f} GiB under "
                f"{kept.name}",
                why="offload moves the training state over the host's bus in every step",
                change=f"--strategy {kept.name}, or the same files without their offload keys",
            )
        return
    if not strategy.sharded_parts:
        return
    plain = find_strategy("ddp" if setup.num_gpus > 1 else "single")
    unsharded = dataclasses.replace(setup, strategy=plain)
    before, after = estimate(setup.launched), estimate(unsharded.launched)
    if after.verdict != "fits" or before.tokens_per_second is None or after.tokens_per_second is None:
        return
    speedup = after.tokens_per_second / before.tokens_per_second
    if speedup >= _CLEARLY_FASTER:
        yield fault(
            "unwise" if speedup >= _MUCH_FASTER else "could be faster",
            "sharding-of-what-fits",
            f"the whole {spec} fits on each of {gpus}: {plain.name} gives {speedup - 1:+.0%} tokens/s over "
            f"{strategy.name}",
            why="sharding adds communication; the paper recommends DDP for every small model that fits",
            change=f"--strategy {plain.name}",
            speedup=speedup,
        )


def _rate(setup: Setup) -> float:
    """Return tokens per second; 0 if they are not known, -1 for a setup that does not fit."""
    row = estimate(setup.launched)
    return (row.tokens_per_second or 0.0) if row.fits else -1.0


_MOST_LEVERS = 3


def _advice(setups: list[Setup]) -> list[Finding]:
    """Return the findings of all setups; speed is checked on each GPU's fastest setup only."""
    fastest = _fastest(setups)
    checks = [(setup, check) for setup in setups for check in (_memory, _network, _needless)]
    checks += [(setup, check) for setup in fastest for check in (_alignment, _kernels)]
    return [
        dataclasses.replace(
            finding,
            gpu=setup.gpu.name,
            strategy=None if check is _alignment else setup.strategy.name,
        )
        for setup, check in checks
        for finding in check(setup)
    ]


def _fastest(setups: list[Setup]) -> list[Setup]:
    gpus = dict.fromkeys(setup.gpu for setup in setups)
    return [max((setup for setup in setups if setup.gpu == gpu), key=_rate) for gpu in gpus]


def _alignment(setup: Setup) -> Iterator[Finding]:
    gain = alignment_gain(setup)
    if gain is None or gain.speedup < WORTH_SAYING:
        return
    widths = ", ".join(f"{name} {width}" for name, width in misaligned_widths(setup.launched.spec).items())
    yield fault(
        "wrong" if gain.speedup >= 1.25 else "unwise",
        "widths-off-tensor-cores",
        f"{setup.spec.name}: {widths} is not a multiple of 8, so tensor cores can't run at full "
        f"speed: with {gain.change} it should train {gain.speedup:.2f} times as fast on {setup.gpu.name}",
        why="rows of 2-byte numbers then start at addresses that are not multiples of 16 bytes, and cuBLAS "
        "uses kernels that load one number at a time",
        change=gain.change,
        speedup=gain.speedup,
    )


def _memory(setup: Setup) -> Iterator[Finding]:
    row = estimate(setup.launched)
    where, batch = f"{setup.gpu.name} under {setup.strategy.name}", "--per_device_train_batch_size"
    size = f"{row.peak_allocated_bytes / 2**30:.1f} GiB"
    if not row.fits:
        most = largest_batch(setup.launched).per_device_train_batch_size
        remedy = f"{batch} {most} fits" if most else "not even one sequence fits"
        yield wrong(
            "does-not-fit",
            f"{size} does not fit on {where}: {remedy}",
            why=f"memory peaks at {row.peak_instant}",
            change=f"{batch} {most}, or --gradient_checkpointing full"
            if most
            else "--gradient_checkpointing full, a strategy that shards more, or more GPUs",
        )
    elif row.verdict == "may fit" or row.is_nearly_full:
        yield unwise(
            "may-not-fit",
            f"{size} fits on {where} with a probability of {row.fit_probability:.0%}"
            + ("; a nearly full GPU is slower" if row.is_nearly_full else ""),
            why="a full GPU makes PyTorch's allocator wait, free its unused blocks and try again",
            change=f"a smaller {batch}, or PYTORCH_ALLOC_CONF=expandable_segments:True",
        )


def _network(setup: Setup) -> Iterator[Finding]:
    row, gpu = estimate(setup.launched), setup.gpu.name
    needed, has = row.inter_node_gbps_needed, row.inter_node_gbps
    if needed and has and needed > has:
        share = row.parts_seconds["communication"] / row.step_seconds
        yield fault(
            "wrong" if share > 0.5 else "unwise",
            "network-too-slow",
            f"{setup.strategy.name} on {row.num_gpus} {gpu} needs {needed:,.0f} Gbit/s between nodes to hide "
            f"its communication and has {has:,.0f}: {share:.0%} of a step waits for the network",
            why="communication between nodes takes longer than the compute that overlaps it",
            change="a larger batch, --gradient_accumulation_steps, or fsdp_hybrid_shard or ds_zeropp",
        )


def _kernels(setup: Setup) -> Iterator[Finding]:
    row = estimate(setup.launched)
    if not row.fits or row.tokens_per_second is None:
        return
    bound = row.bottleneck.replace("_", " ")
    for lever in levers(setup)[:_MOST_LEVERS]:
        yield slow(
            "faster-flag",
            f"bound by {bound} on {setup.gpu.name} under {setup.strategy.name}: {lever.change} "
            f"should give {lever.speedup - 1:+.0%} tokens/s",
            why=f"{bound} takes most of a step's time",
            change=lever.change,
            speedup=lever.speedup,
        )
