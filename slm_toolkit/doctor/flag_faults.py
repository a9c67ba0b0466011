"""Find flags that contradict the DeepSpeed settings, or need another GPU."""

from collections.abc import Iterator

from slm_toolkit.doctor.case import Case
from slm_toolkit.doctor.deepspeed_faults import in_its_file
from slm_toolkit.doctor.finding import REMOVE, Finding, in_json, wrong
from slm_toolkit.doctor.rule import Rule, faults_by
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.strategy.checked_run import json_contradictions
from slm_toolkit.strategy.strategy import Strategy

_IN_16_BITS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_DIFFERS = {  # names of the findings by DeepSpeed's key
    "train_micro_batch_size_per_gpu": "micro-batch-differs",
    "train_batch_size": "train-batch-differs",
    "gradient_accumulation_steps": "accumulation-differs",
    "gradient_clipping": "clipping-differs",
    "bf16.enabled": "bf16-differs",
    "fp16.enabled": "fp16-differs",
}


def _reduces_in(case: Case) -> tuple[str, ...]:
    return ("fp32", "float32") if case.flags.numerics == "fp32" else (case.flags.computes_in,)


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
            "unwise",
            "communication-dtype-differs",
            key,
            lambda case, value: (
                value is not None and case.flags.numerics != "stock" and value not in _reduces_in(case)
            ),
            REMOVE,
            why="other strategies reduce gradients in the dtype that the flags say: losses and traffic then "
            "differ for another reason than sharding",
        )
        for key in ("communication_data_type", "data_types.grad_accum_dtype")
    ),
)


def flag_faults(case: Case) -> Iterator[Finding]:
    yield from faults_by(_RULES, case, vars(case.flags), edit=None)
    strategy = Strategy(
        name=case.name,
        engine="deepspeed",
        num_processes=case.num_ranks,
        accelerate_config=case.config,
        deepspeed_config=case.deepspeed,
    )
    differing = json_contradictions(strategy, case.flags, case.num_ranks, strategy.mixed_precision)
    of_json = [
        wrong(
            _DIFFERS[key],
            sentence,
            in_json(key, "auto"),
            why="the trainer refuses to start",
            then=", so that the flags decide",
        )
        for key, sentence in differing.items()
    ]
    for finding in (*of_json, *faults_by(_OF_DEEPSPEED, case, case.deepspeed, edit=in_json)):
        yield in_its_file(finding, case)
