"""The keeper ends all processes of a launch, also those that hide; a launch that prints too much is ended."""

import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from test_long_grids import planned

from slm_toolkit.compare import local
from slm_toolkit.compare.local import Slot
from slm_toolkit.compare.outcome import record_of

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)", sys.argv[1]], {})
    os._exit(0)
os.wait()
time.sleep(1)
"""


def launched(folder: Path, program: str) -> local.Ended:
    """The end of a launch of the program, with the run's folder as its argument."""
    (run,) = planned("single", output_dir=str(folder))
    command = [sys.executable, "-c", program, str(run.folder), "--main_process_port", "1"]
    stop, on_progress = threading.Event(), lambda state: None
    with patch.object(local, "launch_command", lambda *_, **__: command):
        return local.launch(run, Slot(), timeout_seconds=60, stop=stop, on_progress=on_progress)


@pytest.mark.quick
def test_a_daemon_with_an_empty_environment_ends_with_its_launch(tmp_path: Path) -> None:
    assert launched(tmp_path, DAEMON).exit_code == 0
    words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [word for word in words if str(tmp_path) in " ".join(word)] == []


@pytest.mark.quick
def test_a_launch_that_prints_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MOST_LOG_BYTES", 2**20)
    began = time.monotonic()
    ended = launched(tmp_path, "while True: print('y' * 1000)")
    assert time.monotonic() < began + 30
    (run,) = planned("single", output_dir=str(tmp_path))
    assert record_of(run, ended).reason.startswith("stopped because it printed over 2 GiB: see ")
