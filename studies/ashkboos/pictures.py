"""Draw the best configurations of `compare.py`, all predicted, and figure 5 of the study."""

from comparison import GPUS_PER_NODE, MODELS
from scale import Cell, fit_figures, scale_figures
from tables import Best

from slm_toolkit import __version__
from slm_toolkit.model.names import find_model
from slm_toolkit.report.charts.html_page import Figure


def pictures(bests: list[Best]) -> list[Figure]:
    """Return throughput by model and number of GPUs, the best configurations, and the fit of the sizes.

    Models that fit on no number of nodes have no marks.
    """
    fit = fit_figures([find_model(name) for name in MODELS], these="models of the study")
    cells = [_cell(best) for best in bests if best.strategy is not None]
    return [*(scale_figures("scale", cells) if cells else ()), *fit]


def caption(bests: list[Best]) -> str:
    """Return the line below each picture's title."""
    return (
        f"predicted for nodes of {GPUS_PER_NODE} {bests[0].gpu}, today's software; slm_toolkit {__version__}"
    )


def _cell(best: Best) -> Cell:
    num_gpus = best.num_nodes * GPUS_PER_NODE
    words = [best.strategy, f"batch {best.per_device_train_batch_size} x {best.gradient_accumulation_steps}"]
    if best.gradient_checkpointing != "none":
        words.append(f"checkpointing {best.gradient_checkpointing}")
    return Cell(
        model=best.model,
        num_params=find_model(best.model).num_params,
        num_gpus=num_gpus,
        num_nodes=best.num_nodes,
        words=", ".join(words),
        tokens_per_second=best.tokens_per_second_per_gpu * num_gpus,
        mfu=best.mfu,
        num_tied=len(best.as_fast),
        is_predicted=True,
    )
