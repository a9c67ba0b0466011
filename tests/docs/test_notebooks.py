"""The notebooks of examples/ run from top to bottom, and show what they ran.

SLM_SAVE_NOTEBOOKS=1 pytest -m full tests/docs/test_notebooks.py    saves what this run shows
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import ROOT, WARM

nbformat, nbclient, *_ = map(pytest.importorskip, ("nbformat", "nbclient", "ipykernel", "pandas"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MEASURED = "slm.compare"
"in cells whose outputs differ between machines and times"


def shown(cell: Any) -> list[str]:
    """The plain text of a cell's results, without what it printed on stderr."""
    return [
        output["text"] if output.output_type == "stream" else output["data"]["text/plain"]
        for output in cell.outputs
        if output.output_type != "stream" or output.name == "stdout"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_saved_outputs_are_those_of_today(path: Path, tmp_path: Path) -> None:
    saved = nbformat.read(path, as_version=4)
    ran = nbformat.read(path, as_version=4)
    with patch.dict(os.environ, WARM.env()):
        nbclient.NotebookClient(
            ran, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
        ).execute()
    if os.environ.get("SLM_SAVE_NOTEBOOKS"):
        for cell in ran.cells:
            cell.metadata = {}
        nbformat.write(ran, path)
        return
    for now, before in zip(ran.cells, saved.cells, strict=True):
        if now.cell_type == "code" and MEASURED in now.source:
            assert len(shown(now)) == len(shown(before))
        elif now.cell_type == "code":
            assert shown(now) == shown(before)
