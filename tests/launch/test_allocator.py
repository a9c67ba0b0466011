"""The memory allocator of a run is in its record, and runs under another one are other runs."""

import json
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from conftest import run, slm

from slm_toolkit.hardware.machine import HUGE_PAGES

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "3")
RUN = ("compare", "--strategy", "single", *FEW, "--json")


def seen(**env: str) -> str:
    program = "from slm_toolkit.hardware.machine import allocator; print(allocator())"
    set_here = ("LD_PRELOAD", HUGE_PAGES)  # the second by a comparison in this process
    plain = {name: value for name, value in os.environ.items() if name not in set_here}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**plain, **env}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_settings_and_a_library_in_mallocs_place_are_named() -> None:
    conf = "expandable_segments:True"
    assert seen() == "malloc"
    assert seen(THP_MEM_ALLOC_ENABLE="1") == "malloc, huge pages"
    assert seen(PYTORCH_CUDA_ALLOC_CONF=conf) == f"malloc, {conf}"
    if (library := find_library("tcmalloc_minimal")) is not None:  # apt-get install libtcmalloc-minimal4
        assert seen(LD_PRELOAD=library) == "tcmalloc"


@pytest.mark.slow
def test_a_comparison_uses_huge_pages_unless_it_is_told_not_to(tmp_path: Path) -> None:
    unset = ("env", "-u", HUGE_PAGES, str(Path(sys.executable).with_name("slm")))
    first = run(*unset, *RUN, "--output_dir", str(tmp_path))
    second = slm(*RUN, "--output_dir", str(tmp_path), env={"THP_MEM_ALLOC_ENABLE": "0"})
    assert (first.code, second.code) == (0, 0), first.err + second.err
    allocators = [json.loads(done.out)[0]["allocator"] for done in (first, second)]
    assert allocators == ["malloc, huge pages", "malloc"]
    both = slm("report", str(tmp_path))  # runs under another allocator are other runs
    assert "allocator" in both.out
    assert "huge pages" in both.out
