"""One process plays rank 0 of N: its peak is a real rank's, its row says rehearsed, its chart can be read."""

import json
from pathlib import Path

import pytest
from conftest import made_record, record_under, run, slm, slm_here
from rich.console import Console

from slm_toolkit.compare.grid import plan_runs
from slm_toolkit.config.flags import flags_of
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.record.memory_parts import PARTS
from slm_toolkit.record.parity import judge
from slm_toolkit.report.rows import Row, ranked
from slm_toolkit.report.tables.profiled import peak_table
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, find_strategy

FAST = ("ddp", "fsdp_full_shard", "ds_zero3")
SMALL = ("--model", "slm-1m", "--seq_len", "64", "--kernels", "plain")
"a rehearsal without a GPU takes Triton's kernels to allocate nothing, which a CPU has not"
GIB = 2**30
NO_GPU = Machine(0, None)


def compared(folder: Path, strategies: tuple[str, ...], *arguments: str) -> dict[tuple[str, int], dict]:
    """Rows of a `slm compare` by strategy and ranks."""
    done = slm(
        *("compare", "--json", *SMALL, "--output_dir", str(folder), "--strategy", *strategies, *arguments)
    )
    assert done.code == 0, done.err
    return {(row["strategy"], row["world_size"]): row for row in json.loads(done.out)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearsed")


@pytest.fixture(scope="module")
def rehearsed(folder: Path) -> dict[tuple[str, int], dict]:
    return compared(folder, ("ddp", "fsdp_full_shard"), "--rehearse", "2", "8")


def assert_alike(folder: Path, strategies: tuple[str, ...]) -> None:
    """Each strategy's memory at the peak, rehearsed, is that of two real processes.

    Now and then a thread of gloo's holds the buffer of a gather that is done a moment longer (with FSDP2 seen
    in about one run of five); then the real run is looked at again.
    """
    fake = compared(folder, strategies, "--rehearse", "2")  # keeps those that `rehearsed` did
    left = strategies
    for attempt in range(5):
        options = ("--num_processes", "2", "--profile", "memory", "--max_steps", "2")
        real = compared(folder / f"real-{attempt}", left, *options)
        pairs = {name: [rows[name, 2]["memory_at_peak"] for rows in (fake, real)] for name in left}
        for played, held in pairs.values():
            assert played["num_bytes"] * (1 - 1e-4) <= held["num_bytes"] <= played["num_bytes"] * 1.01
        left = tuple(name for name, pair in pairs.items() if not alike(*pair))
        if not left:
            return
    pytest.fail(str([(name, pairs[name]) for name in left]))


def alike(fake: dict, real: dict) -> bool:
    return (
        fake["num_bytes"] == pytest.approx(real["num_bytes"], rel=1e-4)
        and (fake["phase"], fake["module"]) == (real["phase"], real["module"])
        # of so small a model, what only real ranks have shows: some masks, 2 KiB
        and all(fake["parts"][part] == pytest.approx(real["parts"][part], abs=4096) for part in PARTS)
    )


@pytest.mark.usefixtures("rehearsed")
def test_a_rehearsal_peaks_where_two_real_processes_do(folder: Path) -> None:
    assert_alike(folder, FAST)


@pytest.mark.slow
def test_every_strategy_rehearses_as_two_real_processes_run(folder: Path) -> None:
    assert_alike(folder, tuple(strategy for strategy in STUDIED_STRATEGIES if strategy not in FAST))


def test_rows_of_a_rehearsal_have_shards_of_their_size_and_no_rate(
    rehearsed: dict[tuple[str, int], dict],
) -> None:
    assert list(rehearsed) == [("ddp", 2), ("fsdp_full_shard", 2), ("ddp", 8), ("fsdp_full_shard", 8)]
    for row in rehearsed.values():
        assert (row["evidence"], row["status"], row["gpu"]) == ("rehearsed", "ok", None)
        assert row["peak_allocated_bytes"] == row["memory_at_peak"]["num_bytes"]
        assert row["memory_at_peak"]["num_bytes"] == sum(row["memory_at_peak"]["parts"].values())
        unknown = ("tokens_per_second", "mfu", "usd_per_million_tokens", "final_loss")
        assert all(row[name] is None for name in (*unknown, "rank", "parity_holds"))
        assert row["losses"] == row["warnings"] == []
    num_params = PRESETS["slm-1m"].num_params
    # aligned: bf16 parameters, fp32 master weights, two fp32 moments; FSDP2 splits each over the ranks
    for name, num_bytes in (("parameters", 2), ("master_weights", 4), ("optimizer", 8)):
        for num_ranks in (2, 8):
            whole = rehearsed["ddp", num_ranks]["memory_at_peak"]["parts"][name]
            shard = rehearsed["fsdp_full_shard", num_ranks]["memory_at_peak"]["parts"][name]
            assert whole == pytest.approx(num_bytes * num_params, rel=1e-3)  # moments: and a step count each
            assert shard == pytest.approx(num_bytes * num_params / num_ranks, rel=1e-3)
    # DDP's buckets are a copy of all bf16 gradients
    buckets = [rehearsed["ddp", n]["memory_at_peak"]["parts"]["communication"] for n in (2, 8)]
    assert buckets == [2 * num_params] * 2

    done = slm_here("report", rehearsed["fsdp_full_shard", 8]["record"])
    assert done.code == 0, done.err
    assert "memory of fsdp_full_shard, rehearsed on rank 0 of 8: peak" in done.out


def plan(strategies: tuple[str, ...] = ("single", "ddp"), **options: object) -> list:
    given = {"model": "slm-1m", "rehearse": options.pop("rehearse", [1, 8])}
    found = [find_strategy(name) for name in strategies]
    planned = {"num_processes": None, "machine": NO_GPU, **options}
    return plan_runs({**given, **planned.pop("given", {})}, found, **planned)


def test_a_rehearsal_is_one_process_that_is_asked_for_many_ranks() -> None:
    runs = plan()
    planned = [(run.strategy.name, run.config.rehearse, run.asked["num_processes"]) for run in runs]
    assert planned == [("single", 1, 1), ("ddp", 1, 1), ("ddp", 8, 8)]  # one process is rehearsed once
    assert {run.num_processes for run in runs} == {1}
    assert len({run.identity for run in runs}) == 3
    assert all("--rehearse" in flags_of(run.config) for run in runs)
    assert {run.config.seq_len for run in runs} == {1024}  # as on a GPU
    assert len(plan(rehearse=[64], machine=Machine(1, "NVIDIA L4"))) == 2  # one GPU does for any number


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"given": {"eval_steps": 5}, "rehearse": [8]}, "--eval_steps 5 with --rehearse 8"),
        ({"strategies": ("single",)}, "--rehearse 8 with single, which has only one rank"),
        ({"rehearse": [0]}, "--rehearse is 0: at least 1"),
        ({"given": {"kernels": ["plain", "compile"]}}, "--kernels compile: fake tensors can't be compiled"),
        ({"strategies": ("ds_zero2_offload",)}, "ds_zero2_offload: fake tensors are all on the CPU"),
    ],
)
def test_what_a_rehearsal_cannot_do_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        plan(**options)
    assert str(error.value).count("\nhint: ") == 1


@pytest.mark.quick
@pytest.mark.parametrize("flag", ["--num_processes 2", "--parity 3", "--repeats 2", "--profile"])
def test_flags_that_a_rehearsal_excludes_are_refused_before_a_launch(flag: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    rehearsal = ("--model", "slm-1m", "--rehearse", "8", "--output_dir", str(folder))
    done = slm_here("compare", *rehearsal, *flag.split())
    assert (done.code, f"{flag.split()[0]} with --rehearse" in done.err) == (2, True), done.err
    assert not folder.exists()


@pytest.mark.quick
def test_several_processes_are_no_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slm_toolkit import train

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        train.main([*SMALL, "--rehearse", "8", "--output_dir", str(tmp_path / "runs")])
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: --rehearse 8 in 2 processes: a rehearsal is one process"
    assert hint.startswith("hint: slm train --rehearse N, or accelerate launch --num_processes 1")
    assert not (tmp_path / "runs").exists()


_REAL_TENSORS = """
import sys
import torch
import slm_toolkit.run.rehearse as rehearse
rehearse.is_fake = lambda config: False  # as on a GPU
torch.use_deterministic_algorithms(True)  # what is not written holds NaN
if sys.argv.pop(1) == "bad":
    torch.isfinite = lambda tensor: torch.zeros_like(tensor, dtype=torch.bool)
from slm_toolkit.train import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("gradients", [pytest.param("good", marks=pytest.mark.slow), "bad"])
def test_a_rehearsal_on_real_tensors_steps_or_fails(tmp_path: Path, gradients: str) -> None:
    """torch 2.11's fake group reduced gradients to whatever memory held: no step was taken, the record ok."""
    script = tmp_path / "real.py"
    script.write_text(_REAL_TENSORS)
    done = run(
        *("accelerate", "launch", "--config_file", "accel_configs/fsdp_full_shard.yaml"),
        *("--num_processes", "1", "--main_process_port", "0", str(script), gradients),
        *("--model", "slm-1m", "--seq_len", "32", "--per_device_train_batch_size", "2", "--max_steps", "2"),
        *("--rehearse", "4", "--numerics", "stock", "--save_final_model", "false"),
        *("--output_dir", str(tmp_path / "runs")),
        cold=True,
    )
    record = record_under(tmp_path / "runs")
    if gradients == "good":
        assert done.code == 0, done.err
        held = record["state_bytes"][0]
        # two moments as large as the fp32 shards, and one fp32 count of steps for each of 39 parameters
        assert held["optimizer"] == 2 * held["parameters"] + 39 * 4
    else:
        assert done.code == 1, done.err
        assert record["status"] == "failed"
        assert "took no optimizer step" in record["reason"]


@pytest.mark.quick
def test_a_rehearsal_on_a_gpu_has_a_rate_but_no_rank_loss_parity_or_dollars() -> None:
    asked = made_record().asked
    asked = {**asked, "config": {**asked["config"], "rehearse": 8}, "num_processes": 8}
    counted = {"drawn": 33 * 4 * 1024, "in_loss": 33 * 4 * 1024}  # rank 0's alone
    fsdp = {"strategy": "fsdp_full_shard", "engine": "fsdp2"}
    on_gpu = made_record(identity="2", asked=asked, **fsdp, losses=[], tokens_counted=counted)
    others = made_record(), made_record(identity="3", strategy="ds_zero2", engine="deepspeed")
    row = ranked([Row([(Path("a"), each)]) for each in (on_gpu, *others)])[0]
    assert (row.status, row.tokens_per_second is None) == ("ok", False)
    assert (row.rank, row.final_loss, row.usd_per_million_tokens, row.warnings) == (None, None, None, [])
    assert [parity is None for parity in judge([on_gpu, *others])] == [True, True, False]


@pytest.mark.quick
def test_a_peak_is_shown_by_its_parts() -> None:
    parts = {"parameters": 2 * GIB, "activations": 4 * GIB, "logits_and_loss": 3 * GIB, "gradients": 0}
    at_peak = {"phase": "backward", "module": "loss", "num_bytes": 9 * GIB, "parts": parts}
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(peak_table("memory of x", at_peak), crop=False)
    lines = capture.get().splitlines()
    assert lines[0].rstrip() == "memory of x: peak 9.00 GiB in backward at loss"
    # shares: 4, 3 and 2 of 9
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in lines if line.startswith("│")]
    assert rows == [
        ["activations", "4.00 GiB", "44.4%"],
        ["logits and loss", "3.00 GiB", "33.3%"],
        ["parameters", "2.00 GiB", "22.2%"],
    ]
