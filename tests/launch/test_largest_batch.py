"""The search for the largest batch: as arithmetic over made-up limits, and with real processes."""

import json
from math import log2
from pathlib import Path

import pytest
from conftest import H100, ROOT, Finished, made_record, run, slm

from slm_toolkit.compare.grid import (
    BatchSearch,
    PlannedRun,
    estimated_batch,
    find_largest_batch,
    plan_runs,
    search,
)
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.predict.estimate import LARGEST_BATCH_TRIED
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


@pytest.mark.parametrize("start", [1, 2, 7, 100, 256, 1000])
def test_any_limit_is_found_in_few_trials(start: int) -> None:
    most = 10**6
    for limit in range(301):
        memory = Memory(limit)
        assert search(memory.runs, start=start, most=most) == BatchSearch(limit, limit + 1)
        assert memory.tried[0] == start
        assert len(set(memory.tried)) == len(memory.tried)  # none twice
        # strides double until they pass the limit, then halves: two logarithms of how far it was
        far = abs(limit - start) + 1
        assert len(memory.tried) <= 2 * log2(far) + 6


@pytest.mark.quick
def test_a_good_start_is_worth_its_trials() -> None:
    # 1000 within a sixteenth, 62, of the limit: 1000, 1062, and six halves of 62
    memory = Memory(1037)
    search(memory.runs, start=1000, most=10**6)
    assert memory.tried[:2] == [1000, 1062]
    assert len(memory.tried) <= 8


@pytest.mark.parametrize("start", [1, 3, 9])
def test_nothing_above_the_most_is_tried(start: int) -> None:
    for most in range(1, 40):
        memory = Memory(10**9)
        assert search(memory.runs, start=start, most=most) == BatchSearch(most, None)
        assert max(memory.tried) <= most


@pytest.mark.quick
def test_another_failure_ends_the_search() -> None:
    answers = {1: "ok", 2: "ok", 4: "failed"}
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

    found, shown, record = find_largest_batch(run_of_one, execute, most=LARGEST_BATCH_TRIED)
    assert found == BatchSearch(start - 2, start - 1)
    assert shown.config.per_device_train_batch_size == start - 2
    assert record.run_name == shown.run_name
    assert len({trial.folder for trial in trials}) == len(trials)
    assert all(trial.asked["config"]["max_steps"] == 3 for trial in trials)


@pytest.mark.quick
def test_where_not_even_1_runs_that_run_is_shown() -> None:
    (run_of_one,) = planned("ddp")
    found, shown, record = find_largest_batch(run_of_one, lambda trial: made_record(status="oom"), most=4)
    assert found == BatchSearch(0, 1)
    assert (shown.config.per_device_train_batch_size, record.status) == (1, "oom")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--largest_batch", "--per_device_train_batch_size", "2", "--rehearse", "8", "--parity", "5"],
            "--per_device_train_batch_size with --largest_batch, which searches for it: give only one\n"
            "--parity with --largest_batch, whose runs are short and have different batches\n"
            "--rehearse with --largest_batch and no GPU, because a CPU never runs out of memory\n",
        ),
    ],
)
def test_what_a_search_can_not_do_is_said(words: list[str], says: str, tmp_path: Path) -> None:
    done = slm("compare", "--model", "slm-1m", "--output_dir", str(tmp_path), *words)
    assert done.code == 2
    assert says in done.err
    assert "hint:" in done.err


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


@pytest.mark.slow
def test_a_search_on_cpu_finds_where_memory_ends(tmp_path: Path) -> None:
    # 128 tokens x 131,072 words make some 200 MB of logits and loss per sample: with half a GB more than one
    # sample needs, three run and four don't
    model = tmp_path / "wide"
    model.mkdir()
    sizes = {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 131_072},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512},
    }
    (model / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes})
    )
    same = ("--model", str(model), "--kernels", "plain", "--seq_len", "128", "--max_steps", "3")
    same += ("--output_dir", str(tmp_path / "runs"))
    program = (
        "import sys; from slm_toolkit.train import main; main(sys.argv[1:]); "
        "print(open('/proc/self/status').read())"
    )
    alone = run("python", "-c", program, "--per_device_train_batch_size", "1", *same, cwd=ROOT)
    (peak_kib,) = [int(line.split()[1]) for line in alone.out.splitlines() if line.startswith("VmPeak")]
    words = ("compare", "--strategy", "single", "--largest_batch", "--json", *same)
    limit = f"ulimit -v {peak_kib + 500_000}; exec slm "
    done = run("bash", "-c", limit + " ".join(words), cold=True)  # a warm process has no such limit
    (row,) = json.loads(done.out)
    assert (row["largest_batch"], row["smallest_oom_batch"], row["status"]) == (3, 4, "ok"), done.err
