"""Adapters train alike under every engine, merge, go on from checkpoints; what can't be tuned is refused."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import SPEC
from conftest import ROOT, SMALL_LLAMA, launch, record_under, run, slm, slm_here
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.names import check_adapter_base, find_model
from slm_toolkit.run.model.model import build_model


@pytest.mark.quick
def test_a_tied_head_gets_no_adapter() -> None:
    config = RunConfig(model="smollm2-135m", peft="lora", lora_target_modules="q_proj,lm_head", seq_len=8)
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="tied, so merging would change both"):
        build_model(dataclasses.replace(SPEC, tied=True), config)


@pytest.mark.quick
def test_a_peft_too_old_for_transformers_is_said_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr("slm_toolkit.run.model.adapters.MIN_PEFT_VERSION", "1000.0")
    with pytest.raises(ValueError, match=r"needs peft 1000\.0, but peft .*\n.*pip install -U peft"):
        build_model(SPEC, RunConfig(model="slm-1m", peft="lora", seq_len=8))
    done = slm_here("compare", "--model", "slm-1m", "--peft", "lora", "--dry_run")
    assert done.code == 2  # before any launch
    assert "hint: pip install -U peft" in done.err


def test_a_quantized_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = ["python", "-m", "slm_toolkit.train", "--model", "slm-1m", "--seq_len", "32", "--peft", "qlora"]
    words += ["--output_dir", str(tmp_path), "--run_name", "q", "--save_steps", "1"]
    first = run(*words, "--max_steps", "1")
    assert first.code == 0, first.err
    again = run(*words, "--max_steps", "2", "--resume_from_checkpoint", "latest")
    assert again.code == 0, again.err
    assert record_under(tmp_path)["first_step"] == 1


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights to fine-tune, as one would download them."""
    folder = tmp_path_factory.mktemp("base")
    out = ["--save_final_model", "true", "--output_dir", str(folder), "--run_name", "base"]
    done = run("python", "-m", "slm_toolkit.train", "--model", "slm-1m", "--max_steps", "2", *out)
    assert done.code == 0, done.err
    return folder / "base" / "model"


def tuned(base: Path, folder: Path, strategy: str, peft: str) -> dict[str, Any]:
    flags = ["--model", str(base), "--seq_len", "64", "--max_steps", "4", "--learning_rate", "1e-2"]
    done = launch(
        *(*flags, "--peft", peft, "--save_final_model", "merged", "--output_dir", str(folder / strategy)),
        config=ROOT / "accel_configs" / f"{strategy}.yaml",
    )
    assert done.code == 0, done.err
    return record_under(folder / strategy)


@pytest.mark.parametrize("peft", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_adapters_train_alike_under_every_engine_and_merge(base: Path, tmp_path: Path, peft: str) -> None:
    peft_package = pytest.importorskip("peft")
    if peft == "qlora":
        pytest.importorskip("bitsandbytes")
    strategies = ["ddp", "fsdp_full_shard", "ds_zero2"]
    records = {strategy: tuned(base, tmp_path, strategy, peft) for strategy in strategies}
    first = records["ddp"]
    assert first["losses"][-1] < first["losses"][0] - 0.2  # it learns
    # slm-1m: 4 layers of 128, FFN 384; rank 16 x (in + out) of q, k, v, o: 4 x 256; gate, up, down: 3 x 512
    assert first["num_trainable_params"] == 4 * 16 * (4 * 256 + 3 * 512)
    before = load_file(base / "model.safetensors")
    for strategy, record in records.items():
        assert record["losses"] == pytest.approx(first["losses"], abs=2e-3), strategy
        folder = Path(record["model_dir"])
        merged = load_file(folder / "merged" / "model.safetensors")
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted = peft_package.PeftModel.from_pretrained(loaded, folder)
        adapter = load_file(folder / "adapter_model.safetensors")
        name = "model.layers.1.self_attn.q_proj"
        a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"].float() for part in "AB")
        delta = (32 / 16) * b @ a  # lora_alpha over rank
        assert delta.abs().max() > 1e-3
        if peft == "lora":
            wanted = (before[f"{name}.weight"].float() + delta).bfloat16()
            assert torch.equal(merged[f"{name}.weight"], wanted)
        else:  # what it is added to is the base in 4 bits: 8 levels to each side
            error = merged[f"{name}.weight"].float() - before[f"{name}.weight"].float() - delta
            assert 0 < error.abs().mean() < 0.12 * before[f"{name}.weight"].float().abs().mean()
        tokens = torch.arange(3, 67)[None]
        whole = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
        if peft == "lora":
            with torch.no_grad():
                assert torch.allclose(adapted(tokens).logits, whole(tokens).logits, atol=0.05)


def test_what_cannot_be_tuned_is_refused(base: Path, tmp_path: Path) -> None:
    zero3 = ROOT / "accel_configs" / "ds_zero3.yaml"
    done = launch("--peft", "qlora", "--output_dir", str(tmp_path), config=zero3)
    assert done.code != 0
    assert "--peft qlora with ZeRO-3" in done.err
    assert "Traceback" not in done.err.partition("hint")[0]
    words = ["python", "-m", "slm_toolkit.train", "--output_dir", str(tmp_path), "--max_steps", "1"]
    done = run(*words, "--peft", "lora", "--lora_target_modules", "nothing_such", "--model", "slm-1m")
    assert (done.code, "nothing_such" in done.err) == (2, True)
    again = [
        "--run_name",
        base.parent.name,
        "--output_dir",
        str(base.parent.parent),
        "--save_final_model",
        "true",
    ]
    done = run(*words[:3], "--max_steps", "1", "--model", str(base), "--peft", "lora", *again)
    assert (done.code, "this run saves its final model there" in done.err) == (2, True)
    assert (base / "model.safetensors").is_file()
    done = run(*words, "--lora_r", "8")
    assert "error: --lora_r 8 without --peft" in done.err


def test_an_adapter_of_random_weights_is_refused_wherever_it_would_be_kept(tmp_path: Path) -> None:
    train = [
        "python",
        "-m",
        "slm_toolkit.train",
        "--peft",
        "lora",
        "--output_dir",
        str(tmp_path),
        "--max_steps",
        "1",
    ]
    done = run(*train, "--model", "smollm2-135m", "--dataset", "README.md")
    error, hint = done.err.splitlines()[-2:]
    assert (done.code, error) == (
        2,
        "error: --peft lora: the weights of preset smollm2-135m are random, and an adapter of random "
        "weights is useless",
    )
    assert hint.startswith(
        "hint: --model HuggingFaceTB/SmolLM2-135M has weights; synthetic tokens measure speed"
    )
    saved = run(*train, "--model", "slm-1m", "--save_final_model", "true")
    assert (saved.code, "hint: give --model a folder with weights or a hub id" in saved.err) == (2, True)
    compared = slm("compare", "--peft", "qlora", "--model", "slm-1m", "--dataset", "README.md", "--dry_run")
    assert (compared.code, "--peft qlora: the weights of preset slm-1m are random" in compared.err) == (
        2,
        True,
    )
    no_weights = tmp_path / "shape"
    no_weights.mkdir()
    (no_weights / "config.json").write_text(json.dumps(SMALL_LLAMA))
    config = RunConfig(model=str(no_weights), peft="lora", dataset="README.md")
    with pytest.raises(ValueError, match="shape has no weights, and an adapter"):
        check_adapter_base(config, find_model(str(no_weights)))
    assert list(tmp_path.iterdir()) == [no_weights]
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
    train = [sys.executable, "-m", "slm_toolkit.train", *words, "--output_dir", "runs"]
    train += ["--per_device_train_batch_size", "1", "--seq_len", "2050", "--tokenizer_name", "byte"]
    done = run(*train, "--model", "base", cwd=tmp_path)
    assert done.code == 0, done.err
    folder = (tmp_path / "base").resolve()
    assert f"weights: {folder}; tokenizer: bytes\n" in done.err
    assert "note: --seq_len 2050 is longer than the 2048 positions that base was trained for\n" in done.err
    record = record_under(tmp_path / "runs")
    assert (record["weights"], record["tokenizer"]) == (str(folder), "bytes")
    adapter = Path(record["model_dir"])
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    loaded = peft_package.AutoPeftModelForCausalLM.from_pretrained(adapter)  # from another working folder
    assert loaded.num_parameters() > SPEC.num_params


def test_weights_that_are_not_all_there_are_refused(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / "model.safetensors")
    save_file(
        {name: w for name, w in weights.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors"
    )
    shutil.copyfile(base / "config.json", tmp_path / "config.json")
    with pytest.raises(ValueError, match="has no weights for lm_head.weight; they would be random"):
        build_model(find_model(str(tmp_path)), RunConfig(seq_len=8))
