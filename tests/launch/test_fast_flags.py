"""Flags of the fast path: each does what it says where it can, and is refused with a reason elsewhere."""

from pathlib import Path

import pytest
from conftest import launch, record_under, slm_here
from transformers import LlamaConfig, LlamaForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.kernels.layer_kernels import use_fp8
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.strategy import find_strategy

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "3")
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def trained(folder: Path, *flags: str, strategy: str = "ddp") -> dict:
    done = launch(*FEW, *flags, "--output_dir", str(folder), config=f"accel_configs/{strategy}.yaml")
    assert done.code == 0, done.err
    return record_under(folder)


def test_fp8_is_seen_by_the_probe_and_is_the_same_under_ddp_and_zero_3(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    plain = trained(tmp_path / "plain")
    assert plain["numerics"]["float8"] is None
    found = {
        strategy: trained(tmp_path / strategy, "--fp8", "tensorwise", strategy=strategy)
        for strategy in ("ddp", "ds_zero3")
    }
    for record in found.values():
        # forward's operands have four bits of exponent, the gradient that comes from above has five
        assert record["numerics"]["float8"] == "float8_e4m3fn+float8_e5m2"
        assert record["losses"] != plain["losses"]
        assert record["losses"] == pytest.approx(plain["losses"], abs=0.01)
    assert found["ds_zero3"]["losses"] == pytest.approx(found["ddp"]["losses"], abs=1e-3)


@pytest.mark.quick
def test_fp8_takes_the_layers_products_whose_widths_it_can() -> None:
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    model = LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=40))  # 40 is no multiple of 16
    names = list(model.state_dict())
    use_fp8(model, RunConfig(fp8="rowwise"))
    converted = {name for name, module in model.named_modules() if isinstance(module, float8.Float8Linear)}
    assert converted == {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}
    assert list(model.state_dict()) == names
    odd = LlamaForCausalLM(LlamaConfig(**{**TINY, "hidden_size": 40}, intermediate_size=40))
    with pytest.raises(ValueError, match="no width of LlamaForCausalLM is a multiple of 16"):
        use_fp8(odd, RunConfig(fp8="rowwise"))


def test_reading_ahead_changes_no_loss(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", strategy="fsdp_full_shard")
    ahead = trained(tmp_path / "ahead", "--dataloader_num_workers", "1", strategy="fsdp_full_shard")
    assert ahead["losses"] == plain["losses"]
    assert ahead["numerics"]["batch_hashes"] == plain["numerics"]["batch_hashes"]


@pytest.mark.slow
def test_a_compile_mode_runs_where_parameters_stay(tmp_path: Path) -> None:
    flags = ("--kernels", "graphs")
    record = trained(tmp_path, *flags, strategy="single")
    assert record["status"] == "ok"
    assert record["numerics"]["compiled"]
    config = RunConfig(kernels="graphs")
    for name in ("single", "ddp", "ds_zero1", "ds_zero2"):
        assert contradictions(find_strategy(name), config) == []
    for name in ("fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero3"):
        (problem,) = contradictions(find_strategy(name), config)
        assert "CUDA graphs need" in problem


@pytest.mark.quick
@pytest.mark.parametrize("flags", ["--fp8 tensorwise --numerics stock", "--kernels graphs --strategy ddp"])
def test_estimates_say_what_they_know_nothing_of(flags: str) -> None:
    done = slm_here("estimate", "--model", "slm-100m", *flags.split())
    assert (done.code, done.err.count("error:")) == (2, 1)
    assert "no closed form for it" in done.err
