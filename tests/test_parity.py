"""The loss check sees ranks that don't synchronise."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import Comparison, launch

from slm_toolkit.compare.parity import compare_losses
from slm_toolkit.record import RunRecord, find_records, read_record

UNSYNCHRONISED = """
import torch
from slm_toolkit import train

def keep_local_gradients(state, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done

prepare = train.Accelerator.prepare
def prepare_without_reduction(self, *objects):
    prepared = prepare(self, *objects)
    prepared[0].register_comm_hook(None, keep_local_gradients)
    return prepared
train.Accelerator.prepare = prepare_without_reduction
train.main()
"""


@pytest.mark.parametrize("numerics", ["aligned", "fp32"])
def test_two_copies_that_exchange_no_gradients_fail_the_check(
    numerics: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    comparison: Comparison = request.getfixturevalue(numerics)
    script = tmp_path / "unsynchronised.py"
    script.write_text(UNSYNCHRONISED)
    steps = () if numerics == "aligned" else ("--max_steps", "20")
    arguments = ("--model", "slm-1m", "--numerics", numerics, *steps, "--output_dir", str(tmp_path / "runs"))
    done = launch(*arguments, config="accel_configs/ddp.yaml", script=script)
    assert done.code == 0, done.err
    (broken,) = [record for _, record in find_records([tmp_path / "runs"])[0]]
    reference = read_record(Path(comparison.rows["ddp"]["record"]))
    assert broken.losses[0] == pytest.approx(reference.losses[0], rel=1e-5)  # same weights, same batches
    agreement = compare_losses(reference, broken)
    assert not agreement.agrees, agreement


def test_a_difference_is_found_at_the_step_where_it_is(aligned: Comparison) -> None:
    record = read_record(Path(aligned.rows["ddp"]["record"]))
    shifted = list(record.losses)
    shifted[6] *= 1.004  # above bf16's 0.003
    agreement = compare_losses(record, dataclasses.replace(record, losses=shifted))
    assert (agreement.agrees, agreement.worst_step) == (False, 7)
    assert agreement.largest_relative_difference == pytest.approx(0.004)


def test_a_loss_that_is_not_a_number_never_agrees(aligned: Comparison) -> None:
    record = read_record(Path(aligned.rows["ddp"]["record"]))
    assert not compare_losses(record, dataclasses.replace(record, losses=[None, *record.losses[1:]])).agrees


def test_compare_exits_1_and_names_the_row_that_broke_parity(aligned: Comparison, tmp_path: Path) -> None:
    from conftest import slm

    for row in aligned.rows.values():
        content = json.loads(Path(row["record"]).read_text())
        if row["strategy"] == "ds_zero2":
            content["losses"] = [loss * 1.01 for loss in content["losses"]]
        folder = tmp_path / row["strategy"]
        folder.mkdir()
        (folder / "record.json").write_text(json.dumps(content))
    done = slm("report", str(tmp_path))
    assert done.code == 1
    assert "losses of ds_zero2 differ from ddp's by 1." in done.out


def test_fields_of_a_record_survive_the_file(aligned: Comparison) -> None:
    path = Path(aligned.rows["ddp"]["record"])
    assert dataclasses.asdict(read_record(path)) == json.loads(path.read_text())
    assert isinstance(read_record(path), RunRecord)
