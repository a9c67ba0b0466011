"""Published rates of attention kernels, and the two constants of each in `predict/speed/attention.py`.

    pip install scipy && python bench/attention_rates.py

bench/data/attention_rates.csv restates tables and bars; FLOPs are counted as in FlashAttention's papers.
Figures 4 and 7 of arXiv 2307.08691 have both passes together. They were restated without the paper at hand:
the H100's agree with the forward passes of arXiv 2407.08608 within 2 %, the A100's with the text's 50 to 73 %
of the peak. Each line of the output fits
rate = long / (1 + half / sequence length) to one series, and shows its worst error.
"""

import csv
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

FILE = Path(__file__).parent / "data" / "attention_rates.csv"


@dataclass(frozen=True)
class Series:
    """One kernel's published rates over sequence lengths."""

    kernel: str
    gpu: str
    head_dim: int
    is_causal: bool
    which: str
    "forward, backward or both"
    seq_lens: tuple[int, ...]
    flops_per_second: tuple[float, ...]
    source: str


def published() -> tuple[Series, ...]:
    with FILE.open(newline="") as file:
        lines = list(csv.DictReader(file))
    keys = ("kernel", "gpu", "head_dim", "causal", "pass", "source")
    groups = groupby(lines, key=lambda line: tuple(line[key] for key in keys))
    return tuple(
        Series(
            kernel,
            gpu,
            int(head_dim),
            causal == "1",
            which,
            tuple(int(line["seq_len"]) for line in found),
            tuple(1e12 * float(line["tflops_per_second"]) for line in found),
            source,
        )
        for (kernel, gpu, head_dim, causal, which, source), group in groups
        for found in [list(group)]
    )


def main() -> None:
    for series in published():
        name = f"{series.kernel} {series.gpu} {series.head_dim} {series.which}"
        name += "" if series.is_causal else " without a mask"
        if len(series.seq_lens) < 3:
            print(f"{name:<48} too few lengths for a fit")
            continue
        lengths, rates = np.array(series.seq_lens), np.array(series.flops_per_second)

        def error(logs: np.ndarray, lengths: np.ndarray = lengths, rates: np.ndarray = rates) -> np.ndarray:
            long, half = np.exp(logs)
            return np.log(long / (1 + half / lengths) / rates)

        fit = least_squares(error, [np.log(rates.max()), np.log(300)])
        long, half = np.exp(fit.x)
        worst = np.abs(np.expm1(fit.fun)).max()
        print(f"{name:<48} long {long / 1e12:7.1f} TFLOP/s  half {half:6.0f}  worst {worst:5.1%}")


if __name__ == "__main__":
    main()
