"""Keeps each micro-step's fp32 loss, before the engine casts the model's output to bf16."""

from typing import Any

import torch
from transformers import PreTrainedModel

from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX, LossHead, token_losses


class RecordedLoss:
    """The model's loss function, which also keeps its last value.

    FSDP2's mixed precision casts all outputs of the model to bf16, including the loss. The reported loss is
    therefore kept where it is computed.
    """

    def __init__(self, model: PreTrainedModel, *, of_tokens: bool = False) -> None:
        """`of_tokens`: also keep each token's loss."""
        self.function = model.loss_function
        self.head = model.get_output_embeddings()
        self.of_tokens = of_tokens
        self.limit: float | None = None
        "a loss above this limit makes the gradients NaN, and every engine then skips the step"
        self.last: torch.Tensor | None = None
        self.last_of_tokens: torch.Tensor | None = None
        "[sequences, tokens]; each loss is at the position of the token before the predicted token"
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

    def expect(self, tokens: torch.Tensor) -> None:
        """Prepare for the tokens of the next micro-step. Call it before the forward pass."""
        if self.of_tokens and isinstance(self.head, LossHead):
            self.last_of_tokens = torch.empty(tokens.shape, device=tokens.device, dtype=torch.float32)
            self.head.token_losses = self.last_of_tokens.view(-1)

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **arguments: Any
    ) -> torch.Tensor:
        """Return the loss; Gemma passes these three by position, other models by name."""
        in_head = logits.dim() == 0  # computed by LossHead
        if self.of_tokens and not in_head and torch.is_grad_enabled():
            # before the loss, because a fused loss overwrites logits with their gradient
            self.last_of_tokens = token_losses(logits, labels)
        num_items = {} if self._num_items is None else {"num_items_in_batch": self._num_items}
        loss = self.function(logits=logits, labels=labels, vocab_size=vocab_size, **arguments, **num_items)
        if torch.is_grad_enabled():
            self.num_tokens += labels.numel()
        self.last = self.head.last_loss if in_head else loss.detach()
        if not torch.is_grad_enabled():
            return loss
        if self.limit is not None:
            mean = self.last
            if self._num_items is not None:
                mean = mean * self._num_items / (labels[:, 1:] != IGNORE_INDEX).sum().clamp(min=1)
            loss = loss * torch.where(mean > self.limit, torch.nan, 1.0)
        return loss
