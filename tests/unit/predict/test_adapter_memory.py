"""Memory of --peft, estimated: bytes by hand and as traced, 4-bit weights as they lie, and offloaded."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from conftest import ROOT
from test_memory import TINY, estimate

from slm_toolkit.cli.main import main
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.setup.adapters import Adapters, adapters_of, weights_of
from slm_toolkit.run.model.model import build_model

MODELS = ROOT / "bench" / "data" / "models"
P = 130_569_920  # parameters of slm-100m
G = 2_325_312  # of rank 16 beside all its linear layers: 9 x 16 x (4 x (832 + 832) + 3 x (832 + 2332))


def estimated(*arguments: str) -> list[dict]:
    """The rows of `slm estimate --json`, in this process; four sequences and no kernels if not given."""
    words = ["estimate", "--json", "--kernels", "plain", "--per_device_train_batch_size", "4", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return json.loads(out.getvalue())


def adapters(**flags: object) -> Adapters:
    config = RunConfig(**{"model": "slm-100m", "peft": "lora", **flags}).with_defaults(has_gpu=True)
    return adapters_of(PRESETS[config.model], config)


def test_the_trained_parameters_of_each_kind_by_hand() -> None:
    spec = PRESETS["slm-100m"]
    assert weights_of(spec, adapters()).trained == G
    # query and value of rank 8: 9 x 2 x 8 x (832 + 832)
    two = adapters(lora_r=8, lora_target_modules="q_proj, self_attn.v_proj")
    assert (two.targets, weights_of(spec, two).trained) == (("q_proj", "v_proj"), 239_616)
    assert weights_of(spec, adapters()).total == P + G


def test_the_peak_of_one_process_with_lora_at_the_loss_by_hand() -> None:
    # TINY has 1960 parameters; rank 1 beside q, k, v, o (8 + 8 each) and gate, up, down (8 + 16 each): 136 in
    # each of two layers, 272: states 2 x 2232 + 12 x 272 = 7,728
    # a layer keeps per token: norms 2 x (4h + 4) = 72 and their outputs 2 x 2h = 32; attention 4 (q + v) + 4a
    # = 68; gate, SiLU, up and their product 8i = 128; seven numbers of B's, 2 bytes each, 14: 314 together
    # but the first layer's first norm is computed as if in evaluation: 314 x 2 - 36 = 592
    # final norm 36, not its output; loss 12V = 480; the batch's 24; RoPE 2 x 1000 x 8 x 2 = 32,000
    flags = {"seq_len": 1000, "per_device_train_batch_size": 4, "peft": "lora", "lora_r": 1}
    found = estimate("single", num_gpus=1, spec=TINY, **flags)
    assert found.peak_instant == "backward: the loss"
    assert found.peak_bytes == 7_728 + 4000 * (592 + 36 + 480 + 24) + 32_000


def test_a_frozen_matrix_keeps_no_input_and_dropout_a_copy_and_a_mask() -> None:
    flags = {"seq_len": 1000, "per_device_train_batch_size": 4, "peft": "lora", "lora_r": 1}

    def activations(**more: object) -> int:
        return estimate("single", num_gpus=1, spec=TINY, **flags, **more).parts["activations"]

    all_linear = activations()
    # down's input, 2i = 32, and its B's 2; gate's and up's shared input 2h = 16, and 2 x 2: 54 less, twice
    attention_only = activations(lora_target_modules="q_proj,k_proj,v_proj,o_proj")
    assert all_linear - attention_only == 4000 * 2 * 54
    # copies in bf16 and masks of one byte, for each: five of 3h = 24 for the two shared inputs of 2h = 16,
    # one of 3i = 48 for down's 32, 24 more for o's, which attention keeps: 120 - 32 + 16 + 24 = 128, twice
    assert activations(lora_dropout=0.1) - all_linear == 4000 * 2 * 128


def test_four_bit_weights_are_counted_as_they_lie() -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import Linear4bit

    spec = PRESETS["slm-1m"]
    config = RunConfig(model="slm-1m", peft="qlora").with_defaults(has_gpu=False)
    model = build_model(spec, config)
    states = [module.weight.quant_state for module in model.modules() if isinstance(module, Linear4bit)]
    halves = [half for state in states for half in (state, state.state2)]
    scales = [tensor.nbytes for half in halves for tensor in (half.absmax, half.code)]
    found = weights_of(spec, adapters_of(spec, config))
    assert found.scales_bytes == sum(scales) + sum(state.offset.nbytes for state in states)
    assert found.total == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("path", sorted(MODELS.iterdir()), ids=lambda path: path.name)
def test_trained_parameters_of_a_family_are_those_that_peft_adds(path: Path) -> None:
    spec = find_model(str(path))
    config = RunConfig(model=str(path), peft="lora", lora_r=8, attn_implementation="eager")
    model = build_model(spec, config)
    counted = weights_of(spec, adapters_of(spec, config))
    assert counted.trained == sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert counted.total == sum(param.numel() for param in model.parameters())


def test_names_of_another_family_are_refused() -> None:
    spec = find_model(str(MODELS / "olmo2-3m"))
    with pytest.raises(ValueError, match="nothing to adapt"):
        adapters_of(spec, RunConfig(model="olmo2-3m", peft="lora", lora_target_modules="qkv_proj"))


def test_offload_leaves_frozen_weights_where_the_engine_does() -> None:
    # ZeRO-2 takes the adapters' optimizer along, and no parameters; ZeRO-3's JSON and FSDP all of them
    kept = {"ds_zero2_offload": 2 * (P + G), "ds_zero3_offload": 0, "fsdp_full_shard_offload": 0}
    for row in estimated("--peft", "lora", "--strategy", *kept):
        parts = row["parts"]
        assert parts["parameters"] == kept[row["strategy"]]
        assert parts["optimizer"] == parts["master_weights"] == 0
