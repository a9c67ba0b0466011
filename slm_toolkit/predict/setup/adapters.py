"""Count a model's adapters, its trained weights and its frozen weights under `--peft`."""

import math
from dataclasses import dataclass
from functools import lru_cache

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec, hidden_matrices, layer_tensors

ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
FFN_INPUTS = ("gate_proj", "up_proj", "gate_up_proj")
KNOWN = (*ATTENTION_INPUTS, "o_proj", *FFN_INPUTS, "down_proj")
NF4_BLOCK, SCALE_BLOCK = 64, 256
"64 weights share an 8-bit scale, 256 scales an fp32 scale: bitsandbytes 0.50, functional.quantize_4bit"
CODE_BYTES = (16 + 256) * 4 + 4
"per quantized matrix, in fp32: NF4's 16 values, the 256 values of its scales, and the mean of its scales"


@dataclass(frozen=True)
class Adapters:
    """The adapters of one decoder layer; all layers have the same."""

    targets: tuple[str, ...]
    "the matrices that have an adapter, by transformers' names, in the model's order"
    rank: int
    "rank of LoRA's two matrices"
    drops: bool
    "True if there is dropout before LoRA's matrices"
    is_quantized: bool
    "True if the frozen matrices of the layers have 4 bits per weight"

    def __contains__(self, name: str) -> bool:
        return name in self.targets


@dataclass(frozen=True)
class Weights:
    """Numbers of stored elements: four 4-bit weights are stored, sharded and gathered as one bf16 element."""

    total: int
    layer: int
    vocabulary: int
    "in one vocabulary matrix"
    trained: int
    trained_layer: int
    trained_vocabulary: int
    trained_norm: int
    "in the final norm"
    widest_trained: int
    "in the largest trained tensor of a layer"
    adapter_shapes: tuple[tuple[int, int], ...] = ()
    "rows and columns of a layer's adapters"
    scales_bytes: int = 0
    "scales of the 4-bit weights; they are not sharded"

    @property
    def is_frozen(self) -> bool:
        return self.trained < self.total


def adapters_of(spec: ModelSpec, config: RunConfig) -> Adapters | None:
    """Return the adapters, or None if all weights are trained.

    Raise ValueError for modules without a closed form.
    """
    if config.peft == "none":
        return None
    if problem := unknown_targets(config):
        raise ValueError(problem)
    if not spec.gated_ffn:
        raise ValueError(
            f"--peft {config.peft}: no closed form for {spec.name}, which has no gate\nhint: --rehearse N "
            "measures it"
        )
    matrices = matrices_of(spec)
    names = _target_names(config)
    targets = tuple(name for name in matrices if names is None or name in names)
    if not targets:
        flags = f"--peft {config.peft} --lora_target_modules {config.lora_target_modules}"
        raise ValueError(
            f"{flags} with {spec.name}: nothing to adapt\nhint: name some of {', '.join(matrices)}"
        )
    return Adapters(
        targets,
        config.lora_r,
        drops=config.lora_dropout > 0,
        is_quantized=config.peft == "qlora",
    )


def unknown_targets(config: RunConfig) -> str | None:
    """Return an error if `--lora_target_modules` names a module without a closed form, else None."""
    others = [name for name in _target_names(config) or () if name not in KNOWN]
    if config.peft == "none" or not others:
        return None
    return (
        f"--lora_target_modules {others[0]}: no closed form for it; estimates cover "
        f"{', '.join(KNOWN)} of all layers, and all-linear"
    )


def _target_names(config: RunConfig) -> set[str] | None:
    """Return the targets without their block's name, because peft matches the ends of names; None: all."""
    if config.lora_target_modules == "all-linear":
        return None
    names = [name.strip() for name in config.lora_target_modules.split(",")]
    return {name.removeprefix("self_attn.").removeprefix("mlp.") for name in names}


def matrices_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the (inputs, outputs) of each matrix of a decoder layer, in the order of forward."""
    found = hidden_matrices(spec)
    return {name: found[name] for name in KNOWN if name in found}


def adapter_shapes(spec: ModelSpec, adapters: Adapters) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return the (rows, columns) of the adapter tensors of each matrix of a layer."""
    return {
        name: ((adapters.rank, inputs), (outputs, adapters.rank))
        for name, (inputs, outputs) in matrices_of(spec).items()
        if name in adapters
    }


def adapter_sizes(spec: ModelSpec, adapters: Adapters) -> dict[str, int]:
    """Return the number of adapter parameters of each matrix of a layer."""
    shapes = adapter_shapes(spec, adapters)
    return {name: sum(map(math.prod, of_matrix)) for name, of_matrix in shapes.items()}


@lru_cache(maxsize=4096)
def weights_of(spec: ModelSpec, adapters: Adapters | None) -> Weights:
    """Count a model's elements, and those of them that have gradients and optimizer states."""
    embedding = spec.embedding_params
    widest = max(tensor.num_elements for tensor in layer_tensors(spec) if tensor.is_matrix)
    if adapters is None:
        return Weights(
            *(spec.num_params, spec.params_per_layer, embedding),
            *(spec.num_params, spec.params_per_layer, embedding, spec.hidden_size, widest),
        )
    shapes = [shape for of_matrix in adapter_shapes(spec, adapters).values() for shape in of_matrix]
    of_layer = sum(map(math.prod, shapes))
    frozen, scales = spec.params_per_layer, 0
    if adapters.is_quantized:
        sizes = [inputs * outputs for inputs, outputs in matrices_of(spec).values()]
        frozen += sum(-(-size // 4) - size for size in sizes)
        blocks = [-(-size // NF4_BLOCK) for size in sizes]
        scales = sum(count + -(-count // SCALE_BLOCK) * 4 + CODE_BYTES for count in blocks)
    outside = spec.num_params - spec.num_layers * spec.params_per_layer
    return Weights(
        total=outside + spec.num_layers * (frozen + of_layer),
        layer=frozen + of_layer,
        vocabulary=embedding,
        trained=spec.num_layers * of_layer,
        trained_layer=of_layer,
        trained_vocabulary=0,
        trained_norm=0,
        widest_trained=max(map(math.prod, shapes)),
        adapter_shapes=tuple(shapes),
        scales_bytes=spec.num_layers * scales,
    )
