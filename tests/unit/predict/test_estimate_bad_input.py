"""`slm estimate`: what nobody can mean is one line and a hint, whatever file or argument it stands in."""

import json
from pathlib import Path

import pytest
from conftest import FSDP2, own_strategy

from slm_toolkit.cli.main import main

FILES = {
    "zero.json": {"zero_optimization": {"stage": 0}},
    "hpz.json": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
    "fixed.json": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 32},
}
YAMLS = {
    "groups.yaml": FSDP2 + "parallelism_config:\n  parallelism_config_dp_shard_size: 5\n",
    "whole.yaml": "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n",
}
SHAPE = {"num_hidden_layers": 2, "hidden_size": 576, "intermediate_size": 100, "vocab_size": 100}
MODELS = {
    "heads": {**SHAPE, "num_attention_heads": 7},
    "beyond": {**SHAPE, "num_attention_heads": 9, "hidden_size": 9 * 10**200},
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--num_gpus 0", "--num_gpus is 0: at least 1"),
        ("--gpu h1000", "unknown GPU 'h1000'"),
        ("--num_gpus 13", "13 GPUs can't be the same number on each node of up to 8: use full nodes"),
        ("--strategy zero.yaml", "no estimate of ZeRO stage 0"),
        ("--strategy hpz.yaml", "zero_hpz_partition_size 3 with 8 ranks"),
        ("--strategy fixed.yaml", "train_micro_batch_size_per_gpu 32, --per_device_train_batch_size says 4"),
        ("--strategy fixed.yaml --largest_batch --gpu l4", "--largest_batch searches for it"),
        ("--strategy groups.yaml", "dp_shard_size 5 with 8 ranks"),
        ("--strategy whole.yaml", "fsdp_sharding_strategy is 'NO_SHARD'"),
        ("--model heads", "7 heads, 7 key-value heads"),
        ("--model beyond", "hidden_size (expected int <= 1000000000)"),
        ("--per_device_train_batch_size 4 0", "--per_device_train_batch_size is 0"),
        ("--seq_len 100000000", "--seq_len is 100000000: at most 16,777,216"),
        ("--attn_implementation magic", "--attn_implementation magic: no closed form"),
        ("--largest_batch", "--largest_batch needs --gpu"),
        (
            "--largest_batch --gpu l4 --per_device_train_batch_size 4",
            "--per_device_train_batch_size with --largest_batch",
        ),
    ],
)
def test_nonsense_is_one_line_and_a_hint(
    arguments: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, content in FILES.items():
        own_strategy(tmp_path, "", content, name=name.removesuffix(".json"))
    for name, text in YAMLS.items():
        (tmp_path / name).write_text(text)
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *arguments.split()])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert says in printed.err
    assert [line[:5] for line in printed.err.splitlines()] == ["error", "hint:"]
