"""How far predicted throughput is from published, each model left out of the fit in turn.

    pip install scipy && python bench/speed_accuracy.py

Two sets of rows, each with its own constants: the paper's figures 1 to 4 (PyTorch 2.3, transformers, ten
steps, `PAPER`), and llm-foundry's and torchtitan's tables (`LLM_FOUNDRY`). `in sample`: these constants as
they are; `left out`: all constants named below fitted again without any row of the model that is asked
about. Points of the paper that nothing explains (`is_unexplained`, six) are in neither; points at zero are
out of memory, counted apart. Then who wins where the published error bars separate two, by the left-out
predictions. Last, other people's runs with today's constants (`TODAY`), which nothing was fitted to; only
its two host times were set with some of these rows at hand. They come first with loss kernels that flags ask
for.
`--fit` prints constants fitted to all rows, `--rows` the error of each.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from speed_rows import LLM_FOUNDRY, Row, asked, predicted_tokens_per_second_per_gpu, published_rows

from slm_toolkit.predict.speed.software import MEMORY_SHARE, TODAY, Shares, Software

sys.path.insert(0, str(Path(__file__).parents[1] / "studies" / "ashkboos"))
from comparison import (
    HEADS,
    MODELS,
    PAPER,
    Point,
    cell_token_per_dollar,
    cells_of,
    is_unexplained,
    paper_model,
    points,
)

PAPER_CONSTANTS = (
    *("misaligned_share.ampere", "misaligned_share.hopper", "eager_slowdown", "score_bytes", "layer_seconds"),
    *("sharded_layer_seconds", "few_ranks", "ddp_seconds", "first_step_seconds"),
)
LLM_FOUNDRY_CONSTANTS = (
    *("matmul_share", "attention_share.ampere", "attention_share.hopper"),
    *("eager_slowdown", "contention", "step_seconds"),
)
_ROBUST = 0.05  # errors beyond it count less than squared: some published rows are not what they say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print the constants fitted to all rows")
    parser.add_argument("--rows", action="store_true", help="print the error of each of other people's runs")
    args = parser.parse_args()
    for heads in (HEADS, None):
        _paper(heads, show_fit=args.fit and heads == HEADS)
    _tables(show_fit=args.fit)
    _others(show_rows=args.rows)


def _best_cell(point: Point, software: Software, num_heads: int | None) -> float:
    """The largest Token/Dollar over the point's cells; 0: none fits."""
    spec = paper_model(point.model, num_heads)
    return max(cell_token_per_dollar(cell, spec, software) for cell in cells_of(point))


def _paper(num_heads: int | None, *, show_fit: bool) -> None:
    known = [p for p in points() if not p.is_out_of_memory and not is_unexplained(p)]

    def predicted(found: Sequence[Point], software: Software) -> np.ndarray:
        return np.array([_best_cell(p, software, num_heads) for p in found])

    heads = f"{num_heads} heads" if num_heads else "heads of 64"
    print(f"\npaper, {heads}: {len(known)} points")
    shipped = predicted(known, PAPER)
    published = np.array([p.token_per_dollar for p in known])
    if show_fit:
        print("  fitted to all:", _fitted(known, published, predicted, PAPER, PAPER_CONSTANTS))
    left_out = _left_out(known, published, predicted, PAPER, PAPER_CONSTANTS, of_group=lambda p: p.model)
    _print_errors("in sample, as shipped", shipped / published - 1)
    errors = np.array([left_out[i] / published[i] - 1 for i in range(len(known))])
    _print_errors("one model left out", errors)
    for model in MODELS:
        _print_errors(f"  {model}", errors[[p.model == model for p in known]])
    for figure in (1, 2, 3, 4):
        _print_errors(f"  figure {figure}", errors[[p.figure == figure for p in known]])
    right = sum((_best_cell(p, PAPER, num_heads) == 0) == p.is_out_of_memory for p in points())
    zeros = sum(p.is_out_of_memory for p in points())
    print(f"  fits or out of memory: {right} of {len(points())} points right, {zeros} of them at zero")
    by_point = {id(p): value for p, value in zip(known, left_out, strict=True)}
    for p in points():  # unexplained ones and zeros, by the shipped constants
        by_point.setdefault(id(p), _best_cell(p, PAPER, num_heads))
    _winners({id(p): by_point[id(p)] for p in points()})


def _winners(predicted: dict[int, float]) -> None:
    groups = {
        "FlashAttention or vanilla (figure 1)": (1, lambda p: p.series == "sdpa"),
        "GPU type (figure 2)": (2, lambda p: p.series),
        "DDP or FSDP (figure 3)": (3, lambda p: p.series == "ddp"),
        "DDP or FSDP (figure 4)": (4, lambda p: p.series == "ddp"),
    }
    for name, (figure, side_of) in groups.items():
        right, total, wrong = 0, 0, []
        panels = {(p.model, p.x) for p in points() if p.figure == figure}
        for model, x in sorted(panels, key=lambda key: (MODELS.index(key[0]), key[1])):
            panel = [p for p in points() if (p.figure, p.model, p.x) == (figure, model, x)]
            if figure == 2 and any(is_unexplained(p) for p in panel):
                continue
            sides = {
                side_of(p): max((q for q in panel if side_of(q) == side_of(p)), key=_value) for p in panel
            }
            best, second = sorted(sides.values(), key=_value, reverse=True)[:2]
            if (
                best.token_per_dollar - best.error_half_width
                <= second.token_per_dollar + second.error_half_width
            ):
                continue
            total += 1
            guess = max(panel, key=lambda p: predicted[id(p)])
            if side_of(guess) == side_of(best):
                right += 1
            else:
                wrong.append(f"{model} at {x}")
        print(
            f"  {name}: {right} of {total} separated panels right",
            f"(wrong: {', '.join(wrong)})" * bool(wrong),
        )


def _value(point: Point) -> float:
    return point.token_per_dollar


def _tables(*, show_fit: bool) -> None:
    rows = list(published_rows())
    published = np.array([row.tokens_per_second_per_gpu for row in rows])

    print(f"\nllm-foundry and torchtitan: {len(rows)} rows")
    if show_fit:
        print("  fitted to all:", _fitted(rows, published, _of_tables, LLM_FOUNDRY, LLM_FOUNDRY_CONSTANTS))
    _print_errors("in sample, as shipped", _of_tables(rows, LLM_FOUNDRY) / published - 1)
    left_out = _left_out(
        rows, published, _of_tables, LLM_FOUNDRY, LLM_FOUNDRY_CONSTANTS, of_group=lambda row: row.model
    )
    errors = np.array(left_out) / published - 1
    _print_errors("one model left out", errors)
    for name in dict.fromkeys(row.model for row in rows):
        _print_errors(f"  {name}", errors[[row.model == name for row in rows]])
    for name in dict.fromkeys(f"{row.source} {row.gpu.name}" for row in rows):
        _print_errors(f"  {name}", errors[[f"{row.source} {row.gpu.name}" == name for row in rows]])


def _of_tables(rows: Sequence[Row], software: Software) -> np.ndarray:
    """Predict MPT with llm-foundry's software, and torchtitan's Llama with today's kernels."""
    constants = ("matmul_share", "contention", "step_seconds")
    llama = Software(
        eager_slowdown=PAPER.eager_slowdown, **{name: getattr(software, name) for name in constants}
    )
    return np.array(
        [predicted_tokens_per_second_per_gpu(row, llama if row.spec.gated_ffn else software) for row in rows]
    )


def _of_others(rows: Sequence[Row]) -> np.ndarray:
    """Predict other people's runs; those under FSDP are of 2023 and early 2024."""
    return np.array([predicted_tokens_per_second_per_gpu(row, TODAY, has_fsdp1=True) for row in rows])


def _others(*, show_rows: bool) -> None:
    rows = published_rows("other_speed.csv")

    def errors_of(found: Sequence[Row]) -> np.ndarray:
        return _of_others(found) / [row.tokens_per_second_per_gpu for row in found] - 1

    num_sources = len({row.source for row in rows})
    print(f"\nother people's runs, nothing fitted: {len(rows)} rows of {num_sources} sources")
    errors = errors_of([asked(row, "fused_linear") for row in rows])
    num_asked = sum(asked(row, "hf") is not row for row in rows)
    print(f"  {num_asked} of them have a loss kernel that no flag asks for; instead, all rows:")
    _print_errors("with --kernels loss", errors)
    _print_errors("with --kernels plain", errors_of([asked(row, "hf") for row in rows]))
    _print_errors("with their own kernel", errors_of(rows))
    print("  with --kernels loss:")
    band = [(TODAY.low <= 1 / (1 + error) <= TODAY.high) for error in errors]
    print(f"  within the band that `slm estimate` prints: {sum(band)} of {len(band)}")
    groups = {
        "one GPU": lambda row: row.num_gpus == 1,
        "2 to 8 GPUs": lambda row: 2 <= row.num_gpus <= 8,
        "16 to 256 GPUs": lambda row: row.num_gpus > 8,
        "below 1B parameters": lambda row: row.spec.num_params < 1e9,
        "1B and more": lambda row: row.spec.num_params >= 1e9,
        **{
            name: lambda row, name=name: row.gpu.name == name
            for name in sorted({row.gpu.name for row in rows})
        },
    }
    for name, is_in in groups.items():
        _print_errors(f"  {name}", errors[[is_in(row) for row in rows]])
    if show_rows:
        for row, error in sorted(zip(rows, errors, strict=True), key=lambda pair: pair[1]):
            print(
                f"    {error:+6.0%}  {row.source[:44]:<44} {row.model:<22} {row.num_gpus:>3} x {row.gpu.name}"
            )


def _left_out(
    rows: Sequence,
    published: np.ndarray,
    predicted: Callable[[Sequence, Software], np.ndarray],
    start: Software,
    names: tuple[str, ...],
    *,
    of_group: Callable,
) -> list[float]:
    found = [math.nan] * len(rows)
    for group in dict.fromkeys(of_group(row) for row in rows):
        inside = [of_group(row) == group for row in rows]
        outside = [row for row, is_inside in zip(rows, inside, strict=True) if not is_inside]
        software = _fit(outside, published[~np.array(inside)], predicted, start, names)
        indices = [index for index, is_inside in enumerate(inside) if is_inside]
        for index, value in zip(indices, predicted([rows[i] for i in indices], software), strict=True):
            found[index] = value
    return found


def _fitted(rows, published, predicted, start: Software, names: tuple[str, ...]) -> str:
    software = _fit(rows, published, predicted, start, names)
    return ", ".join(f"{name} {_get(software, name):.4g}" for name in names)


def _fit(
    rows: Sequence,
    published: np.ndarray,
    predicted: Callable[[Sequence, Software], np.ndarray],
    start: Software,
    names: tuple[str, ...],
) -> Software:
    """The constants with the least robust squares of log errors, from the shipped ones on.

    A share of what is possible is at most 1, and no element-wise kernel is faster than the memory's data
    sheet. Without these bounds, some sets of rows fit matrix products faster than ever measured and slow
    element-wise kernels; others fit element-wise kernels faster than the memory.
    """
    least = [math.log(MEMORY_SHARE) if name == "eager_slowdown" else -np.inf for name in names]
    most = [0.0 if "share" in name else np.inf for name in names]

    def software_of(logs: np.ndarray) -> Software:
        software = start
        for name, log in zip(names, logs, strict=True):
            software = _set(software, name, float(np.exp(log)))
        return software

    fit = least_squares(
        lambda logs: np.log(predicted(rows, software_of(logs)) / published),
        np.log([_get(start, name) for name in names]),
        bounds=(least, most),
        loss="soft_l1",
        f_scale=_ROBUST,
        diff_step=1e-3,
        max_nfev=40,
    )
    return software_of(fit.x)


def _get(software: Software, name: str) -> float:
    field, _, architecture = name.partition(".")
    value = getattr(software, field)
    return getattr(value, architecture) if architecture else value


def _set(software: Software, name: str, value: float) -> Software:
    field, _, architecture = name.partition(".")
    if not architecture:
        return dataclasses.replace(software, **{field: value})
    shares: Shares = dataclasses.replace(getattr(software, field), **{architecture: value})
    return dataclasses.replace(software, **{field: shares})


def _print_errors(name: str, errors: np.ndarray) -> None:
    size = np.abs(errors)
    middle, most = np.median(size), np.quantile(size, 0.9)
    print(
        f"  {name:<44} n {len(errors):>3}  median |error| {middle:6.1%}  p90 {most:6.1%}"
        f"  worst {size.max():6.1%}  bias {np.median(errors):+6.1%}"
    )


if __name__ == "__main__":
    main()
