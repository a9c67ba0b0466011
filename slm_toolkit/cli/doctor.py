"""`slm doctor`: what is wrong or unwise in a model and its configuration, on given GPUs."""

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.deployment_flags import add_network_flag, deployments
from slm_toolkit.config.flag_pairs import Pair, flags_given, pair_problems
from slm_toolkit.config.flags import add_flags, config_from_args
from slm_toolkit.config.parser import count, positive_number
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.doctor.case import Case, Files, Host, is_count, is_of_cpus, look_here, read_files
from slm_toolkit.doctor.examine import Examined, examine_all
from slm_toolkit.doctor.finding import SEVERITIES, Finding, as_json
from slm_toolkit.doctor.fix import write_mended
from slm_toolkit.hardware.gpus import find_gpu, gpu_of_name, gpus_here
from slm_toolkit.hardware.machine import look_at_host_ram
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.from_config import position_problem
from slm_toolkit.predict.choices import choices, with_choices
from slm_toolkit.predict.flag_checks import (
    NOT_OF_AN_ESTIMATE,
    gpus_asked,
    model_to_estimate,
    node_problems,
)
from slm_toolkit.strategy.checked_run import all_of
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
  slm doctor --model slm-1b --strategy my_deepspeed.json          a DeepSpeed JSON by itself
  slm doctor --model slm-1b --strategy my.yaml --fix . --overwrite    in place
  slm doctor --strategy my.yaml --json --strict                   for CI
severities:
  wrong            does not run, does not do what it says, or wastes most of the money
  unwise           runs, but costs more or risks more than needed
  could be faster  a change that saves time
exit codes:
  0  nothing wrong; with --strict, nothing unwise either
  1  something is wrong; after --fix: something that no file can fix is left
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
        "changed, and what no file can fix",
    ).basic = True
    parser.add_argument("--overwrite", action="store_true", help="let --fix replace existing files")
    parser.add_argument("--json", action="store_true", help="print a list of findings").basic = True
    add_network_flag(parser)
    leave_out = tuple(name for name in NOT_OF_AN_ESTIMATE if name not in _SEEN)
    add_flags(parser, grid=False, leave_out=leave_out)
    parser.set_defaults(verb=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    with user_errors():
        config = _checked_config(args)
        if args.gpu is not None:
            args.gpu, counts = gpus_asked(args.gpu, [args.num_gpus] if args.num_gpus else None)
            args.num_gpus = max(counts) if counts else None
        cases = _cases(args, config)
        examined, found, notes = examine_all(cases, deployment_of=deployments(args))
        fixed = _fix(examined, args.fix, overwrite=args.overwrite) if args.fix is not None else []
    read = [one.strategy for one in examined if one.strategy is not None]
    for note in (*notes_on(read), *notes):
        print(note, file=sys.stderr)
    if args.json:
        print(json.dumps([as_json(finding) for finding in found], indent=2))
    elif found:
        console = Console(markup=False, emoji=False)
        console.print(finding_text(found, width=console.width), soft_wrap=True)
    else:
        print(f"{cases[0].flags.model}: no findings")
    for line in fixed:
        print(line, file=sys.stderr)
    left = [finding for finding in found if args.fix is None or not finding.is_fixed_in_files]
    if args.fix is not None:
        by_hand = [f"{f.name}: {f.change}" for f in left if f.severity != "could be faster"]
        for line in dict.fromkeys(by_hand):  # a finding for several GPUs is one line
            print(f"no file can fix {line}", file=sys.stderr)
    failing = ("wrong", "unwise") if args.strict else ("wrong",)
    return 1 if any(finding.severity in failing for finding in left) else 0


def _checked_config(args: argparse.Namespace) -> RunConfig:
    """Return the flags of the run. Raises ValueError for invalid flags."""
    config = config_from_args(args)
    problems = config.with_defaults(has_gpu=True).problems()
    no_fix = Pair("overwrite", "fix", ": only --fix writes files", is_needed=True)
    problems += pair_problems(flags_given(args), [no_fix])
    if problems:
        raise all_of(problems, verb="doctor")
    return config


def _cases(args: argparse.Namespace, config: RunConfig) -> list[Case]:
    complete = config.with_defaults(has_gpu=True)
    spec, host = model_to_estimate(complete.model), _host(args)
    problems = [position_problem(spec, complete.seq_len), *kernel_problems(spec, complete)]
    if any(problems):
        raise all_of(list(filter(None, problems)), verb="doctor")
    if args.gpu is not None:
        names = tuple(dict.fromkeys(args.gpu))
    elif host.gpu_names:
        names = tuple(dict.fromkeys(gpu.name for name in host.gpu_names if (gpu := find_gpu(name))))
        if not names:
            print(f"note: {host.gpu_names[0]} is unknown: memory and speed are not checked", file=sys.stderr)
    else:
        names = _GPUS
    is_assumed = args.gpu is None and not host.gpu_names
    given = args.num_gpus is not None or bool(host.is_meant and host.gpu_names)
    cases = []
    for path in map(strategy_path, dict.fromkeys(args.strategy)):
        files = read_files(path)
        gpus = () if is_assumed and is_of_cpus(files.config) else names
        counts = _gpus_of(args, files, host)
        flags = _chosen(config, path, gpus, counts)
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
    num_gpus, per_node = counts
    gpu = gpu_of_name(gpus[0]) if gpus and strategies else None
    chosen, _ = choices(
        [config], strategies, gpu=gpu, has_gpu=True, num_gpus=num_gpus, gpus_per_node=per_node
    )
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


def _gpus_of(args: argparse.Namespace, files: Files, host: Host) -> tuple[int, int]:
    """Return the GPUs in total and per node: from flags, this machine, a user's own file, or eight."""
    keys = ("num_machines", "num_processes")
    machines, processes = (value if is_count(value := files.config.get(key)) else None for key in keys)
    machines = machines or 1
    here = len(host.gpu_names) if host.is_meant else 0
    is_own = processes is not None and bool(files.yaml_text) and not is_shipped(files.yaml_path)
    if is_own and not here and args.num_gpus is None:
        per_node = args.gpus_per_node or (processes // machines if machines > 1 else _NUM_GPUS)
        return processes, next(
            k for k in range(min(max(1, per_node), processes), 0, -1) if processes % k == 0
        )
    per_node = args.gpus_per_node or here or _NUM_GPUS
    num_gpus = args.num_gpus or (here * machines if here else _NUM_GPUS)
    if problems := node_problems(num_gpus, per_node):
        raise all_of(problems, verb="doctor")
    return num_gpus, ranks_of_each_node(num_gpus, per_node)


def _fix(examined: list[Examined], folder: Path, *, overwrite: bool) -> list[str]:
    """Write the corrected files. Returns a line for each file written and each change."""
    lines = []
    for one in examined:
        if one.corrected.files == one.case.files:
            lines.append(f"{one.case.files.yaml_path}: nothing to correct")
            continue
        written = write_mended(one.case.files, one.corrected.files, folder, overwrite=overwrite)
        lines += [f"{path}: corrected copy of {source}" for path, source in written.items()]
        lines += [f"  {finding.name}: {finding.change}" for finding in one.found if finding.is_fixed_in_files]
    return lines


# Findings as text: the fault, why, and the change, wrapped to the width.

_STYLE = {"wrong": "bold red", "unwise": "bold yellow", "could be faster": "green"}
_INDENT = "    "


def finding_text(found: list[Finding], *, width: int) -> Text:
    """Return all findings as text, gravest first, and the count of each severity.

    A finding that several files or GPUs share is printed once, with the files, or with the largest speedup.
    Lines break only between words, so that flags and paths can be copied. Print it with `soft_wrap=True`.
    """
    text = Text()
    groups: dict[tuple, list[Finding]] = {}
    for finding in found:
        groups.setdefault(_identity(finding), []).append(finding)
    for first, *others in groups.values():
        line = f"{first.severity}: {first.sentence}  [{first.name}]"
        text.append_text(_wrapped(line, width, style=_STYLE[first.severity]))
        places = [": ".join(filter(None, (f.file, f.key))) for f in (first, *others) if f.file]
        same = [
            f.gpu if f.strategy == first.strategy else f"{f.strategy} on {f.gpu}" for f in others if f.gpu
        ]
        if same:
            places.append(f"also: {', '.join(dict.fromkeys(same))}")
        for place in dict.fromkeys(places):
            text.append(f"{_INDENT}{place}\n", style="dim")
        text.append_text(_wrapped(f"why: {first.why}", width, indent=_INDENT))
        text.append_text(_wrapped(f"change: {first.change}", width, indent=_INDENT, style="bold"))
    counted = {(same, f.file, f.key): f for same, group in groups.items() for f in reversed(group)}
    counts = Counter(finding.severity for finding in counted.values())
    line = ", ".join(f"{counts[name]} {name}" for name in SEVERITIES if counts[name])
    num_mended = sum(finding.is_fixed_in_files for finding in counted.values())
    text.append(line + (f"; --fix corrects {num_mended}" if num_mended else ""), style="bold")
    return text


def _identity(finding: Finding) -> tuple:
    """Return the fields that findings share if they are printed once."""
    same = (finding.name, finding.change)
    return same if finding.gpu else (*same, finding.severity, finding.sentence, finding.why)


def _wrapped(words: str, width: int, *, indent: str = "", style: str = "") -> Text:
    """Return a paragraph with a hanging indent. `style` applies to the text before its first colon."""
    lines = textwrap.fill(
        words,
        width=max(width, 40),
        initial_indent=indent,
        subsequent_indent=_INDENT + indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    text = Text(f"{lines}\n")
    text.stylize(style, 0, len(indent) + words.index(":"))
    return text
