"""The Python blocks of docs/ run, in the order of their page."""

import contextlib
import io
import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import ROOT, WARM

# Its blocks need a script with an accelerator: test_your_own_script.py runs them.
OF_A_SCRIPT = "your_own_script.md"

BLOCKS = {
    path: blocks
    for path in sorted((ROOT / "docs").glob("*.md"))
    if path.name != OF_A_SCRIPT
    if (blocks := re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
}


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)
def test_the_python_of_a_page_runs(path: Path, tmp_path: Path) -> None:
    names: dict[str, object] = {}
    out = io.StringIO()
    with (
        patch.dict(os.environ, WARM.env()),
        contextlib.chdir(tmp_path),
        contextlib.redirect_stdout(out),
    ):
        for block in BLOCKS[path]:
            exec(compile(block, str(path), "exec"), names)
    for shown in re.findall(r"print\(error\)  # (.*), hint: (.*)", "".join(BLOCKS[path])):
        assert "\nhint: ".join(shown) in out.getvalue()
