"""Seconds of a step: matrix products by their shape, the sum of parts, and what must be faster than what."""

import dataclasses
import itertools
import math
import random

import pytest

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name, gpus
from slm_toolkit.hardware.network import Cluster, cluster_of
from slm_toolkit.model.model_spec import PRESETS, flops_per_token, hidden_matrices
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.grid import estimates
from slm_toolkit.predict.setup.setup import Deployment, Setup
from slm_toolkit.predict.speed.collectives import transfer_seconds
from slm_toolkit.predict.speed.matmul import Rates, product_seconds, rates_of, wave_efficiency
from slm_toolkit.predict.speed.offload import offload_seconds
from slm_toolkit.predict.speed.software import MEMORY_SHARE, TODAY
from slm_toolkit.predict.speed.step import (
    PARTS,
    optimizer_bytes,
    step_time,
)
from slm_toolkit.predict.speed.traffic import Transfer
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, find_strategy

pytestmark = pytest.mark.usefixtures("uncalibrated")

EVERY_GPU = tuple(gpu.name for gpu in gpus())
GPUS = pytest.mark.parametrize(
    "gpus",
    [
        pytest.param(tuple(random.Random(24).sample(EVERY_GPU, 3)), id="three"),
        pytest.param(EVERY_GPU, id="every", marks=pytest.mark.full),
    ],
)
H100 = ("h100-80gb",)
# 100 Tflop/s, a quarter of it where misaligned, and a memory that takes no time
NO_MEMORY = Rates(100e12, 0.25, memory_bytes=math.inf, num_sms=108)
FULL_WAVE = (12 * 256, 9 * 128)  # 12 x 9 = 108 tiles of 256 x 128: one for each of an A100's multiprocessors


def rows_of(
    *strategies: str,
    on: tuple[str, ...] = H100,
    num_gpus: tuple[int, ...] = (8,),
    **given: object,
) -> list[Estimate]:
    """On nodes of eight with 400 Gbit/s between them."""
    return estimates(
        {"model": "slm-100m", "kernels": "plain", "per_device_train_batch_size": 4, **given},
        [find_strategy(name) for name in strategies],
        gpus=list(on),
        num_gpus=list(num_gpus),
        deployments=lambda gpu: Deployment(cluster_of(gpu, inter_node_gbps=400)),
    )


def test_full_waves_leave_no_multiprocessor_idle_and_one_tile_more_does() -> None:
    rows, columns = FULL_WAVE
    assert wave_efficiency(rows, columns, 4096, num_sms=108) == pytest.approx(1)
    assert wave_efficiency(rows + 256, columns, 4096, num_sms=108) < 0.95


def test_an_aligned_product_without_memory_takes_its_flops_over_the_rate() -> None:
    # forward in one full wave: 2 x 3072 x 1152 x 1152 = 8,153,726,976 flop at 100 Tflop/s
    rows, width = FULL_WAVE
    seconds = product_seconds(NO_MEMORY, rows=rows, inputs=width, outputs=width, padded=False)
    assert seconds.forward == pytest.approx(81.53726976e-6)
    # backward: the input's gradient is such a wave, W's is width x width, summed over the rows
    of_weight = 81.53726976e-6 / wave_efficiency(width, width, rows, num_sms=108)
    assert seconds.backward == pytest.approx(81.53726976e-6 + of_weight)


def test_a_width_off_the_multiple_of_8_leaves_its_share_of_the_rate_unless_padded() -> None:
    shape = {"rows": 16_384, "inputs": 1536, "outputs": 4147}
    full_rate = product_seconds(dataclasses.replace(NO_MEMORY, misaligned=1.0), **shape, padded=False)
    misaligned = product_seconds(NO_MEMORY, **shape, padded=False)
    assert misaligned.forward == pytest.approx(full_rate.forward / 0.25)
    assert product_seconds(NO_MEMORY, **shape, padded=True) == full_rate


def test_parts_tokens_and_mfu_of_a_row_agree() -> None:
    # 6 N of the matrices: 130,569,920 less the embedding 32,000 x 832 and 19 norms of 832 = 103,930,112;
    # attention 12 x 9 x 832 x 1024 = 92,012,544
    flops = 6 * 103_930_112 + 92_012_544
    grid = {"gradient_accumulation_steps": [1, 4], "per_device_train_batch_size": [1, 8]}
    for row in rows_of(*STUDIED_STRATEGIES, num_gpus=(1, 8, 16), seq_len=1024, **grid):
        assert row.parts_seconds.keys() == set(PARTS)
        assert all(seconds >= 0 for seconds in row.parts_seconds.values())
        assert sum(row.parts_seconds.values()) == pytest.approx(row.step_seconds)
        sequences = row.num_gpus * row.gradient_accumulation_steps * row.per_device_train_batch_size
        assert row.tokens_per_second == pytest.approx(sequences * 1024 / row.step_seconds)
        assert row.tokens_per_second_per_gpu == pytest.approx(row.tokens_per_second / row.num_gpus)
        assert row.mfu == pytest.approx(flops * row.tokens_per_second_per_gpu / 989e12)
        assert row.step_low_seconds < row.step_seconds < row.step_high_seconds
        assert (row.parts_seconds["communication"] == 0) == (row.num_gpus == 1)


@GPUS
@pytest.mark.parametrize(
    ("flag", "order"),
    [
        ("per_device_train_batch_size", (1, 2, 3, 6, 8, 13, 16, 64)),
        ("gradient_checkpointing", ("none", "selective_op")),
        ("gradient_checkpointing", ("none", "full")),
        ("attn_implementation", ("sdpa", "eager")),
        ("numerics", ("aligned", "fp32")),
        ("optim", ("adamw_torch_fused", "adamw_torch")),
    ],
)
def test_more_work_takes_longer_unless_the_gpu_waits_for_launches(
    flag: str, order: tuple, gpus: tuple[str, ...]
) -> None:
    grid = {"on": gpus, "num_gpus": (1, 8, 16), "model": ["slm-500m", "slm-2b-hw"]}
    rows = [rows_of(*STUDIED_STRATEGIES, **grid, **{flag: value}) for value in order]
    for fast, slow in itertools.pairwise(rows):
        for less, more in zip(fast, slow, strict=True):
            assert less.step_seconds <= more.step_seconds * (1 + 1e-9)
            assert less.step_seconds < more.step_seconds or less.parts_seconds["launch_overhead"] > 0


def setup_of(strategy: str, config: RunConfig) -> Setup:
    return Setup(PRESETS["slm-100m"], find_strategy(strategy), config.with_defaults(has_gpu=True), num_gpus=8)


@pytest.mark.parametrize(
    ("strategy", "flags", "per_param"),
    [
        # as traced: norm 2, to fp32 6, clip 8, AdamW 28, copy back 6
        ("ddp", {}, 50),
        # a norm in fp64: cast 2 + 8, read 8; infinities 4, one tensor of all gradients 4
        ("ds_zero1", {}, 48 + 2 + 8 + 8 + 4 + 4),
        ("ddp", {"max_grad_norm": 0.0}, 42),
        # fp32 gradients and parameters: norm 4, clip 8, AdamW 28
        ("fsdp_full_shard", {"numerics": "stock"}, 40),
        # all in bf16: norm 2, clip 4, AdamW 14
        ("ddp", {"numerics": "pure_bf16"}, 20),
        # AdamW alone takes more by its for-each kernels: 22 + 2.8 x 28 = 100.4
        ("ddp", {"optim": "adamw_torch"}, 100.4),
        # norm 2; the kernel reads 2 + 4 + 4 + 4 and writes 4 + 4 + 4 + 2. Without masters 4 + 16 + 12
        ("ddp", {"kernels": "triton"}, 30),
        ("fsdp_full_shard", {"kernels": "triton", "numerics": "fp32"}, 32),
    ],
)
def test_an_optimizer_step_moves_what_its_operations_move(
    strategy: str, flags: dict, per_param: float
) -> None:
    config = RunConfig(**{"max_grad_norm": 1.0, "optim": "adamw_torch_fused", **flags})
    assert optimizer_bytes(setup_of(strategy, config)) == pytest.approx(per_param)


def test_tritons_loss_moves_6_bytes_per_logit_and_a_compiled_one_8() -> None:
    names = ("loss", "loss+triton", "loss+compile", "loss+triton+compile")
    given = {"num_gpus": (1,), "seq_len": 1024, "per_device_train_batch_size": 8}
    rows = rows_of("single", kernels=list(names), **given)
    plain, triton, compiled, both = (row.parts_seconds["memory_traffic"] for row in rows)
    each = 8 * 1024 * 32_000 / gpu_of_name("h100-80gb").memory_bytes_per_second  # a byte of every logit
    assert plain - triton == pytest.approx(each * (26 / 0.43 - 6 / 0.85))  # PyTorch's 26 at 0.43 of the rate
    assert compiled - both == pytest.approx(each * 2 / 0.85)


def test_attention_computes_the_causal_half_and_eager_moves_its_scores() -> None:
    # a layer of 4 x 1024 tokens, 13 heads of 64: 2 x 1024 x 4096 x 832 = 6,979,321,856 flop forward, x 2.5
    # backward (Dao, arXiv 2307.08691); eager twice that for the square, and 4096 x 1024 x 13 scores
    sdpa, eager = rows_of("single", attn_implementation=["sdpa", "eager"])
    # cuDNN with heads of 64: 397.5 TFLOP/s for long sequences, half at 391 tokens; backward 451.2 and 701
    forward = 6_979_321_856 / 397.5e12 * (1 + 391 / 1024)
    backward = 2.5 * 6_979_321_856 / 451.2e12 * (1 + 701 / 1024)
    assert sdpa.parts_seconds["attention"] == pytest.approx(9 * (forward + backward))
    products = 2 * 6_979_321_856 / (TODAY.matmul_share * 794.5e12)  # of an H100's best rate
    moved = 54_525_952 * TODAY.score_bytes / (3.35e12 * MEMORY_SHARE)
    assert eager.parts_seconds["attention"] == pytest.approx(9 * 3 * (products + moved))


def test_zero_3s_hooks_are_a_floor_under_a_micro_step() -> None:
    # slm-100m: 9 layers of 13 modules, each 28 launches of 14 us: 45.9 ms, whatever the tokens
    few, more = rows_of("ds_zero3", per_device_train_batch_size=[1, 2], seq_len=128)
    (fsdp,) = rows_of("fsdp_full_shard", per_device_train_batch_size=1, seq_len=128)
    floor = 9 * 13 * 28 * 14e-6
    assert fsdp.step_seconds < floor < few.step_seconds
    assert more.step_seconds == pytest.approx(few.step_seconds, rel=0.02)
    (again,) = rows_of("ds_zero3", seq_len=128, gradient_accumulation_steps=4, gradient_checkpointing="full")
    assert again.step_seconds > 4 * 1.5 * floor  # forward's two of the four hooks run again


def parts_of(*transfers: Transfer, micro_steps: int = 1) -> dict[str, float]:
    """Seconds of DDP on eight H100s that costs no more than its compute and these transfers."""
    software = dataclasses.replace(TODAY, contention=0.0, jitter=0.0)
    config = RunConfig(seq_len=1024, gradient_accumulation_steps=micro_steps, per_device_train_batch_size=4)
    where = {"num_gpus": 8, "gpu": gpu_of_name("h100-80gb"), "deployment": Deployment(Cluster(1e9, None))}
    setup = Setup(PRESETS["slm-500m"], find_strategy("ddp"), config, **where)
    return step_time(setup, transfers, software).parts_seconds


def test_communication_hides_behind_its_own_pass_only() -> None:
    long = Transfer("reduce_gradients", "all_reduce", 1e12, 8, 8, 1, 100, overlaps=True)
    parts = parts_of(long)
    on_device = ("matmul", "attention", "memory_traffic", "recomputation", "launch_overhead")
    # nothing hides behind DDP's copies of bf16 gradients into its buckets and back: 2 x (2 + 2) bytes
    copies = 8 * PRESETS["slm-500m"].num_params / (MEMORY_SHARE * 3.35e12)
    compute = sum(parts[name] for name in on_device) - copies
    seconds = transfer_seconds(long, Cluster(1e9, None))
    assert parts["communication"] == pytest.approx(seconds - 2 / 3 * compute)  # backward
    once = dataclasses.replace(long, in_last_micro_step=True)
    assert parts_of(once, micro_steps=4)["communication"] == pytest.approx(seconds - 2 / 3 * compute)
    # the same compute does not hide two
    assert parts_of(long, once)["communication"] == pytest.approx(2 * seconds - 2 / 3 * compute)
    gathered = dataclasses.replace(long, name="gather_forward")  # forward is the other third
    assert parts_of(long, gathered)["communication"] == pytest.approx(2 * seconds - compute)


@pytest.mark.parametrize("num_draws", [40, pytest.param(500, marks=pytest.mark.full)])
def test_mfu_is_between_0_and_1_wherever_one_looks(num_draws: int) -> None:
    draw = random.Random(num_draws)
    grid = {
        "model": [*PRESETS, "slm-7b"],
        "per_device_train_batch_size": [1, 4, 32, 512],
        "seq_len": [64, 1000, 1024, 65_536],
        "gradient_accumulation_steps": [1, 4],
        "numerics": ["aligned", "stock", "pure_bf16", "fp32"],
        "attn_implementation": ["sdpa", "eager"],
        "kernels": ["plain", "loss", "compile", "loss+compile"],
        "gradient_checkpointing": ["none", "full", "selective_op", "selective_layer"],
    }
    for _ in range(num_draws):
        where = {"on": (draw.choice(EVERY_GPU),), "num_gpus": (draw.choice((1, 2, 8, 64, 512)),)}
        given = {name: draw.choice(values) for name, values in grid.items()}
        (row,) = rows_of(draw.choice(("single", *STUDIED_STRATEGIES)), **where, **given)
        # PaLM's convention counts the whole square of attention, of which kernels compute half, and with one
        # token there is next to none; a GeForce's clock exceeds its data sheet
        one, whole = (flops_per_token(find_model(row.model), seq_len=size) for size in (1, row.seq_len))
        limit = 2 * whole / (whole + one) * (1.1 if gpu_of_name(row.gpu).architecture == "geforce" else 1)
        assert row.mfu is None if row.numerics == "fp32" else 0 < row.mfu < limit, row


@pytest.mark.parametrize(
    ("strategy", "shards", "copied_once"),
    # bytes per parameter that copies around the step's only reduction move, if it is not in each micro-step
    [("ddp", 1, 8), ("fsdp_full_shard", 1, 4), ("ds_zero1", 1, 4), ("ds_zero2", 8, 0), ("ds_zero3", 8, 0)],
)
def test_an_engine_that_reduces_each_micro_step_adds_only_its_shard(
    strategy: str, shards: int, copied_once: int
) -> None:
    once, twice = (
        row.parts_seconds["memory_traffic"] for row in rows_of(strategy, gradient_accumulation_steps=[1, 2])
    )
    # bf16 gradients: read the old and the new one, write the sum: 6 bytes each
    rate = rates_of(gpu_of_name("h100-80gb"), TODAY).memory_bytes
    per_parameter = (twice - 2 * once) * rate / PRESETS["slm-100m"].num_params
    assert per_parameter == pytest.approx(6 / shards - copied_once)


OFFLOADED = {"model": "slm-2b", "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
P_2B = 1_969_027_008


@pytest.mark.parametrize(
    ("strategy", "in_backward", "after", "on_disks"),
    [
        # bytes per parameter. ZeRO-2, 4 micro-steps: the last writes gradients in fp32, 4; the host's sum
        # is written and read between them, 3 times: 2 x 3 x 2 = 12. Weights come back: 2
        ("ds_zero2_offload", 16, 2, 0),
        # ZeRO-3, all on disk: each micro-step also reads the shard for forward and backward, 2 x 2 x 4 = 16;
        # states and gradient, 4 + 8 + 4, are read and written, 32, and the shard is written once, 2
        ("ds_zero3_nvme", 32, 0, 50),
        # FSDP: bf16 gradients once a step, 2, and the shards of 4 micro-steps, 16
        ("fsdp_full_shard_offload", 18, 0, 0),
    ],
)
def test_the_seconds_of_offload_by_hand(strategy: str, in_backward: int, after: int, on_disks: int) -> None:
    # a rank of 8 over 0.8 x 31 GB/s, the node through 205 GB/s and on disks of 5 GB/s
    config = RunConfig(**OFFLOADED).with_defaults(has_gpu=True)
    gpu = gpu_of_name("a100-40gb")
    setup = Setup(PRESETS["slm-2b"], find_strategy(strategy), config, num_gpus=8, gpu=gpu).launched
    seconds = {
        compute: offload_seconds(setup, optimizer_bytes_per_parameter=50.0, compute_seconds=compute)
        for compute in (0.0, 1e3)
    }
    rest = P_2B * (after / 8 / 24.8e9 + 50 / 205e9 + on_disks / 5e9)
    assert seconds[0.0] == pytest.approx(P_2B * in_backward / 8 / 24.8e9 + rest)
    assert seconds[1e3] == pytest.approx(rest)  # compute hides what moves in backward


def test_an_offloaded_row_has_a_wide_range() -> None:
    (row,) = rows_of("ds_zero2_offload", on=("a100-40gb",), **OFFLOADED)
    assert row.step_low_seconds < 0.8 * row.step_seconds < 1.5 * row.step_seconds < row.step_high_seconds
    assert row.parts_seconds["optimizer"] == 0 < row.parts_seconds["offload"]


def test_muon_moves_and_multiplies_by_hand() -> None:
    # norm 2, cast 6, clip 8; momentum 12, Nesterov's update 12, its cast 6, decay 8, addition 10; copy 6
    assert optimizer_bytes(setup_of("ddp", RunConfig(max_grad_norm=1.0, optim="muon")), by_muon=True) == 70
    flags = {"model": "slm-2b-hw", "optim": "muon"}
    two, eight = (row.parts_seconds["optimizer"] for row in rows_of("ddp", num_gpus=(2, 8), **flags))
    spec, gpu = PRESETS["slm-2b-hw"], gpu_of_name("h100-80gb")
    shapes = [sorted(shape) for shape in hidden_matrices(spec).values()]
    # five times: X X' (2 m^2 n), a polynomial of it (2 m^3), and that times X (2 m^2 n); ranks share them
    flops = spec.num_layers * sum(5 * (4 * s * s * n + 2 * s**3) for s, n in shapes)
    least = (1 / 2 - 1 / 8) * flops / gpu.dense_bf16_flops_per_second
    assert least < two - eight < 3 * least
