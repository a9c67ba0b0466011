"""`slm compare --probe_network`: measure the network between the GPUs of this machine."""

import argparse
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.flag_pairs import flags_given
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.network import NETWORK_FILE
from slm_toolkit.strategy.strategy import strategy_path

_TAKEN = ("probe_network", "num_processes", "output_dir")


def add_probe_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe_network",
        action="store_true",
        help="compare nothing: measure all_reduce, all_gather and reduce_scatter among the ranks. "
        f"Writes {NETWORK_FILE} into --output_dir",
    )


def start_probe(args: argparse.Namespace) -> int:
    """Replace this process by a launch of the probe: a rank per GPU, or two on a CPU."""
    from slm_toolkit.cli.launch import start  # so `--help` does not import psutil
    from slm_toolkit.hardware.gpus import gpus_here

    with user_errors():
        if unused := [name for name in flags_given(args) if name not in _TAKEN]:
            raise ValueError(
                f"--{unused[0]} with --probe_network, which does not train\n"
                f"hint: it can be combined with {' and '.join(f'--{name}' for name in _TAKEN[1:])}"
            )
        num_processes = args.num_processes or len(gpus_here()) or 2
        if num_processes < 2:
            raise ValueError(
                f"--probe_network with {num_processes} process: it needs two or more\n"
                "hint: --num_processes 2 or more, with a GPU each; for several machines see docs/clusters.md"
            )
    output = Path(args.output_dir or RunConfig.output_dir) / NETWORK_FILE
    return start(
        [
            *("--config_file", str(strategy_path("ddp")), "--num_processes", str(num_processes)),
            *("-m", "slm_toolkit.run.network_probe", "--output", str(output)),
        ]
    )
