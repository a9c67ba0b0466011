"""Run arms (trainings, micro-benchmarks) on one GPU, the most useful first, within a budget of minutes.

    python bench/gpu/measure.py --out measured                      # the plan below
    python bench/gpu/measure.py --out measured --only micro memory  # parts of it
    python bench/gpu/measure.py --out measured --arms arms.json     # a JSON list of arms instead (see Arm)
    python bench/gpu/measure.py --smoke --arms arms.json            # the same arms, tiny, on a CPU
    python bench/gpu/pretend.py bench/gpu/measure.py --smoke        # tiny, on a pretended GPU

Each arm is a process with a time limit. An arm that fails, crashes or hangs is a line with its error, and the
next arm starts. Arms for which no time is left are named. All is written to --out at once: `arms.jsonl` (a
line per arm), `micro.jsonl`, `records/`, `logs/`, `about.json`. `GPU.tar.gz` holds all of it and is rewritten
after each arm. The same command goes on where it was: it runs the arms that have not ended well yet. On
another machine, unpack the archive into --out first.

Importing torch, transformers, accelerate and DeepSpeed takes about 10 s, so this process imports them once
and forks each training (not with --no_fork). It never initialises CUDA, because no fork would survive that.
"""

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import psutil

from slm_toolkit.compare.outcome import reason_in_log
from slm_toolkit.hardware.gpus import this_machine
from slm_toolkit.launch.processes import adopt_orphans, signal_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

MODELS = {"slm-100m": 64, "slm-500m": 32, "slm-1b": 32, "slm-2b": 16}
"batch of each in the ladder: what a GPU of 80 GB holds, so that larger GPUs compare with it"
RUNG_BATCHES = {"slm-100m": 32, "slm-500m": 16, "slm-1b": 8, "slm-2b": 8}
"of all rungs: the lowest is eager attention, which keeps scores of 1024 x 1024 per head and layer"
LADDER = {  # each includes all above it, except the first
    "eager": ("--kernels", "plain", "--attn_implementation", "eager"),
    "sdpa": ("--kernels", "plain", "--attn_implementation", "sdpa"),
    "fused loss": ("--kernels", "loss"),
    "fused norm": ("--kernels", "loss+norm"),
    "compiled": ("--kernels", "loss+norm+compile"),
}
TOP = tuple(word for flags in list(LADDER.values())[1:] for word in flags)
TRITON = ("--kernels", "compiled")
STRATEGIES = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3")
CANARY = ("--model", "slm-1m", "--seq_len", "128", "--per_device_train_batch_size", "4", "--max_steps", "6")
CANARY_LOSSES = (6.0200, 5.8682, 5.7580, 5.7373, 5.6258, 5.6094)
"of CANARY on a CPU (torch 2.13, 2026-11-23); weights and data are the same on every machine"
LOSS_TOLERANCE = 0.02
"bf16 moves these losses by 0.001 to 0.01"
SMOKE = {
    **{"--model": "slm-1m", "--per_device_train_batch_size": "2", "--seq_len": "32", "--max_steps": "3"},
    **{"--models": "slm-1m", "--batch_size": "2", "--steps": "4", "--warmup": "2"},
}
"values of --smoke"
NOT_OF_ESTIMATES = {"--max_steps", "--output_dir", "--run_name", "--rehearse"}
ESTIMATED = ("step_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "tokens_per_second", "mfu")
WARMUP_STEPS = 5
"the trainer's first steps, probed and compiled, are not timed"
FORK_SECONDS, FRESH_SECONDS, COMPILE_SECONDS = 6, 17, 25
"of an arm besides its steps, as on an H100"
IMPORTED = (
    *("torch", "transformers", "accelerate", "deepspeed", "torch.distributed.run", "torch._dynamo"),
    *("transformers.models.llama.modeling_llama", "accelerate.commands.launch", "slm_toolkit.train"),
    "slm_toolkit.cli.main",
)
VERSIONS = ("torch", "triton", "transformers", "accelerate", "deepspeed", "numpy", "nvidia-ml-py", "msgspec")
TRAIN, LAUNCHER = "slm_toolkit.train", "slm_toolkit.launch.launcher"


@dataclass(frozen=True)
class Arm:
    """One process: a training, or a script."""

    part: str
    name: str
    words: tuple[str, ...]
    "flags of the trainer, or a script and its arguments, where {out} is the folder of --out"
    strategy: str | None = None
    "launched with this strategy's YAML; None: a plain process"
    seconds: float = 5.0
    "to time steps for, at least 10 and at most 30 steps; of a script: what it takes"
    limit_seconds: float | None = None
    "after which it is killed; None: a minute and three times what it is expected to take"

    @property
    def is_script(self) -> bool:
        return self.words[0].endswith(".py")

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "_")


def size(model: str, batch: int) -> tuple[str, ...]:
    return ("--model", model, "--per_device_train_batch_size", str(batch), "--seq_len", "1024")


def plan() -> Iterator[Arm]:
    for strategy in ("fsdp_full_shard", "ds_zero2", "ds_zero3"):
        yield Arm("canary", strategy, CANARY, strategy)
    yield Arm("canary", "Triton", (*CANARY, "--kernels", "loss+triton"))
    yield Arm("micro", "micro", (str(HERE / "micro.py"), "--out", "{out}/micro.jsonl"), seconds=60)
    for suffix, name, flags in (
        ("-hw", "Triton", TRITON),
        ("", "compiled", ()),
        ("", "padded", ("--pad_widths",)),
    ):
        for model, batch in MODELS.items():
            yield Arm("ladder", f"{model}{suffix} {name}", (*size(model + suffix, batch), *TOP, *flags))
    for model in ("slm-500m", "slm-2b"):
        for ranks in ("1", "8"):
            for strategy in STRATEGIES:
                rehearsed = ("--rehearse", ranks) if ranks != "1" else ()
                words = (*size(model, RUNG_BATCHES[model]), "--kernels", "plain", *rehearsed)
                yield Arm("memory", f"{model} {strategy} {ranks}", words, strategy, seconds=2.0)
    for model in ("slm-100m", "slm-1b"):
        shape = ("--models", model, "--batch_size", str(MODELS[model]), "--steps", "24", "--warmup", "8")
        arms = ("--arms", "trainer_compile", "bare_compile", "ours_compile", "--against", "trainer_compile")
        rest = ("--rounds", "1", "--core", "-1", "--out", f"{{out}}/records/{model}.json")
        words = (str(ROOT / "bench" / "throughput.py"), *shape, *arms, *rest)
        yield Arm("trainer", model, words, seconds=150)
    for model, batch in MODELS.items():
        words = (*size(f"{model}-hw", batch), *TOP, "--fp8", "tensorwise")
        yield Arm("extras", f"{model}-hw fp8", words)
    for model, batch in RUNG_BATCHES.items():
        for number, rung in enumerate(LADDER):
            flags = [word for name in list(LADDER)[1 : number + 1] for word in LADDER[name]] or LADDER[rung]
            yield Arm("rungs", f"{model} {rung}", (*size(model, batch), *flags), seconds=3.0)


class Results:
    """The folder of --out: what this call and earlier ones have measured."""

    def __init__(self, folder: Path, archives: Path, about: dict[str, Any]) -> None:
        self.folder = folder
        archives.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "-", (about["gpu"] or "cpu").lower())
        self.archive = archives / f"{name}.tar.gz"
        self._arms, file = folder / "arms.jsonl", folder / "about.json"
        self.status: dict[tuple[str, str], str] = {}
        "of each arm's last line"
        lines = self._arms.read_text().splitlines(keepends=True) if self._arms.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # the last is cut short if a call was killed
        self._arms.write_text("".join(whole))
        for arm in map(json.loads, whole):
            self.status[arm["part"], arm["name"]] = arm["status"]
        before = json.loads(file.read_text())["commands"] if file.exists() else []
        about = {**about, "commands": [*before, " ".join(sys.argv)]}
        file.write_text(json.dumps(about, indent=1) + "\n")

    def add(self, line: dict[str, Any]) -> None:
        self.status[line["part"], line["name"]] = line["status"]
        with self._arms.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.pack()

    def pack(self) -> None:
        """Write the archive anew: files, records, and logs of what did not end well."""
        paths = [*self.folder.glob("*.json*"), *self.folder.glob("records/*/*/record.json")]
        for log in self.folder.glob("logs/*/*.txt"):
            if self.status.get((log.parent.name, log.stem.replace("_", " "))) != "ok":
                paths.append(log)
        unfinished = self.archive.with_suffix(".new")
        with tarfile.open(unfinished, "w:gz") as archive:
            for path in sorted(paths):
                archive.add(path, arcname=str(path.relative_to(self.folder)))
        unfinished.rename(self.archive)


class Measurement:
    """One call: its budget, and what it has found so far."""

    def __init__(self, args: argparse.Namespace, results: Results, gpu: str | None) -> None:
        self.smoke, self.fork, self.results, self.gpu = args.smoke, not args.no_fork, results, gpu
        self.deadline = time.monotonic() + 60 * args.budget_minutes
        self.parent = os.getppid()

    def attempt(self, arm: Arm) -> None:
        """Run an arm if there is time for it; else write why not."""
        estimate = self.estimate(arm)
        command = self.command(arm, estimate)
        line = {"part": arm.part, "name": arm.name, "command": command, "status": "not run", "result": {}}
        needed, left = self.expected_seconds(arm, estimate), self.deadline - time.monotonic()
        if needed > left:
            why = f"takes about {needed:.0f} s, {max(0, left):.0f} s of the budget were left"
            line |= {"reason": why}
        else:
            limit = arm.limit_seconds or min(left, 240 if self.smoke else 60 + 3 * needed)
            line |= self.execute(arm, command, limit)
            if line["result"] and estimate:
                line["result"] |= {f"estimated_{name}": estimate[name] for name in ESTIMATED}
        self.results.add(line)
        print(f"{row_of(line)} [{max(0, self.deadline - time.monotonic()):.0f} s left]", flush=True)

    def estimate(self, arm: Arm) -> dict[str, Any]:
        """What `slm estimate` prints for a training; nothing where there is no closed form."""
        if arm.is_script:
            return {}
        ranks = arm.words[arm.words.index("--rehearse") + 1] if "--rehearse" in arm.words else "1"
        words = words_of_estimate(arm.words, arm.strategy or "single", ranks, self.gpu or "h200")
        code, printed = self.slm("estimate", *words)
        return json.loads(printed)[0] if code == 0 else {}

    def expected_seconds(self, arm: Arm, estimate: dict[str, Any]) -> float:
        if self.smoke:
            return 1.0
        if arm.is_script:
            return arm.seconds
        compiling = COMPILE_SECONDS if any("compile" in word for word in arm.words) else 0
        steps = 1.5 * (estimate.get("step_seconds") or 0.5) * self.num_steps(arm, estimate)
        return (FORK_SECONDS if self.fork else FRESH_SECONDS) + compiling + steps

    def num_steps(self, arm: Arm, estimate: dict[str, Any]) -> int:
        steps = math.ceil(arm.seconds / (estimate.get("step_seconds") or 0.5))
        return WARMUP_STEPS + max(10, min(30, steps))

    def command(self, arm: Arm, estimate: dict[str, Any]) -> list[str]:
        words = [word.replace("{out}", str(self.results.folder)) for word in arm.words]
        if not arm.is_script and "--max_steps" not in words:
            words += ["--max_steps", str(self.num_steps(arm, estimate))]
        if self.smoke:
            words = [SMOKE.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        if arm.is_script:
            shrunk = ["--smoke"] if self.smoke and arm.part == "micro" else []
            return [sys.executable, *words, *shrunk]
        records = str(self.results.folder / "records" / arm.part)
        train = ["-m", TRAIN, *words, "--output_dir", records, "--run_name", arm.file_name]
        if arm.strategy is None:
            return [sys.executable, *train]
        yaml = str(ROOT / "accel_configs" / f"{arm.strategy}.yaml")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        launch = ["--config_file", yaml, "--num_processes", "1", "--main_process_port", port]
        return [sys.executable, "-m", LAUNCHER, *launch, *train]

    def execute(self, arm: Arm, command: list[str], limit: float) -> dict[str, Any]:
        log = self.results.folder / "logs" / arm.part / f"{arm.file_name}.txt"
        folder = self.results.folder / "records" / arm.part / arm.file_name
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        began, forked = time.monotonic(), self.fork and not arm.is_script
        on_gpu = forked and self.gpu is not None and arm.part != "canary" and arm.strategy != "ds_zero3"
        code = self.run(command, log, limit, forked=forked, weights_on_gpu=on_gpu)
        ended = {"seconds": round(time.monotonic() - began, 2), "forked": forked}
        ended["weights_drawn_on"] = "gpu" if on_gpu else "cpu"
        result, status, reason = {}, "failed", None
        try:
            result = self.script_result(command, log) if arm.is_script else self.row(folder)
            reason = result.get("reason")
        except (OSError, ValueError, IndexError):
            reason = reason_in_log(log)
        if code is None:
            status, reason = "timeout", f"killed after {limit:.0f} s; {reason}"
        elif code < 0:
            reason = f"ended by {signal_name(-code)}; {reason}"
        elif code != 0:
            reason = reason or f"exit code {code}"
        elif reason is None and arm.part == "canary":
            pairs = zip(result["losses"], CANARY_LOSSES, strict=False)
            if not self.smoke and not max(abs(a - b) for a, b in pairs) <= LOSS_TOLERANCE:
                reason = f"losses should be {CANARY_LOSSES}"
        if reason is None:
            status = "ok"
        record = str(folder.relative_to(self.results.folder) / "record.json")
        return {**ended, "status": status, "reason": reason, "result": result, "record": record}

    def script_result(self, command: list[str], log: Path) -> dict[str, Any]:
        """The JSON file that a script has written, or the last line that it has printed."""
        if command[-1].endswith(".json"):
            return json.loads(Path(command[-1]).read_text())[0]
        return dict(json.loads(log.read_text().splitlines()[-1]))

    def row(self, folder: Path) -> dict[str, Any]:
        """What `slm report` shows of a training's record."""
        if not folder.exists():
            raise ValueError(f"no record in {folder}")
        (row,) = json.loads(self.slm("report", str(folder), "--json")[1])
        if row["status"] == "ok" and row["tokens_per_second"]:
            row["step_seconds"] = row["tokens_per_step"] / row["tokens_per_second"]
        return row

    def slm(self, *words: str) -> tuple[int | None, str]:
        """Exit code and output of `slm WORDS`."""
        log = self.results.folder / "logs" / "slm.out"
        command = [sys.executable, "-m", "slm_toolkit.cli.main", *words]
        code = self.run(command, log, 60, forked=self.fork)
        return code, log.read_text()

    def run(
        self, command: list[str], log: Path, limit: float, *, forked: bool, weights_on_gpu: bool = False
    ) -> int | None:
        """Run a command and kill all that it leaves; returns its exit code, None if its time was over."""
        log.parent.mkdir(parents=True, exist_ok=True)
        until, code = time.monotonic() + limit, None
        pid = os.fork()
        if pid == 0:
            become(command, log, forked=forked, weights_on_gpu=weights_on_gpu)
        while code is None and time.monotonic() < until:
            if os.getppid() != self.parent:  # this program was killed
                kill_all()
                sys.exit(1)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        kill_all()
        return code


def kill_all() -> None:
    """Kill this process's children and theirs; orphans become this process's children, so none is missed."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def become(command: list[str], log: Path, *, forked: bool, weights_on_gpu: bool) -> NoReturn:
    """The command, in this fork. Nothing above it on the stack may catch its exceptions or clean up."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    # `slm` prints JSON, and warnings to stderr
    os.dup2(output if log.suffix == ".txt" else os.open(os.devnull, os.O_WRONLY), 2)
    if not forked:
        os.execv(command[0], command)
    _, _, module, *words = sys.orig_argv = command
    importlib.reload(sys.modules["slm_toolkit.run.peers.failure"])  # it knows when its process started
    if module == LAUNCHER:
        at = words.index("-m")
        launch_environment(words)
        launcher = SimpleNamespace(cmdline=lambda: command, cwd=os.getcwd)
        psutil.Process.parents = lambda _: [launcher]  # where the trainer looks for its strategy
        module, words = TRAIN, words[at + 2 :]
    if weights_on_gpu:
        draw_weights_on_gpu()
    sys.argv = [sys.modules[module].__file__, *words]
    sys.modules[module].main()
    sys.exit()


def launch_environment(words: list[str]) -> None:
    """Give this process the environment that `accelerate launch` with these words gives its only rank."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    def by_torch(_: Any) -> None:
        variables.update(os.environ)
        variables.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        variables.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=words[words.index("--main_process_port") + 1])

    class Popen:
        returncode = 0

        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            variables.update(env)

        def wait(self) -> int:
            return 0

    variables: dict[str, str] = {}
    with patch("torch.distributed.run.run", by_torch), patch.object(subprocess, "Popen", Popen):
        launch_command(launch_command_parser().parse_args(words))
    os.environ.update(variables)


def draw_weights_on_gpu() -> None:
    """Draw the model's weights on the GPU, where 2B of them take no half minute: other numbers, same speed.

    Memory that building took is handed back, so that peaks count what training takes.
    """
    import torch

    from slm_toolkit.run import setup
    from slm_toolkit.run.model import model

    build, draw = setup.build_model, model.drawn_model

    def drawn(*arguments: Any) -> torch.nn.Module:
        with torch.device("cuda"):
            return draw(*arguments)

    def built(*arguments: Any, **options: Any) -> torch.nn.Module:
        whole = build(*arguments, **options)
        torch.cuda.empty_cache()
        return whole

    model.drawn_model, setup.build_model = drawn, built


def words_of_estimate(words: tuple[str, ...], strategy: str, ranks: str, gpu: str) -> list[str]:
    """The words of `slm estimate` for a training with these flags."""
    pairs = zip(["", *words], words, strict=False)
    kept = [word for before, word in pairs if not NOT_OF_ESTIMATES & {before, word}]
    return [*kept, "--strategy", strategy, "--num_gpus", ranks, "--gpu", gpu, "--json"]


def row_of(line: dict[str, Any]) -> str:
    result = line["result"]
    row = f"{line['part']} {line['name']}: {line['status']}"
    for label, name, form, scale in (
        ("tokens/s", "tokens_per_second", ",.0f", 1),
        ("MFU", "mfu", ".1%", 1),
        ("step ms", "step_seconds", ".1f", 1e3),
        ("allocated GiB", "peak_allocated_bytes", ".2f", 2**-30),
        ("reserved GiB", "peak_reserved_bytes", ".2f", 2**-30),
    ):
        if result.get(name) is not None:
            row += f"; {label} {result[name] * scale:{form}}"
            estimate = result.get(f"estimated_{name}")
            row += f" (estimated {estimate * scale:{form}})" if estimate else ""
    for each in result.get("rows", []):
        row += f"\n    {each['arm']}: {each['tokens_per_second']:,.0f} tokens/s"
    return row + (f"\n    {line['reason']}" if line["reason"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--archive", type=Path, help="folder of the archive (default: --out)")
    parser.add_argument("--budget_minutes", type=float, default=9.0)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=list(dict.fromkeys(arm.part for arm in plan())))
    which.add_argument("--arms", type=Path, help="JSON list of arms to run instead of the plan")
    parser.add_argument("--smoke", action="store_true", help="shrink every arm")
    parser.add_argument("--no_fork", action="store_true", help="every training imports all afresh")
    args = parser.parse_args()
    if pid := os.fork():  # if this process is killed, its child notices, and kills the arm
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.setsid()
    adopt_orphans()
    pretended = "SLM_PRETEND_GPUS" in os.environ
    paths = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    os.environ |= {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]), "HF_HUB_OFFLINE": "1"}
    # libraries ask whether there is a GPU as they are imported: through NVML that initialises no CUDA
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name, value in (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), ("OMP_NUM_THREADS", "8")):
        os.environ.setdefault(name, value)
    gpu = this_machine().gpu
    if gpu is None and not args.smoke:
        raise SystemExit("error: torch sees no GPU here\nhint: --smoke runs tiny arms on a CPU")
    sys.modules["torchao"] = None  # transformers would import it, and it initialises CUDA
    for name in IMPORTED:
        importlib.import_module(name)
    del sys.modules["torchao"]
    from slm_toolkit.run.observe.machine_load import driver_version

    about = {"gpu": gpu, "pretended": pretended, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    about["driver"] = driver_version().get("NVIDIA driver")
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    about["versions"] = {name: installed[name] for name in VERSIONS if name in installed}
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out.resolve(), (args.archive or args.out).resolve(), about)
    call = Measurement(args, results, gpu)
    for arm in [Arm(**arm) for arm in json.loads(args.arms.read_text())] if args.arms else plan():
        if (args.only is None or arm.part in args.only) and results.status.get((arm.part, arm.name)) != "ok":
            call.attempt(arm)
    results.pack()
    print(f"archive: {results.archive}, {results.archive.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
