"""What each fast flag gives, predicted for the paper's models: a table of docs/speed_and_cost.md.

    python bench/features.py                                  # one H100, batch 8, sequence 1024
    python bench/features.py --gpu a100-80gb --batch_size 16

By the closed forms of `slm estimate`: nothing is measured here. `bench/throughput.py --against plain`
measures the same flags on this machine, `bench/gpu/measure.py` on a GPU.
"""

import argparse
from typing import Any

from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.grid import estimates
from slm_toolkit.strategy.strategy import find_strategy

MODELS = ("slm-100m", "slm-500m", "slm-1b", "slm-2b")
FUSED = {"loss_kernel": "fused_linear", "norm_kernel": "fused"}
FEATURES: dict[str, dict[str, Any]] = {
    "--attn_implementation eager": {"attn_implementation": "eager"},
    "--norm_kernel fused": {"norm_kernel": "fused"},
    "--loss_kernel fused_linear": {"loss_kernel": "fused_linear"},
    "both kernels": FUSED,
    "--pad_widths": {"pad_widths": True},
    "--torch_compile": {"torch_compile": True},
    "--torch_compile --loss_kernel fused_linear": {"torch_compile": True, "loss_kernel": "fused_linear"},
    "--optim adamw_torch": {"optim": "adamw_torch"},
    "--numerics pure_bf16": {"numerics": "pure_bf16"},
    "--gradient_checkpointing selective_op": {"gradient_checkpointing": "selective_op"},
    "--gradient_checkpointing full": {"gradient_checkpointing": "full"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=1024)
    args = parser.parse_args()

    def of(model: str, flags: dict[str, Any]) -> Estimate:
        given = {"model": model, "seq_len": args.seq_len, "per_device_train_batch_size": args.batch_size}
        (row,) = estimates({**given, **flags}, [find_strategy("single")], gpus=[args.gpu], num_gpus=[1])
        return row

    plain = {model: of(model, {}) for model in MODELS}
    print(f"| predicted, {args.gpu}, batch {args.batch_size} | {' | '.join(MODELS)} |")
    print(f"|---|{'---|' * len(MODELS)}")
    print(f"| no flag | {' | '.join(in_figures(plain[model]) for model in MODELS)} |")
    for words, flags in FEATURES.items():
        cells = [against(of(model, flags), plain[model]) for model in MODELS]
        print(f"| {words if words == 'both kernels' else f'`{words}`'} | {' | '.join(cells)} |")


def in_figures(row: Estimate) -> str:
    return f"{row.tokens_per_second:,.0f} tokens/s, {row.peak_allocated_bytes / 2**30:.1f} GiB"


def against(row: Estimate, plain: Estimate) -> str:
    """Times as fast, and GiB more or less at the peak."""
    gib = (row.peak_allocated_bytes - plain.peak_allocated_bytes) / 2**30
    return f"{row.tokens_per_second / plain.tokens_per_second:.2f}x, {gib:+.1f} GiB"


if __name__ == "__main__":
    main()
