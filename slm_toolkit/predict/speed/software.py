"""Software: the constants of a step's time that belong to a generation of kernels and engines.

No kernel was timed by us: every constant is fitted to published throughput (`bench/speed_accuracy.py` fits
them again, says how well they predict what they were not fitted to, and prints these tables) or counted by
hand where it says so.
"""

import dataclasses
from dataclasses import dataclass

from slm_toolkit.hardware.calibration import NOT_CALIBRATED, Calibration


@dataclass(frozen=True)
class Shares:
    """A share by architecture; one without a figure of its own borrows its relative's."""

    ampere: float
    hopper: float
    ada: float | None = None
    blackwell: float | None = None
    geforce: float | None = None
    "of any generation: they clock higher than the data sheet's boost, and their bf16 peak is half a chip's"

    def of(self, architecture: str) -> float:
        """Ada has Ampere's kind of tensor cores; Blackwell runs what was written for Hopper, or newer."""
        own = getattr(self, architecture, None)
        if own is not None:
            return own
        return self.hopper if architecture == "blackwell" else self.ampere


@dataclass(frozen=True)
class Software:
    """Shares are of what the hardware can do; seconds are of one step unless they say otherwise.

    What has a default is the same in all generations known here.
    """

    name: str
    matmul_share: Shares
    "of the dense bf16 peak, what large matrix products with aligned widths reach"
    flash_share: Shares
    "of the bf16 peak, what attention kernels without scores reach; causal half counted"
    eager_slowdown: float
    "time of eager PyTorch's element-wise kernels over their hand-counted bytes at the memory's rate"
    contention: float
    "share of the collectives' time that shows although there is enough to compute beside them"
    misaligned_share: Shares = Shares(ampere=0.317, hopper=0.153)  # fitted to the paper's figures
    "of matmul_share, what is left where a width is no multiple of 8"
    score_bytes: float = 32.3  # fitted to the paper's figures
    "that eager attention moves in forward per score; backward twice that. Hand count: 20"
    compiled_score_bytes: float = 8.0
    "the same where Inductor fuses what happens between its two products; hand count"
    compiled_slowdown: float = 1.0
    "as eager_slowdown, of compiled and fused kernels; not fitted"
    kernel_seconds: float = (
        14e-6  # 20 ms for a step of GPT-2 124M with one sequence, eager, on an H100 (gollem)
    )
    "the host's, to launch one kernel from Python: what small steps are bound by"
    layer_seconds: float = 0.0
    "per layer and step that more than one rank costs; n ranks exp(-few_ranks / (n - 1)) of it"
    sharded_layer_seconds: float = 0.0
    "on top of it where parameters are sharded, in each micro-step"
    few_ranks: float = 1.0
    "see layer_seconds"
    ddp_seconds: float = 0.0
    "per step of DDP"
    step_seconds: float = 0.0
    "per step, whatever is computed"
    first_step_seconds: float = 0.0
    "what the paper's protocol adds: a slow first step averaged over ten; no steady state has it"
    reduces_each_micro_step: bool = False
    "gradients of FSDP under accumulation; accelerate reduces them once"
    low: float = 0.88
    "times the expected rate: nine of ten published rows were not slower than that, left out of the fit"
    high: float = 1.14
    "and nine of ten not faster"
    calibration: Calibration = NOT_CALIBRATED
    "what was measured on the GPU in question"


def calibrated(software: Software, calibration: Calibration) -> Software:
    """With a GPU's measured constants; the same object where nothing was measured."""
    if calibration == NOT_CALIBRATED:
        return software
    names = ("eager_slowdown", "compiled_slowdown", "kernel_seconds")
    measured = {name: value for name in names if (value := getattr(calibration, name)) is not None}
    return dataclasses.replace(software, calibration=calibration, **measured)


MEMORY_SHARE = 0.85
"of the memory's data-sheet rate that a kernel which only moves bytes reaches; fixed, not fitted"

_MATMUL, _FLASH = Shares(ampere=0.834, hopper=0.728), Shares(ampere=0.316, hopper=0.180)
"fitted to llm-foundry's and torchtitan's tables"

PAPER = Software(  # fitted to the paper's figures 1 to 4
    name="2024",
    matmul_share=_MATMUL,
    flash_share=_FLASH,
    eager_slowdown=1.30,
    contention=0.0,
    layer_seconds=12.0e-3,
    sharded_layer_seconds=13.9e-3,
    few_ranks=1.41,
    ddp_seconds=0.080,
    first_step_seconds=0.105,
)
"PyTorch 2.3 and transformers 4.4x over EFA, as the paper ran them"

LLM_FOUNDRY = Software(  # fitted to llm-foundry's bf16 tables and torchtitan's rows
    name="llm-foundry",
    matmul_share=_MATMUL,
    flash_share=_FLASH,
    eager_slowdown=1.68,
    contention=0.60,
    step_seconds=0.063,
    reduces_each_micro_step=True,
)
"Composer with PyTorch 2.1 and flash-attn, January 2024: only to be held against its tables"

TODAY = Software(  # the fits above, less what was one cluster's or one protocol's
    name="2026",
    # RunPod's B200 and three kinds of GeForce, in bench/data/other_speed.csv
    matmul_share=Shares(ampere=0.834, hopper=0.728, blackwell=0.62, geforce=1.0),
    # torchtitan's H100 rows; the last two are guesses
    flash_share=Shares(ampere=0.316, hopper=0.30, blackwell=0.20, geforce=0.50),
    eager_slowdown=PAPER.eager_slowdown,
    contention=LLM_FOUNDRY.contention,
    # the host between two steps, while the GPU waits: it reads the loss, takes a batch. Not timed: chosen, as
    # other people's steps of up to 4,096 tokens are predicted 66 % wrong (p90) without it, 25 % with it
    step_seconds=0.003,
    low=0.80,
    high=1.25,
)
"torch 2.13, transformers 5: not calibrated on a GPU by us; its band is wide for that"

SOFTWARE = {software.name: software for software in (PAPER, TODAY)}
"by `--software`"
