"""The search for the largest batch: as arithmetic over made-up limits, and with real processes."""

import itertools
import json
from math import log2
from pathlib import Path

import pytest
from conftest import H100, Finished, made_record, slm

from slm_toolkit.compare.grid import (
    BatchSearch,
    PlannedRun,
    estimated_batch,
    find_largest_batch,
    plan_runs,
    search,
)
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.predict.grid import estimates
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.strategy.strategy import find_strategy

MODEL = {"model": ["slm-100m"], "kernels": "fused"}
CLI = ("compare", "--model", "slm-1m", "--strategy", "ddp", "--seq_len", "32", "--largest_batch", "--json")


class Memory:
    """Batches up to `limit` run; every trial is counted."""

    def __init__(self, limit: int) -> None:
        self.limit, self.tried = limit, []

    def runs(self, batch: int) -> str:
        self.tried.append(batch)
        return "ok" if batch <= self.limit else "oom"


@pytest.mark.quick
def test_any_limit_is_found_in_few_trials() -> None:
    for start, limit in itertools.product((1, 2, 7, 100, 256), range(0, 301, 7)):
        memory = Memory(limit)
        assert search(memory.runs, start=start, most=10**6) == BatchSearch(limit, limit + 1)
        assert memory.tried[0] == start
        assert len(set(memory.tried)) == len(memory.tried)  # none twice
        # strides double until they pass the limit, then halve: two logarithms of how far it was
        assert len(memory.tried) <= 2 * log2(abs(limit - start) + 1) + 6
    for most in range(1, 40):
        memory = Memory(10**9)
        assert search(memory.runs, start=3, most=most) == BatchSearch(most, None)
        assert max(memory.tried) <= most
    answers = {1: "ok", 2: "ok", 4: "failed"}  # another failure ends the search
    assert search(answers.__getitem__, start=1, most=64) == BatchSearch(None, None)


def planned(*strategies: str, **flags: object) -> list[PlannedRun]:
    """On a machine of eight H100s, as `slm compare --largest_batch` plans."""
    given = {**MODEL, "per_device_train_batch_size": 1, "max_steps": 3, **flags}
    machine = Machine(8, H100)
    return plan_runs(given, [find_strategy(name) for name in strategies], num_processes=None, machine=machine)


def test_a_search_on_a_gpu_starts_where_slm_estimate_says() -> None:
    names = ("ddp", "fsdp_full_shard", "ds_zero2", "ds_zero3")
    expected = estimates(
        MODEL,
        [find_strategy(name) for name in names],
        gpus=["h100-80gb"],
        num_gpus=[8],
        find_largest_batch=True,
    )
    found = [estimated_batch(run) for run in planned(*names)]
    assert found == [row.per_device_train_batch_size for row in expected]
    assert min(found) > 8


def test_each_trial_is_a_run_of_its_own_and_the_largest_is_shown() -> None:
    (run_of_one,) = planned("ddp")
    start = estimated_batch(run_of_one)
    trials: list[PlannedRun] = []

    def execute(trial: PlannedRun) -> RunRecord:
        trials.append(trial)
        fits = trial.config.per_device_train_batch_size <= start - 2
        return made_record(status="ok" if fits else "oom", run_name=trial.run_name)

    found, shown, record = find_largest_batch(run_of_one, execute)
    assert found == BatchSearch(start - 2, start - 1)
    assert shown.config.per_device_train_batch_size == start - 2
    assert record.run_name == shown.run_name
    assert len({trial.folder for trial in trials}) == len(trials)
    assert all(trial.asked["config"]["max_steps"] == 3 for trial in trials)
    found, shown, record = find_largest_batch(run_of_one, lambda trial: made_record(status="oom"))
    assert found == BatchSearch(0, 1)
    assert (shown.config.per_device_train_batch_size, record.status) == (1, "oom")  # not even 1 runs


def test_what_a_search_can_not_do_is_said(tmp_path: Path) -> None:
    words = ["--per_device_train_batch_size", "2", "--rehearse", "8", "--parity", "5"]
    done = slm("compare", "--model", "slm-1m", "--output_dir", str(tmp_path), "--largest_batch", *words)
    assert done.code == 2
    for flag in ("--per_device_train_batch_size", "--rehearse", "--parity"):
        assert f"{flag} with --largest_batch" in done.err


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    folder = tmp_path_factory.mktemp("searched")
    return slm(*CLI, "--output_dir", str(folder)), folder


def test_a_search_on_cpu_ends_at_16(searched: tuple[Finished, Path]) -> None:
    done, folder = searched
    (row,) = json.loads(done.out)
    assert done.code == 0, done.err
    assert (row["largest_batch"], row["smallest_oom_batch"]) == (16, None)
    assert (row["per_device_train_batch_size"], row["status"], row["max_steps"]) == (16, "ok", 3)
    assert len(list(folder.glob("*/record.json"))) == 5  # 1, 2, 4, 8 and 16


def test_a_second_search_repeats_nothing(searched: tuple[Finished, Path]) -> None:
    first, folder = searched
    words = [word for word in CLI if word != "--json"]
    again = slm(*words, "--output_dir", str(folder), "--export", str(folder / "page.html"))
    assert again.err.count("kept from") == 5
    assert "16 or more" in again.out
    assert "<td>16 or more</td>" in (folder / "page.html").read_text()
