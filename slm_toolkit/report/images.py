"""Figures as PNG and SVG files, drawn by the browser that is there: plotly.js needs one, and no network."""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import unquote_to_bytes

from slm_toolkit.report.figure import Panel
from slm_toolkit.report.html import figures_json, plotly_script

BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    *("microsoft-edge", "brave-browser", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
)
_SECONDS = 120
_PAGE = """<!doctype html><meta charset="utf-8"><body>
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script><script>
(async () => {{
  const images = {{}};
  for (const [name, {{ data, layout }}] of Object.entries(JSON.parse(figures.textContent)))
    for (const [format, scale] of [["svg", 1], ["png", 3]])
      images[`${{name}}.${{format}}`] = await Plotly.toImage(
        {{ data, layout: {{ ...layout, autosize: false, width: {width}, template: {template} }} }},
        {{ format, scale, width: {width}, height: layout.height }});
  const found = document.createElement("pre");
  found.id = "images";
  found.textContent = JSON.stringify(images);
  document.body.append(found);
}})();
</script>"""
_WIDTH_PIXELS = 720
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


def browser_command(browser: str, *words: str) -> list[str]:
    """Without a window and without asking anybody; root, as in containers, has no sandbox."""
    alone = ["--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
    alone += ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
    return [browser, *alone, *words]


def write_images(panels: list[Panel], folder: Path) -> list[Path]:
    """A PNG (2160 pixels wide) and an SVG of each figure. Raises ValueError where no browser is found."""
    browser = find_browser()
    if browser is None:
        raise ValueError(
            "no Chrome or Chromium to draw PNG and SVG with\nhint: `apt-get install chromium`, or "
            "CHROME_PATH=/path/to/chrome; without one, --html writes a page whose charts save themselves"
        )
    folder.mkdir(parents=True, exist_ok=True)
    page = _PAGE.format(
        figures=figures_json([panel for panel in panels if panel.figures]),
        plotly=plotly_script(),
        width=_WIDTH_PIXELS,
        template=json.dumps(_FOR_PAPER),
    )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "figures.html"
        path.write_text(page, encoding="utf-8")
        words = (f"--user-data-dir={scratch}/profile", "--virtual-time-budget=60000", "--dump-dom")
        command = browser_command(browser, *words, path.as_uri())
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    found = re.search(r'<pre id="images">(.*?)</pre>', done.stdout, re.S)
    if found is None:
        raise ValueError(
            f"{browser} drew nothing: exit code {done.returncode}: {done.stderr[-400:].strip()}\n"
            "hint: CHROME_PATH names another"
        )
    return [_write(folder / name, image) for name, image in json.loads(found[1]).items()]


def _write(path: Path, data_url: str) -> Path:
    """`data:image/png;base64,...` or `data:image/svg+xml,%3Csvg...`"""
    head, _, content = data_url.partition(",")
    path.write_bytes(base64.b64decode(content) if head.endswith("base64") else unquote_to_bytes(content))
    return path
