"""`slm estimate` on YAMLs and JSONs of one's own: buckets, offload, hybrid shards, checkpointing."""

import json
from pathlib import Path

from conftest import DEEPSPEED, own_strategy
from test_estimate import P, estimated, rows_of

from slm_toolkit.predict.memory.machine import PROCESS_BYTES


def test_a_users_own_yaml_and_config_json(tmp_path: Path) -> None:
    model = tmp_path / "tiny" / "config.json"
    model.parent.mkdir()
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": True}
    model.write_text(json.dumps(shape))
    own = own_strategy(tmp_path, "", {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}})
    for path in (model, model.parent):
        (row,) = estimated("--strategy", own, "--model", str(path))
        assert (row["model"], row["strategy"]) == ("tiny", "mine")
        # vocabulary 64,000; a layer 2 x 64 x 64 + 2 x 64 x 32 + 3 x 64 x 128 + 128 = 36,992; final norm 64
        assert row["parts"]["parameters"] == 2 * (64_000 + 2 * 36_992 + 64)


def test_zero_2_offload_moves_16_bytes_per_parameter_to_the_host(tmp_path: Path) -> None:
    yaml = f"{DEEPSPEED}  zero_stage: 2\n  offload_optimizer_device: cpu\n"
    one, eight = rows_of(own_strategy(tmp_path, yaml), num_gpus=(1, 8))
    for row in (one, eight):
        assert (row.parts["master_weights"], row.parts["optimizer"], row.parts["parameters"]) == (0, 0, 2 * P)
    # one rank: master weights 4, moments 8, fp32 gradients 4; eight: building 4 P each is more than 16 P / 8
    assert one.host_bytes_per_node == PROCESS_BYTES + 16 * P
    assert eight.host_bytes_per_node == 8 * (PROCESS_BYTES + 4 * P)
    assert eight.deepspeed_bytes == 2 * P


def test_nvme_keeps_buffers_on_the_host(tmp_path: Path) -> None:
    section = {"stage": 3, "offload_optimizer": {"device": "nvme", "buffer_count": 5}}
    zero = {"zero_optimization": {**section, "sub_group_size": 1e9}}
    (row,) = rows_of(own_strategy(tmp_path, "", zero), num_gpus=(1,))
    # five buffers, each as large as all of P; zero3_init_flag is on by default, so rank 0 draws 4 P beside
    assert row.host_bytes_per_node == PROCESS_BYTES + 5 * 4 * P + 4 * P


def test_fsdp_1_hybrid_shard_keeps_a_copy_per_node(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: {}\n"
    hybrid = own_strategy(tmp_path, text.format("HYBRID_SHARD"), name="hybrid")
    keeps_gathered = own_strategy(tmp_path, text.format("SHARD_GRAD_OP"), name="keeps")
    per_node, keeps = rows_of(hybrid, keeps_gathered, num_gpus=(64,))
    assert per_node.parts["optimizer"] == 8 * P // 8
    # without fsdp_auto_wrap_policy the whole model is one unit: P in bf16 is gathered, whichever the sharding
    assert per_node.parts["gathered_parameters"] == keeps.parts["gathered_parameters"] == 2 * P


def test_hpz_holds_a_second_copy_of_the_parameters(tmp_path: Path) -> None:
    def parameters(**more: int) -> int:
        own = own_strategy(tmp_path, "", {"zero_optimization": {"stage": 3, **more}})
        return rows_of(own, num_gpus=(16,))[0].parts["parameters"]

    assert parameters(zero_hpz_partition_size=8) - parameters() == 2 * P // 8
