"""Other trainers' runs beside ours: which flags they follow, and how records name and judge them."""

import argparse
import dataclasses

import pytest
from conftest import made_record

from slm_toolkit.cli.compare import fill
from slm_toolkit.compare.grid import PlannedRun, plan_runs
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.record.parity import judge
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.rivals.rivals import RIVALS, matching_runs
from slm_toolkit.strategy.strategy import find_strategy


def planned(
    *strategies: str, keys: tuple[str, ...] = ("trainer", "litgpt"), **given: object
) -> list[PlannedRun]:
    is_rehearsal = "rehearse" in given
    return plan_runs(
        {"model": "slm-1m", **given},
        [find_strategy(name) for name in strategies],
        num_processes=None,
        machine=Machine(0, None),
        repeats=1 if is_rehearsal else 2,
        runs_beside=lambda runs: matching_runs(runs, keys),
    )


def test_the_flag_knows_the_same_trainers_as_the_room() -> None:
    parser = argparse.ArgumentParser()
    fill(parser)
    (flag,) = (action for action in parser._actions if action.dest == "ours_against")
    assert list(flag.choices) == list(RIVALS)


def test_rows_of_other_trainers_have_their_name_and_run_in_every_round() -> None:
    runs = planned("ddp", "fsdp_full_shard")
    round_of_names = ["ddp", "fsdp_full_shard", "Hugging Face Trainer, ddp", "LitGPT, ddp"]
    assert [run.name for run in runs] == round_of_names * 2
    assert len({run.folder for run in runs}) == 8
    assert len({run.identity for run in runs}) == 4


def test_without_a_strategy_that_they_know_they_run_under_ddp() -> None:
    assert [run.name for run in planned("ds_zero2", "fsdp_full_shard", keys=("trainer",))][2:3] == [
        "Hugging Face Trainer, ddp"
    ]
    assert planned("single", keys=("trainer",))[1].name == "Hugging Face Trainer, single"


def test_they_do_the_work_of_our_run_and_nothing_more() -> None:
    ours, theirs = planned(
        "ddp", keys=("trainer",), norm_kernel="fused", learning_rate=1e-3, gradient_accumulation_steps=3
    )[:2]
    assert (theirs.config.learning_rate, theirs.config.gradient_accumulation_steps) == (1e-3, 3)
    # aligned clips at 1 by default, stock does not; the others compute as stock does
    assert (ours.config.numerics, ours.config.norm_kernel) == ("aligned", "fused")
    assert (theirs.config.numerics, theirs.config.norm_kernel, theirs.config.max_grad_norm) == (
        "stock",
        "hf",
        1,
    )
    assert planned("ddp", keys=("trainer",), numerics="fp32")[1].config.numerics == "fp32"
    assert planned("ddp", keys=("trainer",), numerics="stock")[1].config.max_grad_norm == 0


@pytest.mark.parametrize(
    "given",
    [
        {"peft": "lora"},
        {"numerics": "fp16"},
        {"eval_steps": 5},
        {"save_steps": 5},
        {"numerics": "pure_bf16"},
        {"optim": "muon"},
        {"gradient_checkpointing": "selective_op"},
        {"rehearse": 2},
    ],
)
def test_flags_that_they_can_not_follow_are_refused(given: dict) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"--ours_against with --{name}"):
        planned("ddp", **given)


def test_an_unknown_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match="--ours_against axolotl: no such trainer"):
        planned("ddp", keys=("axolotl",))


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    absent = dataclasses.replace(RIVALS["litgpt"], packages=("no-such-package",))
    assert absent.missing == (
        "LitGPT needs no-such-package, which is not installed: pip install --no-deps litgpt lightning "
        "lightning-utilities torchmetrics pytorch-lightning jsonargparse"
    )
    assert RIVALS["trainer"].missing is None


def other(name: str, losses: list[float]) -> RunRecord:
    record = made_record(strategy=f"{name}, ddp", losses=losses, grad_norms=[], identity=name)
    return dataclasses.replace(record, asked={**record.asked, "trainer": name})


def test_other_trainers_never_outvote_ours() -> None:
    ours = made_record(losses=[10.0] * 33)
    equal, first, second = other("a", [10.0] * 33), other("b", [9.0] * 33), other("c", [9.0] * 33)
    parities = judge([first, second, equal, ours])
    assert [parity and parity.holds for parity in parities] == [False, False, True, None]
    assert {parity.reference for parity in parities[:3]} == {"ddp"}


def test_closed_forms_are_of_our_trainer_alone() -> None:
    assert estimate_of(made_record()) is not None
    assert estimate_of(other("trainer", [10.0] * 33)) is None
