"""What `--peft` makes of a model: where adapters sit, which weights are trained and which lie frozen."""

import math
from dataclasses import dataclass
from functools import lru_cache

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FFN = ("gate_proj", "up_proj", "down_proj")
_IA3_OF = {"qwen2": ("q_proj", "v_proj", "down_proj")}  # peft 0.21, utils/constants.py
_IA3 = ("k_proj", "v_proj", "down_proj")  # the same for llama and mistral
NF4_BLOCK, SCALE_BLOCK = 64, 256
"weights with a scale of 8 bits, and scales with one of 32: bitsandbytes 0.50, functional.quantize_4bit"
CODE_BYTES = (16 + 256) * 4 + 4
"of each quantized matrix: NF4's 16 values, those of the scales' 256, and the scales' mean, fp32"


@dataclass(frozen=True)
class Adapters:
    """The same in every decoder layer."""

    targets: tuple[str, ...]
    "matrices that have one, of ATTENTION and FFN"
    rank: int
    "of LoRA's two matrices; 0: IA3, a vector"
    drops: bool
    "dropout before LoRA's matrices"
    is_quantized: bool
    "the frozen matrices of the layers are in 4 bits"

    def __contains__(self, name: str) -> bool:
        return name in self.targets


@dataclass(frozen=True)
class Weights:
    """Elements as they are stored, sharded and gathered: four weights of 4 bits are one of bf16."""

    total: int
    layer: int
    vocabulary: int
    "of one vocabulary matrix"
    trained: int
    trained_layer: int
    trained_vocabulary: int
    trained_norm: int
    "of the final norm"
    largest_trained: int
    "tensor"
    widest_trained: int
    "tensor of a layer"
    adapter_shapes: tuple[tuple[int, int], ...] = ()
    "rows and columns of a layer's adapters"
    scales_bytes: int = 0
    "that each rank holds whole, of weights in 4 bits"
    unpacked_bytes: int = 0
    "of the largest matrix in bf16, and its scales in fp32, which backward makes of the 4 bits"

    @property
    def is_frozen(self) -> bool:
        return self.trained < self.total


def adapters_of(spec: ModelSpec, config: RunConfig) -> Adapters | None:
    """None where all weights are trained. Raises ValueError for modules that no closed form covers."""
    if config.peft == "none":
        return None
    if problem := unknown_targets(config):
        raise ValueError(problem)
    if not spec.gated_ffn:
        raise ValueError(f"--peft {config.peft}: no closed form for {spec.name}, which is not Llama-like")
    names = _target_names(config)
    if names is None:
        names = (*ATTENTION, *FFN) if config.peft != "ia3" else _IA3_OF.get(spec.model_type, _IA3)
    targets = tuple(name for name in (*ATTENTION, *FFN) if name in names)
    is_lora = config.peft != "ia3"
    return Adapters(
        targets,
        config.lora_r if is_lora else 0,
        drops=is_lora and config.lora_dropout > 0,
        is_quantized=config.peft == "qlora",
    )


def unknown_targets(config: RunConfig) -> str | None:
    """What of `--lora_target_modules` has no closed form, as a sentence."""
    others = [name for name in _target_names(config) or () if name not in (*ATTENTION, *FFN)]
    if config.peft == "none" or not others:
        return None
    return (
        f"--lora_target_modules {others[0]}: no closed form for it, there are "
        f"{', '.join((*ATTENTION, *FFN))} of all layers, and all-linear"
    )


def _target_names(config: RunConfig) -> set[str] | None:
    """Without the block they lie in, as peft matches the ends of names; None: all, or as IA3 has them."""
    if config.lora_target_modules == "all-linear":
        return None
    names = [name.strip() for name in config.lora_target_modules.split(",")]
    return {name.removeprefix("self_attn.").removeprefix("mlp.") for name in names}


def matrices_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a decoder layer's matrix products, by transformers' names."""
    h, f = spec.hidden_size, spec.ffn_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = ((h, query), (h, key), (h, key), (query, h))
    return dict(zip((*ATTENTION, *FFN), (*attention, (h, f), (h, f), (f, h)), strict=True))


def adapter_shapes(spec: ModelSpec, adapters: Adapters) -> dict[str, tuple[tuple[int, int], ...]]:
    """Rows and columns of what is trained beside each matrix of a layer."""
    found = {}
    for name, (inputs, outputs) in matrices_of(spec).items():
        if name in adapters and adapters.rank:
            found[name] = ((adapters.rank, inputs), (outputs, adapters.rank))
        elif name in adapters:  # before the matrix in an FFN's last, else behind it
            found[name] = ((1, inputs) if name == "down_proj" else (outputs, 1),)
    return found


def adapter_sizes(spec: ModelSpec, adapters: Adapters) -> dict[str, int]:
    """Trained parameters beside each matrix of a layer."""
    shapes = adapter_shapes(spec, adapters)
    return {name: sum(map(math.prod, of_matrix)) for name, of_matrix in shapes.items()}


@lru_cache(maxsize=4096)
def weights_of(spec: ModelSpec, adapters: Adapters | None) -> Weights:
    """How many elements there are of each, and how many of them have gradients and an optimizer's state."""
    embedding, widest = spec.embedding_params, spec.hidden_size * spec.ffn_size
    if adapters is None:
        return Weights(
            *(spec.num_params, spec.params_per_layer, embedding),
            *(spec.num_params, spec.params_per_layer, embedding, spec.hidden_size, embedding, widest),
        )
    shapes = [shape for of_matrix in adapter_shapes(spec, adapters).values() for shape in of_matrix]
    of_layer, largest = sum(map(math.prod, shapes)), max(map(math.prod, shapes))
    frozen, scales, unpacked = spec.params_per_layer, 0, 0
    if adapters.is_quantized:
        sizes = [inputs * outputs for inputs, outputs in matrices_of(spec).values()]
        frozen += sum(-(-size // 4) - size for size in sizes)
        blocks = [-(-size // NF4_BLOCK) for size in sizes]
        scales = sum(count + -(-count // SCALE_BLOCK) * 4 + CODE_BYTES for count in blocks)
        unpacked = 2 * max(sizes) + 4 * max(blocks)
    outside = spec.num_params - spec.num_layers * spec.params_per_layer
    return Weights(
        total=outside + spec.num_layers * (frozen + of_layer),
        layer=frozen + of_layer,
        vocabulary=embedding,
        trained=spec.num_layers * of_layer,
        trained_layer=of_layer,
        trained_vocabulary=0,
        trained_norm=0,
        largest_trained=largest,
        widest_trained=largest,
        adapter_shapes=tuple(shapes),
        scales_bytes=spec.num_layers * scales,
        unpacked_bytes=unpacked,
    )


def sharded_adapters(weights: Weights, num_ranks: int) -> int:
    """Elements of a layer's adapters on FSDP2's first rank, which cuts tensors between rows only."""
    return sum(-(-rows // num_ranks) * columns for rows, columns in weights.adapter_shapes)
