"""Published throughput as rows that the predictor can be asked about; `speed_accuracy.py` and others read it.

bench/data/published_speed.csv restates llm-foundry's bf16 tables (scripts/train/benchmarking/README.md
@8c8dd48f) and torchtitan's bf16 rows without tensor, pipeline or context parallelism
(benchmarks/llama3_h100_202412_torchtitan.md @b5bcd76c, docs/performance.md @1d5815c4b). MPT: two-matrix GELU
FFN of ratio 4, tied embeddings, LayerNorm, learned positions; llm-foundry's README says that it sets PURE or
DEFAULT mixed precision and a node network of 1600 Gbit/s for A100s, its loss is flash-attn's fused
cross-entropy. llm-foundry's model class computes two metrics of each micro-step's logits unless
`use_train_metrics` is false, which neither its YAMLs nor submit_benchmarks.py @51652eae set. torchtitan's
A100 rows don't say whether they were compiled; they were (its docs' default then). Their network is taken to
be the same; its H100s had 96 GB HBM2e and 500 W, so that their clock is lower.

bench/data/other_speed.csv: what others published, in their words in `source`, found on 2026-11-20; its
kernels and precision as far as they are told. Nothing is fitted to it.
"""

import csv
import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slm_toolkit.config.run_config import RunConfig, in_todays_names
from slm_toolkit.hardware.calibration import Calibration
from slm_toolkit.hardware.gpus import Gpu, gpu_of_name
from slm_toolkit.hardware.network import Cluster, cluster_of
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.setup.other_trainers import OtherTrainer, trainer_named
from slm_toolkit.predict.setup.setup import Deployment, Setup
from slm_toolkit.predict.speed.matmul import rates_of
from slm_toolkit.predict.speed.software import Shares, Software
from slm_toolkit.predict.speed.step import accumulation_seconds, step_time
from slm_toolkit.predict.speed.traffic import Transfer, transfers
from slm_toolkit.strategy.strategy import Strategy, find_strategy

DATA = Path(__file__).parent / "data"
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Row:
    """One published run."""

    source: str
    model: str
    spec: ModelSpec
    strategy: Strategy
    config: RunConfig
    like: OtherTrainer | None
    gpu: Gpu
    cluster: Cluster
    num_gpus: int
    loss_kernel: str
    tokens_per_second_per_gpu: float


@cache
def published_rows(table: str = "published_speed.csv") -> tuple[Row, ...]:
    """Of published_speed.csv, which constants are fitted to, or of other_speed.csv, which they are not."""
    with (DATA / table).open(newline="") as file:
        return tuple(row_of(line) for line in csv.DictReader(file))


def row_of(line: dict[str, str]) -> Row:
    """Return one line of a table; a table may have more columns than these."""
    gated, seq_len = line["gated"] == "1", int(line["seq_len"])
    integers = (
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_size",
        "vocab_size",
    )
    spec = ModelSpec(
        line["model"],
        *(int(line[name]) for name in integers),
        tied=line["tied"] == "1",
        gated_ffn=gated,
        layer_norm=not gated,
        qkv_bias=not gated,
        output_bias=not gated,
        ffn_bias=not gated,
        learned_positions=0 if gated else seq_len,
    )
    config = RunConfig(
        model=line["model"],
        seq_len=seq_len,
        per_device_train_batch_size=int(line["batch"]),
        gradient_accumulation_steps=int(line["accumulation"]),
        gradient_checkpointing=line["checkpointing"],
        attn_implementation=line["attention"],
        numerics=line["numerics"],
        **in_todays_names({"norm_kernel": line["norm_kernel"], "torch_compile": line["compiled"] == "1"}),
        max_grad_norm=1.0,
    )
    gpu, gbps = _gpu(line["gpu"]), line["inter_node_gbps"]
    return Row(
        source=line["source"],
        model=line["model"],
        spec=spec,
        strategy=find_strategy(line["strategy"]),
        config=config,
        # for a speed, torchtitan's preset differs from ours in FSDP's fp32 reduction only
        like=trainer_named("torchtitan") if line["reduce_dtype"] == "fp32" else None,
        gpu=gpu,
        cluster=cluster_of(gpu, inter_node_gbps=float(gbps) if gbps else None),
        num_gpus=int(line["num_gpus"]),
        loss_kernel=line["loss_kernel"],
        tokens_per_second_per_gpu=float(line["tokens_per_second_per_gpu"]),
    )


_AT_500_WATTS = (500 / 700) ** (1 / 3)
"clock at 500 W over that at 700 W: power grows with the cube of the clock (voltage x voltage x clock)"


@cache
def _gpu(name: str) -> Gpu:
    if name != "h100-96gb-hbm2e-500w":
        return gpu_of_name(name)
    h100 = gpu_of_name("h100-80gb")
    return dataclasses.replace(
        h100,
        name=name,
        memory_bytes_per_second=2.4e12,
        dense_bf16_flops_per_second=_AT_500_WATTS * h100.dense_bf16_flops_per_second,
        measured_matmul_flops_per_second=_AT_500_WATTS * h100.measured_matmul_flops_per_second,
    )


def setup_of(row: Row) -> Setup:
    return Setup(
        row.spec,
        row.strategy,
        row.config,
        num_gpus=row.num_gpus,
        gpus_per_node=GPUS_PER_NODE,
        gpu=row.gpu,
        like=row.like,
        deployment=Deployment(row.cluster),
    )


@dataclass(frozen=True)
class Composer(Software):
    """Constants of llm-foundry's generation of software, with those of its attention kernel."""

    attention_share: Shares = Shares(ampere=0.334, hopper=0.176)
    "fraction of the bf16 peak that attention reaches for long sequences"
    attention_half_length: float = 770.0  # triton-lang/triton#1917
    "sequence length at which attention reaches half of attention_share"


LLM_FOUNDRY = Composer(  # fitted to llm-foundry's bf16 tables and torchtitan's rows
    # its benchmarks ran FlashAttention 1 in Triton (submit_benchmarks.py: attn_impl triton). An A100 runs it
    # at half of FlashAttention-2's rate (triton-lang/triton#1917: 72 TFLOP/s with 2,048 tokens, both passes)
    eager_slowdown=0.85,
    contention=6.37,
    step_seconds=0.0249,
)
"Composer with PyTorch 2.1 and flash-attn, January 2024: only for comparison with its tables"


def asked(row: Row, loss_kernel: str) -> Row:
    """Return the row as `slm estimate` can be asked: with `loss_kernel` if no flag has the run's own."""
    has_flag = row.loss_kernel in ("hf", "fused_linear")
    return row if has_flag else dataclasses.replace(row, loss_kernel=loss_kernel)


def predicted_tokens_per_second_per_gpu(row: Row, software: Software, *, has_fsdp1: bool = False) -> float:
    """Return the predicted rate; `has_fsdp1`: the row is of the years of FSDP1."""
    setup, more = setup_of(row), 0.0
    is_composer = isinstance(software, Composer)
    if has_fsdp1 or is_composer:
        like = dataclasses.replace(row.like or trainer_named("trainer"), has_fsdp1=True)
        setup = dataclasses.replace(setup, like=like)
    sent = transfers(setup)
    if is_composer:
        software = dataclasses.replace(software, calibration=_attention_of(software, row.gpu))
        if row.strategy.is_fsdp:
            sent, more = _reduced_in_each_micro_step(setup, sent, software)
    time = step_time(setup, sent, software, loss_kernel=row.loss_kernel)
    assert time is not None
    return time.tokens / (time.step_seconds + more) / row.num_gpus


def _attention_of(software: Composer, gpu: Gpu) -> Calibration:
    share, half = software.attention_share.of(gpu.architecture), software.attention_half_length
    return Calibration(
        attention_forward_share_64=share,
        attention_forward_half_64=half,
        attention_backward_share_64=share,
        attention_backward_half_64=half,
    )


def _reduced_in_each_micro_step(
    setup: Setup, sent: tuple[Transfer, ...], software: Software
) -> tuple[tuple[Transfer, ...], float]:
    """Return Composer's transfers, and the seconds that adding shards of gradients spares, as a negative."""
    number = setup.config.gradient_accumulation_steps
    changed = tuple(
        dataclasses.replace(
            each,
            num_bytes=number * each.num_bytes,
            num_calls=number * each.num_calls,
            in_last_micro_step=number == 1,
        )
        if each.name.startswith("reduce_")
        else each
        for each in sent
    )
    spared = 1 - 1 / setup.shard_ranks if "gradients" in setup.strategy.sharded_parts else 0
    return changed, -(number - 1) * spared * accumulation_seconds(setup, rates_of(setup.gpu, software))
