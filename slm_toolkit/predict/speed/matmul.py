"""Seconds of one bf16 matrix product on a GPU, by its shape: tiles, waves, alignment, operand traffic."""

import math
from dataclasses import dataclass
from functools import lru_cache

from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.predict.speed.software import MEMORY_SHARE, Software

ALIGNMENT = 8
"elements: 16 bytes of bf16, what tensor cores load at once; other widths get slow kernels"

# rows x columns that a streaming multiprocessor works on at once, and what of the best rate such a tile
# reaches: smaller ones load more per product. Counted by hand from the operands' reuse, not fitted.
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.80),
    (64, 128, 0.80),
    (64, 64, 0.60),
)
_SPLITS = (1, 2, 4, 8)
"parts that the summed dimension may be cut into, so that a small result keeps all multiprocessors busy"
_SPLIT_COST = 0.03
"of the time, for adding up each part"
_DEPTH = 32
"of the summed dimension that a multiprocessor takes at once"


_NOT_OVERLAPPED = 0.5
"of operand traffic and compute, the shorter; published rows can't tell 0 from 1"


@dataclass(frozen=True)
class Rates:
    """What a GPU does per second under a generation of software."""

    matmul_flops: float
    "of large products with aligned widths"
    misaligned: float
    "of that rate, what is left of products with a width off the multiple of 8"
    flash_flops: float
    "of attention without scores, causal half counted"
    memory_bytes: float
    "that a kernel which only moves bytes moves"
    num_sms: int
    peak_flops: float = math.inf
    "dense bf16, as shares of a calibration count it"
    peak_memory_bytes: float = math.inf
    calibration: Calibration = NOT_CALIBRATED

    def misaligned_at(self, *widths: int) -> float:
        """By the largest power of two that divides all widths."""
        divisor = math.gcd(*widths, ALIGNMENT)
        measured = getattr(self.calibration, f"misaligned_share_{divisor}")
        return self.misaligned if measured is None else measured

    def flash_seconds(self, which: str, flop: float, *, head_dim: int, seq_len: int) -> float:
        """Of attention without scores; `which`: forward or backward."""
        measured = self.calibration.attention(which, head_dim)
        if measured is None:
            return flop / self.flash_flops
        share, half = measured
        return flop / (share * self.peak_flops) * (1 + half / seq_len)

    @property
    def optimizer_bytes(self) -> float:
        share = self.calibration.optimizer_share
        return self.memory_bytes if share is None else share * self.peak_memory_bytes

    def loss_bytes(self, loss_kernel: str) -> float:
        is_hf = loss_kernel == "hf"
        share = self.calibration.loss_share_hf if is_hf else self.calibration.loss_share_fused
        return self.memory_bytes if share is None else share * self.peak_memory_bytes


@lru_cache(maxsize=256)
def rates_of(gpu: Gpu, software: Software) -> Rates:
    """No faster than the best product that anyone measured on the GPU."""
    measured = software.calibration
    peak = gpu.dense_bf16_flops_per_second
    best = gpu.measured_matmul_flops_per_second or peak
    matmul_flops = min(peak * software.matmul_share.of(gpu.architecture), best)
    return Rates(
        matmul_flops=matmul_flops if measured.matmul_share is None else peak * measured.matmul_share,
        misaligned=software.misaligned_share.of(gpu.architecture),
        flash_flops=peak * software.flash_share.of(gpu.architecture),
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
    """y = x W for x of (rows, inputs), W of (inputs, outputs)."""

    forward: float
    input_gradient: float
    weight_gradient: float
    "not made where W is frozen"

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        return self.forward + self.backward


@lru_cache(maxsize=65536)
def product_seconds(
    rates: Rates, *, rows: int, inputs: int, outputs: int, padded: bool, element_bytes: int = 2
) -> ProductSeconds:
    """A linear layer's three products: the longer of compute and operand traffic, and half of the shorter.

    `padded`: Inductor copies misaligned operands into aligned ones, and the product runs at full rate.
    """
    aligned = is_aligned(inputs, outputs)
    rate = rates.matmul_flops * (1.0 if aligned or padded else rates.misaligned_at(inputs, outputs))
    flop = 2.0 * rows * inputs * outputs
    operands = element_bytes * (rows * inputs + rows * outputs + inputs * outputs)
    moved = operands / rates.memory_bytes * (3.0 if padded and not aligned else 1.0)  # and copied: 2 more
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
    """Share of the rate that the best tiling of a (rows, columns) result leaves: last waves are not full."""
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
