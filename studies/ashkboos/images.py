"""Write figures as PNG and SVG files: kaleido lets plotly.js draw them in an installed browser, offline."""

import os
import shutil
from pathlib import Path
from textwrap import wrap
from typing import Any

from slm_toolkit.report.charts.html_page import PLOTLY_FILE, Figure, escaped

BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    *("microsoft-edge", "brave-browser", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
)
_WIDTH_PIXELS = 720
_SCALE = {"png": 3, "svg": 1}
_CAPTION_CHARACTERS, _TITLE_LINE_PIXELS = 95, 19
_SECONDS = 120
"time limit for one picture; generous, for a busy machine"
_FOR_PAPER = {
    "layout": {
        "font": {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": "#111"},
        **{axis: {"gridcolor": "#ddd", "automargin": True} for axis in ("xaxis", "yaxis")},
        **{"paper_bgcolor": "white", "plot_bgcolor": "white"},
    }
}


def find_browser() -> str | None:
    """Return the path of Chrome, Chromium or Edge: $CHROME_PATH, else a browser on the PATH."""
    return next(filter(None, map(shutil.which, (os.environ.get("CHROME_PATH", ""), *BROWSERS))), None)


def write_images(figures: list[Figure], folder: Path, *, caption: str) -> list[Path]:
    """Write a PNG (2160 pixels wide) and an SVG of each figure; return their paths.

    `caption`: a line below each picture's title, so that a picture in a slide names machine and date.

    Raises ValueError if kaleido or a browser is missing, or if the browser fails to draw.
    """
    browser = find_browser()
    if browser is None:
        raise ValueError(
            "no Chrome or Chromium was found; --figures needs one to draw\n"
            "hint: `apt-get install chromium`, or set CHROME_PATH=/path/to/chrome"
        )
    try:
        import kaleido
    except ModuleNotFoundError:
        raise ValueError("--figures needs kaleido\nhint: pip install kaleido") from None
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        folder / f"{figure.name}.{kind}": _picture(figure, kind, caption)
        for figure in figures
        for kind in _SCALE
    }
    options = {"plotlyjs": PLOTLY_FILE.as_uri(), "mathjax": False, "path": browser, "timeout": _SECONDS}
    problems = kaleido.write_fig_from_object_sync(
        [{"path": path, **picture} for path, picture in pictures.items()], kopts=options
    )
    if problems:
        raise ValueError(
            f"{browser} failed to draw: {problems[0]!r}\nhint: set CHROME_PATH to another browser"
        )
    return list(pictures)


def _picture(figure: Figure, kind: str, caption: str) -> dict[str, Any]:
    lines = [f"<b>{escaped(figure.title)}</b>", *map(escaped, wrap(caption, _CAPTION_CHARACTERS))]
    margin = figure.layout["margin"]
    room = _TITLE_LINE_PIXELS * len(lines)
    layout = {
        **figure.layout,
        **{"autosize": False, "width": _WIDTH_PIXELS, "template": _FOR_PAPER},
        "height": figure.layout["height"] + room,
        "margin": {**margin, "t": margin["t"] + room},
        "title": {
            **{"text": "<br>".join(lines), "font": {"size": 12}, "x": 0, "xanchor": "left", "xref": "paper"},
            **{"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 10}},
        },
    }
    return {
        "fig": {"data": figure.data, "layout": layout},
        "opts": {"format": kind, "scale": _SCALE[kind], "width": _WIDTH_PIXELS},
    }
