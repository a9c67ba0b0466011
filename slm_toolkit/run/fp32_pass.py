"""--parity: before the run itself, a child process of each rank takes the run's first steps in fp32."""

import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import EXIT_CODE_VARIABLE
from slm_toolkit.config.flags import flags_of
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.processes import end_with_parent, leave
from slm_toolkit.record.files import read_record
from slm_toolkit.record.numerics import FP32_STEPS
from slm_toolkit.record.run_record import PARITY_REFERENCE, RECORD_FILE
from slm_toolkit.run.peers.peer_store import open_peer_store

_ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_ATTEMPT = 10**6
"restart count of the children: keeps their entries in the launcher's store apart from the run's"
_FAILED = "the fp32 steps failed"
_SECONDS_BETWEEN_LOOKS = 0.2
_LEFT_OUT = (
    *("profile", "eval_steps", "eval_dataset", "save_steps"),
    *("resume_from_checkpoint", "overwrite_output_dir", "report_to"),
    *("logging_steps", "max_time"),
)


def in_fp32_first(config: RunConfig, train: Callable[..., None]) -> dict[str, Any] | None:
    """Take the fp32 steps. Return the fields of the record's fp32_pass on rank 0.

    Returns None on other ranks, without --parity, for its references, and after a restart.

    Each rank forks a child, so nothing of the pass stays in this process. The child builds model and data
    again in fp32, takes its first steps on the same batches and ends. Call this before the process starts
    threads or opens a GPU. `train`: the script's `main`.
    """
    is_reference = (config.run_name or "").startswith(PARITY_REFERENCE)
    if config.parity is None or is_reference or os.environ.get(_ATTEMPT_VARIABLE, "0") != "0":
        return None
    with tempfile.TemporaryDirectory(prefix="slm-fp32-") as name:
        child = multiprocessing.get_context("fork").Process(
            target=_train_in_child, args=(os.getpid(), config, Path(name), train)
        )
        child.start()
        _wait_for(child)
        return _result(Path(name)) if os.environ.get("RANK", "0") == "0" else None


def _train_in_child(rank: int, config: RunConfig, folder: Path, train: Callable[..., None]) -> None:
    end_with_parent(rank)
    os.environ[_ATTEMPT_VARIABLE] = str(_ATTEMPT)
    os.environ.pop(EXIT_CODE_VARIABLE, None)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and "MASTER_PORT" in os.environ:
        # rank 0 serves the store itself then, so the child's store needs another port than the run's
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    train(flags_of(_in_fp32(config, folder)), end_after=min(FP32_STEPS, config.parity))
    leave(0)  # multiprocessing ends the child after an exception


def _in_fp32(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config of the same training in fp32 that writes only a record."""
    clipping = 0.0 if config.numerics == "stock" else 1.0
    return dataclasses.replace(
        config,
        numerics="fp32",
        max_grad_norm=clipping if config.max_grad_norm is None else config.max_grad_norm,
        fp8="none",
        attn_implementation="sdpa"
        if config.attn_implementation.startswith("flash")  # flash-attn has no fp32
        else config.attn_implementation,
        kernels=config.without_kernels("compile", "graphs").kernels,
        output_dir=str(folder),
        run_name="fp32",
        **{name: getattr(RunConfig, name) for name in _LEFT_OUT},
        save_final_model="false",
    )


def _wait_for(child: multiprocessing.Process) -> None:
    """Wait until the child ends. Kill it if another rank's child failed, because it would wait forever."""
    peer_store = open_peer_store()
    while child.exitcode is None:
        if peer_store is not None and peer_store.read(_FAILED):
            child.kill()
        child.join(_SECONDS_BETWEEN_LOOKS)
    if child.exitcode != 0 and peer_store is not None:
        peer_store.write(_FAILED, True)


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "fp32" / RECORD_FILE
    record = read_record(path) if path.exists() else None
    if record is None or record.status != "ok":
        lines = (folder / "log").read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:]
        reason = record.reason if record is not None and record.reason else "".join(errors[-1:])
        return {"status": "failed", "reason": reason or "its process was killed"}
    kept = ("losses", "grad_norms", "parameter_grad_norms", "weights_of_ranks", "numerics")
    return {"status": "ok", "reason": None, **{name: getattr(record, name) for name in kept}}
