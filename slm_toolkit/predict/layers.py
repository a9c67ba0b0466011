"""Each decoder layer of a configuration: the bytes that it keeps and needs, trained whole or by adapters."""

from collections.abc import Callable
from itertools import accumulate

from slm_toolkit.config import RunConfig
from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.activations import LayerMemory, Moment, layer_memory
from slm_toolkit.predict.adapters import ATTENTION, FFN, Adapters, adapter_sizes, matrices_of
from slm_toolkit.predict.frozen_activations import Kernels, frozen_layer_memory
from slm_toolkit.strategy import Strategy


def layers_of(
    spec: ModelSpec,
    strategy: Strategy,
    config: RunConfig,
    adapters: Adapters | None,
    compute: str,
    software: str,
) -> list[LayerMemory]:
    """`compute`: of `activations.py`; `adapters` None: all weights are trained."""
    checkpointing = config.gradient_checkpointing
    # of every pair the second is computed again: the second, the fourth, ...
    modes = ("none", "full") if checkpointing == "selective_layer" else (checkpointing, checkpointing)
    shape = {
        "seq_len": config.seq_len,
        "compute": compute,
        "eager": config.attn_implementation == "eager",
        "fused_norm": config.norm_kernel == "fused",
        "fused_mlp": config.mlp_kernel == "fused",
    }
    if adapters is None:
        rest = {"compiled": config.torch_compile, "software": software}
        pair = [layer_memory(spec, **shape, **rest, checkpointing=mode) for mode in modes]
        return [pair[number % 2] for number in range(spec.num_layers)]
    kernels = Kernels(**shape, keeps_inputs=keeps_inputs(strategy))
    return [
        frozen_layer_memory(
            *(spec, adapters, kernels),
            checkpointing=modes[number % 2],
            has_input_gradient=number > 0 or checkpointing != "none",
        )
        for number in range(spec.num_layers)
    ]


def keeps_inputs(strategy: Strategy) -> bool:
    """ZeRO-3 puts a linear layer of its own in place of PyTorch's, unless the JSON says otherwise."""
    zero = (strategy.deepspeed_config or {}).get("zero_optimization") or {}
    return strategy.zero_stage == 3 and zero.get("memory_efficient_linear") is not False


def gradients_made(spec: ModelSpec, adapters: Adapters | None) -> Callable[[Moment], float]:
    """How many of a layer's parameters have a gradient already at a moment of its backward."""
    if adapters is None:
        sizes = {name: inputs * outputs for name, (inputs, outputs) in matrices_of(spec).items()}
        sizes["gate_proj"] *= spec.gated_ffn
    else:
        sizes = dict.fromkeys(matrices_of(spec), 0) | adapter_sizes(spec, adapters)
    ffn, key_and_value, query_and_output = (
        list(accumulate((sizes[name] for name in reversed(names)), initial=0))  # backward goes so
        for names in (FFN, ATTENTION[1:3], ATTENTION[::3])
    )
    return lambda moment: (
        ffn[moment.ffn_grads] + key_and_value[moment.kv_grads] + query_and_output[moment.query_grads]
    )
