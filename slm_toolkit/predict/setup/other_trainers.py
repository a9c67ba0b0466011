"""The presets of `--like`: how other trainers train, in our flags and in what only closed forms can follow.

One entry per trainer, read in its own code; `sources` names files and commits. Nothing here was fitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, Strategy


@dataclass(frozen=True)
class LossBytes:
    """Bytes per logit of a trainer's own loss over bf16 logits, at its peaks."""

    forward: float
    backward: float
    alive: float = 0.0
    "of logits that a variable keeps until the next micro-step's logits replace them; on top of the two peaks"


@dataclass(frozen=True)
class OtherTrainer:
    """A trainer, by its defaults."""

    name: str
    "the value of `--like`"
    title: str
    sources: tuple[str, ...]
    "file and commit or version"
    flags: tuple[tuple[str, Any], ...]
    "our flags that make the same step; the user's flags win"
    strategies: tuple[str, ...]
    "shipped strategies that it has; the first ones are the default"
    runs_under: tuple[str, ...]
    "boolean properties of Strategy; it can run a strategy that has one of them"
    loss: LossBytes | None = None
    "None: its loss takes the memory of transformers' own"
    compiled_loss: LossBytes | None = None
    "with --kernels compile; None: as without"
    root_holds_vocabulary: bool = False
    "FSDP: the root unit, gathered during the whole step, has the embedding, the final norm and the head"
    has_fsdp1: bool = False
    "its FSDP is FSDP1: a flat parameter for each layer, and one for the root; backward gathers ahead"
    gathers_in_fp32: bool = False
    "FSDP: fp32 parameters are gathered in fp32 and cast by autocast; gradients are reduced in bf16"
    reduces_in_fp32: bool = False
    "FSDP: bf16 gradients are reduced in fp32"
    has_fp32_gradients: bool = False
    "with bf16 weights: gradients are summed and reduced in one fp32 buffer, which is never freed"
    zero_1_has_buckets: bool = False
    "ZeRO-1: the model is wrapped in DDP, too, whose bf16 buckets are as large as the gradients"
    notes: tuple[tuple[str, bool], ...] = ()
    "what the user's script may set otherwise; True: the closed forms do not follow it"

    @property
    def beyond_flags(self) -> list[str]:
        """Return a phrase for each setting that no flag of ours has."""
        phrases = []
        if self.loss is not None:
            phrases.append(f"its own loss, {_loss_text(self.loss)}")
        if self.compiled_loss is not None:
            phrases.append(f"with --kernels compile a compiled loss, {_loss_text(self.compiled_loss)}")
        if self.root_holds_vocabulary:
            phrases.append("an FSDP root that keeps embedding and head gathered")
        if self.has_fsdp1:
            phrases.append("FSDP1, which holds two layers at once")
        if self.gathers_in_fp32:
            phrases.append("FSDP that gathers fp32 weights and reduces bf16 gradients")
        if self.reduces_in_fp32:
            phrases.append("FSDP that reduces bf16 gradients in fp32")
        if self.has_fp32_gradients:
            phrases.append("gradients of bf16 weights in fp32, which stay between steps")
        if self.zero_1_has_buckets:
            phrases.append("DDP's buckets besides ZeRO-1")
        return phrases

    def problems(self, strategies: list[Strategy]) -> list[str]:
        """Return a sentence for each strategy that the trainer does not have."""
        return [
            f"--like {self.name} with {strategy.name}, which {self.title} does not have: use "
            f"{', '.join(self.strategies)}"
            for strategy in strategies
            if not any(getattr(strategy, name) for name in self.runs_under)
        ]


def _loss_text(loss: LossBytes) -> str:
    forward, backward = (f"{peak + loss.alive:g}" for peak in (loss.forward, loss.backward))
    alive = f", {loss.alive:g} of them alive between micro-steps" if loss.alive else ""
    return f"{forward} bytes per logit in forward, {backward} in backward{alive}"


_HF_KERNELS = (("kernels", "plain"),)
"eager norms in fp32 and SwiGLU, and a loss that no other kernel of ours replaces"
_FUSED_NORM = (("kernels", "norm"),)

TRAINERS = (
    OtherTrainer(
        name="trainer",
        title="Hugging Face Trainer",
        sources=("transformers 5.23.0: trainer.py (compute_loss), training_args.py, loss/loss_utils.py",),
        # bf16=True is accelerate's mixed precision: autocast over fp32 weights, FSDP that gathers in bf16;
        # optim is adamw_torch_fused; gradients are freed after a step (zero_grad)
        flags=(("numerics", "stock"), ("optim", "adamw_torch_fused"), *_HF_KERNELS),
        strategies=STUDIED_STRATEGIES,
        runs_under=("is_single", "is_replicated", "is_fsdp", "is_deepspeed"),
        # its torch_compile compiles the model with its loss: bf16 logits; in backward their gradient besides
        compiled_loss=LossBytes(forward=2, backward=4),
        notes=(
            (
                "weights that transformers 5 loads in bf16 train in bf16 under DDP: --numerics pure_bf16",
                False,
            ),
            (
                "--kernels compile is its torch_compile, of the whole model; estimated: compiled layers and "
                "a compiled loss",
                True,
            ),
        ),
    ),
    OtherTrainer(
        name="torchtune",
        title="torchtune",
        sources=(
            "torchtune recipes/full_finetune_distributed.py @015b39c745, "
            "training/_distributed.py @0696355d85 (shard_model), "
            "modules/loss/cross_entropy_loss.py @02b12d3621, "
            "recipes/configs/llama3_2/1B_full.yaml @0331777757",
        ),
        # dtype: bf16 makes weights, gradients and AdamW's states bf16; fused: True; clip_grad_norm: null
        flags=(
            ("numerics", "pure_bf16"),
            ("optim", "adamw_torch_fused"),
            ("max_grad_norm", 0.0),
            *_HF_KERNELS,
        ),
        strategies=("fsdp_full_shard", "fsdp_shard_grad_op"),
        runs_under=("is_single", "is_fsdp2"),
        # LinearCrossEntropyLoss has 8 chunks. All of them save their fp32 log-softmax, 4; the chunk at work
        # has bf16 and fp32 logits, (2 + 4) / 8. Backward: 4, and (4 + 4 + 2) / 8 for the chunk's gradients
        loss=LossBytes(forward=4.75, backward=5.25),
        root_holds_vocabulary=True,  # shard_model: a unit per layer, then fully_shard(model)
        notes=(
            ("compile: true compiles each layer, and not the loss: --kernels compile", False),
            ("optimizer_in_bwd, 8-bit AdamW and activation offloading", True),
        ),
    ),
    OtherTrainer(
        name="nanotron",
        title="nanotron",
        sources=(
            "nanotron src/nanotron/optim/gradient_accumulator.py and optim/zero.py @069c21cf3c, "
            "parallel/tensor_parallel/functional.py @00708b80c8 (sharded_cross_entropy), models/llama.py "
            "(cast_to_fp32), trainer.py (DistributedDataParallel)",
        ),
        # accumulate_grad_in_fp32: one fp32 buffer of all gradients that is zeroed, never freed;
        # torch_adam_is_fused; TritonRMSNorm keeps only its input
        flags=(
            ("numerics", "aligned"),
            ("optim", "adamw_torch_fused"),
            *_FUSED_NORM,
        ),
        strategies=("ddp", "ds_zero1"),
        runs_under=("is_single", "is_replicated", "is_zero_1"),
        has_fp32_gradients=True,
        # fp32 logits 4, and the softmax made of them 4; the gradient takes the softmax's place, and is cast
        # to bf16: 4 + 2. With z_loss there is another copy
        loss=LossBytes(forward=8, backward=6),
        zero_1_has_buckets=True,
        notes=(
            ("zero_stage 0 is ddp, zero_stage 1 is ds_zero1", False),
            ("tensor and pipeline parallelism", True),
        ),
    ),
    OtherTrainer(
        name="torchtitan",
        title="torchtitan",
        sources=(
            "torchtitan models/llama3/infra/parallelize.py @018740b7aa (apply_fsdp, apply_compile), "
            "config/job_config.py @000204a4a8, components/loss.py @00a388d973, train.py (del pred)",
        ),
        # fp32 weights, gathered in bf16 (mixed_precision_param), reduced in fp32 (mixed_precision_reduce);
        # AdamW is fused; nn.RMSNorm is one kernel; llama3_8b.toml: activation_checkpoint selective, op
        flags=(
            ("numerics", "stock"),
            ("optim", "adamw_torch_fused"),
            *_FUSED_NORM,
            ("gradient_checkpointing", "selective_op"),
        ),
        strategies=("fsdp_full_shard", "fsdp_shard_grad_op", "ddp"),
        reduces_in_fp32=True,
        runs_under=("is_single", "is_replicated", "is_fsdp2"),
        # compile.components has the loss: bf16 logits; their gradient besides in backward
        compiled_loss=LossBytes(forward=2, backward=4),
        notes=(
            ("before 2025 its AdamW was foreach: --optim adamw_torch", False),
            ("tensor, context and pipeline parallelism", True),
        ),
    ),
    OtherTrainer(
        name="litgpt",
        title="LitGPT",
        sources=(
            "litgpt litgpt/pretrain.py @0363060b9b, utils.py @01db2ec348 (chunked_cross_entropy, "
            "get_default_supported_precision), finetune/full.py @0077627db0; lightning "
            "fabric/plugins/precision/fsdp.py @03f57f9c19",
        ),
        # precision bf16-mixed: fp32 weights, autocast; AdamW is fused in pretrain.py
        flags=(("numerics", "stock"), ("optim", "adamw_torch_fused"), *_HF_KERNELS),
        strategies=("fsdp_full_shard", "fsdp_hybrid_shard"),
        runs_under=("is_single", "is_fsdp"),
        # `logits` are fp32 (Fabric casts the output) and live until the next assignment: 4. Before it, the
        # new ones are made of bf16 ones: 2 + 4. Backward: gradients of chunks 4, joined 4
        loss=LossBytes(forward=6, backward=8, alive=4),
        # auto_wrap_policy={Block}, so the root is a unit of the rest; lightning's FSDPStrategy leaves
        # backward_prefetch at FSDP1's default, BACKWARD_PRE (strategies/fsdp.py)
        has_fsdp1=True,
        gathers_in_fp32=True,
        notes=(
            ("pretrain.py compiles the model: add --kernels compile", False),
            ("pretrain.py shards within a node: for several nodes --strategy fsdp_hybrid_shard", False),
            ("--precision bf16-true is --numerics pure_bf16", False),
        ),
    ),
)
"in the order of --help"
NAMES = tuple(trainer.name for trainer in TRAINERS)


def trainer_named(name: str | None) -> OtherTrainer | None:
    """Return the preset of one of NAMES; None for None."""
    return None if name is None else TRAINERS[NAMES.index(name)]


def as_liked(trainer: OtherTrainer | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given flags with the preset's values for others.

    A flag of the preset that the given flags exclude is left out. Raise ValueError for adapters, which only
    Hugging Face's Trainer trains as we do.
    """
    if trainer is None:
        return dict(given)
    peft = _values(given.get("peft", RunConfig.peft))
    if trainer.name != "trainer" and peft != ["none"]:
        raise ValueError(
            f"--like {trainer.name} with --peft {peft[-1]}: no closed form for adapters as {trainer.title} "
            "trains them\nhint: --like trainer"
        )
    first = {name: _values(value)[0] for name, value in given.items()}
    added: dict[str, Any] = {}
    for name, value in trainer.flags:
        before = len(RunConfig(**first, **added).problems())
        if name not in given and len(RunConfig(**first, **added, **{name: value}).problems()) <= before:
            added[name] = value
    in_lists = {name: [value] if FLAGS[name].grid else value for name, value in added.items()}
    return {**in_lists, **given}


def notes_like(trainer: OtherTrainer | None, given: Mapping[str, Any]) -> list[str]:
    """Return lines that name the preset, its source, what it set, and what it can't follow.

    `given`: the user's own flags.
    """
    if trainer is None:
        return []
    flags = as_liked(trainer, given)
    set_here = [
        name
        for name, value in trainer.flags
        if name in flags and name not in given and value != "plain"  # transformers' own kernels are not news
    ]
    words = " ".join(_as_typed(name, _values(flags[name])[0]) for name in set_here)
    won = [_as_typed(name, _values(given[name])[0]) for name, _ in trainer.flags if name in given]
    return [
        f"like {trainer.title}: {words or 'no flag is left to set'}"
        + (f"; yours instead of its own: {' '.join(won)}" if won else ""),
        *(f"like {trainer.title}, which no flag of ours does: {text}" for text in trainer.beyond_flags),
        *(
            f"not followed: {note}" if is_gap else f"{trainer.title}: {note}"
            for note, is_gap in trainer.notes
        ),
        f"read in {'; '.join(trainer.sources)}",
    ]


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _as_typed(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--{name} false"
    return f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
