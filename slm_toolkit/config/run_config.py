"""RunConfig: the flags of a run, one field each. A field declares all metadata of its flag."""

import dataclasses
import math
import re
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from slm_toolkit.config.dataset_files import Source, sources_of
from slm_toolkit.config.flag_metadata import (
    Excludes,
    Flag,
    dataclass_of_flags,
    field_problems,
    flags_of_fields,
    shortened,
)

SYNTHETIC = "synthetic"
# the default --lr_scheduler_type; the others are transformers'
OWN_SCHEDULE = "cosine_to_tenth"
# most ranks of a node; a rehearsal has no nodes to count them on
REHEARSED_RANKS_PER_NODE = 8
# sequences per process where nothing is known of the GPU
DEFAULT_BATCH = 4
# cuBLAS multiplies float8 matrices if their widths and numbers of tokens are multiples of it
FP8_MULTIPLE = 16
# seconds; torch's own timeout of a collective, see run/peers/machines.py
MOST_DDP_TIMEOUT = 3600
ESTIMATED_ATTENTION = (  # names of transformers 5.23; all but eager keep no scores
    *("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"),
)
_DEFAULT_STEPS = 33  # 3 of warm-up and 3 blocks of 10

_LEARNS_NOTHING = (Excludes("rehearse", "a rehearsal learns nothing"),)
_NO_DOCUMENTS = Excludes("dataset", "synthetic tokens are no documents", values=(SYNTHETIC,))
_NO_LOW_PRECISION = Excludes("numerics", "it has no low precision", values=("fp32",))
_CHECKPOINTS = (
    *_LEARNS_NOTHING,
    Excludes(
        "is_fsdp1", "no checkpoints under FSDP1, whose flat parameters have no names: use fsdp_version: 2"
    ),
    Excludes("is_zero_0", "no checkpoints under ZeRO-0, which shards nothing: use DDP"),
    Excludes("offloads_part_of_optimizer", "no checkpoints with part of the optimizer offloaded: ratio 1.0"),
)
# values of --kernels and the parts of each; until a verb has replaced it, auto has none
KERNEL_SETS = {
    **dict.fromkeys(("auto", "plain"), ()),
    "fused": ("loss", "norm", "triton"),
    "compiled": ("loss", "norm", "triton", "compile"),
    **{part: (part,) for part in ("loss", "norm", "triton", "compile")},
    "graphs": ("compile", "graphs"),
}


def in_todays_names(flags: dict[str, Any]) -> dict[str, Any]:
    """Return flags of records and tables before 2026-11-28 with today's --kernels and --dataset."""
    if configuration := flags.get("dataset_config_name"):
        typed = [source.partition("=") for source in flags["dataset"].split(",")]
        dataset = ",".join(f"{path}:{configuration}{equals}{share}" for path, equals, share in typed)
        flags = {**flags, "dataset": dataset, "dataset_config_name": None}
    named = {
        "loss": flags.get("loss_kernel") == "fused_linear",
        "norm": flags.get("norm_kernel") == "fused",
        "triton": flags.get("triton_loss") in _TRUE or flags.get("optim") == "adamw_triton",
        "compile": flags.get("torch_compile") in _TRUE,
        "graphs": flags.get("torch_compile_mode") in ("reduce-overhead", "max-autotune"),
    }
    if "kernels" in flags:
        return flags
    left = {name: value for name, value in flags.items() if name not in _BEFORE_KERNELS}
    if left.get("optim") == "adamw_triton":
        left["optim"] = "adamw_torch_fused"
    return {"kernels": FLAGS["kernels"].joined([part for part in named if named[part]]), **left}


_TRUE = (True, "true")  # of a record, of a table
_BEFORE_KERNELS = ("loss_kernel", "norm_kernel", "triton_loss", "torch_compile", "torch_compile_mode")


@dataclass_of_flags
class RunConfig:
    """The flags of one run, in the order of --help. None: the machine decides, see `with_defaults`.

    `flag_metadata.Flag` explains what a field may declare.
    """

    model: str | None = Flag(
        None,
        "preset, size such as slm-700m, local folder, config.json or hub id (default: slm-100m on a GPU, "
        "slm-10m on CPU)",
        group="model",
        basic=True,
        aliases=("model_name_or_path",),
        grid=True,
        may_change_on_resume=False,
        estimate="counts",
        heading="{}",
    )
    attn_implementation: str = Flag(
        "sdpa",
        "attention kernel by transformers' name: eager, sdpa, flex_attention, flash_attention_2, _3 or _4",
        grid=True,
        losses="rounded",
        estimate="counts",
        no_closed_form=f"there are {', '.join(ESTIMATED_ATTENTION)}",
        closed_form_for=ESTIMATED_ATTENTION,
        column="attention",
        heading="attention {}",
    )
    kernels: str = Flag(
        "auto",
        "plain: Hugging Face's own. fused: loss in chunks of tokens, norms that keep only their input "
        "for backward, and on a GPU Triton's loss and AdamW. compiled: fused, and torch.compile of the "
        "decoder layers. auto: the fastest for this GPU, shape and number of steps. Or parts joined by "
        "+: loss, norm, triton, compile, graphs (CUDA graphs)",
        basic=True,
        sets=KERNEL_SETS,
        metavar="auto|plain|fused|compiled",
        grid=True,
        excludes=(
            Excludes(
                "numerics",
                "the fused loss rounds its gradients before the loss scale multiplies them: leave loss out",
                values=("fp16",),
                own=("loss",),
            ),
            Excludes(
                "peft", "4-bit weights cut the layers into many graphs", values=("qlora",), own=("compile",)
            ),
            Excludes(
                "gradient_accumulation_steps",
                "CUDA graphs overwrite the gradients of the pass before",
                own=("graphs",),
            ),
            Excludes(
                "shards_parameters",
                "CUDA graphs need every parameter to stay where it is: not FSDP or ZeRO-3",
                own=("graphs",),
            ),
        ),
        losses="rounded",
        estimate="counts",
        no_closed_form="leave graphs out: a step with them is at most as long as one without",
        closed_form_for=("loss", "norm", "triton", "compile"),
        heading="kernels {}",
    )
    pad_widths: bool = Flag(
        False,
        "pad FFN and vocabulary with zeros to multiples of 64, which a GPU multiplies faster. The model "
        "computes the same, and is saved without padding",
        grid=True,
        excludes=(
            Excludes("peft", "an adapter fits the unpadded model"),
            Excludes("builds_in_shards", "the model is built in shards: set zero3_init_flag: false"),
        ),
        may_change_on_resume=False,
        losses="rounded",
        estimate="counts",
        column="padded",
        heading="widths padded",
    )
    gradient_checkpointing: str = Flag(
        "none",
        "recompute activations in backward, which saves memory. full: every layer; about a third more "
        "time. selective_layer: every second layer. selective_op: all but attention and every second "
        "matrix product",
        basic=True,
        choices=("none", "full", "selective_op", "selective_layer"),
        bare="full",
        synonyms={"true": "full", "false": "none"},  # it was a switch once, as other trainers' still is
        grid=True,
        excludes=(
            Excludes(
                "checkpoints_activations", "fsdp_activation_checkpointing already checkpoints all layers"
            ),
        ),
        losses="same",
        estimate="counts",
        column="checkpointing",
        heading="checkpointing {}",
    )
    numerics: str = Flag(
        "aligned",
        "aligned: bf16 compute, fp32 master weights, bf16 reduction. stock: accelerate's own for the "
        "YAML's mixed_precision. pure_bf16: weights and Adam's moments in bf16 only. fp16: like "
        "aligned, with a loss scale, for GPUs without bf16 (T4, V100). fp32: no low precision",
        choices=("aligned", "stock", "pure_bf16", "fp16", "fp32"),
        grid=True,
        excludes=(
            Excludes("is_zero_0", "under DeepSpeed it needs ZeRO-1, 2 or 3", own=("pure_bf16", "fp16")),
            Excludes("is_fsdp1", "not under FSDP1: use fsdp_version: 2", own=("fp16",)),
        ),
        may_change_on_resume=False,
        losses="rounded",
        estimate="counts",
        heading="numerics {}",
    )
    fp8: str = Flag(
        "none",
        "run matrix products of the decoder layers in float8, with a scale per tensor or per row. "
        "Emulated below compute capability 8.9 and on CPU. Needs `pip install torchao`",
        choices=("none", "tensorwise", "rowwise"),
        grid=True,
        excludes=(
            _NO_LOW_PRECISION,
            Excludes("numerics", "float8 goes with bf16", values=("fp16",)),
            Excludes("peft", "adapters freeze the weights that fp8 is for"),
        ),
        losses="rounded",
        estimate="counts",
        heading="fp8 {}",
    )
    peft: str = Flag(
        "none",
        "lora: freeze the weights and train low-rank matrices. qlora: the same, with 4-bit weights "
        "(NF4). Needs `pip install peft bitsandbytes`",
        group="adapters",
        basic=True,
        choices=("none", "lora", "qlora"),
        grid=True,
        excludes=(
            Excludes(
                "numerics", "its weights compute in bf16", values=("fp32", "stock", "fp16"), own=("qlora",)
            ),
            Excludes(
                "is_zero_3",
                "ZeRO-3 cuts weights apart without their scales: use ZeRO-2, DDP or one GPU",
                own=("qlora",),
            ),
        ),
        may_change_on_resume=False,
        estimate="counts",
        column="adapter",
        heading="{}",
    )
    lora_r: int = Flag(
        16,
        "rank of LoRA's matrices",
        grid=True,
        least=1,
        needs=("peft",),
        may_change_on_resume=False,
        estimate="counts",
        column="LoRA rank",
        heading="rank {}",
    )
    lora_alpha: float = Flag(
        32.0,
        "LoRA's scale, before it is divided by the rank",
        grid=True,
        above=0,
        needs=("peft",),
        may_change_on_resume=False,
        estimate="ignores",
    )
    lora_dropout: float = Flag(
        0.0,
        "dropout before LoRA's matrices",
        least=0,
        below=1,
        needs=("peft",),
        may_change_on_resume=False,
        estimate="counts",
    )
    lora_target_modules: str = Flag(
        "all-linear",
        "modules that get an adapter, such as q_proj,v_proj. all-linear: every linear module of the "
        "decoder layers",
        needs=("peft",),
        may_change_on_resume=False,
        estimate="counts",
    )
    seq_len: int | None = Flag(
        None,
        "tokens per sequence (default: 1024 on a GPU, 128 on CPU)",
        group="batch",
        basic=True,
        aliases=("max_length",),
        grid=True,
        least=2,
        most=2**24,  # the longest context of a released model is 10M: Llama 4 Scout, 2025-04
        may_change_on_resume=False,
        estimate="counts",
        column="seq",
        heading="sequence {}",
    )
    per_device_train_batch_size: int | None = Flag(
        None,
        "sequences per process and micro-step. auto, the default: on a GPU the largest power of two "
        "that fits under every compared strategy and gains at least 3 % over half of it; else 4",
        basic=True,
        grid=True,
        least=1,
        losses="same",
        estimate="counts",
        column="batch",
        heading="batch {} per process",
    )
    gradient_accumulation_steps: int = Flag(
        1,
        "micro-steps per optimizer step",
        grid=True,
        least=1,
        losses="same",
        estimate="counts",
        column="accum.",
        heading="{} micro-steps",
    )
    dataset: str = Flag(
        SYNTHETIC,
        "hub id, folder, glob, or local .txt, .jsonl or .parquet file. A hub dataset's configuration "
        "follows its id: HuggingFaceFW/fineweb-edu:sample-10BT. Several are mixed by weight: A=3,B=1; "
        "without weights all of each is used. synthetic: a generated Markov chain",
        group="data",
        basic=True,
        aliases=("dataset_name",),
        may_change_on_resume=False,
        estimate="ignores",
    )
    parity: int | None = Flag(  # `slm compare --parity` sets it for its ranks; no verb has it as a flag
        None,
        SUPPRESS,
        excludes=(Excludes("peft", "its weights compute in bf16", values=("qlora",)),),
        estimate="ignores",
        column="",
    )
    eval_dataset: str | None = Flag(
        None,
        "held-out sets, separated by commas, for --eval_steps. Or 1% to 50%: the share of each "
        "--dataset to hold out (default: 5%; of a stream: its first --eval_batches)",
        needs=("eval_steps",),
        excludes=(_NO_DOCUMENTS,),
        may_change_on_resume=False,
        column="",
    )
    dataset_format: str = Flag(
        "auto",
        "format of a row. messages: role and content. alpaca: instruction, input, output. sharegpt: "
        "conversations. tokens: input_ids, and labels if present. auto: decided by the columns",
        choices=("auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt", "tokens"),
        excludes=(_NO_DOCUMENTS,),
        may_change_on_resume=False,
        estimate="ignores",
    )
    loss_on: str = Flag(
        "answers",
        "tokens of chat data that count in the loss: the answers, or all",
        choices=("answers", "all"),
        grid=True,
        may_change_on_resume=False,
    )
    packing: str = Flag(
        "auto",
        "how documents fill sequences. concat: joined and cut. block_diagonal: the same, but each "
        "attends only to itself. multipack: whole documents, combined to leave little padding; each "
        "attends only to itself. none: one each, padded. auto: concat for text, multipack for chat",
        choices=("auto", "concat", "block_diagonal", "multipack", "none"),
        grid=True,
        excludes=(_NO_DOCUMENTS,),
        may_change_on_resume=False,
        estimate="counts",
        no_closed_form="the mask that keeps documents apart, and the share of padding, are not known before "
        "the documents are; --profile memory tells",
        closed_form_for=("auto", "concat"),
        heading="packing {}",
    )
    text_column: str = Flag(
        "text",
        "column with the documents",
        may_change_on_resume=False,
    )
    tokenizer_name: str | None = Flag(
        None,
        "hub id or folder. byte: 256 bytes, no download (default: the model's own; byte for a model of 384 "
        "tokens)",
        may_change_on_resume=False,
        estimate="ignores",
    )
    streaming: bool | None = Flag(
        None,
        "read documents as they are needed (default: if they are over 1 GiB)",
        may_change_on_resume=False,
    )
    dataloader_num_workers: int = Flag(
        0,
        "processes per rank that read batches ahead",
        grid=True,
        least=0,
        losses="same",
        column="workers",
    )
    max_steps: int | None = Flag(
        None,
        f"optimizer steps (default: {_DEFAULT_STEPS}; warm-up steps are not timed)",
        group="length",
        basic=True,
        least=1,
        estimate="ignores",
        column="steps asked",
    )
    max_tokens: str | None = Flag(
        None,
        "tokens to train on, such as 50M or 2B, instead of --max_steps",
        excludes=(
            Excludes("max_steps", "give one of them"),
            Excludes("num_train_epochs", "give one of them"),
        ),
        estimate="ignores",
        column="tokens asked",
    )
    num_train_epochs: float | None = Flag(
        None,
        "passes over the dataset, instead of --max_steps",
        above=0,
        excludes=(
            Excludes("max_steps", "give one of them"),
            Excludes("dataset", "synthetic tokens never end: give --max_steps", values=(SYNTHETIC,)),
        ),
    )
    max_time: str | None = Flag(
        None,
        "stop after this time since the start: DD:HH:MM:SS, HH:MM:SS or seconds. The run saves a "
        "checkpoint and exits with 0; --resume_from_checkpoint latest continues",
        one_run_only=True,
        needs=("save_steps",),
        excludes=_LEARNS_NOTHING,
        identity=False,
    )
    profile: str = Flag(
        "none",
        "look into steps after the last timed one. time, or the flag alone: four steps under "
        "torch.profiler; writes a trace. memory: every allocation of two steps, by part and module",
        choices=("none", "time", "memory"),
        bare="time",
        synonyms={"true": "time", "false": "none"},  # it was a switch once
        losses="same",
        column="",
    )
    rehearse: int | None = Flag(
        None,
        "let one process play rank 0 of N, with the real engine and sizes. Losses mean nothing. Without "
        "a GPU tensors take no memory, and every allocation is traced",
        grid=True,
        least=1,
        column="",
    )
    optim: str = Flag(
        "adamw_torch_fused",
        "adamw_torch_fused: one kernel for all parameters. adamw_torch: takes a temporary as large as "
        "the parameters. muon: Muon for the layers' matrices (4 bytes less per parameter), fused AdamW "
        "for the rest",
        group="optimizer",
        choices=("adamw_torch", "adamw_torch_fused", "muon"),
        grid=True,
        excludes=(
            Excludes("numerics", "it has its own master weights", values=("stock",), own=("muon",)),
            Excludes("numerics", "Muon's matrix products are in bf16", values=("fp16",), own=("muon",)),
            Excludes("peft", "Muon is for whole matrices, not for adapters", own=("muon",)),
            Excludes("pad_widths", "Muon's updates grow with the padded widths", own=("muon",)),
            Excludes("offloads", "offload's optimizer runs on the CPU", own=("muon",)),
            Excludes("is_fsdp1", "FSDP1's parameters are flat: use fsdp_version: 2", own=("muon",)),
            Excludes(
                "is_deepspeed",
                "DeepSpeed shards without regard to matrices: use DDP or FSDP2",
                own=("muon",),
            ),
        ),
        may_change_on_resume=False,
        losses="same",
        estimate="counts",
        column="optimizer",
        heading="{}",
    )
    learning_rate: float = Flag(
        3e-4,
        "peak learning rate",
        basic=True,
        above=0,
        most=1,  # AdamW moves each weight by about the rate in a step; they begin with a deviation of 0.02
        estimate="ignores",
    )
    lr_scheduler_type: str = Flag(
        OWN_SCHEDULE,
        "learning-rate schedule. cosine_to_tenth: a cosine to a tenth of the peak. The others are "
        "transformers' own; warmup_stable_decay falls in the last tenth of the steps",
        choices=(
            *(OWN_SCHEDULE, "cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt"),
            "warmup_stable_decay",
        ),
        grid=True,
        excludes=(Excludes("warmup_steps", "constant_with_warmup has a warm-up", own=("constant",)),),
        estimate="ignores",
        column="schedule",
        heading="schedule {}",
    )
    warmup_steps: int = Flag(
        0,
        "steps over which the learning rate rises from near 0",
        least=0,
        estimate="ignores",
    )
    weight_decay: float = Flag(
        0.1,
        "AdamW's decoupled weight decay",
        least=0,
        estimate="ignores",
    )
    adam_beta1: float = Flag(
        0.9,
        "decay of AdamW's first moment",
        least=0,
        below=1,
        estimate="ignores",
    )
    adam_beta2: float = Flag(
        0.95,
        "decay of AdamW's second moment",
        least=0,
        below=1,
        estimate="ignores",
    )
    adam_epsilon: float = Flag(
        1e-8,
        "AdamW's epsilon, which is added to the root of the second moment",
        above=0,
        most=1,
        estimate="ignores",
        column="epsilon",
    )
    max_grad_norm: float | None = Flag(
        None,
        "gradient clipping, the same under every engine. 0: no clipping (default: 1.0; with --numerics "
        "stock, the engine's own)",
        least=0,
        estimate="counts",
    )
    on_bad_step: str = Flag(
        "stop",
        "on a NaN or infinite loss or gradient, or a loss above twice ln(vocabulary size). stop: end "
        "the run and name the step's sequences. skip: skip the step, at most 10 in a row. In fp16 an "
        "infinite gradient halves the loss scale instead, 20 times at most",
        choices=("stop", "skip"),
        losses="same",
        column="",
    )
    seed: int = Flag(
        0,
        "random seed of weights and data",
        grid=True,
        least=0,
        most=2**32 - 1,  # numpy takes no larger one
        may_change_on_resume=False,
        estimate="ignores",
    )
    eval_steps: int | None = Flag(
        None,
        "evaluate every N steps and at the end",
        group="saving",
        least=1,
        excludes=_LEARNS_NOTHING,
        column="",
    )
    eval_batches: int = Flag(20, "batches per process in one evaluation", least=1, column="")
    save_steps: int | None = Flag(
        None,
        "write a checkpoint every N steps",
        basic=True,
        least=1,
        excludes=_CHECKPOINTS,
        losses="same",
        column="",
    )
    save_total_limit: int = Flag(2, "checkpoints to keep", least=1, identity=False)
    save_final_model: str | None = Flag(
        None,
        "write a Hugging Face model folder at the end (default: true with a dataset, false with synthetic "
        "tokens and in slm compare)",
        choices=("true", "false"),
        bare="true",
        synonyms={"true": "true", "yes": "true", "1": "true", "false": "false", "no": "false", "0": "false"},
        excludes=(Excludes("rehearse", "a rehearsal learns nothing", own=("true",)),),
        identity=False,
    )
    resume_from_checkpoint: str | None = Flag(
        None,
        "folder of a checkpoint, or of a run for its newest one. latest: the newest of this run. auto: "
        "the same, or start from the beginning. Strategy and number of processes may differ. Also a "
        "folder of accelerate's FSDP or of DeepSpeed",
        one_run_only=True,
        basic=True,
        excludes=_CHECKPOINTS,
        identity=False,
    )
    overwrite_output_dir: bool = Flag(
        False,
        "delete an earlier run in the folder, with its checkpoints, before the first step",
        excludes=(
            *_LEARNS_NOTHING,
            Excludes(
                "resume_from_checkpoint",
                "one starts from the beginning, the other resumes: give one of them",
            ),
        ),
        identity=False,
    )
    ddp_timeout: float = Flag(
        600.0,
        "time limit in seconds for one step, evaluation or checkpoint. After that the run stops and "
        "names the hanging rank. The first step of --kernels compiled gets an hour",
        least=1,
        most=MOST_DDP_TIMEOUT,
        identity=False,
        estimate="ignores",
    )
    logging_steps: int | None = Flag(
        None,
        "log the mean loss to --report_to every N steps, and print a line (default: log every step, "
        "print every ten seconds)",
        least=1,
        identity=False,
    )
    report_to: str = Flag("none", "an accelerate tracker: tensorboard, trackio, wandb, ...", identity=False)
    output_dir: str = Flag(
        "runs",
        "folder in which each run gets its own folder",
        basic=True,
        identity=False,
    )
    run_name: str | None = Flag(
        None,
        "name of the run's folder (default: model, strategy and a hash of the flags)",
        one_run_only=True,
        identity=False,
    )

    def with_defaults(self, *, has_gpu: bool) -> "RunConfig":
        """Fill in what depends on the machine: a 100M model and 1024 tokens on a GPU, 10M and 128 on CPU."""
        return dataclasses.replace(
            self,
            model=self.model or ("slm-100m" if has_gpu else "slm-10m"),
            per_device_train_batch_size=DEFAULT_BATCH
            if self.per_device_train_batch_size is None
            else self.per_device_train_batch_size,
            seq_len=self.seq_len if self.seq_len is not None else (1024 if has_gpu else 128),
            max_grad_norm=1.0
            if self.max_grad_norm is None and self.numerics != "stock"
            else self.max_grad_norm,
            save_final_model=self.save_final_model
            or ("true" if self.rehearse is None and self.dataset != SYNTHETIC else "false"),
        )

    @property
    def steps_asked(self) -> int | None:
        """Optimizer steps without profiled ones.

        None if epochs decide, or tokens before `with_steps`.
        """
        if self.max_steps is None and self.num_train_epochs is None and self.max_tokens is None:
            return _DEFAULT_STEPS
        return self.max_steps

    def with_steps(self, sequences_per_step: int) -> "RunConfig":
        """Return the config with the steps that --max_tokens takes, the last one whole; itself without it."""
        if self.max_tokens is None:
            return self
        num_steps = math.ceil(self.num_tokens / (sequences_per_step * self.seq_len))
        return dataclasses.replace(self, max_steps=num_steps)

    @property
    def num_tokens(self) -> float | None:
        """The number of --max_tokens. Raises ValueError if it is not a number of tokens."""
        try:
            return None if self.max_tokens is None else number_of_tokens(self.max_tokens)
        except ValueError as error:
            raise ValueError(f"--max_tokens: {error}") from None

    @property
    def max_seconds(self) -> float | None:
        """The seconds of --max_time. Raises ValueError if it is not a time above 0."""
        if self.max_time is None:
            return None
        if not re.fullmatch(r"(\d+:){0,3}\d+", self.max_time) or not any(map(int, self.max_time.split(":"))):
            raise ValueError(
                f"--max_time is {shortened(self.max_time)!r}: use DD:HH:MM:SS, HH:MM:SS or seconds"
            )
        numbers = map(int, reversed(self.max_time.split(":")))
        return float(sum(number * unit for number, unit in zip(numbers, (1, 60, 3600, 86400), strict=False)))

    @property
    def computes_in(self) -> str:
        """The dtype of matrix products: bf16, fp16 or fp32; with --numerics stock that of most YAMLs."""
        return self.numerics if self.numerics in ("fp16", "fp32") else "bf16"

    @property
    def kernel_parts(self) -> tuple[str, ...]:
        """The parts of --kernels: those of KERNEL_SETS."""
        return FLAGS["kernels"].parts_of(self.kernels)

    @property
    def fuses_loss(self) -> bool:
        return "loss" in self.kernel_parts

    @property
    def fuses_norm(self) -> bool:
        return "norm" in self.kernel_parts

    @property
    def uses_triton(self) -> bool:
        return "triton" in self.kernel_parts

    @property
    def compiles(self) -> bool:
        return "compile" in self.kernel_parts

    def with_kernels(self, *parts: str) -> "RunConfig":
        return dataclasses.replace(self, kernels=FLAGS["kernels"].joined({*self.kernel_parts, *parts}))

    def without_kernels(self, *parts: str) -> "RunConfig":
        return dataclasses.replace(
            self, kernels=FLAGS["kernels"].joined(set(self.kernel_parts).difference(parts))
        )

    def has_triton_adamw(self, strategy: Any) -> bool:
        """Whether the optimizer's step under a Strategy is one Triton kernel, which also clips and rounds."""
        ours = not (strategy.is_deepspeed or strategy.offloads)
        keeps_masters = self.numerics not in ("stock", "pure_bf16")
        return self.uses_triton and self.optim == "adamw_torch_fused" and ours and keeps_masters

    @property
    def records_graphs(self) -> bool:
        """True if torch.compile records CUDA graphs, which reuse their memory."""
        return "graphs" in self.kernel_parts

    @property
    def saves_model(self) -> bool:
        return self.save_final_model == "true"

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of `--dataset`. Raises ValueError unless each has a weight, or none."""
        found = sources_of(self.dataset)
        if len({source.weight is None for source in found}) > 1:
            raise ValueError(
                f"--dataset {self.dataset}: give every dataset a weight, or none\nhint: --dataset A=3,B=1"
            )
        return found

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """The sources of `--eval_dataset`. Raises ValueError for weights, which held-out sets don't have."""
        found = sources_of(self.eval_dataset) if self.held_out_percent is None else ()
        if any(source.weight for source in found):
            raise ValueError(f"--eval_dataset {self.eval_dataset}: held-out sets have no weights")
        return found

    @property
    def held_out_percent(self) -> int | None:
        """The percent of each dataset to hold out; None if `--eval_dataset` names sets. Raises ValueError."""
        share = self.eval_dataset or "5%"
        if not re.fullmatch(r"[-+.\d]+%", share):
            return None
        if not (share[:-1].isdecimal() and 1 <= int(share[:-1]) <= 50):
            raise ValueError(f"--eval_dataset is {shortened(share)}: a share is 1% to 50%")
        return int(share[:-1])

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that identify the run: other values make another run."""
        return {name: getattr(self, name) for name, of_flag in FLAGS.items() if of_flag.identity}

    def problems(self) -> list[str]:
        """Return a sentence for each value that is invalid, alone or together with another flag."""
        return [*field_problems(self), *_text_problems(self)]


# each flag by its name, in the order of --help
FLAGS = flags_of_fields(RunConfig)
# titles of the flags that have a column in tables
COLUMN_TITLES = {
    name: flag.column or name.replace("_", " ")
    for name, flag in FLAGS.items()
    if flag.identity and flag.column != ""
}
# flags whose columns come first
FIRST_COLUMNS = ("numerics", "seq_len", "per_device_train_batch_size", "gradient_accumulation_steps")


def fits_float8(*widths: int) -> bool:
    """Return whether --fp8 multiplies a matrix of these widths in float8."""
    return all(width % FP8_MULTIPLE == 0 for width in widths)


def number_of_tokens(text: str) -> float:
    """Parse 20B, 300M, 1.5T, 2e10 or a plain number. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), flags=re.IGNORECASE)
    unit = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    value = float(match[1]) * unit[match[2].upper()] if match else 0
    if not 0 < value < 1e18:
        raise ValueError(f"{shortened(text)!r} is not a number of tokens such as 20B, 300M or 2e10")
    return value


def _text_problems(config: RunConfig) -> list[str]:
    """Return a sentence for each text that can't be parsed, and for sizes that float8 does not have."""
    problems = []
    for name in ("max_seconds", "num_tokens", "sources", "eval_sources"):
        try:
            parsed = getattr(config, name)
        except ValueError as error:
            problems.append(str(error).splitlines()[0])
            continue
        paths = [source.path for source in parsed] if name.endswith("sources") else []
        if SYNTHETIC in paths and (len(paths) > 1 or name == "eval_sources"):
            problems.append("synthetic tokens can't be mixed with, or held out of, documents")
    if config.resume_from_checkpoint == "":
        problems.append("--resume_from_checkpoint is empty: is a variable unset?")
    name, batch, seq_len = config.run_name, config.per_device_train_batch_size, config.seq_len
    if name is not None and (Path(name).name != name or name in ("", "..")):
        problems.append(f"--run_name is {name!r}: use a name, not a path; --output_dir sets the folder")
    if config.fp8 != "none" and batch and seq_len and not fits_float8(batch * seq_len):
        problems.append(
            f"--fp8 {config.fp8} with {batch * seq_len} tokens per process: float8 matrix products need a "
            f"multiple of {FP8_MULTIPLE}"
        )
    return problems


def rule_of(optim: str) -> str:
    """Return what a value of `--optim` updates the weights by: adamw or muon."""
    return optim.split("_")[0]
