"""Figures as PNG and SVG files: kaleido has plotly.js draw them in the browser that is there, offline."""

import os
import shutil
from pathlib import Path
from typing import Any

from slm_toolkit.report.charts.figure import Figure, Panel
from slm_toolkit.report.charts.html import PLOTLY_FILE

BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    *("microsoft-edge", "brave-browser", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
)
_WIDTH_PIXELS = 720
_SCALE = {"png": 3, "svg": 1}
_SECONDS = 120
"for one picture, on a busy machine"
_FOR_PAPER = {
    "layout": {
        "font": {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": "#111"},
        **{axis: {"gridcolor": "#ddd", "automargin": True} for axis in ("xaxis", "yaxis")},
        **{"paper_bgcolor": "white", "plot_bgcolor": "white"},
    }
}


def find_browser() -> str | None:
    """A Chrome, Chromium or Edge: what $CHROME_PATH says, else what is on the PATH."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROME_PATH", ""), *BROWSERS))), None)


def write_images(panels: list[Panel], folder: Path) -> list[Path]:
    """A PNG (2160 pixels wide) and an SVG of each figure.

    Raises ValueError where kaleido or a browser is missing, or where the browser does not draw.
    """
    browser = find_browser()
    if browser is None:
        raise ValueError(
            "no Chrome or Chromium to draw PNG and SVG with\nhint: `apt-get install chromium`, or "
            "CHROME_PATH=/path/to/chrome; without one, --html writes a page whose charts save themselves"
        )
    try:
        import kaleido
    except ModuleNotFoundError:
        raise ValueError(
            "--figures needs kaleido\nhint: pip install kaleido; without it, --html writes "
            "a page whose charts save themselves"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        folder / f"{figure.name}.{kind}": _picture(figure, kind)
        for panel in panels
        for figure in panel.figures
        for kind in _SCALE
    }
    options = {"plotlyjs": PLOTLY_FILE.as_uri(), "mathjax": False, "path": browser, "timeout": _SECONDS}
    problems = kaleido.write_fig_from_object_sync(
        [{"path": path, **picture} for path, picture in wanted.items()], kopts=options
    )
    if problems:
        raise ValueError(f"{browser} did not draw: {problems[0]!r}\nhint: CHROME_PATH names another")
    return list(wanted)


def _picture(figure: Figure, kind: str) -> dict[str, Any]:
    layout = {**figure.layout, "autosize": False, "width": _WIDTH_PIXELS, "template": _FOR_PAPER}
    return {
        "fig": {"data": figure.data, "layout": layout},
        "opts": {"format": kind, "scale": _SCALE[kind], "width": _WIDTH_PIXELS},
    }
