"""What a step costs on a GPU by count: kernels launched, bytes moved by the optimizer, host time, and MFU.

    python bench/step_counts.py                         # one H200, 8 sequences of 1024 tokens
    python bench/step_counts.py --gpu h100-80gb --batch_size 16

A row for each model and set of flags, by the closed forms of `slm estimate`: nothing is measured here.
`bench/compiled_traffic.py` counts the bytes of compiled layers in the code that Inductor writes.
"""

import argparse
from typing import Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.estimate import estimate
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.predict.speed.matmul import rates_of
from slm_toolkit.predict.speed.software import TODAY
from slm_toolkit.predict.speed.step import _optimizer_kernels, micro_step_work, optimizer_bytes
from slm_toolkit.strategy.strategy import find_strategy

MODELS = ("slm-100m", "slm-100m-hw", "slm-500m", "slm-500m-hw", "slm-1b-hw", "slm-2b-hw", "qwen2.5-0.5b")
FAST = {"loss_kernel": "fused_linear", "norm_kernel": "fused"}
COMPILED = {**FAST, "torch_compile": True}
TRITON = {"optim": "adamw_triton", "triton_loss": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=MODELS)
    args = parser.parse_args()
    print("| model | flags | kernels | optimizer, bytes | host, ms | GPU, ms | predicted MFU |")
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        for words, flags in (
            ("plain", {}),
            ("fused kernels", FAST),
            ("and padded", {**FAST, "pad_widths": True}),
            ("compiled", COMPILED),
            ("compiled, padded, Triton's AdamW and loss", {**COMPILED, "pad_widths": True, **TRITON}),
        ):
            print(row_of(model, args.gpu, args.batch_size, words, flags))


def row_of(model: str, gpu: str, batch_size: int, words: str, flags: dict[str, Any]) -> str:
    """A row of the table: launches and host time of a step of one process, and what the GPU needs for it."""
    given = {"model": model, "seq_len": 1024, "per_device_train_batch_size": batch_size, **flags}
    config = RunConfig(**given).with_defaults(has_gpu=True)
    single = find_strategy("single")
    setup = Setup(find_model(model), single, config, num_gpus=1, gpu=gpu_of_name(gpu)).launched
    work = micro_step_work(setup, rates_of(setup.gpu, TODAY), TODAY, config.loss_kernel)
    num_kernels = work.num_kernels + _optimizer_kernels(setup)
    of_optimizer, found = optimizer_bytes(setup.strategy, config), estimate(setup)
    parts = found.parts_seconds
    on_gpu = found.step_seconds - parts["launch_overhead"] - parts["fixed"]
    cells = (model, words, f"{num_kernels:,}", f"{of_optimizer:.0f}")
    cells += (f"{1e3 * num_kernels * TODAY.kernel_seconds:.1f}", f"{1e3 * on_gpu:.1f}", f"{found.mfu:.1%}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
