"""Accelerate YAMLs, DeepSpeed JSONs and TrainingArguments turned into one another, key by key."""

import json
import shlex
from pathlib import Path

import pytest
from conftest import DEEPSPEED, FSDP2
from conversions import converted, meaning, row, strategy_of, write

from slm_toolkit.convert.settings import FATES, flat
from slm_toolkit.strategy.strategy import Strategy, find_strategy, shipped_strategies

OWN_FORM = {"fsdp2": "accelerate_fsdp", "deepspeed": "accelerate_deepspeed"}
FORMS = ("accelerate_fsdp", "accelerate_deepspeed", "accelerate_ddp", "deepspeed_json", "training_arguments")
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


@pytest.mark.parametrize("name", shipped_strategies())
def test_a_strategy_comes_back_from_training_arguments(name: str, tmp_path: Path) -> None:
    """By the command that the conversion prints, pasted behind `--`."""
    strategy = find_strategy(name)
    there = converted(name, to="training_arguments", folder=tmp_path, gpus_per_node=2)
    own = OWN_FORM.get(strategy.engine, "accelerate_ddp")
    back = meaning(
        strategy_of(converted(*there.command, to=own, folder=tmp_path / "back"), tmp_path / "back")
    )
    wanted = meaning(strategy)
    if strategy.zero_stage == 3:  # with TrainingArguments alone transformers always builds in pieces
        assert row(there, "deepspeed_config.zero3_init_flag").fate == "no counterpart"
        assert back.accelerate_config["deepspeed_config"] == {"zero3_init_flag": True}
        back.accelerate_config["deepspeed_config"] = {"zero3_init_flag": False}
    assert back == wanted


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
    command = converted(write(tmp_path, text), to="training_arguments").command
    of_static = "--nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500"
    assert shlex.join(command).startswith(f"torchrun {of_static} train.py --fsdp")
    source = write(tmp_path, f"{text}rdzv_backend: c10d\nsame_network: false\n")
    command = converted(source, to="training_arguments", folder=tmp_path).command
    of_c10d = "--nproc_per_node 8 --nnodes 2 --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:29500"
    assert shlex.join(command).startswith(f"torchrun {of_c10d} train.py --fsdp")
    back = strategy_of(converted(*command, to="accelerate_fsdp", folder=tmp_path), tmp_path).accelerate_config
    assert (back["rdzv_backend"], back["same_network"]) == ("c10d", False)
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


def test_old_words_of_the_trainer_become_todays(tmp_path: Path) -> None:
    arguments = {
        "output_dir": "out",
        "fsdp": "shard_grad_op offload auto_wrap",
        "fsdp_config": {
            "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "xla": False,
            "offload_params": True,
        },
    }
    source = write(tmp_path, json.dumps(arguments), "mine.json")
    written = converted(source, to="training_arguments", num_processes=2)
    assert json.loads(written.files["mine_as_fsdp_config.json"]) == {
        "version": 2,
        "reshard_after_forward": False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_ram_efficient_loading": False,
        "cpu_offload": True,
        "activation_checkpointing": False,
    }
    assert (
        row(written, "fsdp_config.offload_params").fate == "ignored"
    )  # accelerate's word, not the Trainer's
    assert row(written, "output_dir").fate == "stays"
    assert written.command[-3:] == ["--fsdp", "--fsdp_config", "mine_as_fsdp_config.json"]


def test_what_fsdp_config_takes_is_a_source_of_its_own(tmp_path: Path) -> None:
    source = write(
        tmp_path, json.dumps({"reshard_after_forward": False, "activation_checkpointing": True}), "mine.json"
    )
    written = converted(source, to="accelerate_fsdp", folder=tmp_path, num_processes=2)
    fsdp = strategy_of(written, tmp_path).accelerate_config["fsdp_config"]
    assert (fsdp["fsdp_reshard_after_forward"], fsdp["fsdp_activation_checkpointing"]) == (False, True)


def test_a_pasted_command_keeps_the_scripts_own_words(tmp_path: Path) -> None:
    command = (
        "OMP_NUM_THREADS=4 CUDA_VISIBLE_DEVICES=0,1 torchrun --nnodes 2 --nproc-per-node=4 --node_rank 1 "
        "--master_addr h --master_port 29501 --max_restarts 3 -m pkg.run "
        "--model-name x --fsdp full_shard --bf16 --lr 1e-4"
    )
    written = converted(command, to="accelerate_fsdp", folder=tmp_path)
    config = strategy_of(written, tmp_path).accelerate_config
    wanted = {
        "num_processes": 8,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "h",
        "main_process_port": 29501,
        "gpu_ids": "0,1",
        "mixed_precision": "bf16",
    }
    assert {key: config[key] for key in wanted} == wanted
    assert shlex.join(written.command) == (
        f"OMP_NUM_THREADS=4 accelerate launch --config_file {tmp_path}/run_as_fsdp.yaml "
        "-m pkg.run --model-name x --bf16 True --lr 1e-4"
    )
    assert row(written, "--max_restarts").fate == "no counterpart"
