"""RunConfig: what must be equal for a fair comparison; every field carries its flag, help and limits."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slm_toolkit.base.extras import pip_install
from slm_toolkit.base.user_files import exists, typed_path


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    bare: str | None = None,
    synonyms: dict[str, str] | None = None,
    grid: bool = False,
    identity: bool = True,
) -> Any:
    """A field and its flag; `grid`: several values in `compare`, `identity`: makes another run.

    `bare`: the value of the flag without one, `synonyms`: other words for values.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "group": group,
            "choices": choices,
            "aliases": aliases,
            "bare": bare,
            "synonyms": synonyms or {},
            "grid": grid,
            "id": identity,
        },
    )


def learning_rate(peak: float, warmup_steps: int, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak; `step` counts from 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    share_done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share_done)))


@dataclass(frozen=True)
class SavingConfig:
    """What is evaluated, saved, gone on from and reported."""

    eval_steps: int | None = flag(None, "evaluate every so many steps and at the end", group="saving")
    eval_batches: int = flag(20, "batches per process of one evaluation", group="saving")
    save_steps: int | None = flag(None, "write a checkpoint every so many steps", group="saving")
    save_total_limit: int = flag(2, "checkpoints kept", group="saving", identity=False)
    save_final_model: bool | None = flag(
        None,
        "write a Hugging Face model folder at the end (default: with a dataset yes, with synthetic no;"
        " slm compare: no)",
        group="saving",
        identity=False,
    )
    async_save: bool = flag(
        False,
        "write checkpoints while training goes on, from a copy in the host's RAM",
        group="saving",
        identity=False,
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "a checkpoint's folder; a run's, for its newest; latest: the newest of this run; auto: that, or from "
        "the start where there is none. The strategy and the number of processes may be others",
        group="saving",
        identity=False,
    )
    overwrite_output_dir: bool = flag(
        False,
        "start from the beginning in a folder that holds an earlier run, whose checkpoints, model and record "
        "are deleted before the first step",
        group="saving",
        identity=False,
    )
    lm_eval_tasks: str | None = flag(
        None,
        "tasks of EleutherAI's lm-eval for the saved model, by commas: names, or a task's YAML by path; with "
        f"`{pip_install('lm_eval')}`",
        group="saving",
        identity=False,
    )
    ddp_timeout: float = flag(
        600.0,
        "seconds that a step, an evaluation or a checkpoint may take, with its waiting for other ranks; then "
        "the rank that hangs is named, and the run ends. With --torch_compile the first step has an hour. "
        "Building model, data and engine is not counted",
        group="saving",
        identity=False,
    )
    report_to: str = flag(
        "none", "an accelerate tracker: tensorboard, trackio, wandb, ...", group="saving", identity=False
    )
    output_dir: str = flag("runs", "each run gets a folder here", group="saving", identity=False)
    run_name: str | None = flag(
        None,
        "the run's folder (default: model, strategy and a hash of all asked)",
        group="saving",
        identity=False,
    )


SYNTHETIC = "synthetic"
DATA_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
"of local files of data"
DATASET_FORMATS = ("auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt", "tokens")
PACKINGS = ("auto", "concat", "block_diagonal", "multipack", "none")


@dataclass(frozen=True)
class Source:
    """One dataset of several."""

    name: str
    "what its losses are reported under"
    path: str
    "hub id, file, folder or glob"
    weight: float | None
    "share of the sequences, not normalised; None: as many as it has"


@dataclass(frozen=True)
class DataConfig:
    """Which documents, as which sequences of tokens, and which of their tokens have a loss."""

    dataset: str = flag(
        SYNTHETIC,
        "hub id, or local .txt, .jsonl or .parquet files, a glob or a folder; several by commas, A=3,B=1 "
        "with weights (else all of each), and each one's loss is told; "
        "synthetic: a Markov chain, generated, the same on every machine",
        group="data",
        aliases=("dataset_name",),
    )
    parity_task: bool = flag(
        False,
        "synthetic tokens in which phrases come again, several documents in a sequence, and random weights "
        "so large that attention, positions and norms all move the loss: what `slm compare --parity` trains",
        group="data",
    )
    eval_dataset: str | None = flag(
        None,
        "held-out sets by commas, loss and perplexity of each with --eval_steps (default: a share of each "
        "--dataset)",
        group="data",
    )
    dataset_config_name: str | None = flag(None, "configuration of a hub dataset", group="data")
    dataset_format: str = flag(
        "auto",
        "what a row holds: text; messages (role, content); prompt_completion; alpaca (instruction, input, "
        "output); sharegpt (conversations); tokens (input_ids, labels too if there are); auto: by columns",
        group="data",
        choices=DATASET_FORMATS,
    )
    loss_on: str = flag(
        "answers",
        "tokens of chat data that have a loss: the answers, or all",
        group="data",
        choices=("answers", "all"),
        grid=True,
    )
    packing: str = flag(
        "auto",
        "how documents fill sequences. concat: joined and cut, tokens attend across documents; "
        "block_diagonal: the same, each document sees itself only; multipack: whole documents put together "
        "so that little is padding, each sees itself only; none: one each, padded; auto: concat for text, "
        "multipack for chat",
        group="data",
        choices=PACKINGS,
        grid=True,
    )
    text_column: str = flag("text", "column that holds the documents", group="data")
    tokenizer_name: str | None = flag(
        None, "hub id or folder; byte: needs no download (default: the model's own, else byte)", group="data"
    )
    streaming: bool | None = flag(
        None, "read documents as they are needed (default: where they are over 1 GiB)", group="data"
    )
    dataloader_num_workers: int = flag(
        0, "processes per rank that read batches ahead", group="data", grid=True
    )
    validation_split_percentage: int = flag(
        5,
        "share of the text kept for evaluation, with --eval_steps (of a stream: its first --eval_batches)",
        group="data",
    )

    @property
    def sources(self) -> tuple[Source, ...]:
        """What `--dataset` names. Raises ValueError where some have weights and some have none."""
        found = sources_of(self.dataset)
        if len({source.weight is None for source in found}) > 1:
            raise ValueError(
                f"--dataset {self.dataset}: give every dataset a weight, or none\nhint: --dataset A=3,B=1"
            )
        return found

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """What `--eval_dataset` names. Raises ValueError for weights, which mean nothing there."""
        found = sources_of(self.eval_dataset) if self.eval_dataset else ()
        if any(source.weight is not None for source in found):
            raise ValueError(f"--eval_dataset {self.eval_dataset}: held-out sets have no weights")
        return found


def sources_of(text: str) -> tuple[Source, ...]:
    """`A=3,B=1` taken apart; a path that exists as it stands is one dataset, commas or not."""
    parts = [text] if exists(typed_path(text)) else [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"--dataset {text!r} names nothing between commas\nhint: --dataset A=3,B=1")
    pairs = [_path_and_weight(part) for part in parts]
    paths = [path for path, _ in pairs]
    short = [_stem(path) for path in paths]
    names = [name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)]
    if len(set(names)) < len(names):
        raise ValueError(f"--dataset {text} names a dataset twice\nhint: one weight says how much of it")
    return tuple(Source(name, path, weight) for name, (path, weight) in zip(names, pairs, strict=True))


def _path_and_weight(part: str) -> tuple[str, float | None]:
    path, equals, number = part.rpartition("=")
    if not equals or exists(typed_path(part)):
        return part, None
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path or not 0 < weight < math.inf:
        raise ValueError(f"--dataset {part}: the weight {number!r} is not a number above 0")
    return path, weight


def _stem(path: str) -> str:
    """train of data/train.jsonl, c4 of allenai/c4, texts of texts/."""
    name = path.rstrip("/").rpartition("/")[2]
    return Path(name).stem if Path(name).suffix in DATA_SUFFIXES else name


REHEARSED_RANKS_PER_NODE = 8
"at most; a rehearsal has no nodes to count them on"
FP8_MULTIPLE = 16
"cuBLAS multiplies float8 matrices of widths that are multiples of it"
MOST_DDP_TIMEOUT = 3600
"seconds; torch's own timeout of a collective, see run/peers/machines.py"
ADAPTER_FLAGS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "merge_adapter")
"that mean nothing without --peft; the first three are LoRA's alone"
CHECKPOINTING_SYNONYMS = {"true": "full", "false": "none"}
"--gradient_checkpointing was a switch once: scripts and records still say so"


@dataclass(frozen=True)
class RunConfig(DataConfig, SavingConfig):
    """What one run is asked to do. None means: decided by the machine, see `with_defaults`."""

    model: str | None = flag(
        None,
        "preset, slm-<size> such as slm-700m, local folder or config.json, or hub id",
        group="model",
        aliases=("model_name_or_path",),
        grid=True,
    )
    attn_implementation: str = flag(
        "sdpa",
        "attention kernel, transformers' names: eager, sdpa, flex_attention, flash_attention_2, _3, _4; or "
        "one backend of sdpa: sdpa_math, sdpa_flash, sdpa_efficient, sdpa_cudnn",
        group="model",
        grid=True,
    )
    loss_kernel: str = flag(
        "hf",
        "hf: transformers' own, fp32 copies of all logits; fused_logits: in chunks, the logits' gradient in "
        "their place; fused_linear: head and loss in chunks of tokens, logits are never whole",
        group="model",
        choices=("hf", "fused_logits", "fused_linear"),
        grid=True,
    )
    norm_kernel: str = flag(
        "hf",
        "hf: transformers' own RMSNorm; fused: one that keeps only its input for backward",
        group="model",
        choices=("hf", "fused"),
        grid=True,
    )
    mlp_kernel: str = flag(
        "hf",
        "hf: transformers' own SwiGLU; fused: one that does not keep the SiLU of the gate for backward",
        group="model",
        choices=("hf", "fused"),
        grid=True,
    )
    use_liger_kernel: bool = flag(
        False,
        "Liger's Triton kernels for RMSNorm, RoPE and SwiGLU (the loss is --loss_kernel's); on a GPU, with "
        f"`{pip_install('liger')}`",
        group="model",
        grid=True,
    )
    gradient_checkpointing: str = flag(
        "none",
        "compute activations again in backward. full, or the flag alone: all of every layer, least memory, "
        "about a third more time; selective_layer: of every second; selective_op: all but attention and each "
        "second matrix product",
        group="model",
        choices=("none", "full", "selective_op", "selective_layer"),
        bare="full",
        synonyms=CHECKPOINTING_SYNONYMS,
        grid=True,
    )
    torch_compile: bool = flag(
        False, "compile the decoder layers with torch.compile", group="model", grid=True
    )
    torch_compile_mode: str = flag(
        "default",
        "reduce-overhead: CUDA graphs, for models so small that launching kernels takes longest (where no "
        "parameters are gathered); max-autotune: try more kernels, and CUDA graphs",
        group="model",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        grid=True,
    )
    fsdp_prefetch: int = flag(
        0,
        "FSDP2: layers gathered ahead of the one that computes, forward and backward; each takes a layer's "
        "memory; 0: PyTorch's own way, about one",
        group="model",
        grid=True,
    )
    numerics: str = flag(
        "aligned",
        "aligned: the same bf16 compute, fp32 master weights and bf16 reduction under every engine; "
        "stock: what accelerate gives each engine in the YAML's mixed_precision (default: bf16); "
        "pure_bf16: as aligned, but weights and Adam's moments in bf16 only; fp32: no low precision",
        group="model",
        choices=("aligned", "stock", "pure_bf16", "fp32"),
        grid=True,
    )
    reduce_dtype: str | None = flag(
        None,
        "what gradients are reduced in, with --numerics aligned or pure_bf16 (default: bf16); "
        "ZeRO-1 can't do fp32",
        group="model",
        choices=("bf16", "fp32"),
        grid=True,
    )
    fp8: str = flag(
        "none",
        "matrix products of the decoder layers in float8 by torchao, a scale per tensor or per row; on a GPU "
        f"of compute capability 8.9 or more, emulated elsewhere; with `{pip_install('fp8')}`",
        group="model",
        choices=("none", "tensorwise", "rowwise"),
        grid=True,
    )
    tf32: bool = flag(
        False, "let fp32 matrix products round to TF32 on a GPU (--numerics fp32)", group="model", grid=True
    )
    peft: str = flag(
        "none",
        "lora: train low-rank matrices beside the frozen weights; qlora: beside weights in 4 bits (NF4); "
        f"ia3: train a scale per channel; with `{pip_install('peft')}`",
        group="adapters",
        choices=("none", "lora", "qlora", "ia3"),
        grid=True,
    )
    lora_r: int = flag(16, "rank of LoRA's matrices", group="adapters", grid=True)
    lora_alpha: float = flag(32.0, "LoRA's scale, over its rank", group="adapters", grid=True)
    lora_dropout: float = flag(0.0, "dropout before LoRA's matrices", group="adapters")
    lora_target_modules: str = flag(
        "all-linear",
        "modules that get an adapter, by commas (q_proj,v_proj); all-linear: all of the decoder layers "
        "(ia3: keys, values and down projections)",
        group="adapters",
    )
    merge_adapter: bool = flag(
        False,
        "write the base model with the adapter merged in beside the adapter",
        group="adapters",
        identity=False,
    )
    seq_len: int | None = flag(
        None,
        "tokens per sequence (1024 on a GPU, 128 on CPU)",
        group="batch",
        aliases=("max_length",),
        grid=True,
    )
    per_device_train_batch_size: int = flag(
        4, "sequences per process and micro-step", group="batch", grid=True
    )
    gradient_accumulation_steps: int = flag(1, "micro-steps per optimizer step", group="batch", grid=True)
    find_batch_size: bool = flag(
        False,
        "where a step runs out of memory, start again with a smaller --per_device_train_batch_size and more "
        "--gradient_accumulation_steps: the same sequences per step",
        group="batch",
        identity=False,
    )
    fp32_steps: int = flag(
        0,
        "first do so many steps in fp32, in processes of their own, and keep their losses in the record: "
        "`slm compare --parity` compares them to five digits",
        group="length",
    )
    max_steps: int | None = flag(
        None,
        "optimizer steps (default: 33, of which the first, and all that warms up, are not timed)",
        group="length",
    )
    num_train_epochs: float | None = flag(
        None, "passes over the dataset, instead of --max_steps", group="length"
    )
    timing_warmup_steps: int | None = flag(
        None,
        "first steps of which the time is not counted (default: those seen to be slow or to compile)",
        group="length",
    )
    profile: bool = flag(
        False,
        "after the last timed step, four more under torch.profiler: where the time goes, and a trace",
        group="length",
    )
    rehearse: int | None = flag(
        None,
        "let one process play rank 0 of so many: the real engine and sizes, nothing is sent and losses mean "
        "nothing; without a GPU tensors take no memory, and every allocation is traced",
        group="length",
        grid=True,
    )
    trace_memory: bool = flag(
        False,
        "after the last timed step, follow every allocation of two more: a memory timeline by part and "
        "module (a rehearsal without a GPU always does)",
        group="length",
    )
    optim: str = flag(
        "adamw_torch_fused",
        "AdamW with one kernel for all parameters, or with a temporary as large as the parameters",
        group="optimizer",
        choices=("adamw_torch", "adamw_torch_fused"),
        grid=True,
    )
    learning_rate: float = flag(
        3e-4, "peak learning rate; it falls to a tenth on a cosine", group="optimizer"
    )
    scale_lr: str = flag(
        "none",
        "change the learning rate with the batch of a step, over --base_batch_size: by the ratio's square "
        "root (Adam) or by the ratio",
        group="optimizer",
        choices=("none", "sqrt", "linear"),
        grid=True,
    )
    base_batch_size: int | None = flag(
        None,
        "sequences per step that --learning_rate is meant for, with --scale_lr (default: one process's "
        "micro-step)",
        group="optimizer",
    )
    warmup_steps: int = flag(0, "steps over which the learning rate rises", group="optimizer")
    weight_decay: float = flag(0.1, "AdamW's decoupled weight decay", group="optimizer")
    adam_beta1: float = flag(0.9, "AdamW's first moment decay", group="optimizer")
    adam_beta2: float = flag(0.95, "AdamW's second moment decay", group="optimizer")
    max_grad_norm: float | None = flag(
        None,
        "gradient clipping, the same under every engine; 0: none (default: 1.0, in stock as the engine does)",
        group="optimizer",
    )
    on_bad_step: str = flag(
        "stop",
        "a loss or gradient that is no number, or a loss above --max_loss: stop, and name the step's "
        "sequences; skip: leave the step out, at most 10 in a row (what is no number changes no weight)",
        group="optimizer",
        choices=("stop", "skip"),
    )
    max_loss: float | None = flag(
        None,
        "a step's loss above it has exploded, with --on_bad_step skip that of any micro-step on any rank "
        "(default: twice that of guessing each token, ln of the vocabulary)",
        group="optimizer",
    )
    seed: int = flag(0, "of weights and data", group="optimizer", grid=True)

    def with_defaults(self, *, has_gpu: bool) -> "RunConfig":
        """Fill in what depends on the machine: a 100M model and 1024 tokens on a GPU, 10M and 128 on CPU."""
        return dataclasses.replace(
            self,
            model=self.model or ("slm-100m" if has_gpu else "slm-10m"),
            seq_len=self.seq_len if self.seq_len is not None else (1024 if has_gpu else 128),
            max_grad_norm=1.0
            if self.max_grad_norm is None and self.numerics != "stock"
            else self.max_grad_norm,
            save_final_model=self.save_final_model
            if self.save_final_model is not None
            else self.rehearse is None
            and (self.dataset != SYNTHETIC or self.merge_adapter or self.lm_eval_tasks is not None),
        )

    @property
    def steps_asked(self) -> int | None:
        """Optimizer steps without profiled ones, None where epochs decide; by default 30 after a warm-up."""
        if self.max_steps is None and self.num_train_epochs is None:
            return (self.timing_warmup_steps or 3) + 3 * 10
        return self.max_steps

    def learning_rate_of(self, sequences_per_step: int) -> float:
        """The peak learning rate of steps of so many sequences, over all ranks and micro-steps."""
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.scale_lr]
        base = self.base_batch_size or self.per_device_train_batch_size
        return self.learning_rate * (sequences_per_step / base) ** power

    @property
    def records_graphs(self) -> bool:
        """Whether torch.compile records CUDA graphs, which reuse their memory."""
        return self.torch_compile_mode in ("reduce-overhead", "max-autotune")

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that make this another run than one with other values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["id"]}

    def problems(self) -> list[str]:
        """Every field whose value makes no sense, as a sentence."""

        return problems_of(self)

    def check(self) -> None:
        """Raises one ValueError with all `problems`."""
        if found := self.problems():
            raise ValueError("\n".join(found) + "\nhint: `--help` explains each flag")


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
