"""The parity gate: six strategies pass it, each way of breaking one is caught red."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from conftest import (
    ROOT,
    WHEN_LOADED,
    Comparison,
    compare,
    launch,
    made_record,
    own_strategy,
    planted,
    record_under,
    slm,
)
from safetensors.torch import load_file

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.record.files import read_record, write_record
from slm_toolkit.record.numerics import ALIKE
from slm_toolkit.record.parity import Parity, compare_with, judge
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.run.checkpoint.checkpoint import fingerprint
from slm_toolkit.run.model.model import build_model
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES

# Runs in every process of a launch, before anything is imported; strikes where there are two ranks.
FAULTY = (
    WHEN_LOADED
    + """
import os
if os.environ.get("WORLD_SIZE") == "2":
    def keep_local_gradients(module):
        import torch

        def keep(state, bucket):
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        module.set_reduction = lambda model, config: model.register_comm_hook(None, keep)

    def other_seed_on_rank_1(module):
        import dataclasses
        check = module.RunConfig.with_defaults

        def with_other_seed(self, **machine):
            config = check(self, **machine)
            return dataclasses.replace(config, seed=config.seed + int(os.environ["RANK"]))

        module.RunConfig.with_defaults = with_other_seed

    when_loaded(*{
        "no reduction": ("slm_toolkit.run.setup", keep_local_gradients),
        "other seed": ("slm_toolkit.config.run_config", other_seed_on_rank_1),
    }[os.environ["TEST_FAULT"]])
"""
)


def broken_comparison(fault: str, folder: Path, *arguments: str) -> tuple[int, dict, str]:
    """Exit code, row and stderr of `slm compare --parity` with one fault put into its two ranks."""
    env = {**planted(folder, FAULTY), "TEST_FAULT": fault}
    words = ("--json", "--model", "slm-1m", "--parity", "20", "--output_dir", str(folder / "runs"))
    finished = slm("compare", *words, *arguments, env=env)
    (row,) = json.loads(finished.out)
    return finished.code, row, finished.err


@pytest.mark.parametrize(
    ("numerics", "allowed"), [pytest.param("aligned", 1e-2, marks=pytest.mark.quick), ("fp32", 1e-5)]
)
def test_all_six_strategies_compute_what_one_fp32_process_does(
    numerics: str, allowed: float, request: pytest.FixtureRequest
) -> None:
    comparison: Comparison = request.getfixturevalue(numerics)
    assert comparison.finished.code == 0, comparison.finished.err
    assert list(comparison.rows) == list(STUDIED_STRATEGIES)
    for row in comparison.rows.values():
        assert row["parity_reference"] == "single-process fp32"
        assert row["parity_holds"] is True
        assert row["parity_max_loss_difference"] <= allowed
        assert len(row["losses"]) == 20
        norms = {"aligned": 0.05, "fp32": 1e-3}[numerics]
        assert row["parity_grad_norm_ratio"] == pytest.approx(1, abs=norms)


@pytest.mark.parametrize(
    "numerics",
    [
        pytest.param("aligned", marks=pytest.mark.quick),
        pytest.param("fp32", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_exchange_no_gradients_are_caught(numerics: str, tmp_path: Path) -> None:
    code, row, _ = broken_comparison("no reduction", tmp_path, "--strategy", "ddp", "--numerics", numerics)
    assert (code, row["status"], row["parity_holds"]) == (1, "ok", False)
    assert row["parity_max_loss_difference"] > {"aligned": 1e-2, "fp32": 1e-5}[numerics]
    assert row["numerics_probed"]["reduction_dtype"] is None  # the probe sees it too
    assert row["rank"] is None


def test_another_seed_on_one_rank_is_caught(tmp_path: Path) -> None:
    arguments = ("--strategy", "fsdp_full_shard", "--numerics", "fp32", "--parity", "5")
    code, row, _ = broken_comparison("other seed", tmp_path, *arguments)
    assert (code, row["parity_holds"]) == (1, False)


@pytest.mark.slow
def test_an_accumulation_of_the_json_that_is_not_the_scripts_is_caught_and_named(tmp_path: Path) -> None:
    """No fault put in: `stock` does what accelerate does, which is to follow DeepSpeed's JSON."""
    shipped = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    (tmp_path / "twice.json").write_text(json.dumps({**shipped, "gradient_accumulation_steps": 2}))
    config = yaml.safe_load((ROOT / "accel_configs" / "ds_zero2.yaml").read_text())
    config["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "twice.json")
    (tmp_path / "twice.yaml").write_text(yaml.safe_dump(config))
    strategies = ("--strategy", "ddp", str(tmp_path / "twice.yaml"))
    done = compare(*strategies, "--numerics", "stock", "--parity", "5", folder=tmp_path / "runs")
    row = done.rows["twice"]
    assert (done.finished.code, row["status"], row["parity_holds"]) == (1, "ok", False)
    assert "accumulation 2 (not 1)" in row["numerics_differences"]
    assert "tokens per step 2048 (not 1024)" in row["numerics_differences"]
    record = json.loads(Path(row["record"]).read_text())
    assert record["tokens_per_step"] == 2 * 2 * 4 * 128  # micro-steps x ranks x batch x sequence
    table = slm("report", str(tmp_path / "runs"))
    assert table.code == 1
    assert "computes something else, against single-process fp32 over 5 steps" in table.out
    assert "unequal" in table.out


@pytest.mark.quick
def test_a_difference_is_found_at_the_step_where_it_is() -> None:
    reference = made_record()
    losses = [10.0] * 33
    losses[6] += 0.02  # aligned allows 0.001 x sqrt(7 / 5) = 0.00118
    parity = alike(reference, dataclasses.replace(reference, losses=losses))
    assert (parity.holds, parity.worst_step, parity.num_steps) == (False, 7, 20)
    assert parity.loss_difference == pytest.approx(0.02)
    assert parity.loss_tolerance == pytest.approx(0.00118, rel=1e-2)
    assert parity.grad_norm_ratio == 1


def alike(reference: RunRecord, record: RunRecord) -> Parity:
    """Two runs in aligned numerics."""
    return compare_with(reference, record, limits=ALIKE["aligned"])


@pytest.mark.quick
@pytest.mark.parametrize(("norm", "holds"), [(1.024, True), (1.026, False), (0.977, True), (0.974, False)])
def test_a_gradient_norm_may_differ_by_a_fortieth_in_bf16(norm: float, holds: bool) -> None:
    # 1 / 1.025 = 0.9756: 0.977 is within, 0.974 is not
    parity = alike(made_record(), made_record(grad_norms=[1.0, norm, 1.0]))
    assert (parity.grad_norm_ratio, parity.holds) == (norm, holds)


@pytest.mark.quick
def test_a_parameters_gradient_is_compared_in_step_1() -> None:
    reference = made_record(parameter_grad_norms={"q": 1.0, "k": 2.0})
    for norms, ratio, holds in (
        ({"q": 1.0, "k": 2.008}, 1.004, True),  # aligned allows five thousandths
        ({"q": 1.0, "k": 2.012}, 1.006, False),
        ({"q": 1.0, "k": None}, float("inf"), False),
        ({"q": 1.0}, float("inf"), False),
    ):
        parity = alike(reference, made_record(parameter_grad_norms=norms))
        assert (parity.parameter, parity.parameter_ratio, parity.holds) == (
            "k",
            pytest.approx(ratio, rel=1e-4),
            holds,
        )
    assert alike(reference, made_record()).parameter is None  # an older record


def test_a_loss_that_is_not_a_number_never_agrees_and_json_stays_valid(tmp_path: Path) -> None:
    broken = made_record(identity="1", strategy="ds_zero2", engine="deepspeed", losses=[None] * 33)
    assert not alike(made_record(), broken).holds
    for name, record in (("a", made_record()), ("b", broken)):
        write_record(record, tmp_path / name)
    done = slm("report", str(tmp_path), "--json")
    assert done.code == 1
    _, row = json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (row["parity_holds"], row["parity_max_loss_difference"]) == (False, None)


@pytest.mark.quick
@pytest.mark.parametrize("norms", [[None, 1.0], [0.0] * 33, [1.0, None, 1.0]])
def test_a_gradient_norm_that_is_none_or_nothing_never_agrees(norms: list) -> None:
    assert not alike(made_record(), made_record(grad_norms=norms)).holds


@pytest.mark.quick
def test_an_engine_that_tells_no_gradient_norms_is_judged_by_its_losses() -> None:
    parity = alike(made_record(), made_record(grad_norms=[None] * 33))
    assert (parity.grad_norm_ratio, parity.holds) == (None, True)


@pytest.mark.quick
def test_what_training_does_with_rounding_later_is_not_counted() -> None:
    drifted = [10.0] * 20 + [10.5] * 13
    assert alike(made_record(), made_record(losses=drifted)).holds
    norms = [1.0] * 20 + [2.0] * 13
    assert alike(made_record(), made_record(grad_norms=norms)).holds
    # of a reference that was asked for all steps count; at step 33 0.001 x sqrt(33 / 5) = 0.00257 is allowed
    asked_for = made_record(run_name="parity-reference-made")
    for last, holds in ((10.0025, True), (10.0026, False)):
        parity = alike(asked_for, made_record(losses=[10.0] * 32 + [last]))
        assert (parity.holds, parity.num_steps) == (holds, 33)


def references(*, control_loss: float = 10.0, **changes: object) -> list[RunRecord]:
    """One process in fp32 and one in aligned numerics, on the batches of `made_record`."""
    config = {**made_record().asked["config"], "parity": 33, "gradient_accumulation_steps": 2}
    single = {"engine": "single", "strategy": "single", "world_size": 1, "run_name": "parity-reference-made"}
    made = []
    for name, loss in (("fp32", 10.0), ("aligned", control_loss)):
        asked = {"config": {**config, "numerics": name}, "num_processes": 1, "files": {}}
        made.append(
            made_record(**{**single, "identity": name, "asked": asked, "losses": [loss] * 33, **changes})
        )
    return made


def in_task(**changes: object) -> RunRecord:
    """A row of `slm compare --parity`."""
    made = made_record()
    asked = {**made.asked, "config": {**made.asked["config"], "parity": 33}}
    return dataclasses.replace(made, asked=asked, **changes)


def test_a_row_is_held_against_fp32_and_against_one_process_of_its_numerics() -> None:
    # against fp32 0.007 is allowed in the first five steps, against one process of the same numerics 0.003
    for control, loss, against in (
        (10.0, 10.002, None),
        (10.0, 10.004, "one process in aligned"),
        (10.004, 10.006, None),
        (10.006, 10.008, "single-process fp32"),
        (10.02, 10.02, "single-process fp32"),
    ):
        parity = judge([*references(control_loss=control), in_task(losses=[loss] * 33)])[2]
        assert (parity.holds, parity.reference) == (against is None, against or "single-process fp32")
    fp32, control = references()
    assert judge([fp32, control]) == [None, None]  # they are no rows


@pytest.mark.quick
def test_a_fault_of_the_numerics_themselves_is_red_however_alike_all_rows_are() -> None:
    parity = judge([*references(control_loss=10.02), in_task(losses=[10.0] * 33)])[2]
    assert not parity.holds
    assert str(parity).startswith("one process in aligned itself differs, against single-process fp32")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("losses_of_row", "dataset", "holds"),
    [
        ([6.5340, 5.7348, 5.2311, 4.8275, 4.6008], "chat.jsonl", True),  # as one process in the same numerics
        ([6.5340, 5.7348, 5.2311, 4.8275, 4.6008], "synthetic", False),
        ([6.5340, 5.7348, 5.2345, 4.8275, 4.6008], "chat.jsonl", False),  # 0.0034 from it; 0.003 is allowed
        ([6.5430, 5.7348, 5.2311, 4.8275, 4.6008], "chat.jsonl", False),  # step 1 has no update before it
    ],
)
def test_on_own_text_rounding_may_change_what_updates_change(
    losses_of_row: list[float], dataset: str, holds: bool
) -> None:
    """Losses of slm-1m on packed chats: in fp32, and of one process in aligned numerics."""
    fp32, control = references()
    records = [
        dataclasses.replace(
            record,
            losses=losses,
            asked={**record.asked, "config": {**record.asked["config"], "dataset": dataset}},
        )
        for record, losses in (
            (fp32, [6.5350, 5.7122, 5.2074, 4.8257, 4.5815]),
            (control, [6.5340, 5.7348, 5.2311, 4.8275, 4.6008]),
            (in_task(), losses_of_row),
        )
    ]
    assert judge(records)[2].holds is holds


@pytest.mark.quick
@pytest.mark.parametrize(
    ("weights", "norm", "holds"), [("random", 1.02, False), ("/a", 1.02, True), ("/a", 1.03, False)]
)
def test_norms_of_own_weights_may_differ_more_from_one_process(
    weights: str, norm: float, holds: bool
) -> None:
    """As those of new adapters: 0.5 % between clean runs, the limit for the weights of the task."""
    row = in_task(weights=weights, grad_norms=[1.0, norm, 1.0])
    fp32, control = references(weights=weights)
    parity = judge([dataclasses.replace(fp32, grad_norms=[1.0, norm, 1.0]), control, row])[2]
    assert parity.holds is holds


@pytest.mark.quick
@pytest.mark.parametrize(
    ("steps", "holds"),
    [({}, True), ({"losses": [10.0, 10.00002]}, False), ({"grad_norms": [1.0, 1.001]}, False)],
)
def test_the_fp32_steps_are_held_against_fp32(steps: dict, holds: bool) -> None:
    done = {"losses": [10.0, 10.0], "grad_norms": [1.0, 1.0], "parameter_grad_norms": {}, "numerics": None}
    row = in_task(fp32_pass={"status": "ok", "reason": None, "weights_of_ranks": [], **done, **steps})
    parity = judge([*references(), row])[2]
    assert parity.holds is holds
    if not holds:
        assert "over 2 steps in fp32: |Δloss|" in str(parity)


@pytest.mark.quick
def test_ranks_with_different_weights_are_red_alone_and_among_others() -> None:
    drifted = {"step": 33, "num_compared": 39, "num_different": 1, "different": ["model.layers.1.up"]}
    for records in (
        [made_record(weights_of_ranks=[drifted])],
        [*references(), in_task(weights_of_ranks=[drifted])],
    ):
        parity = judge(records)[-1]
        assert not parity.holds
        assert (
            str(parity)
            == "ranks have different weights after step 33: 1 of 39 tensors, such as model.layers.1.up"
        )


def test_the_reference_sees_the_same_batches_over_the_end_of_an_epoch(texts: Path, tmp_path: Path) -> None:
    """29 sequences of 64 are 7 batches of 4: two ranks do 3 each, without the 7th; so must one process."""
    small = tmp_path / "small.txt"
    small.write_text((texts / "licence.txt").read_text()[: 64 * 29])
    words = ("--strategy", "ddp", "--numerics", "fp32", "--dataset", str(small), "--seq_len", "64")
    done = compare(*words, "--parity", "8", folder=tmp_path / "runs")
    assert done.finished.code == 0, done.finished.err
    assert done.rows["ddp"]["parity_max_loss_difference"] <= 1e-5


def test_two_ways_to_say_how_long_are_refused(tmp_path: Path) -> None:
    done = slm("compare", "--parity", "20", "--max_steps", "5", "--output_dir", str(tmp_path))
    assert done.code == 2
    assert "--max_steps with --parity" in done.err


def test_a_reference_that_failed_is_said_and_is_no_success(tmp_path: Path) -> None:
    reason = "CUDA error at [/tmp/a]"  # brackets are no markup
    failed = made_record(run_name="parity-reference-made", identity="1", status="oom", reason=reason)
    for name, record in (("a", made_record()), ("b", failed)):
        write_record(record, tmp_path / name)
    table = slm("report", str(tmp_path))
    assert table.code == 1
    assert f"no parity check: the single-process aligned reference ended oom: {reason}" in table.out
    as_json = slm("report", str(tmp_path), "--json")
    assert as_json.code == 1
    assert "no parity check" in as_json.err


@pytest.mark.quick
def test_without_an_fp32_reference_rows_are_held_against_ddps() -> None:
    ddp = made_record()
    zero = made_record(identity="1", strategy="ds_zero2", engine="deepspeed", losses=[10.0008] * 33)
    of_ddp, of_zero = judge([ddp, zero])
    assert of_ddp is None
    assert (of_zero.reference, of_zero.holds) == ("ddp", True)
    assert of_zero.loss_difference == pytest.approx(0.0008)


@pytest.mark.quick
def test_of_three_rows_a_faulty_ddp_is_the_red_one_and_of_two_both_are() -> None:
    ddp = made_record(losses=[10.1] * 33)
    zero, fsdp = own_strategies(10.0, 10.0008, numerics=None)
    of_ddp, of_zero, of_fsdp = judge([ddp, zero, fsdp])
    assert (of_ddp.holds, of_ddp.reference, of_zero, of_fsdp.holds) == (False, "a", None, True)
    assert [parity.holds for parity in judge([ddp, zero])] == [False, False]


def own_strategies(*losses: float, **changes: object) -> list[RunRecord]:
    """Runs of a, b, c, ... on the same batches, none of which is DDP; each has one loss at all steps."""
    made = {"engine": "deepspeed", "zero_stage": 3, "numerics": {"batch_hashes": ["1f", "2e"]}, **changes}
    return [
        made_record(identity=name, strategy=name, losses=[loss] * 33, **made)
        for name, loss in zip("abcd", losses, strict=False)
    ]


def test_two_own_strategies_that_differ_are_both_red_without_ddp(tmp_path: Path) -> None:
    records = own_strategies(6.0344, 5.9028)
    for record in records:
        write_record(record, tmp_path / record.strategy)
    table = slm("report", str(tmp_path))
    assert table.code == 1
    assert table.out.count("a and b compute different things: step-1 loss 6.0344 and 5.9028") == 1
    rows = json.loads(slm("report", str(tmp_path), "--json").out)
    assert [(row["parity_holds"], row["rank"], row["parity_reference"]) for row in rows] == [
        (False, None, "b"),
        (False, None, "a"),
    ]


@pytest.mark.quick
def test_users_scripts_never_outvote_our_trainer() -> None:
    def script(name: str, loss: float) -> RunRecord:
        record = made_record(strategy=name, losses=[loss] * 33, grad_norms=[], identity=name)
        return dataclasses.replace(record, asked={**record.asked, "script": [name]})

    parities = judge([script("a", 9.0), script("b", 9.0), script("c", 10.0), made_record(losses=[10.0] * 33)])
    assert [parity and parity.holds for parity in parities] == [False, False, True, None]


@pytest.mark.quick
def test_the_first_step_beyond_the_tolerance_is_named_not_the_worst() -> None:
    first, second = own_strategies(10.0, 10.0)
    second = dataclasses.replace(second, losses=[10.0, 10.02] + [10.5] * 31)
    assert "step-2 loss 10.0000 and 10.0200" in str(judge([first, second])[1])


@pytest.mark.quick
def test_own_strategies_that_agree_are_held_against_the_first() -> None:
    of_a, of_b = judge(own_strategies(10.0, 10.0008))  # aligned allows 0.001
    assert of_a is None
    assert (of_b.reference, of_b.holds) == ("a", True)


@pytest.mark.quick
def test_of_three_own_strategies_the_one_that_differs_is_red() -> None:
    of_a, of_b, of_c = judge(own_strategies(9.0, 10.0, 10.0))
    assert (of_a.holds, of_a.reference, of_b, of_c.holds) == (False, "b", None, True)
    assert [parity.holds for parity in judge(own_strategies(9.0, 9.0, 10.0, 10.0))] == [False] * 4


@pytest.mark.quick
def test_runs_that_were_asked_otherwise_are_not_compared_with_each_other() -> None:
    first, second = own_strategies(9.0, 10.0)
    for flags in ({"numerics": "fp32"}, {"seed": 1}, {"per_device_train_batch_size": 8}, {"model": "x"}):
        asked = {**second.asked, "config": {**second.asked["config"], **flags}}
        assert judge([first, dataclasses.replace(second, asked=asked)]) == [None, None]
    for other in ({"batch_hashes": ["1f", "77"]}, {"batch_hashes": None}, None):
        assert judge([first, dataclasses.replace(second, numerics=other)]) == [None, None]
    repeats = [first, dataclasses.replace(first, losses=[9.5] * 33)]
    assert judge(repeats) == [None, None]


@pytest.mark.quick
def test_an_engine_without_gradient_norms_may_be_the_first_of_two() -> None:
    first, second = own_strategies(10.0, 10.0)
    assert judge([dataclasses.replace(first, grad_norms=[None] * 33), second])[1].holds


@pytest.mark.quick
def test_a_run_with_other_batches_is_no_reference() -> None:
    config = {**made_record().asked["config"], "numerics": "fp32", "gradient_accumulation_steps": 2}
    single = {"engine": "single", "strategy": "single", "identity": "1", "world_size": 1}
    asked = {"config": config, "num_processes": 1, "files": {}}
    assert judge([made_record(), made_record(asked=asked, **single)])[0].reference == "single-process fp32"
    for other in ({"seed": 1}, {"gradient_accumulation_steps": 3}, {"max_steps": 7}, {"max_grad_norm": 0}):
        changed = {**asked, "config": {**config, **other}}
        assert judge([made_record(), made_record(asked=changed, **single)])[0] is None


@pytest.mark.quick
def test_fields_of_a_record_survive_the_file(aligned: Comparison) -> None:
    path = Path(aligned.rows["ddp"]["record"])
    assert dataclasses.asdict(read_record(path)) == json.loads(path.read_text())


def test_weights_are_drawn_alike_under_zero3_init_flag(tmp_path: Path) -> None:
    """accelerate's default under ZeRO-3; whole weights, after a step that is too small for any of them."""
    config = yaml.safe_load((ROOT / "accel_configs" / "ds_zero3.yaml").read_text())
    config["deepspeed_config"] |= {"zero3_init_flag": True}
    mine = own_strategy(tmp_path, yaml.safe_dump(config))
    flags = ["--model", "slm-1m", "--seq_len", "32", "--max_steps", "1"]
    still = ["--learning_rate", "1e-30", "--weight_decay", "0", "--save_final_model", "true"]
    done = launch(*flags, *still, "--output_dir", str(tmp_path), config=mine)
    assert done.code == 0, done.err
    record = record_under(tmp_path)
    expected = build_model(PRESETS["slm-1m"], RunConfig(model="slm-1m", seq_len=32, numerics="aligned"))
    assert record["weights_fingerprint"] == fingerprint(expected.named_parameters())
    saved = load_file(Path(record["model_dir"]) / "model.safetensors")
    for name, param in expected.named_parameters():
        assert torch.equal(saved[name].bfloat16(), param), name


_ZERO_3 = {"strategy": "my_ds", "engine": "deepspeed", "zero_stage": 3, "losses": [10.049] * 33}


@pytest.mark.parametrize(
    ("of_ddp", "of_zero", "cause"),
    [
        ({"weights_fingerprint": "a"}, {"weights_fingerprint": "b"}, "the weights before step 1 differ"),
        (
            {"numerics": {"batch_hashes": ["1", "2"]}},
            {"numerics": {"batch_hashes": ["1", "3"]}, "weights_fingerprint": "a"},
            "the batches of step 1 differ",
        ),
        ({"numerics": {"clipping": 0.0}}, {"numerics": {"clipping": 1.0}}, "clipping 1 (not 0)"),
    ],
)
def test_the_cause_of_other_losses_is_named(of_ddp: dict, of_zero: dict, cause: str, tmp_path: Path) -> None:
    section = {"deepspeed_config": {"zero3_init_flag": False}}
    asked = {**made_record().asked, "accelerate_config": section}
    zero = made_record(identity="1", asked=asked, **_ZERO_3, **of_zero)
    (_, parity) = judge([made_record(**of_ddp), zero])
    assert (parity.holds, parity.cause) == (False, cause)
    for name, record in (("a", made_record(**of_ddp)), ("b", zero)):
        write_record(record, tmp_path / name)
    assert f"Cause: {cause}" in slm("report", str(tmp_path), "--json").out


@pytest.mark.quick
def test_losses_that_agree_have_no_cause() -> None:
    agrees = {**_ZERO_3, "losses": [10.0] * 33, "weights_fingerprint": "b"}
    (_, parity) = judge([made_record(weights_fingerprint="a"), made_record(identity="1", **agrees)])
    assert (parity.holds, parity.cause) == (True, None)
