"""Which values of a RunConfig's fields make no sense, alone or beside each other."""

import dataclasses
from pathlib import Path

from slm_toolkit.config import ADAPTER_FLAGS, FP8_MULTIPLE, MOST_DDP_TIMEOUT, SYNTHETIC, RunConfig

_LARGEST_LEARNING_RATE = 1.0
"AdamW moves every weight by about the rate in each step, and weights are drawn with a deviation of 0.02"
_LARGEST_NUMBER = 10**12
_LONGEST_NAME = 200  # of a folder: file systems take 255 bytes
_LARGEST_SEED = 2**32 - 1  # numpy takes no larger one


def shortened(text: str) -> str:
    """A word of a command line as it can be quoted back."""
    return text if len(text) <= 40 else f"{text[:20]}...{text[-10:]}"


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
        *("eval_batches", "save_steps", "save_total_limit", "timing_warmup_steps"),
        "rehearse",
        *("lora_r", "base_batch_size"),
    )
    at_least_zero = (
        *("warmup_steps", "weight_decay", "max_grad_norm", "seed", "dataloader_num_workers"),
        *("fsdp_prefetch", "fp32_steps"),
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
    for name, value in values.items():
        most = _LARGEST_SEED if name == "seed" else _LARGEST_NUMBER
        if isinstance(value, int | float) and not -most <= value <= most:  # NaN is in no range
            found.append(f"--{name} is {shortened(str(value))}: at most {most:,}")
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
    found += _of_adapters(config) + _of_data(config)
    if config.reduce_dtype is not None and config.numerics == "stock":
        found.append(f"--reduce_dtype {config.reduce_dtype} with --numerics stock: each engine has its own")
    if config.reduce_dtype == "bf16" and config.numerics == "fp32":
        found.append("--reduce_dtype bf16 with --numerics fp32, which has no low precision")
    if config.seq_len is not None and config.seq_len < 2:
        found.append(f"--seq_len is {config.seq_len}: a token needs a next one, at least 2")
    rate = config.learning_rate
    if not 0 < rate <= _LARGEST_LEARNING_RATE:
        mantissa, _, power = f"{rate:e}".partition("e+")
        meant = f"; did you mean {float(mantissa):g}e-{int(power)}?" if rate >= 10 and power else ""
        found.append(f"--learning_rate is {rate:g}: above 0, at most {_LARGEST_LEARNING_RATE:g}{meant}")
    if config.num_train_epochs is not None and not 0 < config.num_train_epochs < float("inf"):
        found.append(f"--num_train_epochs is {config.num_train_epochs}: above 0")
    if config.rehearse is not None:
        learning = (
            "eval_steps",
            "save_steps",
            "save_final_model",
            "resume_from_checkpoint",
            "overwrite_output_dir",
            "find_batch_size",
        )
        found += [f"--{n} with --rehearse, which learns nothing" for n in learning if values[n]]
    if config.rehearse is not None and (config.fp32_steps or config.parity_task):
        found.append("--fp32_steps and --parity_task with --rehearse, whose losses mean nothing")
    if config.fp32_steps and config.peft == "qlora":
        found.append("--fp32_steps with --peft qlora: its weights compute in bf16")
    if not 1 <= config.validation_split_percentage <= 50:
        found.append(f"--validation_split_percentage is {config.validation_split_percentage}: 1 to 50")
    if config.max_loss is not None and not config.max_loss > 0:
        found.append(f"--max_loss is {config.max_loss}: above 0")
    if config.resume_from_checkpoint == "":
        found.append("--resume_from_checkpoint is empty: an unset variable? auto starts where there is none")
    if config.overwrite_output_dir and config.resume_from_checkpoint:
        found.append(
            "--overwrite_output_dir with --resume_from_checkpoint: the first starts from the beginning, "
            "the second goes on; give one"
        )
    if config.async_save and config.save_steps is None:
        found.append("--async_save without --save_steps")
    if config.max_steps is not None and config.num_train_epochs is not None:
        found.append("--max_steps and --num_train_epochs both say how long: give one")
    if config.num_train_epochs is not None and config.dataset == SYNTHETIC:
        found.append("--num_train_epochs with synthetic tokens, which never end: give --max_steps")
    if not 1 <= config.ddp_timeout <= MOST_DDP_TIMEOUT:
        found.append(
            f"--ddp_timeout is {config.ddp_timeout:g}: 1 to {MOST_DDP_TIMEOUT} seconds, after which "
            "collectives give up by themselves"
        )
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= values[name] < 1:
            found.append(f"--{name} is {values[name]}: 0 to below 1")
    if (name := config.run_name) is not None and (Path(name).name != name or name in ("", "..")):
        found.append(f"--run_name is {name!r}: a name, no path; --output_dir says where")
    elif name is not None and len(name.encode(errors="replace")) > _LONGEST_NAME:
        found.append(f"--run_name is {shortened(name)}: at most {_LONGEST_NAME} bytes")
    found += [
        f"--{n} is {values[n]!r}: it has characters that can't be shown"
        for n in ("run_name", "output_dir", "model", "dataset", "eval_dataset", "tokenizer_name")
        if values[n] is not None and not values[n].isprintable()
    ]
    return found


def _of_adapters(config: RunConfig) -> list[str]:
    found = []
    if not config.lora_alpha > 0:
        found.append(f"--lora_alpha is {config.lora_alpha}: above 0")
    if not 0 <= config.lora_dropout < 1:
        found.append(f"--lora_dropout is {config.lora_dropout}: 0 to below 1")
    if config.peft == "none":
        changed = [name for name in ADAPTER_FLAGS if getattr(config, name) != getattr(RunConfig, name)]
        return found + [f"--{name} without --peft" for name in changed]
    if config.peft == "ia3":
        changed = [name for name in ADAPTER_FLAGS[:3] if getattr(config, name) != getattr(RunConfig, name)]
        found += [f"--{name} with --peft ia3, which has no matrices" for name in changed]
    if config.fp8 != "none":
        found.append(f"--fp8 {config.fp8} with --peft {config.peft}, which trains none of those weights")
    if config.merge_adapter and config.rehearse is not None:
        found.append("--merge_adapter with --rehearse, which learns nothing")
    elif config.merge_adapter and config.save_final_model is False:
        found.append("--merge_adapter with --save_final_model false")
    if config.peft == "qlora" and config.numerics in ("fp32", "stock"):
        found.append(f"--peft qlora with --numerics {config.numerics}: its weights compute in bf16")
    return found


def _of_data(config: RunConfig) -> list[str]:
    found = []
    for sources in ("sources", "eval_sources"):
        try:
            names = [source.path for source in getattr(config, sources)]
        except ValueError as error:
            found.append(str(error).splitlines()[0])
            continue
        if SYNTHETIC in names and (len(names) > 1 or sources == "eval_sources"):
            found.append("synthetic tokens can't be mixed with, or held out of, documents")
    if config.dataset == SYNTHETIC:
        given = ("packing", "dataset_format", "eval_dataset", "lm_eval_tasks")
        changed = [name for name in given if getattr(config, name) != getattr(RunConfig, name)]
        found += [f"--{name} with synthetic tokens, which are no documents" for name in changed]
    share = config.validation_split_percentage
    if config.eval_dataset is not None and share != RunConfig.validation_split_percentage:
        found.append(f"--validation_split_percentage {share} with --eval_dataset, which is held out instead")
    if config.eval_dataset is not None and config.eval_steps is None:
        found.append("--eval_dataset without --eval_steps")
    if config.base_batch_size is not None and config.scale_lr == "none":
        found.append(f"--base_batch_size {config.base_batch_size} without --scale_lr")
    if config.lm_eval_tasks and (config.save_final_model is False or config.rehearse is not None):
        found.append("--lm_eval_tasks needs a saved model, and there is none")
    return found
