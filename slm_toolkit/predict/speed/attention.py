"""Seconds of attention kernels that store no scores, from published rates by kernel, GPU and head size.

FLOPs are counted as in FlashAttention's papers: a causal forward does half of the square's products, which is
4 S^2 / 2 x width for one sequence, and backward 2.5 times as many. The rates below are fitted to the
published tables in bench/data/attention_rates.csv (least squares of the logarithms).
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from slm_toolkit.base.typed_files import csv_rows
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.speed.software import Software

FLASH_BACKWARD = 2.5  # x forward: five products instead of two (Dao, arXiv 2307.08691, section 3)
Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class KernelRates:
    """Rates of one kernel on one GPU for one head size: a row of attention_rates.csv.

    A pass reaches flops / (1 + half_length / sequence length), with causal FLOPs: blocks on the diagonal are
    computed whole, and short sequences leave multiprocessors idle. `peak_flops`, dense bf16, is of the GPU
    that was measured: another GPU of its kind (see `_kind_of`) gets the same share of its own.
    """

    kernel: str
    kind: str
    head_dim: int
    peak_flops: float
    forward_flops: float
    forward_half_length: float
    backward_flops: float
    backward_half_length: float
    source: str


@cache
def _published() -> tuple[KernelRates, ...]:
    return csv_rows(Path(__file__).parent / "attention_rates.csv", KernelRates)


_KERNELS = {"flash_attention_3": "flash_3", "flash_attention_4": "flash_4"}
_FP32_SHARE = 0.5
"fraction of fp32 matrix products' rate that attention reaches in fp32; unverified"


def attention_seconds(
    spec: ModelSpec,
    config: RunConfig,
    gpu: Gpu,
    software: Software,
    *,
    tokens: int,
    fp32_flops: float | None = None,
) -> tuple[float, float]:
    """Return forward and backward seconds of a layer's attention without its projections: a mean of layers.

    Layers with a window compute fewer scores if the kernel skips them. `fp32_flops` is the rate of matrix
    products if attention computes in fp32.
    """
    kernel, seq_len = kernel_of(config.attn_implementation, gpu, software), config.seq_len
    is_shorter = spec.sliding_window is not None and spec.sliding_window < seq_len
    windows = spec.num_window_layers if is_shorter else 0
    forward = backward = 0.0
    for layers, attended in ((spec.num_layers - windows, seq_len / 2), (windows, _in_window(spec, config))):
        if not layers:
            continue
        flop = layers / spec.num_layers * 4.0 * attended * tokens * spec.num_heads * spec.head_dim
        if fp32_flops is not None:
            seconds = flop / (_FP32_SHARE * fp32_flops)
            forward, backward = forward + seconds, backward + FLASH_BACKWARD * seconds
            continue
        shape = {"kernel": kernel, "head_dim": spec.head_dim, "seq_len": 2 * attended}
        forward += pass_seconds("forward", flop, gpu, software, **shape)
        backward += pass_seconds("backward", flop, gpu, software, **shape)
    return forward, backward


def _in_window(spec: ModelSpec, config: RunConfig) -> float:
    """Return the scores that a kernel computes for each token of a layer with a window, on average.

    FlashAttention and flex_attention skip what is outside: window w of S tokens has w - w^2 / 2S. PyTorch's
    SDPA gets the window as a mask, with which it computes the whole square.
    """
    if not config.attn_implementation.startswith(("flash_attention", "flex_attention")):
        return config.seq_len
    window = spec.sliding_window or 0
    return window - window**2 / (2 * config.seq_len)


def kernel_of(attn_implementation: str, gpu: Gpu, software: Software) -> str:
    """Return the kernel that `--attn_implementation` takes on a GPU, as a key of the published rates."""
    if attn_implementation == "sdpa" and gpu.architecture in ("hopper", "blackwell"):
        return software.sdpa_kernel
    return _KERNELS.get(attn_implementation, "flash_2")


def pass_seconds(
    which: Pass,
    forward_flop: float,
    gpu: Gpu,
    software: Software,
    *,
    kernel: str,
    head_dim: int,
    seq_len: float,
) -> float:
    """Return the seconds of one pass; `forward_flop` are the FLOPs of forward in both cases."""
    flop = forward_flop * (FLASH_BACKWARD if which == "backward" else 1.0)
    peak = gpu.dense_bf16_flops_per_second
    measured = software.calibration.attention(which, head_dim)
    if measured is not None and kernel == kernel_of("sdpa", gpu, software):  # the one that was timed
        share, half = measured
    else:
        rates = rates_of_kernel(kernel, gpu, head_dim)
        share = getattr(rates, f"{which}_flops") / rates.peak_flops
        half = getattr(rates, f"{which}_half_length")
    return flop / (share * peak) * (1 + half / seq_len)


@cache
def rates_of_kernel(kernel: str, gpu: Gpu, head_dim: int) -> KernelRates:
    """Return the published rates of the nearest head size; a kernel that a GPU lacks runs as flash_2."""
    kind = _kind_of(gpu)
    found = (rates for rates in _published() if rates.kind == kind and rates.kernel in (kernel, "flash_2"))
    return min(found, key=lambda rates: (rates.kernel != kernel, abs(rates.head_dim - head_dim)))


def _kind_of(gpu: Gpu) -> str:
    """Return the kind of GPU: its softmax takes a smaller part of attention if its tensor cores are slower.

    `workstation` has four bf16 FLOPs for each of fp32 (A40, L40S, ...); an A100 has sixteen, a GeForce two.
    """
    ratio = gpu.dense_bf16_flops_per_second / gpu.fp32_flops_per_second
    return "workstation" if gpu.architecture != "geforce" and ratio < 8 else gpu.architecture
