"""Which values of a RunConfig's fields make no sense, alone or beside each other."""

import dataclasses
from pathlib import Path

from slm_toolkit.config import FP8_MULTIPLE, SYNTHETIC, RunConfig


def problems_of(config: RunConfig) -> list[str]:
    """Every field whose value makes no sense, as a sentence."""
    at_least_one = (
        *(
            "seq_len",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "max_steps",
            "eval_steps",
        ),
        *("eval_batches", "save_steps", "save_total_limit", "timing_warmup_steps", "epoch_multiple"),
        "rehearse",
    )
    at_least_zero = (
        *("warmup_steps", "weight_decay", "max_grad_norm", "seed", "dataloader_num_workers"),
        "fsdp_prefetch",
    )
    values = dataclasses.asdict(config)
    found = [
        f"--{n} is {values[n]}: at least 1" for n in at_least_one if values[n] is not None and values[n] < 1
    ]
    found += [
        f"--{n} is {values[n]}: not below 0"
        for n in at_least_zero
        if values[n] is not None and not values[n] >= 0
    ]
    for f in dataclasses.fields(config):
        choices = f.metadata["choices"]
        if choices and values[f.name] is not None and values[f.name] not in choices:
            found.append(f"--{f.name} is {values[f.name]!r}: one of {', '.join(choices)}")
    if config.torch_compile_mode != "default" and not config.torch_compile:
        found.append(f"--torch_compile_mode {config.torch_compile_mode} without --torch_compile")
    if config.records_graphs and config.gradient_accumulation_steps > 1:
        found.append(
            f"--torch_compile_mode {config.torch_compile_mode} with --gradient_accumulation_steps "
            f"{config.gradient_accumulation_steps}: CUDA graphs overwrite the gradients of the pass before"
        )
    if config.tf32 and config.numerics != "fp32":
        found.append(f"--tf32 with --numerics {config.numerics}, which has no fp32 matrix products")
    if config.use_liger_kernel:
        found += [
            f"--{n} {values[n]} with --use_liger_kernel, which has its own"
            for n in ("norm_kernel", "mlp_kernel")
            if values[n] != "hf"
        ]
    if config.fp8 != "none" and config.numerics == "fp32":
        found.append(f"--fp8 {config.fp8} with --numerics fp32, which has no low precision")
    num_tokens = config.per_device_train_batch_size * (config.seq_len or FP8_MULTIPLE)
    if config.fp8 != "none" and num_tokens % FP8_MULTIPLE:
        found.append(
            f"--fp8 {config.fp8} with {num_tokens} tokens per process: float8 matrix products take a "
            f"multiple of {FP8_MULTIPLE}"
        )
    if config.reduce_dtype is not None and config.numerics == "stock":
        found.append(f"--reduce_dtype {config.reduce_dtype} with --numerics stock: each engine has its own")
    if config.reduce_dtype == "bf16" and config.numerics == "fp32":
        found.append("--reduce_dtype bf16 with --numerics fp32, which has no low precision")
    if config.seq_len is not None and config.seq_len < 2:
        found.append(f"--seq_len is {config.seq_len}: a token needs a next one, at least 2")
    if not 0 < config.learning_rate < float("inf"):
        found.append(f"--learning_rate is {config.learning_rate}: above 0")
    if config.num_train_epochs is not None and not 0 < config.num_train_epochs < float("inf"):
        found.append(f"--num_train_epochs is {config.num_train_epochs}: above 0")
    if config.rehearse is not None:
        learning = ("eval_steps", "save_steps", "save_final_model", "resume_from_checkpoint")
        found += [f"--{n} with --rehearse, which learns nothing" for n in learning if values[n]]
    if not 1 <= config.validation_split_percentage <= 50:
        found.append(f"--validation_split_percentage is {config.validation_split_percentage}: 1 to 50")
    if config.max_steps is not None and config.num_train_epochs is not None:
        found.append("--max_steps and --num_train_epochs both say how long: give one")
    if config.num_train_epochs is not None and config.dataset == SYNTHETIC:
        found.append("--num_train_epochs with synthetic tokens, which never end: give --max_steps")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= values[name] < 1:
            found.append(f"--{name} is {values[name]}: 0 to below 1")
    if config.run_name is not None and Path(config.run_name).name != config.run_name:
        found.append(f"--run_name is {config.run_name!r}: a name, no path; --output_dir says where")
    return found
