"""A GPU's own ceilings, and what a matrix width off the multiple of 8 costs on it: bf16, on random data.

    python bench/gpu/gemms.py            # seconds; the last line of stdout is JSON

16384 x 1536 x F are the tokens, hidden size and FFN width of slm-500m at batch 16 and 1024 tokens: forward
[16384, 1536] @ [1536, F], and both products of backward. 2332 and 4147 are the paper's, of 100M and 500M.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

TOKENS, HIDDEN, WIDTHS = 16_384, 1536, (2332, 4147, 4148, 4152, 4160)


def seconds(work: Callable[[], torch.Tensor]) -> float:
    """Median of a fifth of a second's calls on the device."""
    return Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=0.2).median


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shrink = 1 if device == "cuda" else 64  # a CPU only shows that this runs
    tokens = TOKENS // shrink

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)

    rows = []
    for width in WIDTHS:
        x, weight, upstream = matrix(tokens, HIDDEN), matrix(width, HIDDEN), matrix(tokens, width)
        flops = 2 * tokens * HIDDEN * width
        row = {"width": width}
        for name, work in (
            ("forward", lambda x=x, weight=weight: x @ weight.t()),
            ("dgrad", lambda upstream=upstream, weight=weight: upstream @ weight),
            ("wgrad", lambda upstream=upstream, x=x: upstream.t() @ x),
        ):
            row[f"{name}_tflops"] = flops / seconds(work) / 1e12
        rows.append(row)
        print(row, file=sys.stderr)
    side = 8192 // (8 if shrink > 1 else 1)
    a, b = matrix(side, side), matrix(side, side)
    big = torch.empty(2**30 // shrink, device=device, dtype=torch.uint8)
    target = torch.empty_like(big)
    ceilings = {
        "matmul_tflops": 2 * side**3 / seconds(lambda: a @ b) / 1e12,
        "copy_bytes_per_second": 2 * big.numel() / seconds(lambda: target.copy_(big)),
    }
    print(json.dumps({"gemms": rows, **ceilings}))


if __name__ == "__main__":
    main()
