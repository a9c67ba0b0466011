"""All findings of a case: of its files, of what corrections bring up, of flags, machine and closed forms."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from slm_toolkit.doctor.advice import findings
from slm_toolkit.doctor.case import Case, located
from slm_toolkit.doctor.deepspeed_faults import deepspeed_faults, zero_size_faults
from slm_toolkit.doctor.finding import Finding, gravest_first, wrong
from slm_toolkit.doctor.fix import edits_of, mended
from slm_toolkit.doctor.flag_faults import flag_faults
from slm_toolkit.doctor.fsdp_faults import fsdp_faults
from slm_toolkit.doctor.launch_faults import group_faults, key_faults, launch_faults, machine_count_faults
from slm_toolkit.doctor.machine_faults import environment_faults, host_ram_faults, machine_faults
from slm_toolkit.hardware.gpus import Gpu, gpu_of_name
from slm_toolkit.predict.estimate import estimate
from slm_toolkit.predict.flag_checks import placement_problems
from slm_toolkit.predict.setup.setup import Deployment, Setup, known_to_estimates, unlike_the_model
from slm_toolkit.strategy.strategy import Strategy, contradictions, strategy_of

_CHECKS = {  # with the topic of findings that have none
    key_faults: "launch",
    launch_faults: "launch",
    machine_count_faults: "launch",
    fsdp_faults: "fsdp",
    group_faults: "fsdp",
    deepspeed_faults: "deepspeed",
    zero_size_faults: "deepspeed",
    flag_faults: "flags",
    machine_faults: "machine",
    environment_faults: "environment",
}
_MOST_ROUNDS = 6
"of corrections, each of which may bring up what the one before hid"


@dataclass(frozen=True)
class Examined:
    """A case, what was found in it, and what it would be with its files corrected."""

    case: Case
    corrected: Case
    found: list[Finding]
    strategy: Strategy | None
    "of the corrected case; None where it is none all the same"


def examine(case: Case) -> Examined:
    """What its keys, flags, machine and environment show, without closed forms.

    A fault may hide others, as a wrong distributed_type does all of an engine: those are looked for in the
    corrected files.
    """
    found: list[Finding] = []
    now = case
    for _ in range(_MOST_ROUNDS):
        seen = {(f.name, f.key, f.file) for f in found}
        current = gravest_first(
            [located(f, now, topic) for check, topic in _CHECKS.items() for f in check(now)]
        )
        found += [f for f in current if (f.name, f.key, f.file) not in seen]
        edits = edits_of(current)
        if not edits:
            break
        now = mended(now, edits)
    strategy, refused = _strategy(now)
    found += refused
    return Examined(case, now, found, strategy)


def examine_all(
    cases: list[Case], *, deployment_of: Callable[[Gpu], Deployment], software: str
) -> tuple[list[Examined], list[Finding], list[str]]:
    """Each case, the findings of all, the gravest first, and notes on what could not be looked at."""
    notes: list[str] = []
    examined, setups = [], []
    for case in cases:
        one = examine(case)
        of_case = _setups(one, deployment_of=deployment_of, software=software, notes=notes)
        short = [
            located(finding, one.corrected, "machine")
            for setup in of_case
            for finding in host_ram_faults(one.corrected, setup)
        ]
        corrected = mended(one.corrected, edits_of(short))
        examined.append(dataclasses.replace(one, corrected=corrected, found=[*one.found, *short]))
        setups += of_case
    found = [finding for one in examined for finding in one.found] + findings(setups)
    return examined, gravest_first(found), list(dict.fromkeys(notes))


def _strategy(case: Case) -> tuple[Strategy | None, list[Finding]]:
    """The corrected files as a launch would read them, and what it would refuse still."""
    content = case.files.deepspeed if case.has_json else None
    try:
        strategy = strategy_of(case.config, case.files.yaml_path, content)
    except ValueError as error:
        if case.files.json_problem is not None:
            return None, []
        sentences, _, hint = str(error).partition("\nhint: ")
        return None, [
            _refusal(
                *(case, "refused", sentence, "launch"),
                why="a launch with these files ends with this",
                change=hint or "compare with the files that `slm configs --copy DIR` writes",
            )
            for sentence in sentences.splitlines()
        ]
    strategy = dataclasses.replace(strategy, name=case.name)
    why = "the trainer refuses to start"
    refused = [
        _refusal(
            *(case, "flag-contradiction", sentence, "flags"),
            why=why,
            change="leave out the flag, or the strategy",
        )
        for sentence in contradictions(strategy, case.flags)
    ]
    count, per_node = case.num_ranks, min(case.num_ranks, case.gpus_per_node)
    try:
        grouped = placement_problems([strategy], num_gpus=[count], gpus_per_node=per_node)
    except ValueError:  # no estimate of it: `_setups` has a note on it
        grouped = []
    refused += [
        _refusal(*(case, "groups-do-not-divide", sentence, "fsdp"), why=why, change="another --num_gpus")
        for sentence in grouped
    ]
    return (None if grouped else strategy), refused


def _refusal(case: Case, name: str, sentence: str, topic: str, *, why: str, change: str) -> Finding:
    sentence = sentence.removeprefix(f"{case.files.yaml_path}: ")
    return located(wrong(name, sentence, why=why, change=change, file="yaml"), case, topic)


def _setups(
    one: Examined, *, deployment_of: Callable[[Gpu], Deployment], software: str, notes: list[str]
) -> list[Setup]:
    """The corrected case on each GPU type it is meant for, as far as there are closed forms for it."""
    if one.strategy is None:
        return []
    case, spec = one.corrected, one.corrected.spec
    config, unknown = known_to_estimates(case.flags)
    unknown += unlike_the_model(spec, config.seq_len)
    notes += [f"note: {sentence}" for sentence in unknown]
    made = []
    for gpu in map(gpu_of_name, case.gpu_names):
        setup = Setup(
            spec,
            one.strategy,
            config,
            num_gpus=case.num_ranks,
            gpus_per_node=case.gpus_per_node,
            gpu=gpu,
            software=software,
            deployment=deployment_of(gpu),
        )
        try:
            estimate(setup.launched)
        except ValueError as error:
            notes.append(f"note: {str(error).splitlines()[0]}")
            continue
        made.append(setup)
    return made
