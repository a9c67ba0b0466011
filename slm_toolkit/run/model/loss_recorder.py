"""Keeps each micro-step's fp32 loss, before the engine casts the model's output to bf16."""

from typing import Any

import torch
from transformers import PreTrainedModel

from slm_toolkit.run.kernels.loss_kernels import LossHead


class RecordedLoss:
    """The model's loss function, which also keeps its last value.

    FSDP2's mixed precision casts all outputs of the model to bf16, including the loss. The reported loss is
    therefore kept where it is computed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.function = model.loss_function
        self.head = model.get_output_embeddings()
        self.last: torch.Tensor | None = None
        self.num_tokens = 0
        "tokens trained on so far, counted where the loss is computed"
        self._num_items: torch.Tensor | None = None
        model.loss_function = self

    def divide_by(self, num_items: torch.Tensor | None) -> None:
        """Divide the loss sum of each following micro-step by `num_items`; None: by its number of labels.

        If the number of labels differs between ranks or micro-steps, the mean of their means would give
        tokens unequal weights.
        """
        self._num_items = num_items
        if isinstance(self.head, LossHead):
            self.head.num_items = num_items

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **arguments: Any
    ) -> torch.Tensor:
        """Return the loss; Gemma passes these three by position, other models by name."""
        in_head = logits.dim() == 0  # computed by LossHead
        num_items = {} if self._num_items is None else {"num_items_in_batch": self._num_items}
        loss = self.function(logits=logits, labels=labels, vocab_size=vocab_size, **arguments, **num_items)
        if torch.is_grad_enabled():
            self.num_tokens += labels.numel()
        self.last = self.head.last_loss if in_head else loss.detach()
        return loss
