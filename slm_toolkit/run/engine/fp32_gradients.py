"""Fp32Gradients: the gradients of bf16 weights, summed and reduced in fp32, under DDP or in one process."""

import torch
from torch.nn.parallel import DistributedDataParallel

_SUM = "fp32_grad"
"our own attribute of a parameter"


class Fp32Gradients:
    """The fp32 sum of each trained parameter's gradients, whole on every rank.

    A hook adds a bf16 gradient to its sum as soon as backward has computed it, and frees it. DDP then finds
    no gradients: a full bucket only means that the sums of its parameters can be reduced, as in nanotron
    (src/nanotron/optim/gradient_accumulator.py, get_fp32_accum_hook).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._works: list[torch.distributed.Work] = []
        for param in self._params:
            param.register_post_accumulate_grad_hook(_add_and_free)
        if isinstance(model, DistributedDataParallel):
            self._group = model.process_group
            model.register_comm_hook(self, _reduce_sums)

    def reduce(self, params: list[torch.Tensor]) -> None:
        """Average the sums of `params` over all ranks. Each sum is sent by itself, so nothing is copied."""
        for param in params:
            total = param.fp32_grad.div_(self._group.size())
            self._works.append(torch.distributed.all_reduce(total, group=self._group, async_op=True))

    def finish(self) -> None:
        """Wait for the reduction, and free the empty gradients that DDP leaves; call it after backward."""
        for work in self._works:
            work.wait()
        self._works.clear()
        for param in self._params:
            param.grad = None

    def zero(self, *, keep: bool) -> None:
        """Set the sums to zero, or free them unless `keep`."""
        for param in self._params:
            if keep and hasattr(param, _SUM):
                param.fp32_grad.zero_()
            elif hasattr(param, _SUM):
                del param.fp32_grad


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that the optimizer reads: the fp32 sum, or else `param.grad`."""
    return getattr(param, _SUM, param.grad)


def _add_and_free(param: torch.Tensor) -> None:
    if hasattr(param, _SUM):
        param.fp32_grad.add_(param.grad)
    else:
        param.fp32_grad = param.grad.float()
    param.grad = None


def _reduce_sums(
    sums: Fp32Gradients, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Reduce the sums of a bucket's parameters; a DDP communication hook.

    Backward does not wait for the sums: `finish` does.
    """
    sums.reduce(bucket.parameters())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
