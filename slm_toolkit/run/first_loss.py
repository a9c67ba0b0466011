"""Compares the first micro-step's loss with that of plain kernels, which take over if it differs."""

from collections.abc import Iterator
from itertools import chain
from math import sqrt

import torch
from accelerate import Accelerator

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.numerics import ALIKE, ALIKE_IN_TASK, precision_of
from slm_toolkit.run.data.batches import model_inputs
from slm_toolkit.run.kernels.layer_kernels import FusedRMSNorm
from slm_toolkit.run.kernels.loss_kernels import LossHead
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.observe.probe import dropouts_of
from slm_toolkit.run.observe.progress import say

_ENOUGH_TOKENS = 1024
"of the runs that the limits of parity are for; the loss of fewer tokens has more noise"


class CheckedForward:
    """The model's forward, whose first loss must be that of plain kernels.

    Otherwise plain kernels compute all losses, from that one on. Nothing is compared under --kernels plain,
    in a rehearsal, with dropout, and with flex_attention in compiled layers, which has no plain form.
    """

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        model: torch.nn.Module,
        loss_recorder: RecordedLoss,
    ) -> None:
        self._config, self._accelerator, self._model = config, accelerator, model
        self._loss_recorder = loss_recorder
        self._plain_loss: torch.Tensor | None = None
        "of the first micro-step, until that has been computed"
        self.replaced: str | None = None
        "the sentence that says why plain kernels replaced those asked for"

    def after_plain(self, batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
        """Compute the first batch's loss by plain kernels. Return the batches, none of them used up."""
        config = self._config
        has_no_plain_form = config.compiles and config.attn_implementation == "flex_attention"
        is_compared = config.kernel_parts and config.rehearse is None and not has_no_plain_form
        if not is_compared or any(dropouts_of(self._model)):
            return batches
        batch = next(batches)
        self._use_plain(True)
        with torch.no_grad():
            self._model(**model_inputs(batch, config))
        self._use_plain(False)
        self._plain_loss = self._loss_recorder.last.clone()
        return chain([batch], batches)

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of this rank's micro-batch."""
        loss = self._model(**inputs).loss
        if self._plain_loss is None:
            return loss
        found, plain, self._plain_loss = self._loss_recorder.last, self._plain_loss, None
        limits = (ALIKE_IN_TASK if self._config.parity else ALIKE)[precision_of(vars(self._config))]
        allowed = limits.loss * sqrt(max(1.0, _ENOUGH_TOKENS / inputs["labels"].numel()))
        is_other = ~torch.isclose(found, plain, rtol=0, atol=allowed, equal_nan=True)
        if not self._accelerator.gather(is_other.reshape(1)).any():
            return loss
        self.replaced = (
            f"--kernels {self._config.kernels} computed the loss {found:.5f} in the first micro-step, plain "
            f"kernels {plain:.5f}, so this run was trained with plain kernels"
        )
        say(f"WARNING: {self.replaced}")
        self._use_plain(True)
        self._loss_recorder.num_tokens -= inputs["labels"].numel()  # counted again
        return self._model(**inputs).loss

    def _use_plain(self, is_plain: bool) -> None:
        if self._config.compiles:
            torch.compiler.set_stance("force_eager" if is_plain else "default")
        for module in self._model.modules():
            if isinstance(module, FusedRMSNorm | LossHead):
                module.is_plain = is_plain
