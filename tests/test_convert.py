"""Accelerate YAMLs, DeepSpeed JSONs and TrainingArguments turned into one another, key by key."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import DEEPSPEED, FSDP2, ROOT, slm

from slm_toolkit.conversion.settings import FATES, Row, flat
from slm_toolkit.conversion.tables import tables
from slm_toolkit.conversion.written import Written
from slm_toolkit.convert import convert
from slm_toolkit.groups import fit_groups
from slm_toolkit.strategy import Strategy, find_strategy, read_strategy, shipped_strategies

OWN_FORM = {"fsdp2": "accelerate_fsdp", "deepspeed": "accelerate_deepspeed"}
FORMS = ("accelerate_fsdp", "accelerate_deepspeed", "accelerate_ddp", "deepspeed_json", "training_arguments")
SAME_SHARDING = {  # ours, and ours of the other engine that shards alike
    "fsdp_full_shard": "ds_zero3",
    "fsdp_shard_grad_op": "ds_zero2",
    "fsdp_full_shard_offload": "ds_zero3_offload",
    "fsdp_hybrid_shard": "ds_zeropp",
}


def converted(*source: str, to: str, folder: Path | None = None, **ranks: int) -> Written:
    """A conversion; with `folder` its files are written there."""
    asked = {"num_processes": None, "gpus_per_node": None, **ranks}
    written = convert(list(source), to, folder=folder, **asked)
    if folder is not None:
        folder.mkdir(exist_ok=True)
        for name, text in written.files.items():
            (folder / name).write_text(text)
    return written


def strategy_of(written: Written, folder: Path) -> Strategy:
    (name,) = [name for name in written.files if name.endswith(".yaml")]
    return read_strategy(folder / name)


def meaning(strategy: Strategy) -> Strategy:
    """The strategy without names of files, and without what only its launcher reads on one machine."""
    of_launcher = ("gpu_ids", "rdzv_backend", "same_network")
    config = {k: v for k, v in strategy.accelerate_config.items() if k not in of_launcher}
    if "deepspeed_config" in config:
        section = {k: v for k, v in config["deepspeed_config"].items() if k != "deepspeed_config_file"}
        config["deepspeed_config"] = section
    fitted = fit_groups(strategy, num_ranks=strategy.num_processes, ranks_per_node=2)
    return dataclasses.replace(
        strategy, name="", path=None, accelerate_config=config, deepspeed_config=fitted.deepspeed_config
    )


def row(written: Written, key: str) -> Row:
    (found,) = [row for row in written.rows if row.key == key]
    return found


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


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
            assert (whole.fate, whole.why) == ("carried", "the file serves as it is, with all its keys")
        assert {row.fate for row in written.rows} <= FATES.keys()
        assert all(row.to for row in written.rows if row.fate in ("carried", "nearest", "added"))
        assert all(row.why for row in written.rows if row.fate in ("no counterpart", "nearest"))
    shards = strategy.engine not in ("single", "ddp")
    assert forms == [form for form in FORMS if form != ("accelerate_ddp" if shards else "accelerate_fsdp")]


FSDP_CASES = [  # lines under fsdp_config; the key asked about; what becomes of it; where
    (
        "fsdp_offload_params: true",
        "fsdp_offload_params",
        "carried",
        "zero_optimization.offload_param.device: cpu",
    ),
    (
        "fsdp_offload_params: 'True'\n  fsdp_reshard_after_forward: false",
        *("fsdp_offload_params", "nearest", "zero_optimization.offload_optimizer.device: cpu"),
    ),
    (
        "fsdp_reshard_after_forward: false",
        "fsdp_reshard_after_forward",
        "nearest",
        "zero_optimization.stage: 2",
    ),
    ("fsdp_activation_checkpointing: true", "fsdp_activation_checkpointing", "no counterpart", ""),
    (
        "fsdp_cpu_ram_efficient_loading: true",
        "fsdp_cpu_ram_efficient_loading",
        "nearest",
        "zero3_init_flag: true",
    ),
    (
        "fsdp_cpu_ram_efficient_loading: true\n  fsdp_reshard_after_forward: false",
        *("fsdp_cpu_ram_efficient_loading", "no counterpart", ""),
    ),
    ("fsdp_state_dict_type: FULL_STATE_DICT", "fsdp_state_dict_type", "nearest", "on_model_save: true"),
    ("fsdp_min_num_params: 1000", "fsdp_min_num_params", "no counterpart", ""),
    ("fsdp_ignored_modules: lm_head", "fsdp_ignored_modules", "no counterpart", ""),
    ("fsdp_use_orig_params: true", "fsdp_use_orig_params", "ignored", ""),
    ("fsdp_offload: true", "fsdp_offload", "ignored", ""),  # misspelt: accelerate reads no such key
]


@pytest.mark.parametrize(("lines", "key", "fate", "to"), FSDP_CASES)
def test_fsdp_to_zero(lines: str, key: str, fate: str, to: str, tmp_path: Path) -> None:
    source = write(tmp_path, f"{FSDP2}  {lines}\nnum_processes: 2\n")
    found = row(converted(source, to="accelerate_deepspeed"), f"fsdp_config.{key}")
    assert found.fate == fate
    assert to in ", ".join(found.to)
    assert bool(found.to) == bool(to)


ZERO_CASES = [  # a JSON; the key asked about; what becomes of it; where
    ({"stage": 1}, "stage", "nearest", "fsdp_reshard_after_forward: false"),
    ({"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights", "no counterpart", ""),
    ({"stage": 3, "zero_quantized_weights": False}, "zero_quantized_weights", "default", ""),
    ({"stage": 3, "overlap_comm": True}, "overlap_comm", "default", ""),
    ({"stage": 3, "overlap_comm": False}, "overlap_comm", "no counterpart", ""),
    ({"stage": 3, "stage3_max_reuse_distance": 10**9}, "stage3_max_reuse_distance", "no counterpart", ""),
    ({"stage": 3, "zero_hpz_partition_size": 1}, "zero_hpz_partition_size", "default", ""),
    ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size", "default", ""),
    (
        {"stage": 3, "zero_hpz_partition_size": 4},
        "zero_hpz_partition_size",
        "nearest",
        "dp_replicate_size: 2",
    ),
    (
        {"stage": 3, "offload_param": {"device": "cpu"}},
        "offload_param.device",
        "nearest",
        "fsdp_offload_params: true",
    ),
    ({"stage": 2, "offload_optimizer": {"device": "none"}}, "offload_optimizer.device", "default", ""),
    (
        {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}},
        *("offload_optimizer.nvme_path", "no counterpart", ""),
    ),
    (
        {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        *("stage3_gather_16bit_weights_on_model_save", "carried", "fsdp_state_dict_type: SHARDED_STATE_DICT"),
    ),
]


@pytest.mark.parametrize(("zero", "key", "fate", "to"), ZERO_CASES)
def test_zero_to_fsdp(zero: dict[str, Any], key: str, fate: str, to: str, tmp_path: Path) -> None:
    source = write(tmp_path, json.dumps({"zero_optimization": zero}), "mine.json")
    found = row(converted(source, to="accelerate_fsdp", num_processes=8), f"zero_optimization.{key}")
    assert found.fate == fate
    assert to in ", ".join(found.to)
    assert bool(found.to) == bool(to)


def test_numbers_of_a_json_that_the_script_decides_are_named(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    }
    source = write(tmp_path, json.dumps(config), "mine.json")
    fsdp = converted(source, to="accelerate_fsdp", num_processes=2)
    assert yaml.safe_load(fsdp.files["mine_as_fsdp.yaml"])["mixed_precision"] == "bf16"
    fates = {
        key: row(fsdp, key).fate
        for key in ("gradient_clipping", "optimizer.params.lr", "gradient_accumulation_steps")
    }
    assert list(fates.values()) == ["no counterpart", "no counterpart", "default"]
    # with the JSON alone transformers refuses arguments that say otherwise: they are written out
    trainer = converted(source, to="training_arguments")
    said = json.loads(trainer.files["mine_as_training_arguments.json"])
    assert said == {
        "deepspeed": str(tmp_path / "mine.json"),
        "bf16": True,
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
    }


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


BAD = [
    (("ddp", "accelerate_fsdp"), "ddp shards nothing, and FSDP2 always shards"),
    (("ds_zero2", "accelerate_ddp"), "ds_zero2 shards, and DDP never does"),
    (("nowhere.json", "accelerate_fsdp"), "no such file or strategy: nowhere.json"),
    (("fsdp_hybrid_shard", "accelerate_fsdp", "--num_processes", "6"), "make 4 ranks, num_processes is 6"),
    (("ds_zeropp", "accelerate_fsdp", "--gpus_per_node", "3"), "4 ranks are no whole number of groups of 3"),
    (("--fsdp hybrid_shard", "accelerate_fsdp"), "refuses --fsdp hybrid_shard without fsdp_config.version 1"),
    (("--fsdp true", "accelerate_fsdp"), "transformers refuses --fsdp true"),
    (("--fsdp --deepspeed x.json", "accelerate_fsdp"), "fsdp and deepspeed are both asked for"),
    (("torchrun --nnodes 1:4 t.py --fsdp", "accelerate_fsdp"), "takes one number of machines"),
    (("accelerate launch t.py", "accelerate_fsdp"), "accelerate launch has its settings in a YAML"),
]


@pytest.mark.parametrize(("words", "says"), BAD)
def test_what_cannot_be_converted_is_an_error_with_a_hint(words: tuple[str, ...], says: str) -> None:
    source, form, *ranks = words
    numbers = {
        name.removeprefix("--"): int(number) for name, number in zip(ranks[::2], ranks[1::2], strict=True)
    }
    with pytest.raises(ValueError, match=says) as error:
        converted(source, to=form, **numbers)
    assert "hint:" in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "[1]", "holds no settings"),
        ("a.json", '{"model": 1}', "in no form that is known: it has model"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "stage is 7"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_confg:\n  fsdp_version: 2\n", "refuses the key fsdp_confg"),
        ("a.yaml", f"{FSDP2}  fsdp_offload_params: maybe\n", "fsdp_offload_params is 'maybe'"),
        ("a.yaml", "fsdp: true\nbf16: true\nfp16: true\n", "bf16 and fp16 are both true"),
        ("a.json", '{"fsdp": true, "fsdp_config": "gone.json"}', "fsdp_config: no such file: gone.json"),
    ],
)
def test_a_file_that_makes_no_sense_is_an_error_with_a_hint(
    name: str, text: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says) as error:
        converted(write(tmp_path, text, name), to="accelerate_deepspeed", num_processes=2)
    assert "hint:" in str(error.value)


def test_the_verb_prints_a_single_file_as_it_is_and_says_by_its_exit_code_what_is_lost() -> None:
    done = slm("convert", "fsdp_full_shard", "--to", "training_arguments")
    assert done.code == 0, done.err
    assert "==> fsdp_full_shard_as_fsdp_config.json <==" in done.out
    assert "launch: torchrun --nproc_per_node 2 train.py --fsdp --fsdp_config" in done.err
    done = slm("convert", "ds_zero2", "--to", "accelerate_fsdp")
    assert done.code == 1
    assert yaml.safe_load(done.out)["distributed_type"] == "FSDP"
    assert "no counterpart:\n  zero_optimization.reduce_bucket_size: 13107200\n" in done.err
    done = slm(
        "convert", "--to", "accelerate_ddp", "--json", "--", "python", "my-script.py", "--some-flag", "a-b"
    )
    assert json.loads(done.out)["command"][-3:] == ["my-script.py", "--some-flag", "a-b"]
    assert slm("convert", "ddp", "--to", "accelerate_fsdp").code == 2


def test_output_writes_into_a_folder_and_never_over_a_file(tmp_path: Path) -> None:
    words = ("convert", "ds_zero3", "--to", "accelerate_deepspeed", "--output", "new", "--json")
    done = slm(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    written = json.loads(done.out)
    assert written["written"] == ["new/ds_zero3_as_deepspeed.yaml"]
    assert (tmp_path / "new" / "ds_zero3_as_deepspeed.yaml").read_text() in written["files"].values()
    again = slm(*words, cwd=tmp_path)
    assert again.code == 2
    assert "new/ds_zero3_as_deepspeed.yaml exists: nothing was written" in again.err


def test_the_tables_in_the_docs_are_those_that_convert() -> None:
    text = (ROOT / "docs" / "fsdp_and_zero.md").read_text()
    for heading, table in tables().items():
        assert table in text, f"{heading}: python -m slm_toolkit.conversion.tables"


def test_the_conversion_in_the_readme_is_what_its_command_prints(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Convert\n")[2]
    command = next(line for line in section.splitlines() if line.startswith("slm convert"))
    shown = section.partition("```text\n")[2].partition("```")[0]
    done = slm(*shlex.split(command, comments=True)[1:], cwd=tmp_path)
    assert shown == done.out + done.err
    assert done.code == 1
