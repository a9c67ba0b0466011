"""`slm doctor`: what is wrong or unwise in a model and its configuration, on given GPUs."""

import argparse
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slm_toolkit.base.errors import user_errors, without_controls
from slm_toolkit.cli.deployment_flags import add_network_flag, deployments
from slm_toolkit.config.flag_pairs import flags_given
from slm_toolkit.config.flags import add_flags, config_from_args
from slm_toolkit.config.parser import count, positive_number
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.doctor.case import Case, Files, Host, is_count, is_of_cpus, look_here, read_files
from slm_toolkit.doctor.examine import Examined, examine_all
from slm_toolkit.doctor.finding import SEVERITIES, Finding, as_json
from slm_toolkit.doctor.fix import write_mended
from slm_toolkit.hardware.gpus import find_gpu, gpu_of_name, gpus_here
from slm_toolkit.hardware.machine import look_at_host_ram
from slm_toolkit.predict.choices import choices, with_choices
from slm_toolkit.predict.flag_checks import (
    NOT_OF_AN_ESTIMATE,
    gpus_asked,
    model_to_estimate,
    node_problems,
)
from slm_toolkit.strategy.checked_run import all_of, run_problems
from slm_toolkit.strategy.groups import ranks_of_each_node
from slm_toolkit.strategy.strategy import (
    STUDIED_STRATEGIES,
    find_strategy,
    is_shipped,
    notes_on,
    strategy_name,
    strategy_path,
)

_GPUS = ("a100-40gb", "a100-80gb", "h100-80gb")
_NUM_GPUS = 8
_FIXED = "doctor-fixed"
_SEEN = ("save_final_model",)  # flags that findings need and estimates don't
_DESCRIPTION = """\
Find what is wrong or unwise in a model, its flags, accelerate YAMLs, DeepSpeed JSONs, this shell's
environment and the installed versions. Says why, and what to change. Nothing runs."""
_EXAMPLES = """\
  slm doctor --model slm-500m                                     six strategies on three GPU types
  slm doctor --model slm-1b --strategy my.yaml --gpu h100-80gb --num_gpus 16
  slm doctor --model slm-1b --strategy my.yaml --fix fixed        corrected copies into the folder fixed
"""
_EPILOG = """\
more examples:
  slm doctor --strategy my.yaml --json --strict                   for CI
severities:
  wrong            does not run, does not do what it says, or wastes most of the money
  unwise           runs, but costs more or risks more than needed
  could be faster  a change that saves time
exit codes:
  0  nothing wrong; with --strict, nothing unwise either
  1  something is wrong; after --fix: something is left to do by hand
  2  bad input: no such file, not YAML, a flag that makes no sense
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm doctor`."""
    parser.description, parser.examples, parser.epilog = _DESCRIPTION, _EXAMPLES, _EPILOG
    parser.add_argument(
        "--gpu",
        nargs="+",
        metavar="NAME",
        help="GPU types of another machine, whose disks, RAM and libraries are not checked "
        f"(default: this machine; {' '.join(_GPUS)} if it has no GPU)",
    ).basic = True
    parser.add_argument(
        "--num_gpus",
        type=count,
        metavar="N",
        help="number of GPUs in total (default: this machine's, else the file's num_processes, else 8)",
    ).basic = True
    parser.add_argument(
        "--gpus_per_node",
        type=count,
        metavar="K",
        help="most GPUs in one node (default: this machine's, else 8)",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=list(STUDIED_STRATEGIES),
        metavar="NAME|YAML|JSON",
        help="shipped names, accelerate YAMLs or DeepSpeed JSONs (default: the six strategies of the study)",
    ).basic = True
    parser.add_argument(
        "--host_ram_gib",
        type=positive_number,
        metavar="GIB",
        help="RAM of each node (default: this machine's if its GPUs are checked; else RAM is not checked)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="also exit with 1 if something is unwise"
    ).basic = True
    parser.add_argument(
        "--fix",
        nargs="?",
        const=_FIXED,
        type=Path,
        metavar="DIR",
        help=f"write corrected copies of the files into a folder (default: {_FIXED}). Prints what "
        "changed, and what is left to do by hand",
    ).basic = True
    parser.add_argument("--json", action="store_true", help="print a list of findings").basic = True
    add_network_flag(parser)
    leave_out = tuple(name for name in NOT_OF_AN_ESTIMATE if name not in _SEEN)
    add_flags(parser, grid=False, leave_out=leave_out)
    parser.set_defaults(verb=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    with user_errors():
        cases = _cases(args)
        examined, found, notes = examine_all(cases, deployment_of=deployments(args))
        fixed = _fix(examined, args.fix) if args.fix is not None else []
    for note in (*notes_on([one.strategy for one in examined if one.strategy is not None]), *notes):
        print(note, file=sys.stderr)
    if args.json:
        print(json.dumps([as_json(finding) for finding in found], indent=2))
    elif found:
        print(finding_text(found, width=shutil.get_terminal_size().columns))
    else:
        print(f"{cases[0].flags.model}: no findings")
    left = found
    if args.fix is not None:
        left = [finding for finding in found if not finding.edits]
        by_hand = [f"by hand: {f.name}: {f.change}" for f in left if f.severity != "could be faster"]
        print("\n".join([*fixed, *dict.fromkeys(by_hand)]), file=sys.stderr)
    failing = ("wrong", "unwise") if args.strict else ("wrong",)
    return 1 if any(finding.severity in failing for finding in left) else 0


def _cases(args: argparse.Namespace) -> list[Case]:
    """Return a case per strategy. Raises ValueError for invalid flags."""
    config = config_from_args(args)
    complete = config.with_defaults(has_gpu=True)
    spec = model_to_estimate(complete.model)
    if problems := run_problems(complete, spec=spec):
        raise all_of(problems, verb="doctor")
    if args.gpu is not None:
        args.gpu, counts = gpus_asked(args.gpu, [args.num_gpus] if args.num_gpus else None)
        args.num_gpus = max(counts) if counts else None
    host = _host(args)
    here = host.gpu_names if host.is_meant else ()
    is_assumed = args.gpu is None and not here
    known = [gpu.name for name in here if (gpu := find_gpu(name))]
    if here and not known:
        print(f"note: {here[0]} is unknown: memory and speed are not checked", file=sys.stderr)
    names = tuple(dict.fromkeys(_GPUS if is_assumed else args.gpu or known))
    cases = []
    for path in map(strategy_path, dict.fromkeys(args.strategy)):
        files = read_files(path)
        gpus = () if is_assumed and is_of_cpus(files.config) else names
        counts = _gpus_of(args, files, len(here))
        flags = _chosen(config, path, gpus, counts)
        given = bool(args.num_gpus or here)
        cases.append(Case(strategy_name(path), files, spec, flags, host, *counts, gpus, gpus_given=given))
    defaults = [] if "model" in flags_given(args) else [f"--model {spec.name}"]
    defaults += [f"--gpu {' '.join(names)}"] if is_assumed else []
    if defaults and any(case.gpu_names and not is_shipped(case.files.yaml_path) for case in cases):
        print(f"note: checked with {' '.join(defaults)}, the defaults; give your own", file=sys.stderr)
    return cases


def _chosen(config: RunConfig, path: Path, gpus: Sequence[str], counts: tuple[int, int]) -> RunConfig:
    """Return the flags of a run under a strategy on the first of these GPUs."""
    strategies = []
    with suppress(ValueError):  # found to be wrong later
        strategies.append(find_strategy(str(path)))
    gpu = gpu_of_name(gpus[0]) if gpus and strategies else None
    num_gpus, per_node = counts
    sizes = {"num_gpus": num_gpus, "gpus_per_node": per_node}
    chosen, _ = choices([config], strategies, gpu=gpu, has_gpu=True, **sizes)
    return with_choices(config, chosen)


def _host(args: argparse.Namespace) -> Host:
    """Return the facts of this machine. It is the target unless --gpu names other GPUs.

    Its RAM is checked only if its GPUs are the target.
    """
    is_meant = args.gpu is None
    total = free = None
    if args.host_ram_gib is not None:
        total = round(args.host_ram_gib * 2**30)
    elif is_meant and gpus_here():
        ram = look_at_host_ram()
        total = ram.limit_bytes or ram.total_bytes
        free = min(total, ram.available_bytes)
    return look_here(is_meant=is_meant, ram_bytes=total, free_ram_bytes=free)


def _gpus_of(args: argparse.Namespace, files: Files, num_here: int) -> tuple[int, int]:
    """Return the GPUs in total and per node: from flags, this machine, a user's own file, or eight."""
    counts = [files.config.get(key) for key in ("num_machines", "num_processes")]
    machines, processes = (value if is_count(value) else 0 for value in counts)
    machines = machines or 1
    if not files.yaml_text or is_shipped(files.yaml_path):
        processes = 0
    num_gpus = args.num_gpus or num_here * machines or processes or _NUM_GPUS
    per_node = args.gpus_per_node or num_here
    if not per_node:
        per_node = min(_NUM_GPUS, num_gpus) if machines == 1 else max(1, num_gpus // machines)
        if args.num_gpus is None and node_problems(num_gpus, per_node):
            per_node = num_gpus  # as on one machine
    if problems := node_problems(num_gpus, per_node):
        raise all_of(problems, verb="doctor")
    return num_gpus, ranks_of_each_node(num_gpus, per_node)


def _fix(examined: list[Examined], folder: Path) -> list[str]:
    """Write the corrected files. Returns a line for each file written and each change."""
    lines = []
    for one in examined:
        before, after = one.case.files, one.corrected.files
        if before == after:
            lines.append(f"{before.yaml_path}: nothing to correct")
            continue
        written = write_mended(before, after, folder)
        lines += [f"{path}: corrected copy of {source}" for path, source in written.items()]
        lines += [f"  {finding.name}: {finding.change}" for finding in one.found if finding.edits]
    return lines


# Findings as text: the fault, why, and the change, wrapped to the width.


def finding_text(found: list[Finding], *, width: int) -> str:
    """Return all findings as text, gravest first, and how many of each severity are shown.

    A finding that several files or GPUs share is printed once, with the files, or with the largest speedup.
    Lines break only between words, so that flags and paths can be copied.
    """
    groups: dict[tuple, list[Finding]] = {}
    for f in found:
        same = () if f.gpu else (f.severity, f.sentence, f.why)
        groups.setdefault((f.name, f.change, *same), []).append(f)
    lines = []
    for first, *others in groups.values():
        places = [": ".join(filter(None, (f.file, f.key))) for f in (first, *others) if f.file]
        also = [
            f.gpu if f.strategy == first.strategy else f"{f.strategy} on {f.gpu}" for f in others if f.gpu
        ]
        if also:
            places.append(f"also: {', '.join(dict.fromkeys(also))}")
        lines += _wrapped(f"{first.severity}: {first.sentence}  [{first.name}]", width)
        lines += [f"    {place}" for place in dict.fromkeys(places)]
        lines += _wrapped(f"    why: {first.why}", width)
        lines += _wrapped(f"    change: {first.change}", width)
    counts = Counter(first.severity for first, *_ in groups.values())
    num_mended = sum(bool(first.edits) for first, *_ in groups.values())
    lines.append(", ".join(f"{counts[name]} {name}" for name in SEVERITIES if counts[name]))
    return without_controls("\n".join(lines)) + (f"; --fix corrects {num_mended}" if num_mended else "")


def _wrapped(words: str, width: int) -> list[str]:
    """Return the lines of a paragraph with a hanging indent."""
    indent = "        " if words.startswith(" ") else "    "
    return textwrap.wrap(
        words, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
