"""RunConfig: what must be equal for a fair comparison; `flags.py` makes every verb's flags of its fields."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from slm_toolkit.config_data import SYNTHETIC, DataConfig
from slm_toolkit.config_field import flag
from slm_toolkit.config_saving import SavingConfig
from slm_toolkit.extras import pip_install

REHEARSED_RANKS_PER_NODE = 8
"at most; a rehearsal has no nodes to count them on"
FP8_MULTIPLE = 16
"cuBLAS multiplies float8 matrices of widths that are multiples of it"
MOST_DDP_TIMEOUT = 3600
"seconds; torch's own timeout of a collective, see run/machines.py"
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
        from slm_toolkit.config_problems import problems_of

        return problems_of(self)

    def check(self) -> None:
        """Raises one ValueError with all `problems`."""
        if found := self.problems():
            raise ValueError("\n".join(found) + "\nhint: `--help` explains each flag")
