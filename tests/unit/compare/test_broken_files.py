"""Whatever a run writes in the place of its progress, record and log, the comparison goes on."""

import dataclasses
import io
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conftest import made_record
from rich.console import Console
from test_outcome import ended, planned

from slm_toolkit.compare.display import Display
from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.local import clear, kept_record, last_step_of, progress_of
from slm_toolkit.compare.outcome import LOG_FILE, own_record, record_of
from slm_toolkit.record.run_record import PROGRESS_FILE, RECORD_FILE

STEP = {"step": 3, "num_steps": 20, "loss": 5.5, "tokens_per_second": 1234.0}
VALUES = (None, -1, 0, True, 1e308, 10**40, "", "x[/]\\", "\ud800", "\x1b[2J", [], {}, [[1]], {"step": 3})
BYTES = (b"", b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5, b"1" * 5000, b"NaN", b'"\\ud800"', b"\0" * 99)


def broken(valid: dict[str, Any], random: Random) -> bytes:
    """The file's content after one to three changes; every fourth is broken as text, too."""
    value = json.loads(json.dumps(valid))
    for _ in range(random.randint(1, 3)):
        part = value
        while (inner := [each for each in part.values() if isinstance(each, dict) and each]) and (
            random.random() < 0.7
        ):
            part = random.choice(inner)
        key = random.choice([*part])
        if random.random() < 0.3:
            del part[key]
            part = part or value.setdefault("other", {"key": 1})
        else:
            part[key] = random.choice(VALUES)
    text = json.dumps(value).encode()
    if random.random() < 0.25:
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.choice(BYTES) + text[at + random.randint(0, 9) :]
    return text


def shown_to_the_end(run: PlannedRun, console: Console, exit_code: int) -> str:
    """What a comparison does with a run that wrote these files. Returns the status of its row."""
    display = Display([run], console)
    display.begin(run)
    display.progress(run, progress_of(run.folder))
    end = dataclasses.replace(ended(exit_code), progress=last_step_of(run.folder))
    record = own_record(run, end) or record_of(run, end)
    display.end(run, record, kept=False)
    if (kept := kept_record(run)) is not None:
        display.end(run, kept, kept=True)
    return record.status


def test_a_thousand_broken_progress_and_record_files(tmp_path: Path) -> None:
    random, statuses = Random(20261128), set()
    run = planned(tmp_path, "step 1\n")
    good = dataclasses.asdict(dataclasses.replace(made_record(), identity=run.identity))
    console = Console(file=io.StringIO(), width=120)
    for _ in range(1000):
        valid = random.choice([STEP, {"stage": "first step"}])
        (run.folder / PROGRESS_FILE).write_bytes(broken(valid, random))
        (run.folder / RECORD_FILE).write_bytes(broken(good, random))
        statuses.add(shown_to_the_end(run, console, random.choice([0, 1])))
    assert statuses >= {"ok", "failed"}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_no_file(tmp_path: Path, make: Any) -> None:
    run = planned(tmp_path, "")
    (run.folder / LOG_FILE).unlink()
    for name in (PROGRESS_FILE, RECORD_FILE, LOG_FILE):
        make(run.folder / name)
    written = io.StringIO()
    assert shown_to_the_end(run, Console(file=written, width=500), 0) == "failed"
    assert f"can't read record {run.folder / RECORD_FILE}: " in written.getvalue()
    clear(run.folder, RECORD_FILE, LOG_FILE)
    assert [path.name for path in run.folder.iterdir()] == []


def test_of_a_log_of_gigabytes_only_the_end_is_read(tmp_path: Path) -> None:
    run = planned(tmp_path, "")
    with (run.folder / LOG_FILE).open("r+b") as log:
        log.truncate(2**33)  # sparse: takes no room
        log.seek(0, os.SEEK_END)
        log.write(b"\nValueError: at the end\n")
    assert record_of(run, ended(1)).reason == "ValueError: at the end"
