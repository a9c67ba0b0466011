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
    slm_here,
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


# a fault that is put into the two ranks of a comparison
FAULTS = [
    pytest.param("no reduction", ("ddp", "--numerics", "aligned", "--parity", "20"), marks=pytest.mark.quick),
    ("other seed", ("fsdp_full_shard", "--numerics", "fp32", "--parity", "5")),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_a_fault_of_a_rank_is_caught(fault: str, words: tuple[str, ...], tmp_path: Path) -> None:
    env = {**planted(tmp_path, FAULTY), "TEST_FAULT": fault}
    words = ("--json", "--model", "slm-1m", "--output_dir", str(tmp_path / "runs"), "--strategy", *words)
    done = slm("compare", *words, env=env)
    (row,) = json.loads(done.out)
    found = (done.code, row["status"], row["parity_holds"], row["rank"])
    assert found == (1, "ok", False, None)
    if fault == "no reduction":  # the probe sees it too
        assert row["numerics_probed"]["reduction_dtype"] is None


@pytest.mark.slow
def test_an_accumulation_of_the_json_that_is_not_the_scripts_is_caught_and_named(tmp_path: Path) -> None:
    """No fault put in: `stock` does what accelerate does, which is to follow DeepSpeed's JSON."""
    zero2 = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    twice = own_strategy(tmp_path, "", {**zero2, "gradient_accumulation_steps": 2}, name="twice")
    strategies = ("--strategy", "ddp", twice)
    done = compare(*strategies, "--numerics", "stock", "--parity", "5", folder=tmp_path / "runs")
    row = done.rows["twice"]
    assert (done.finished.code, row["status"], row["parity_holds"]) == (1, "ok", False)
    assert "accumulation 2 (not 1)" in row["numerics_differences"]
    assert "tokens per step 2048 (not 1024)" in row["numerics_differences"]
    table = slm_here("report", str(tmp_path / "runs"))
    assert table.code == 1
    assert "computes something else, against single-process fp32 over 5 steps" in table.out


def alike(reference: RunRecord, record: RunRecord) -> Parity:
    """Two runs in aligned numerics."""
    return compare_with(reference, record, limits=ALIKE["aligned"])


GRADIENTS = {"q": 1.0, "k": 2.0}
# what a run differs in from another one in aligned numerics, whether that is within the limits
DIFFERENCES = [
    ({"losses": [10.0] * 20 + [10.5] * 13}, True),  # later steps add up rounding
    ({"losses": [None] * 33}, False),
    # the norm: 1 / 1.025 = 0.9756, so that 0.977 is within and 0.974 is not
    ({"grad_norms": [1.0, 1.024, 1.0]}, True),
    ({"grad_norms": [1.0, 1.026, 1.0]}, False),
    ({"grad_norms": [1.0, 0.977, 1.0]}, True),
    ({"grad_norms": [1.0, 0.974, 1.0]}, False),
    ({"grad_norms": [None, 1.0]}, False),
    ({"grad_norms": [0.0] * 33}, False),
    ({"grad_norms": [None] * 33}, True),  # an engine without norms is judged by its losses
    ({"grad_norms": [1.0] * 20 + [2.0] * 13}, True),
    # a parameter's gradient in step 1: five thousandths
    *(
        ({"parameter_grad_norms": {**GRADIENTS, "k": k}}, holds)
        for k, holds in ((2.008, True), (2.012, False))
    ),
    ({"parameter_grad_norms": {**GRADIENTS, "k": None}}, False),
    ({"parameter_grad_norms": {"q": 1.0}}, False),
    ({"parameter_grad_norms": {}}, True),  # an older record
]


@pytest.mark.quick
@pytest.mark.parametrize(("changes", "holds"), DIFFERENCES)
def test_a_difference_is_held_against_its_limit(changes: dict, holds: bool) -> None:
    parity = alike(
        made_record(parameter_grad_norms=GRADIENTS),
        made_record(**{"parameter_grad_norms": GRADIENTS, **changes}),
    )
    assert parity.holds is holds


@pytest.mark.quick
def test_a_difference_is_found_at_the_step_where_it_is() -> None:
    losses = [10.0] * 33
    losses[6] += 0.02  # aligned allows 0.001 x sqrt(7 / 5) = 0.00118
    parity = alike(made_record(), made_record(losses=losses))
    assert (parity.holds, parity.worst_step, parity.num_steps) == (False, 7, 20)
    assert parity.loss_difference == pytest.approx(0.02)
    assert parity.loss_tolerance == pytest.approx(0.00118, rel=1e-2)
    # of a reference that was asked for all steps count; at step 33 0.001 x sqrt(33 / 5) = 0.00257 is allowed
    asked_for = made_record(run_name="parity-reference-made")
    for last, holds in ((10.0025, True), (10.0026, False)):
        parity = alike(asked_for, made_record(losses=[10.0] * 32 + [last]))
        assert (parity.holds, parity.num_steps) == (holds, 33)


def test_a_loss_that_is_not_a_number_leaves_json_valid(tmp_path: Path) -> None:
    broken = made_record(identity="1", strategy="ds_zero2", engine="deepspeed", losses=[None] * 33)
    for name, record in (("a", made_record()), ("b", broken)):
        write_record(record, tmp_path / name)
    done = slm_here("report", str(tmp_path), "--json")
    assert done.code == 1
    _, row = json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (row["parity_holds"], row["parity_max_loss_difference"]) == (False, None)


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


@pytest.mark.quick
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
    parity = judge([*references(control_loss=10.02), in_task()])[2]  # a fault of the numerics themselves
    assert not parity.holds
    assert str(parity).startswith("one process in aligned itself differs, against single-process fp32")
    assert judge(references()) == [None, None]  # they are no rows


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
    drifted = {"step": 33, "num_compared": 39, "num_different": 1, "different": ["up"]}
    for records in (
        [made_record(weights_of_ranks=[drifted])],
        [*references(), in_task(weights_of_ranks=[drifted])],
    ):
        parity = judge(records)[-1]
        assert not parity.holds
        assert str(parity) == "ranks have different weights after step 33: 1 of 39 tensors, such as up"


def test_the_reference_sees_the_same_batches_over_the_end_of_an_epoch(texts: Path, tmp_path: Path) -> None:
    """29 sequences of 64 are 7 batches of 4: two ranks do 3 each, without the 7th; so must one process."""
    small = tmp_path / "small.txt"
    small.write_text((texts / "licence.txt").read_text()[: 64 * 29])
    words = ("--strategy", "ddp", "--numerics", "fp32", "--dataset", str(small), "--seq_len", "64")
    done = compare(*words, "--parity", "8", folder=tmp_path / "runs")
    assert done.finished.code == 0, done.finished.err
    assert done.rows["ddp"]["parity_max_loss_difference"] <= 1e-5


def test_a_reference_that_failed_is_said_and_is_no_success(tmp_path: Path) -> None:
    reason = "CUDA error at [/tmp/a]"  # brackets are no markup
    failed = made_record(run_name="parity-reference-made", identity="1", status="oom", reason=reason)
    for name, record in (("a", made_record()), ("b", failed)):
        write_record(record, tmp_path / name)
    table, as_json = (slm_here("report", str(tmp_path), *words) for words in ((), ("--json",)))
    assert (table.code, as_json.code) == (1, 1)
    assert f"no parity check: the single-process aligned reference ended oom: {reason}" in table.out
    assert "no parity check" in as_json.err


def runs(*losses: float, ddp: bool = False, **changes: object) -> list[RunRecord]:
    """Runs of a, b, c, ... on the same batches, the first under DDP or none; each has one loss throughout."""
    made = {"engine": "deepspeed", "zero_stage": 3, "numerics": {"batch_hashes": ["1f", "2e"]}, **changes}
    found = [
        made_record(identity=name, strategy=name, losses=[loss] * 33, **made)
        for name, loss in zip("abcd", losses, strict=False)
    ]
    return [dataclasses.replace(found[0], engine="ddp"), *found[1:]] if ddp else found


def script(name: str, loss: float) -> RunRecord:
    record = made_record(strategy=name, losses=[loss] * 33, grad_norms=[], identity=name)
    return dataclasses.replace(record, asked={**record.asked, "script": [name]})


def asked_otherwise(**flags: object) -> list[RunRecord]:
    first, second = runs(9.0, 10.0)
    asked = {**second.asked, "config": {**second.asked["config"], **flags}}
    return [first, dataclasses.replace(second, asked=asked)]


# runs without a reference of --parity, whether each one's parity holds (None: it is the reference, or alone)
AMONG_EACH_OTHER = {
    "DDP is the reference": (runs(10.0, 10.0008, ddp=True), [None, True]),  # aligned allows 0.001
    "of two that differ both are red": (runs(10.1, 10.0, ddp=True), [False, False]),
    "of three a faulty DDP is red": (runs(10.1, 10.0, 10.0008, ddp=True), [False, None, True]),
    "without DDP the first is the reference": (runs(10.0, 10.0008), [None, True]),
    "of three the one that differs": (runs(9.0, 10.0, 10.0), [False, None, True]),
    "two against two": (runs(9.0, 9.0, 10.0, 10.0), [False] * 4),
    "scripts never outvote our trainer": (
        [script("a", 9.0), script("b", 9.0), script("c", 10.0), made_record(losses=[10.0] * 33)],
        [False, False, True, None],
    ),
    "other numerics": (asked_otherwise(numerics="fp32"), [None, None]),
    "another seed": (asked_otherwise(seed=1), [None, None]),
    "another batch": (asked_otherwise(per_device_train_batch_size=8), [None, None]),
    "another model": (asked_otherwise(model="x"), [None, None]),
    "repeats": ([*runs(9.0), *runs(9.5)], [None, None]),
    "no gradient norms in the first": (
        [dataclasses.replace(runs(10.0)[0], grad_norms=[None] * 33), runs(10.0, 10.0)[1]],
        [None, True],
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", AMONG_EACH_OTHER)
def test_without_a_reference_the_majority_decides(name: str) -> None:
    records, expected = AMONG_EACH_OTHER[name]
    judged = judge(records)
    assert [parity and parity.holds for parity in judged] == expected
    if None not in expected:
        assert "compute different things, against " in str(judged[0])


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


CAUSES = [
    ({"weights_fingerprint": "a"}, {"weights_fingerprint": "b"}, "the weights before step 1 differ"),
    (
        {"numerics": {"batch_hashes": ["1", "2"]}},
        {"numerics": {"batch_hashes": ["1", "3"]}, "weights_fingerprint": "a"},
        "batch hashes 1 3 (not 1 2)",
    ),
    ({"numerics": {"clipping": 0.0}}, {"numerics": {"clipping": 1.0}}, "clipping 1 (not 0)"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("of_ddp", "of_zero", "cause"), CAUSES)
def test_the_cause_of_other_losses_is_named(of_ddp: dict, of_zero: dict, cause: str) -> None:
    ddp, zero = runs(10.0, 10.049, ddp=True)
    zero = dataclasses.replace(zero, **of_zero)
    (_, parity) = judge([dataclasses.replace(ddp, **of_ddp), zero])
    assert (parity.holds, parity.cause) == (False, cause)
    assert str(parity).endswith(f"Cause: {cause}")
    (_, parity) = judge([dataclasses.replace(ddp, **of_ddp), dataclasses.replace(zero, losses=[10.0] * 33)])
    assert (parity.holds, parity.cause) == (True, None)
