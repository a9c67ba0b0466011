"""`slm convert` as a command: what is refused, printed, written, and shown in the docs."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import FSDP2, slm_here
from conversions import converted, write

BAD = [
    (("ddp", "accelerate_fsdp"), "ddp shards nothing, but FSDP2 always shards"),
    (("ds_zero2", "accelerate_ddp"), "ds_zero2 shards, but DDP never does"),
    (("nowhere.json", "accelerate_fsdp"), "no such file or strategy: nowhere.json"),
    (("fsdp_hybrid_shard", "accelerate_fsdp", "--num_processes", "6"), "need 4 ranks, num_processes is 6"),
    (("ds_zeropp", "accelerate_fsdp", "--gpus_per_node", "3"), "4 ranks can't be divided into groups of 3"),
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
        ("a.json", "[1]", "contains no settings"),
        ("a.json", '{"model": 1}', r"has no distributed_type \(model\)"),
        ("a.yaml", "fsdp: true\nbf16: true\n", "contains TrainingArguments, not an accelerate YAML"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "stage is 7"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_confg:\n  fsdp_version: 2\n", "refuses the key fsdp_confg"),
        ("a.yaml", f"{FSDP2}  fsdp_offload_params: maybe\n", "fsdp_offload_params is 'maybe'"),
    ],
)
def test_a_file_that_makes_no_sense_is_an_error_with_a_hint(
    name: str, text: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says) as error:
        converted(write(tmp_path, text, name), to="accelerate_deepspeed", num_processes=2)
    assert "hint:" in str(error.value)


def test_the_verb_prints_a_single_file_as_it_is_and_says_by_its_exit_code_what_is_lost() -> None:
    done = slm_here("convert", "fsdp_full_shard", "--to", "deepspeed_json")
    assert json.loads(done.out)["zero_optimization"]["stage"] == 3
    name = "fsdp_full_shard_as_deepspeed.json"
    assert f"launch: torchrun --nproc_per_node 2 train.py --deepspeed {name}" in done.err
    done = slm_here("convert", "ds_zero2", "--to", "accelerate_fsdp")
    assert done.code == 1
    assert yaml.safe_load(done.out)["distributed_type"] == "FSDP"
    assert "no counterpart:\n  zero_optimization.reduce_bucket_size: 13107200\n" in done.err
    assert slm_here("convert", "ddp", "--to", "accelerate_fsdp").code == 2


def test_output_writes_into_a_folder_and_never_over_a_file(tmp_path: Path) -> None:
    words = ("convert", "ds_zero3", "--to", "accelerate_deepspeed", "--output", "new", "--json")
    done = slm_here(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    written = json.loads(done.out)
    assert written["written"] == ["new/ds_zero3_as_deepspeed.yaml"]
    assert (tmp_path / "new" / "ds_zero3_as_deepspeed.yaml").read_text() in written["files"].values()
    again = slm_here(*words, cwd=tmp_path)
    assert again.code == 2
    assert "new/ds_zero3_as_deepspeed.yaml exists: nothing was written" in again.err


def test_commands_and_training_arguments_are_answered_with_what_to_use() -> None:
    done = slm_here("convert", "--to", "accelerate_fsdp", "--", "torchrun", "train.py", "--fsdp")
    assert done.code == 2
    assert "commands are not converted: Trainer's --deepspeed takes a JSON" in done.err
    done = slm_here("convert", "ds_zero3", "--to", "training_arguments")
    assert done.code == 2
    assert "Trainer's --deepspeed takes the file of --to deepspeed_json" in done.err
