"""Starts the Accelerator of a launched strategy on GPUs or CPUs and checks which engine runs."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.torch_extensions import use_extensions_folder
from slm_toolkit.run.engine.muon import MUON_MOMENTUM
from slm_toolkit.run.engine.optimizer import INITIAL_SCALE, AdamWWithMasterWeights, LossScale
from slm_toolkit.run.kernels.layer_kernels import decoder_layers
from slm_toolkit.run.peers.launch_info import Launch
from slm_toolkit.run.peers.machines import process_group_timeout
from slm_toolkit.strategy.checked_run import check_passed_on
from slm_toolkit.strategy.strategy import Strategy, micro_steps, precision_note


def check_tracker(name: str) -> None:
    """Raise ValueError unless accelerate has a tracker of this name and its package is installed."""
    if name not in ("none", *(str(tracker) for tracker in get_available_trackers())):
        raise ValueError(
            f"--report_to {name}: this tracker is not installed\n"
            "hint: `pip install tensorboard` (or trackio, wandb, ...)"
        )


@dataclass(frozen=True)
class RunningEngine:
    """The engine of a prepared model, as `probe_engine` reads it."""

    engine: str
    zero_stage: int | None
    reshard_after_forward: bool | None
    world_size: int


def start_accelerator(launch: Launch, config: RunConfig, *, project_dir: str) -> Accelerator:
    """Return the Accelerator of this process. Without a GPU, the same YAML runs over gloo.

    On a machine without a GPU, accelerate 1.15 ignores FSDP and starts DeepSpeed with a world size of 1. This
    function sets the gloo backend, and the distributed type for FSDP2, so that both work.
    Raises ValueError if the YAML or the DeepSpeed JSON has settings that are not passed on.
    """
    check_passed_on(launch.strategy)
    if launch.strategy.quantizes_communication and not torch.cuda.is_available():
        raise ValueError(
            f"{launch.strategy.path}: zero_quantized_weights and zero_quantized_gradients need a GPU\n"
            "hint: DeepSpeed has no CPU kernels for them; ds_zeropp is the same without them"
        )
    engine = launch.strategy.engine
    check_tracker(config.report_to)
    if engine == "deepspeed":
        use_extensions_folder()
        if config.numerics == "fp16" and not torch.cuda.is_available():
            from deepspeed.accelerator import get_accelerator

            # it asks whether the CPU is fast at that; PyTorch always can
            get_accelerator().is_fp16_supported = lambda: True
    options = {
        "mixed_precision": _mixed_precision(launch, config),
        # by default, the last batch of an epoch would end a step early and shift all later steps
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=micro_steps(launch.strategy, config), sync_with_dataloader=False
        ),
        "dataloader_config": DataLoaderConfiguration(
            dispatch_batches=False, use_seedable_sampler=True, non_blocking=torch.cuda.is_available()
        ),
        "log_with": None if config.report_to == "none" else config.report_to,
        "project_dir": project_dir,
    }
    has_gpu, timeout = torch.cuda.is_available(), process_group_timeout()
    if engine == "fsdp2" and not has_gpu:
        PartialState(backend="gloo", timeout=timeout)
        # private, but there is no public way to set it
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        accelerator = Accelerator(**options)
        if accelerator.state.fsdp_plugin.cpu_offload:  # only a GPU has pinned memory
            accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    else:
        needs_gloo = engine == "deepspeed" and not has_gpu
        group = InitProcessGroupKwargs(backend="gloo" if needs_gloo else None, timeout=timeout)
        on_cpu = not (has_gpu or needs_gloo)
        accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[group], **options)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _set_up_deepspeed(accelerator.deepspeed_plugin, launch, config)
    return accelerator


def _set_up_deepspeed(plugin: DeepSpeedPlugin, launch: Launch, config: RunConfig) -> None:
    if not plugin.zero3_init_flag:
        # accelerate 1.15 still tells transformers about ZeRO-3; transformers would then shard the model
        # while building it, and draw other random weights than under every other strategy
        unset_hf_deepspeed_config()
    check_passed_on(  # the JSON that accelerate read: an option or variable may have replaced the YAML's
        replace(
            launch.strategy,
            path=os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", launch.strategy.path),
            accelerate_config=None,
            deepspeed_config=plugin.deepspeed_config,
        )
    )
    _write_deepspeed_config(plugin.deepspeed_config, config)


def _write_deepspeed_config(deepspeed: dict[str, Any], config: RunConfig) -> None:
    """Write the flags' batch size, accumulation, clipping and dtypes into DeepSpeed's configuration.

    With "auto" or no value, DeepSpeed would always clip at 1.0 (visible with `--numerics stock`) and use the
    JSON's gradient accumulation.
    """
    for section in ("optimizer", "scheduler"):  # `set_up` has printed a note about these
        deepspeed.pop(section, None)
    deepspeed["train_micro_batch_size_per_gpu"] = config.per_device_train_batch_size
    if config.numerics != "stock":
        deepspeed["gradient_accumulation_steps"] = config.gradient_accumulation_steps
        deepspeed["gradient_clipping"] = config.max_grad_norm
    if config.numerics == "pure_bf16":
        in_bf16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        deepspeed["bf16"] = {**deepspeed.get("bf16", {}), **in_bf16}
    if config.numerics == "fp16":  # `loss_scale`: a number turns DeepSpeed's own rule off
        deepspeed["fp16"] = {"enabled": True, "loss_scale": INITIAL_SCALE}
    zero = deepspeed.get("zero_optimization") or {}
    if zero.get("zero_hpz_partition_size") == "auto":  # hpZ: a second copy of the parameters on each node
        zero["zero_hpz_partition_size"] = int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def set_reduction(model: torch.nn.Module, config: RunConfig) -> None:
    """Keep DDP from reducing gradients in a rehearsal, which has no other ranks."""
    if config.rehearse is not None and isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, noop_hook)


def scale_losses(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a prepared job of `--numerics fp16` its loss scale; accelerate's backward multiplies by it."""
    if hasattr(model, "zero_optimization_stage"):  # DeepSpeed keeps a number on the host
        accelerator.scaler = LossScale("cpu", tells=model.optimizer.override_loss_scale)
    else:
        a_param = optimizer.param_groups[0]["params"][0]  # with CPU offload its gradients are on the host
        optimizer.optimizer.loss_scale = accelerator.scaler = LossScale(a_param.device)


def _mixed_precision(launch: Launch, config: RunConfig) -> str:
    """Return accelerate's mixed_precision for --numerics.

    Only `stock` uses the launch's value; other numerics ignore it and may print a note about that.
    """
    if config.numerics == "stock":
        return launch.mixed_precision or "bf16"
    note = precision_note(launch.mixed_precision, config)
    if note is not None and os.environ.get("RANK", "0") == "0":
        print(f"note: {note}", file=sys.stderr)
    # "no": the module itself is in 16 bits, and our optimizer has the master weights; DeepSpeed has its own
    return config.computes_in if config.numerics != "fp32" and launch.strategy.is_deepspeed else "no"


@contextmanager
def without_unused_imports(strategy: Strategy) -> Iterator[None]:
    """Spare `Accelerator.prepare` two slow imports: of torch's compiler, and of `datasets`.

    DeepSpeed imports its Muon, which hands functions to the compiler that AdamW never calls: they stay as
    they are. accelerate asks whether the batches are of `datasets`; they can't be if that was not imported.
    """
    if strategy.is_deepspeed:
        with suppress(ImportError), patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
            import_module("deepspeed.runtime.zero.muon.original_muon")
    unused = "datasets" not in sys.modules
    if unused:
        sys.modules["datasets"] = None
    try:
        yield
    finally:
        if unused:
            del sys.modules["datasets"]


def build_optimizer(model: PreTrainedModel, config: RunConfig, strategy: Strategy) -> torch.optim.Optimizer:
    """Return the optimizer of `--optim`, with weight decay on matrices only, and with master weights.

    With `--numerics stock` it is PyTorch's AdamW, and under DeepSpeed, which has master weights, AdamW is.
    With `--optim muon`, the first group is Muon's: all matrices but those of embeddings and head.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in params if _is_matrix(param)]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": [param for param in params if not _is_matrix(param)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # under LoRA, all are matrices
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "fused": config.optim != "adamw_torch",
        "foreach": True if config.optim == "adamw_torch" else None,
    }
    muon_dtype = None
    if config.optim == "muon":
        muon_dtype = torch.float32 if config.numerics == "fp32" else torch.bfloat16
        of_layers = {param for layer in decoder_layers(model) for param in layer.parameters()}
        hidden = {param for param in of_layers if param.dim() == 2}
        groups[0]["params"] = [param for param in matrices if param not in hidden]
        of_muon = [param for param in matrices if param in hidden]
        groups.insert(0, {**groups[0], "params": of_muon, "momentum": MUON_MOMENTUM})
    if config.numerics == "stock" or strategy.is_deepspeed:
        return torch.optim.AdamW(groups, **options)
    return AdamWWithMasterWeights(
        groups,
        master_dtype=torch.bfloat16 if config.numerics == "pure_bf16" else torch.float32,
        max_grad_norm=config.max_grad_norm,
        holds_flat_shards=strategy.is_fsdp1,
        kernel=_kernel_of(config, strategy),
        muon_dtype=muon_dtype,
        **options,
    )


def _kernel_of(config: RunConfig, strategy: Strategy) -> Callable[..., None] | None:
    """Return Triton's AdamW for `--kernels`; None: PyTorch's. A rehearsal on a CPU updates nothing."""
    if not config.has_triton_adamw(strategy):
        return None
    if not torch.cuda.is_available():
        return None if config.rehearse is None else lambda *lists, **options: None
    from slm_toolkit.run.kernels.adamw_kernel import AdamWKernel  # needs Triton: part of builds for a GPU

    return AdamWKernel()


def _is_matrix(param: torch.Tensor) -> bool:
    return len(_shape(param)) >= 2


def _shape(param: torch.Tensor) -> torch.Size:
    return getattr(param, "ds_shape", param.shape)  # under zero3_init_flag, param.shape is empty


def optimizer_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float | None,
) -> torch.Tensor | float | None:
    """Clip (unless 0 or None), step and clear gradients. Return the norm over all ranks before clipping.

    Under every engine, a step whose norm is not finite changes no weight. DeepSpeed does all of this inside
    accelerate's backward (its norm is None if it neither clips nor shards); our optimizer with master weights
    clips in its own step.
    """
    if hasattr(model, "zero_optimization_stage"):
        if accelerator.scaler is None:
            return model.get_global_grad_norm()
        overflow = bool(model.optimizer.overflow)
        accelerator.scaler.count_step(torch.tensor(overflow))
        return float("inf") if overflow else model.get_global_grad_norm()  # not every stage has it then
    inner = optimizer.optimizer
    if isinstance(inner, AdamWWithMasterWeights):
        optimizer.step()
        norm = inner.grad_norm
    else:
        norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if accelerator.scaler is None:
            _step_if_finite(optimizer, inner, norm)
        else:  # fp16's gradient scaler skips steps that are not finite
            optimizer.step()
    optimizer.zero_grad()
    return norm


def _step_if_finite(
    optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer, norm: torch.Tensor
) -> None:
    """Step unless the norm is not finite. A fused kernel checks that on the device, else the host does."""
    param = inner.param_groups[0]["params"][0]
    is_bad = ~torch.isfinite(norm)  # False for a fake tensor, so a rehearsal does step
    if inner.defaults["fused"] and not isinstance(param, DTensor):
        inner.found_inf = is_bad.float()
        optimizer.step()
    elif not is_bad:
        optimizer.step()


def probe_engine(model: torch.nn.Module) -> RunningEngine:
    """Read engine, ZeRO stage and world size from a prepared model, not from a configuration."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if hasattr(model, "zero_optimization_stage"):  # a DeepSpeedEngine; avoids importing deepspeed for DDP
        return RunningEngine("deepspeed", model.zero_optimization_stage(), None, model.dp_world_size)
    if isinstance(model, FSDPModule):
        world_size = next(model.parameters()).device_mesh.size()
        units = [part for part in decoder_layers(model).modules() if isinstance(part, FSDPModule)]
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]  # private
        reshards = [group._reshard_after_forward for group in groups if group is not None]
        if not reshards:
            raise ValueError(
                "FSDP2 sharded no decoder layer\nhint: set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
            )
        return RunningEngine("fsdp2", None, reshards[0], world_size)
    for wrapper, engine in ((FullyShardedDataParallel, "fsdp1"), (DistributedDataParallel, "ddp")):
        if isinstance(model, wrapper):
            return RunningEngine(engine, None, None, model.process_group.size())
    return RunningEngine("single", None, None, 1)


def check_engine(running: RunningEngine, launch: Launch) -> None:
    """Raise ValueError unless the running engine is the engine of the YAML."""
    strategy = launch.strategy
    requested = RunningEngine(
        strategy.engine, strategy.zero_stage, strategy.reshard_after_forward, launch.num_processes
    )
    is_single_ddp = strategy.engine == "ddp" and running == RunningEngine("single", None, None, 1)
    if running == requested or (is_single_ddp and launch.num_processes == 1):
        return
    differences = [
        f"{name} {asked!r} requested, {getattr(running, name)!r} running"
        for name, asked in vars(requested).items()
        if asked != getattr(running, name)
    ]
    raise ValueError(
        f"{strategy.path or strategy.name}: {'; '.join(differences)}\n"
        "hint: an option of `accelerate launch` or an environment variable overrides the YAML: "
        f"{', '.join(name for name in os.environ if name.startswith(('ACCELERATE_', 'FSDP_')))}"
    )


def describe_batch(config: RunConfig, per_step: int, launch: Launch) -> str:
    """Return one line: the effective batch size."""
    return (
        f"a step is {per_step} sequences of {config.seq_len} tokens: {config.per_device_train_batch_size} x "
        f"{micro_steps(launch.strategy, config)} micro-steps x {launch.num_processes} processes"
    )
