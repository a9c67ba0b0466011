"""--pad_widths under the engines: equal losses, resumes, and a saved model without the padding."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, compare, launch, record_under
from safetensors import safe_open

ZERO_3 = ROOT / "accel_configs" / "ds_zero3.yaml"


def odd_model(folder: Path, **changes: object) -> str:
    shape = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
        **{"hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "vocab_size": 333, "tie_word_embeddings": False, **changes},
    }
    path = folder / "odd.json"
    path.write_text(json.dumps(shape))
    return str(path)


def test_padded_rows_compute_what_the_others_do(tmp_path: Path) -> None:
    strategies = ("ddp", "fsdp_full_shard", "ds_zero2", "ds_zero3")
    done = compare(
        *("--model", odd_model(tmp_path), "--strategy", *strategies, "--pad_widths", "false", "true"),
        *("--max_steps", "5", "--numerics", "fp32", "--seq_len", "32"),
        folder=tmp_path / "runs",
    )
    assert done.finished.code == 0, done.finished.err
    records = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/record.json")]
    assert len(records) == 8
    assert len({record["weights_fingerprint"] for record in records}) == 1
    assert {record["model"]["ffn_size"] for record in records} == {100}
    for record in records:
        assert record["losses"] == pytest.approx(records[0]["losses"], abs=2e-6)


def test_a_resumed_run_saves_the_model_that_was_asked_for(tmp_path: Path) -> None:
    flags = ("--model", odd_model(tmp_path), "--seq_len", "32", "--output_dir", str(tmp_path))
    flags += ("--run_name", "odd", "--pad_widths", "true", "--save_final_model", "true")
    assert launch(*flags, "--max_steps", "4", "--save_steps", "2", config=ZERO_3).code == 0
    again = launch(*flags, "--resume_from_checkpoint", "latest", "--max_steps", "6", config=ZERO_3)
    assert again.code == 0, again.err
    assert len(record_under(tmp_path)["losses"]) == 2
    assert json.loads((tmp_path / "odd" / "model" / "config.json").read_text())["vocab_size"] == 333
    with safe_open(tmp_path / "odd" / "model" / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.1.mlp.down_proj.weight").get_shape() == [64, 100]
        assert file.get_slice("lm_head.weight").get_shape() == [333, 64]
