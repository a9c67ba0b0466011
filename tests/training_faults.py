"""Launches of `slm_toolkit.train` into which a fault is planted, with the time from it to the message."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from conftest import ENV, ROOT, WARM, WHEN_LOADED, planted

SITE = (
    WHEN_LOADED
    + """
import os
if os.environ.get("RANK", "0") in os.environ.get("TEST_RANKS", "").split(",") and (
    os.environ.get("TEST_SPARES", "-") not in os.environ
):
    def strike():
        import time
        with open(os.environ["TEST_STRUCK"], "w") as file:
            file.write(str(time.time()))
        kind = os.environ["TEST_FAULT"]
        if kind == "kill":
            os.kill(os.getpid(), 9)
        if kind == "crash in native code":
            os.abort()
        if kind == "raise":
            raise KeyError("the sky is falling")
        if kind == "stop":
            os.kill(os.getpid(), 19)
        if kind == "sleep":
            time.sleep(1e6)
        if kind == "hold":
            import ctypes
            ctypes.PyDLL(None).sleep(1000000)
        if kind == "pause":
            time.sleep(1.0)
        if kind == "out of memory":
            import torch
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def plant(module):
        call, count = module.RecordedLoss.__call__, [0]
        def nth_fails(self, **arguments):
            import torch
            if not torch.is_grad_enabled():  # plain kernels, before the first step
                return call(self, **arguments)
            count[0] += 1
            kind, step = os.environ["TEST_FAULT"], int(os.environ["TEST_STEP"])
            is_due = count[0] == step if kind == "nan" else count[0] >= step
            if kind == "out of memory":
                is_due &= arguments["labels"].shape[0] > 2
            if is_due:
                strike()
            loss = call(self, **arguments)
            if is_due and kind == "nan":
                self.last = self.last * float("nan")
                return loss * float("nan")
            if is_due and kind == "infinite gradient":
                return loss + 3e38 * (loss - loss.detach())
            return loss
        module.RecordedLoss.__call__ = nth_fails

    when_loaded("slm_toolkit.run.model.loss_recorder", plant)
"""
)
"a sitecustomize.py, told by TEST_*: which ranks, what, from which step on, and whose presence spares a run"


@dataclass(frozen=True)
class Faulty:
    """A launch that has ended."""

    code: int
    err: str
    message_seconds: float | None
    "from the fault to the first line that begins with `error: `"
    end_seconds: float | None
    "from the fault to the end of the launcher"
    folder: Path

    @property
    def messages(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    @property
    def hint(self) -> str:
        found = re.search(r"^error: .*\nhint: (.*)$", self.err, re.MULTILINE)
        return found[1] if found else ""

    @property
    def record(self) -> dict:
        (path,) = self.folder.rglob("record.json")
        return json.loads(path.read_text())


def struck(folder: Path, fault: str, *, rank: int | str, step: int, spares: str = "-") -> dict[str, str]:
    """The environment in which a fault strikes; `spares`: a variable in whose presence it does not."""
    return {
        **planted(folder, SITE),
        "TEST_FAULT": fault,
        "TEST_RANKS": "" if fault == "none" else str(rank),
        "TEST_STEP": str(step),
        "TEST_STRUCK": str(folder / "struck"),
        "TEST_SPARES": spares,
    }


def launch_with_fault(
    folder: Path,
    *arguments: str,
    strategy: str | Path = "ddp",
    fault: str = "none",
    rank: int | str = 1,
    step: int = 3,
    env: dict[str, str] | None = None,
    at_line: tuple[str, Callable[[], object]] | None = None,
    timeout: float = 300,
    cold: bool = False,
) -> Faulty:
    """`accelerate launch` of slm-1m on two CPU processes; at `step` the fault strikes `rank`.

    Instead of a planted fault, `at_line` has a text and what to call when a line of output holds it. `cold`
    as of `run`.
    """
    mark = folder / "struck"
    mark.unlink(missing_ok=True)
    of_fault = struck(folder, fault, rank=rank, step=step)
    config = strategy if isinstance(strategy, Path) else ROOT / "accel_configs" / f"{strategy}.yaml"
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    process = subprocess.Popen(
        [accelerate, "launch", "--main_process_port", "0", "--config_file", str(config)]
        + ["-m", "slm_toolkit.train", "--model", "slm-1m", "--seq_len", "32", "--run_name", "run"]
        + ["--kernels", "fused", "--output_dir", str(folder / "runs"), *arguments],
        cwd=ROOT,
        env={**(ENV if cold else WARM.env()), **of_fault, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    watchman = threading.Timer(timeout, process.kill)
    watchman.start()
    lines: list[str] = []
    said_at = struck_at = None
    for line in process.stderr:
        lines.append(line)
        if said_at is None and line.startswith("error: "):
            said_at = time.time()
        if at_line is not None and at_line[0] in line and struck_at is None:
            struck_at = time.time()
            at_line[1]()
    code = process.wait()
    watchman.cancel()
    if mark.exists():
        struck_at = mark.stat().st_mtime
    err = "".join(lines)
    return Faulty(
        code,
        *(err, said_at - struck_at if said_at and struck_at else None),
        *(time.time() - struck_at if struck_at else None, folder),
    )


def ranks_of(folder: Path) -> list[int]:
    """Process ids that have `folder` in their command line, by force of which they may be ended."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]
