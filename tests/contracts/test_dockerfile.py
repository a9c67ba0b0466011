"""The Dockerfile's commands run: its packages install together, from versions that an index has."""

import re
import shlex
import sys

import pytest
from conftest import ROOT, run


@pytest.mark.slow
def test_the_pinned_versions_install_together() -> None:
    """pip resolves and finds every package, and installs none: torch's CUDA build is 5 GB."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^RUN (pip install .*)$", text, re.M)
    words = shlex.split(line.replace("/src", str(ROOT)).partition("&&")[0])
    done = run(sys.executable, "-m", *words[:2], "--dry-run", "--ignore-installed", *words[2:], timeout=1200)
    assert done.code == 0, done.err
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints/docker.txt").read_text().split() if "==" in line
    )
    (would_install,) = re.findall(r"^Would install (.*)$", done.out, re.M)
    for name, version in pinned.items():
        assert re.search(rf"\b{name}-{re.escape(version)}\b", would_install, re.I), (name, version)
