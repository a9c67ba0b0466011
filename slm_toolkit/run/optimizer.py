"""AdamW over fp32 master weights of a bf16 module, as DeepSpeed has it, for DDP, FSDP2 and one process."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


class AdamWWithMasterWeights(torch.optim.AdamW):
    """AdamW whose parameters may be bf16: each has an fp32 master copy in its state, which the step updates.

    The state of a parameter holds `master`, `exp_avg` and `exp_avg_sq` (fp32, its shape; shards of a DTensor)
    and `step`: 12 bytes per parameter, as DeepSpeed's ZeRO holds them.
    """

    def __init__(self, params: Any, *, max_grad_norm: float, **options: Any) -> None:
        """`max_grad_norm` 0 means no clipping; `options` are AdamW's."""
        super().__init__(params, **options)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        "of all gradients before clipping, fp32, set by each step"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clip in fp32, where DeepSpeed clips too: a norm of bf16 gradients would have 8 bits."""
        assert closure is None
        groups = [
            [param for param in group["params"] if param.grad is not None] for group in self.param_groups
        ]
        gradients = [[param.grad.float() for param in params] for params in groups]
        every_gradient = [gradient for of_group in gradients for gradient in of_group]
        norm = torch.nn.utils.get_total_norm(every_gradient)
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.max_grad_norm > 0:
            torch._foreach_mul_(every_gradient, (self.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1.0))
        for group, params, of_group in zip(self.param_groups, groups, gradients, strict=True):
            self._update(group, params, of_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch casts floating-point state to the parameter's dtype; this puts the fp32 values back."""
        saved_ids = [param_id for group in state_dict["param_groups"] for param_id in group["params"]]
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for param, param_id in zip(params, saved_ids, strict=True):
            for key, value in state_dict["state"].get(param_id, {}).items():
                if key in ("master", "exp_avg", "exp_avg_sq"):
                    self.state[param][key] = value.to(device=param.device, copy=True)

    def _update(
        self, group: dict[str, Any], params: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        """One step of AdamW on the masters of a parameter group, then the parameters follow."""
        states = [self._state_of(param, fused=bool(group["fused"])) for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            [state["master"] for state in states],
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
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
        for param, state in zip(params, states, strict=True):
            param.copy_(state["master"])

    def _state_of(self, param: torch.Tensor, *, fused: bool) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state["master"] = param.detach().float().clone()  # clone: .float() of an fp32 parameter is itself
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
        return state
