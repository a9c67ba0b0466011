"""Activation checkpointing: backward recomputes some decoder layers, or some operators in them."""

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

# torchtitan's policy: https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/activation_checkpoint.py
_MATMULS = ("aten::mm", "aten::addmm", "aten::linear")  # a linear layer: without bias, with, or whole
_ALWAYS_SAVED = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "flash_attn::_flash_attn_forward",
    "flex_attention",
    "_c10d_functional::reduce_scatter_tensor",
)


def enable_checkpointing(model: PreTrainedModel, mode: str, *, compiled: bool) -> None:
    """Let backward recompute activations, as `--gradient_checkpointing` says.

    full: everything in every decoder layer but its input. selective_layer: everything in every second layer,
    the second, the fourth, ... as torchtitan counts. selective_op: in every layer everything but its input
    and the results of attention and of every second matrix product: query, value, gate and down are saved;
    key, output and up are recomputed. (Backward does not need down's result; torchtitan saves it, too.)
    """
    if mode == "none":
        return
    contexts = _contexts_for_compiler if compiled else _contexts
    options = {"context_fn": contexts} if mode == "selective_op" else {}
    for number, layer in enumerate(model.model.layers, start=1):
        if mode != "selective_layer" or number % 2 == 0:
            layer.forward = _checkpointed(layer.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A layer's forward that backward recomputes, inside of torch.compile's and the engine's hooks.

    transformers 5.17 puts its own checkpoint outside of them, where compiled layers can't choose operators
    ("Tensor cached during selective activation checkpoint has been mutated"). This is a function, since
    torch.compile does not look into a partial of `checkpoint`.
    """

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    return checkpointed


def _contexts() -> tuple["_Save", "_Replay"]:
    """Two contexts, for a layer's forward and for its recomputation.

    PyTorch's own pair requires the same operators in both. Under ZeRO-3 a layer's forward also gathers
    parameters, more in one than in the other, and PyTorch's pair fails.
    """
    results: deque[Any] = deque()
    return _Save(results), _Replay(results)


def _contexts_for_compiler() -> tuple[Any, Any]:
    """PyTorch's own pair, the only one from which torch.compile learns what to save."""
    # by whether it is the recomputation, for which torch 2.13 does not call the policy
    is_saved = {False: _policy(), True: _policy()}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = is_saved[context.is_recompute](op)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _policy() -> Callable[[Any], bool]:
    """A function that decides whether to save an operator's result; call it for all operators in order."""
    num_matmuls = 0

    def is_saved(op: Any) -> bool:
        nonlocal num_matmuls
        name = op.name().partition(".")[0]  # without its overload
        if name in _MATMULS:
            num_matmuls += 1
            return num_matmuls % 2 == 1
        return name in _ALWAYS_SAVED

    return is_saved


class _Save(TorchDispatchMode):
    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self.results, self.is_saved = results, _policy()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = op.name().partition(".")[0].endswith("_") and isinstance(args[0], torch.Tensor)
        if changes:  # in place, as DeepSpeed's linear layer adds its bias
            self._keep(args[0])
        result = op(*args, **(kwargs or {}))
        if self.is_saved(op):  # detached, since the tensor itself is about to join autograd's graph
            self.results.append(tree_map_only(torch.Tensor, torch.Tensor.detach, result))
        return result

    def _keep(self, changing: torch.Tensor) -> None:
        """Replace a saved result that is about to change by a copy."""
        memory = changing.untyped_storage()._cdata

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.untyped_storage()._cdata == memory else tensor

        for number, result in enumerate(self.results):
            self.results[number] = tree_map_only(torch.Tensor, kept, result)


class _Replay(TorchDispatchMode):
    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self.results, self.is_saved = results, _policy()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.results.popleft() if self.is_saved(op) else op(*args, **(kwargs or {}))
