"""A user's own script, unchanged, is launched under each strategy, recorded and compared."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, record_under, run, slm

from slm_toolkit.config.run_config import RunConfig

sys.path.insert(0, str(ROOT / "bench"))
from rivals.work import write_work

SCRIPTS = ROOT / "tests" / "scripts"
THREE = ("ddp", "fsdp_full_shard", "ds_zero2")


def compare(folder: Path, script: str, *words: str, strategies: tuple[str, ...] = THREE) -> dict[str, dict]:
    """The rows by strategy."""
    start = ("compare", "--script", str(SCRIPTS / script), "--output_dir", str(folder), "--json")
    done = slm(*start, "--strategy", *strategies, *words, timeout=600)
    assert done.out, done.err
    return {row["strategy"]: row for row in json.loads(done.out)}


@pytest.mark.quick
def test_a_loop_is_the_same_row_under_each_engine_and_is_kept(tmp_path: Path) -> None:
    rows = compare(tmp_path, "loop.py", "--", "--lr", "1e-3")
    assert [row["status"] for row in rows.values()] == ["ok"] * 3
    assert [row["engine"] for row in rows.values()] == ["ddp", "fsdp2", "deepspeed"]
    assert rows["ddp"]["losses"] == pytest.approx(rows["ds_zero2"]["losses"], abs=1e-5)
    assert rows["ddp"]["losses"] == pytest.approx(rows["fsdp_full_shard"]["losses"], abs=1e-5)
    assert len(set(rows["ddp"]["losses"])) == 16
    # 2 layers: q, k, v, o of 64 x 64, three of 64 x 128, two norms; two vocabulary matrices and a norm
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 256 * 64 + 64
    full = {"parameters": 4 * parameters, "gradients": 4 * parameters, "master_weights": 0}
    state = rows["ddp"]["state_bytes_per_rank"]
    assert {name: state[name] for name in full} == full
    assert rows["fsdp_full_shard"]["state_bytes_per_rank"]["parameters"] == full["parameters"] / 2
    for row in rows.values():
        assert (row["parity_holds"], row["numerics_differences"]) == (
            None if row["engine"] == "ddp" else True,
            [],
        )
        assert row["tokens_per_step"] == 2 * 4 * 32
        assert row["script"] == str(SCRIPTS / "loop.py")
        # unknown, not guessed
        assert [row[name] for name in ("seed", "dataset", "optim", "gradient_checkpointing")] == [None] * 4
    again = slm(
        *("compare", "--script", str(SCRIPTS / "loop.py"), "--output_dir", str(tmp_path)),
        *("--strategy", *THREE, "--", "--lr", "1e-3"),
    )
    assert again.err.count("kept from") == 3
    assert "measured: loop.py, 2 CPU processes" in again.out


def test_arguments_make_a_grid_and_columns(tmp_path: Path) -> None:
    start = ("compare", "--script", str(SCRIPTS / "loop.py"), "--output_dir", str(tmp_path))
    done = slm(*start, "--strategy", "single", "--", "--batch", "2,4", "--accumulate", "2", "--lr=1e-4")
    shown = [line.split()[1] for line in done.out.splitlines() if "single" in line and "│" in line]
    assert sorted(shown) == ["2", "4"]  # the faster one comes first, if they don't tie
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*/record.json")]
    config = {"numerics": "stock", "accumulate": 2, "lr": 1e-4}
    for record in records:
        assert record["asked"]["config"] == {**config, "batch": record["first_batch"]["num_sequences"]}
        assert (len(record["losses"]), record["numerics"]["accumulation"]) == (16, 2)  # of 32 batches


def test_what_differs_between_strategies_is_marked_by_name(tmp_path: Path) -> None:
    """Micro-steps that only DeepSpeed has, and autocast that only one YAML has."""
    autocast = yaml.safe_load((ROOT / "accel_configs" / "ddp.yaml").read_text()) | {"mixed_precision": "bf16"}
    (tmp_path / "autocast.yaml").write_text(yaml.safe_dump(autocast))
    zero = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    yamls = ("ddp", str(tmp_path / "autocast.yaml"), str(tmp_path / "zero.json"))
    rows = compare(tmp_path / "runs", "loop.py", strategies=yamls)
    assert rows["ddp"]["numerics_differences"] == []
    assert "autocast on (not off)" in rows["autocast"]["numerics_differences"]
    zero_row = next(row for name, row in rows.items() if name.startswith("zero"))
    assert "accumulation 2 (not 1)" in zero_row["numerics_differences"]
    assert len(zero_row["losses"]) == 8
    align = "give micro-steps to the Accelerator, and gradient_accumulation_steps: auto in the JSON"
    assert align in zero_row["numerics_alignments"]
    not_comparable = f"losses not comparable: it has 2 micro-steps per step, and ddp 1 ({align})"
    assert not_comparable in zero_row["warnings"]
    assert (zero_row["parity_holds"], rows["autocast"]["parity_holds"]) == (None, True)
    table = slm("report", str(tmp_path / "runs")).out
    assert f". To align: {align}" in " ".join(table.split())


def test_runs_of_other_weights_are_not_called_wrong(tmp_path: Path) -> None:
    rows = compare(tmp_path, "loop.py", "--", "--unseeded", strategies=("ddp", "ds_zero2"))
    assert [row["status"] for row in rows.values()] == ["ok"] * 2
    assert [row["parity_holds"] for row in rows.values()] == [None] * 2
    reason = "its weights before step 1 are not those of ddp (call set_seed before the model)"
    assert f"losses not comparable: {reason}" in rows["ds_zero2"]["warnings"]


def test_a_script_that_fails_or_is_not_recorded_says_why(tmp_path: Path) -> None:
    text = (SCRIPTS / "loop.py").read_text()
    two = text.replace(
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)\n"
        "model, optimizer, other, loader = accelerator.prepare(model, optimizer, other, loader)",
    )
    exits = text + "\nif accelerator.process_index == 1:\n    raise SystemExit(3)\n"
    for name, program in (("two.py", two), ("exits.py", exits)):
        (tmp_path / name).write_text(program)
    for script, words, status, reason in (
        ("plain.py", (), "failed", "was not recorded: no Accelerator prepared a model and an optimizer"),
        ("loop.py", ("--huge",), "oom", "can't allocate memory"),
        ("loop.py", ("--no_such",), "failed", "unrecognized arguments: --no_such"),
        (tmp_path / "two.py", (), "failed", "it trains with several optimizers"),
        (tmp_path / "exits.py", (), "failed", ""),
    ):
        (row,) = compare(tmp_path / "runs", str(script), "--", *words, strategies=("ddp",)).values()
        assert (row["status"], row["losses"]) == (status, []), (script, row["reason"])
        assert reason in row["reason"]


def test_a_script_imports_from_its_folder_and_from_pythonpath(tmp_path: Path) -> None:
    for name in ("scripts", "library"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}.py").write_text(f"print('imported of_{name}')\n")
    script = tmp_path / "scripts" / "train.py"
    script.write_text("import of_library, of_scripts\n" + (SCRIPTS / "loop.py").read_text())
    # `slm compare --script` starts it with -P, which keeps the working folder out of sys.path
    words = ("-P", "-m", "slm_toolkit.run_script", str(script))
    env = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "library", ROOT)))}
    done = run(sys.executable, *words, env=env, cwd=tmp_path)
    assert done.out.splitlines() == ["imported of_library", "imported of_scripts"], done.err
    assert len(record_under(tmp_path / "runs")["losses"]) == 32  # as under one's own launcher


@pytest.mark.quick
def test_no_script_ends_the_comparison(tmp_path: Path) -> None:
    does = ("pipes", "bytes", "keys", "nested", "record", "signal", "says", "nothing")
    start = ("compare", "--script", str(SCRIPTS / "nasty.py"), "--output_dir", str(tmp_path), "--json")
    done = slm(
        *start, "--strategy", "single", "--timeout", "200", "--", "--does", ",".join(does), timeout=900
    )
    assert "Traceback" not in done.err, done.err
    records = [json.loads(Path(row["record"]).read_text()) for row in json.loads(done.out)]
    found = {each["asked"]["script"][-1]: (each["status"], each["reason"]) for each in records}
    assert [name for name in does if found[name] == ("ok", None)] == ["bytes", "keys", "nested", "nothing"]
    reasons = {name: reason for name, (status, reason) in found.items() if status == "failed"}
    assert reasons["pipes"].startswith("see ")
    assert reasons["record"].startswith("exit code 0, but no valid record: can't read record ")
    assert reasons["signal"].startswith("a rank crashed (signal 35): see ")
    assert reasons["says"] == "ValueError: its own words: width: 64 and 128"


@pytest.mark.parametrize(
    ("script", "accumulation", "tokens"),
    [("trainer.py", 2, 2 * 2 * 4 * 32), ("sft.py", 1, None), ("nano.py", 1, 2 * 8 * 32)],
)
def test_a_script_has_the_same_losses_under_each_engine(
    script: str, accumulation: int, tokens: int | None, tmp_path: Path
) -> None:
    if script == "sft.py" and importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed")
    rows = compare(tmp_path, script)
    assert [(row["status"], row["reason"]) for row in rows.values()] == [("ok", None)] * 3
    losses = rows["ddp"]["losses"]
    assert len(losses) == 14
    for row in rows.values():
        assert row["losses"] == pytest.approx(losses, abs=1e-5)
        assert row["parity_holds"] in (None, True)
        assert tokens in (None, row["tokens_per_step"])
    assert rows["ddp"]["numerics_probed"]["accumulation"] == accumulation


def test_a_model_of_unknown_shape_and_padded_batches(tmp_path: Path) -> None:
    rows = compare(tmp_path, "classify.py", strategies=("ddp", "ds_zero2"))
    assert [row["status"] for row in rows.values()] == ["ok"] * 2
    ddp = rows["ddp"]
    assert (ddp["flops_per_token"], ddp["mfu"]) == (None, None)
    assert 0.2 < ddp["padding"] < 0.5
    assert ddp["losses"] == pytest.approx(rows["ds_zero2"]["losses"], abs=1e-2)
    # DeepSpeed's JSON clips, the script does not
    assert rows["ds_zero2"]["numerics_differences"] == ["clipping 1 (not unknown)"]
    record = json.loads(Path(ddp["record"]).read_text())
    assert record["model"]["model_type"] == "BertForSequenceClassification"
    assert "hidden_size" not in record["model"]
    page = tmp_path / "page.html"
    assert slm("report", str(tmp_path), "--export", str(page)).code == 0
    assert "classify.py" in page.read_text()


def test_our_trainer_and_a_users_loop_of_the_same_training_have_the_same_figures(tmp_path: Path) -> None:
    flags = {"model": "slm-1m", "seq_len": 32, "max_steps": 14, "numerics": "fp32", "max_grad_norm": 1.0}
    config = RunConfig(**flags).with_defaults(has_gpu=False)
    work = write_work(tmp_path / "work", config, num_processes=2)
    (theirs,) = compare(
        tmp_path / "theirs",
        "same_work.py",
        *("--", "--work", str(tmp_path / "work" / "work.json")),
        strategies=("ddp",),
    ).values()
    done = slm(
        *("compare", "--strategy", "ddp", "--model", "slm-1m", "--seq_len", "32", "--max_steps", "14"),
        *("--numerics", "fp32", "--max_grad_norm", "1", "--output_dir", str(tmp_path / "ours"), "--json"),
    )
    (ours,) = json.loads(done.out)
    assert theirs["losses"] == pytest.approx(ours["losses"], abs=1e-5)
    assert theirs["state_bytes_per_rank"] == ours["state_bytes_per_rank"]
    assert theirs["tokens_per_step"] == ours["tokens_per_step"] == 2 * work["batch_size"] * 32
    probed = {name: row["numerics_probed"] for name, row in (("theirs", theirs), ("ours", ours))}
    same = ("parameter_dtype", "loss_dtype", "gradient_dtype", "reduction_dtype", "optimizer_settings")
    assert {name: probed["theirs"][name] for name in same} == {name: probed["ours"][name] for name in same}
