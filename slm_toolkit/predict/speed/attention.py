"""Seconds of attention kernels that store no scores, from published rates by kernel, GPU and head size.

FLOPs are counted as in FlashAttention's papers: a causal forward does half of the square's products, which is
4 S^2 / 2 x width for one sequence, and backward 2.5 times as many. The rates below are fitted to the
published tables in bench/data/attention_rates.csv (least squares of the logarithms).
"""

from dataclasses import dataclass
from typing import Literal

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.speed.software import Software

FLASH_BACKWARD = 2.5  # x forward: five products instead of two (Dao, arXiv 2307.08691, section 3)
Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Rate:
    """Rate of one pass: flops = long_flops / (1 + half_length / sequence length), with causal FLOPs."""

    long_flops: float
    "per second, for long sequences"
    half_length: float
    """sequence length at which the kernel reaches half of long_flops: blocks on the diagonal are computed
    whole, and short sequences leave multiprocessors idle"""


@dataclass(frozen=True)
class KernelRates:
    """Rates of one kernel on one GPU for one head size."""

    peak_flops: float
    "dense bf16 peak of the GPU that was measured: another GPU of its kind gets the same share of its own"
    forward: Rate
    backward: Rate


# keyed by kernel, kind of GPU and head size. The kinds are of `_kind_of`.
_RATES = {
    # Dao, arXiv 2307.08691: figure 4 has both passes together, its text 73 % and 63 % of the peak for one
    ("flash_2", "ampere", 64): KernelRates(312e12, Rate(195.4e12, 505), Rate(168.8e12, 505)),
    ("flash_2", "ampere", 128): KernelRates(312e12, Rate(215.4e12, 485), Rate(186.0e12, 485)),
    # forward: Shah et al., arXiv 2407.08608, figure 5; both passes: Dao's figure 7
    ("flash_2", "hopper", 64): KernelRates(989e12, Rate(307.7e12, 359), Rate(286.9e12, 615)),
    ("flash_2", "hopper", 128): KernelRates(989e12, Rate(350.5e12, 403), Rate(327.4e12, 582)),
    # without a mask, it is 1.10 and 1.13 times as fast as on an H100 with heads of 64
    # (Dao-AILab/flash-attention#1589), and 0.975 times with heads of 128 (meta-pytorch/tritonbench#171)
    ("flash_2", "blackwell", 64): KernelRates(2250e12, Rate(337e12, 359), Rate(324e12, 615)),
    ("flash_2", "blackwell", 128): KernelRates(2250e12, Rate(342e12, 403), Rate(319e12, 582)),
    # an RTX A5000 without a mask (gpu-mode/ring-attention#10); the mask adds to half_length as on an H100
    ("flash_2", "workstation", 64): KernelRates(111.1e12, Rate(82.0e12, 280), Rate(79.4e12, 622)),
    # an RTX 4090 with 2,048 tokens, with and without a mask (apache/tvm, tl_doc/flash_perf.md)
    ("flash_2", "geforce", 64): KernelRates(165.2e12, Rate(168.9e12, 385), Rate(140.8e12, 940)),
    ("flash_2", "geforce", 128): KernelRates(165.2e12, Rate(169.3e12, 245), Rate(140.5e12, 851)),
    # arXiv 2407.08608, figures 5 and 6; its backward has no mask, which adds to half_length as in flash_2
    ("cudnn", "hopper", 64): KernelRates(989e12, Rate(397.5e12, 391), Rate(451.2e12, 701)),
    ("cudnn", "hopper", 128): KernelRates(989e12, Rate(561.0e12, 387), Rate(541.9e12, 684)),
    ("flash_3", "hopper", 64): KernelRates(989e12, Rate(502.9e12, 822), Rate(496.1e12, 767)),
    ("flash_3", "hopper", 128): KernelRates(989e12, Rate(655.1e12, 603), Rate(591.3e12, 735)),
    # Dao-AILab/flash-attention#2605 (forward) and #2280 (backward with 8,192 tokens and heads of 128); heads
    # of 64 and half_length of backward are in the ratio of forward
    ("flash_4", "blackwell", 64): KernelRates(2250e12, Rate(902e12, 1147), Rate(870e12, 1147)),
    ("flash_4", "blackwell", 128): KernelRates(2250e12, Rate(1348e12, 951), Rate(1300e12, 951)),
    # flash_4 is up to 1.3 times as fast (Together AI's blog on FlashAttention-4, cuDNN 9.13)
    ("cudnn", "blackwell", 64): KernelRates(2250e12, Rate(694e12, 1147), Rate(669e12, 1147)),
    ("cudnn", "blackwell", 128): KernelRates(2250e12, Rate(1037e12, 951), Rate(1000e12, 951)),
}
_KERNELS = {"sdpa_cudnn": "cudnn", "flash_attention_3": "flash_3", "flash_attention_4": "flash_4"}
_HEAD_SIZES = (64, 128)
_PADDED_HEADS = (32, 64, 96, 128, 192, 256)
"head sizes that FlashAttention's kernels are built for; others are padded (csrc/flash_attn, HEADDIM_SWITCH)"
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
    kernel, windows = kernel_of(config.attn_implementation, gpu, software), _window_layers(spec, config)
    parts = [(spec.num_layers - windows, config.seq_len / 2)]
    if windows:
        parts.append((windows, attended_tokens(spec, config)))
    forward = backward = 0.0
    for layers, attended in parts:
        flop = layers / spec.num_layers * 4.0 * attended * tokens * spec.num_heads * spec.head_dim
        if fp32_flops is not None:
            seconds = flop / (_FP32_SHARE * fp32_flops)
            forward, backward = forward + seconds, backward + FLASH_BACKWARD * seconds
            continue
        shape = {"kernel": kernel, "head_dim": spec.head_dim, "seq_len": 2 * attended}
        forward += pass_seconds("forward", flop, gpu, software, **shape)
        backward += pass_seconds("backward", flop, gpu, software, **shape)
    return forward, backward


def _window_layers(spec: ModelSpec, config: RunConfig) -> int:
    """Return the layers whose window is shorter than the sequence."""
    is_shorter = spec.sliding_window is not None and spec.sliding_window < config.seq_len
    return spec.num_window_layers if is_shorter else 0


def attended_tokens(spec: ModelSpec, config: RunConfig) -> float:
    """Return the scores that a kernel computes for each token of a layer with a window, on average.

    FlashAttention and flex_attention skip what is outside: window w of S tokens has w - w^2 / 2S. PyTorch's
    SDPA gets the window as a mask, with which it computes the whole square.
    """
    if not config.attn_implementation.startswith(("flash_attention", "flex_attention")):
        return config.seq_len
    return spec.sliding_window - spec.sliding_window**2 / (2 * config.seq_len)


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
        share, half = measured[0] / _padding(head_dim), measured[1]
    elif software.attention_share is not None:
        share, half = software.attention_share.of(gpu.architecture), software.attention_half_length
    else:
        rates = rates_of_kernel(kernel, gpu, head_dim)
        rate = rates.forward if which == "forward" else rates.backward
        share = rate.long_flops / rates.peak_flops / _padding(head_dim)
        half = rate.half_length
    return flop / (share * peak) * (1 + half / seq_len)


def rates_of_kernel(kernel: str, gpu: Gpu, head_dim: int) -> KernelRates:
    """Return the published rates of the nearest head size; a kernel that a GPU lacks runs as flash_2."""
    kind = _kind_of(gpu)
    for name in (kernel, "flash_2"):
        for size in sorted(_HEAD_SIZES, key=lambda size: abs(size - head_dim)):
            if rates := _RATES.get((name, kind, size)):
                return rates
    raise AssertionError(f"no rates for {gpu.name}")


def _kind_of(gpu: Gpu) -> str:
    """Return the kind of GPU: its softmax takes a smaller part of attention if its tensor cores are slower.

    `workstation` has four bf16 FLOPs for each of fp32 (A40, L40S, ...); an A100 has sixteen, a GeForce two.
    """
    ratio = gpu.dense_bf16_flops_per_second / gpu.fp32_flops_per_second
    return "workstation" if gpu.architecture != "geforce" and ratio < 8 else gpu.architecture


def _padding(head_dim: int) -> float:
    """Return padded over real head size."""
    return next((size for size in _PADDED_HEADS if size >= head_dim), head_dim) / head_dim
