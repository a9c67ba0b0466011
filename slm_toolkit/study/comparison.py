"""The paper's figures 1 to 4 beside ours: each plotted value, and what we predict or measured of it."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.cost import paper_token_per_dollar
from slm_toolkit.record.run_record import RunRecord, config_of
from slm_toolkit.report.rows import row_of
from slm_toolkit.study.published import (
    Cell,
    Point,
    cell_token_per_dollar,
    cells_of,
    is_unexplained,
    paper_model,
    points,
)
from slm_toolkit.study.published import config_of as paper_config

PAPER_NUMERICS = "pure_bf16"
"what the paper's fits and OOMs speak for, see study/published.py"
_SAME_FLAGS = (  # numerics may differ, and are told; clipping and Adam's kernels take next to no time
    *("seq_len", "gradient_accumulation_steps", "gradient_checkpointing", "torch_compile"),
    *("loss_kernel", "norm_kernel", "mlp_kernel", "use_liger_kernel", "torch_compile_mode", "fp8"),
)


@dataclass(frozen=True)
class Measured:
    """What a user's records say of one cell of the paper's grid."""

    token_per_dollar: float
    "0: out of memory"
    numerics: str
    record: str
    "its file"


@dataclass(frozen=True)
class Comparison:
    """One plotted value and ours. The names are the keys of `slm report --paper --json`."""

    figure: int
    model: str
    series: str
    "an attention in figure 1, a GPU in 2, a strategy in 3 and 4"
    x: int
    "global batch in figures 1 and 4, GPUs in 2, nodes in 3"
    published_token_per_dollar: float
    "0: out of memory, here and below; a dollar is one second of an A100-40GB"
    published_error_half_width: float
    our_token_per_dollar: float
    "of the best cell that the figure leaves open, as the paper's"
    error: float | None
    "ours / published - 1; None where either is out of memory"
    evidence: str
    "of ours: predicted or measured"
    numerics: str
    "of ours"
    cell: Cell | None
    "that ours is of; None where all are out of memory"
    record: str | None
    "that ours is measured by"
    is_unexplained: bool
    "the paper's other points contradict it: in no error below"

    @property
    def agrees_on_memory(self) -> bool:
        return (self.our_token_per_dollar == 0) == (self.published_token_per_dollar == 0)


@dataclass(frozen=True)
class FigureErrors:
    """How far ours are from one figure's values, unexplained ones left out."""

    figure: int
    num_points: int
    num_right_on_memory: int
    "both fit, or both are out of memory"
    num_compared: int
    median_error: float
    "of absolute values"
    worst: Comparison


def comparisons(measured: dict[Cell, Measured]) -> list[Comparison]:
    """All points of the paper's figures; where a cell was measured, that stands for its prediction."""
    return [_comparison(point, measured) for point in points()]


def measured_cells(records: list[tuple[Path, RunRecord]]) -> dict[Cell, Measured]:
    """By cell of the paper's grid what records of the same configuration measured, or that it was too big.

    Of several the paper's numerics count, else the fastest. The rate is a report's: timed steps alone, where
    the paper averaged a slow first one in.
    """
    launches: dict[tuple[str, str | None], list[tuple[Path, RunRecord]]] = {}
    for path, record in records:
        launches.setdefault((record.identity, record.gpu), []).append((path, record))
    found: dict[Cell, Measured] = {}
    for repeats in launches.values():
        cell = _cell_of(repeats[0][1])
        row = row_of(repeats) if cell else None
        if row is None or not (row.status == "oom" or (row.status == "ok" and row.tokens_per_second_per_gpu)):
            continue
        rate = row.tokens_per_second_per_gpu if row.status == "ok" else 0.0
        value = Measured(paper_token_per_dollar(rate, cell.gpu), row.numerics, row.record)
        found[cell] = max(found.get(cell, value), value, key=_preference)
    return found


def figure_errors(compared: list[Comparison], figure: int) -> FigureErrors:
    of_figure = [item for item in compared if item.figure == figure]
    counted = [item for item in of_figure if item.error is not None and not item.is_unexplained]
    return FigureErrors(
        figure=figure,
        num_points=len(of_figure),
        num_right_on_memory=sum(item.agrees_on_memory for item in of_figure),
        num_compared=len(counted),
        median_error=median(abs(item.error) for item in counted),
        worst=max(counted, key=lambda item: abs(item.error)),
    )


@cache
def predicted_token_per_dollar(cell: Cell) -> float:
    """0: out of memory."""
    return cell_token_per_dollar(cell, paper_model(cell.model))


@cache
def cells_behind(point: Point) -> tuple[Cell, ...]:
    return tuple(cells_of(point))


def _comparison(point: Point, measured: dict[Cell, Measured]) -> Comparison:
    def value(cell: Cell) -> float:
        return measured[cell].token_per_dollar if cell in measured else predicted_token_per_dollar(cell)

    cell = max(cells_behind(point), key=value)
    ours, published = value(cell), point.token_per_dollar
    seen = measured.get(cell)
    return Comparison(
        figure=point.figure,
        model=point.model,
        series=point.series,
        x=point.x,
        published_token_per_dollar=published,
        published_error_half_width=point.error_half_width,
        our_token_per_dollar=ours,
        error=ours / published - 1 if ours and published else None,
        evidence="measured" if seen else "predicted",
        numerics=seen.numerics if seen else PAPER_NUMERICS,
        cell=cell if ours else None,
        record=seen.record if seen else None,
        is_unexplained=is_unexplained(point),
    )


@cache
def _grid() -> frozenset[Cell]:
    return frozenset(cell for point in points() for cell in cells_behind(point))


def _cell_of(record: RunRecord) -> Cell | None:
    """The cell that a run is of; None for all that the paper did not do."""
    gpu, config = find_gpu(record.gpu), config_of(record)
    cell = Cell(
        model=record.model["name"],
        gpu=gpu.name if gpu else "",
        num_gpus=record.world_size or record.asked["num_processes"],
        strategy=record.strategy,
        batch=config.per_device_train_batch_size,
        attention="eager" if config.attn_implementation == "eager" else "sdpa",
    )
    if cell not in _grid() or record.is_rehearsal or record.is_parity_reference:
        return None
    wanted = paper_config(cell)
    return cell if all(getattr(config, n) == getattr(wanted, n) for n in _SAME_FLAGS) else None


def _preference(value: Measured) -> tuple[bool, float]:
    return value.numerics == PAPER_NUMERICS, value.token_per_dollar
