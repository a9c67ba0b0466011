"""What we lean on in launchers: asked of one launch whose rank 1 kills itself."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from drift import ROOT, Leaning

_RANKS = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import PartialState
from torch.profiler import ProfilerActivity, profile
from slm_toolkit.run.peers.peer_store import open_peer_store
state = PartialState(cpu=True)
board = open_peer_store()
if state.process_index == 0:
    board.write("word", "from rank 0")
    board.is_first("asked", 0)
torch.distributed.barrier()
on_board = [board.read("word"), board.is_first("asked", state.process_index)]
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
    torch.distributed.all_reduce(torch.ones(4, dtype=torch.bfloat16))
events = [(e.name(), e.shapes(), e.dtypes()) for e in profiled.profiler.kineto_results.events()]
said = {"rank": state.process_index, "environment": dict(os.environ), "events": events}
said["board"] = on_board
Path(sys.argv[1], f"{state.process_index}.json").write_text(json.dumps(said))
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which may come before the error is seen
torch.distributed.barrier()
if state.process_index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        torch.distributed.all_reduce(torch.ones(4))
except RuntimeError as error:
    Path(sys.argv[1], "error.json").write_text(json.dumps({"rank": 0, "error": str(error)}))
    raise
"""


@functools.cache
def launched() -> tuple[list[dict[str, Any]], str]:
    """What the ranks said, rank 0 first, and all that launcher and ranks wrote."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "ranks.py")
        script.write_text(_RANKS)
        config = ROOT / "accel_configs" / "ddp.yaml"
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"),
                *("--config_file", str(config), "--num_processes", "2", str(script), folder),
            ],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 300},
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        said = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    assert said, f"the ranks said nothing:\n{done.stdout[-2000:]}"
    return said, done.stdout


def _environment() -> None:
    said = next(one for one in launched()[0] if one["rank"] == 1)
    wanted = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    wanted |= {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in wanted.items():
        found = said["environment"].get(name)
        assert found == value, f"rank 1 of 2 on one machine has {name}={found}, not {value}"
    assert int(said["environment"]["MASTER_PORT"]) > 0
    assert said["environment"]["MASTER_ADDR"]
    # of MASTER_PORT somebody listens, who takes a second store: the agent, or rank 0
    assert "TORCHELASTIC_USE_AGENT_STORE" in said["environment"]
    # run/peers/peer_store.py knows torch's launcher by its id, and asks its store, which both ranks share
    assert said["environment"]["TORCHELASTIC_RUN_ID"]
    assert said["board"] == ["from rank 0", False], f"two ranks on the launcher's store: {said['board']}"


def _profiled_collectives() -> None:
    from slm_toolkit.run.observe.probe import _REDUCTION

    events = launched()[0][0]["events"]
    reductions = [(name, shapes, dtypes) for name, shapes, dtypes in events if _REDUCTION.match(name)]
    assert reductions, f"all_reduce over gloo is none of {sorted({name for name, *_ in events})}"
    assert any(shapes[:1] == [[4]] and dtypes[:1] == ["c10::BFloat16"] for _, shapes, dtypes in reductions)


def _lost_peer() -> None:
    from slm_toolkit.run.peers.machines import UNREACHED

    errors = [one["error"] for one in launched()[0] if "error" in one]
    assert errors, "a collective whose other rank is gone raises no RuntimeError"
    assert "peer" in errors[0], f"gloo now says: {errors[0]}"
    assert UNREACHED.search(errors[0])


def _summary() -> None:
    from slm_toolkit.compare.outcome import crash, killed_process

    _, log = launched()
    assert killed_process(log, 1) == "rank 1", f"torch's launcher now says:\n{log[-1500:]}"
    assert "Root Cause (first observed failure)" in log
    assert crash(log) == "SIGKILL", f"torch's launcher now says:\n{log[-1500:]}"
    assert "ChildFailedError" in log


def _static_rendezvous() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters, static_tcp_rendezvous

    from slm_toolkit.launch.launcher import _Rendezvous

    asked = RendezvousParameters("static", "host:29500", "none", 2, 2, rank=1, timeout=9)
    with patch.object(static_tcp_rendezvous, "StaticTCPRendezvous", _Rendezvous):
        made = static_tcp_rendezvous.create_rdzv_handler(asked)
    assert type(made) is _Rendezvous, f"torch's launcher now makes a {type(made)}"
    assert (made.master_addr, made.master_port, made.rank, made.world_size) == ("host", 29500, 1, 2)
    assert (made.timeout.total_seconds(), made._store) == (9, None)


def _launch_arguments() -> None:
    from accelerate.commands.launch import launch_command_parser

    from slm_toolkit.launch.command_line import option

    parser = launch_command_parser()
    words = ["--config_file", "a.yaml", "--num_processes", "2", "--num_machines", "2", "--machine_rank", "1"]
    words += ["--main_process_ip", "host", "--main_process_port", "0", "--mixed_precision", "bf16"]
    words += ["--rdzv_conf", "timeout=9", "--deepspeed_multinode_launcher", "standard", "--use_fsdp", "--cpu"]
    args = parser.parse_args([*words, "-m", "slm_toolkit.train", "--seed", "1"])
    for name in ("config_file", "num_processes", "num_machines", "machine_rank", "main_process_ip"):
        assert str(getattr(args, name)) == option(words, name), f"--{name}: {getattr(args, name)}"
    assert (args.module, args.training_script) == (True, "slm_toolkit.train")
    assert args.training_script_args == ["--seed", "1"]


def _launch_environment() -> None:
    from launcher_says import environment_of

    fsdp = environment_of(str(ROOT / "accel_configs" / "fsdp_shard_grad_op.yaml"))
    found = {name: str(fsdp.get(name)).lower() for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION")}
    found["reshard"] = str(fsdp.get("FSDP_RESHARD_AFTER_FORWARD")).lower()
    assert found == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "reshard": "false"}, found
    zero = environment_of(str(ROOT / "accel_configs" / "ds_zero3.yaml"))
    assert str(zero.get("ACCELERATE_USE_DEEPSPEED")).lower() == "true"
    assert str(zero.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")).endswith(".json"), (
        "the JSON has another variable"
    )
    assert fsdp.get("ACCELERATE_MIXED_PRECISION") == "no", "the launcher writes no where nobody asks"
    hybrid = environment_of(str(ROOT / "accel_configs" / "fsdp_hybrid_shard.yaml"))
    assert str(hybrid.get("ACCELERATE_USE_PARALLELISM_CONFIG")).lower() == "true"
    assert hybrid.get("PARALLELISM_CONFIG_DP_SHARD_SIZE") == "2"


LAUNCHES = (
    Leaning(
        "torch: the launcher's variables",
        (
            *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
            *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
            "TORCHELASTIC_RUN_ID",
        ),
        "know rank, machine and store, and play ranks in a rehearsal",
        "readers, run/peers/peer_store.py: open_peer_store",
        _environment,
    ),
    Leaning(
        "accelerate: variables that its launcher sets",
        (
            *(
                "ACCELERATE_USE_FSDP",
                "FSDP_VERSION",
                "FSDP_RESHARD_AFTER_FORWARD",
                "ACCELERATE_USE_DEEPSPEED",
                "ACCELERATE_DEEPSPEED_CONFIG_FILE",
                "ACCELERATE_MIXED_PRECISION",
                "ACCELERATE_USE_PARALLELISM_CONFIG",
                "ACCELERATE_",
                "FSDP_",
            ),
        ),
        "check that what was started is what the YAML asks for",
        "run/peers/launch_info.py: mixed_precision, _sizes_from_environment, _strategy_from_environment, "
        "absolute_deepspeed_config",
        _launch_environment,
    ),
    Leaning(
        "accelerate: the launcher's module and options",
        ("accelerate.commands.launch", "_validate_launch_command", "launch_command_parser"),
        "launch runs, find the launcher among a rank's parents, and read its options",
        "compare/local.py, launch/command_line.py, run/peers/launch_info.py; "
        "tests/contracts/launcher_says.py for the private function",
        _launch_arguments,
    ),
    Leaning(
        "torch: the launcher's rendezvous of several machines",
        ("static_tcp_rendezvous", "StaticTCPRendezvous", "next_rendezvous"),
        "name the machines that do not come, and what differs",
        "launch/launcher.py: _Rendezvous",
        _static_rendezvous,
    ),
    Leaning(
        "torch: the profiler's names of gloo's collectives",
        ("_REDUCTION",),
        "say in probe.py in which dtype gradients were reduced",
        "run/observe/probe.py: _REDUCTION; record/step_breakdown.py: _COLLECTIVE",
        _profiled_collectives,
    ),
    Leaning(
        "torch: gloo's words for a rank that is gone",
        ("UNREACHED",),
        "tell a cause from what it caused, in compare/outcome.py, run/peers/machines.py and "
        "run/faults/watchdog.py",
        'compare/outcome.py: `own_record`, the word "peer"; run/peers/machines.py: UNREACHED',
        _lost_peer,
    ),
    Leaning(
        "torch: the launcher's words for a rank that died",
        ("_EXIT_SIGNAL",),
        "name the rank and the signal, in compare/outcome.py",
        "compare/outcome.py: killed_process, crash, _EXIT_SIGNAL, _LAUNCHERS_ERROR",
        _summary,
    ),
)
