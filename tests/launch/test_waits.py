"""A comparison shows which run makes no step, for how long, and what it printed last."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from test_long_grids import planned

from slm_toolkit.compare import display as module
from slm_toolkit.compare.display import Display, Standstill
from slm_toolkit.compare.outcome import LOG_FILE

STEP_1 = {"step": 1, "num_steps": 8, "loss": 5.5, "tokens_per_second": 1234.0}


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


@pytest.mark.quick
def test_a_run_without_a_step_says_so_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    standstill = Standstill(tmp_path / LOG_FILE)

    def shown_at(seconds: float, state: dict | None = None) -> str | None:
        now[0] = seconds
        return standstill.look(state)

    assert shown_at(500) is None  # its job waits in Slurm's queue
    add(tmp_path / LOG_FILE, "")
    assert shown_at(559) is None
    assert shown_at(560) == shown_at(600) == "no step for 60 s: no output yet"
    add(tmp_path / LOG_FILE, "x" * 2**20 + "\nreading\n 10%\r\x1b[1m 20%")
    assert shown_at(601) == "no step for 60 s: no output yet"
    assert shown_at(620) == "no step for 2 min: its last output: \\x1b[1m 20%"
    add(tmp_path / LOG_FILE, "\nwaiting: compiling cpu_adam\n")
    last = "its last output: waiting: compiling cpu_adam"
    assert shown_at(680, {"stage": "first step"}) == f"no step for 3 min: first step, {last}"
    assert shown_at(750, STEP_1) is None
    assert shown_at(811, STEP_1) == f"no step for 60 s: {last}"


@pytest.mark.quick
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_live_line_and_a_pipe_show_a_standstill(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = planned("ds_zero2", output_dir=str(tmp_path))
    run.folder.mkdir(parents=True)
    written = io.StringIO()
    display = Display([run], Console(file=written, force_terminal=is_terminal, width=200))
    display.begin(run)
    add(run.folder / LOG_FILE, "reading\n")
    display.progress(run, None)
    begun = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: begun + 61)
    display.progress(run, None)
    display.progress(run, None)
    text = "no step for 60 s: its last output: reading"
    assert display.bars.tasks[1].fields["status"] == text
    assert written.getvalue().count(text) == (0 if is_terminal else 1)
    display.progress(run, STEP_1)
    assert display.bars.tasks[1].fields["status"] == "loss 5.500  1,234 tokens/s"
