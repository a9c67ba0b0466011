"""Estimates of --peft beside memory: traffic, time and MFU, what rows say, and what is refused."""

import pytest
import torch
from conftest import slm_here
from test_adapter_memory import G, P, estimated
from torch.utils.flop_counter import FlopCounterMode

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.model.model_spec import PRESETS, flops_per_token
from slm_toolkit.predict.speed.matmul import rates_of
from slm_toolkit.predict.speed.software import TODAY
from slm_toolkit.run.model.model import build_model


def test_traffic_gathers_all_and_reduces_the_adapters() -> None:
    of_adapters, of_all = 2 * G * 7 / 8, 2 * (P + G) * 7 / 8  # bf16, eight ranks
    names = ("reduce_gradients", "gather_updated", "gather_forward", "gather_backward")
    for strategy, expected in {
        "ddp": (2 * of_adapters, 0, 0, 0),
        "ds_zero2": (of_adapters, of_adapters, 0, 0),
        "ds_zero3": (of_adapters, 0, of_all, of_all),
        "fsdp_full_shard": (of_adapters, 0, of_all, of_all),
    }.items():
        (row,) = estimated("--peft", "lora", "--model", "slm-100m", "--strategy", strategy)
        assert [row["traffic_bytes"].get(name, 0) for name in names] == pytest.approx(expected), strategy


@pytest.mark.usefixtures("uncalibrated")
def test_a_frozen_step_makes_no_gradient_of_its_weights() -> None:
    words = ("--model", "slm-1b-hw", "--strategy", "single", "--gpu", "h100-80gb", "--seq_len", "2048")
    rows = [estimated(*words, "--peft", peft)[0] for peft in ("none", "lora", "qlora")]
    whole, lora, qlora = (row["parts_seconds"] for row in rows)
    # a product and the gradient of its input are two of three; thin matrices come on top
    assert 2 / 3 < lora["matmul"] / whole["matmul"] < 0.87
    per_parameter = [row["parts_seconds"]["optimizer"] / row["num_trainable_params"] for row in rows]
    assert per_parameter == pytest.approx(per_parameter[:1] * 3)
    # forward and backward unpack each weight: 4 bits read, 17/64 bytes of scales moved, 2 bytes written
    weights = 19 * (4 * 1920**2 + 3 * 1920 * 5120)
    expected = 2 * weights * (0.5 + 17 / 64 + 2) / rates_of(gpu_of_name("h100-80gb"), TODAY).memory_bytes
    assert qlora["dequantization"] == pytest.approx(expected)
    assert lora["dequantization"] == 0


def test_pytorch_counts_the_flops_that_a_frozen_step_is_said_to_have() -> None:
    spec, batch, seq_len, rank = PRESETS["slm-1m"], 2, 64, 4
    config = RunConfig(
        attn_implementation="eager", numerics="fp32", seq_len=seq_len, peft="lora", lora_r=rank
    )
    model = build_model(spec, config)
    tokens = torch.randint(0, spec.vocab_size, (batch, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    said = flops_per_token(spec, seq_len=seq_len, adapter_params=trained) * batch * seq_len
    # in the first layer nobody asks for the gradient of what goes into query, key and value, nor into their A
    not_made = 2 * 3 * 128 * (128 + rank) * batch * seq_len
    assert counter.get_total_flops() == said - not_made


def test_rows_say_what_is_trained_and_deepspeeds_estimator_is_not_asked() -> None:
    words = ("--strategy", "ds_zero2", "ds_zero3", "fsdp_full_shard", "--peft", "lora")
    for row in estimated(*words, "--lora_r", "8", "16"):
        assert " ".join(row["adapted_modules"]) == "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
        assert row["num_trainable_params"] == G * row["lora_r"] // 16
        assert row["deepspeed_bytes"] is row["deepspeed_stage"] is None
    assert len(estimated(*words, "--lora_alpha", "16", "32")) == 3  # it changes nothing
    shown = slm_here("estimate", "--strategy", "single", "--peft", "qlora", "--gpu", "l4").out
    assert "qlora, rank 16" in shown
