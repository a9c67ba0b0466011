"""What the tests share: real launches, each done once per session."""

import dataclasses
import gc
import importlib.util
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from slm_toolkit.cli.main import main
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.hardware.network import cluster_of
from slm_toolkit.hardware.prices import Price
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.predict.setup.setup import Deployment
from slm_toolkit.recommend.plans import GpuOffer, Plan, Workload, search
from slm_toolkit.record.run_record import RunRecord, model_facts
from slm_toolkit.strategy.strategy import find_strategy

H100 = "NVIDIA H100 80GB HBM3"
ROOT = Path(__file__).parent.parent
DEEPSPEED = "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
FSDP2 = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
ALIGNED = ("--parity", "20", "--profile")
SMALL_LLAMA = {
    **{
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 32,
    },
    **{"num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 384},
}
TIED = {
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 384,
    "tie_word_embeddings": True,
}
_COMPILED = tempfile.TemporaryDirectory(prefix="slm-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _COMPILED.name  # a killed launch leaves half a file, which stays
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
ENV["THP_MEM_ALLOC_ENABLE"] = "1"  # as compare sets it for its launches, which could not begin warm otherwise

COMPILING_SECONDS = 1200
"for DeepSpeed's cpu_adam and async_io on two cores that do other work, too"

_NEEDS_LIBAIO = pytest.mark.skipif(
    not Path("/usr/include/libaio.h").exists(), reason="apt-get install libaio-dev"
)

_LAUNCHING = {"compare", "train", "launch", "slm_toolkit.train"}

_SHARED = {"aligned", "fp32", "stock"}
"launches that are done once per process of pytest"


def _is_unit(item: pytest.Item) -> bool:
    return ROOT / "tests" / "unit" in item.path.parents


_LONGEST = {
    *("test_slurm", "test_planted_faults", "test_kills", "test_recipes", "test_fuzz", "test_throughput"),
    *("test_your_own_script", "test_stops", "test_same_run", "test_two_hosts", "test_faults"),
    *("test_families_trained", "test_train_verb"),
}
"files that take the most minutes (`pytest -m full --durations=0`, 2026-11-25)"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Outside tests/unit what is marked neither quick nor slow is left to `pytest -m full`. A file's tests
    stay together with `-n`, and files do that share launches or one Slurm."""
    sharing = {item.path.stem for item in items if _SHARED & set(getattr(item, "fixturenames", ()))}
    for item in items:
        if not (_is_unit(item) or item.get_closest_marker("quick") or item.get_closest_marker("slow")):
            item.add_marker(pytest.mark.full)
        stem = item.path.stem
        group = "launches" if stem in sharing else "slurm" if stem.startswith("test_slurm") else stem
        if item.get_closest_marker("nvme"):
            item.add_marker(_NEEDS_LIBAIO)
            group = "nvme"  # one after another: two runs that swap to one folder spoil each other's tensors
        item.add_marker(pytest.mark.xdist_group(group))
    # pytest-xdist would start groups of few tests last, and these take minutes each: one worker would wait
    items.sort(key=lambda item: item.path.stem not in _LONGEST)


def pytest_collection_finish() -> None:
    """Leave the imported libraries out of every later collection, which would walk them for half a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what fails at once: the summary is half an hour away, or never printed."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        what = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        print(f"\n{report.nodeid} failed: {what.splitlines()[0][:200] if what else ''}", flush=True)


_STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"}
_running: list[pytest.Item] = []


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and _running and _is_unit(_running[-1]):
        raise AssertionError(f"a test of tests/unit starts a process: {arguments}")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """No test of tests/unit starts a process, nor does its set-up: so all of them together take a minute."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


@dataclass(frozen=True)
class Finished:
    """A process that ended."""

    code: int
    out: str
    err: str


class _Warm:
    """What lets a launch begin without its seconds of imports: see tests/warm."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="slm-warm-")

    def env(self) -> dict[str, str]:
        """Return ENV, with what lets a launch begin warm. Until the server runs, launches begin cold."""
        socket = f"{self._folder.name}/socket"
        if self._server is None:
            command = [sys.executable, str(ROOT / "tests" / "warm" / "server.py"), socket]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self._server = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=ENV, start_new_session=True, **quiet
            )
        paths = [str(ROOT / "tests" / "warm"), *filter(None, [ENV.get("PYTHONPATH")])]
        return {**ENV, "PYTHONPATH": os.pathsep.join(paths), "SLM_WARM_SOCKET": socket}


WARM = _Warm()

WHEN_LOADED = """
import importlib.abc, importlib.util, sys

def when_loaded(name, change):
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, found, path, target=None):
            if found != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), change(module))
            return spec

    if name in sys.modules:  # of a process that began warm
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, Finder())
"""
"for `planted`: calls `change` with a module once it is imported"


def planted(folder: Path, text: str) -> dict[str, str]:
    """The environment in which each Python runs `text` before its program, be it warm or cold."""
    site = folder / "site" / "sitecustomize.py"
    site.parent.mkdir(parents=True, exist_ok=True)
    site.write_text(text)
    return {"PYTHONPATH": WARM.env()["PYTHONPATH"], "SLM_WARM_SITE": str(site)}


def run(
    *words: str,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    cold: bool = False,
    warm: bool = False,
) -> Finished:
    """Run a command. A launch begins warm: its processes are forked from one with all imports done.

    cold: its processes start as a user's do, for tests about processes. warm: other commands begin warm, too.
    """
    if warm or not cold and (_LAUNCHING & set(words[:3]) or Path(words[0]).name in ("accelerate", "bash")):
        env = {**WARM.env(), **(env or {})}
    env = {**ENV, **(env or {})}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    return Finished(done.returncode, done.stdout, done.stderr)


def slm(
    *arguments: str,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    cold: bool = False,
) -> Finished:
    """Run the `slm` command of this environment; `cold` as of `run`."""
    slm = str(Path(sys.executable).with_name("slm"))
    return run(slm, *arguments, cwd=cwd, env=env, timeout=timeout, cold=cold)


def slm_here(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> Finished:
    """Run the `slm` command in this process, where it starts no other: for what a verb prints."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    environment = patch.dict(os.environ, {**ENV, **(env or {})})
    with (
        environment,
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main(list(arguments))
    printed = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Finished(end.value.code or 0, *printed)


def drawn(values: Iterable[object], number: int) -> list[object]:
    """Values for a test: `number` of them, drawn by a seed, always; the rest with `pytest -m full`."""
    values = list(values)
    always = set(Random(24).sample(range(len(values)), number))
    return [
        value if index in always else pytest.param(value, marks=pytest.mark.full)
        for index, value in enumerate(values)
    ]


def bench(name: str) -> ModuleType:
    """A file of bench/, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    """A free port below those that Linux gives to outgoing connections; random, for tests side by side."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port


def left_over(folder: Path) -> list[psutil.Process]:
    """Processes that have `folder` in their command line: those of its runs, launchers and ranks."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if str(folder) in " ".join(process.info["cmdline"] or [])]


def own_strategy(folder: Path, text: str, deepspeed: object = None, *, name: str = "mine") -> str:
    """A strategy YAML of the user's own, and the DeepSpeed JSON beside it that it names."""
    path = folder / f"{name}.yaml"
    if deepspeed is not None:
        (folder / f"{name}.json").write_text(json.dumps(deepspeed))
        text = f"{DEEPSPEED}  deepspeed_config_file: {name}.json\n{text}"
    path.write_text(text)
    return str(path)


def launch(
    *arguments: str,
    config: str | Path,
    script: str | Path | None = None,
    launcher: tuple[str, ...] = (),
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    cold: bool = False,
) -> Finished:
    """`accelerate launch --config_file CONFIG -m slm_toolkit.train ARGS`, or a script in its place; `cold` as
    of `run`."""
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    target = ("-m", "slm_toolkit.train") if script is None else (str(script),)
    return run(
        *(accelerate, "launch", "--main_process_port", "0", *launcher, "--config_file", str(config)),
        *(*target, *arguments),
        cwd=cwd,
        env=env,
        timeout=timeout,
        cold=cold,
    )


def record_under(folder: Path) -> dict:
    """The one record under a folder."""
    (path,) = folder.rglob("record.json")
    return json.loads(path.read_text())


def trained_in(folder: Path, strategy: str, *words: str) -> dict:
    """The record of a training with steps of four sequences, on two processes, under `single` on one."""
    num_processes = 1 if strategy == "single" else 2
    batch = ("--per_device_train_batch_size", str(4 // num_processes))
    words += (*batch, "--output_dir", str(folder), "--run_name", "run")
    launcher = ("--num_processes", str(num_processes))
    done = launch(*words, config=f"accel_configs/{strategy}.yaml", launcher=launcher)
    assert done.code == 0, done.err
    return record_under(folder)


def quiet_copy(runs: Path, to: Path) -> Path:
    """Copy a folder's records as a quiet machine would have made them, so that no row is too disturbed."""
    for path in runs.glob("*/record.json"):
        record = json.loads(path.read_text()) | {"other_busy_cores": 0}
        record["step_seconds"] = [[0.1] * len(rank) for rank in record["step_seconds"]]
        (to / path.parent.name).mkdir(parents=True)
        (to / path.parent.name / "record.json").write_text(json.dumps(record))
    return to


@dataclass(frozen=True)
class Comparison:
    """A finished `slm compare --json` and its rows by strategy."""

    finished: Finished
    rows: dict[str, dict]
    folder: Path


def made_record(**changes: object) -> RunRecord:
    """Two ranks on H100s, slm-100m: 3 warm-up steps of 9 s, then 30 steps of 0.5 s on the slower rank."""
    config = RunConfig(model="slm-100m", seq_len=1024, kernels="plain").with_defaults(has_gpu=True)
    made = RunRecord(
        run_name="made",
        identity="0",
        status="ok",
        strategy="ddp",
        asked={"config": config.identity, "num_processes": 2, "files": {}},
        model=model_facts(PRESETS["slm-100m"]),
        versions={},
        started_at="2026-01-01T00:00:00+00:00",
        gpu=H100,
        world_size=2,
        engine="ddp",
        num_cores=2,
        tokens_per_step=2 * 4 * 1024,
        losses=[10.0] * 33,
        grad_norms=[1.0] * 33,
        step_seconds=[[9.0] * 3 + [0.4] * 30, [1.0] * 3 + [0.5] * 30],
        state_bytes=[{"parameters": 2, "gradients": 2, "master_weights": 4, "optimizer": 8}] * 2,
        peak_allocated_bytes=[2**30, 3 * 2**30],
        peak_reserved_bytes=[2**31, 2**31],
        peak_rss_bytes=[2**31, 2**31],
    )
    return dataclasses.replace(made, **changes)


def compare(*arguments: str, folder: Path) -> Comparison:
    words = ("compare", "--json", "--model", "slm-1m", "--output_dir", str(folder), *arguments)
    finished = slm(*words, timeout=COMPILING_SECONDS)
    assert finished.out, finished.err
    return Comparison(finished, {row["strategy"]: row for row in json.loads(finished.out)}, folder)


@pytest.fixture(scope="session")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """All six strategies on two CPU processes in bf16, with an fp32 reference and profiles."""
    return compare(*ALIGNED, folder=tmp_path_factory.mktemp("aligned"))


@pytest.fixture(scope="session")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """All six strategies on two CPU processes in fp32, with a single-process reference."""
    return compare("--numerics", "fp32", "--parity", "20", folder=tmp_path_factory.mktemp("fp32"))


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """What accelerate does by itself, one strategy of each engine: as the README's command has it."""
    words = ("--numerics", "stock", "--kernels", "plain", "--strategy", "ddp", "fsdp_full_shard", "ds_zero2")
    words += ("--max_steps", "20")  # at least ten are timed: fewer have no rank
    return compare(*words, folder=tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real English prose: the licence texts and documentation strings of the standard library."""
    folder = tmp_path_factory.mktemp("texts")
    shutil.copyfile(ROOT / "LICENSE", folder / "licence.txt")
    for name in ("argparse", "collections", "decimal", "inspect", "logging", "typing", "unittest", "email"):
        module = __import__(name)
        (folder / f"{name}.txt").write_text(
            Path(module.__file__).read_text(encoding="utf-8"), encoding="utf-8"
        )
    return folder


@pytest.fixture
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU has measured constants: hand calculations take those of `predict/speed/software.py`."""
    monkeypatch.setenv("SLM_CALIBRATION", os.devnull)


@pytest.fixture
def tied(tmp_path: Path) -> str:
    """A folder of a model with one vocabulary matrix, biases and six layers."""
    (tmp_path / "tied").mkdir()
    (tmp_path / "tied" / "config.json").write_text(json.dumps({**TIED, "num_hidden_layers": 6}))
    return str(tmp_path / "tied")


def write_documents(folder: Path, lengths: list[int]) -> Path:
    """Documents of so many bytes, each of a letter of its own order; with their end, a token more each."""
    file = folder / "documents.jsonl"
    texts = [
        "".join(chr(97 + (7 * n + i * (n + 1)) % 26) for i in range(size)) for n, size in enumerate(lengths)
    ]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return file


def plans_of(*strategies: str, num_gpus: int, inter_node_gbps: float | None = None) -> list[Plan]:
    """slm-1m on one or two A100s, slm-500m on more: batch 8 of 1024 tokens, one micro-step, $2 per hour."""
    gpu = gpu_of_name("a100-80gb")
    deployment = Deployment(cluster_of(gpu, inter_node_gbps=inter_node_gbps), Price(2.0, "made up"))
    offer = GpuOffer(gpu, num_gpus, deployment)
    model = "slm-1m" if num_gpus <= 2 else "slm-500m"
    workload = Workload(model, PRESETS[model], 1e9, num_gpus * 8 * 1024)
    config = RunConfig(model=workload.asked_model, per_device_train_batch_size=8, kernels="norm")
    configs = [config.with_defaults(has_gpu=True)]
    found = [find_strategy(name) for name in strategies]
    return search([workload], [offer], found, configs, gpus_per_node=8).plans
