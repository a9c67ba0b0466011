"""AdamW and Muon with master weights for a module in 16 bits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from slm_toolkit.run.engine.loss_scale import LossScale
from slm_toolkit.run.engine.muon import MOMENTUM, LocalMatrix, Muon, is_muon, of_parameter

MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK_ELEMENTS = 2**25
"gradients cast to fp32 together: 128 MiB; casting all would add 4 bytes per parameter to the peak memory"
ADAMW_KERNEL = "slm_toolkit::adamw_kernel"
"name under which a profile shows a call of `kernel`"
CPU_CHUNK_ELEMENTS = 2**20
"the same on a CPU, which launches no kernels: chunks of 4 MiB fit into caches, and malloc reuses them"


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
        in_pieces: bool = False,
        kernel: Callable[..., None] | None = None,
        muon: Muon | None = None,
        **options: Any,
    ) -> None:
        """`max_grad_norm` 0 means no clipping; `options` are AdamW's; `muon` updates the groups of Muon.

        in_pieces: for a CPU, work in chunks of CPU_CHUNK_ELEMENTS and cut larger parameters.
        holds_flat_shards: each parameter is a plain tensor with this rank's shard, as under FSDP1.
        kernel: updates the parameters of a group in place of PyTorch's operations (`AdamWKernel`).
        """
        super().__init__(params, **options)
        self.master_dtype = master_dtype
        self.max_grad_norm = max_grad_norm
        self.holds_flat_shards = holds_flat_shards
        self.in_pieces = in_pieces
        self.kernel = kernel
        self.muon = muon
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
            (group, pieces)
            for group in self.param_groups
            for pieces in _chunks(
                [param for param in group["params"] if param.grad is not None],
                CPU_CHUNK_ELEMENTS if self.in_pieces else CHUNK_ELEMENTS,
                cuts=self.in_pieces,
            )
        ]
        scratch = self._scratch()
        norms = [norm for _, pieces in chunks for norm in _norms(pieces, scratch)]
        a_gradient = chunks[0][1][0].param.grad
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
        if (self.muon is not None or not self.defaults["fused"]) and is_bad:
            return
        found_inf = is_bad.float() if self.defaults["fused"] else None
        for group in filter(is_muon, self.param_groups):
            self._update_by_muon(group, factor)
        if self.kernel is not None:
            self._update_by_kernel(factor, found_inf)
            return
        for group, pieces in chunks:
            if not is_muon(group):
                self._update(group, pieces, factor, scratch, found_inf)

    def _scratch(self) -> torch.Tensor | None:
        """With `in_pieces`, return a buffer for a chunk's fp32 gradients; reusing it avoids fragmentation."""
        return torch.empty(CPU_CHUNK_ELEMENTS, dtype=torch.float32) if self.in_pieces else None

    def _update(
        self,
        group: dict[str, Any],
        pieces: list["_Piece"],
        factor: torch.Tensor | None,
        scratch: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Do one step on the masters of some pieces of a group, then copy them to the parameters.

        factor: of the gradients, for clipping and the loss scale; None: 1.
        """
        states = [self.state_of(piece.param) for piece in pieces]
        gradients = _in_dtype(pieces, self.master_dtype, scratch)
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        masters = [
            piece.of(state.get("master", piece.param)) for state, piece in zip(states, pieces, strict=True)
        ]
        moments = [
            [piece.of(state[kind]) for state, piece in zip(states, pieces, strict=True)] for kind in MOMENTS
        ]
        # an update increments the count for each piece, so all pieces but the last get a copy
        steps = [
            state["step"] if piece.is_last else state["step"].clone()
            for state, piece in zip(states, pieces, strict=True)
        ]
        beta1, beta2 = group["betas"]
        adamw(
            masters,
            gradients,
            *moments,
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
        followers = [index for index, state in enumerate(states) if "master" in state]
        if followers:
            torch._foreach_copy_(
                [pieces[index].of(pieces[index].param) for index in followers],
                [masters[index] for index in followers],
            )

    def _update_by_kernel(self, factor: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """Do one step of AdamW on all parameters with a gradient, one call of the kernel per group."""
        for group in self.param_groups:
            params = [
                param
                for param in group["params"]
                if param.grad is not None and local_part(param).numel()  # a shard may be empty
            ]
            if not params:
                continue
            states = [self.state_of(param) for param in params]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            masters = [state.get("master", param) for state, param in zip(states, params, strict=True)]
            moments, squares = ([state[kind] for state in states] for kind in MOMENTS)
            gradients = [param.grad for param in params]
            lists = (gradients, masters, moments, squares, params)
            with torch.profiler.record_function(ADAMW_KERNEL):
                self.kernel(
                    *([local_part(tensor) for tensor in tensors] for tensors in lists),
                    **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
                    **{"steps": steps, "clip": factor, "found_inf": found_inf},
                )
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _update_by_muon(self, group: dict[str, Any], factor: torch.Tensor | None) -> None:
        """Do one step of Muon on the masters of a group, then copy them to the parameters."""
        parts, process_group = [], None
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            state = self.state_of(param)
            matrix, process_group = of_parameter(param)
            tensors = (param.grad, state[MOMENTUM], state.get("master", param))
            parts.append(LocalMatrix(matrix, *(local_part(tensor).detach().view(-1) for tensor in tensors)))
        self.muon.step(parts, process_group, lr=group["lr"], weight_decay=group["weight_decay"], clip=factor)
        pairs = [(param, self.state[param]["master"]) for param in params if "master" in self.state[param]]
        if pairs:
            torch._foreach_copy_(
                *([local_part(tensor) for tensor in tensors] for tensors in zip(*pairs, strict=True))
            )

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


@dataclass(frozen=True)
class _Piece:
    """A parameter, or a slice of this rank's elements of a large parameter."""

    param: torch.Tensor
    stretch: slice | None = None
    "None: all elements"
    is_last: bool = True

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece in the parameter or in a tensor of its state."""
        local = local_part(tensor)
        return local if self.stretch is None else local.view(-1)[self.stretch]

    @property
    def gradient(self) -> torch.Tensor:
        local = local_part(self.param.grad)
        return local if self.stretch is None else local.reshape(-1)[self.stretch]


def _chunks(params: list[torch.Tensor], num_elements: int, *, cuts: bool) -> Iterator[list[_Piece]]:
    """Yield groups of parameters of at most `num_elements` together.

    A larger parameter is its own group; with `cuts`, it is cut.
    """
    chunk: list[_Piece] = []
    in_chunk = 0
    for param in params:
        size = local_part(param).numel()
        if chunk and in_chunk + size > num_elements:
            yield chunk
            chunk, in_chunk = [], 0
        if cuts and size > num_elements:
            for start in range(0, size, num_elements):
                end = min(size, start + num_elements)
                yield [_Piece(param, slice(start, end), is_last=end == size)]
        else:
            chunk.append(_Piece(param))
            in_chunk += size
    if chunk:
        yield chunk


def _in_dtype(pieces: list[_Piece], dtype: torch.dtype, scratch: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the gradients of one chunk in `dtype`; copies are made in `scratch`, if given."""
    gradients = [piece.gradient for piece in pieces]
    if scratch is None or dtype != scratch.dtype or gradients[0].dtype == dtype:
        return [gradient.to(dtype) for gradient in gradients]
    sizes = [gradient.numel() for gradient in gradients]
    parts = scratch[: sum(sizes)].split(sizes)
    return [part.view_as(gradient).copy_(gradient) for part, gradient in zip(parts, gradients, strict=True)]


def _norms(pieces: list[_Piece], scratch: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the 2-norm of each piece's gradient, computed in fp32."""
    if scratch is not None:
        return torch._foreach_norm(_in_dtype(pieces, torch.float32, scratch), 2)
    return torch._foreach_norm([piece.gradient for piece in pieces], 2, dtype=torch.float32)


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
