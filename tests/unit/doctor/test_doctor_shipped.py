"""`slm doctor` has nothing to say against the shipped files, on GPUs that each is meant for."""

import json

import pytest
from conftest import slm_here
from doctor_cases import MEANT

from slm_toolkit.strategy.strategy import shipped_strategies


def test_every_shipped_file_is_looked_at() -> None:
    assert set(MEANT) == set(shipped_strategies())


@pytest.mark.parametrize("strategy", MEANT)
def test_a_shipped_file_is_free_of_faults(strategy: str) -> None:
    meant = MEANT[strategy]
    done = slm_here(
        *("doctor", "--json", "--strict", "--strategy", strategy),
        *("--model", meant.model, "--gpu", meant.gpu, "--num_gpus", str(meant.num_gpus)),
        *("--per_device_train_batch_size", str(meant.batch)),
    )
    found = [finding for finding in json.loads(done.out) if finding["severity"] != "could be faster"]
    assert found == []
    assert done.code == 0
