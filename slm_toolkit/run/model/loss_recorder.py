"""Keeps the fp32 loss of each micro-step before an engine's output cast rounds it."""

from typing import Any

import torch
from transformers import PreTrainedModel

from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX, LossHead, token_losses


class RecordedLoss:
    """The model's loss function, which also keeps its last value.

    FSDP2's mixed precision casts everything that the model returns to bf16, the loss included, so the value
    to report is taken where it is computed.
    """

    def __init__(self, model: PreTrainedModel, *, of_tokens: bool = False) -> None:
        """`of_tokens`: keep each token's loss, too."""
        self.function = model.loss_function
        self.head = model.get_output_embeddings()
        self.of_tokens = of_tokens
        self.limit: float | None = None
        "a larger loss makes its gradients NaN; every engine then leaves the step out"
        self.last: torch.Tensor | None = None
        self.last_of_tokens: torch.Tensor | None = None
        "[sequences, tokens]; each loss is at the place of the token before the predicted one"
        self.num_tokens = 0
        "trained on so far, counted where the loss is computed"
        self._num_items: torch.Tensor | None = None
        model.loss_function = self

    def divide_by(self, num_items: torch.Tensor | None) -> None:
        """Divide the sum over the next micro-steps' tokens by `num_items`; None: by their number of labels.

        If ranks and micro-steps have different numbers of labels, a mean of their means would weigh tokens
        differently.
        """
        self._num_items = num_items
        if isinstance(self.head, LossHead):
            self.head.num_items = num_items

    def expect(self, tokens: torch.Tensor) -> None:
        """Prepare for the tokens of the next micro-step. Call it before the forward."""
        if self.of_tokens and isinstance(self.head, LossHead):
            self.last_of_tokens = torch.empty(tokens.shape, device=tokens.device, dtype=torch.float32)
            self.head.token_losses = self.last_of_tokens.view(-1)

    def __call__(self, **arguments: Any) -> torch.Tensor:
        in_head = isinstance(self.head, LossHead)
        if self.of_tokens and not in_head and torch.is_grad_enabled():
            # first: a fused loss turns logits into their gradient
            self.last_of_tokens = token_losses(arguments["logits"], arguments["labels"])
        num_items = {} if self._num_items is None else {"num_items_in_batch": self._num_items}
        loss = self.function(**arguments, **num_items)
        if torch.is_grad_enabled():
            self.num_tokens += arguments["labels"].numel()
        self.last = self.head.last_loss if in_head else loss.detach()
        if self.limit is not None and torch.is_grad_enabled():
            mean = self.last
            if self._num_items is not None:
                own = (arguments["labels"][:, 1:] != IGNORE_INDEX).sum().clamp(min=1)
                mean = mean * self._num_items / own
            loss = loss * torch.where(mean > self.limit, torch.nan, 1.0)
        return loss
