"""AdamW and Muon with master weights for a module in 16 bits."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from slm_toolkit.run.engine.muon import MOMENTUM, HiddenMatrix, is_muon, ranks_of, step_by_muon

MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK_ELEMENTS = 2**25
"gradients cast to fp32 together: 128 MiB; casting all would add 4 bytes per parameter to the peak memory"
LOWEST_SCALE = 1.0
INITIAL_SCALE = 2.0**16  # of torch's GradScaler and of DeepSpeed
ADAMW_KERNEL = "slm_toolkit::adamw_kernel"
"name under which a profile shows a call of `kernel`"


class AdamWWithMasterWeights(torch.optim.AdamW):
    """AdamW that updates a copy of each parameter in `master_dtype`, or the parameter if it has that dtype.

    With fp32 masters, the state of a parameter in 16 bits is `master`, `exp_avg` and `exp_avg_sq` (fp32, the
    parameter's shape; sharded like a DTensor) and `step`: 12 bytes per parameter, as in DeepSpeed's ZeRO.
    Groups with a `momentum` are Muon's: `master` and `momentum_buffer`, 8 bytes per parameter.
    """

    def __init__(
        self,
        params: Any,
        *,
        max_grad_norm: float,
        master_dtype: torch.dtype = torch.float32,
        holds_flat_shards: bool = False,
        kernel: Callable[..., None] | None = None,
        muon_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """`max_grad_norm` 0 means no clipping; `options` are AdamW's.

        holds_flat_shards: each parameter is a plain tensor with this rank's shard, as under FSDP1.
        muon_dtype: of Muon's matrix products; None: no group is Muon's.
        kernel: updates parameters in place of PyTorch's operations (`AdamWKernel`).
        """
        super().__init__(params, **options)
        self.master_dtype = master_dtype
        self.max_grad_norm = max_grad_norm
        self.holds_flat_shards = holds_flat_shards
        self.kernel = kernel
        self.muon_dtype = muon_dtype
        self.loss_scale: LossScale | None = None
        "with `--numerics fp16`: gradients are divided by it"
        self.grad_norm: torch.Tensor | None = None
        "norm of all gradients before clipping, in fp32; each step sets it"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clip in fp32, like DeepSpeed (a norm in bf16 would have 8 bits), then update the parameters.

        Works on this rank's local tensors: an operation on DTensors costs the host ten times as much.
        If the norm is not finite, nothing is updated; a fused kernel checks that on the device.
        """
        assert closure is None
        chunks = [
            (group, params)
            for group in self.param_groups
            for params in _chunks([param for param in group["params"] if param.grad is not None])
        ]
        gradients = [local_part(param.grad) for _, params in chunks for param in params]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        a_gradient = chunks[0][1][0].grad
        self.grad_norm = _global_norm(norms, a_gradient, holds_flat_shards=self.holds_flat_shards)
        if self.loss_scale is not None:
            self.grad_norm = self.grad_norm / self.loss_scale.value
        factor = (
            (self.max_grad_norm / (self.grad_norm + 1e-6)).clamp(max=1.0) if self.max_grad_norm > 0 else None
        )
        is_bad = ~torch.isfinite(self.grad_norm)  # False for a fake tensor, so a rehearsal does step
        if self.loss_scale is not None:
            factor = (1.0 if factor is None else factor) / self.loss_scale.value
            self.loss_scale.count_step(is_bad)
        if (self.muon_dtype is not None or not self.defaults["fused"]) and is_bad:
            return
        found_inf = is_bad.float() if self.defaults["fused"] else None
        for group in filter(is_muon, self.param_groups):
            self._update_by_muon(group, factor)
        for group, params in chunks:
            if not is_muon(group):
                self._update(group, params, factor, found_inf)

    def _update(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        factor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Do one step on the masters of some parameters of a group, then copy them to the parameters.

        factor: of the gradients, for clipping and the loss scale; None: 1.
        """
        params = [param for param in params if local_part(param).numel()]  # a shard may be empty
        if not params:
            return
        states = [self.state_of(param) for param in params]
        steps = [state["step"] for state in states]
        masters = [state.get("master", param) for state, param in zip(states, params, strict=True)]
        lists = ([local_part(state[kind]) for state in states] for kind in MOMENTS)
        lists = ([local_part(master) for master in masters], *lists)
        gradients = [local_part(param.grad) for param in params]
        if self.kernel is not None:
            torch._foreach_add_(steps, 1)
            with torch.profiler.record_function(ADAMW_KERNEL):
                self.kernel(
                    gradients,
                    *lists,
                    [local_part(param) for param in params],
                    **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
                    **{"steps": steps, "clip": factor, "found_inf": found_inf},
                )
            torch._foreach_sub_(steps, [found_inf] * len(steps))
            return
        gradients = [gradient.to(self.master_dtype) for gradient in gradients]
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        beta1, beta2 = group["betas"]
        adamw(
            lists[0],
            gradients,
            *lists[1:],
            max_exp_avg_sqs=[],
            state_steps=steps,
            foreach=group["foreach"],
            fused=group["fused"],
            found_inf=found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        _copy_to(params, masters)

    def _update_by_muon(self, group: dict[str, Any], factor: torch.Tensor | None) -> None:
        """Do one step of Muon on the masters of a group, then copy them to the parameters."""
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        states = [self.state_of(param) for param in params]
        masters = [state.get("master", param) for state, param in zip(states, params, strict=True)]
        step_by_muon(
            [
                HiddenMatrix(
                    param.shape,
                    *(local_part(part).detach() for part in (param.grad, state[MOMENTUM], master)),
                )
                for param, state, master in zip(params, states, masters, strict=True)
            ],
            ranks_of(params[0]),
            is_sharded=isinstance(params[0], DTensor),
            compute_dtype=self.muon_dtype,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            clip=factor,
        )
        _copy_to(params, masters)

    def state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a parameter's state; create it before the first step."""
        state = self.state[param]
        if not state:
            if param.dtype != self.master_dtype:
                state["master"] = param.detach().to(self.master_dtype)
            if any(
                param is other for group in filter(is_muon, self.param_groups) for other in group["params"]
            ):
                state[MOMENTUM] = torch.zeros_like(param, dtype=self.master_dtype)
                return state
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(param, dtype=self.master_dtype)
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=param.device if self.defaults["fused"] else "cpu"
            )
        return state


def _copy_to(params: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    """Round masters to their parameters. A parameter that has no master is its own."""
    pairs = [pair for pair in zip(params, masters, strict=True) if pair[0] is not pair[1]]
    if pairs:
        torch._foreach_copy_(*([local_part(part) for part in parts] for parts in zip(*pairs, strict=True)))


def _chunks(params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield groups of parameters of at most CHUNK_ELEMENTS; a larger parameter is its own group."""
    chunk: list[torch.Tensor] = []
    in_chunk = 0
    for param in params:
        size = local_part(param).numel()
        if chunk and in_chunk + size > CHUNK_ELEMENTS:
            yield chunk
            chunk, in_chunk = [], 0
        chunk.append(param)
        in_chunk += size
    if chunk:
        yield chunk


def _global_norm(
    norms: list[torch.Tensor], a_gradient: torch.Tensor, *, holds_flat_shards: bool
) -> torch.Tensor:
    """Return the 2-norm of all gradients over all ranks, an fp32 scalar, from this rank's `norms`."""
    square = torch.linalg.vector_norm(torch.stack(norms)).square()
    if holds_flat_shards and torch.distributed.is_initialized():
        torch.distributed.all_reduce(square)
    elif isinstance(a_gradient, DTensor):  # FSDP2 shards every parameter over the same mesh
        for dimension, placement in enumerate(a_gradient.placements):
            if placement.is_shard():
                torch.distributed.all_reduce(square, group=a_gradient.device_mesh.get_group(dimension))
    return square.sqrt()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor as a view; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LossScale(torch.amp.GradScaler):
    """The dynamic loss scale of `--numerics fp16`, by one rule under every engine.

    Losses are multiplied by it before backward, so that small gradients don't become 0 in fp16. A step whose
    gradients overflow changes no weight and halves the scale; 2,000 good steps in a row double it. The
    optimizer divides gradients by it, in fp32. DeepSpeed's own rule differs (it forgives the first overflow,
    and divides by the new scale in the step that doubles it), so DeepSpeed gets this one's scale.
    """

    def __init__(self, device: torch.device | str, *, tells: Callable[[float], object] | None = None) -> None:
        """`tells`: called with the scale from now on, whenever it may have changed; then the host waits."""
        super().__init__(torch.device(device).type, INITIAL_SCALE)
        self._tells = tells
        self._lazy_init_scale_growth_tracker(device)  # now, next to the gradients
        self._tell()

    def _tell(self) -> None:
        if self._tells is not None:
            self._tells(self.get_scale())

    @property
    def value(self) -> torch.Tensor:
        """An fp32 scalar; updating it never makes the host wait."""
        return self._scale

    @torch.no_grad()
    def count_step(self, is_bad: torch.Tensor) -> None:
        """Change the scale after a step. `is_bad`: whether gradients were not finite, equal on all ranks."""
        rule = (self.get_growth_factor(), self.get_backoff_factor(), self.get_growth_interval())
        torch._amp_update_scale_(self._scale, self._growth_tracker, is_bad.float(), *rule)
        self._scale.clamp_(min=LOWEST_SCALE)
        self._tell()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._tell()
