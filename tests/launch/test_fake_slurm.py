"""What a real Slurm can not be made to say, from programs of its names: silence, refusals, lost jobs."""

import io
import re
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from conftest import made_record, slm
from rich.console import Console

from slm_toolkit.compare import slurm
from slm_toolkit.compare.grid import PlannedRun, plan_runs
from slm_toolkit.compare.local import Slot
from slm_toolkit.compare.slurm import (
    UNKNOWN,
    SlurmJob,
    SlurmJobs,
    queue,
    script_path,
    slurm_nodes,
)
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.strategy.strategy import find_strategy

pytestmark = pytest.mark.quick


def planned(folder: Path) -> PlannedRun:
    given = {"model": "slm-1m", "max_steps": 4, "output_dir": str(folder)}
    machine = Machine(num_gpus=0, gpu=None)
    (run,) = plan_runs(given, [find_strategy("ddp")], num_processes=2, machine=machine)
    run.folder.mkdir()
    return run


def fake(folder: Path, name: str, prints: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{prints}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_newest_job_of_a_script_counts_and_arrays_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "9_[1-3]|PENDING|Priority|0:00|/a b\n8|RUNNING|None|1-02:00:01|/a b\n7|FAILED|None|0:02|/a b"
    fake(tmp_path, "squeue", f"echo '{shown}'", monkeypatch)
    assert queue() == {"/a b": SlurmJob(8, "RUNNING", "None", 93601.0)}  # 86400 + 7200 + 1


class Cluster:
    """sbatch and squeue as programs that print what a test says, the last answer for good."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        folder.mkdir()

    def answers(self, name: str, *lines: str) -> None:
        (self.folder / f"{name}.0").write_text("0")
        count = f"n=$(cat {self.folder}/{name}.0); echo $((n + 1)) > {self.folder}/{name}.0"
        cases = "".join(f"{number}) {line};;\n" for number, line in enumerate(lines[:-1]))
        fake(self.folder, name, f"{count}\ncase $n in\n{cases}*) {lines[-1]};;\nesac", self.monkeypatch)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path / "bin", monkeypatch)


def jobs_of(folder: Path, text: io.StringIO) -> tuple[SlurmJobs, PlannedRun]:
    nodes = slurm_nodes(num_nodes=1, gpus_per_node=0, options="")
    (folder / "runs").mkdir()
    return SlurmJobs(nodes, Console(file=text, width=200), timeout_seconds=60), planned(folder / "runs")


def ended(jobs: SlurmJobs, run: PlannedRun) -> RunRecord:
    never = threading.Event()
    return jobs.execute(run, Slot(), timeout_seconds=60, stop=never, on_progress=lambda state: None)


def test_a_controller_that_is_silent_for_a_while_ends_nothing(cluster: Cluster, tmp_path: Path) -> None:
    text = io.StringIO()
    jobs, run = jobs_of(tmp_path, text)
    shown = f"echo '7|RUNNING|None|0:30|{script_path(run)}'"
    cluster.answers("sbatch", "echo 7")
    cluster.answers("squeue", "true", "exit 1", "true", shown, shown.replace("RUNNING", "COMPLETED"))
    jobs.begin([run], force=False)
    write_record(made_record(), run.folder)
    assert ended(jobs, run).status == "ok"  # one look got no answer, one had lost the job
    assert "no answer from squeue" in text.getvalue()


def test_what_slurm_refuses_after_it_took_one_is_asked_again(cluster: Cluster, tmp_path: Path) -> None:
    text = io.StringIO()
    jobs, run = jobs_of(tmp_path, text)
    other = run.named("other")
    other.folder.mkdir()
    cluster.answers("sbatch", "echo 7", "echo 'Socket timed out' >&2; exit 1", "echo 8")
    over = "\n".join(
        f"{number}|COMPLETED|None|0:10|{script_path(each)}" for number, each in ((7, run), (8, other))
    )
    cluster.answers("squeue", "true", f"printf '{over}\n'")
    jobs.begin([run, other], force=False)
    assert "1 runs wait: sbatch: Socket timed out" in text.getvalue()
    for each in (run, other):
        threading.Timer(4, write_record, (made_record(), each.folder)).start()
        assert ended(jobs, each).status == "ok"  # seen though it shows seconds after the job's end


def test_what_slurm_never_took_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    jobs, run = jobs_of(tmp_path, io.StringIO())
    cluster.answers("squeue", "true")
    cluster.answers("sbatch", "echo 'invalid account' >&2; exit 1")
    with pytest.raises(ValueError, match="invalid account"):
        jobs.begin([run], force=False)


def test_a_job_that_nobody_knows_twice_is_lost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_SHARED_FOLDER_SECONDS", 1.0)
    jobs, run = jobs_of(tmp_path, io.StringIO())
    cluster.answers("sbatch", "echo 7")
    cluster.answers("squeue", "true")
    jobs.begin([run], force=False)
    record = ended(jobs, run)
    assert (record.status, record.reason) == (
        "failed",
        f"Slurm job 7 {UNKNOWN}: Slurm no longer has its final state",
    )


def test_ctrl_c_does_not_wait_for_a_record(cluster: Cluster, tmp_path: Path) -> None:
    jobs, run = jobs_of(tmp_path, io.StringIO())
    cluster.answers("sbatch", "echo 7")
    cluster.answers("squeue", "true", f"echo '7|FAILED|None|0:30|{script_path(run)}'")
    jobs.begin([run], force=False)
    stop = threading.Event()
    threading.Timer(5, stop.set).start()
    began = time.monotonic()
    with pytest.raises(CancelledError):
        jobs.execute(run, Slot(), timeout_seconds=60, stop=stop, on_progress=lambda state: None)
    assert 4 < time.monotonic() - began < 50  # a record could have come for a minute


def test_without_slurm_its_absence_is_an_error_with_a_hint(tmp_path: Path) -> None:
    asked = ("compare", "--launcher", "slurm", "--model", "slm-1m", "--output_dir", str(tmp_path))
    done = slm(*asked, env={"PATH": "/nowhere"})
    assert done.code == 2
    assert re.search(r"error: no squeue on this machine\nhint: .*login node", done.err)
