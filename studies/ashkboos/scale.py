"""Draw rates by number of GPUs and size of the model, the best configurations, and the fit of the sizes."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from slm_toolkit.model.model_spec import ModelSpec, fitted_hidden_size, fitted_num_layers
from slm_toolkit.report.charts.html_page import (
    Figure,
    bars_layout,
    colour,
    curves_layout,
    escaped,
    rounded,
)

FITTED_MODELS = (  # Llama models that the paper fitted (appendix B): size in billions, hidden size, layers
    (7, 4096, 32),
    (13, 5120, 40),
    (70, 8192, 80),
    (405, 16384, 126),
)
_MOST_DECADES = 2.5


def _log_ticks(lowest: float, highest: float) -> dict[str, list]:
    """Return ticks at 1, 2 and 5 times powers of ten; over more than _MOST_DECADES only at powers of ten."""
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    steps = (1, 2, 5) if highest / lowest < 10**_MOST_DECADES else (1,)
    values = [step * 10**power for power in powers for step in steps]
    values = [value for value in values if lowest / 2 <= value <= highest * 2]
    return {"tickvals": values, "ticktext": [_short(value) for value in values]}


def _short(value: float) -> str:
    """Return a number with at most three digits: 480, 4.8k, 48k, 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{0 if value >= 10 * size else 1}f}".removesuffix(".0") + unit
    return f"{value:.3g}"


@dataclass(frozen=True)
class Cell:
    """The fastest configuration of a model on a number of GPUs or processes."""

    model: str
    num_params: int
    num_gpus: int
    num_nodes: int | None
    words: str
    "strategy and settings"
    tokens_per_second: float
    mfu: float | None
    num_tied: int = 0
    "other configurations that are not clearly slower"
    is_predicted: bool = False

    @property
    def place(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if (self.num_nodes or 1) > 1 else ""
        return f"{self.num_gpus} rank{'s' * (self.num_gpus != 1)}{nodes}"


_LARGEST_MARK_PIXELS, _SMALLEST_MARK_PIXELS = 44, 6

_UTILISATION = [[0, "#2c2a6b"], [0.5, "#c8467a"], [1, "#f9c74f"]]

_NO_UTILISATION = "#8a94a6"


def scale_figures(name: str, cells: list[Cell]) -> tuple[Figure, Figure]:
    """Return throughput by model and number of GPUs, and the best configuration of each."""
    return (
        _bubbles(name, "Throughput by model and number of GPUs", cells),
        _best(f"{name}-best", "Best configuration by model and number of GPUs", cells),
    )


def _bubbles(name: str, title: str, cells: list[Cell]) -> Figure:
    most = max(cell.tokens_per_second for cell in cells)
    known = [cell.mfu for cell in cells if cell.mfu is not None]
    utilisation = {
        **{"cmin": 0, "cmax": max([0.01, *known]), "colorscale": _UTILISATION},
        "colorbar": {
            **{"x": 1.01, "xanchor": "left", "thickness": 10, "tickformat": ".0%", "nticks": 4},
            **{"title": {"text": "MFU", "side": "top"}},
        },
    }
    data = []
    for is_predicted, has_mfu in ((False, True), (False, False), (True, True), (True, False)):
        group = [
            cell for cell in cells if cell.is_predicted == is_predicted and (cell.mfu is not None) == has_mfu
        ]
        if group:
            is_first = has_mfu and not any("colorscale" in trace["marker"] for trace in data)
            data.append(
                _marks(
                    group,
                    most,
                    utilisation if has_mfu else {},
                    shows_scale=is_first,
                    is_named=not is_predicted or all(cell.is_predicted for cell in cells),
                )
            )
    layout = curves_layout(x_title="ranks", y_title="", num_keys=len({trace["name"] for trace in data}))
    layout["legend"]["itemsizing"] = "constant"
    layout["margin"]["r"] = 96 if known else 36  # the scale of colours, and plotly's buttons beside it
    counts = sorted({cell.num_gpus for cell in cells})
    layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": list(map(str, counts))}
    models = list(dict.fromkeys(cell.model for cell in sorted(cells, key=lambda cell: cell.num_params)))
    layout["yaxis"] = {"type": "category", "categoryorder": "array"}
    layout["yaxis"]["categoryarray"] = list(map(escaped, models))
    layout["xaxis"]["range"] = [-0.6, len(counts) - 0.4]
    layout["yaxis"]["range"] = [-0.7, len(models) - 0.3]
    layout["height"] = 140 + 72 * len(models)
    return Figure(name, title, data, layout)


def _marks(
    cells: list[Cell],
    most: float,
    utilisation: dict[str, Any],
    *,
    shows_scale: bool,
    is_named: bool,
) -> dict[str, Any]:
    """Return a trace of round marks, of which all are measured and filled, or all predicted and hollow.

    Without `utilisation`, the marks are grey. `is_named`: the rates are written below the marks.
    """
    is_predicted = cells[0].is_predicted
    sizes = [
        max(_SMALLEST_MARK_PIXELS, _LARGEST_MARK_PIXELS * math.sqrt(cell.tokens_per_second / most))
        for cell in cells
    ]
    color = [rounded(cell.mfu) for cell in cells] if utilisation else _NO_UTILISATION
    marker = {"size": [rounded(size) for size in sizes], "color": color, "opacity": 1}
    marker |= {"symbol": "circle-open", "line": {"width": 2}} if is_predicted else {"symbol": "circle"}
    marker |= {key: value for key, value in utilisation.items() if key != "colorbar" or shows_scale}
    return {
        **{"type": "scatter", "hoverinfo": "text", "cliponaxis": False},
        "mode": "markers+text" if is_named else "markers",
        "name": "predicted" if is_predicted else "measured",
        "x": [str(cell.num_gpus) for cell in cells],
        "y": [escaped(cell.model) for cell in cells],
        "text": [_short(cell.tokens_per_second) for cell in cells],
        **{"textposition": "bottom center", "textfont": {"size": 11}},
        "hovertext": [_hover(cell) for cell in cells],
        "marker": marker,
    }


def _hover(cell: Cell) -> str:
    evidence = "predicted" if cell.is_predicted else "measured"
    mfu = "" if cell.mfu is None else f"<br>MFU {cell.mfu:.1%}"
    ties = f"<br>{_ties(cell)}" if cell.num_tied else ""
    words = f"{escaped(cell.model)}, {cell.place}: {escaped(cell.words)}"
    return f"{words}<br>{evidence}: {cell.tokens_per_second:,.0f} tokens/s{mfu}{ties}"


def _ties(cell: Cell) -> str:
    what = "within 1 %" if cell.is_predicted else "not clearly slower"
    return f"{cell.num_tied} other{'s' * (cell.num_tied > 1)} {what}"


def _best(name: str, title: str, cells: list[Cell]) -> Figure:
    """Draw a bar of tokens per second and rank for the best of each model and number of GPUs."""
    bars, shown = [], []
    measured = [cell for cell in cells if not cell.is_predicted] or cells
    for model, group in groupby(measured, key=lambda cell: cell.model):
        bars.append(_Bar(f"{model} model", f"<b>{escaped(model)}</b>", is_heading=True))
        for cell in group:
            mfu = "" if cell.mfu is None else f", MFU {cell.mfu:.0%}"
            ties = f" ({_ties(cell)})" if cell.num_tied else ""
            bars.append(_Bar(f"{model} {cell.num_gpus}", f"{cell.place}: {escaped(cell.words)}{mfu}{ties}"))
            shown.append(cell)
    known = [cell.mfu for cell in shown if cell.mfu is not None]
    trace = {
        **{"type": "bar", "orientation": "h", "hoverinfo": "text", "showlegend": False},
        "x": [rounded(cell.tokens_per_second / cell.num_gpus) for cell in shown],
        "y": [f"{cell.model} {cell.num_gpus}" for cell in shown],
        "hovertext": [_hover(cell) for cell in shown],
        "marker": {"color": _NO_UTILISATION},
    }
    if len(known) == len(shown):
        trace["marker"] = {"color": known, "cmin": 0, "cmax": max(known), "colorscale": _UTILISATION}
    if all(cell.is_predicted for cell in shown):
        trace["marker"]["pattern"] = {"shape": "/", "fillmode": "overlay", "fgcolor": "#fff"}
    layout = bars_layout([bar.key for bar in bars], x_title="tokens/s per rank")
    for bar, annotation in zip(bars, layout["annotations"], strict=True):
        annotation |= {"text": bar.title, "yshift": -17 if bar.is_heading else 7}
    return Figure(name, title, [trace], layout)


@dataclass(frozen=True)
class _Bar:
    """A place on the vertical axis; its title is above its bar."""

    key: str
    "unique key of this place"
    title: str
    is_heading: bool = False
    "whether this is only a heading for the places below it"


_SHAPES = (("hidden size", fitted_hidden_size, 1), ("layers", fitted_num_layers, 2))

_NUM_POINTS = 40


def fit_figures(specs: Iterable[ModelSpec], *, these: str) -> list[Figure]:
    """Show the fit that gives the study's models their shapes, its points, and `these` models."""
    models = list({spec.name: spec for spec in specs}.values())
    return [
        _fit(f"fit-{key.replace(' ', '-')}", key, fitted, column, models, these)
        for key, fitted, column in _SHAPES
    ]


def _fit(
    name: str,
    shape: str,
    fitted: Callable[[float], float],
    column: int,
    models: list[ModelSpec],
    these: str,
) -> Figure:
    sizes = [_billions(spec) for spec in models]
    low, high = min(sizes) / 1.5, FITTED_MODELS[-1][0] * 1.5
    xs = [low * (high / low) ** (number / (_NUM_POINTS - 1)) for number in range(_NUM_POINTS)]
    values = [spec.hidden_size if column == 1 else spec.num_layers for spec in models]
    data = [
        {
            **{"type": "scatter", "mode": "lines", "name": "the fit", "hoverinfo": "skip"},
            "x": [rounded(x) for x in xs],
            "y": [rounded(fitted(x)) for x in xs],
            "line": {"color": colour(9), "dash": "dot"},
        },
        {
            **{"type": "scatter", "mode": "markers", "name": "Llama models of the fit", "hoverinfo": "text"},
            "x": [model[0] for model in FITTED_MODELS],
            "y": [model[column] for model in FITTED_MODELS],
            "hovertext": [f"Llama {model[0]}B: {shape} {model[column]:,}" for model in FITTED_MODELS],
            "marker": {"symbol": "square-open", "size": 10, "color": colour(1), "line": {"width": 2}},
        },
        {
            **{"type": "scatter", "mode": "markers", "name": these, "hoverinfo": "text"},
            "x": [rounded(size) for size in sizes],
            "y": values,
            "hovertext": [
                f"{escaped(spec.name)}: {shape} {value:,}, the fit {fitted(size):,.0f}"
                for spec, size, value in zip(models, sizes, values, strict=True)
            ],
            "marker": {"size": 10, "color": colour(0)},
        },
    ]
    layout = curves_layout(x_title="parameters, billions", y_title=shape, num_keys=3)
    highest = max(max(values), FITTED_MODELS[-1][column])
    layout["xaxis"] |= {"type": "log"} | _log_ticks(low, high)
    layout["yaxis"] |= {"type": "log"} | _log_ticks(min(*values, fitted(low)), highest)
    return Figure(name, f"{shape.capitalize()} by size: figure 5 of the study", data, layout)


def _billions(spec: ModelSpec) -> float:
    nominal = re.fullmatch(r"slm-(\d+(?:\.\d+)?)([mb])", spec.name)
    if nominal and spec.vocab_size == 32_000:
        return float(nominal[1]) / (1000 if nominal[2] == "m" else 1)
    return spec.num_params / 1e9
