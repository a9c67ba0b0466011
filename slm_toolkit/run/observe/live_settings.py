"""Settings that decide what is learnt, read off the live model and optimizer as one line each."""

from collections.abc import Iterable
from typing import Any

import torch

_MOST_NAMES = 3
"in one line: a frozen model has hundreds"


def model_settings(module: torch.nn.Module) -> dict[str, str]:
    """Fields of `numerics.Numerics`: dropout, rope, norm_eps, tied and frozen, the same on every rank.

    `module`: transformers' own, without the engine's wrappers.
    """
    dropouts = [part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)]
    # of attention's weights: kernels such as flash-attn's drop them inside
    dropouts += [getattr(part, "attention_dropout", 0.0) for part in module.modules()]
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    return {
        "dropout": _several(f"{p:g}" for p in dropouts if p) or "none",
        "rope": _several(map(_frequencies, _buffers(module, "inv_freq"))),
        "norm_eps": _several(f"{eps:g}" for part in module.modules() if (eps := _eps_of(part)) is not None),
        "tied": "tied" if head.weight is embedding.weight else "untied",
        "frozen": named(frozen),
    }


def optimizer_settings(optimizer: Any, engine: Any) -> str:
    """Each group's elements, learning rate, betas, eps and weight decay, as the next step reads them.

    engine: DeepSpeed's; None under any other.
    """
    groups = optimizer.param_groups if engine is None else engine.optimizer.param_groups
    sizes = _group_sizes(optimizer, engine)
    lines = []
    for index, group in enumerate(groups):
        size = f"{sizes[index]} elements, " if index < len(sizes) and sizes[index] else ""
        betas = " ".join(f"{beta:g}" for beta in group["betas"])
        rates = f"lr {group['lr']:.6g}, betas {betas}, eps {group['eps']:g}"
        lines.append(f"{size}{rates}, decay {group['weight_decay']:g}")
    return "; ".join(lines)


def without_gradient(norms: dict[str, float | None]) -> str:
    """Names the trained parameters without a gradient, which step 1 could not move."""
    return named([name for name, norm in norms.items() if not norm])


def named(names: list[str]) -> str:
    """`none`, or the number of names and the first of them."""
    if not names:
        return "none"
    return f"{len(names)}: {', '.join(names[:_MOST_NAMES])}" + (", ..." if len(names) > _MOST_NAMES else "")


def _group_sizes(optimizer: Any, engine: Any) -> list[int]:
    """Elements of each group over all ranks; empty where the engine does not expose them."""
    if engine is None:
        return [sum(param.numel() for param in group["params"]) for group in optimizer.param_groups]
    zero = engine.optimizer
    if hasattr(zero, "bit16_groups"):
        return [sum(param.numel() for param in group) for group in zero.bit16_groups]
    sizes: dict[int, int] = {}
    for index, group in enumerate(getattr(zero, "fp16_groups", ())):
        of = zero.sub_group_to_group_id[index]
        sizes[of] = sizes.get(of, 0) + sum(param.ds_numel for param in group)
    return [sizes[index] for index in sorted(sizes)]


def _buffers(module: torch.nn.Module, name: str) -> list[torch.Tensor]:
    return [buffer for path, buffer in module.named_buffers() if path.rpartition(".")[2] == name]


def _frequencies(buffer: torch.Tensor) -> str:
    dtype = str(buffer.dtype).removeprefix("torch.")
    return (
        f"{dtype} {buffer[0].item():.6g} to {buffer[-1].item():.6g}, sum {buffer.double().sum().item():.6g}"
    )


def _eps_of(part: torch.nn.Module) -> float | None:
    if "norm" not in type(part).__name__.lower():
        return None
    eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    return float(eps) if isinstance(eps, float) else None


def _several(values: Iterable[str]) -> str | None:
    return " and ".join(dict.fromkeys(values)) or None
