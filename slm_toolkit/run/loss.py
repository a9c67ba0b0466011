"""The fp32 loss of each micro-step, kept before an engine's output cast rounds it."""

from typing import Any

import torch
from transformers import PreTrainedModel

from slm_toolkit.run.loss_kernels import LossHead


class RecordedLoss:
    """The model's loss function, which also keeps its last value.

    FSDP2's mixed precision hands a bf16 copy of whatever the model returns back to the script, the loss
    included, so the value to report is taken where it is computed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.function = model.loss_function
        self.head = model.get_output_embeddings()
        self.last: torch.Tensor | None = None
        self.num_tokens = 0
        "trained on so far, counted where the loss is computed"
        model.loss_function = self

    def __call__(self, **arguments: Any) -> torch.Tensor:
        loss = self.function(**arguments)
        if torch.is_grad_enabled():
            self.num_tokens += arguments["labels"].numel()
        self.last = self.head.last_loss if isinstance(self.head, LossHead) else loss.detach()
        return loss
