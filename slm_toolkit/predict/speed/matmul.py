"""Seconds of a matrix product on a GPU, from its shape: tiles, waves, alignment and operand traffic."""

import math
from dataclasses import dataclass
from functools import lru_cache

from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.predict.speed.software import MEMORY_SHARE, Shares, Software

ALIGNMENT = 8
"elements: tensor cores load 16 bytes of bf16 at once; widths that are not a multiple get slow kernels"

# rows x columns that a streaming multiprocessor computes at once, and the fraction of the best rate that the
# tile reaches: a smaller tile loads more bytes per product. Counted by hand from operand reuse, not fitted.
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (64, 64, 0.60),
)
_SPLITS = (1, 2, 4, 8)
"possible splits of the summed dimension, which let a small result use all multiprocessors"
_SPLIT_COST = 0.03
"fraction of the time to add up each part"
_DEPTH = 32
"elements of the summed dimension that a multiprocessor loads at once"


_BEST_SHARE = Shares(ampere=0.869, hopper=0.803)
"best measured rate over peak of the A100 and H100 (gpus.csv), for a GPU that was not measured"
_FUSED_SHARE = 0.43
"fraction of the memory's data-sheet rate that PyTorch's operations reach on chunks of 64 MiB, on an H100"
_NOT_OVERLAPPED = 0.5
"fraction of the shorter of operand traffic and compute; published rows fit 0 and 1 equally well"


@dataclass(frozen=True)
class Rates:
    """Speeds of a GPU with a generation of software."""

    matmul_flops: float
    "for large products with aligned widths"
    misaligned: float
    "fraction of that rate for products with a width that is not a multiple of 8"
    memory_bytes: float
    "per second, for a kernel that only moves bytes"
    num_sms: int
    peak_flops: float = math.inf
    "dense bf16 peak, to which the shares of a calibration refer"
    peak_memory_bytes: float = math.inf
    element_bytes: int = 2
    calibration: Calibration = NOT_CALIBRATED

    def misaligned_at(self, *widths: int) -> float:
        """Return the fraction of the rate for misaligned widths, by the power of two that divides them."""
        divisor = math.gcd(*widths, ALIGNMENT)
        measured = getattr(self.calibration, f"misaligned_share_{divisor}")
        return self.misaligned if measured is None else measured

    @property
    def optimizer_bytes(self) -> float:
        share = self.calibration.optimizer_share
        return self.memory_bytes if share is None else share * self.peak_memory_bytes

    def loss_bytes(self, arithmetic: str) -> float:
        """Return the rate of a loss, by a key of LOGIT_BYTES."""
        shares = {
            "hf": self.calibration.loss_share_hf,
            "fused": self.calibration.loss_share_fused or _FUSED_SHARE,
        }
        share = shares.get(arithmetic)
        return self.memory_bytes if share is None else share * self.peak_memory_bytes


@lru_cache(maxsize=256)
def rates_of(gpu: Gpu, software: Software) -> Rates:
    """Return the GPU's rates. A GPU without measured matrix products has the share of a related one."""
    measured = software.calibration
    peak = gpu.dense_bf16_flops_per_second
    best = gpu.measured_matmul_flops_per_second or peak * _BEST_SHARE.of(gpu.architecture)
    matmul_flops = best * software.matmul_share
    return Rates(
        matmul_flops=matmul_flops if measured.matmul_share is None else peak * measured.matmul_share,
        misaligned=software.misaligned_share.of(gpu.architecture),
        memory_bytes=gpu.memory_bytes_per_second * (measured.memory_share or MEMORY_SHARE),
        num_sms=gpu.num_sms,
        peak_flops=peak,
        peak_memory_bytes=gpu.memory_bytes_per_second,
        calibration=measured,
    )


def is_aligned(*widths: int) -> bool:
    return all(width % ALIGNMENT == 0 for width in widths)


def next_aligned(width: int) -> int:
    return -(-width // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ProductSeconds:
    """Seconds of y = x W and its gradients, with x of (rows, inputs) and W of (inputs, outputs)."""

    forward: float
    input_gradient: float
    weight_gradient: float
    "not computed if W is frozen"

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient


@lru_cache(maxsize=65536)
def product_seconds(rates: Rates, *, rows: int, inputs: int, outputs: int, padded: bool) -> ProductSeconds:
    """Return the seconds of a linear layer's three products.

    A product takes the longer of compute and operand traffic, plus half of the shorter. If `padded`, Inductor
    copies misaligned operands into aligned ones, and the product runs at full rate.
    """
    aligned = is_aligned(inputs, outputs)
    rate = rates.matmul_flops * (1.0 if aligned or padded else rates.misaligned_at(inputs, outputs))
    flop = 2.0 * rows * inputs * outputs
    operands = rates.element_bytes * (rows * inputs + rows * outputs + inputs * outputs)
    moved = (
        operands / rates.memory_bytes * (3.0 if padded and not aligned else 1.0)
    )  # the copy reads and writes
    sms, start = rates.num_sms, rates.calibration.product_start_seconds or 0.0

    def seconds(result_rows: int, result_columns: int, summed: int) -> float:
        busy = flop / rate / wave_efficiency(result_rows, result_columns, summed, num_sms=sms)
        return start + max(busy, moved) + _NOT_OVERLAPPED * min(busy, moved)

    return ProductSeconds(
        forward=seconds(rows, outputs, inputs),
        input_gradient=seconds(rows, inputs, outputs),
        weight_gradient=seconds(inputs, outputs, rows),
    )


@lru_cache(maxsize=65536)
def wave_efficiency(rows: int, columns: int, depth: int, *, num_sms: int) -> float:
    """Return the fraction of the rate that the best tiling reaches; its last wave is not full."""
    ideal = rows * columns * depth / num_sms
    best = math.inf
    for tile_rows, tile_columns, reuse in _TILES:
        tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        area = tile_rows * tile_columns / reuse
        for splits in _SPLITS:
            waves = math.ceil(tiles * splits / num_sms)
            steps = math.ceil(depth / splits / _DEPTH) * _DEPTH
            added = 1.0 if splits == 1 else 1 + _SPLIT_COST * splits
            best = min(best, waves * area * steps * added)
    return ideal / best
