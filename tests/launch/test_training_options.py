"""Options that every engine must serve alike: accumulation, compile, tied embeddings, fp32 RoPE."""

import json
from pathlib import Path

import pytest
from conftest import TIED, compare, launch, record_under
from transformers import AutoModelForCausalLM

from slm_toolkit.record.files import find_records
from slm_toolkit.strategy.strategy import copy_configs


def test_accumulated_steps_stay_whole_over_the_end_of_an_epoch(tmp_path: Path, texts: Path) -> None:
    """7 batches an epoch, 2 to a step: step 4 takes the 7th and the next epoch's first."""
    small = tmp_path / "small.txt"
    small.write_text(
        (texts / "licence.txt").read_text()[: 64 * 29]
    )  # 29 sequences of 64: 7 whole batches of 4
    script = tmp_path / "count_updates.py"
    script.write_text(
        "from accelerate import Accelerator\nfrom slm_toolkit import train\n"
        "calls = []\nbackward, step = Accelerator.backward, train.optimizer_step\n"
        "Accelerator.backward = lambda *a, **k: (calls.append('b'), backward(*a, **k))[1]\n"
        "train.optimizer_step = lambda *a, **k: (calls.append('s'), step(*a, **k))[1]\n"
        "train.main()\nprint('CALLS', ''.join(calls))\n"
    )
    done = launch(
        *("--model", "slm-1m", "--dataset", str(small), "--seq_len", "64", "--max_steps", "8"),
        *("--gradient_accumulation_steps", "2", "--output_dir", str(tmp_path / "r")),
        config="accel_configs/single.yaml",
        script=script,
    )
    assert done.code == 0, done.err
    assert f"CALLS {'bbs' * 8}\n" in done.out


def test_a_budget_of_tokens_takes_the_same_steps_and_losses_under_each_engine(tmp_path: Path) -> None:
    """A step is 2 ranks x 3 micro-steps x 4 sequences of 32 tokens: 6,000 tokens take 8 steps of 768."""
    asked = ("--max_tokens", "6K", "--seq_len", "32", "--gradient_accumulation_steps", "3")
    done = compare("--strategy", "ddp", "ds_zero2", *asked, "--numerics", "fp32", folder=tmp_path)
    assert done.finished.code == 0, done.finished.err
    ddp, zero = (record for _, record in find_records([tmp_path])[0])
    assert len(ddp.losses) == len(zero.losses) == 8
    assert {ddp.config.max_tokens, zero.config.max_tokens} == {"6K"}
    assert ddp.losses == pytest.approx(zero.losses, abs=5e-6)


@pytest.mark.slow
def test_a_compiled_model_trains_and_is_saved_under_its_own_names(tmp_path: Path, texts: Path) -> None:
    flags = ("--model", "slm-1m", "--dataset", str(texts / "licence.txt"), "--seq_len", "32")
    flags += ("--max_steps", "3", "--kernels", "compile", "--output_dir", str(tmp_path))
    done = launch(*flags, config="accel_configs/ddp.yaml")
    assert done.code == 0, done.err
    folder = record_under(tmp_path)["model_dir"]
    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--kernels compile", "--gradient_checkpointing"])
def test_every_engine_trains_alike_with_an_option(option: str, tmp_path: Path) -> None:
    done = compare(*option.split(), "--max_steps", "6", "--seq_len", "32", folder=tmp_path)
    assert done.finished.code == 0, done.finished.err
    # exit code 0 says too that the losses agree with DDP's
    assert {row["status"] for row in done.rows.values()} == {"ok"}


@pytest.mark.slow
def test_tied_embeddings_train_and_reload_under_sharding(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "tied").mkdir()
    (tmp_path / "tied" / "config.json").write_text(json.dumps(TIED))
    flags = (
        "--model",
        str(tmp_path / "tied"),
        "--strategy",
        "fsdp_full_shard",
        "ds_zero3",
        "--seq_len",
        "32",
    )
    flags += ("--dataset", str(texts / "licence.txt"), "--max_steps", "5", "--save_final_model")
    done = compare(*flags, folder=tmp_path / "runs")
    assert done.finished.code == 0, done.finished.err
    for row in done.rows.values():
        folder = json.loads(Path(row["record"]).read_text())["model_dir"]
        model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not loading["missing_keys"]
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_deepspeed_yaml_is_launched_from_another_folder(tmp_path: Path) -> None:
    copy_configs(tmp_path / "mine")
    (tmp_path / "elsewhere").mkdir()
    done = launch(
        *("--model", "slm-1m", "--max_steps", "2", "--output_dir", str(tmp_path / "runs")),
        config=tmp_path / "mine" / "accel_configs" / "ds_zero2.yaml",
        cwd=tmp_path / "elsewhere",
    )
    assert done.code == 0, done.err
    assert record_under(tmp_path / "runs")["zero_stage"] == 2
