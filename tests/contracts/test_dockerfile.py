"""The Dockerfile's commands run: its packages install together, from versions that an index has."""

import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

RUNS = re.findall(r"^RUN (.*)$", (ROOT / "Dockerfile").read_text().replace("\\\n", " "), re.M)


@pytest.mark.slow
def test_the_pinned_versions_install_together() -> None:
    """pip resolves and finds every package, and installs none: torch's CUDA build is 5 GB."""
    (line,) = [line for line in RUNS if line.startswith("pip install")]
    words = shlex.split(line.replace("/src", str(ROOT)).partition("&&")[0])
    done = subprocess.run(
        [sys.executable, "-m", *words[:2], "--dry-run", "--ignore-installed", *words[2:]],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints/docker.txt").read_text().split() if "==" in line
    )
    (would_install,) = re.findall(r"^Would install (.*)$", done.stdout, re.M)
    for name, version in pinned.items():
        assert re.search(rf"\b{name}-{re.escape(version)}\b", would_install, re.I), (name, version)


def test_the_system_packages_are_those_that_a_training_needs() -> None:
    (line,) = [line for line in RUNS if "apt-get" in line]
    for package in ("g++", "libaio-dev", "ninja-build", "python3-dev", "python3-venv"):
        assert package in line.split()  # a compiler for DeepSpeed's kernels, Python's headers for Triton
