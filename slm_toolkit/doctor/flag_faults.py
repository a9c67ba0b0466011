"""Where the flags of a run and the files of a strategy say different things, or need what is not there."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from slm_toolkit.base.extras import PACKAGES, pip_install
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.doctor.case import Case, fault, is_count, shown
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding
from slm_toolkit.model.names import has_weights

_FLASH = {  # package, and the least architecture: transformers 5.23, modeling_flash_attention_utils.py
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
_IN_16_BITS = (*_FLASH, "sdpa_flash", "sdpa_cudnn")
_BEFORE_HOPPER = ("ampere", "ada")
_flags = partial(fault, topic="flags")


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
    package = _FLASH.get(kernel)
    versions = case.host.versions
    if package in versions and versions[package] is None and versions.get("kernels") is None:
        yield _flags(
            *(case, "wrong", "flash-attn-absent", f"{flag}, and {package} is not installed"),
            why="transformers refuses to build the model",
            change=f"--attn_implementation sdpa, which has its own flash kernel, or pip install {package}",
        )
    if kernel in _IN_16_BITS and case.flags.numerics == "fp32":
        yield _flags(
            *(case, "wrong", "flash-attn-in-fp32", f"{flag} with --numerics fp32"),
            why="flash kernels compute in bf16 and fp16 only",
            change="--attn_implementation sdpa, or --numerics aligned",
        )
    if kernel == "flash_attention_4" and (
        old := _of_architecture(case, _BEFORE_HOPPER, "rtx-3090", "rtx-4090")
    ):
        yield _flags(
            *(case, "wrong", "flash-attn-gpu", f"{flag} on {', '.join(old)}"),
            why="its kernels are for Hopper and Blackwell",
            change="--attn_implementation sdpa",
        )
    if case.flags.fp8 != "none" and (old := _of_architecture(case, ("ampere",), "rtx-3090")):
        yield _flags(
            *(case, "wrong", "fp8-emulated", f"--fp8 {case.flags.fp8} on {', '.join(old)}"),
            why="float8 products need compute capability 8.9 (Ada, Hopper): here they are emulated, with the "
            "rounding and without the speed",
            change="leave --fp8 out",
        )


def _of_architecture(case: Case, architectures: tuple[str, ...], *names: str) -> list[str]:
    """The GPUs meant that are of these architectures, or have one of these names: geforce is of several."""
    from slm_toolkit.hardware.gpus import gpu_of_name

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
    ]
    for flag, value, package, extra in needed:
        if package == "bitsandbytes" and value != "qlora":
            continue
        if package in versions and versions[package] is None:
            yield _flags(
                *(
                    case,
                    "wrong",
                    "package-absent",
                    f"--{flag} {shown(value)}, and {package} is not installed",
                ),
                why="the trainer stops before the first step",
                change=pip_install(extra),
            )


def _adapters(case: Case) -> Iterator[Finding]:
    if case.flags.peft != "none" and not has_weights(case.spec):
        yield _flags(
            *(case, "unwise", "adapter-of-random-weights"),
            f"--peft {case.flags.peft} and --model {case.flags.model}, which has no weights",
            why="the trainer refuses a dataset: an adapter of random weights is useless",
            change=f"to train: --model {case.spec.hub_id or 'with a folder that has weights, or a hub id'}",
        )
    if case.flags.peft == "qlora" and case.zero_stage == 3:
        yield _flags(
            *(case, "wrong", "qlora-under-zero3", "--peft qlora under ZeRO-3"),
            why="ZeRO-3 cuts the packed 4-bit weights into shares without the scales that belong to them",
            change="--strategy ds_zero2 or ddp: in 4 bits the weights fit on each GPU; or --peft lora",
            file="json" if case.has_json else "yaml",
            edits=(Edit("flags", ("peft",), "lora"),),
        )


def _batch(case: Case) -> Iterator[Finding]:
    micro, asked = case.files.deepspeed.get("train_micro_batch_size_per_gpu", "auto"), case.flags
    if micro not in ("auto", None, asked.per_device_train_batch_size):
        yield _of_json(
            *(case, "micro-batch-differs", "train_micro_batch_size_per_gpu", micro),
            f"--per_device_train_batch_size is {asked.per_device_train_batch_size}",
            why="one of the two would not be what runs; the trainer refuses",
        )
    total = case.files.deepspeed.get("train_batch_size", "auto")
    steps = case.files.deepspeed.get("gradient_accumulation_steps", "auto")
    steps = steps if asked.numerics == "stock" and is_count(steps) else asked.gradient_accumulation_steps
    runs = asked.per_device_train_batch_size * steps * case.num_ranks
    if total not in ("auto", None, runs):
        yield _of_json(
            *(case, "train-batch-differs", "train_batch_size", total),
            f"{asked.per_device_train_batch_size} x {steps} micro-steps x {case.num_ranks} ranks is {runs}",
            why="DeepSpeed stops unless it is their product, so the file serves one number of GPUs",
        )


def _of_json(case: Case, name: str, key: str, said: object, flag: str, *, why: str) -> Finding:
    """That DeepSpeed's `key` and a flag differ: both say it, the flag is to."""
    file, keys = _place(case, key)
    return _flags(
        *(case, "wrong", name, f"{key} is {shown(said)} in the {file.upper()}; {flag}"),
        why=why,
        change=f'{key}: "auto", and let the flags say it'
        if case.has_json
        else f"remove {key}: the flags say it",
        file=file,
        key=".".join(keys),
        edits=(Edit(file, keys, "auto" if case.has_json else REMOVE),),
    )


def _place(case: Case, key: str) -> tuple[str, tuple[str, ...]]:
    """The file that DeepSpeed has a top-level key from, and the keys down to it."""
    return ("json", (key,)) if case.has_json else ("yaml", ("deepspeed_config", key))


def _said(case: Case, key: str) -> Any:
    return (case.files.deepspeed if case.has_json else case.section("deepspeed_config")).get(key)


def _accumulation(case: Case) -> Iterator[Finding]:
    key, asked = "gradient_accumulation_steps", case.flags.gradient_accumulation_steps
    said, in_stock = _said(case, key), case.flags.numerics == "stock"
    is_silent = said is None and in_stock and asked != 1 and case.has_json
    if said not in (None, "auto", asked) or is_silent:
        yield _of_json(
            *(case, "accumulation-differs", key),
            "absent, which accelerate takes for 1," if is_silent else said,
            f"--{key} is {asked}",
            why="DeepSpeed's value runs, with a warning in the log: another batch than under DDP and FSDP"
            if in_stock
            else "one of the two would not be what runs; the trainer refuses",
        )


def _clipping(case: Case) -> Iterator[Finding]:
    key, asked = "gradient_clipping", case.flags.max_grad_norm
    said, (file, keys) = _said(case, key), _place(case, key)
    if asked is None:
        return
    if case.flags.numerics != "stock":  # the trainer writes the flag's value over "auto" and into silence
        if said not in (None, "auto", asked):
            yield _of_json(
                *(case, "clipping-differs", key, said),
                f"--max_grad_norm is {asked}",
                why="one of the two would not be what runs; the trainer refuses",
            )
    elif (1.0 if said in (None, "auto") else said) != asked:
        yield _flags(
            *(case, "wrong", "clipping-differs"),
            f"{key} is {'absent' if said is None else shown(said)}; --max_grad_norm is {asked}, in stock",
            why="DeepSpeed clips by its own config, at 1.0 where that is silent, whatever the script says",
            change=f"{key}: {asked}",
            file=file,
            key=".".join(keys),
            edits=(Edit(file, keys, asked),),
        )


def _dtypes(case: Case) -> Iterator[Finding]:
    numerics = case.flags.numerics
    enabled = {}
    for dtype in ("bf16", "fp16"):
        section = case.files.deepspeed.get(dtype)
        enabled[dtype] = section.get("enabled", "auto") if isinstance(section, dict) else "auto"
    runs_fp16 = numerics == "stock" and enabled["fp16"] is True
    for dtype, wanted in (("bf16", numerics != "fp32" and not runs_fp16), ("fp16", runs_fp16)):
        said = enabled[dtype]
        if said in ("auto", wanted):
            continue
        yield _flags(
            *(case, "wrong", f"{dtype}-differs"),
            f"{dtype}.enabled is {shown(said)} with --numerics {numerics}",
            why="fp16 needs loss scaling and overflows where bf16 does not; other strategies run in bf16"
            if dtype == "fp16"
            else f"--numerics {numerics} computes in {'bf16' if wanted else 'fp32'}: strategies would differ",
            change=f'{dtype}.enabled: "auto", and --numerics says it',
            file="json",
            key=f"{dtype}.enabled",
            edits=(Edit("json", (dtype, "enabled"), "auto"),),
        )


def _communication(case: Case) -> Iterator[Finding]:
    content = case.files.deepspeed
    types = content.get("data_types")
    reduces = content.get("communication_data_type")
    keeps = types.get("grad_accum_dtype") if isinstance(types, dict) else None
    wide, asked = ("fp32", "float32"), case.flags.reduce_dtype
    both = (Edit("json", ("communication_data_type",), REMOVE),) if reduces is not None else ()
    both += (Edit("json", ("data_types", "grad_accum_dtype"), REMOVE),) if keeps is not None else ()
    said = {"topic": "flags", "file": "json", "key": "communication_data_type", "edits": both}
    if keeps in wide and case.zero_stage == 1 and case.flags.numerics != "fp32":
        yield fault(
            *(case, "wrong", "zero1-becomes-another-optimizer", f"grad_accum_dtype is {keeps} under ZeRO-1"),
            why="DeepSpeed then runs its BF16_Optimizer, with 5 bytes more per parameter",
            change="remove grad_accum_dtype, or stage 2",
            **said,
        )
    elif reduces == "fp16" or (reduces is not None and reduces not in ("fp32", "bf16", "fp16", "auto")):
        yield fault(
            *(case, "wrong", "communication-dtype", f"communication_data_type is {reduces}"),
            why="gradients of bf16 weights overflow in fp16"
            if reduces == "fp16"
            else "DeepSpeed knows fp16, bf16 and fp32, and refuses others",
            change="remove communication_data_type: bf16",
            **said,
        )
    elif case.flags.numerics != "fp32" and (reduces in wide) != (keeps in wide):
        yield fault(
            *(case, "unwise", "communication-dtype-alone"),
            f"communication_data_type is {reduces or 'absent'}, grad_accum_dtype is {keeps or 'absent'}",
            why="one of them alone changes nothing: gradients are kept in bf16, or reduced in it",
            change="remove both, or --reduce_dtype fp32, which writes both",
            **said,
        )
    elif case.flags.numerics in ("aligned", "pure_bf16") and reduces in wide and asked != "fp32":
        yield fault(
            *(case, "unwise", "communication-dtype-differs"),
            f"the JSON reduces gradients in fp32, --reduce_dtype is {asked or 'bf16'}",
            why="other strategies reduce in bf16: losses and traffic differ for no reason of sharding",
            change="remove both keys, or --reduce_dtype fp32",
            **said,
        )
