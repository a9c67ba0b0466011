"""What we lean on in the words of messages, and in defaults that we quote."""

import argparse
import errno
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from drift import Leaning

_TOO_LARGE = """
import resource, sys
import numpy
from safetensors.numpy import save_file
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
save_file({"zeros": numpy.zeros(8192)}, sys.argv[1])
"""


def _signals_passed_on() -> None:
    from slm_toolkit.launch.launcher import _LOGS_OF_TORCH

    for name, words in zip(_LOGS_OF_TORCH, ("death signal", "closing signal"), strict=True):
        module = importlib.import_module(name)
        assert module.logger.name == name
        assert words in inspect.getsource(module), f"{name} reports signals in other words"


def _single_process() -> None:
    from accelerate.commands import launch

    from slm_toolkit.compare.outcome import _EXIT_SIGNAL, killed_process

    source = inspect.getsource(launch.simple_launcher)
    assert "subprocess.CalledProcessError(" in source, "accelerate reports one process in another way"
    error = subprocess.CalledProcessError(-9, ["python"])
    said = f'Traceback \n  File "{launch.__file__}"\nsubprocess.CalledProcessError: {error}'
    assert killed_process(said, 1) == "rank 0", said
    assert _EXIT_SIGNAL.search(str(subprocess.CalledProcessError(-11, ["python"])))[1] == "11"


def _autocast_modules() -> None:
    from slm_toolkit.strategy.passed_on import JSON_SETTINGS

    source = (Path(find_spec("deepspeed").origin).parent / "runtime" / "torch_autocast.py").read_text()
    default = source.partition("LOWER_PRECISION_SAFE_MODULES = [")[2].partition("]")[0]
    allowed = JSON_SETTINGS["torch_autocast"]["lower_precision_safe_modules"]
    assert set(re.findall(r"[\w.]+", default)) == set(allowed), f"DeepSpeed's own are {default}"


def _out_of_memory() -> None:
    from slm_toolkit.base.errors import OUT_OF_MEMORY

    assert issubclass(torch.OutOfMemoryError, RuntimeError)
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert OUT_OF_MEMORY.search(str(error.value)), f"the CPU's allocator now says: {str(error.value)[:200]}"


def _full_disk() -> None:
    from slm_toolkit.base.errors import DISK_FULL, SAYS_DISK_FULL

    for number in DISK_FULL:
        assert SAYS_DISK_FULL.search(str(OSError(number, "any"))), number
    for number in (errno.ENOSPC, errno.EDQUOT):  # as C++ says it
        assert SAYS_DISK_FULL.search(os.strerror(number)), os.strerror(number)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _TOO_LARGE, f"{folder}/file"], capture_output=True, text=True, timeout=60
        )
    assert "SafetensorError" in done.stderr, f"a file over the limit on its size: {done.stderr[-500:]}"
    assert SAYS_DISK_FULL.search(done.stderr), f"safetensors now says: {done.stderr[-500:]}"
    with pytest.raises(OSError, match="28") as error:
        Path("/dev/full").write_text("x")
    assert SAYS_DISK_FULL.search(str(error.value)), error.value
    assert error.value.errno in DISK_FULL
    with pytest.raises(
        (RuntimeError, OSError)
    ):  # torch's own words name no cause: disk_full looks at the disk
        torch.save(torch.ones(2**16), "/dev/full")


def _stacks() -> None:
    from slm_toolkit.run.faults.watchdog import _WAITING

    torch_files = [Path(inspect.getfile(torch.distributed.distributed_c10d))]
    folder = Path(torch.__file__).parent
    torch_files += [
        folder / "autograd" / "graph.py",
        folder / "cuda" / "streams.py",
        folder / "cuda" / "__init__.py",
    ]
    comm = Path(find_spec("deepspeed").origin).parent / "comm" / "comm.py"
    for path in (*torch_files, comm):
        assert path.is_file(), f"no {path}"
        assert _WAITING.search(str(path)), f"{path} is not known as a place to wait in"


def _frames_of_threads() -> None:
    from slm_toolkit.run.faults.watchdog import _frames_of_main_thread

    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(max_workers=1) as pool:
        frames = pool.submit(_frames_of_main_thread).result()
    functions = [frame.rpartition(" in ")[2] for frame in frames]
    # it waits in `submit` or `result` for the thread that looks
    assert functions.index("_frames_of_threads") > 0, f"innermost first: {frames[:5]}"
    ours = frames[functions.index("_frames_of_threads")]
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in _frames_of_threads", ours), ours


def _zero_defaults() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    from slm_toolkit.strategy.settings import OptimizerOffload, ParameterOffload, ZeroSettings

    def same(ours: Any, theirs: Any, *but: str) -> None:
        for name in ours.__struct_fields__:
            their_name = name.removeprefix("stage3_")  # an alias, as only the JSON has it
            assert name in but or getattr(ours, name) == getattr(theirs, their_name), name

    for stage in (1, 2, 3):
        ours, theirs = ZeroSettings(stage=stage), DeepSpeedZeroConfig(stage=stage)
        same(ours, theirs, "overlap_comm", "offload_optimizer", "offload_param")
        assert ours.overlaps == theirs.overlap_comm
    same(OptimizerOffload(), DeepSpeedZeroOffloadOptimizerConfig(), "device", "buffer_size")
    same(ParameterOffload(), DeepSpeedZeroOffloadParamConfig(), "device")


def _interfaces() -> None:
    gloo = list((Path(torch.__file__).parent / "lib").glob("libtorch_cpu*"))
    assert gloo, "no libtorch_cpu"
    assert any(b"GLOO_SOCKET_IFNAME" in path.read_bytes() for path in gloo), "gloo reads another variable"


def _estimator_module() -> None:
    from deepspeed.runtime.zero import stage3

    assert callable(stage3.estimate_zero3_model_states_mem_needs)


def _options_of_a_parser() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument_group("group").add_argument("--seq_len", "--max_length")
    assert {"--help", "--seq_len", "--max_length"} <= set(parser._option_string_actions)


def _help_in_two_sizes() -> None:
    parser = argparse.ArgumentParser(prog="slm")
    action = parser.add_argument_group("group").add_argument("--seq_len", nargs="+", metavar="INT")
    verb = parser.add_subparsers().add_parser("train")
    assert action in parser._actions
    assert action in parser._action_groups[-1]._group_actions
    assert verb in parser._subparsers._group_actions[0].choices.values()
    assert isinstance(parser._subparsers._group_actions[0], argparse._SubParsersAction)
    printed = io.StringIO()
    parser._print_message("text", printed)
    assert printed.getvalue() == "text"
    formatter = parser._get_formatter()
    assert formatter._metavar_formatter(action, "INT")(1) == ("INT",)
    assert formatter._format_args(action, "INT") == "INT [INT ...]"
    assert "--seq_len" in formatter._format_action_invocation(action)


def _html_of_results() -> None:
    from IPython.core.formatters import HTMLFormatter

    assert HTMLFormatter().print_method == "_repr_html_"


WORDS = (
    Leaning(
        "argparse: what help consists of",
        (
            *("_actions", "_action_groups", "_group_actions", "_subparsers", "_SubParsersAction"),
            *("_get_formatter", "_print_message"),
            *("_metavar_formatter", "_format_args", "_format_action_invocation"),
        ),
        "show the basic flags or all of them",
        "config/parser.py: print_help and its formatter",
        _help_in_two_sizes,
    ),
    Leaning(
        "IPython: the method that gives the HTML of a result",
        ("_repr_html_",),
        "show a table in a notebook",
        "results.py: _Result",
        _html_of_results,
    ),
    Leaning(
        "argparse: the flags that a parser knows",
        ("_option_string_actions",),
        "take other trainers' names of flags only where ours is known, and suggest flags that are close",
        "parser.py: parse_known_args and parse_args",
        _options_of_a_parser,
    ),
    Leaning(
        "torch: which interface gloo and NCCL take",
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        "name the variable to set where ranks don't reach each other",
        "run/peers/machines.py, launch/launcher.py: the new variables",
        _interfaces,
    ),
    Leaning(
        "torch: words for a signal that its launcher gets and passes on",
        (
            "torch.distributed.elastic.agent.server.api",
            "torch.distributed.elastic.multiprocessing.api",
        ),
        "leave them out at Ctrl-C, where `slm launch` shows the ranks' line alone",
        "launcher.py: _LOGS_OF_TORCH",
        _signals_passed_on,
    ),
    Leaning(
        "accelerate: words for one process that died",
        ("killed_process",),
        "name the rank and the signal of a strategy with one process, in compare/outcome.py",
        "compare/outcome.py: killed_process, _EXIT_SIGNAL, _LAUNCHERS_ERROR",
        _single_process,
    ),
    Leaning(
        "torch: words for memory that ran out",
        ("OUT_OF_MEMORY",),
        "tell out of memory from a failure, in run/peers/failure.py (CUDA's own words need a GPU "
        "to be asked)",
        "run/peers/failure.py: OUT_OF_MEMORY",
        _out_of_memory,
    ),
    Leaning(
        "Python, safetensors: words for a full disk",
        ("DISK_FULL", "SAYS_DISK_FULL"),
        "name it, in compare/outcome.py and run/faults/watchdog.py",
        "base/errors.py: DISK_FULL, SAYS_DISK_FULL",
        _full_disk,
    ),
    Leaning(
        "torch, deepspeed: the files in which a rank waits for others",
        ("_WAITING",),
        "tell the rank that hangs from those that wait for it",
        "run/faults/watchdog.py: _WAITING",
        _stacks,
    ),
    Leaning(
        "Python: the frames that another thread is in",
        ("_current_frames",),
        "say where a rank hangs that makes no progress",
        "run/faults/watchdog.py: `_frames_of_main_thread`",
        _frames_of_threads,
    ),
    Leaning(
        "deepspeed: defaults that estimates and the doctor quote",
        ("reduce_bucket_size", "stage3_max_live_parameters"),
        "predict memory under a JSON that is silent, in predict/memory/engine_bytes.py",
        "strategy/settings.py: ZeroSettings; docs that name a default",
        _zero_defaults,
    ),
    Leaning(
        "deepspeed: the module of its memory estimators",
        ("deepspeed.runtime.zero.stage3",),
        "ask DeepSpeed for its own figure, in estimate.py; test_deepspeed_estimate.py holds the formula",
        "estimate.py and predict/deepspeed_estimator.py: live_deepspeed_needs",
        _estimator_module,
    ),
    Leaning(
        "deepspeed: the modules that torch_autocast takes by itself",
        ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"),
        "let a JSON name these and import no others",
        "passed_on.py: JSON_SETTINGS",
        _autocast_modules,
    ),
)
