"""Time the kernels that a training step is made of, one by one: what the speed model needs to know of a GPU.

    python bench/gpu/micro.py --out micro.jsonl             # about 90 s on a GPU
    python bench/gpu/micro.py --out micro.jsonl --smoke     # tiny shapes: shows on a CPU that all of it runs

One line of JSON per benchmark, written as soon as it is timed; what the file holds already is not timed
again. On a GPU `seconds` is the median over samples of one call between two CUDA events, with a write of
256 MiB, which empties the L2 cache, before each. On a CPU, whose times mean nothing, `perf_counter` times it.
Inputs are random: zeros draw less power, so a GPU multiplies them faster.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import MODELS
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from slm_toolkit.config.loss_chunks import LossChunks
from slm_toolkit.model.model_spec import PRESETS, ModelSpec
from slm_toolkit.run.engine.optimizer import AdamWWithMasterWeights
from slm_toolkit.run.kernels.layer_kernels import FusedRMSNorm
from slm_toolkit.run.kernels.loss_kernels import LossHead, _chunk_kernel, _chunk_losses_
from slm_toolkit.run.model.model import SDPA_BACKENDS

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
    """Times single calls: with CUDA events on a GPU, with perf_counter on a CPU."""

    def __init__(self, *, smoke: bool) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self._smoke = smoke
        flushed = 1024 if smoke else FLUSHED_BYTES
        self._flushed = torch.empty(flushed, dtype=torch.uint8, device=self.device)

    def samples(self, work: Work) -> list[float]:
        """Seconds of each of 9 to 40 calls, about a third of a second in all, after three that warm up."""
        for _ in range(1 if self._smoke else 3):
            work()
        first = self._timed(work, 1)[0]
        return self._timed(work, 3 if self._smoke else max(9, min(40, int(0.3 / max(first, 1e-6)))))

    def _timed(self, work: Work, num_calls: int) -> list[float]:
        if not self.on_gpu:
            return [_host_seconds(work) for _ in range(num_calls)]
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


def _host_seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, gradient: bool = False) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=gradient)


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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device=device)
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
    """A causal attention of 32768 tokens and hidden size 1536, by kernel, head size and sequence."""
    kernels = ("sdpa_math", "sdpa_flash") if smoke or not torch.cuda.is_available() else SDPA_BACKENDS
    hidden, tokens = (128, 64) if smoke else (1536, 32_768)
    for head_dim in (64,) if smoke else (64, 128):
        for seq_len in (32,) if smoke else (512, 1024, 2048, 4096):
            for kernel in kernels:
                if kernel == "sdpa_math" and seq_len > 2048:
                    continue  # fp32 scores of 4096 x 4096 x 24 heads x 8 sequences take 12 GiB, several times
                for which in ("forward", "backward"):
                    shape = {"kernel": kernel, "head_dim": head_dim, "num_heads": hidden // head_dim}
                    shape |= {"num_kv_heads": hidden // head_dim, "seq_len": seq_len}
                    shape |= {"batch": tokens // seq_len, "pass": which}
                    yield Benchmark("attention", shape, partial(_attention, shape))


def _attention(shape: dict[str, Any]) -> Work:
    size = (shape["batch"], shape["num_heads"], shape["seq_len"], shape["head_dim"])
    q, k, v = (random(*size, gradient=True) for _ in range(3))
    backend = SDPA_BACKENDS[shape["kernel"]]

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


def launches(smoke: bool) -> Iterator[Benchmark]:
    """So many kernels on 1 KiB, one after the other: what the host takes to launch one."""
    for number in (10,) if smoke else (100, 1000):
        yield Benchmark("launch", {"num_launches": number}, partial(_launches, number))


def _launches(number: int) -> Work:
    a = random(512)

    def work() -> None:
        for _ in range(number):
            a.mul_(1.0)

    return work


def optimizers(smoke: bool) -> Iterator[Benchmark]:
    """One step of AdamW over matrices of 2^22 parameters; ours holds bf16 weights beside fp32 masters."""
    sizes = (2**13,) if smoke else (2**27, 2**29)
    for num_parameters in sizes:
        for fused in (True, False):
            shape = {"num_parameters": num_parameters, "fused": fused}
            for name, dtype in (("AdamW", "float32"), ("AdamWWithMasterWeights", "bfloat16")):
                named = {**shape, "optimizer": name}
                yield Benchmark("adamw", named, partial(_adamw, named), dtype)
        if not smoke:
            named = {"num_parameters": num_parameters, "fused": True, "optimizer": "AdamWKernel"}
            yield Benchmark("adamw", named, partial(_adamw, named))


def _adamw(shape: dict[str, Any]) -> Work:
    ours = shape["optimizer"] != "AdamW"
    dtype = torch.bfloat16 if ours else torch.float32
    num_each = min(2**22, shape["num_parameters"] // 2)
    parameters = [
        torch.nn.Parameter(random(2**6, num_each // 2**6, dtype=dtype))
        for _ in range(shape["num_parameters"] // num_each)
    ]
    for parameter in parameters:
        parameter.grad = random(*parameter.shape, dtype=dtype)
    options = {"lr": 1e-4, "weight_decay": 0.1, "fused": shape["fused"]}
    if ours:
        kernel = None
        if shape["optimizer"] == "AdamWKernel":
            from slm_toolkit.run.kernels.adamw_kernel import AdamWKernel  # needs Triton

            kernel = AdamWKernel()
        return AdamWWithMasterWeights(parameters, max_grad_norm=1.0, kernel=kernel, **options).step
    return torch.optim.AdamW(parameters, **options, foreach=None if shape["fused"] else True).step


def losses(smoke: bool) -> Iterator[Benchmark]:
    """Cross-entropy and its gradient on a chunk of logits by its rows; then head and loss of 16384 tokens."""
    vocab = 384 if smoke else 32_000
    for rows in (16,) if smoke else (256, 512, 1024, 2048, 4096, 8192):
        kernels = ("hf", "fused_logits", *(() if smoke else ("fused_logits_compiled", "fused_logits_triton")))
        for kernel in kernels:
            shape = {"rows": rows, "chunk_rows": rows, "vocab_size": vocab, "kernel": kernel}
            yield Benchmark("cross_entropy", shape, partial(_chunk_of_losses, shape))
    for kernel in ("fused_linear", *(() if smoke else ("fused_linear_compiled", "fused_linear_triton"))):
        rows, hidden = (64, 64) if smoke else (16_384, 1536)
        chunk = LossChunks().of_logits(rows, vocab_size=vocab, hidden_size=hidden)
        shape = {"rows": rows, "chunk_rows": chunk, "vocab_size": vocab, "kernel": kernel, "hidden": hidden}
        yield Benchmark("cross_entropy", shape, partial(_head_and_loss, shape))


def _chunk_of_losses(shape: dict[str, Any]) -> Work:
    rows, vocab = shape["rows"], shape["vocab_size"]
    logits = random(rows, vocab, gradient=shape["kernel"] == "hf")
    targets = torch.randint(vocab, (rows,), device=logits.device)
    if shape["kernel"] == "hf":
        return lambda: torch.autograd.grad(functional.cross_entropy(logits.float(), targets), logits)
    num_items = torch.tensor(float(rows), device=logits.device)
    if shape["kernel"] == "fused_logits":
        wide = torch.empty_like(logits, dtype=torch.float32)
        return lambda: _chunk_losses_(logits, targets, num_items, wide, with_gradient=True)
    compute = _chunk_kernel(shape["kernel"].removeprefix("fused_logits_"))
    return lambda: compute(logits, targets, num_items, None, with_gradient=True)


def _head_and_loss(shape: dict[str, Any]) -> Work:
    rows, vocab, hidden = shape["rows"], shape["vocab_size"], shape["hidden"]
    states = random(1, rows, hidden, gradient=True)
    head = LossHead(hidden, vocab, bias=False, device=states.device, dtype=torch.bfloat16)
    head.arithmetic = shape["kernel"].removeprefix("fused_linear").removeprefix("_") or "pytorch"
    labels = torch.randint(vocab, (1, rows), device=states.device)

    def work() -> None:
        head.labels = labels
        torch.autograd.grad(head(states), (states, head.weight))

    return work


def norms(smoke: bool) -> Iterator[Benchmark]:
    for hidden in (64,) if smoke else (832, 1536, 2496):
        for kernel in ("hf", "fused"):
            for which in ("forward", "backward"):
                shape = {"rows": 64 if smoke else 32_768, "hidden": hidden, "kernel": kernel, "pass": which}
                yield Benchmark("norm", shape, partial(_norm, shape))


def _norm(shape: dict[str, Any]) -> Work:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = random(1, shape["rows"], shape["hidden"], gradient=True)
    norm = LlamaRMSNorm(shape["hidden"]).to(device=x.device, dtype=x.dtype)
    if shape["kernel"] == "fused":
        norm.__class__ = FusedRMSNorm  # as use_kernels does
    if shape["pass"] == "forward":
        return lambda: norm(x)
    out, upstream = norm(x), random(*x.shape)
    return lambda: torch.autograd.grad(out, (x, norm.weight), upstream, retain_graph=True)


GROUPS = (
    alignment_and_ceilings,
    models,
    heads,
    attention,
    elementwise,
    launches,
    optimizers,
    losses,
    norms,
)


def timed(benchmark: Benchmark, clock: Clock) -> dict[str, Any]:
    samples = clock.samples(benchmark.prepare())
    deciles = statistics.quantiles(samples, n=10)
    median = statistics.median(samples)
    return {
        "kind": benchmark.kind,
        **benchmark.shape,
        "dtype": benchmark.dtype,
        "seconds": median,
        "num_samples": len(samples),
        "spread": (deciles[-1] - deciles[0]) / median,
    }


def key_of(row: dict[str, Any]) -> str:
    measured = ("seconds", "num_samples", "spread")
    return json.dumps({name: value for name, value in row.items() if name not in measured}, sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--budget_seconds", type=float, default=120.0, help="begin none after this")
    args = parser.parse_args()
    began, clock = time.monotonic(), Clock(smoke=args.smoke)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {key_of(json.loads(line)) for line in lines}
    num_timed = num_left = 0
    failed: list[str] = []
    with args.out.open("a") as out:
        for benchmark in (benchmark for group in GROUPS for benchmark in group(args.smoke)):
            if benchmark.key in done:
                continue
            if time.monotonic() - began > args.budget_seconds:
                num_left += 1
                continue
            try:
                row = timed(benchmark, clock)
            except (RuntimeError, TypeError, ValueError) as error:  # of a kernel that this shape has not
                failed.append(f"{benchmark.key}: {(str(error) or type(error).__name__).splitlines()[0]}")
                print(failed[-1], file=sys.stderr)
                continue
            done.add(benchmark.key)
            num_timed += 1
            out.write(json.dumps(row) + "\n")
            out.flush()
    told: dict[str, Any] = {"num_timed": num_timed, "num_left_out": num_left, "failed": failed}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()  # of a GPU that no other process uses
        told["cuda_context_bytes"] = total - free - torch.cuda.memory_reserved()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
