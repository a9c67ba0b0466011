"""Collect all findings of a case, including those that appear only after other faults are corrected."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from slm_toolkit.doctor.advice import findings
from slm_toolkit.doctor.case import Case, is_of_cpus, located
from slm_toolkit.doctor.deepspeed_faults import deepspeed_faults
from slm_toolkit.doctor.finding import Finding, gravest_first, wrong
from slm_toolkit.doctor.fix import edits_of, mended
from slm_toolkit.doctor.flag_faults import flag_faults
from slm_toolkit.doctor.fsdp_faults import fsdp_faults
from slm_toolkit.doctor.launch_faults import key_faults, launch_faults
from slm_toolkit.doctor.machine_faults import environment_faults, host_ram_faults, machine_faults
from slm_toolkit.hardware.gpus import Gpu, gpu_of_name
from slm_toolkit.predict.estimate import estimate
from slm_toolkit.predict.flag_checks import placement_problems
from slm_toolkit.predict.setup.setup import Deployment, Setup, known_to_estimates, unlike_the_model
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.settings import product_problem
from slm_toolkit.strategy.strategy import Strategy, is_shipped, strategy_of

_CHECKS = {  # each check, and the topic of its findings that name none
    key_faults: "launch",
    launch_faults: "launch",
    fsdp_faults: "fsdp",
    deepspeed_faults: "deepspeed",
    flag_faults: "flags",
    machine_faults: "machine",
    environment_faults: "environment",
}
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
        current = gravest_first(
            [located(f, corrected, topic) for check, topic in _CHECKS.items() for f in check(corrected)]
        )
        findings_so_far += [f for f in current if (f.name, f.key, f.file) not in seen]
        edits = edits_of(current)
        if not edits:
            break
        corrected = mended(corrected, edits)
    strategy, refusals = _strategy(corrected)
    findings_so_far += [located(finding, corrected, "launch") for finding in refusals]
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
            found += [located(finding, examined.corrected, "machine") for finding in short]
    notes = [f"note: {note}" for note in dict.fromkeys(notes)]
    return examined_cases, gravest_first(found + findings(setups)), notes


def _strategy(case: Case) -> tuple[Strategy | None, list[Finding]]:
    """Read the corrected files as a launch would; return the strategy, or what the launch would refuse."""
    try:
        content = case.files.deepspeed if case.has_json else None
        strategy = strategy_of(case.config, case.files.yaml_path, content)
    except ValueError as error:
        sentences, _, hint = str(error).partition("\nhint: ")
        change = hint or "compare with the files of `slm configs --copy DIR`"
        refused = partial(wrong, "refused", why="a launch stops with this error", change=change)
        return None, [refused(line, file="yaml") for line in sentences.splitlines()]
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
    refused = partial(wrong, why="the trainer refuses to start", file="yaml")
    change = "remove the flag, or use another strategy"
    contradicted = contradictions(strategy, case.flags, num_processes=None if strategy.is_single else count)
    return (None if undivided else strategy), [
        *(refused("flag-contradiction", line, change=change, topic="flags") for line in contradicted),
        *(
            refused("groups-do-not-divide", line, change="another --num_gpus", topic="fsdp")
            for line in undivided
        ),
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
