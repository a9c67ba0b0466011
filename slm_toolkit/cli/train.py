"""`slm train`: one training run under one strategy. It prints and runs an `accelerate launch`."""

import argparse
import sys
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.flags import MODULE, add_flags, config_from_args, flags_of
from slm_toolkit.config.parser import count
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpus_here
from slm_toolkit.launch.command_line import check_training
from slm_toolkit.model.names import check_tokenizer, find_model
from slm_toolkit.strategy.groups import fit_groups, group_options
from slm_toolkit.strategy.strategy import (
    Strategy,
    find_strategy,
    is_shipped,
    notes_on,
    shipped_strategies,
    write_resolved,
)

_CPU_PROCESSES = 2  # a hybrid shard uses four: two copies of two
_DESCRIPTION = """\
Train one model under one strategy. Checkpoints, the model and record.json go to runs/NAME."""
_EXAMPLES = """\
  slm train --model slm-1m --max_steps 20                        DDP on all GPUs, or on two CPU processes
  slm train --strategy fsdp_full_shard --model slm-1m --seq_len 64 --max_steps 20
  slm train --model slm-1m --max_steps 40 --save_steps 20 --run_name first --resume_from_checkpoint auto
"""
_EPILOG = """\
on several machines, each with its own rank:
  slm train --strategy ds_zero2 --model slm-1b --num_machines 2 --num_processes 16 \\
      --main_process_ip 10.0.0.1 --machine_rank 0
Exit codes: 0 trained, 2 bad input, 130 Ctrl-C, 143 SIGTERM, else the code of the rank that ended first.
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm train`: those of the launch, then those of the script."""
    parser.description, parser.examples, parser.epilog = _DESCRIPTION, _EXAMPLES, _EPILOG
    parser.usage = "slm train [--strategy NAME|FILE] [flags]"
    launching = parser.add_argument_group("launching")
    launching.add_argument(
        "--strategy",
        default="ddp",
        metavar="NAME|FILE",
        help="a shipped strategy or your own file (default: ddp). Shipped: "
        f"{', '.join(shipped_strategies())}",
    ).basic = True
    launching.add_argument(
        "--num_processes",
        type=count,
        metavar="N",
        help="ranks of all machines together (default: one per GPU; two without a GPU; or the number "
        "in your own YAML)",
    ).basic = True
    launching.add_argument(
        "--num_machines", type=count, metavar="N", help="machines that train together (default: 1)"
    )
    launching.add_argument("--machine_rank", type=int, metavar="R", help="number of this machine, from 0")
    launching.add_argument("--main_process_ip", metavar="IP", help="address of machine 0")
    launching.add_argument(
        "--main_process_port",
        type=int,
        metavar="PORT",
        help="port on machine 0; 0: any free port (default: 29500)",
    )
    add_flags(parser, grid=False)
    parser.set_defaults(verb=_train)


def _train(args: argparse.Namespace) -> int:
    from slm_toolkit.cli.launch import start  # so `--help` does not import psutil

    with user_errors():
        config, strategy = config_from_args(args), find_strategy(args.strategy)
        check_training([config], [strategy])
        model = config.with_defaults(has_gpu=bool(gpus_here())).model
        check_tokenizer(config, find_model(model))
        words = launch_words(strategy, config, args)
    for note in notes_on([strategy]):
        print(note, file=sys.stderr)
    return start(words)


def launch_words(strategy: Strategy, config: RunConfig, args: argparse.Namespace) -> list[str]:
    """Return the words after `accelerate launch`.

    Raises ValueError if a hybrid shard can't divide the ranks.
    """
    num_processes = processes_asked(strategy, config, args)
    groups = []
    if is_shipped(Path(strategy.path)) and args.num_machines in (None, 1) and config.rehearse is None:
        fitted = fit_groups(strategy, num_ranks=num_processes, ranks_per_node=num_processes)
        groups = group_options(fitted)  # on several machines `slm launch` adds them
    names = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return [
        *("--config_file", str(yaml_to_launch(strategy, Path(config.output_dir), num_processes))),
        *("--num_processes", str(num_processes)),
        *(word for name, value in given.items() for word in (f"--{name}", str(value))),
        *groups,
        *("-m", MODULE, *flags_of(config)),
    ]


def processes_asked(strategy: Strategy, config: RunConfig, args: argparse.Namespace) -> int:
    """Return the number of ranks.

    `--num_processes` decides; else 1 for `single` and a rehearsal, the number in a user's own YAML, one per
    GPU, or two on a CPU.
    """
    if args.num_processes is not None:
        return args.num_processes
    if strategy.is_single or config.rehearse is not None:
        return 1
    if not (strategy.is_bare_json or is_shipped(Path(strategy.path))):
        return strategy.num_processes
    on_cpu = 2 * _CPU_PROCESSES if strategy.sharding.is_hybrid else _CPU_PROCESSES
    return (args.num_machines or 1) * (len(gpus_here()) or on_cpu)


def yaml_to_launch(strategy: Strategy, output_dir: Path, num_processes: int) -> Path:
    """Return the strategy's own file; for a DeepSpeed JSON, write a YAML under `output_dir` that names it."""
    if not strategy.is_bare_json:
        return Path(strategy.path)
    return write_resolved(strategy, output_dir / f"launch-{strategy.name}", num_processes)
