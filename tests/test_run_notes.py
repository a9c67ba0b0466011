"""A comparison shows what a run waits for, from the notes in its log."""

import io
from pathlib import Path

import pytest
from conftest import made_record
from rich.console import Console
from test_long_grids import planned

from slm_toolkit.compare.causes import LOG_FILE
from slm_toolkit.compare.display import Display
from slm_toolkit.compare.run_notes import RunNotes

COMPILES = "cpu_adam is compiled for DeepSpeed, once on this machine: up to some minutes"
STEP_1 = {"step": 1, "num_steps": 8, "loss": 5.5, "tokens_per_second": 1234.0}


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_a_note_is_shown_until_the_next_step(tmp_path: Path) -> None:
    log = tmp_path / LOG_FILE
    notes = RunNotes(log, stands_seconds=0.0)
    assert notes.look(None) is None  # no log yet
    add(log, "[INFO] something\nnote: cpu_adam is comp")
    assert notes.look(None) is None  # half a line
    add(log, "iled\nDeepSpeed says more\n")
    assert notes.look(None) == notes.look(None) == "cpu_adam is compiled"
    assert notes.look(STEP_1) is None
    add(log, "note: another run, pid 7, compiles async_io; if this run needs it, it waits\n")
    assert notes.look(STEP_1) == "another run, pid 7, compiles async_io; if this run needs it, it waits"
    assert notes.look({**STEP_1, "step": 2}) is None
    assert notes.at_the_end(283.0).endswith(" s of it before step 1: cpu_adam is compiled")
    add(log, "step 8/8  loss 5.5000  1,234 tokens/s\nnote: other programs kept 1.6 CPU cores busy\n")
    assert notes.look(None) is None  # the run has ended, and with it its progress


def test_a_note_that_is_followed_by_a_step_at_once_is_not_shown(tmp_path: Path) -> None:
    notes = RunNotes(tmp_path / LOG_FILE)
    add(tmp_path / LOG_FILE, f"note: {COMPILES}\n")
    assert notes.look(None) is None
    assert notes.at_the_end(3.0) == ""


def test_of_a_large_log_the_end_is_read_and_another_try_has_a_new_one(tmp_path: Path) -> None:
    log = tmp_path / LOG_FILE
    notes = RunNotes(log, stands_seconds=0.0)
    add(log, "note: long ago\n" + "x" * 2**20 + "\n")
    assert notes.look(None) is None
    log.write_text(f"note: {COMPILES}\n")
    assert notes.look(None) == COMPILES


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_live_line_and_a_pipe_show_what_a_run_waits_for(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slm_toolkit.compare.run_notes._STANDS_SECONDS", 0.0)
    (run,) = planned("ds_zero2", output_dir=str(tmp_path))
    run.folder.mkdir(parents=True)
    written = io.StringIO()
    display = Display([run], Console(file=written, force_terminal=is_terminal, width=200))
    display.begin(run)
    add(run.folder / LOG_FILE, f"note: {COMPILES}\n")
    display.progress(run, None)
    display.progress(run, None)
    assert display.bars.tasks[1].fields["says"] == COMPILES
    assert written.getvalue().count(COMPILES) == (0 if is_terminal else 1)
    display.progress(run, STEP_1)
    assert display.bars.tasks[1].fields["says"] == "loss 5.500  1,234 tokens/s"
    display.end(run, made_record(seconds_total=283.0), kept=False)
    assert f"283 s, 0 s of it before step 1: {COMPILES}" in written.getvalue()
