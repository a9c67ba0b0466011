"""A comparison shows what a run waits for, from the lines in its log that say so."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from test_long_grids import planned

from slm_toolkit.compare import display
from slm_toolkit.compare.display import Display, Waits
from slm_toolkit.compare.outcome import LOG_FILE

COMPILES = "compiling cpu_adam, once on this machine: takes a few minutes"
STEP_1 = {"step": 1, "num_steps": 8, "loss": 5.5, "tokens_per_second": 1234.0}


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


@pytest.mark.quick
def test_a_wait_is_shown_until_the_next_step(tmp_path: Path) -> None:
    log = tmp_path / LOG_FILE
    waits = Waits(log)
    assert waits.look(None) is None  # no log yet
    add(log, "[INFO] something\nwaiting: cpu_adam is comp")
    assert waits.look(None) is None  # half a line
    add(log, "iled\nDeepSpeed says more\n")
    assert waits.look(None) == waits.look(None) == "cpu_adam is compiled"
    assert waits.look(STEP_1) is None
    add(log, "waiting: another run (pid 7) is compiling async_io; this run may need it\n")
    assert waits.look(STEP_1) == "another run (pid 7) is compiling async_io; this run may need it"
    assert waits.look({**STEP_1, "step": 2}) is None


@pytest.mark.quick
def test_other_notes_of_a_run_are_no_waits(tmp_path: Path) -> None:
    waits = Waits(tmp_path / LOG_FILE)
    add(
        tmp_path / LOG_FILE, "note: mixed_precision bf16 has no effect: --numerics aligned computes in bf16\n"
    )
    assert waits.look(None) is None


@pytest.mark.quick
def test_a_wait_and_a_step_seen_in_one_look_leave_nothing(tmp_path: Path) -> None:
    waits = Waits(tmp_path / LOG_FILE)
    add(tmp_path / LOG_FILE, f"waiting: {COMPILES}\n")
    assert waits.look(STEP_1) is None


@pytest.mark.quick
def test_of_a_large_log_the_end_is_read_and_another_try_has_a_new_one(tmp_path: Path) -> None:
    log = tmp_path / LOG_FILE
    waits = Waits(log)
    add(log, "waiting: long ago\n" + "x" * 2**20 + "\n")
    assert waits.look(None) is None
    log.write_text(f"waiting: {COMPILES}\n")
    assert waits.look(None) == COMPILES


@pytest.mark.quick
def test_a_run_without_a_step_says_so_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    waits = Waits(tmp_path / LOG_FILE)

    def shown_at(seconds: float, state: dict | None = None) -> str | None:
        now[0] = seconds
        return waits.look(state)

    assert shown_at(500) is None  # its job waits in Slurm's queue
    add(tmp_path / LOG_FILE, "")
    assert shown_at(559) is None
    assert shown_at(560) == shown_at(600) == "no step for 60 s: no output yet"
    add(tmp_path / LOG_FILE, "reading\n 10%\r\x1b[1m 20%")
    assert shown_at(601) == "no step for 60 s: no output yet"
    assert shown_at(620) == "no step for 2 min: its last output: \\x1b[1m 20%"
    assert shown_at(680, {"stage": "first step"}) == "no step for 3 min: first step"
    add(tmp_path / LOG_FILE, f"\nwaiting: {COMPILES}\n")
    assert shown_at(740, {"stage": "first step"}) == f"no step for 4 min: {COMPILES}"
    assert shown_at(750, STEP_1) is None
    assert shown_at(811, STEP_1) == f"no step for 60 s: its last output: waiting: {COMPILES}"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_live_line_and_a_pipe_show_what_a_run_waits_for(is_terminal: bool, tmp_path: Path) -> None:
    (run,) = planned("ds_zero2", output_dir=str(tmp_path))
    run.folder.mkdir(parents=True)
    written = io.StringIO()
    display = Display([run], Console(file=written, force_terminal=is_terminal, width=200))
    display.begin(run)
    add(run.folder / LOG_FILE, f"waiting: {COMPILES}\n")
    display.progress(run, None)
    display.progress(run, None)
    assert display.bars.tasks[1].fields["status"] == COMPILES
    assert written.getvalue().count(COMPILES) == (0 if is_terminal else 1)
    display.progress(run, STEP_1)
    assert display.bars.tasks[1].fields["status"] == "loss 5.500  1,234 tokens/s"
