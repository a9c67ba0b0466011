"""A DeepSpeed JSON as a strategy: read, wrapped, checked before a launch, and trained."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from conftest import FSDP2, compare, own_strategy, slm_here

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.strategy import find_strategy, read_strategy, write_resolved

# transformers' tests/deepspeed/ds_config_zero3.json and ds_config_zero2.json, by their keys
OFFLOAD = {"device": "cpu", "pin_memory": True}
ZERO3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        **{"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD, "overlap_comm": True},
        **{"sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        **{"stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
    },
    **{"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000},
    **{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
}
WITH_NUMBERS = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 5e-5, "betas": [0.8, 0.999], "eps": 1e-6, "weight_decay": 0.1},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 500}},
}


def without_offload(content: dict) -> dict:
    """DeepSpeed then has no CPU Adam to compile."""
    content = deepcopy(content)
    for key in ("offload_optimizer", "offload_param"):
        content["zero_optimization"].pop(key, None)
    return content


def written(folder: Path, content: object, name: str = "my_zero3.json") -> str:
    (folder / name).write_text(json.dumps(content))
    return str(folder / name)


@pytest.mark.quick
def test_a_json_is_a_strategy_in_a_yaml_of_its_own(tmp_path: Path) -> None:
    strategy = find_strategy(written(tmp_path, ZERO3))
    assert (strategy.name, strategy.engine, strategy.zero_stage) == ("my_zero3", "deepspeed", 3)
    launched = write_resolved(strategy, tmp_path / "launch", 4)
    config = yaml.safe_load(launched.read_text())
    assert (config["num_processes"], config["deepspeed_config"]["zero3_init_flag"]) == (4, False)
    named = Path(config["deepspeed_config"]["deepspeed_config_file"])
    assert (named.parent, json.loads(named.read_text())) == (launched.parent, ZERO3)
    assert read_strategy(launched).zero_stage == 3


@pytest.mark.quick
@pytest.mark.parametrize(
    ("content", "says", "hint"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "no distributed_type", "it describes a model: --model"),
        ({"a": 1, "b": 2}, "no distributed_type", "slm configs"),
        ([1, 2], "contains no settings", "slm configs"),
    ],
)
def test_a_json_of_another_kind_is_named_for_what_it_is(
    content: object, says: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says) as error:
        find_strategy(written(tmp_path, content))
    assert hint in str(error.value).partition("hint: ")[2]


@pytest.mark.quick
def test_verbs_take_a_json_or_say_how_to_give_it(tmp_path: Path) -> None:
    path = written(tmp_path, ZERO3)
    refused = slm_here("launch", "--config_file", path, "-m", "slm_toolkit.train", "--model", "slm-1m")
    assert (refused.code, "as deepspeed_config_file in a YAML" in refused.err) == (2, True)
    done = slm_here("estimate", "--model", "slm-1m", "--gpu", "h100-80gb", "--json", "--strategy", path)
    (row,) = json.loads(done.out)
    assert (done.code, row["strategy"], done.err.count("is a DeepSpeed JSON")) == (0, "my_zero3", 1)


@pytest.mark.quick
def test_optimizer_and_scheduler_give_way_to_the_flags_which_are_named(tmp_path: Path) -> None:
    strategy = find_strategy(written(tmp_path, {**ZERO3, **WITH_NUMBERS}))
    assert contradictions(strategy, RunConfig().with_defaults(has_gpu=False)) == []


@pytest.mark.quick
def test_compare_refuses_all_contradictions_at_once_before_it_launches_anything(tmp_path: Path) -> None:
    zero = without_offload(ZERO3)["zero_optimization"]
    zero |= {"stage3_max_live_parameter": 1e9, "zero_hpz_partition_size": 3}
    for changes, problems in (
        (
            {"train_batch_size": 64, "zero_optimization": zero},
            [
                "stage3_max_live_parameter is not a known key of zero_optimization",
                "train_batch_size 64, batch x micro-steps x ranks says 8",
                "zero_hpz_partition_size 3 with 2 ranks",
                "slm doctor --strategy ",
            ],
        ),
        (
            {"train_micro_batch_size_per_gpu": 16},
            ["train_micro_batch_size_per_gpu 16, --per_device_train_batch_size says 4"],
        ),
    ):
        path, out = written(tmp_path, {**ZERO3, **changes}), ("--output_dir", str(tmp_path / "runs"))
        done = slm_here("compare", "--model", "slm-1m", "--strategy", path, *out)
        assert done.code == 2
        assert [problem for problem in problems if problem not in done.err] == []
        assert not (tmp_path / "runs").exists()


def test_an_accelerate_yaml_is_compared_with_a_json_of_hugging_faces(tmp_path: Path) -> None:
    path = written(tmp_path, without_offload(ZERO3))
    text = f"{FSDP2}  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\nnum_processes: 2\n"
    mine, short = own_strategy(tmp_path, text, name="my_fsdp"), ("--seq_len", "32", "--max_steps", "4")
    done = compare("--strategy", mine, path, *short, folder=tmp_path / "runs")
    assert done.finished.code == 0, done.finished.err
    assert {name: row["status"] for name, row in done.rows.items()} == {"my_fsdp": "ok", "my_zero3": "ok"}
    assert "is a DeepSpeed JSON" in done.finished.err
    assert "removed from my_zero3.json: optimizer" in done.finished.err
    row = done.rows["my_zero3"]
    assert (row["parity_reference"], row["parity_holds"]) == ("my_fsdp", True)
