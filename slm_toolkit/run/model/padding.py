"""--pad_widths: adds zeros to FFN and vocabulary, so that they have widths that a GPU multiplies fast.

A GPU multiplies fast if widths are multiples of 8 (`predict/speed/matmul.py`). The padded model computes the
same function: a hidden unit of the FFN with zero weights outputs zero, and a padded token has the logit -inf,
so the probability 0. The gradients of all padding are zero, so it stays zero.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from slm_toolkit.model.model_spec import ModelSpec, padded_spec
from slm_toolkit.run.kernels.layer_kernels import decoder_layers

_FFN = ("gate_proj", "up_proj", "down_proj")
_SHAPES, _VOCAB_SIZE = "shapes_without_padding", "vocab_size_without_padding"
"our own attributes of a model: the shapes of its padded parameters before padding, by name; its tokens"


def pad_widths(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Pad the FFN and the vocabulary of `model` to the widths of `padded_spec`, in place.

    `model.families.kernel_problems` names models that padding would change. Raises ValueError for an FFN of
    other modules than those that we know.
    """
    padded = padded_spec(spec)
    before = {name: param.shape for name, param in _all_parameters(model)}
    if padded.vocab_size != spec.vocab_size:
        _pad_vocabulary(model, padded.vocab_size)
    if padded.ffn_size != spec.ffn_size:
        for layer in decoder_layers(model):
            _pad_ffn(layer, padded.ffn_size - spec.ffn_size)
    widened = [name for name, param in _all_parameters(model) if param.shape != before[name]]
    setattr(model, _SHAPES, {name: before[name] for name in widened})
    setattr(model, _VOCAB_SIZE, spec.vocab_size)


def _all_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)  # a tied head, too


def _pad_vocabulary(model: PreTrainedModel, width: int) -> None:
    size = model.config.vocab_size
    with torch.random.fork_rng(devices=[]):  # transformers draws the new rows; later draws must not differ
        model.resize_token_embeddings(width, mean_resizing=False)
    head = model.get_output_embeddings()
    for module in (model.get_input_embeddings(), head):
        for param in module.parameters():
            param.data[size:] = 0
    head.vocab_size = size
    head.register_forward_hook(_hide_padding)


def _hide_padding(head: torch.nn.Module, args: tuple[Any, ...], logits: torch.Tensor) -> None:
    """Set the logits of padded tokens to -inf, in place; a forward hook on the head."""
    if (
        logits.dim() > 0
    ):  # otherwise the loss of a LossHead with labels, which has hidden the padding by itself
        logits[..., head.vocab_size :] = -torch.inf


def _pad_ffn(layer: torch.nn.Module, more: int) -> None:
    """Append zeros to the outputs of gate and up, and to the inputs of down."""
    inside = dict(layer.named_modules())
    if not all(f"mlp.{name}" in inside for name in _FFN):
        raise ValueError(
            f"--pad_widths: {type(layer).__name__} has no FFN of {', '.join(_FFN)}\n"
            "hint: leave --pad_widths out"
        )
    *into, down = (inside[f"mlp.{name}"] for name in _FFN)
    for linear in into:
        linear.out_features += more
        linear.weight = torch.nn.Parameter(functional.pad(linear.weight.data, (0, 0, 0, more)))
        if linear.bias is not None:
            linear.bias = torch.nn.Parameter(functional.pad(linear.bias.data, (0, more)))
    down.in_features += more
    down.weight = torch.nn.Parameter(functional.pad(down.weight.data, (0, more)))


def without_padding(
    model: PreTrainedModel, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each named tensor of the model's state in the shape that it has without padding."""
    shapes = getattr(model, _SHAPES, {})
    for name, tensor in tensors:
        if name in shapes:
            tensor = tensor[tuple(slice(size) for size in shapes[name])]
        yield name, tensor


@contextmanager
def config_without_padding(model: PreTrainedModel) -> Iterator[None]:
    """Give the model's configuration the vocabulary that it has without padding, to save it."""
    padded = model.config.vocab_size
    model.config.vocab_size = getattr(model, _VOCAB_SIZE, padded)
    try:
        yield
    finally:
        model.config.vocab_size = padded
