"""Parity of runs that skipped steps, because their gradients overflowed in fp16."""

from conftest import made_record

from slm_toolkit.record.parity import judge
from slm_toolkit.record.run_record import PARITY_REFERENCE, RunRecord


def run_in(numerics: str, **changes: object) -> RunRecord:
    asked = made_record().asked
    asked["config"]["numerics"] = numerics
    return made_record(engine="single", strategy="single", world_size=1, asked=asked, **changes)


def test_only_the_steps_before_the_first_overflow_are_compared_with_fp32() -> None:
    reference = run_in("fp32", losses=[6.0, 5.9, 5.8, 5.7], grad_norms=[1.0] * 4, run_name=PARITY_REFERENCE)
    # step 3 changed no weight, so the fourth loss is that of other weights
    run = {"grad_norms": [1.0, 1.0, None, 1.0], "skipped_steps": [3]}
    _, good = judge([reference, run_in("fp16", losses=[6.0, 5.9, 5.8, 5.9], **run)])
    assert good.holds
    assert good.num_steps == 3
    _, bad = judge([reference, run_in("fp16", losses=[6.0, 5.9, 5.9, 5.9], **run)])
    assert not bad.holds
