"""Adapters train alike under every engine and go on from checkpoints; what can't be tuned is refused."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import SPEC
from conftest import ROOT, SMALL_LLAMA, launch, record_under, run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.names import check_adapter_base, find_model
from slm_toolkit.run.model.model import build_model

TRAIN = (sys.executable, "-m", "slm_toolkit.train")


@pytest.mark.quick
def test_a_tied_head_gets_no_adapter() -> None:
    config = RunConfig(model="smollm2-135m", peft="lora", lora_target_modules="q_proj,lm_head", seq_len=8)
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="embedding and head are tied"):
        build_model(dataclasses.replace(SPEC, tied=True), config)


def test_a_quantized_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = [*TRAIN, "--model", "slm-1m", "--seq_len", "32", "--peft", "qlora", "--save_steps", "1"]
    words += ["--output_dir", str(tmp_path), "--run_name", "q"]
    for more in (("--max_steps", "1"), ("--max_steps", "2", "--resume_from_checkpoint", "latest")):
        done = run(*words, *more)
        assert done.code == 0, done.err
    assert record_under(tmp_path)["first_step"] == 1


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights to fine-tune, as one would download them."""
    folder = tmp_path_factory.mktemp("base")
    out = ["--save_final_model", "true", "--output_dir", str(folder), "--run_name", "base"]
    done = run(*TRAIN, "--model", "slm-1m", "--max_steps", "2", *out)
    assert done.code == 0, done.err
    return folder / "base" / "model"


def tuned(base: Path, folder: Path, strategy: str, peft: str) -> dict[str, Any]:
    flags = ["--model", str(base), "--seq_len", "64", "--max_steps", "4", "--learning_rate", "1e-2"]
    flags += ["--peft", peft, "--save_final_model", "true", "--output_dir", str(folder / strategy)]
    done = launch(*flags, config=ROOT / "accel_configs" / f"{strategy}.yaml")
    assert done.code == 0, done.err
    return record_under(folder / strategy)


@pytest.mark.parametrize("peft", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_adapters_train_alike_under_every_engine_and_merge(base: Path, tmp_path: Path, peft: str) -> None:
    peft_package = pytest.importorskip("peft")
    if peft == "qlora":
        pytest.importorskip("bitsandbytes")
    records = {name: tuned(base, tmp_path, name, peft) for name in ("ddp", "fsdp_full_shard", "ds_zero2")}
    first, name = records["ddp"], "model.layers.1.self_attn.q_proj"
    assert first["losses"][-1] < first["losses"][0] - 0.2  # it learns
    # slm-1m: 4 layers of 128, FFN 384; rank 16 x (in + out) of q, k, v, o: 4 x 256; gate, up, down: 3 x 512
    assert first["num_trainable_params"] == 4 * 16 * (4 * 256 + 3 * 512)
    before = load_file(base / "model.safetensors")[f"{name}.weight"].float()
    for strategy, record in records.items():
        assert record["losses"] == pytest.approx(first["losses"], abs=2e-3), strategy
        folder = Path(record["model_dir"])
        adapter = load_file(folder / "adapter_model.safetensors")
        a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"].float() for part in "AB")
        delta = (32 / 16) * b @ a  # lora_alpha over rank
        assert delta.abs().max() > 1e-3
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged = peft_package.PeftModel.from_pretrained(loaded, folder).merge_and_unload()
        torch.testing.assert_close(merged.get_parameter(f"{name}.weight").data, before + delta)


def test_what_cannot_be_tuned_is_refused(base: Path, tmp_path: Path) -> None:
    zero3 = ROOT / "accel_configs" / "ds_zero3.yaml"
    done = launch("--peft", "qlora", "--output_dir", str(tmp_path), config=zero3)
    assert (done.code != 0, "--peft qlora: ZeRO-3" in done.err) == (True, True)
    of_base = ["--run_name", base.parent.name, "--save_final_model", "true"]
    for flags, says in (
        ("--output_dir {out} --peft lora --lora_target_modules nothing_such --model slm-1m", "nothing_such"),
        (
            f"--output_dir {base.parent.parent} --model {base} --peft lora {' '.join(of_base)}",
            "saves its fin",
        ),
        ("--output_dir {out} --lora_r 8", "error: --lora_r 8 without --peft"),
        ("--output_dir {out} --peft lora --model smollm2-135m --dataset README.md", "135m are random"),
        (
            "--output_dir {out} --peft lora --model slm-1m --save_final_model true",
            "--model a folder with wei",
        ),
    ):
        done = run(*TRAIN, "--max_steps", "1", *flags.format(out=tmp_path / "out").split())
        assert (done.code, says in done.err) == (2, True), done.err
    assert (base / "model.safetensors").is_file()
    assert not (tmp_path / "out").exists()
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    config = RunConfig(model=str(tmp_path), peft="lora", dataset="README.md")
    with pytest.raises(ValueError, match="has no weights, and an adapter"):
        check_adapter_base(config, find_model(str(tmp_path)))
    # what only measures goes on
    for measures in (
        RunConfig(peft="lora", save_final_model="false"),
        RunConfig(peft="lora", dataset="README.md", rehearse=8),
        RunConfig(dataset="README.md"),
    ):
        check_adapter_base(measures, SPEC)


def test_a_run_names_its_weights_and_tokenizer_and_an_adapter_its_base(base: Path, tmp_path: Path) -> None:
    peft_package = pytest.importorskip("peft")
    shutil.copytree(base, tmp_path / "base")
    words = ("--peft", "lora", "--dataset", str(ROOT / "README.md"), "--max_steps", "1")
    words += ("--output_dir", "runs", "--per_device_train_batch_size", "1", "--seq_len", "2050")
    done = run(*TRAIN, *words, "--tokenizer_name", "byte", "--model", "base", cwd=tmp_path)
    assert done.code == 0, done.err
    folder = (tmp_path / "base").resolve()
    assert f"weights: {folder}; tokenizer: bytes\n" in done.err
    assert "note: --seq_len 2050 is longer than the 2048 positions that base was trained for\n" in done.err
    record = record_under(tmp_path / "runs")
    assert (record["weights"], record["tokenizer"]) == (str(folder), "bytes")
    adapter = Path(record["model_dir"])
    loaded = peft_package.AutoPeftModelForCausalLM.from_pretrained(adapter)  # from another working folder
    assert loaded.num_parameters() > SPEC.num_params


def test_weights_that_are_not_all_there_are_refused(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copyfile(base / "config.json", tmp_path / "config.json")
    with pytest.raises(ValueError, match="has no weights for lm_head.weight; they would be random"):
        build_model(find_model(str(tmp_path)), RunConfig(seq_len=8))
