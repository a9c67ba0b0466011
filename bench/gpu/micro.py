"""Time the kernels that a training step is made of, one by one: what the speed model needs to know of a GPU.

    python bench/gpu/micro.py --out micro.jsonl                                # about 40 s
    python bench/gpu/pretend.py bench/gpu/micro.py --out micro.jsonl --smoke   # tiny, without a GPU

One line of JSON per benchmark, written as soon as it is timed. What the file holds is not timed again.
`seconds` is the median over samples of one call between two CUDA events, with a write of 256 MiB, which
empties the L2 cache, before each.
Inputs are random: zeros draw less power, so a GPU multiplies them faster.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import MODELS
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slm_toolkit.model.model_spec import PRESETS, ModelSpec
from slm_toolkit.run.engine.optimizer import AdamWWithMasterWeights
from slm_toolkit.run.kernels.loss_kernels import _chunk_losses_

SEQ_LEN = 1024
ALIGNMENT = (2332, 4147, 4148, 4152, 4160)
"FFN widths after 16384 tokens x 1536: the paper's of 100M and 500M, and multiples of 4, 8 and 64 after them"
FLUSHED_BYTES = 2**28
"more than the L2 cache of any GPU: 60 MB of an H200, 126 MB of a B200"
Work = Callable[[], Any]


@dataclass(frozen=True)
class Benchmark:
    """One kernel at one shape. `prepare` makes random inputs and returns the call to time."""

    kind: str
    shape: dict[str, Any]
    prepare: Callable[[], Work]
    dtype: str = "bfloat16"

    @property
    def key(self) -> str:
        return json.dumps({"kind": self.kind, **self.shape, "dtype": self.dtype}, sort_keys=True)


class Clock:
    """Times single calls with CUDA events."""

    def __init__(self, flushed_bytes: int) -> None:
        self._flushed = torch.empty(flushed_bytes, dtype=torch.uint8, device="cuda")

    def samples(self, work: Work) -> list[float]:
        """Seconds of each of 9 to 40 calls, about a third of a second in all, after three that warm up."""
        first = self._timed(work, 3)[-1]
        return self._timed(work, max(9, min(40, int(0.3 / max(first, 1e-6)))))

    def _timed(self, work: Work, num_calls: int) -> list[float]:
        pairs = []
        for _ in range(num_calls):  # nobody waits for the GPU in between, so that launches don't count
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._flushed.zero_()
            pair[0].record()
            work()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, gradient: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=gradient)


def products(rows: int, inner: int, width: int, passes: tuple[str, ...] = ("forward", "dgrad", "wgrad")):
    """A linear layer's three: [rows, inner] by [inner, width], and both products of its backward pass."""

    def prepare(which: str) -> Work:
        if which == "forward":
            x, weight = random(rows, inner), random(width, inner)
            return lambda: x @ weight.t()
        upstream = random(rows, width)
        if which == "dgrad":
            weight = random(width, inner)
            return lambda: upstream @ weight
        x = random(rows, inner)
        return lambda: upstream.t() @ x

    for which in passes:
        shape = {"rows": rows, "inner": inner, "width": width, "pass": which}
        yield Benchmark("matmul", shape, partial(prepare, which))


def alignment_and_ceilings(smoke: bool) -> Iterator[Benchmark]:
    for width in ALIGNMENT[:2] if smoke else ALIGNMENT:
        yield from products(32 if smoke else 16_384, 64 if smoke else 1536, width)
    side = 128 if smoke else 8192
    yield from products(side, side, side, passes=("forward",))
    for exponent in (20,) if smoke else (24, 28, 30, 33):
        yield Benchmark("copy", {"bytes": 2**exponent}, partial(_copy, 2**exponent), "uint8")


def _copy(num_bytes: int) -> Work:
    """bytes: read and written, so half of them are the tensor's."""
    source = torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def models(smoke: bool) -> Iterator[Benchmark]:
    """The products of the ladder's models: each projection, q, k and v as one, gate and up as one."""
    if smoke:
        yield from _products_of(PRESETS["slm-1m"], 32)
        return
    for name, batch in MODELS.items():
        for spec in (PRESETS[name], PRESETS[f"{name}-hw"]):
            yield from _products_of(spec, batch * SEQ_LEN)
    # 6739 is slm-2b's width, 6744 the next multiple of 8
    yield from products(MODELS["slm-2b"] * SEQ_LEN, PRESETS["slm-2b"].hidden_size, 6744)


def _products_of(spec: ModelSpec, rows: int) -> Iterator[Benchmark]:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    for width in (hidden, 3 * hidden, ffn, 2 * ffn):
        yield from products(rows, hidden, width)
    yield from products(rows, ffn, hidden)


def heads(smoke: bool) -> Iterator[Benchmark]:
    """The output head's products by rows of a chunk; of dgrad's the summed size is 32000."""
    for name in ("slm-1m",) if smoke else MODELS:
        spec = PRESETS[name]
        for rows in (16,) if smoke else (512, 1024, 2048, 4096, 8192):
            yield from products(rows, spec.hidden_size, spec.vocab_size)


def attention(smoke: bool) -> Iterator[Benchmark]:
    """A causal attention of 32768 tokens and hidden size 1536, by head size and sequence."""
    kernel = "sdpa_flash" if smoke or torch.cuda.get_device_capability() < (9, 0) else "sdpa_cudnn"
    hidden, tokens = (128, 64) if smoke else (1536, 32_768)
    for head_dim in (64,) if smoke else (64, 128):
        for seq_len in (32,) if smoke else (512, 1024, 2048, 4096):
            for which in ("forward", "backward"):
                shape = {"kernel": kernel, "head_dim": head_dim, "num_heads": hidden // head_dim}
                shape |= {"num_kv_heads": hidden // head_dim, "seq_len": seq_len}
                shape |= {"batch": tokens // seq_len, "pass": which}
                yield Benchmark("attention", shape, partial(_attention, shape))


def _attention(shape: dict[str, Any]) -> Work:
    size = (shape["batch"], shape["num_heads"], shape["seq_len"], shape["head_dim"])
    q, k, v = (random(*size, gradient=True) for _ in range(3))
    backends = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
    backend = backends[shape["kernel"]]

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if shape["pass"] == "forward":
        return torch.no_grad()(forward)
    out, upstream = forward(), random(*size)
    return lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)


def elementwise(smoke: bool) -> Iterator[Benchmark]:
    """a + b into a third tensor: 6 bytes an element."""
    for exponent in (16,) if smoke else (20, 22, 24, 26, 28, 30, 32):
        shape = {"bytes": 2**exponent // 6 * 6}
        yield Benchmark("elementwise", shape, partial(_addition, shape["bytes"] // 6))


def _addition(num_elements: int) -> Work:
    a, b, out = (random(num_elements) for _ in range(3))
    return lambda: torch.add(a, b, out=out)


def optimizers(smoke: bool) -> Iterator[Benchmark]:
    """One step of AdamW over matrices of 2^22 parameters; ours holds bf16 weights beside fp32 masters."""
    for num_parameters in (2**13,) if smoke else (2**27, 2**29):
        for name, dtype in (("AdamW", "float32"), ("AdamWWithMasterWeights", "bfloat16")):
            shape = {"num_parameters": num_parameters, "fused": True, "optimizer": name}
            yield Benchmark(
                "adamw", shape, partial(_adamw, num_parameters, name, getattr(torch, dtype)), dtype
            )


def _adamw(num_parameters: int, name: str, dtype: torch.dtype) -> Work:
    num_each = min(2**22, num_parameters // 2)
    shape = (2**6, num_each // 2**6)
    parameters = [torch.nn.Parameter(random(*shape, dtype=dtype)) for _ in range(num_parameters // num_each)]
    for parameter in parameters:
        parameter.grad = random(*shape, dtype=dtype)
    options = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
    if name == "AdamW":
        return torch.optim.AdamW(parameters, **options).step
    return AdamWWithMasterWeights(parameters, max_grad_norm=1.0, kernel=None, **options).step


def losses(smoke: bool) -> Iterator[Benchmark]:
    """Cross-entropy and its gradient on so many rows of logits."""
    for kernel, sizes in (("hf", (4096, 8192)), ("fused_logits", (512,))):
        for rows in (16,) if smoke else sizes:
            shape = {
                "rows": rows,
                "chunk_rows": rows,
                "vocab_size": 384 if smoke else 32_000,
                "kernel": kernel,
            }
            yield Benchmark("cross_entropy", shape, partial(_loss, shape))


def _loss(shape: dict[str, Any]) -> Work:
    rows, vocab = shape["rows"], shape["vocab_size"]
    logits = random(rows, vocab, gradient=shape["kernel"] == "hf")
    targets = torch.randint(vocab, (rows,), device=logits.device)
    if shape["kernel"] == "hf":
        return lambda: torch.autograd.grad(functional.cross_entropy(logits.float(), targets), logits)
    num_items, wide = (
        torch.tensor(float(rows), device=logits.device),
        torch.empty_like(logits, dtype=torch.float32),
    )
    return lambda: _chunk_losses_(logits, targets, num_items, wide, with_gradient=True)


GROUPS = (
    alignment_and_ceilings,
    models,
    heads,
    attention,
    elementwise,
    optimizers,
    losses,
)


def timed(benchmark: Benchmark, clock: Clock) -> dict[str, Any]:
    samples = clock.samples(benchmark.prepare())
    row = {"kind": benchmark.kind, **benchmark.shape, "dtype": benchmark.dtype}
    return {**row, "seconds": statistics.median(samples), "num_samples": len(samples)}


def key_of(row: dict[str, Any]) -> str:
    shape = {name: value for name, value in row.items() if name not in ("seconds", "num_samples")}
    return json.dumps(shape, sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    args = parser.parse_args()
    clock = Clock(1024 if args.smoke else FLUSHED_BYTES)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {key_of(json.loads(line)) for line in lines}
    num_before = len(done)
    with args.out.open("a") as out:
        for benchmark in (benchmark for group in GROUPS for benchmark in group(args.smoke)):
            if benchmark.key not in done:
                done.add(benchmark.key)
                out.write(json.dumps(timed(benchmark, clock)) + "\n")
                out.flush()
    free, total = torch.cuda.mem_get_info()  # of a GPU that no other process uses
    context = total - free - torch.cuda.memory_reserved()
    print(json.dumps({"num_timed": len(done) - num_before, "cuda_context_bytes": context}))


if __name__ == "__main__":
    main()
