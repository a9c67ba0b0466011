"""Accelerate YAMLs and DeepSpeed JSONs turned into one another, key by key."""

import json
from pathlib import Path

import pytest
from conftest import DEEPSPEED, FSDP2
from conversions import converted, meaning, row, strategy_of, write

from slm_toolkit.convert.settings import FATES, flat
from slm_toolkit.strategy.strategy import Strategy, find_strategy, shipped_strategies

OWN_FORM = {"fsdp2": "accelerate_fsdp", "deepspeed": "accelerate_deepspeed"}
FORMS = ("accelerate_fsdp", "accelerate_deepspeed", "accelerate_ddp", "deepspeed_json")
SAME_SHARDING = {  # ours, and ours of the other engine that shards alike
    "fsdp_full_shard": "ds_zero3",
    "fsdp_shard_grad_op": "ds_zero2",
    "fsdp_full_shard_offload": "ds_zero3_offload",
    "fsdp_hybrid_shard": "ds_zeropp",
}


def there_and_back(name: str, there: str, tmp_path: Path) -> Strategy:
    own = OWN_FORM.get(find_strategy(name).engine, "accelerate_ddp")
    first = converted(name, to=there, folder=tmp_path / "there", gpus_per_node=2)
    (yaml_name,) = [file for file in first.files if file.endswith(".yaml")]
    back = converted(str(tmp_path / "there" / yaml_name), to=own, folder=tmp_path / "back")
    return strategy_of(back, tmp_path / "back")


@pytest.mark.parametrize(
    "name", [*SAME_SHARDING, *SAME_SHARDING.values(), "ds_zero2_offload", "ddp", "single"]
)
def test_a_strategy_comes_back_from_the_other_engine_as_it_was(name: str, tmp_path: Path) -> None:
    strategy = find_strategy(name)
    there = "accelerate_fsdp" if strategy.engine == "deepspeed" else "accelerate_deepspeed"
    assert meaning(there_and_back(name, there, tmp_path)) == meaning(strategy)


def test_what_fsdp_has_no_word_for_does_not_come_back(tmp_path: Path) -> None:
    assert there_and_back("ds_zero1", "accelerate_fsdp", tmp_path).zero_stage == 2
    nvme = there_and_back("ds_zero3_nvme", "accelerate_fsdp", tmp_path)
    assert nvme.deepspeed_config == find_strategy("ds_zero3_offload").deepspeed_config


@pytest.mark.parametrize(("fsdp", "zero"), SAME_SHARDING.items())
def test_shipped_strategies_that_shard_alike_become_one_another(fsdp: str, zero: str, tmp_path: Path) -> None:
    as_zero = strategy_of(converted(fsdp, to="accelerate_deepspeed", folder=tmp_path), tmp_path)
    assert meaning(as_zero) == meaning(find_strategy(zero))
    as_fsdp = strategy_of(converted(zero, to="accelerate_fsdp", folder=tmp_path, gpus_per_node=2), tmp_path)
    assert meaning(as_fsdp) == meaning(find_strategy(fsdp))


@pytest.mark.parametrize("name", shipped_strategies())
def test_every_key_of_a_shipped_strategy_is_accounted_for(name: str) -> None:
    strategy = find_strategy(name)
    keys = {".".join(path) for path, _ in flat(strategy.accelerate_config)}
    in_json = {".".join(path) for path, _ in flat(strategy.deepspeed_config or {})}
    forms = []
    for form in FORMS:
        try:
            written = converted(name, to=form, gpus_per_node=2)
        except ValueError:  # DDP shards nothing, and the others always do
            continue
        forms.append(form)
        said = {row.key: row for row in written.rows}
        assert keys <= said.keys(), form
        if not in_json <= said.keys():
            whole = said["deepspeed_config.deepspeed_config_file"]
            assert (whole.fate, whole.why) == ("carried", "the file is used unchanged, with all its keys")
        assert {row.fate for row in written.rows} <= FATES.keys()
        assert all(row.to for row in written.rows if row.fate in ("carried", "nearest", "added"))
        assert all(row.why for row in written.rows if row.fate in ("no counterpart", "nearest"))
    shards = strategy.engine not in ("single", "ddp")
    assert forms == [form for form in FORMS if form != ("accelerate_ddp" if shards else "accelerate_fsdp")]


FSDP1_CASES = [  # strategy, machines of 8 ranks in all: reshard, copies x shard
    ("FULL_SHARD", 1, True, None),
    ("2", 1, False, None),
    ("HYBRID_SHARD", 2, True, (2, 4)),
    ("HYBRID_SHARD", 1, True, None),  # one machine, one group
    ("HYBRID_SHARD_ZERO2", 4, False, (4, 2)),
]


@pytest.mark.parametrize(("name", "machines", "reshard", "sizes"), FSDP1_CASES)
def test_fsdp1_becomes_fsdp2(
    name: str, machines: int, reshard: bool, sizes: tuple[int, int] | None, tmp_path: Path
) -> None:
    text = (
        f"distributed_type: FSDP\nnum_processes: 8\nnum_machines: {machines}\nfsdp_config:\n"
        f"  fsdp_sharding_strategy: {name}\n  fsdp_backward_prefetch: BACKWARD_POST\n"
        "  fsdp_use_orig_params: true\n"
    )
    written = converted(write(tmp_path, text), to="accelerate_fsdp", folder=tmp_path)
    config = strategy_of(written, tmp_path).accelerate_config
    assert config["fsdp_config"]["fsdp_version"] == 2
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is reshard
    assert config["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"  # FSDP1's default
    groups = config.get("parallelism_config")
    assert (groups and tuple(groups.values())) == sizes
    assert row(written, "fsdp_config.fsdp_backward_prefetch").fate == "no counterpart"
    assert row(written, "fsdp_config.fsdp_use_orig_params").fate == "default"


def test_a_yaml_that_holds_deepspeeds_settings_gets_a_json(tmp_path: Path) -> None:
    text = (
        f"{DEEPSPEED}  zero_stage: 3\n  offload_optimizer_device: nvme\n"
        "  offload_optimizer_nvme_path: /disk\n"
        "  gradient_clipping: 1.0\n  zero3_init_flag: 'true'\nmixed_precision: bf16\nnum_processes: 4\n"
    )
    written = converted(write(tmp_path, text), to="accelerate_deepspeed", folder=tmp_path / "new")
    config = strategy_of(
        written, tmp_path / "new"
    ).deepspeed_config  # read_strategy refuses mixed_precision beside it
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
    }
    assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert config["gradient_clipping"] == 1.0
    assert config["train_micro_batch_size_per_gpu"] == "auto"


def test_a_json_gets_a_yaml_that_points_to_it(tmp_path: Path) -> None:
    source = write(tmp_path, json.dumps({"zero_optimization": {"stage": 3}}), "mine.json")
    written = converted(source, to="accelerate_deepspeed", folder=tmp_path, num_processes=8)
    assert list(written.files) == ["mine_as_deepspeed.yaml"]
    strategy = strategy_of(written, tmp_path)
    assert strategy.accelerate_config["deepspeed_config"] == {
        "deepspeed_config_file": source,
        "zero3_init_flag": True,  # what accelerate does where nobody says it
    }
    assert (strategy.zero_stage, strategy.num_processes) == (3, 8)


def test_a_json_with_a_section_on_checkpointing_is_still_deepspeeds(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "activation_checkpointing": {"cpu_checkpointing": True}}
    written = converted(write(tmp_path, json.dumps(config), "mine.json"), to="accelerate_fsdp")
    assert row(written, "activation_checkpointing.cpu_checkpointing").fate == "no counterpart"


def test_two_machines_keep_their_meeting_point(tmp_path: Path) -> None:
    text = (
        f"{FSDP2}num_processes: 16\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\n"
        "main_process_port: 29500\n"
    )
    source = write(tmp_path, text)
    back = strategy_of(converted(source, to="accelerate_fsdp", folder=tmp_path), tmp_path).accelerate_config
    assert (back["main_process_ip"], back["main_process_port"]) == ("10.0.0.1", 29500)
    as_zero = converted(source, to="accelerate_deepspeed", folder=tmp_path / "zero")
    section = strategy_of(as_zero, tmp_path / "zero").accelerate_config["deepspeed_config"]
    assert section["deepspeed_multinode_launcher"] == "standard"  # the default would start the others by pdsh


def test_an_hpz_of_auto_is_a_number_for_scripts_that_are_not_ours() -> None:
    written = converted("ds_zeropp", to="deepspeed_json")  # four ranks on one machine
    assert (
        json.loads(written.files["ds_zeropp_as_deepspeed.json"])["zero_optimization"][
            "zero_hpz_partition_size"
        ]
        == 4
    )
