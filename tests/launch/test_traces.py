"""Traced memory of real steps, drawn from the shipped traces, is still what they say."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, bench, record_under, run, slm

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.memory.peak import peak
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import find_strategy

TOLERANCE = 0.02
"of an estimate, as a fraction of what a trace of the real engine found"


def traced(configuration: dict[str, Any]) -> dict[str, Any]:
    """A row of the traces, rehearsed now."""
    done = run(sys.executable, str(ROOT / "tests" / "trace_one.py"), json.dumps(configuration), warm=True)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.parametrize(
    ("table", "asked"),
    [
        pytest.param("adapters", {"strategy": "ddp", "peft": "lora"}, marks=pytest.mark.quick),
        pytest.param(
            *("adapters", {"strategy": "fsdp_shard_grad_op", "peft": "lora"}), marks=pytest.mark.slow
        ),
        (
            "small_zero",
            {"strategy": "ds_zero2", "model": "tied-mha-1m", "gradient_accumulation_steps": "2"},
        ),
        (
            "small_zero",
            {"strategy": "ds_zero1", "model": "qwen-tied-3m", "gradient_accumulation_steps": "2"},
        ),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_a_sample_of_the_traces_is_traced_again(table: str, asked: dict[str, str]) -> None:
    accuracy = bench("memory_accuracy")
    with (accuracy.FOLDER / f"{table}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if {**row, **asked} == row]
    row = min(rows, key=lambda row: int(row["peak_bytes"]))
    configuration = {name: value for name, value in row.items() if name not in accuracy._NOT_FLAGS[2:]}
    configuration["num_gpus"] = int(configuration["num_gpus"])
    assert traced(configuration)["peak_bytes"] == int(row["peak_bytes"])


def test_the_triton_kernel_of_adamw_needs_no_copies_of_gradients() -> None:
    """With a small batch the peak is else at the optimizer's step, of gradients cast to fp32."""
    flags = {"model": "slm-10m", "seq_len": 64, "per_device_train_batch_size": 1, "kernels": "loss+triton"}
    found = traced({"strategy": "ddp", "num_gpus": 2, **flags})
    assert (found["status"], found["peak_phase"]) == ("ok", "backward"), found["reason"]
    config = RunConfig(**flags).with_defaults(has_gpu=True)
    setup = Setup(find_model("slm-10m"), find_strategy("ddp"), config, num_gpus=2)
    assert peak(setup).peak_bytes == pytest.approx(found["peak_bytes"], rel=TOLERANCE)


def _of_wide_layers(folder: Path) -> dict[str, Any]:
    """Flags for 16 tokens of a model whose layers have 34 million parameters."""
    shape = {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8},
        **{"num_key_value_heads": 8, "vocab_size": 256, "tie_word_embeddings": False, "hidden_act": "silu"},
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return {"model": str(folder), "seq_len": 16, "per_device_train_batch_size": 1}


@pytest.mark.parametrize(
    ("strategy", "num_gpus"),
    [
        *(("fsdp_full_shard", 2), ("ds_zero2", 8), ("ds_zero3", 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("ddp", 2), ("ds_zero1", 2), ("single", 1))
        ),
    ],
)
def test_the_step_of_muon_peaks_as_estimated(strategy: str, num_gpus: int, tmp_path: Path) -> None:
    """With layers so wide and so few tokens, most peaks are in Newton-Schulz's products."""
    flags = {**_of_wide_layers(tmp_path), "optim": "muon"}
    found = traced({"strategy": strategy, "num_gpus": num_gpus, **flags})
    assert found["status"] == "ok", found["reason"]
    is_in_backward = strategy in ("ds_zero2", "fsdp_full_shard")
    assert found["peak_phase"] == ("backward" if is_in_backward else "optimizer")
    config = RunConfig(**flags).with_defaults(has_gpu=True)
    setup = Setup(find_model(config.model), find_strategy(strategy), config, num_gpus=num_gpus)
    assert peak(setup).peak_bytes == pytest.approx(found["peak_bytes"], rel=TOLERANCE)


@pytest.mark.parametrize("triton", [False, True])
def test_the_peak_under_loss_chunks_is_that_of_a_trace(triton: bool, tmp_path: Path) -> None:
    """Of a model whose vocabulary is so large that the loss is the peak."""
    shape = {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "vocab_size": 32_000, "tie_word_embeddings": False},
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    flags = {"model": str(tmp_path), "seq_len": 1024, "per_device_train_batch_size": 16}
    flags |= {"kernels": "loss+triton" if triton else "loss"}
    found = traced({"strategy": "ddp", "num_gpus": 2, **flags})
    assert found["status"] == "ok", found["reason"]
    config = RunConfig(**flags).with_defaults(has_gpu=True)
    setup = Setup(find_model(config.model), find_strategy("ddp"), config, num_gpus=2)
    assert peak(setup).peak_bytes == pytest.approx(found["peak_bytes"], rel=TOLERANCE)


@pytest.mark.parametrize("flags", [{"peft": "none"}, {"peft": "lora"}, {"gradient_checkpointing": "full"}])
def test_heads_that_flash_attention_pads_on_a_gpu(flags: dict[str, str], tmp_path: Path) -> None:
    shape = {
        **{"hidden_size": 312, "intermediate_size": 832, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"num_key_value_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False},  # heads of 78: to 80
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    flags |= {"model": str(tmp_path), "kernels": "loss", "seq_len": 1024}
    found = traced({"strategy": "ddp", "num_gpus": 2, **flags})
    assert found["status"] == "ok", found["reason"]
    config = RunConfig(**flags).with_defaults(has_gpu=True)
    setup = Setup(find_model(config.model), find_strategy("ddp"), config, num_gpus=2)
    assert peak(setup).peak_bytes == pytest.approx(found["peak_bytes"], rel=TOLERANCE)


def test_a_real_step_with_four_bit_weights_peaks_as_estimated(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    flags = {"model": "slm-10m", "peft": "qlora", "kernels": "loss", "seq_len": 128}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = slm(
        *("train", "--num_processes", "1", "--strategy", "single", *words, "--max_steps", "2"),
        *("--profile", "memory", "--output_dir", str(tmp_path), "--run_name", "q"),
    )
    assert done.code == 0, done.err
    record = record_under(tmp_path)
    (state,) = record["state_bytes"]
    setup = Setup(
        PRESETS["slm-10m"],
        find_strategy("single"),
        RunConfig(**flags).with_defaults(has_gpu=True),
        num_gpus=1,
    )
    found = peak(setup)
    scales = setup.weights.scales_bytes  # tensors of no parameter
    assert state["parameters"] == found.parts["parameters"] - scales
    assert state["master_weights"] == found.parts["master_weights"] == 4 * record["num_trainable_params"]
    assert record["memory_at_peak"]["num_bytes"] == pytest.approx(found.peak_bytes - scales, rel=TOLERANCE)
