"""Find flags that contradict the strategy's files or need a package or GPU that is missing."""

from collections.abc import Iterator
from typing import Any

from slm_toolkit.base.errors import PACKAGES, pip_install
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.doctor.case import Case, as_written, is_count
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding, fault, in_json, unwise, wrong
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.model.names import has_weights

_FLASH = {  # the package of each kernel: transformers 5.23, modeling_flash_attention_utils.py
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
_IN_16_BITS = (*_FLASH, "sdpa_flash", "sdpa_cudnn")


def flag_faults(case: Case) -> Iterator[Finding]:
    yield from _attention(case)
    yield from _packages(case)
    yield from _adapters(case)
    names_json = case.section("deepspeed_config").get("deepspeed_config_file")
    if case.engine == "DEEPSPEED" and (case.has_json or not names_json):
        for check in (_accumulation, _clipping):
            yield from check(case)
    if case.has_json:
        for check in (_batch, _dtypes, _communication):
            yield from check(case)


def _attention(case: Case) -> Iterator[Finding]:
    kernel = case.flags.attn_implementation
    flag = f"--attn_implementation {kernel}"
    package, versions = _FLASH.get(kernel), case.host.versions
    if package in versions and versions[package] is None and versions.get("kernels") is None:
        yield wrong(
            "flash-attn-absent",
            f"{flag} needs {package}, which is not installed",
            why="transformers refuses to build the model",
            change=f"--attn_implementation sdpa, which has its own flash kernel, or pip install {package}",
        )
    if kernel in _IN_16_BITS and case.flags.numerics == "fp32":
        yield wrong(
            "flash-attn-in-fp32",
            f"{flag} with --numerics fp32",
            why="flash kernels compute in bf16 and fp16 only",
            change="--attn_implementation sdpa, or --numerics aligned",
        )
    old = _gpus_of(case, ("ampere", "ada"), "rtx-3090", "rtx-4090")
    if kernel == "flash_attention_4" and old:
        yield wrong(
            "flash-attn-gpu",
            f"{flag} on {', '.join(old)}",
            why="its kernels need a Hopper or Blackwell GPU",
            change="--attn_implementation sdpa",
        )
    old = [name for name in case.gpu_names if not gpu_of_name(name).has_float8]
    if case.flags.fp8 != "none" and old:
        yield wrong(
            "fp8-emulated",
            f"--fp8 {case.flags.fp8} on {', '.join(old)}",
            why="float8 products need compute capability 8.9 (Ada, Hopper): this GPU emulates them, which "
            "rounds like float8 but is not faster",
            change="leave --fp8 out",
        )


def _gpus_of(case: Case, architectures: tuple[str, ...], *names: str) -> list[str]:
    """Return the case's GPUs of these architectures or names (`geforce` covers several architectures)."""
    return [
        name for name in case.gpu_names if gpu_of_name(name).architecture in architectures or name in names
    ]


def _packages(case: Case) -> Iterator[Finding]:
    versions = case.host.versions
    needed = [
        (name, value, package, flag.extra)
        for name, flag in FLAGS.items()
        if flag.extra is not None and (value := getattr(case.flags, name)) != getattr(RunConfig, name)
        for package in PACKAGES[flag.extra].split()
        if package != "bitsandbytes" or value == "qlora"
    ]
    for flag, value, package, extra in needed:
        if package in versions and versions[package] is None:
            yield wrong(
                "package-absent",
                f"--{flag} {as_written(value)} needs {package}, which is not installed",
                why="the trainer stops before the first step",
                change=pip_install(extra),
            )


def _adapters(case: Case) -> Iterator[Finding]:
    if case.flags.peft != "none" and not has_weights(case.spec):
        yield unwise(
            "adapter-of-random-weights",
            f"--peft {case.flags.peft} with --model {case.flags.model}, which has no pretrained weights",
            why="the trainer refuses a dataset for it: an adapter on random weights is useless",
            change=f"to train: --model {case.spec.hub_id or 'with a folder that has weights, or a hub id'}",
        )
    if case.flags.peft == "qlora" and case.zero_stage == 3:
        yield wrong(
            "qlora-under-zero3",
            "--peft qlora under ZeRO-3",
            Edit("flags", ("peft",), "lora"),
            why="ZeRO-3 shards the packed 4-bit weights without their scales",
            change="--strategy ds_zero2 or ddp: in 4 bits the weights fit on each GPU; or --peft lora",
            file="json" if case.has_json else "yaml",
        )


def _batch(case: Case) -> Iterator[Finding]:
    content, flags = case.files.deepspeed, case.flags
    batch = flags.per_device_train_batch_size
    key = "train_micro_batch_size_per_gpu"
    if (micro := content.get(key, "auto")) not in ("auto", None, batch):
        yield _unlike_the_flag(
            *("micro-batch-differs", case, key, micro, f"--per_device_train_batch_size is {batch}"),
            why="a run can use only one of the two values; the trainer refuses to start",
        )
    steps = content.get("gradient_accumulation_steps", "auto")
    steps = steps if flags.numerics == "stock" and is_count(steps) else flags.gradient_accumulation_steps
    runs = batch * steps * case.num_ranks
    key = "train_batch_size"
    if (total := content.get(key, "auto")) not in ("auto", None, runs):
        product = f"{batch} x {steps} micro-steps x {case.num_ranks} ranks is {runs}"
        yield _unlike_the_flag(
            *("train-batch-differs", case, key, total, product),
            why="DeepSpeed stops unless it equals this product: the file works for one number of GPUs only",
        )


def _unlike_the_flag(name: str, case: Case, key: str, value: object, flag: str, *, why: str) -> Finding:
    """Return a finding on DeepSpeed's `key`, which differs from a flag; the edit lets the flag decide."""
    edit = case.deepspeed_edit(key, "auto" if case.has_json else REMOVE)
    return wrong(
        name,
        f"{key} is {as_written(value)} in the {edit.file.upper()}; {flag}",
        edit,
        why=why,
        then=", so that the flags decide" if case.has_json else ": the flags decide",
    )


def _of_deepspeed(case: Case, key: str) -> Any:
    return (case.files.deepspeed if case.has_json else case.section("deepspeed_config")).get(key)


def _accumulation(case: Case) -> Iterator[Finding]:
    key, flag = "gradient_accumulation_steps", case.flags.gradient_accumulation_steps
    value, in_stock = _of_deepspeed(case, key), case.flags.numerics == "stock"
    is_absent = value is None and in_stock and flag != 1 and case.has_json
    if value not in (None, "auto", flag) or is_absent:
        yield _unlike_the_flag(
            "accumulation-differs",
            case,
            key,
            "absent (accelerate then uses 1)" if is_absent else value,
            f"--{key} is {flag}",
            why="DeepSpeed's value is used, with a warning in the log, so the batch differs from DDP and FSDP"
            if in_stock
            else "a run can use only one of the two values; the trainer refuses to start",
        )


def _clipping(case: Case) -> Iterator[Finding]:
    key, flag = "gradient_clipping", case.flags.max_grad_norm
    value = _of_deepspeed(case, key)
    if flag is None:
        return
    if case.flags.numerics != "stock":  # the trainer writes the flag's value if the key is absent or "auto"
        if value not in (None, "auto", flag):
            yield _unlike_the_flag(
                *("clipping-differs", case, key, value, f"--max_grad_norm is {flag}"),
                why="a run can use only one of the two values; the trainer refuses to start",
            )
    elif (1.0 if value in (None, "auto") else value) != flag:
        yield wrong(
            "clipping-differs",
            f"{key} is {'absent' if value is None else as_written(value)}; --max_grad_norm is {flag} (stock)",
            case.deepspeed_edit(key, flag),
            why="DeepSpeed clips by its own config (1.0 if the key is absent) and ignores the script's value",
        )


def _dtypes(case: Case) -> Iterator[Finding]:
    numerics = case.flags.numerics
    enabled = {}
    for dtype in ("bf16", "fp16"):
        section = case.files.deepspeed.get(dtype)
        enabled[dtype] = section.get("enabled", "auto") if isinstance(section, dict) else "auto"
    runs_fp16 = numerics == "fp16" or (numerics == "stock" and enabled["fp16"] is True)
    for dtype, runs in (("bf16", numerics != "fp32" and not runs_fp16), ("fp16", runs_fp16)):
        if enabled[dtype] in ("auto", runs):
            continue
        yield wrong(
            f"{dtype}-differs",
            f"{dtype}.enabled is {as_written(enabled[dtype])} with --numerics {numerics}",
            in_json(f"{dtype}.enabled", "auto"),
            why="fp16 needs loss scaling and overflows sooner than bf16; other strategies run in bf16"
            if dtype == "fp16" and not runs
            else f"--numerics {numerics} computes in {case.flags.computes_in}: strategies would differ",
            change=f'{dtype}.enabled: "auto", so that --numerics decides',
        )


def _communication(case: Case) -> Iterator[Finding]:
    """Check the dtypes in which gradients are reduced and accumulated; the edits remove both keys."""
    content, numerics = case.files.deepspeed, case.flags.numerics
    flag = "fp32" if case.flags.reduces_in_fp32 else case.flags.reduce_dtype
    types = content.get("data_types")
    reduces = content.get("communication_data_type")
    keeps = types.get("grad_accum_dtype") if isinstance(types, dict) else None
    wide, severity = ("fp32", "float32"), "unwise"
    if numerics == "fp16":
        if reduces in (None, "auto", "fp16") and keeps not in wide:
            return
        severity, name = "wrong", "communication-dtype"
        sentence = (
            f"communication_data_type is {reduces or 'absent'}, grad_accum_dtype is {keeps or 'absent'}"
        )
        why, then = "with --numerics fp16 the other strategies sum and reduce gradients in fp16", ""
    elif keeps in wide and case.zero_stage == 1 and numerics != "fp32" and flag != "fp32":
        severity, name = "wrong", "zero1-becomes-another-optimizer"
        sentence = f"grad_accum_dtype is {keeps} under ZeRO-1"
        why = "DeepSpeed then uses its BF16_Optimizer, which takes 5 bytes more per parameter"
        then = ", or stage 2; --reduce_dtype fp32 if you want it so"
    elif reduces == "fp16" or (reduces is not None and reduces not in ("fp32", "bf16", "fp16", "auto")):
        severity, name, sentence = "wrong", "communication-dtype", f"communication_data_type is {reduces}"
        why = (
            "gradients of bf16 weights overflow in fp16"
            if reduces == "fp16"
            else "DeepSpeed accepts only fp16, bf16 and fp32"
        )
        then = ": bf16"
    elif numerics != "fp32" and (reduces in wide) != (keeps in wide):
        name = "communication-dtype-alone"
        sentence = (
            f"communication_data_type is {reduces or 'absent'}, grad_accum_dtype is {keeps or 'absent'}"
        )
        why = "one of the two keys alone is not enough: gradients are still accumulated, or reduced, in bf16"
        then = ", or --reduce_dtype fp32, which sets both"
    elif numerics in ("aligned", "pure_bf16") and reduces in wide and flag != "fp32":
        name = "communication-dtype-differs"
        sentence = f"the JSON reduces gradients in fp32, --reduce_dtype is {flag or 'bf16'}"
        why = (
            "other strategies reduce in bf16: losses and traffic then differ for another reason than sharding"
        )
        then = ", or --reduce_dtype fp32"
    else:
        return
    values = {"communication_data_type": reduces, "data_types.grad_accum_dtype": keeps}
    edits = [in_json(key, REMOVE) for key, value in values.items() if value is not None]
    yield fault(severity, name, sentence, *edits, why=why, then=then)
