"""Find flags that contradict the strategy's files or need a package or GPU that is missing."""

from collections.abc import Iterator

from slm_toolkit.doctor.case import Case, as_written, is_count, value_at
from slm_toolkit.doctor.deepspeed_faults import in_its_file
from slm_toolkit.doctor.finding import REMOVE, Finding, fault, in_json, unwise, wrong
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.model.names import has_weights

_IN_16_BITS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa_flash", "sdpa_cudnn")


def flag_faults(case: Case) -> Iterator[Finding]:
    for check in (_kernels, _adapters):
        yield from check(case)
    names_json = case.section("deepspeed_config").get("deepspeed_config_file")
    if case.has_json or (case.engine == "DEEPSPEED" and not names_json):
        for finding in _differing(case):
            yield in_its_file(finding, case)
    if case.has_json:
        yield from _communication(case)


def _kernels(case: Case) -> Iterator[Finding]:
    kernel = case.flags.attn_implementation
    if kernel in _IN_16_BITS and case.flags.numerics == "fp32":
        yield wrong(
            "flash-attn-in-fp32",
            f"--attn_implementation {kernel} with --numerics fp32",
            why="flash kernels compute in bf16 and fp16 only",
            change="--attn_implementation sdpa, or --numerics aligned",
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


def _adapters(case: Case) -> Iterator[Finding]:
    if case.flags.peft != "none" and not has_weights(case.spec):
        yield unwise(
            "adapter-of-random-weights",
            f"--peft {case.flags.peft} with --model {case.flags.model}, which has no pretrained weights",
            why="the trainer refuses a dataset for it: an adapter on random weights is useless",
            change=f"to train: --model {case.spec.hub_id or 'with a folder that has weights, or a hub id'}",
        )


def _differing(case: Case) -> Iterator[Finding]:
    """Compare DeepSpeed's batch, clipping and dtype with the flags; the edits let the flags decide."""
    flags, numerics = case.flags, case.flags.numerics
    is_stock, in_fp16 = numerics == "stock", value_at(case.deepspeed, ("fp16", "enabled")) is True
    batch, steps = flags.per_device_train_batch_size, flags.gradient_accumulation_steps
    # under --numerics stock accelerate uses 1, and DeepSpeed clips at 1.0, where the file sets nothing
    key = "gradient_accumulation_steps"
    unset = {key: 1 if case.has_json else None, "gradient_clipping": 1.0} if is_stock else {}
    written = case.deepspeed.get(key) or unset.get(key)
    runs = written if is_stock and is_count(written) else steps
    in_fp16 = numerics == "fp16" or (is_stock and in_fp16)
    rows = [  # finding, key, the value that the flags need, flag
        ("micro-batch-differs", "train_micro_batch_size_per_gpu", batch, "--per_device_train_batch_size"),
        ("train-batch-differs", "train_batch_size", batch * runs * case.num_ranks, "batch x steps x ranks"),
        ("accumulation-differs", key, steps, f"--{key}"),
        (
            "bf16-differs",
            "bf16.enabled",
            numerics != "fp32" and not in_fp16,
            f"with --numerics {numerics} it",
        ),
        ("fp16-differs", "fp16.enabled", in_fp16, f"with --numerics {numerics} it"),
    ]
    if flags.max_grad_norm is not None:
        rows.append(("clipping-differs", "gradient_clipping", flags.max_grad_norm, "--max_grad_norm"))
    for name, key, expected, flag in rows:
        value = value_at(case.deepspeed, key.split("."))
        if value is None or (value == "auto" and name == "clipping-differs"):
            value = unset.get(key)
        if value not in (None, "auto", expected):
            yield wrong(
                name,
                f"{key} is {as_written(value)} under DeepSpeed; {flag} is {as_written(expected)}",
                in_json(key, expected if name == "clipping-differs" else "auto"),
                why="the trainer refuses to start; under --numerics stock DeepSpeed's value is used, so the "
                "strategies differ",
                then=", so that the flags decide",
            )


def _communication(case: Case) -> Iterator[Finding]:
    """Check the dtypes in which gradients are reduced and accumulated; the edits remove both keys."""
    numerics = case.flags.numerics
    flag = "fp32" if case.flags.reduces_in_fp32 else case.flags.reduce_dtype
    keys = ("communication_data_type", "data_types.grad_accum_dtype")
    reduces, keeps = (value_at(case.deepspeed, key.split(".")) for key in keys)
    wide, is_fp16 = ("fp32", "float32"), numerics == "fp16"
    rows = (  # the first that holds
        (
            *("wrong", "communication-dtype"),
            is_fp16 and (reduces not in (None, "auto", "fp16") or keeps in wide),
            "with --numerics fp16 the other strategies sum and reduce gradients in fp16",
        ),
        (
            *("wrong", "zero1-becomes-another-optimizer"),
            keeps in wide and case.zero_stage == 1 and numerics not in ("fp16", "fp32") and flag != "fp32",
            "under ZeRO-1 DeepSpeed then uses its BF16_Optimizer, which takes 5 bytes more per parameter; "
            "--reduce_dtype fp32 if you want it so",
        ),
        (
            *("wrong", "communication-dtype"),
            not is_fp16 and reduces not in (None, "fp32", "bf16", "auto"),
            "DeepSpeed accepts fp16, bf16 and fp32, and gradients of bf16 weights overflow in fp16",
        ),
        (
            *("unwise", "communication-dtype-alone"),
            numerics not in ("fp16", "fp32") and (reduces in wide) != (keeps in wide),
            "one of the two keys alone is not enough: gradients are still accumulated, or reduced, in bf16",
        ),
        (
            *("unwise", "communication-dtype-differs"),
            numerics in ("aligned", "pure_bf16") and reduces in wide and flag != "fp32",
            f"other strategies reduce in {flag or 'bf16'}: losses and traffic then differ for another reason "
            "than sharding",
        ),
    )
    for severity, name, is_fault, why in rows:
        if is_fault:
            yield fault(
                severity,
                name,
                f"communication_data_type is {as_written(reduces)}, grad_accum_dtype is {as_written(keeps)}",
                *(in_json(k, REMOVE) for k, v in zip(keys, (reduces, keeps), strict=True) if v is not None),
                why=why,
                then="" if is_fp16 else ", or --reduce_dtype fp32, which sets both",
            )
            return
