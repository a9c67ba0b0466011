"""Software: the constants of a step's time for one generation of kernels and engines.

Every constant is fitted to published throughput, unless its comment names another source. The measurements
of a GPU replace some of them (`hardware/calibration.py`). `bench/speed_accuracy.py` repeats the fits, prints
the tables, and tests the constants on other rows.
"""

import dataclasses
from dataclasses import dataclass

from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration


@dataclass(frozen=True)
class Shares:
    """A fraction for each architecture; an architecture without a value uses a related one."""

    ampere: float
    hopper: float
    ada: float | None = None
    blackwell: float | None = None
    geforce: float | None = None
    "all generations: clocks exceed the data sheet's boost, and the bf16 peak is half of the chip's"

    def of(self, architecture: str) -> float:
        """Return an architecture's fraction. Without a value, Blackwell uses Hopper's, others Ampere's."""
        share = getattr(self, architecture, None)
        if share is not None:
            return share
        return self.hopper if architecture == "blackwell" else self.ampere


@dataclass(frozen=True)
class Software:
    """Constants of one generation: shares are fractions of the hardware's peak, seconds are per step.

    Fields with a default have the same value in most generations.
    """

    name: str
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
    attention_share: Shares | None = None
    "fraction of the bf16 peak that attention without stored scores reaches; None: rates of attention.py"
    attention_half_length: float = 0.0
    "sequence length at which attention reaches half of attention_share"
    sdpa_kernel: str = "flash_2"
    "kernel that PyTorch's sdpa takes on Hopper and Blackwell: flash_2 or cudnn"
    layer_seconds: float = 0.0
    "extra time per layer and step with several ranks; n ranks cost exp(-few_ranks / (n - 1)) of it"
    sharded_layer_seconds: float = 0.0
    "more of the same in each micro-step if parameters are sharded"
    few_ranks: float = 1.0
    "see layer_seconds"
    ddp_seconds: float = 0.0
    "per step of DDP"
    jitter: float = 0.0115
    """standard deviation of a rank's compute time, as a fraction of it. Sinha et al., SC 2022: equal GPUs of
    a cluster differ by 8 % on average, so the slowest of some 400 is 4 % = sqrt(2 ln 400) x 1.15 % behind"""
    step_seconds: float = 0.0
    "per step, independent of the computation"
    fsdp_version: int = 2
    "the FSDP of these runs, unless the strategy names its own; FSDP1 does not copy gathered parameters"
    reduces_each_micro_step: bool = False
    "True if FSDP reduces gradients in every micro-step; accelerate reduces them once per step"
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

PAPER = Software(  # fitted to the paper's figures 1 to 4
    name="2024",
    fsdp_version=1,
    eager_slowdown=1.26,
    contention=0.0,
    layer_seconds=11.5e-3,
    sharded_layer_seconds=13.3e-3,
    few_ranks=1.43,
    ddp_seconds=0.0716,
)
"PyTorch 2.3 and transformers 4.4x over EFA, as in the paper"

LLM_FOUNDRY = Software(  # fitted to llm-foundry's bf16 tables and torchtitan's rows
    name="llm-foundry",
    # its benchmarks ran FlashAttention 1 in Triton (submit_benchmarks.py: attn_impl triton). An A100 runs it
    # at half of FlashAttention-2's rate (triton-lang/triton#1917: 72 TFLOP/s with 2,048 tokens, both passes)
    attention_share=Shares(ampere=0.334, hopper=0.176),
    attention_half_length=770.0,  # triton-lang/triton#1917
    eager_slowdown=0.85,
    contention=6.37,
    step_seconds=0.0249,
    fsdp_version=1,
    reduces_each_micro_step=True,
)
"Composer with PyTorch 2.1 and flash-attn, January 2024: only for comparison with its tables"

TODAY = Software(  # the fits above, without the constants of one cluster or one protocol
    name="2026",
    sdpa_kernel="cudnn",
    eager_slowdown=PAPER.eager_slowdown,
    contention=LLM_FOUNDRY.contention,
    # host time between two steps, while the GPU waits: it reads the loss and takes a batch. Chosen, not
    # timed: for published steps of up to 4,096 tokens the p90 error is 66 % without it and 25 % with it
    step_seconds=0.003,
    low=0.80,
    high=1.25,
)
"torch 2.11 and later, transformers 5; its band is wide, because most GPUs have no calibration"

SOFTWARE = {software.name: software for software in (PAPER, TODAY)}
"keyed by the value of `--software`"
