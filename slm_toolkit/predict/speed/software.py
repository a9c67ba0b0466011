"""Software: the constants of a step's time for one generation of kernels and engines, and today's values.

Every constant is fitted to published throughput, unless its comment names another source. The measurements
of a GPU replace some of them (`hardware/calibration.py`). `bench/speed_accuracy.py` repeats the fits, prints
the tables, and tests the constants on other rows.
"""

import dataclasses
from dataclasses import dataclass

from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration


@dataclass(frozen=True)
class Shares:
    """A fraction for each of the architectures that were measured."""

    ampere: float
    hopper: float

    def of(self, architecture: str) -> float:
        """Return an architecture's fraction: Blackwell uses Hopper's, others Ampere's."""
        return self.hopper if architecture in ("hopper", "blackwell") else self.ampere


@dataclass(frozen=True)
class Software:
    """Constants of one generation: shares are fractions of the hardware's peak, seconds are per step.

    Fields with a default have the same value in most generations.
    """

    eager_slowdown: float
    "eager PyTorch's element-wise kernels: their time / (hand-counted bytes / memory rate)"
    contention: float
    """passes through the GPU's memory by which a sent byte slows down the compute beside it. NCCL's kernels
    occupy multiprocessors and memory in proportion to their bytes; on a slow network they wait instead"""
    matmul_share: float = 0.967
    """fraction of a GPU's best measured rate (MAMF, of a search over shapes) that large matrix products with
    aligned widths reach; fitted to llm-foundry's and torchtitan's tables"""
    misaligned_share: Shares = Shares(ampere=0.326, hopper=0.147)  # fitted to the paper's figures
    "fraction of the rate of aligned matrix products if a width is not a multiple of 8"
    score_bytes: float = 30.3  # fitted to the paper's figures
    "bytes per score that eager attention moves in forward; backward moves twice as many. Hand count: 20"
    compiled_score_bytes: float = 8.0
    "the same if Inductor fuses the kernels between the two products; hand count"
    compiled_slowdown: float = 1.0
    "eager_slowdown of compiled and fused kernels; not fitted"
    kernel_seconds: float = (
        14e-6  # 20 ms for a step of GPT-2 124M with one sequence, eager, on an H100 (gollem)
    )
    "host time to launch one kernel from Python; it limits small steps"
    sdpa_kernel: str = "flash_2"
    "kernel that PyTorch's sdpa takes on Hopper and Blackwell: flash_2 or cudnn"
    jitter: float = 0.0115
    """standard deviation of a rank's compute time, as a fraction of it. Sinha et al., SC 2022: equal GPUs of
    a cluster differ by 8 % on average, so the slowest of some 400 is 4 % = sqrt(2 ln 400) x 1.15 % behind"""
    step_seconds: float = 0.0
    "per step, independent of the computation"
    low: float = 0.88
    "factor on the expected rate: nine of ten published rows, left out of the fit, were at least as fast"
    high: float = 1.14
    "the same: nine of ten were at most as fast"
    calibration: Calibration = NOT_CALIBRATED
    "the measurements of the setup's GPU"


def calibrated(software: Software, calibration: Calibration) -> Software:
    """Return the software with a GPU's measured constants, or unchanged if nothing was measured."""
    if calibration == NOT_CALIBRATED:
        return software
    names = ("eager_slowdown", "compiled_slowdown", "kernel_seconds")
    measured = {name: value for name in names if (value := getattr(calibration, name)) is not None}
    return dataclasses.replace(software, calibration=calibration, **measured)


MEMORY_SHARE = 0.85
"fraction of the memory's data-sheet rate for a kernel that only moves bytes; fixed, not fitted"

TODAY = Software(  # the fits, without the constants of one cluster or one protocol
    sdpa_kernel="cudnn",
    eager_slowdown=1.26,  # fitted to the paper's figures 1 to 4
    contention=6.37,  # fitted to llm-foundry's bf16 tables and torchtitan's rows
    # host time between two steps, while the GPU waits: it reads the loss and takes a batch. Chosen, not
    # timed: for published steps of up to 4,096 tokens the p90 error is 66 % without it and 25 % with it
    step_seconds=0.003,
    low=0.80,
    high=1.25,
)
"torch 2.11 and later, transformers 5; its band is wide, because most GPUs have no calibration"
