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
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)
WIDE = (1024, 4096, 2, 8, 8, 256)
"layers of 34 million parameters"
LARGE_VOCABULARY = (64, 128, 1, 2, 2, 32_000)
"whose loss is the peak"
HEADS_OF_78 = (312, 832, 4, 4, 4, 1000)
"which FlashAttention pads to 80"
LOSS = {"seq_len": 1024, "per_device_train_batch_size": 16}
MUON = {"seq_len": 16, "per_device_train_batch_size": 1, "optim": "muon"}
SHORT = {"seq_len": 64, "per_device_train_batch_size": 1}
FLOAT8 = {"fp8": "rowwise", "kernels": "loss", "gradient_checkpointing": "full", "seq_len": 512}
PADDED = {"seq_len": 1024, "kernels": "loss"}
SLOW = {"marks": pytest.mark.slow}


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


@pytest.mark.parametrize(
    ("strategy", "num_gpus", "model", "flags", "phase"),
    [
        # with layers so wide and so few tokens, most peaks are in Newton-Schulz's products
        ("fsdp_full_shard", 2, WIDE, MUON, "backward"),
        pytest.param("ddp", 2, WIDE, MUON, "optimizer", **SLOW),
        pytest.param("single", 1, WIDE, MUON, "optimizer", **SLOW),
        ("ddp", 2, LARGE_VOCABULARY, {**LOSS, "kernels": "loss"}, None),
        ("ddp", 2, LARGE_VOCABULARY, {**LOSS, "kernels": "loss+triton"}, None),
        ("ddp", 2, HEADS_OF_78, PADDED, None),
        # float8 as a GPU has it, not as a CPU emulates it
        pytest.param("ddp", 2, WIDE, {"model": "slm-10m", **FLOAT8}, "backward", **SLOW),
        ("ddp", 2, HEADS_OF_78, {**PADDED, "peft": "lora"}, None),
        ("ddp", 2, HEADS_OF_78, {**PADDED, "gradient_checkpointing": "full"}, None),
        # with Triton's AdamW the peak is not at the optimizer's step, of gradients cast to fp32
        ("ddp", 2, WIDE, {"model": "slm-10m", **SHORT, "kernels": "loss+triton"}, "backward"),
    ],
)
def test_a_traced_step_peaks_as_estimated(
    strategy: str,
    num_gpus: int,
    model: tuple[int, ...],
    flags: dict[str, Any],
    phase: str | None,
    tmp_path: Path,
) -> None:
    shape = {**LLAMA, **dict(zip(SHAPE, model, strict=True)), "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    flags = {"model": str(tmp_path), **flags}
    if "fp8" in flags:
        pytest.importorskip("torchao")
    found = traced({"strategy": strategy, "num_gpus": num_gpus, **flags})
    assert found["status"] == "ok", found["reason"]
    assert phase in (None, found["peak_phase"])
    config = RunConfig(**flags).with_defaults(has_gpu=True)
    setup = Setup(find_model(config.model), find_strategy(strategy), config, num_gpus=num_gpus)
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
