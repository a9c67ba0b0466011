"""Everything worth measuring on one GPU, in three calls of nine minutes, without a network.

    python bench/gpu/measure.py --part 1 --out measured     # then --part 2 and --part 3
    python bench/gpu/measure.py --smoke                     # the whole plan, tiny, on a CPU
    python bench/gpu/measure.py --pretend                   # the same on the pretended GPU of pretend.py

The plan is a list of arms, the most worthful first (PLAN; PARTS says which call runs which). Each arm is a
process with a time limit of its own: one that fails, crashes or hangs is a line with its error, and the next
one starts. Arms that the budget has no time for are named. At the end of a call what failed runs once more:
as a fresh process, what was out of memory at half its batch.

Results are appended to --out as they come, so a call that was killed goes on where it was: `arms.jsonl` (a
line per arm), `micro.jsonl` (a line per kernel), `records/`, `about.json` (GPU, versions, commands), and all
of it packed in `GPU.tar.gz`, rewritten after each arm. `--earlier GPU.tar.gz` goes on from another machine's.
"""

import argparse
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(ROOT))
MODELS = {"slm-100m": 64, "slm-500m": 32, "slm-1b": 32, "slm-2b": 16}
"each with its batch at the top of the ladder: what a GPU of 80 GB holds, so that larger ones compare with it"
RUNG_BATCHES = {"slm-100m": 32, "slm-500m": 16, "slm-1b": 8, "slm-2b": 8}
"of all rungs: the lowest is eager attention, which keeps scores of 1024 x 1024 per head and layer"
MEMORY_BATCHES = {"slm-500m": 16, "slm-2b": 8}
LADDER: dict[str, tuple[str, ...]] = {  # each with all above it, but for the first
    "eager": ("--attn_implementation", "eager"),
    "sdpa": ("--attn_implementation", "sdpa"),
    "fused loss": ("--loss_kernel", "fused_linear"),
    "fused norm": ("--norm_kernel", "fused"),
    "torch_compile": ("--torch_compile",),
}
TOP = tuple(word for flags in list(LADDER.values())[1:] for word in flags)
TRITON = ("--triton_loss", "--optim", "adamw_triton")
STRATEGIES = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3")
CANARY_LOSSES = (6.0200, 5.8682, 5.7580, 5.7373, 5.6258, 5.6094)
"""of `python -m slm_toolkit.train --model slm-1m --seq_len 128 --per_device_train_batch_size 4 --max_steps 6`
on a CPU (torch 2.13, 2026-11-23); weights and data are the same on every machine"""
LOSS_TOLERANCE = 0.02
"bf16 moves these losses by 0.001 to 0.01"
WARMUP_STEPS = 5
"the trainer's first steps, probed and compiled, are not timed"
FORK_SECONDS, FRESH_SECONDS, COMPILE_SECONDS = 5, 16, 25
"of an arm before its first step: guesses, for what still fits the budget"
CHECKING_SECONDS = 1.0
"report, estimate and archive after an arm"
MAX_ARCHIVE_BYTES = 16 * 2**20
REQUIRED = ("torch", "transformers", "accelerate", "deepspeed", "slm_toolkit.train")
NO_FORK = 97
"keeper.py's exit code of a fork that could not become the arm"
BAD_FORK = re.compile(r"re-initialize CUDA in forked|CUDA error: initialization error")


@dataclass(frozen=True)
class Arm:
    """One process of the plan: what it runs, and what is done with what it leaves."""

    part: str
    name: str
    words: tuple[str, ...]
    "flags of the trainer, or, of another program, the file and its arguments"
    kind: str = "train"
    "train: leaves a record; script: its last line, or the file after --out, is JSON"
    strategy: str | None = None
    "launched with `accelerate launch` and this one's YAML; None: a plain process"
    timed_seconds: float = 5.0
    "of steps, at least 10 and at most 30; 0: as many steps as `words` say"
    num_ranks: int = 1
    "rehearsed"
    seconds: float = 0.0
    "that a script takes; a trainer's follow from its steps"
    needs: str | None = None
    "a package, without which this arm is left out"
    has_known_losses: bool = False
    fresh: bool = False
    "never forked"
    limit_seconds: float = 0.0
    "after which it is killed; 0: three times what it is expected to take, and a minute, within the budget"

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "_")

    @property
    def batch(self) -> int:
        return int(self.words[self.words.index("--per_device_train_batch_size") + 1])


def size(model: str, batch: int, smoke: bool) -> tuple[str, ...]:
    if smoke:
        model, batch = "slm-1m", 2
    seq_len = "32" if smoke else "1024"
    return ("--model", model, "--per_device_train_batch_size", str(batch), "--seq_len", seq_len)


def canary(smoke: bool) -> Iterator[Arm]:
    tiny = ("--model", "slm-1m", "--seq_len", "128", "--per_device_train_batch_size", "4", "--max_steps", "6")

    def small(name: str, *flags: str, **more: Any) -> Arm:
        known = {"timed_seconds": 0.0, "has_known_losses": True}
        return Arm("canary", name, (*tiny, *flags), **{**known, **more})

    yield from (small(strategy, strategy=strategy) for strategy in STRATEGIES)
    yield small("accelerate launch", strategy="ds_zero3", fresh=True)  # as a user does; the others are forked
    for name, flags in {
        "eager": ("--attn_implementation", "eager"),
        "fused loss": ("--loss_kernel", "fused_linear"),
        "compiled": ("--loss_kernel", "fused_linear", "--torch_compile"),
        "CUDA graphs": ("--torch_compile", "--torch_compile_mode", "reduce-overhead"),
        "Triton": ("--loss_kernel", "fused_linear", *TRITON),
        "padded": ("--pad_widths",),
    }.items():
        if not (smoke and name in ("CUDA graphs", "Triton")):  # no CPU has either
            yield small(name, *flags)
    if not smoke:  # float8 is for GPUs
        yield small("fp8", "--fp8", "tensorwise", needs="torchao")
    profiled = (*size("slm-100m", 64, smoke), *(() if smoke else TOP), "--profile", "--max_steps", "12")
    yield Arm("canary", "profile", profiled, timed_seconds=0.0)


def micro(smoke: bool) -> Iterator[Arm]:
    shrunk = ("--smoke",) if smoke else ()
    yield Arm("micro", "micro", (str(HERE / "micro.py"), *shrunk), kind="script", seconds=110)


def ladder(smoke: bool) -> Iterator[Arm]:
    """All features on every model and its sibling: the best MFU."""
    for suffix, name, flags in (
        ("-hw", "torch_compile", ()),
        ("", "torch_compile", ()),
        ("-hw", "Triton", TRITON),
        ("", "padded", ("--pad_widths",)),
    ):
        for model, batch in MODELS.items():
            words = (*size(model + suffix, batch, smoke), *TOP, *flags)
            yield Arm("ladder", f"{model}{suffix} {name}", words)
            if smoke:
                return


def memory(smoke: bool) -> Iterator[Arm]:
    """Peaks and step times of every strategy, beside the estimate: on one GPU, and as rank 0 of 8."""
    for model, batch in MEMORY_BATCHES.items():
        for num_ranks in (1, 8):
            for strategy in STRATEGIES:
                if smoke and num_ranks > 1 and strategy not in ("ddp", "fsdp_full_shard", "ds_zero3"):
                    continue
                rehearsed = ("--rehearse", str(num_ranks)) if num_ranks > 1 else ()
                words = (*size(model, batch, smoke), *rehearsed)
                options = {"strategy": strategy, "timed_seconds": 2.0, "num_ranks": num_ranks}
                yield Arm("memory", f"{model} {strategy} {num_ranks}", words, **options)
        if smoke:
            return


def trainer(smoke: bool) -> Iterator[Arm]:
    """Ours against Hugging Face's Trainer, a bare loop and, where it is installed, LitGPT."""
    shape = ("--seq_len", "32", "--batch_size", "2", "--steps", "4", "--warmup", "2")
    for model in ("slm-1m",) if smoke else ("slm-100m", "slm-1b"):
        arms = ["trainer", "ours"] if smoke else ["trainer_compile", "bare_compile", "ours_compile"]
        turns = [("", arms, None), (" litgpt", [*arms[:1], "litgpt_compile"], "litgpt")]
        for suffix, turn, needs in turns:
            sized = shape if smoke else ("--batch_size", str(MODELS[model]), "--steps", "24", "--warmup", "8")
            against = ("--against", turn[0])
            words = ("--models", model, *sized, "--arms", *turn, *against, "--rounds", "1", "--core", "-1")
            script = (str(ROOT / "bench/throughput.py"), *words)
            seconds = 20 + 45 * len(turn)
            yield Arm("trainer", model + suffix, script, kind="script", seconds=seconds, needs=needs)


def flash(smoke: bool) -> Iterator[Arm]:
    """Vanilla attention against FlashAttention by batch, nothing else fused."""
    batches = {"slm-100m": (4, 16, 64), "slm-1b": (4, 8, 16), "slm-500m": (4, 16, 32), "slm-2b": (4, 8)}
    for model, sizes in batches.items():
        for batch in sizes:
            for kernel in ("eager", "sdpa_flash"):
                words = (*size(model, batch, smoke), "--attn_implementation", kernel)
                yield Arm("flash", f"{model} batch {batch} {kernel}", words, timed_seconds=3.0)
            if smoke:
                return


def extras(smoke: bool) -> Iterator[Arm]:
    """On top of the ladder: float8 where widths allow, CUDA graphs where launches bind, no cuDNN.

    And not compiled: Muon, at the rung of the fused norm, and fp16.
    """
    graphs = ("--torch_compile_mode", "reduce-overhead")
    wanted = [(f"{model}-hw", "fp8", (*TOP, "--fp8", "tensorwise"), "torchao") for model in MODELS]
    wanted += [(model, "CUDA graphs", (*TOP, *graphs), None) for model in ("slm-100m", "slm-500m")]
    # sdpa itself takes cuDNN's kernel where there is one
    wanted += [("slm-1b", "sdpa_flash", (*TOP, "--attn_implementation", "sdpa_flash"), None)]
    for model, name, flags, needs in wanted:
        batch = MODELS[model.removesuffix("-hw")]
        if not smoke:  # a CPU compiles each for half a minute
            yield Arm("extras", f"{model} {name}", (*size(model, batch, smoke), *flags), needs=needs)
    uncompiled = [word for name in ("fused loss", "fused norm") for word in LADDER[name]]
    for name, flags in {
        "Muon": ("--optim", "muon"),
        "fp16": ("--numerics", "fp16"),
    }.items():
        if not smoke or name == "Muon":
            kernels = () if name == "fp16" else uncompiled  # refuses the fused loss
            words = (*size("slm-500m", RUNG_BATCHES["slm-500m"], smoke), *kernels, *flags)
            yield Arm("extras", f"slm-500m {name}", words, timed_seconds=3.0)


def rungs(smoke: bool) -> Iterator[Arm]:
    """What each feature brings, at one batch for all: the ladder from its foot."""
    for model, batch in RUNG_BATCHES.items():
        for number, rung in enumerate(LADDER):
            flags = [word for name in list(LADDER)[1 : number + 1] for word in LADDER[name]] or LADDER[rung]
            words = (*size(model, batch, smoke), *flags)
            yield Arm("rungs", f"{model} {rung}", words, timed_seconds=3.0)
            if smoke:
                return


PLAN = {
    "canary": canary,
    "micro": micro,
    "ladder": ladder,
    "memory": memory,
    "trainer": trainer,
    "flash": flash,
    "extras": extras,
    "rungs": rungs,
}
PARTS = {1: ("canary", "micro", "ladder"), 2: ("memory",), 3: ("trainer", "flash", "extras", "rungs")}


class Keeper:
    """keeper.py in a process of its own, which runs one arm at a time and kills all that it has started."""

    def __init__(self, env: dict[str, str], *, fork: bool) -> None:
        command = (sys.executable, str(HERE / "keeper.py"), *(("--fork",) if fork else ()))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        self.found = self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"keeper.py ended with exit code {self._process.wait()}")
        return json.loads(line)

    def run(self, command: list[str], log: Path, limit_seconds: float, **more: bool) -> dict[str, Any]:
        asked = {"command": command, "log": str(log), "limit_seconds": limit_seconds, **more}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Returns once every process of its arms is gone."""
        self._process.stdin.close()
        self._process.wait()


class Results:
    """The folder of --out: what was measured, by this call and earlier ones."""

    def __init__(self, folder: Path, archives: Path) -> None:
        self.folder, self.archives = folder, archives
        self.about: dict[str, Any] = {}
        for each in (folder, archives):
            each.mkdir(parents=True, exist_ok=True)
        self._arms = folder / "arms.jsonl"
        self.lines: list[dict[str, Any]] = []
        for line in self._arms.read_text().splitlines() if self._arms.exists() else []:
            try:
                self.lines.append(json.loads(line))
            except json.JSONDecodeError:  # cut short when this program was killed
                continue
        self._arms.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self._arms.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def last(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The last line of each arm."""
        return {(line["part"], line["name"]): line for line in self.lines}

    def num_tries(self, arm: Arm) -> int:
        return sum(
            (line["part"], line["name"]) == arm.key and line["status"] != "not run" for line in self.lines
        )

    def describe(self, found: dict[str, Any], *, pretended: bool) -> None:
        path = self.folder / "about.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        self.about = {
            **before,
            **found,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commands": [*before.get("commands", []), " ".join(sys.argv)],
            "pretended": pretended,
        }
        path.write_text(json.dumps(self.about, indent=1) + "\n")

    @property
    def archive(self) -> Path:
        name = re.sub(r"[^a-z0-9]+", "-", (self.about.get("gpu") or "cpu").lower()).strip("-")
        return self.archives / f"{name}.tar.gz"

    def pack(self) -> None:
        """Write the archive anew: files, records, logs of what failed; without logs if it is too large."""
        logs = [path for path in sorted(self.folder.glob("logs/*/*.txt")) if self.last_status(path) != "ok"]
        core = [path for path in sorted(self.folder.glob("*.json*")) if path.is_file()]
        core += sorted(self.folder.glob("records/*/*/record.json"))
        unfinished = self.archive.with_suffix(".new")
        for paths in ([*core, *logs], core):
            with tarfile.open(unfinished, "w:gz", compresslevel=6) as archive:
                for path in paths:
                    archive.add(path, arcname=str(path.relative_to(self.folder)))
            if unfinished.stat().st_size <= MAX_ARCHIVE_BYTES:
                break
        unfinished.rename(self.archive)

    def last_status(self, log: Path) -> str | None:
        by_file = {(part, name.replace(" ", "_")): line for (part, name), line in self.last.items()}
        return by_file.get((log.parent.name, log.stem), {}).get("status")


BOILERPLATE = re.compile(
    r"torch[./]distributed[./](elastic|run|launcher)|ChildFailedError|elastic/errors|^\s*[=-]{5,}|"
    r"^(Root Cause|Failures:|\[\d+\]:)|<NO_OTHER_FAILURES>|error_file:|"
    r"^\s*(time|host|rank|exitcode|traceback)\s*:|\bWarning: |^\s*warnings\.warn\(|^\s*\^+\s*$|^Set TORCH|"
    r"^\[?W\d{4} |^(E|W)\d{4} |FAILED$|CalledProcessError"
)
ERROR = re.compile(
    r"^(\[rank\d+\]:\s*)?([\w.]*(Error|Exception|Interrupt|Exit)\b|error: |Fatal |hint: |Aborted)"
)


def last_words(log: str, code: int | None) -> str:
    """The error that a process ended with, out of its output: no launcher's traceback, no banner."""
    lines = [line.rstrip() for line in _without_launchers(log.splitlines()) if line.strip()]
    lines = [line for line in lines if not BOILERPLATE.search(line)]
    found = [number for number, line in enumerate(lines) if ERROR.match(line)]
    if found:
        first = found[-1]
        while first - 1 in found:  # error: ... and hint: ...
            first -= 1
        lines = lines[first : found[-1] + 4]
    said = "\n".join(lines[-6:])[-800:]
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        said = f"ended by {name}" + (f": {said}" if said else "")
    return said or f"exit code {code}, nothing was written"


def _without_launchers(lines: list[str]) -> list[str]:
    """The lines without tracebacks of torch's and accelerate's launchers, which say that a rank failed."""
    kept: list[str] = []
    start = None
    for line in lines:
        if line.startswith("Traceback (most recent call last)"):
            start = len(kept)
        elif start is not None and line and not line[0].isspace():
            if re.search(r"ChildFailedError|CalledProcessError", line):
                del kept[start:]
            start = None
        kept.append(line)
    return kept


class Measurement:
    """One call: its budget, the keeper, and what has been found so far."""

    def __init__(self, args: argparse.Namespace, results: Results, env: dict[str, str]) -> None:
        self.smoke, self.results, self.env = args.smoke, results, env
        self.deadline = time.monotonic() + 60 * args.budget_minutes
        self.fork = not args.no_fork
        self.keeper = Keeper(env, fork=self.fork)
        self.optional: list[str] = self.keeper.found["optional"]
        self.gpu: str | None = None

    @property
    def left_seconds(self) -> float:
        return self.deadline - time.monotonic()

    def look(self, *, pretended: bool) -> str | None:
        """Write down what this machine is; returns why nothing can be measured on it."""
        found = self.keeper.found
        broken = {name: why for name, why in found["failed_imports"].items() if name in REQUIRED}
        if broken:
            why = "\n".join(f"can't import {name}: {error}" for name, error in broken.items())
            self.results.describe({"versions": found["versions"]}, pretended=pretended)
            self.results.add({**_line(Arm("canary", "imports", ()), []), "status": "failed", "reason": why})
            return f"{why}\nhint: bench/gpu/pack.sh says how to carry what is missing"
        if found["cuda_initialized"]:
            print("an import initialised CUDA: every arm is a fresh process", flush=True)
            self.renew(fork=False)
        arm = Arm("canary", "machine", (str(HERE / "canary.py"),), kind="script", limit_seconds=60.0)
        line = self.execute(arm)
        self.show(line)
        machine = line["result"]
        self.gpu = machine.get("gpu")
        self.results.describe({**machine, "versions": found["versions"]}, pretended=pretended)
        if line["status"] != "ok":
            return f"this machine: {line['reason']}"
        if self.gpu is None and not self.smoke:
            hint = "--smoke runs the plan, tiny, on a CPU; --pretend on a pretended GPU"
            return f"torch sees no GPU here\nhint: {hint}"
        return None

    def renew(self, *, fork: bool) -> None:
        self.keeper.close()
        self.fork = fork
        self.keeper = Keeper(self.env, fork=fork)

    def go_through(self, arms: list[Arm]) -> None:
        """Each arm that has no result yet; then once more each that failed, or half of its batch."""
        for arm in arms:
            last = self.results.last.get(arm.key)
            if last is None or last["status"] == "not run":
                self.attempt(arm)
        for arm in arms:
            last = self.results.last[arm.key]
            if last["status"] in ("failed", "timeout") and self.results.num_tries(arm) < 2:
                if last["result"].get("status") == "oom":
                    if (half := _halved(arm)) is not None and half.key not in self.results.last:
                        self.attempt(half)
                else:
                    self.attempt(replace(arm, fresh=True))

    def attempt(self, arm: Arm) -> None:
        """Run an arm if it can run and the budget has time for it; else say why not."""
        estimate = self.estimate(arm)
        needed = self.expected_seconds(arm, estimate)
        if arm.needs is not None and arm.needs not in self.optional:
            line = {**_line(arm, []), "reason": f"{arm.needs} is not installed"}
        elif needed > self.left_seconds:
            why = f"takes about {needed:.0f} s, {max(0, self.left_seconds):.0f} s of the budget were left"
            line = {**_line(arm, []), "reason": why}
        else:
            line = self.execute(arm, estimate)
        self.results.add(line)
        self.show(line)
        self.results.pack()

    def expected_seconds(self, arm: Arm, estimate: dict[str, Any]) -> float:
        if self.smoke:
            return 1.0
        if arm.kind == "script":
            return arm.seconds
        per_step = estimate.get("step_seconds") or 0.5
        start = FRESH_SECONDS if arm.fresh or not self.fork else FORK_SECONDS
        compiling = COMPILE_SECONDS if "--torch_compile" in arm.words else 0
        return start + compiling + 1.5 * per_step * self.num_steps(arm, estimate) + CHECKING_SECONDS

    def limit_seconds(self, arm: Arm, estimate: dict[str, Any]) -> float:
        """After which an arm counts as hanging."""
        return 240.0 if self.smoke else 60 + 3 * self.expected_seconds(arm, estimate)

    def num_steps(self, arm: Arm, estimate: dict[str, Any]) -> int:
        if not arm.timed_seconds:
            return int(arm.words[arm.words.index("--max_steps") + 1])
        if self.smoke:
            return 3
        per_step = estimate.get("step_seconds") or 0.5
        return WARMUP_STEPS + max(10, min(30, math.ceil(arm.timed_seconds / per_step)))

    def estimate(self, arm: Arm) -> dict[str, Any]:
        """What `slm estimate` says of an arm of the trainer; nothing where there is no closed form."""
        if arm.kind != "train":
            return {}
        words, drop = list(arm.words), ("--rehearse", "--max_steps")
        for name in drop:
            if name in words:
                del words[words.index(name) : words.index(name) + 2]
        words = [word for word in words if word != "--profile"]
        on = ("--strategy", arm.strategy or "single", "--num_gpus", str(arm.num_ranks))
        on = (*on, "--gpu", self.gpu or "h200", "--json")
        code, said, _ = slm("estimate", *words, *on)
        return json.loads(said)[0] if code == 0 else {}

    def command(self, arm: Arm, estimate: dict[str, Any]) -> list[str]:
        records = self.results.folder / "records" / arm.part
        if arm.kind == "script":
            out = {
                "micro": ("--out", str(self.results.folder / "micro.jsonl")),
                "trainer": ("--out", str(self.results.folder / "records" / f"{arm.file_name}.json")),
            }
            return [sys.executable, *arm.words, *out.get(arm.part, ())]
        words = list(arm.words)
        if arm.timed_seconds:
            words += ["--max_steps", str(self.num_steps(arm, estimate))]
        words += ["--output_dir", str(records), "--run_name", arm.file_name]
        if arm.strategy is None:
            return [sys.executable, "-m", "slm_toolkit.train", *words]
        yaml = str(ROOT / "accel_configs" / f"{arm.strategy}.yaml")
        launch = ["--config_file", yaml, "--num_processes", "1", "--main_process_port", _free_port()]
        return [
            sys.executable,
            "-m",
            "slm_toolkit.launch.launcher",
            *launch,
            "-m",
            "slm_toolkit.train",
            *words,
        ]

    def execute(self, arm: Arm, estimate: dict[str, Any] | None = None) -> dict[str, Any]:
        """The line of an arm that has run, whatever became of it."""
        estimate = estimate or {}
        command = self.command(arm, estimate)
        log = self.results.folder / "logs" / arm.part / f"{arm.file_name}.txt"
        folder = self.results.folder / "records" / arm.part / arm.file_name
        shutil.rmtree(folder, ignore_errors=True)
        for each in (log.parent, folder.parent):
            each.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        on_gpu = self.gpu is not None and arm.part != "canary" and arm.strategy != "ds_zero3"
        fresh = arm.fresh or arm.part == "trainer"
        limit = arm.limit_seconds or max(1.0, min(self.left_seconds, self.limit_seconds(arm, estimate)))
        try:
            ended = self.keeper.run(command, log, limit, fresh=fresh, weights_on_gpu=on_gpu)
        except (ChildProcessError, BrokenPipeError) as error:
            self.keeper = Keeper(self.env, fork=False)
            self.fork = False
            return {**_line(arm, command), "status": "failed", "reason": str(error), "seconds": 0.0}
        said = log.read_text(errors="replace")
        if ended["forked"] and (ended["code"] == NO_FORK or BAD_FORK.search(said)):
            print("a fork can't use the GPU: every arm is a fresh process from here on", flush=True)
            self.renew(fork=False)
            return self.execute(arm, estimate)
        line = {**_line(arm, command), "seconds": round(ended["seconds"], 2), "forked": ended["forked"]}
        line["weights_drawn_on"] = "gpu" if on_gpu and ended["forked"] and arm.kind == "train" else "cpu"
        if ended["timed_out"]:
            return {
                **line,
                "status": "timeout",
                "reason": f"killed after {limit:.0f} s\n{last_words(said, None)}",
            }
        result, problem = self.result_of(arm, folder, command, said)
        if estimate:
            result |= {f"estimated_{name}": estimate[name] for name in ESTIMATED}
        if (folder / "record.json").exists():
            line["record"] = str((folder / "record.json").relative_to(self.results.folder))
        if ended["code"] != 0 and not (arm.part == "trainer" and problem is None):
            problem = problem if result.get("reason") else last_words(said, ended["code"])
        return {**line, "status": "failed" if problem else "ok", "reason": problem, "result": result}

    def result_of(
        self, arm: Arm, folder: Path, command: list[str], said: str
    ) -> tuple[dict[str, Any], str | None]:
        """What an arm has found, and what is wrong with it."""
        if arm.kind == "script":
            return _of_script(command, said)
        if not (folder / "record.json").is_file():
            return {}, last_words(said, 0)
        code, reported, error = slm("report", str(folder), "--json")
        try:
            (row,) = json.loads(reported)
        except ValueError:
            return {}, f"slm report can't read the record: {last_words(error, code)}"
        if row["status"] != "ok":
            return row, f"{row['status']}: {(row['reason'] or last_words(said, 1)).strip()[:800]}"
        if row.get("tokens_per_second"):
            row["step_seconds"] = row["tokens_per_step"] / row["tokens_per_second"]
        if arm.has_known_losses:
            pairs = zip(row["losses"], CANARY_LOSSES, strict=True)
            farthest = max((abs(a - b) for a, b in pairs), default=math.inf)
            if not farthest <= LOSS_TOLERANCE:
                return row, f"losses are up to {farthest:.4f} from the stored ones: {row['losses']}"
        return row, None

    def show(self, line: dict[str, Any]) -> None:
        print(row_of(line) + f"  {max(0, self.left_seconds):.0f} s left", flush=True)


def slm(*words: str) -> tuple[int, str, str]:
    """`slm WORDS` in this process, which imports it once: exit code, stdout, stderr."""
    from slm_toolkit.cli.main import main as command_line

    code, out, err = 0, io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            command_line(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:  # of one arm: the others go on
            traceback.print_exc()
            code = 1
    return code, out.getvalue(), err.getvalue()


ESTIMATED = ("step_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "tokens_per_second", "mfu")


def _line(arm: Arm, command: list[str]) -> dict[str, Any]:
    line = {"part": arm.part, "name": arm.name, "command": command, "status": "not run"}
    return {**line, "reason": None, "seconds": 0.0, "record": None, "result": {}}


def _of_script(command: list[str], said: str) -> tuple[dict[str, Any], str | None]:
    """The JSON that a script has written: throughput.py's rows, or its last line."""
    try:
        if command[1].endswith("throughput.py"):
            (found,) = json.loads(Path(command[-1]).read_text())
            return found, None if found["rows"] else last_words(said, 1)
        last = json.loads((said.strip().splitlines() or [""])[-1])
        return (last, None) if isinstance(last, dict) else ({}, "its last line is no JSON object")
    except (OSError, ValueError):
        return {}, last_words(said, 1)


def _halved(arm: Arm) -> Arm | None:
    if arm.batch == 1:
        return None
    at, half = arm.words.index("--per_device_train_batch_size") + 1, arm.batch // 2
    words = (*arm.words[:at], str(half), *arm.words[at + 1 :])
    return replace(arm, name=f"{arm.name} at batch {half}", words=words)


def _free_port() -> str:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


HEADER = (
    f"{'arm':44} {'status':8} {'tokens/s':>9} {'MFU':>6} {'step ms':>8} {'est.':>7} "
    f"{'peak GiB':>9} {'est.':>7} {'reserved':>9} {'est.':>7}"
)


def row_of(line: dict[str, Any]) -> str:
    found = line["result"]

    def cell(name: str, form: str, width: int, scale: float = 1.0) -> str:
        value = found.get(name)
        return f"{'-' if value is None else format(value * scale, form):>{width}}"

    cells = [
        f"{line['part'] + ' ' + line['name']:44} {line['status']:8}",
        cell("tokens_per_second", ",.0f", 9),
        cell("mfu", ".1%", 6),
        cell("step_seconds", ".1f", 8, 1e3),
        cell("estimated_step_seconds", ".1f", 7, 1e3),
        cell("peak_allocated_bytes", ".2f", 9, 2**-30),
        cell("estimated_peak_allocated_bytes", ".2f", 7, 2**-30),
        cell("peak_reserved_bytes", ".2f", 9, 2**-30),
        cell("estimated_peak_reserved_bytes", ".2f", 7, 2**-30),
    ]
    row = " ".join(cells)
    for arm in found.get("rows", []):
        row += f"\n    {arm['arm']:40} {'':8} {arm['tokens_per_second']:9,.0f}"
        row += f" {'':6} {arm['step_seconds'] * 1e3:8.1f}"
    if line["reason"]:
        row += "\n    " + line["reason"].replace("\n", "\n    ")
    return row


def micro_table(path: Path) -> str:
    """Ceilings and what a width off the multiple of 8 costs; the rest is for digest.py."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = []
    for row in rows:
        if row["kind"] == "matmul" and row["inner"] in (1536, 8192) and row["rows"] in (16_384, 8192):
            flops = 2 * row["rows"] * row["inner"] * row["width"]
            shape = f"{row['rows']} x {row['inner']} x {row['width']}"
            lines.append(f"    {shape:24} {row['pass']:8} {flops / row['seconds'] / 1e12:7.0f} TFLOP/s")
        elif row["kind"] == "copy":
            lines.append(
                f"    copy of {row['bytes']:,} bytes: {row['bytes'] / row['seconds'] / 1e12:.3f} TB/s"
            )
    return "\n".join([f"{len(rows)} kernels timed", *lines])


def table(results: Results) -> str:
    last = results.last.values()
    lines = [micro_table(results.folder / "micro.jsonl"), "", HEADER]
    lines += [row_of(line) for line in last if line["status"] != "not run"]
    left = [line for line in last if line["status"] == "not run"]
    if left:
        lines += ["", "not run:"]
        lines += [f"    {line['part']} {line['name']}: {line['reason']}" for line in left]
    if results.about.get("pretended"):
        lines += ["", "PRETENDED: there was no GPU; no time here means anything"]
    return "\n".join(lines)


def arms_of(args: argparse.Namespace, results: Results) -> list[Arm]:
    """In the plan's order: this call's, and what calls before it left, if their results are here."""
    if args.arms is not None:
        return [Arm(**{**arm, "words": tuple(arm["words"])}) for arm in json.loads(args.arms.read_text())]
    names = list(PLAN)
    if args.only:
        names = args.only
    elif args.part is not None:
        here = {line["part"] for line in results.lines}
        earlier = [number for number in PARTS if number < args.part and here & set(PARTS[number])]
        names = [name for number in (*earlier, args.part) for name in PARTS[number]]
    return [arm for name in names for arm in PLAN[name](args.smoke)]


def unpack(archive: Path, folder: Path) -> None:
    """An earlier call's results into an empty folder."""
    if (folder / "arms.jsonl").exists():
        raise SystemExit(f"error: {folder} holds results already\nhint: leave --earlier out")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Of every arm, and of the keeper, whose libraries read some of it when they are imported."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "8", **os.environ}
    # libraries ask whether there is a GPU as they are imported: through NVML that initialises no CUDA
    env |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_paths(os.environ)])}
    if not args.pretend:
        return env
    sys.path.insert(0, str(HERE))
    import pretend

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = env["PYTHONPATH"]  # which pretend.py's folder goes before
    env |= pretend.environment()
    os.environ["PYTHONPATH"] = before or ""
    return env


def _paths(env: Any) -> list[str]:
    return [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/gpu")))
    parser.add_argument("--archive", type=Path, help="folder of the archive (default: --out)")
    parser.add_argument("--earlier", type=Path, help="archive of an earlier call, to go on from")
    parser.add_argument("--budget_minutes", type=float, default=9.0)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--part", type=int, choices=PARTS, help="the call's number; default: all of the plan")
    which.add_argument("--only", nargs="+", choices=PLAN)
    which.add_argument("--arms", type=Path, help="JSON list of arms to run instead of the plan (see Arm)")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see on a CPU that all of it works")
    parser.add_argument("--pretend", action="store_true", help="tiny, on a pretended GPU")
    parser.add_argument("--no_fork", action="store_true", help="every arm a fresh process")
    args = parser.parse_args()
    args.smoke |= args.pretend
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = args.out.resolve()
    if args.earlier is not None:
        folder.mkdir(parents=True, exist_ok=True)
        unpack(args.earlier, folder)
    results = Results(folder, (args.archive or folder).resolve())
    call = Measurement(args, results, environment(args))
    try:
        print(HEADER, flush=True)
        if problem := call.look(pretended=args.pretend):
            raise SystemExit(f"error: {problem}")
        call.go_through(arms_of(args, results))
    finally:
        call.keeper.close()
        results.pack()
    print(table(results))
    packed_bytes = results.archive.stat().st_size
    print(f"\narchive: {results.archive}, {packed_bytes / 2**20:.2f} MiB")
    if packed_bytes > MAX_ARCHIVE_BYTES:
        raise SystemExit(f"error: the archive has more than {MAX_ARCHIVE_BYTES // 2**20} MiB")


if __name__ == "__main__":
    main()
