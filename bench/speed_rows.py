"""Published throughput as rows that the predictor can be asked about; `speed_accuracy.py` and others read it.

bench/data/published_speed.csv restates llm-foundry's bf16 tables (scripts/train/benchmarking/README.md
@8c8dd48f) and torchtitan's bf16 rows without tensor, pipeline or context parallelism
(benchmarks/llama3_h100_202412_torchtitan.md @b5bcd76c, docs/performance.md @1d5815c4b). MPT: two-matrix GELU
FFN of ratio 4, tied embeddings, LayerNorm, learned positions; llm-foundry's README says that it sets PURE
(`reduction` bf16) or DEFAULT mixed precision, and its loss is flash-attn's fused cross-entropy. torchtitan's
A100 rows don't say so, but were compiled (its docs' default then); its H100s had 96 GB HBM2e and 500 W.
"""

import csv
import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slm_toolkit.config import RunConfig
from slm_toolkit.hardware import Gpu, gpu_of_name
from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.bandwidth import Cluster, cluster_of
from slm_toolkit.predict.host_memory import Placement
from slm_toolkit.predict.software import Software
from slm_toolkit.predict.speed import step_time
from slm_toolkit.predict.traffic import transfers
from slm_toolkit.strategy import Strategy, find_strategy

TABLE = Path(__file__).parent / "data" / "published_speed.csv"
GPUS_PER_NODE = 8
A100_CLUSTER_GBPS = 1600  # llm-foundry's A100 nodes, RoCE, in its tables' titles; torchtitan's: assumed alike


@dataclass(frozen=True)
class Row:
    """One published run."""

    source: str
    model: str
    spec: ModelSpec
    strategy: Strategy
    config: RunConfig
    gpu: Gpu
    cluster: Cluster
    num_gpus: int
    loss_kernel: str
    tokens_per_second_per_gpu: float


@cache
def published_rows() -> tuple[Row, ...]:
    with TABLE.open(newline="") as file:
        return tuple(_row(line) for line in csv.DictReader(file))


def _row(line: dict[str, str]) -> Row:
    hidden, heads = int(line["hidden_size"]), int(line["num_heads"])
    gated = line["gated"] == "1"
    seq_len = int(line["seq_len"])
    spec = ModelSpec(
        line["model"],
        int(line["num_layers"]),
        hidden,
        heads,
        int(line["num_kv_heads"]),
        hidden // heads,
        int(line["ffn_size"]),
        int(line["vocab_size"]),
        tied=line["tied"] == "1",
        gated_ffn=gated,
        layer_norm=not gated,
        linear_biases=not gated,
        learned_positions=0 if gated else seq_len,
    )
    compiled = line["compiled"] == "1"
    pure = line["source"] == "llm-foundry" and line["reduction"] == "bf16"
    config = RunConfig(
        model=line["model"],
        seq_len=seq_len,
        per_device_train_batch_size=int(line["batch"]),
        gradient_accumulation_steps=int(line["accumulation"]),
        gradient_checkpointing=line["checkpointing"],
        attn_implementation="flash_attention_2",
        numerics="pure_bf16" if pure else "aligned",
        reduce_dtype=None if pure else "fp32",
        torch_compile=compiled,
        max_grad_norm=1.0,
    )
    gpu = _gpu(line["gpu"])
    is_a100 = gpu.architecture == "ampere"
    return Row(
        source=line["source"],
        model=line["model"],
        spec=spec,
        strategy=find_strategy(line["strategy"]),
        config=config,
        gpu=gpu,
        cluster=cluster_of(gpu, inter_node_gbps=A100_CLUSTER_GBPS if is_a100 else None),
        num_gpus=int(line["num_gpus"]),
        loss_kernel="fused_kernel" if not gated else "compiled" if compiled else "hf",
        tokens_per_second_per_gpu=float(line["tokens_per_second_per_gpu"]),
    )


@cache
def _gpu(name: str) -> Gpu:
    if name != "h100-96gb-hbm2e-500w":
        return gpu_of_name(name)
    return dataclasses.replace(gpu_of_name("h100-80gb"), name=name, memory_bytes_per_second=2.4e12)


def predicted_tokens_per_second_per_gpu(row: Row, software: Software) -> float:
    nodes = {"num_gpus": row.num_gpus, "gpus_per_node": min(row.num_gpus, GPUS_PER_NODE)}
    each = software.reduces_each_micro_step
    time = step_time(
        row.spec,
        row.strategy,
        row.config,
        gpu=row.gpu,
        cluster=row.cluster,
        transfers=transfers(
            *(row.spec, row.strategy, row.config, Placement()), **nodes, reduces_each_micro_step=each
        ),
        num_gpus=row.num_gpus,
        num_shards=row.num_gpus,
        software=software,
        loss_kernel=row.loss_kernel,
    )
    assert time is not None
    return time.tokens_per_second / row.num_gpus
