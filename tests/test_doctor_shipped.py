"""`slm doctor` has nothing to say against the shipped files, on GPUs that each is meant for."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import slm

from slm_toolkit.strategy import shipped_strategies


@dataclass(frozen=True)
class Meant:
    """What a strategy is for: a model that needs it, where its communication can hide."""

    model: str
    gpu: str
    num_gpus: int
    batch: int


# The training state of 2.2B parameters is 35 GB: whole it does not fit with room on 40 GB; that of 3B is 48
# GB, and halves of it do not fit on 24.
_LARGE = Meant("slm-2b-hw", "a100-40gb", 8, 8)
_TWO_NODES = Meant("slm-2b-hw", "a100-40gb", 16, 8)
_SMALL_CARDS = Meant("slm-3b", "l4", 2, 4)
MEANT = {
    "single": Meant("slm-1b-hw", "h100-80gb", 1, 8),
    "ddp": Meant("slm-1b-hw", "h100-80gb", 8, 8),
    **dict.fromkeys(("fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3"), _LARGE),
    **dict.fromkeys(("fsdp_hybrid_shard", "ds_zeropp"), _TWO_NODES),
    **dict.fromkeys(("fsdp_full_shard_offload", "ds_zero2_offload", "ds_zero3_offload"), _SMALL_CARDS),
    "ds_zero3_nvme": _SMALL_CARDS,
}


def test_every_shipped_file_is_looked_at() -> None:
    assert set(MEANT) == set(shipped_strategies())


@pytest.mark.parametrize("strategy", MEANT)
def test_a_shipped_file_is_free_of_faults(strategy: str) -> None:
    meant = MEANT[strategy]
    done = slm(
        *("doctor", "--json", "--strict", "--strategy", strategy, "--loss_kernel", "fused_linear"),
        *("--model", meant.model, "--gpu", meant.gpu, "--num_gpus", str(meant.num_gpus)),
        *("--per_device_train_batch_size", str(meant.batch)),
    )
    found = [finding for finding in json.loads(done.out) if finding["severity"] != "could be faster"]
    assert found == []
    assert done.code == 0


def test_files_for_several_machines_are_free_of_faults(tmp_path: Path) -> None:
    assert slm("configs", "--copy", ".", "--num_machines", "2", cwd=tmp_path).code == 0
    own = [f"accel_configs/{name}.yaml" for name in MEANT if name != "single"]
    asked = ("--model", "slm-2b-hw", "--gpu", "a100-40gb", "--num_gpus", "16", "--strategy", *own)
    found = json.loads(slm("doctor", "--json", *asked, cwd=tmp_path).out)
    closed_forms = ("alignment", "memory", "network", "strategy", "kernels")
    assert [f for f in found if f["topic"] not in closed_forms and f["severity"] != "could be faster"] == []
