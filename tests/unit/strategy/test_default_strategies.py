"""A command that names no strategy leaves out those that can't take its flags, and says so."""

import json

from conftest import slm_here

from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES

QLORA = ("--model", "slm-1b", "--gpu", "rtx-4090", "--num_gpus", "2", "--peft", "qlora")


def test_what_can_t_take_the_flags_is_left_out_and_named() -> None:
    done = slm_here("estimate", *QLORA, "--json")
    assert done.code == 0, done.err
    kept = [name for name in STUDIED_STRATEGIES if name != "ds_zero3"]
    assert [row["strategy"] for row in json.loads(done.out)] == kept
    assert (
        "left out: ds_zero3: --peft qlora with ZeRO-3, which cuts weights apart without their scales: use"
        " ZeRO-2, DDP or one GPU\n"
    ) in done.err


def test_what_is_named_is_refused() -> None:
    done = slm_here("estimate", *QLORA, "--strategy", "ddp", "ds_zero3")
    assert done.code == 2
    assert "--peft qlora with ZeRO-3" in done.err
