"""Anatomies of traces made by hand, their table, and one trace of a real model."""

import dataclasses
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from torch.profiler import record_function

from slm_toolkit.record.step_breakdown import Anatomy, anatomy_of, read_trace
from slm_toolkit.report.tables.step_breakdown import anatomy_table
from slm_toolkit.run.observe.measure import PROFILED_STEPS, TRACE_FILE, profile_steps

MAIN, AUTOGRAD, GLOO = 1, 2, 3  # threads


def event(name: str, start: float, end: float, *, cat: str = "cpu_op", tid: int = MAIN, **args: int) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}


def annotation(name: str, start: float, end: float, *, tid: int = MAIN) -> dict:
    return event(name, start, end, cat="user_annotation", tid=tid)


def kernel(name: str, start: float, end: float, *, stream: int = 7, correlation: int = 0) -> dict:
    args = {"correlation": correlation} if correlation else {}
    return event(name, start, end, cat="kernel", tid=stream, **args)


def launch(instant: float, correlation: int) -> dict:
    return event("cudaLaunchKernel", instant, instant + 1, cat="cuda_runtime", correlation=correlation)


def microseconds(anatomy: Anatomy) -> dict[str, float]:
    """The parts that are not 0, without `_seconds`."""
    fields = [field.name for field in dataclasses.fields(Anatomy) if field.name.endswith("_seconds")]
    found = {name.removesuffix("_seconds"): round(getattr(anatomy, name) * 1e6, 6) for name in fields}
    return {name: value for name, value in found.items() if value}


def of_step(*events: dict, end: float = 100) -> dict[str, float]:
    """The parts of a step from 0 to `end` microseconds on a CPU."""
    anatomy = anatomy_of([annotation("ProfilerStep#3", 0, end), *events])
    assert anatomy.step_seconds == pytest.approx(end / 1e6)
    return microseconds(anatomy)


def test_a_cpu_step_goes_to_its_innermost_ops() -> None:
    parts = of_step(
        annotation("phase:data", 0, 10),
        event("aten::stack", 2, 5),  # compute even there: 3, which leaves 7 of data
        annotation("phase:forward", 10, 40),
        event("aten::linear", 10, 30),  # itself matmul 10..12, 28..30
        event("aten::copy_", 12, 14),  # a cast: other 2
        event("aten::addmm", 14, 28),  # with the two ends of linear: 14 + 4 = 18
        event("aten::scaled_dot_product_attention", 30, 38),  # whatever is inside: 8
        event("aten::copy_", 31, 33),
        annotation("phase:optimizer", 50, 90),
        event("aten::mm", 60, 80),  # in the optimizer: 20; Python around it is idle
    )
    # idle: 100 - 7 - 3 - 2 - 18 - 8 - 20 = 42
    assert parts.pop("idle") == 42
    assert parts == {"data": 7, "other_compute": 5, "matmul": 18, "attention": 8, "optimizer": 20}


def test_eager_attention_is_its_bmm_and_softmax() -> None:
    parts = of_step(
        event("aten::matmul", 0, 20),  # folds its inputs: 0..5, a matmul until bmm says whose
        event("aten::bmm", 5, 20),
        event("aten::softmax", 20, 30),  # 2 of its own
        event("aten::_softmax", 22, 30),
        event("aten::log_softmax", 30, 40),  # the loss's
        event("aten::_log_softmax", 30, 40),
    )
    assert parts == {"matmul": 5, "attention": 23, "other_compute": 12, "idle": 60}


def test_communication_under_compute_is_overlapped_and_alone_it_is_exposed() -> None:
    parts = of_step(
        event("autograd::engine::evaluate_function: MmBackward0", 0, 60),
        event("aten::mm", 10, 50),
        annotation("gloo:all_reduce", 30, 80, tid=GLOO),
        event("aten::copy_", 30, 70, tid=GLOO),  # gloo's thread computes nothing of the model's
    )
    assert parts.pop("communication_overlapped") == 20  # 30..50, and alone 50..80
    assert parts == {"matmul": 40, "communication_exposed": 30, "idle": 30}


@pytest.mark.parametrize(
    "wrapper",
    [
        "CompiledFunctionBackward",
        "ScaledDotProductFlashAttentionForCpuBackward0",
        "torch::autograd::AccumulateGrad",
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
        "c10d::_allgather_base_",
    ],
)
def test_an_op_that_only_waits_for_a_collective_is_no_compute(wrapper: str) -> None:
    parts = of_step(
        annotation("FSDP::pre_forward (model.layers.0)", 0, 100),
        event(wrapper, 0, 100),
        event("fsdp::all_gather_copy_in", 0, 20),
        event("aten::copy_", 5, 15),
        annotation("gloo:all_gather", 10, 100, tid=GLOO),
    )
    assert parts == {"other_compute": 20, "communication_exposed": 80, "communication_overlapped": 10}


def test_two_collectives_at_a_time_count_once() -> None:
    first = annotation("gloo:all_reduce", 0, 60, tid=GLOO)
    second = annotation("gloo:all_reduce", 40, 90, tid=GLOO + 1)
    assert of_step(first, second) == {"communication_exposed": 90, "idle": 10}


def test_a_compiled_graphs_own_time_is_compute() -> None:
    graph = event("## Call CompiledFxGraph fjth7 ##", 10, 60)
    parts = of_step(event("Torch-Compiled Region: 0/0", 0, 70), graph, event("aten::mm", 20, 30))
    assert parts == {"other_compute": 40, "matmul": 10, "idle": 50}


def test_autograds_own_thread_computes_and_the_optimizer_is_found_inside_backward() -> None:
    parts = of_step(
        annotation("phase:backward", 0, 100),  # DeepSpeed steps in here
        event("autograd::engine::evaluate_function: MmBackward0", 0, 40, tid=AUTOGRAD),
        event("aten::mm", 0, 40, tid=AUTOGRAD),
        annotation("Optimizer.step#AdamW.step", 50, 90),
        event("aten::_fused_adamw_", 60, 80),
    )
    assert parts == {"matmul": 40, "optimizer": 20, "idle": 40}


def test_seconds_are_the_mean_of_the_steps() -> None:
    anatomy = anatomy_of(
        [
            annotation("ProfilerStep#3", 0, 100),
            event("aten::mm", 90, 120),  # 10 in the first step, 10 in none, 10 in the second
            annotation("ProfilerStep#4", 110, 310),
        ]
    )
    assert anatomy.num_steps == 2
    assert anatomy.step_seconds == pytest.approx(150e-6)  # (100 + 200) / 2
    assert microseconds(anatomy) == {"matmul": 10, "idle": 140}


def test_a_gpu_step_is_told_by_kernels_and_by_what_launched_them() -> None:
    anatomy = anatomy_of(
        [
            annotation("ProfilerStep#3", 0, 200),
            event("ProfilerStep#3", 10, 180, cat="gpu_user_annotation", tid=7),  # inside the CPU's window
            annotation("phase:data", 0, 10),
            event("Memcpy HtoD (Pageable -> Device)", 10, 15, cat="gpu_memcpy", tid=7),  # other 5
            kernel("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 15, 45),  # matmul 30
            kernel("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", 45, 55),  # attention 10
            event("aten::bmm", 20, 25),
            launch(22, correlation=1),
            kernel("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", 55, 65, correlation=1),
            event("aten::mm", 25, 30),  # 65..70: a kernel of no telling name, launched by mm
            launch(26, correlation=2),
            kernel("void some_kernel<4>", 65, 70, correlation=2),
            event("aten::_foreach_copy_", 30, 35),  # 70..75: FSDP's copy, no optimizer: other 5
            launch(31, correlation=3),
            kernel("void multi_tensor_apply_kernel<CopyFunctor>", 70, 75, correlation=3),
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", 60, 95, stream=20),
            annotation("phase:optimizer", 40, 50),
            event("aten::add_", 42, 44),
            launch(43, correlation=4),
            kernel("void vectorized_elementwise_kernel<4, AddFunctor>", 100, 120, correlation=4),
            kernel("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", 120, 150),  # no launch known
            annotation("nccl:all_reduce", 30, 190),  # the host's, not the device's
        ]
    )
    assert anatomy.device == "cuda"
    assert anatomy.step_seconds == pytest.approx(200e-6)
    assert microseconds(anatomy) == {
        "data": 10,
        "other_compute": 10,  # 5 + 5
        "matmul": 35,  # 30 + 5
        "attention": 20,  # 10 + bmm's 10
        "communication_exposed": 20,  # 75..95
        "communication_overlapped": 15,  # 60..75
        "optimizer": 50,  # 20 + 30
        "idle": 55,  # 95..100 and 150..200
    }


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no ProfilerStep#N annotation\nhint: .*step\(\)"):
        anatomy_of([event("aten::mm", 0, 10)])


PARTS = [f.name for f in dataclasses.fields(Anatomy) if f.name.endswith("_seconds")]
"the last of them is contained in the others"


def made(**seconds: float) -> Anatomy:
    return Anatomy(**dict.fromkeys(PARTS, 0.0) | seconds, num_steps=3, device="cuda")


ANATOMIES = {
    "ddp": made(matmul_seconds=0.03, idle_seconds=0.01),
    "fsdp_shard_grad_op": made(
        matmul_seconds=1.2345, communication_exposed_seconds=0.7655, communication_overlapped_seconds=0.5
    ),
}


def printed(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(anatomy_table(ANATOMIES, width=width), crop=False)
    return capture.get()


def test_all_parts_but_the_overlapped_one_add_up() -> None:
    for number, part in enumerate(PARTS):
        total = 0.0 if part == "communication_overlapped_seconds" else number + 1.0
        assert made(**{part: number + 1.0}).step_seconds == total


@pytest.mark.parametrize("width", range(40, 201, 4))
def test_no_figure_is_cut_at_any_width(width: int) -> None:
    text = printed(width)
    assert "…" not in text
    rows = [line for line in text.splitlines() if line.startswith("│")]
    for row, anatomy in zip(rows, ANATOMIES.values(), strict=True):
        assert f"{anatomy.step_seconds * 1000:,.1f}" in row
        assert f"{anatomy.communication_exposed_seconds * 1000:,.1f}" in row
        assert len(row) <= max(width, 42)  # 18 + 7 + 7 for what is never dropped, 3 x 2 + 4 around it
    # ten columns of 18 + 7 + 12 + 9 + 8 + 9 + 10 + 8 + 9 + 10 = 100, and 10 x 2 + 11 around them
    assert ("2,000.0 │ 1,234.5  62% │" in text) == (width >= 131)


def test_a_wide_table_has_every_part_with_its_share() -> None:
    text = printed(200)
    (row,) = [line for line in text.splitlines() if line.startswith("│ fsdp")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [  # 1234.5 / 2000 = 61.7 %, 765.5 / 2000 = 38.3 %, 500 / 2000 = 25 %
        *("fsdp_shard_grad_op", "2,000.0", "1,234.5  62%", *["0.0   0%"] * 3),
        *("765.5  38%", *["0.0   0%"] * 2, "500.0  25%"),
    ]
    assert "left out" not in text


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
