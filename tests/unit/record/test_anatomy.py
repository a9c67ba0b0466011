"""Anatomies of traces made by hand, their table, and one trace of a real model."""

import dataclasses
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from torch.profiler import record_function

from slm_toolkit.record.step_breakdown import Anatomy, anatomy_of, read_trace
from slm_toolkit.report.tables.profiled import anatomy_table
from slm_toolkit.run.observe.measure import PROFILED_STEPS, TRACE_FILE, profile_steps

MAIN, AUTOGRAD, GLOO = 1, 2, 3  # threads


def event(name: str, start: float, end: float, *, cat: str = "cpu_op", tid: int = MAIN, **args: int) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}


def annotation(name: str, start: float, end: float, *, tid: int = MAIN) -> dict:
    return event(name, start, end, cat="user_annotation", tid=tid)


def kernel(name: str, start: float, end: float, *, correlation: int = 0) -> dict:
    return event(name, start, end, cat="kernel", tid=7, correlation=correlation)


def microseconds(anatomy: Anatomy) -> dict[str, float]:
    """The parts that are not 0, without `_seconds`."""
    values = dataclasses.asdict(anatomy).items()
    return {
        name.removesuffix("_seconds"): round(value * 1e6, 6)
        for name, value in values
        if name.endswith("_seconds") and value
    }


# events of a step of 100 microseconds, and what becomes of them
STEPS = {
    "ops": (
        [
            annotation("phase:data", 0, 10),
            event("aten::stack", 2, 5),  # compute even there: 3, which leaves 7 of data
            event("aten::linear", 10, 30),
            event("aten::addmm", 14, 28),  # inside linear
            event("aten::scaled_dot_product_attention", 30, 38),  # with all that is inside
            event("aten::copy_", 31, 33),
            annotation("phase:optimizer", 50, 90),
            event("aten::mm", 60, 80),  # in the optimizer: 20; Python around it is idle
        ],
        {"data": 7, "other_compute": 3, "matmul": 20, "attention": 8, "optimizer": 20, "idle": 42},
    ),
    "eager attention": (
        [
            event("aten::matmul", 0, 20),  # folds its inputs: 0..5
            event("aten::bmm", 5, 20),
            event("aten::softmax", 20, 30),  # 2 of its own
            event("aten::_softmax", 22, 30),
            event("aten::log_softmax", 30, 40),  # the loss's
        ],
        {"matmul": 5, "attention": 23, "other_compute": 12, "idle": 60},
    ),
    "communication": (
        [
            event("autograd::engine::evaluate_function: MmBackward0", 0, 60),
            event("aten::mm", 10, 50),
            annotation("gloo:all_reduce", 30, 80, tid=GLOO),
            annotation("gloo:all_reduce", 40, 80, tid=GLOO + 1),  # two at a time count once
            event("aten::copy_", 30, 70, tid=GLOO),  # gloo's thread computes nothing of the model's
        ],
        # overlapped 30..50, and alone 50..80
        {"communication_overlapped": 20, "matmul": 40, "communication_exposed": 30, "idle": 30},
    ),
    "compiled graph": (
        [
            event("Torch-Compiled Region: 0/0", 0, 70),
            event("## Call CompiledFxGraph fjth7 ##", 10, 60),
            event("aten::mm", 20, 30),
        ],
        {"other_compute": 40, "matmul": 10, "idle": 50},
    ),
    "autograd's own thread": (
        [
            annotation("phase:backward", 0, 100),  # DeepSpeed steps in here
            event("autograd::engine::evaluate_function: MmBackward0", 0, 40, tid=AUTOGRAD),
            event("aten::mm", 0, 40, tid=AUTOGRAD),
            annotation("Optimizer.step#AdamW.step", 50, 90),
            event("aten::_fused_adamw_", 60, 80),
        ],
        {"matmul": 40, "optimizer": 20, "idle": 40},
    ),
}
for wrapper in (
    "CompiledFunctionBackward",
    "ScaledDotProductFlashAttentionForCpuBackward0",
    "torch::autograd::AccumulateGrad",
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    "c10d::_allgather_base_",
):
    STEPS[wrapper] = (
        [
            annotation("FSDP::pre_forward (model.layers.0)", 0, 100),
            event(wrapper, 0, 100),
            event("fsdp::all_gather_copy_in", 0, 20),
            event("aten::copy_", 5, 15),
            annotation("gloo:all_gather", 10, 100, tid=GLOO),
        ],
        {"other_compute": 20, "communication_exposed": 80, "communication_overlapped": 10},
    )


@pytest.mark.parametrize("name", STEPS)
def test_a_cpu_step_is_split_by_its_ops(name: str) -> None:
    events, expected = STEPS[name]
    anatomy = anatomy_of([annotation("ProfilerStep#3", 0, 100), *events])
    assert anatomy.step_seconds == pytest.approx(100e-6)
    assert (microseconds(anatomy), anatomy.device) == (expected, "cpu")


def test_seconds_are_the_mean_of_the_steps() -> None:
    anatomy = anatomy_of(
        [
            annotation("ProfilerStep#3", 0, 100),
            event("aten::mm", 90, 120),  # 10 in the first step, 10 in none, 10 in the second
            annotation("ProfilerStep#4", 110, 310),
        ]
    )
    assert anatomy.num_steps == 2
    assert microseconds(anatomy) == {"matmul": 10, "idle": 140}  # of (100 + 200) / 2


def test_a_gpu_step_is_split_by_kernels_and_by_the_optimizer_that_launched_them() -> None:
    launches = [
        event("cudaLaunchKernel", instant, instant + 1, cat="cuda_runtime", correlation=number)
        for number, instant in ((1, 31), (2, 43), (3, 45))
    ]
    anatomy = anatomy_of(
        [
            *launches,
            annotation("ProfilerStep#3", 0, 200),
            event("ProfilerStep#3", 10, 180, cat="gpu_user_annotation", tid=7),  # inside the CPU's window
            annotation("phase:data", 0, 10),
            event("Memcpy HtoD (Pageable -> Device)", 10, 15, cat="gpu_memcpy", tid=7),  # other 5
            kernel("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 15, 45),  # matmul 30
            kernel("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", 45, 55),  # attention 10
            kernel("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", 55, 65),  # matmul 10
            kernel("triton_red_fused_mm_flash_attention_0", 65, 70),  # Inductor's: other 5
            # 70..75: FSDP's copy, no optimizer: other 5
            kernel("void multi_tensor_apply_kernel<CopyFunctor>", 70, 75, correlation=1),
            event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 60, 95, cat="kernel", tid=20),
            annotation("phase:optimizer", 40, 50),
            kernel("void vectorized_elementwise_kernel<4, AddFunctor>", 100, 120, correlation=2),
            kernel("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", 120, 150, correlation=3),
            annotation("nccl:all_reduce", 30, 190),  # the host's, not the device's
        ]
    )
    assert anatomy.device == "cuda"
    assert microseconds(anatomy) == {
        "data": 10,
        "other_compute": 15,
        "matmul": 40,
        "attention": 10,
        "communication_exposed": 20,  # 75..95
        "communication_overlapped": 15,  # 60..75
        "optimizer": 50,
        "idle": 55,  # 95..100 and 150..200
    }


PARTS = [field.name for field in dataclasses.fields(Anatomy) if field.name.endswith("_seconds")]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_has_shares_and_drops_columns_before_it_cuts_one(width: int) -> None:
    made = Anatomy(**dict.fromkeys(PARTS, 0.0), num_steps=3, device="cuda")
    communication = {"communication_exposed_seconds": 0.7655, "communication_overlapped_seconds": 0.5}
    anatomy = dataclasses.replace(made, matmul_seconds=1.2345, **communication)
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(anatomy_table({"fsdp_shard_grad_op": anatomy}, width=width), crop=False)
    (row,) = [line for line in capture.get().splitlines() if line.startswith("│ fsdp")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:2] == ["fsdp_shard_grad_op", "2,000.0"]
    assert "38%" in cells  # 765.5 / 2000 is never dropped
    # 1234.5 / 2000 = 61.7 %, 500 / 2000 = 25 %
    assert (cells[2:] == ["62%", *["0%"] * 3, "38%", "0%", "0%", "25%"]) == (width == 200)


def test_a_real_model_is_profiled_and_the_trace_adds_up(tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoderLayer(64, 2, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with record_function("phase:data"):
            inputs = torch.randn(4, 32, 64)
        with record_function("phase:forward"):
            loss = model(inputs).square().mean()
        with record_function("phase:backward"):
            loss.backward()
        with record_function("phase:optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    anatomy = profile_steps(step, tmp_path, Accelerator(cpu=True))

    assert (anatomy.num_steps, anatomy.device) == (PROFILED_STEPS, "cpu")
    steps = [
        event["dur"]
        for event in read_trace(tmp_path / TRACE_FILE.format(rank=0))
        if event["name"].startswith("ProfilerStep#")
    ]
    assert anatomy.step_seconds == pytest.approx(sum(steps) / len(steps) / 1e6, rel=1e-6)
    busy = ("matmul", "attention", "other_compute", "optimizer", "data", "idle")
    assert all(getattr(anatomy, f"{part}_seconds") > 0 for part in busy)
    assert anatomy.communication_exposed_seconds == anatomy.communication_overlapped_seconds == 0
