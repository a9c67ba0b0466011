"""What we lean on in other packages and no test of a run would name: words, names and defaults.

Each test names the place of ours that must change if it fails.
"""

import errno
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, launch, run
from torch.profiler import ProfilerActivity, profile

_RANKS = """
import json, os, signal, sys
from pathlib import Path
import torch
from accelerate import PartialState
from torch.profiler import ProfilerActivity, profile
state = PartialState(cpu=True)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
    torch.distributed.all_reduce(torch.ones(4, dtype=torch.bfloat16))
events = [(e.name(), e.shapes(), e.dtypes()) for e in profiled.profiler.kineto_results.events()]
said = {"rank": state.process_index, "events": events}
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
        done = launch(folder, config=ROOT / "accel_configs" / "ddp.yaml", script=script, cold=True)
        said = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    assert said, f"the ranks said nothing:\n{done.err[-2000:]}"
    return said, done.out + done.err


_TOO_LARGE = """
import resource, sys
import numpy
from safetensors.numpy import save_file
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
save_file({"zeros": numpy.zeros(8192)}, sys.argv[1])
"""


def test_a_profile_names_gloos_collectives_and_dtypes() -> None:
    """run/observe/probe.py: _REDUCTION; record/step_breakdown.py: _COMMUNICATION."""
    from slm_toolkit.run.observe.probe import _REDUCTION

    events = launched()[0][0]["events"]
    reductions = [(name, shapes, dtypes) for name, shapes, dtypes in events if _REDUCTION.match(name)]
    assert reductions, f"all_reduce over gloo is none of {sorted({name for name, *_ in events})}"
    assert any(shapes[:1] == [[4]] and dtypes[:1] == ["c10::BFloat16"] for _, shapes, dtypes in reductions)


def test_gloo_names_a_peer_that_is_gone() -> None:
    """compare/outcome.py: own_record; run/peers/machines.py: UNREACHED."""
    from slm_toolkit.run.peers.machines import UNREACHED

    errors = [one["error"] for one in launched()[0] if "error" in one]
    assert errors, "a collective whose other rank is gone raises no RuntimeError"
    assert "peer" in errors[0]
    assert UNREACHED.search(errors[0]), errors[0]


def test_the_launcher_names_the_rank_and_signal_that_died() -> None:
    """compare/outcome.py: killed_process, crash."""
    from slm_toolkit.compare.outcome import crash, killed_process

    _, log = launched()
    assert (killed_process(log, 1), crash(log)) == ("rank 1", "SIGKILL"), log[-1500:]
    assert "Root Cause (first observed failure)" in log
    assert "ChildFailedError" in log


def test_the_launcher_logs_signals_in_the_words_that_we_leave_out() -> None:
    """launch/launcher.py: _LOGS_OF_TORCH."""
    from slm_toolkit.launch.launcher import _LOGS_OF_TORCH

    for name, words in zip(_LOGS_OF_TORCH, ("death signal", "closing signal"), strict=True):
        module = importlib.import_module(name)
        assert module.logger.name == name
        assert words in inspect.getsource(module), name


def test_accelerate_reports_a_single_process_that_died() -> None:
    """compare/outcome.py: killed_process, _EXIT_SIGNAL."""
    from accelerate.commands import launch

    from slm_toolkit.compare.outcome import _EXIT_SIGNAL, killed_process

    source = inspect.getsource(launch.simple_launcher)
    assert "subprocess.CalledProcessError(" in source
    error = subprocess.CalledProcessError(-9, ["python"])
    said = f'Traceback \n  File "{launch.__file__}"\nsubprocess.CalledProcessError: {error}'
    assert killed_process(said, 1) == "rank 0", said
    assert _EXIT_SIGNAL.search(str(subprocess.CalledProcessError(-11, ["python"])))[1] == "11"


def test_deepspeeds_own_autocast_modules_are_the_ones_that_a_json_may_name() -> None:
    """strategy/passed_on.yaml."""
    from slm_toolkit.strategy.passed_on import JSON_SETTINGS

    source = (Path(find_spec("deepspeed").origin).parent / "runtime" / "torch_autocast.py").read_text()
    default = source.partition("LOWER_PRECISION_SAFE_MODULES = [")[2].partition("]")[0]
    allowed = JSON_SETTINGS["torch_autocast"]["lower_precision_safe_modules"]
    assert set(re.findall(r"[\w.]+", default)) == set(allowed)


def test_the_cpu_allocators_words_are_known() -> None:
    """base/errors.py: OUT_OF_MEMORY."""
    from slm_toolkit.base.errors import OUT_OF_MEMORY

    assert issubclass(torch.OutOfMemoryError, RuntimeError)
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert OUT_OF_MEMORY.search(str(error.value)), error.value


def test_words_for_a_full_disk_are_known(tmp_path: Path) -> None:
    """base/errors.py: DISK_FULL, SAYS_DISK_FULL."""
    from slm_toolkit.base.errors import DISK_FULL, SAYS_DISK_FULL

    for number in DISK_FULL:
        assert SAYS_DISK_FULL.search(str(OSError(number, "any"))), number
    for number in (errno.ENOSPC, errno.EDQUOT):  # as C++ says it
        assert SAYS_DISK_FULL.search(os.strerror(number)), number
    said = run(sys.executable, "-c", _TOO_LARGE, str(tmp_path / "file")).err
    assert "SafetensorError" in said
    assert SAYS_DISK_FULL.search(said), said
    with pytest.raises(OSError, match="28") as error:
        Path("/dev/full").write_text("x")
    assert SAYS_DISK_FULL.search(str(error.value)), error.value
    assert error.value.errno in DISK_FULL
    with pytest.raises((RuntimeError, OSError)):  # its words name no cause: disk_full looks at the disk
        torch.save(torch.ones(2**16), "/dev/full")


def test_files_in_which_ranks_wait_are_known() -> None:
    """run/faults/watchdog.py: _WAITING."""
    from slm_toolkit.run.faults.watchdog import _WAITING

    files = ("distributed/distributed_c10d.py", "autograd/graph.py", "cuda/streams.py", "cuda/__init__.py")
    comm = Path(find_spec("deepspeed").origin).parent / "comm" / "comm.py"
    for path in (*(Path(torch.__file__).parent / file for file in files), comm):
        assert path.is_file(), path
        assert _WAITING.search(str(path)), path


def test_zero_defaults_are_deepspeeds() -> None:
    """strategy/settings.py: ZeroSettings."""
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


def test_gloo_reads_the_interface_that_we_name() -> None:
    """run/peers/machines.py, launch/launcher.py."""
    gloo = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu*")
    assert any(b"GLOO_SOCKET_IFNAME" in path.read_bytes() for path in gloo)


def test_fsdp2_has_the_operators_by_which_buffers_are_told_apart() -> None:
    """run/observe/allocations.py: _COLLECTIVES, _GATHERS."""
    tensor = torch.empty(4)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
    from torch.distributed.fsdp import fully_shard  # noqa: F401 - with it come its operators

    for name in ("chunk_cat", "split_with_sizes_copy", "all_gather_copy_in"):
        assert hasattr(torch.ops.fsdp, name), name
    assert hasattr(torch.ops._c10d_functional, "reduce_scatter_tensor")


def test_wrappers_call_the_module_in_them_as_we_strip_it() -> None:
    """run/checkpoint/checkpoint.py, run/engine/training_state.py."""
    from accelerate.utils import extract_model_from_parallel
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import _common_utils, _flat_param

    wrapped = checkpoint_wrapper(torch.nn.Linear(1, 1))
    names = [name for name, _ in torch.nn.Sequential(wrapped).named_modules()]
    assert "0._checkpoint_wrapped_module" in names, names
    compiled = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert "_orig_mod.weight" in dict(compiled.named_parameters())
    assert type(extract_model_from_parallel(compiled, keep_torch_compile=False)) is torch.nn.Linear
    assert _common_utils.FSDP_WRAPPED_MODULE == "_fsdp_wrapped_module"
    assert _common_utils.FSDP_FLATTENED == "_fsdp_flattened"
    assert "_is_flat_param" in inspect.getsource(_flat_param.FlatParameter)


def test_the_timeout_of_every_group_can_be_changed() -> None:
    """run/peers/machines.py: let_collectives_wait."""
    parameters = list(inspect.signature(torch.distributed.distributed_c10d._set_pg_timeout).parameters)
    assert parameters[:2] == ["timeout", "group"], parameters
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        other = torch.distributed.new_group(backend="gloo")
        groups = list(torch.distributed.distributed_c10d._world.pg_map)
        assert len(groups) == 2
        assert other in groups
    finally:
        torch.distributed.destroy_process_group()


def test_the_profiler_has_the_names_shapes_and_dtypes_that_the_probe_reads() -> None:
    """run/observe/probe.py: the tables of names."""
    hidden = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    wide = torch.ones(1, 1, 4, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(4))
    compiled = torch.compile(lambda tensor: tensor + 1, backend="eager")
    compiled(torch.ones(2))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        (hidden @ torch.ones(3, 5, dtype=torch.bfloat16)).exp_().sum().backward()
        for backend in (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.MATH):
            with torch.nn.attention.sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(wide, wide, wide).sum().backward()
        logits = torch.softmax(weight, dim=0).sum()
        logits.backward()
        torch.nn.functional.cross_entropy(weight.view(1, -1), torch.tensor([1])).backward()
        for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
            torch.optim.AdamW([weight], **options).step()
        torch.ones(2).to(torch.float8_e4m3fn)
        compiled(torch.ones(2))
    events = profiled.profiler.kineto_results.events()
    attention = next(event for event in events if event.name() == "aten::scaled_dot_product_attention")
    assert attention.concrete_inputs()[4:7] == [0.0, False, None]  # dropout, is_causal and scale
    assert attention.start_ns() < attention.end_ns()
    names = {event.name() for event in events}
    product = next(event for event in events if event.name() == "aten::mm")
    assert product.shapes()[:2] == [[2, 3], [3, 5]]
    assert product.dtypes()[:2] == ["c10::BFloat16"] * 2
    wanted = {
        *("aten::exp_", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_attention_math", "aten::_softmax", "aten::_softmax_backward_data"),
        *("aten::cross_entropy_loss", "aten::_foreach_addcdiv_", "aten::_fused_adamw_", "aten::addcdiv_"),
    }
    assert wanted - names == set()
    assert any("backward" in name and "flash_attention" in name for name in names)
    assert any(name.startswith("Torch-Compiled Region") for name in names)
    casts = {dtype for event in events if event.name() == "aten::_to_copy" for dtype in event.dtypes()}
    floats = {dtype for event in events for dtype in event.dtypes()}
    assert "float" in floats
    assert casts <= floats


def test_operators_that_selective_checkpointing_saves_exist() -> None:
    """run/model/model.py: _MATMULS, _ALWAYS_SAVED."""
    from slm_toolkit.run.model.model import _ALWAYS_SAVED, _MATMULS

    for name in (*_MATMULS, *_ALWAYS_SAVED):
        namespace, _, operator = name.partition("::")
        if namespace in ("aten", "_c10d_functional"):  # flash_attn's and flex's are there with them
            assert hasattr(getattr(torch.ops, namespace), operator), name


def test_a_model_can_be_built_whole_though_zero_3_is_announced() -> None:
    """run/model/model.py: check_attention."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
    from transformers.modeling_utils import set_zero3_state

    held = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled()
    with torch.device("meta"), set_zero3_state():
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, hidden_size=64))
    assert not hasattr(model.lm_head.weight, "ds_tensor")
    assert held is not None
