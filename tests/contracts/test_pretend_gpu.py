"""CUDA branches run on a pretended GPU, and it refuses what a GPU would refuse (bench/gpu/pretend.py)."""

import json
import sys
from pathlib import Path

import pynvml
import pytest
import torch
from conftest import ROOT, Finished, run, slm

from slm_toolkit.run.faults.watchdog import one_line

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
TINY = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "3", "--per_device_train_batch_size", "2")


def pretend(*words: str, memory_gib: float | None = None, num_gpus: int = 1) -> Finished:
    limit = () if memory_gib is None else ("--memory_gib", str(memory_gib))
    program = str(ROOT / "bench" / "gpu" / "pretend.py")
    return run(sys.executable, program, "--gpus", str(num_gpus), *limit, "--", *words, timeout=280)


def answers(script: str, *, memory_gib: float | None = None) -> list:
    done = pretend("-c", script, memory_gib=memory_gib)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_tensor_is_on_the_device_that_a_gpu_machine_would_have_it_on() -> None:
    script = """
import json, torch
host = torch.ones(4, 4)
gpu = host.to("cuda")
linear = torch.nn.Linear(4, 4).cuda()
loss = linear(gpu).sum()
loss.backward()
print(json.dumps([
    str(tensor.device) for tensor in
    (host, gpu, gpu[0], gpu + 1, linear.weight.grad, gpu.cpu(), torch.ones(2, device="cuda"), gpu.new_ones(2))
] + [gpu.is_cuda, host.is_cuda, torch.cuda.get_device_name(), torch.cuda.device_count()]))
"""
    on_host, on_gpu = "cpu", "cuda:0"
    devices = [on_host, on_gpu, on_gpu, on_gpu, on_gpu, on_host, on_gpu, on_gpu]
    assert answers(script) == [*devices, True, False, "NVIDIA H200", 1]


def test_the_pretended_gpu_refuses_what_a_gpu_refuses() -> None:
    script = """
import json, torch
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
def refusal(call):
    try:
        return call() and None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
host, gpu = torch.ones(4), torch.ones(4, device="cuda")
index = torch.tensor([0, 2])
allowed = [gpu[index].tolist(), (gpu * torch.tensor(2.0)).tolist(), gpu.copy_(host).tolist()]
print(json.dumps(allowed + [
    refusal(lambda: host + gpu), refusal(gpu.numpy), refusal(gpu.pin_memory),
    refusal(lambda: torch.empty(2**28, device="cuda")),
    refusal(lambda: torch.distributed.all_reduce(host)),
]))
"""
    *allowed, mixed, numpy, pinned, full, reduced = answers(script, memory_gib=0.5)
    assert allowed == [[1.0, 1.0], [2.0] * 4, [1.0] * 4]
    assert mixed.startswith("RuntimeError: Expected all tensors to be on the same device")
    assert numpy.startswith("TypeError: can't convert cuda:0 device type tensor to numpy")
    assert pinned.startswith("RuntimeError: cannot pin")
    # 2**28 numbers of 4 bytes are 1024 MiB; the GPU has 512
    assert reduced == "RuntimeError: No backend type associated with device type cpu"
    assert full.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB")


def test_bytes_on_the_pretended_gpu_are_those_of_its_tensors() -> None:
    script = """
import json, torch
cuda = torch.cuda
first = torch.empty(2**20, device="cuda")  # 4 MiB
second = first.double()  # 8 MiB
view, host = first[1:], torch.empty(2**20)
before = cuda.memory_allocated()
del first, second
now = cuda.memory_allocated()
del view
cuda.reset_peak_memory_stats()
small = torch.empty(1, device="cuda")  # CUDA's allocator gives 512 bytes
print(json.dumps([before, now, cuda.memory_allocated(), cuda.max_memory_allocated()]))
"""
    assert answers(script) == [12 * 2**20, 4 * 2**20, 512, 512]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "num_gpus"),
    [
        ("ddp", 2),
        pytest.param("fsdp_full_shard", 1, marks=SLOW),
        ("ds_zero2", 1),
        pytest.param("fsdp_full_shard", 2, marks=SLOW),
        pytest.param("fsdp_shard_grad_op", 2, marks=SLOW),
        pytest.param("ds_zero1", 2, marks=SLOW),
        pytest.param("ds_zero2", 2, marks=SLOW),
        pytest.param("ds_zero3", 2, marks=SLOW),
    ],
)
def test_a_strategy_trains_on_pretended_gpus_as_on_a_cpu(
    strategy: str, num_gpus: int, tmp_path: Path
) -> None:
    words = ("train", "--strategy", strategy, "--num_processes", str(num_gpus), *TINY)
    done = slm(*words, "--output_dir", str(tmp_path / "cpu"))
    assert done.code == 0, done.err
    done = pretend(
        *("-m", "slm_toolkit.cli.main", *words, "--output_dir", str(tmp_path / "gpu")),
        *("--profile", "--save_steps", "2", "--attn_implementation", "sdpa_cudnn"),
        num_gpus=num_gpus,
    )
    assert done.code == 0, done.err
    ((of_cpu,), (of_gpu,)) = (list((tmp_path / device).rglob("record.json")) for device in ("cpu", "gpu"))
    on_cpu, on_gpu = json.loads(of_cpu.read_text()), json.loads(of_gpu.read_text())
    assert (on_cpu["gpu"], on_gpu["gpu"]) == (None, "NVIDIA H200")
    assert on_gpu["losses"] == pytest.approx(on_cpu["losses"], abs=1e-3)
    assert [len(rank["energy_joules"]) for rank in on_gpu["gpu_watch"]] == [3] * num_gpus

    (row,) = json.loads(slm("report", str(of_gpu.parent), "--json").out)
    # the estimate counts cuBLAS's two workspaces of 32 MiB on a Hopper GPU, which a CPU has none of
    estimate = row["estimated_peak_bytes"] - 2 * 32 * 2**20
    assert row["peak_allocated_bytes"] == pytest.approx(estimate, rel=0.05)


def test_an_nvml_error_while_a_run_fails_does_not_hide_the_error() -> None:
    """pynvml's errors raise where they are compared with others."""
    failed = RuntimeError("the run's own error")
    failed.__context__ = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    failed.__context__.__context__ = AttributeError("nvmlDeviceGetHandleByIndex_v2")
    assert one_line(failed, None) is None
