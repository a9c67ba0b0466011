"""Seconds that adapters take beside the frozen matrices of a decoder layer, and 4-bit weights to be unpacked.

Counted by hand from peft 0.21's and bitsandbytes 0.50's code, never timed. Bytes are of bf16, forward and
backward together unless it says otherwise; fp32 is for the caller's slowdown to say.
"""

from dataclasses import dataclass

from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.adapters import NF4_BLOCK, Adapters, matrices_of
from slm_toolkit.predict.matmul import Rates, product_seconds

# LoRA, of a matrix's outputs: scaled 4, added 6; backward: scaled 4. Of its inputs: two gradients added 6.
_LORA_BYTES_OF_OUTPUTS, _LORA_BYTES_OF_INPUTS = 14, 6
_DROPOUT_BYTES = 10  # of the inputs: read 2, written 2, a mask of 1, and the same in backward
_DEFENSIVE_CLONE_BYTES = 4  # of the outputs, where the base is in 4 bits
_IA3_BYTES = (
    16  # of what is scaled: 4; backward: 4, and 8 for the scale's own gradient, made whole and summed
)
_LORA_KERNELS, _IA3_KERNELS = 4, 1  # of forward, a matrix: two products, scale, add; scale
# Per weight: 4 bits read; of its block's scale 8 bits read and 32 written, 32 read and written as the scales'
# mean is added, 32 read; bf16 written. The product reads that, as it reads any weight.
_UNPACKED_BYTES = 0.5 + (1 + 4 + 8 + 4) / NF4_BLOCK + 2
_UNPACKING_KERNELS = 3  # a matrix: the scales, their mean added, the weights


@dataclass(frozen=True)
class AdapterWork:
    """Of one decoder layer."""

    forward_seconds: float
    "of A and B"
    backward_seconds: float
    "of both their gradients"
    bytes_per_token: float
    "of element-wise kernels, forward and backward; a third of it in forward"
    num_kernels: int
    "of forward; backward launches twice as many"
    unpacking_seconds: float
    "of all frozen matrices, each time that a pass goes through the layer"


def adapter_work(
    spec: ModelSpec, adapters: Adapters, *, tokens: int, rates: Rates, element_bytes: int
) -> AdapterWork:
    """LoRA's matrices are thin: what they move, not what they multiply, takes their time."""
    matrices = matrices_of(spec)
    forward = backward = moved = 0.0
    for name in adapters.targets:
        inputs, outputs = matrices[name]
        if not adapters.rank:
            moved += _IA3_BYTES * (inputs if name == "down_proj" else outputs)
            continue
        for width, height in ((inputs, adapters.rank), (adapters.rank, outputs)):
            seconds = product_seconds(
                *(rates,),
                rows=tokens,
                inputs=width,
                outputs=height,
                padded=False,
                element_bytes=element_bytes,
            )
            forward += seconds.forward
            backward += seconds.backward
        moved += _LORA_BYTES_OF_OUTPUTS * outputs + _LORA_BYTES_OF_INPUTS * inputs
        moved += _DROPOUT_BYTES * inputs * adapters.drops
        moved += _DEFENSIVE_CLONE_BYTES * outputs * adapters.is_quantized
    kernels = (_LORA_KERNELS + adapters.drops if adapters.rank else _IA3_KERNELS) * len(adapters.targets)
    unpacking = 0.0
    if adapters.is_quantized:
        size = sum(inputs * outputs for inputs, outputs in matrices.values())
        unpacking = _UNPACKED_BYTES * size / rates.memory_bytes
        kernels += _UNPACKING_KERNELS * len(matrices)
    return AdapterWork(forward, backward, moved, kernels, unpacking)


NO_ADAPTERS = AdapterWork(0.0, 0.0, 0.0, 0, 0.0)
