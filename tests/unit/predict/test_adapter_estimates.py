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
    names = ("ddp", "ds_zero2", "ds_zero3", "fsdp_full_shard")
    rows = estimated("--peft", "lora", "--model", "slm-100m", "--strategy", *names)
    sent = {row["strategy"]: row["traffic_bytes"] for row in rows}
    of_adapters, of_all = 2 * G * 7 / 8, 2 * (P + G) * 7 / 8  # bf16, eight ranks
    assert sent["ddp"]["reduce_gradients"] == pytest.approx(2 * of_adapters)
    assert sent["ds_zero2"]["reduce_gradients"] == pytest.approx(of_adapters)
    assert sent["ds_zero2"]["gather_updated"] == pytest.approx(of_adapters)
    for name in ("ds_zero3", "fsdp_full_shard"):
        assert sent[name]["gather_forward"] == sent[name]["gather_backward"] == pytest.approx(of_all)
        assert sent[name]["reduce_gradients"] == pytest.approx(of_adapters)


@pytest.mark.usefixtures("uncalibrated")
def test_a_frozen_step_makes_no_gradient_of_its_weights() -> None:
    words = ("--model", "slm-1b-hw", "--strategy", "single", "--gpu", "h100-80gb", "--seq_len", "2048")
    whole, lora, qlora = (estimated(*words, "--peft", peft)[0] for peft in ("none", "lora", "qlora"))
    # a product and the gradient of its input are two of three; thin matrices come on top
    ratio = lora["parts_seconds"]["matmul"] / whole["parts_seconds"]["matmul"]
    assert 2 / 3 < ratio < 0.87
    trained = lora["num_trainable_params"]
    shares = lora["parts_seconds"]["optimizer"] / whole["parts_seconds"]["optimizer"]
    assert shares == pytest.approx(trained / whole["num_trainable_params"])
    assert whole["num_trainable_params"] == PRESETS["slm-1b-hw"].num_params
    assert (whole["parts_seconds"]["dequantization"], lora["parts_seconds"]["dequantization"]) == (0, 0)
    # forward and backward unpack each weight: 4 bits read, 17/64 bytes of scales moved, 2 bytes written
    weights = 19 * (4 * 1920**2 + 3 * 1920 * 5120)
    rate = rates_of(gpu_of_name("h100-80gb"), TODAY).memory_bytes
    expected = 2 * weights * (0.5 + 17 / 64 + 2) / rate
    assert qlora["parts_seconds"]["dequantization"] == pytest.approx(expected)


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
    words = ("--strategy", "ds_zero2", "ds_zero3", "fsdp_full_shard", "--num_gpus", "8")
    for row in estimated(*words, "--peft", "lora", "--lora_r", "8", "16", "--lora_alpha", "16", "32"):
        assert row["adapted_modules"] == [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ]
        assert row["num_trainable_params"] == G * row["lora_r"] // 16
        assert row["deepspeed_bytes"] is row["deepspeed_stage"] is None
    assert len(estimated(*words, "--peft", "lora", "--lora_alpha", "16", "32")) == 3  # it changes nothing
    (whole,) = estimated("--strategy", "ddp")
    assert (whole["peft"], whole["lora_r"], whole["adapted_modules"]) == ("none", None, None)
    shown = slm_here("estimate", "--strategy", "single", "--peft", "qlora", "--gpu", "l4")
    assert shown.code == 0, shown.err
    for words in ("qlora, rank 16", "dequantization"):
        assert words in shown.out
