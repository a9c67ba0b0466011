"""AdamW over master weights of a bf16 module, as DeepSpeed has it, for DDP, FSDP2 and one process."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


class AdamWWithMasterWeights(torch.optim.AdamW):
    """AdamW that updates a copy of each parameter in `master_dtype`, or the parameter itself if it is that.

    The state of a bf16 parameter under fp32 masters holds `master`, `exp_avg` and `exp_avg_sq` (fp32, its
    shape; shards of a DTensor) and `step`: 12 bytes per parameter, as DeepSpeed's ZeRO holds them.
    """

    def __init__(
        self,
        params: Any,
        *,
        max_grad_norm: float,
        master_dtype: torch.dtype = torch.float32,
        holds_flat_shards: bool = False,
        **options: Any,
    ) -> None:
        """`max_grad_norm` 0 means no clipping; `options` are AdamW's.

        holds_flat_shards: parameters are plain tensors that hold this rank's share, as FSDP1's are.
        """
        super().__init__(params, **options)
        self.master_dtype = master_dtype
        self.max_grad_norm = max_grad_norm
        self.holds_flat_shards = holds_flat_shards
        self.grad_norm: torch.Tensor | None = None
        "of all gradients before clipping, fp32, set by each step"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clip in fp32, where DeepSpeed clips too (a norm of bf16 gradients would have 8 bits), then update.

        All on this rank's own shards: as DTensors, each operation would cost the host ten times as much.
        """
        assert closure is None
        gradients = [
            param.grad for group in self.param_groups for param in group["params"] if param.grad is not None
        ]
        self.grad_norm = _global_norm(gradients, holds_flat_shards=self.holds_flat_shards)
        clip = (
            (self.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm > 0 else None
        )
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for chunk in _chunks(params):
                self._update(group, chunk, clip)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts floating-point state to the parameter's dtype; this puts the fp32 values back."""
        saved_ids = [param_id for group in state_dict["param_groups"] for param_id in group["params"]]
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for param, param_id in zip(params, saved_ids, strict=True):
            for key, value in state_dict["state"].get(param_id, {}).items():
                if key in ("master", "exp_avg", "exp_avg_sq"):
                    self.state[param][key] = value.to(device=param.device, copy=True)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], clip: torch.Tensor | None) -> None:
        """One step of AdamW on the masters of some parameters of a group, then the parameters follow."""
        states = [self._state_of(param, fused=bool(group["fused"])) for param in params]
        gradients = [_local(param.grad).to(self.master_dtype) for param in params]
        if clip is not None:
            torch._foreach_mul_(gradients, clip)
        masters = [_local(state.get("master", param)) for state, param in zip(states, params, strict=True)]
        beta1, beta2 = group["betas"]
        adamw(
            masters,
            gradients,
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        followers = [index for index, state in enumerate(states) if "master" in state]
        if followers:
            torch._foreach_copy_(
                [_local(params[index]) for index in followers], [masters[index] for index in followers]
            )

    def _state_of(self, param: torch.Tensor, *, fused: bool) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            if param.dtype != self.master_dtype:
                state["master"] = param.detach().to(self.master_dtype)
            state["exp_avg"] = torch.zeros_like(param, dtype=self.master_dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=self.master_dtype)
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
        return state


CHUNK_ELEMENTS = 2**25
"gradients cast to fp32 at a time: 128 MiB, where all at once would be 4 bytes per parameter at the peak"


def _chunks(params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of parameters, each as long as it stays below CHUNK_ELEMENTS (or a single one)."""
    chunk: list[torch.Tensor] = []
    num_elements = 0
    for param in params:
        if chunk and num_elements + _local(param).numel() > CHUNK_ELEMENTS:
            yield chunk
            chunk, num_elements = [], 0
        chunk.append(param)
        num_elements += _local(param).numel()
    if chunk:
        yield chunk


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _global_norm(gradients: list[torch.Tensor], *, holds_flat_shards: bool) -> torch.Tensor:
    """The 2-norm of all gradients over all ranks, summed in fp32; an fp32 scalar."""
    norms = torch._foreach_norm([_local(gradient) for gradient in gradients], 2, dtype=torch.float32)
    square = torch.linalg.vector_norm(torch.stack(norms)).square()
    if holds_flat_shards and torch.distributed.is_initialized():
        torch.distributed.all_reduce(square)
    elif isinstance(gradients[0], DTensor):  # all of one mesh: FSDP2 shards every parameter alike
        for dimension, placement in enumerate(gradients[0].placements):
            if placement.is_shard():
                torch.distributed.all_reduce(square, group=gradients[0].device_mesh.get_group(dimension))
    return square.sqrt()
