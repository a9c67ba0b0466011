"""Calibration: constants measured on one GPU; they replace the constants fitted to published runs.

`bench/gpu/digest.py` writes the rows of `hardware/calibration.csv`. A GPU without rows keeps the constants of
`predict/speed/software.py` and `predict/memory/machine.py`.
"""

import dataclasses
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from slm_toolkit.base.typed_files import Count, NonNegative, Positive, csv_rows

FILE = Path(__file__).parent / "calibration.csv"
VARIABLE = "SLM_CALIBRATION"
"environment variable: path of another calibration file"
SAME_CHIP = {"h200": "h100-80gb", "gh200": "h100-80gb"}
"GPUs that take each term that has no row of theirs from another GPU, whose chip they have"
_OF_MACHINE = ("kernel_seconds", "cuda_context_bytes")
"terms that are not the chip's"


@dataclass(frozen=True)
class Calibration:
    """The measured terms of one GPU; None: not measured.

    A share is a fraction of the data sheet's rate: dense bf16 FLOPS, or memory bytes per second.
    """

    matmul_share: float | None = None
    "share reached by large matrix products with aligned widths"
    misaligned_share_1: float | None = None
    "factor on matmul_share if a width is odd"
    misaligned_share_2: float | None = None
    "factor on matmul_share if a width is even but not a multiple of 4"
    misaligned_share_4: float | None = None
    "factor on matmul_share if a width is a multiple of 4 but not of 8"
    product_start_seconds: float | None = None
    "fixed time of each matrix product; it makes products with few rows slow"
    attention_forward_share_64: float | None = None
    "share reached by fused attention with head size 64 at long sequences; counts the causal half only"
    attention_forward_half_64: float | None = None
    "the sequence length at which attention reaches half of that share"
    attention_backward_share_64: float | None = None
    attention_backward_half_64: float | None = None
    attention_forward_share_128: float | None = None
    attention_forward_half_128: float | None = None
    attention_backward_share_128: float | None = None
    attention_backward_half_128: float | None = None
    memory_share: float | None = None
    "share of the memory rate reached by kernels that only move bytes"
    optimizer_share: float | None = None
    "share of the memory rate reached by the optimizer's step"
    loss_share_hf: float | None = None
    "share reached by transformers' cross-entropy"
    loss_share_fused: float | None = None
    "share reached by a cross-entropy that overwrites its logits"
    eager_slowdown: float | None = None
    compiled_slowdown: float | None = None
    kernel_seconds: float | None = None
    "eager_slowdown, compiled_slowdown and kernel_seconds: see Software"
    cuda_context_bytes: float | None = None
    described: str | None = None
    "one phrase: number of terms, date and source"

    def attention(self, which: str, head_dim: int) -> tuple[float, float] | None:
        """Return share and half-length of the nearest measured head size; `which`: forward or backward."""
        for size in sorted((64, 128), key=lambda size: abs(size - head_dim)):
            share = getattr(self, f"attention_{which}_share_{size}")
            if share is not None:
                return share, getattr(self, f"attention_{which}_half_{size}") or 0.0
        return None


NOT_CALIBRATED = Calibration()
TERMS = tuple(field.name for field in dataclasses.fields(Calibration) if field.name != "described")


@dataclass(frozen=True)
class CalibrationRow:
    """One row of `hardware/calibration.csv`."""

    gpu: str
    term: Literal[TERMS]
    value: Positive
    residual: NonNegative | None
    "median of |predicted / measured - 1| over the fitted measurements; None: as many terms as measurements"
    num_measurements: Count
    evidence: str
    source: str
    date: str


def calibration_of(gpu: str | None) -> Calibration:
    """Return the Calibration of a GPU by its canonical name; a term without a row is the same chip's.

    Returns NOT_CALIBRATED if neither has a row.
    """
    if gpu is None:
        return NOT_CALIBRATED
    return completed(gpu, _calibrations(_file()).get(gpu, NOT_CALIBRATED))


def completed(gpu: str, own: Calibration) -> Calibration:
    """Return a GPU's calibration with the same chip's terms where it has none."""
    chips = _calibrations(_file()).get(SAME_CHIP.get(gpu), NOT_CALIBRATED)
    if chips == NOT_CALIBRATED:
        return own
    missing = [term for term in TERMS if term not in _OF_MACHINE and getattr(own, term) is None]
    described = own.described or f"{chips.described}, on a GPU with the same chip"
    return dataclasses.replace(own, **{term: getattr(chips, term) for term in missing}, described=described)


def is_calibrated(gpu: str) -> bool:
    """Return whether the GPU itself was measured, not only one with the same chip."""
    return gpu in _calibrations(_file())


def _file() -> Path:
    return Path(os.environ.get(VARIABLE) or FILE)


def rows_of(file: Path) -> tuple[CalibrationRow, ...]:
    return csv_rows(file, CalibrationRow, hint="write it with bench/gpu/digest.py")


@cache
def _calibrations(file: Path) -> dict[str, Calibration]:
    rows_by_gpu: dict[str, list[CalibrationRow]] = {}
    for row in rows_of(file):
        rows_by_gpu.setdefault(row.gpu, []).append(row)
    return {
        gpu: Calibration(
            **{row.term: row.value for row in rows},
            described=f"{len(rows)} terms measured on {rows[-1].date} ({rows[-1].source})",
        )
        for gpu, rows in rows_by_gpu.items()
    }
