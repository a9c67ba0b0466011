"""`slm doctor` has nothing to say against the shipped files, on GPUs that each is meant for."""

import json
from pathlib import Path

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
        *("doctor", "--json", "--strict", "--strategy", strategy, "--loss_kernel", "fused_linear"),
        *("--model", meant.model, "--gpu", meant.gpu, "--num_gpus", str(meant.num_gpus)),
        *("--per_device_train_batch_size", str(meant.batch)),
    )
    found = [finding for finding in json.loads(done.out) if finding["severity"] != "could be faster"]
    assert found == []
    assert done.code == 0


def test_files_for_several_machines_are_free_of_faults(tmp_path: Path) -> None:
    assert slm_here("configs", "--copy", ".", "--num_machines", "2", cwd=tmp_path).code == 0
    own = [f"accel_configs/{name}.yaml" for name in MEANT if name != "single"]
    asked = ("--model", "slm-2b-hw", "--gpu", "a100-40gb", "--num_gpus", "16", "--strategy", *own)
    found = json.loads(slm_here("doctor", "--json", *asked, cwd=tmp_path).out)
    closed_forms = ("alignment", "memory", "network", "strategy", "kernels")
    assert [f for f in found if f["topic"] not in closed_forms and f["severity"] != "could be faster"] == []
