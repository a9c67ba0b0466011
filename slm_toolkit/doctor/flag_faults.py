"""Find flags that contradict the DeepSpeed settings, or need another GPU."""

from collections.abc import Iterator

from slm_toolkit.doctor.case import Case
from slm_toolkit.doctor.deepspeed_faults import in_its_file
from slm_toolkit.doctor.finding import REMOVE, Finding, in_json
from slm_toolkit.doctor.rule import Rule, faults_by
from slm_toolkit.hardware.gpus import gpu_of_name

_IN_16_BITS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa_flash", "sdpa_cudnn")
_FLAGS_DECIDE = ", so that the flags decide"
_REFUSED = "the trainer refuses to start"
_BY_FLAG = {
    "train_micro_batch_size_per_gpu": ("micro-batch-differs", "per_device_train_batch_size"),
    "gradient_accumulation_steps": ("accumulation-differs", "gradient_accumulation_steps"),
    "gradient_clipping": ("clipping-differs", "max_grad_norm"),
}


def _differs(case: Case, value: object, expected: object) -> bool:
    """Return whether DeepSpeed's value differs from the flags'; `--numerics stock` takes DeepSpeed's."""
    return case.flags.numerics != "stock" and value not in (None, "auto", expected)


def _train_batch(case: Case) -> int:
    flags = case.flags
    return flags.per_device_train_batch_size * flags.gradient_accumulation_steps * case.num_ranks


def _reduces_in(case: Case) -> tuple[str, ...]:
    in_fp32 = case.flags.reduces_in_fp32 or case.flags.numerics == "fp32"
    return ("fp32", "float32") if in_fp32 else (case.flags.computes_in,)


_RULES = (
    Rule(
        "wrong",
        "flash-attn-in-fp32",
        "attn_implementation",
        lambda case, value: value in _IN_16_BITS and case.flags.numerics == "fp32",
        None,
        sentence="--{key} {value} with --numerics fp32",
        why="flash kernels compute in bf16 and fp16 only",
        change="--attn_implementation sdpa, or --numerics aligned",
    ),
    Rule(
        "wrong",
        "fp8-emulated",
        "fp8",
        lambda case, value: (
            value != "none" and not all(gpu_of_name(name).has_float8 for name in case.gpu_names)
        ),
        None,
        sentence="--fp8 {value} on a GPU without float8",
        why="float8 products need compute capability 8.9 (Ada, Hopper): this GPU emulates them, which rounds "
        "like float8 but is not faster",
        change="leave --fp8 out",
    ),
)
_OF_DEEPSPEED = (
    *(
        Rule(
            "wrong",
            name,
            key,
            lambda case, value, flag=flag: _differs(case, value, getattr(case.flags, flag)),
            "auto",
            sentence=f"{{key}} is {{value}} under DeepSpeed; --{flag} is {{case.flags.{flag}}}",
            why=_REFUSED,
            then=_FLAGS_DECIDE,
        )
        for key, (name, flag) in _BY_FLAG.items()
    ),
    *(
        Rule(
            "wrong",
            f"{dtype}-differs",
            f"{dtype}.enabled",
            lambda case, value, dtype=dtype: _differs(case, value, case.flags.computes_in == dtype),
            "auto",
            sentence=f"{dtype}.enabled is {{value}}; "
            "--numerics {case.flags.numerics} computes in {case.flags.computes_in}",
            why=_REFUSED,
            then=_FLAGS_DECIDE,
        )
        for dtype in ("bf16", "fp16")
    ),
    Rule(
        "wrong",
        "train-batch-differs",
        "train_batch_size",
        lambda case, value: _differs(case, value, _train_batch(case)),
        "auto",
        sentence="{key} is {value}, not batch x micro-steps x ranks",
        why=_REFUSED,
        then=_FLAGS_DECIDE,
    ),
    *(
        Rule(
            "unwise",
            "communication-dtype-differs",
            key,
            lambda case, value: (
                value is not None and case.flags.numerics != "stock" and value not in _reduces_in(case)
            ),
            REMOVE,
            why="other strategies reduce gradients in the dtype that the flags say: losses and traffic then "
            "differ for another reason than sharding",
            then=", or --reduce_dtype fp32, which sets it under every strategy",
        )
        for key in ("communication_data_type", "data_types.grad_accum_dtype")
    ),
)


def flag_faults(case: Case) -> Iterator[Finding]:
    yield from faults_by(_RULES, case, vars(case.flags), edit=None)
    for finding in faults_by(_OF_DEEPSPEED, case, case.deepspeed, edit=in_json):
        yield in_its_file(finding, case)
