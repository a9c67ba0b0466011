"""Probe a training step: read dtypes, kernels, clipping and batches off live objects, not off settings."""

import dataclasses
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from slm_toolkit.record.numerics import ROUNDED, Numerics, Settings, merged
from slm_toolkit.run.engine.muon import MUON
from slm_toolkit.run.engine.optimizer import ADAMW_KERNEL, AdamWWithMasterWeights, local_part
from slm_toolkit.run.observe.measure import (
    READING_GRADIENTS,
    GradientCounter,
    deepspeed_engine,
    num_trainable,
    training_state,
)
from slm_toolkit.run.peers.step_exchange import gather_to_all

_ATTENTION_KERNELS = (  # (the profiler's name of an operator, our name of the kernel); the first match counts
    (r"flash_attn(_3|_2)?::|FlashAttn\w*Func", "flash_attn"),
    (r"aten::_scaled_dot_product_flash_attention", "sdpa flash"),
    (r"aten::_scaled_dot_product_efficient_attention", "sdpa memory-efficient"),
    (r"aten::_scaled_dot_product_cudnn_attention", "sdpa cudnn"),
    (r"aten::_scaled_dot_product_attention_math", "sdpa math"),
    (r"flex_attention", "flex_attention"),
    (r"aten::_softmax$", "eager"),
)
_OPTIMIZER_KERNELS = (
    (MUON, "muon"),  # with fused AdamW for the other parameters
    (ADAMW_KERNEL, "fused"),  # the same arithmetic
    (r"aten::_fused_adamw?_", "fused"),
    (r"aten::_foreach_addcdiv_", "foreach"),
    (r"aten::addcdiv_", "for-loop"),
)
_SOME_ELEMENTS = 1000
"elements that are examined in each tensor"
_FEWEST_ELEMENTS = 16
"nonzero elements that are needed, because fewer may be round numbers by chance"
_FLOAT8_OPERATORS = ("aten::_scaled_mm", "aten::_to_copy")
# gloo:all_reduce, nccl:_reduce_scatter_base, ...: the backend records these names when it sends the data.
# All-to-alls exchange heads or Muon's updates; ZeRO++ reduces by them, but in dtypes that are not looked for.
_REDUCTION = re.compile(r"\w+:(_?reduce|_?all_?reduce|_?reduce_scatter)\w*")
_KINETO_DTYPES = {
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "float": "float32",
    "double": "float64",
}


Calls = dict[str, list[Any]]
"""the profiler's events by the operator's name: with shapes and dtypes of the arguments, and scalars, where
None stands for a tensor"""


class NumericsProbe:
    """Watch this rank's training steps inside a `with` block; `result` merges the numerics of all ranks.

    It hooks only the outermost module, the last norm and the head, because torch.compile and the engines wrap
    only the layers. Of a model without such a norm or head, less is seen.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.engine = deepspeed_engine(accelerator)
        self.seen: dict[str, set[Any]] = defaultdict(set)
        self.num_forwards = self.num_tokens = self.num_steps = 0
        self.batch_hash = hashlib.sha256()

    def __enter__(self) -> "NumericsProbe":
        module = self.accelerator.unwrap_model(self.model)
        head, norm = head_of(module), _last_norm(module)
        self.vocab_size = head.out_features if isinstance(head, torch.nn.Linear) else None
        self.hooks = [
            self.model.register_forward_hook(self._saw_forward, with_kwargs=True),
            register_optimizer_step_post_hook(self._saw_step),
        ]
        if norm is not None:
            self.hooks.append(norm.register_forward_pre_hook(self._saw_norm))
        if head is not None:
            self.hooks.append(head.register_forward_hook(self._saw_head))
        self.clip_grad_norm, torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_, self._saw_clip
        self.steps_before = self.engine.global_steps if self.engine is not None else 0
        self.profile = profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            acc_events=True,  # changes nothing for a single cycle, and silences torch 2.11's warning
        )
        self.profile.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.profile.stop()
        torch.nn.utils.clip_grad_norm_ = self.clip_grad_norm
        for hook in self.hooks:
            hook.remove()

    def result(self, gradients: GradientCounter) -> Numerics:
        """Return the merged numerics of all ranks. Every rank must call it."""
        calls = _calls(self.profile)
        state = training_state(self.accelerator, self.model, self.optimizer)
        num_steps = (
            self.engine.global_steps - self.steps_before if self.engine is not None else self.num_steps
        )
        attention, recomputed = _attention(calls)
        module = self.accelerator.unwrap_model(self.model)
        own_numerics = Numerics(
            parameter_dtype=_dtypes(self.model.parameters()),
            autocast=self._only("autocast"),
            compute_dtype=self._only("head")
            or (self.vocab_size and _product_dtype(calls, num_columns=self.vocab_size)),
            residual_dtype=self._only("residual"),
            logits_dtype=self._only("logits"),
            cross_entropy_dtype=_argument_dtype(calls["aten::cross_entropy_loss"])
            or _argument_dtype(calls["aten::exp_"])  # only `run/kernels/loss_kernels.py` calls it
            or self._only("loss of head"),  # a loss by torch.compile or Triton shows no operator
            loss_kernel=self._loss_kernel(calls),
            loss_dtype=self._only("loss"),
            gradient_dtype=_joined(gradients.dtypes),
            reduction_dtype=_reduction_dtype(calls, num_params=num_trainable(self.model))
            if self.accelerator.num_processes > 1
            else None,
            master_weight_dtype=_state_dtypes(
                state["master_weights"] or state["parameters"],
                # a warm-up from 0, or a step that overflows, leaves the masters as copies of 16-bit weights
                rounded=lambda fits: (
                    all(fits)
                    and any(group["lr"] for group in self.optimizer.param_groups)
                    and not gradients.overflowed
                ),
            ),
            optimizer_state_dtype=_state_dtypes(
                [tensor for tensor in state["optimizer"] if tensor.dim() > 0], rounded=any
            ),
            clipping=self._clipping(),
            accumulation=self.num_forwards // num_steps if num_steps else None,
            tokens_per_step=self.num_tokens // max(1, num_steps) or None,
            attention=attention,
            optimizer_kernel=self._optimizer_kernel(calls),
            compiled=any(name.startswith("Torch-Compiled Region") for name in calls),
            recomputed=recomputed,
            float8=_float8(calls),
            tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
            batch_hashes=[self.batch_hash.hexdigest()[:12]] if self.num_tokens else [],
            attention_call=_attention_call(calls),
            **model_settings(module),
            without_gradient=without_gradient(gradients.norms),
            optimizer_settings=optimizer_settings(self.optimizer, self.engine),
            optimizer_class=self._optimizer_class(),
        )
        return merged(gather_to_all(dataclasses.asdict(own_numerics)))

    def _only(self, kind: str) -> Any:
        """Return the only value seen of a kind; `a+b` for several dtypes; None if there was none."""
        values = self.seen[kind]
        return _joined(map(str, values)) if len(values) > 1 else next(iter(values), None)

    def _saw_forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.num_forwards += 1
        if (tokens := tokens_of(args, kwargs)) is not None:
            self.num_tokens += tokens.numel()
            self.batch_hash.update(tokens.cpu().numpy().tobytes())
        if isinstance(loss := getattr(output, "loss", None), torch.Tensor):
            self.seen["loss"].add(_name(loss.dtype))
        logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        # with the fused loss, the loss replaces the logits
        if isinstance(logits, torch.Tensor) and logits.dim() > 0:
            self.seen["logits"].add(_name(logits.dtype))

    def _saw_norm(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args:  # some models pass it by name
            self.seen["residual"].add(_name(args[0].dtype))
        device_type = next(self.model.parameters()).device.type
        self.seen["autocast"].add(torch.is_autocast_enabled(device_type))

    def _saw_head(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(output, torch.Tensor):
            self.seen["head" if output.dim() > 0 else "loss of head"].add(_name(output.dtype))

    def _saw_step(self, *arguments: Any) -> None:
        self.num_steps += 1

    def _saw_clip(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        # with an infinite threshold, the call only measures the norm
        self.seen["clip"].add(0.0 if max_norm == float("inf") else float(max_norm))
        return self.clip_grad_norm(parameters, max_norm, *args, **kwargs)

    def _loss_kernel(self, calls: Calls) -> str:
        """Return the loss that ran: hf, fused_linear, or "own" of a script's own."""
        if calls["aten::cross_entropy_loss"]:
            return "hf"
        return "own" if self.seen["logits"] else "fused_linear"

    def _clipping(self) -> float | None:
        """Return the clipping threshold that the optimizer's step reads."""
        if self.engine is not None:
            threshold = getattr(self.engine.optimizer, "clip_grad", None)
            return None if threshold is None else float(threshold)
        inner = self.optimizer.optimizer
        return float(inner.max_grad_norm) if isinstance(inner, AdamWWithMasterWeights) else self._only("clip")

    def _optimizer_kernel(self, calls: Calls) -> str | None:
        """Return the optimizer's kernel; of DeepSpeed's CPU Adam, which is no torch operator, the class."""
        inner = type(getattr(self.engine.optimizer, "optimizer", None)).__name__ if self.engine else ""
        return inner if inner == "DeepSpeedCPUAdam" else _first_match(calls, _OPTIMIZER_KERNELS)[0]

    def _optimizer_class(self) -> str:
        if self.engine is None:
            return type(self.optimizer.optimizer).__name__
        zero = self.engine.optimizer
        return f"{type(zero).__name__} over {type(getattr(zero, 'optimizer', zero)).__name__}"


def tokens_of(args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the token ids among the arguments of a model's forward; None if there are none."""
    if isinstance(tokens := kwargs.get("input_ids"), torch.Tensor):
        return tokens
    first = args[0] if args else None
    is_ids = (
        isinstance(first, torch.Tensor) and first.dtype in (torch.int32, torch.int64) and first.dim() == 2
    )
    return first if is_ids else None


def head_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that makes logits, by transformers' interface; None for other models."""
    find = getattr(module, "get_output_embeddings", None)
    return None if find is None else find()


def _last_norm(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the norm between the last decoder layer and the head; None for a model without norms."""
    base = getattr(module, "base_model", module)
    norms = [part for part in base.modules() if "norm" in type(part).__name__.lower()]
    return norms[-1] if norms else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(names: Iterable[str]) -> str | None:
    return "+".join(sorted(set(names))) or None


def _dtypes(tensors: Any) -> str | None:
    return _joined(_name(tensor.dtype) for tensor in tensors)


def _state_dtypes(tensors: list[torch.Tensor], *, rounded: Callable[[list[bool]], bool]) -> str | None:
    """Return the dtypes of `tensors`, marked as rounded if the values in fp32 tensors fit in 16 bits.

    rounded: `all` if every tensor must fit, `any` if one is enough. Zeros don't count, because parameters
    without a gradient have zeros.
    """
    in_fp32 = [local_part(tensor).detach().flatten() for tensor in tensors if tensor.dtype == torch.float32]
    samples = [part[part != 0] for part in (whole[:_SOME_ELEMENTS] for whole in in_fp32)]
    samples = [part for part in samples if part.numel() >= _FEWEST_ELEMENTS]
    for dtype in (torch.bfloat16, torch.float16):
        fits = [bool((part == part.to(dtype)).all()) for part in samples]
        if fits and rounded(fits):
            return f"{_dtypes(tensors)}{ROUNDED}{_name(dtype)}"
    return _dtypes(tensors)


def _calls(profiled: profile) -> Calls:
    """Return all events except those with which the probe reads the gradients."""
    events = profiled.profiler.kineto_results.events()  # private: the public events have no dtypes
    reading = [(event.start_ns(), event.end_ns()) for event in events if event.name() == READING_GRADIENTS]
    calls = defaultdict(list)
    for event in events:
        if not any(start <= event.start_ns() <= end for start, end in reading):
            calls[event.name()].append(event)
    return calls


def _first_match(calls: Calls, table: tuple[tuple[str, str], ...]) -> tuple[str | None, list[str]]:
    """Return the first kernel of `table` that ran, and the names of its operators."""
    for pattern, kernel in table:
        if names := [name for name in calls if calls[name] and re.match(pattern, name)]:
            return kernel, names
    return None, []


def _attention(calls: Calls) -> tuple[str | None, bool | None]:
    """Return the kernel that ran, and True if it was recomputed: more forwards ran than backwards.

    (None, None) if torch.compile fused attention into a kernel of its own.
    """
    kernel, names = _first_match(calls, _ATTENTION_KERNELS)
    backward = [name for name in names if "backward" in name.lower()]
    if kernel == "eager":  # the backward of aten::_softmax has another name
        backward = ["aten::_softmax_backward_data"]
    if not backward:
        return kernel, None
    forward = next(name for name in names if name not in backward)  # wrappers repeat each call
    return kernel, len(calls[forward]) > len(calls[backward[0]])


def _attention_call(calls: Calls) -> list[Settings] | None:
    """Return how SDPA was called. Its arguments: query, key, value, mask, dropout, is_causal, scale."""
    found = []
    for call in calls["aten::scaled_dot_product_attention"]:
        query, _, _, mask_shape, *_ = call.shapes()
        _, _, _, _, dropout, is_causal, scale, *_ = call.concrete_inputs()
        mask = "given" if mask_shape else "causal" if is_causal else "none"
        scale = rounded(scale or query[-1] ** -0.5)  # None: SDPA's default
        found.append({"mask": mask, "dropout": dropout, "scale": scale})
    return _distinct(found)


def _distinct(settings: Iterable[Settings]) -> list[Settings] | None:
    found: list[Settings] = []
    for one in settings:
        found += [] if one in found else [one]
    return found or None


def _argument_dtype(calls: list[Any]) -> str | None:
    """Return the dtypes of the first arguments."""
    return _joined(_KINETO_DTYPES.get(call.dtypes()[0], call.dtypes()[0]) for call in calls)


def _float8(calls: Calls) -> str | None:
    """Return the float8 dtypes in a GPU's scaled matrix products, or in the casts that emulate them."""
    of_products = (dtype for name in _FLOAT8_OPERATORS for call in calls[name] for dtype in call.dtypes()[:2])
    return _joined(name.lower()[5:] for name in of_products if name.startswith("c10::Float8"))


def _product_dtype(calls: Calls, *, num_columns: int) -> str | None:
    """Return the dtype of the matrix products whose result has `num_columns` columns."""
    return _argument_dtype([call for call in calls["aten::mm"] if call.shapes()[1][1:] == [num_columns]])


def _reduction_dtype(calls: Calls, *, num_params: int) -> str | None:
    """Return the dtypes in which collectives reduced gradients; None if they reduced less than half of them.

    A dtype with less than 1% of the elements does not count: norms, flags and losses are reduced, too, but
    they are a few elements among millions.
    """
    elements: Counter[str] = Counter()
    for call in (call for name in calls if _REDUCTION.match(name) for call in calls[name]):
        for shape, dtype in zip(call.shapes(), call.dtypes(), strict=True):
            if dtype in _KINETO_DTYPES:
                elements[_KINETO_DTYPES[dtype]] += math.prod(shape)
    total = elements.total()
    if total < num_params / 2:
        return None
    return _joined(dtype for dtype, count in elements.items() if count > 0.01 * total)


# Read the settings that decide what a model learns off the live model and optimizer, as one line each.

_MOST_NAMES = 3
"names in one line, because a frozen model has hundreds"


def dropouts_of(module: torch.nn.Module) -> list[float]:
    """Return p of each dropout: those of attention weights have no module, kernels do them inside."""
    parts = list(module.modules())
    of_modules = [part.p for part in parts if isinstance(part, torch.nn.Dropout)]
    return of_modules + [getattr(part, "attention_dropout", 0.0) for part in parts]


def model_settings(module: torch.nn.Module) -> dict[str, Any]:
    """Return fields of `numerics.Numerics`: dropout, rope, norm_eps, tied and frozen, the same on every rank.

    `module`: the model, without the engine's wrappers.
    """
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    head = head_of(module)
    embedding = None if head is None else module.get_input_embeddings()
    return {
        "dropout": _several(f"{p:g}" for p in dropouts_of(module) if p) or "none",
        "rope": _distinct(
            {
                "dtype": _name(part.dtype),
                "first": rounded(part[0]),
                "last": rounded(part[-1]),
                "sum": rounded(part.double().sum()),
            }
            for path, part in module.named_buffers()
            if path.rpartition(".")[2] == "inv_freq"
        ),
        "norm_eps": _several(f"{eps:g}" for part in module.modules() if (eps := _eps_of(part)) is not None),
        "tied": None if head is None else "tied" if head.weight is embedding.weight else "untied",
        "frozen": named(frozen),
    }


def optimizer_settings(optimizer: Any, engine: Any) -> list[Settings]:
    """Return each group's elements, lr, betas, eps and weight decay as the next step reads them.

    engine: DeepSpeed's; None under any other.
    """
    groups = optimizer.param_groups if engine is None else engine.optimizer.param_groups
    sizes = _group_sizes(optimizer, engine)
    settings: list[Settings] = []
    for index, group in enumerate(groups):
        betas = zip(("beta1", "beta2"), group.get("betas", ()), strict=False)
        own = {"lr": group["lr"], **dict(betas), **{name: group[name] for name in _OF_GROUP if name in group}}
        if "momentum" in own and "beta1" in own:  # Muon's group has AdamW's defaults, and ignores them
            del own["beta1"], own["beta2"], own["eps"]
        size = {"elements": sizes[index]} if index < len(sizes) and sizes[index] else {}
        settings.append(size | {name: rounded(value) for name, value in own.items()})
    return settings


_OF_GROUP = ("momentum", "eps", "weight_decay")


def rounded(value: Any) -> Any:
    """Return a setting with six digits, so that rounding is no difference; None if it is no number."""
    if isinstance(value, tuple | list):
        return [*map(rounded, value)]
    with suppress(TypeError, ValueError):
        return float(f"{float(value):.6g}")
    return None


def without_gradient(norms: dict[str, float | None]) -> str:
    """Name the trained parameters without a gradient, which step 1 did not change."""
    return named([name for name, norm in norms.items() if not norm])


def named(names: list[str]) -> str:
    """Return `none`, or the number of names and the first names."""
    if not names:
        return "none"
    return f"{len(names)}: {', '.join(names[:_MOST_NAMES])}" + (", ..." if len(names) > _MOST_NAMES else "")


def _group_sizes(optimizer: Any, engine: Any) -> list[int]:
    """Return each group's number of elements over all ranks; empty if the engine does not expose them."""
    if engine is None:
        return [sum(param.numel() for param in group["params"]) for group in optimizer.param_groups]
    zero = engine.optimizer
    is_zero_3 = hasattr(zero, "sub_group_to_group_id")
    # of stages 1 and 2; of stage 1 with fp32 gradients; of stage 0
    for name in () if is_zero_3 else ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(zero, name):
            return [sum(param.numel() for param in group) for group in getattr(zero, name)]
    sizes: dict[int, int] = {}
    for index, group in enumerate(zero.fp16_groups if is_zero_3 else ()):
        group_id = zero.sub_group_to_group_id[index]
        sizes[group_id] = sizes.get(group_id, 0) + sum(param.ds_numel for param in group)
    return [sizes[index] for index in sorted(sizes)]


def _eps_of(part: torch.nn.Module) -> float | None:
    if "norm" not in type(part).__name__.lower():
        return None
    eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    return float(eps) if isinstance(eps, float) else None


def _several(values: Iterable[str]) -> str | None:
    return " and ".join(dict.fromkeys(values)) or None
