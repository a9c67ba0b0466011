"""The fused kernels compiled, and in real trainings under sharded engines."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, TIED, compare, launch, record_under
from kernel_models import ALL, error, made, two_micro_steps
from transformers import AutoModelForCausalLM

FLAGS = [word for name, value in ALL.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize("checkpointing", ["none", "selective_op"])
def test_compiled_layer_kernels_have_the_gradients_of_plain_layers(checkpointing: str) -> None:
    """The MLP's were all zero under torch 2.11; transformers 5.17 broke off with selective_op."""
    plain, model = made(), made(kernels="norm+compile", gradient_checkpointing=checkpointing)
    for each in (plain, model):
        each.model.layers = each.model.layers[:1]
    model.load_state_dict(plain.state_dict())
    (wanted_loss, wanted), (loss, found) = two_micro_steps(plain), two_micro_steps(model)
    assert error(loss, wanted_loss) < 1e-6
    assert error(found, wanted) < 1e-6


def test_a_compiled_layer_is_one_graph_under_ddp_too(tmp_path: Path) -> None:
    """Its 55 MB of fp32 weights are more than one of DDP's buckets of 25 MB, where Dynamo cut it."""
    wide = {**TIED, "hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    model = made(str(tmp_path), kernels="compile")
    graphs = []
    model.model.layers[0].compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    tokens = torch.arange(64).view(1, 64)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        replicated = torch.nn.parallel.DistributedDataParallel(model)
        replicated(input_ids=tokens, labels=tokens).loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    assert len(graphs) == 1


def test_sharded_engines_with_all_of_them_train_as_one_plain_process_does(tmp_path: Path, tied: str) -> None:
    """ZeRO-3 keeps little and prefetches some: layers gather otherwise when they are computed again."""
    shipped = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    shipped["zero_optimization"].update(
        stage3_param_persistence_threshold=0,
        stage3_prefetch_bucket_size=110_000,
        stage3_max_live_parameters=300_000,
    )
    (tmp_path / "zero3.json").write_text(json.dumps(shipped))
    config = yaml.safe_load((ROOT / "accel_configs" / "ds_zero3.yaml").read_text())
    config["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "zero3.json")
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(config))
    fsdp = ["fsdp_full_shard"] if torch.__version__ >= (2, 13) else []  # which shards tied embeddings
    done = compare(
        *("--strategy", *fsdp, str(tmp_path / "zero3.yaml"), "--model", tied, *FLAGS),
        *("--numerics", "fp32", "--parity", "3", "--seq_len", "32"),
        folder=tmp_path / "runs",
    )
    assert done.finished.code == 0, done.finished.err
    assert len(done.rows) == 1 + len(fsdp)
    for row in done.rows.values():
        assert row["parity_reference"] == "single-process fp32"
        assert row["parity_holds"]  # |Δloss| within 1e-5
        assert row["numerics_probed"]["recomputed"]


def test_a_model_trained_with_all_of_them_is_evaluated_and_saved(tmp_path: Path, texts: Path) -> None:
    done = launch(
        *("--model", "slm-1m", "--dataset", str(texts / "licence.txt"), "--seq_len", "32", *FLAGS),
        *("--max_steps", "3", "--eval_steps", "3", "--output_dir", str(tmp_path)),
        config="accel_configs/ds_zero3.yaml",
    )
    assert done.code == 0, done.err
    record = record_under(tmp_path)
    assert record["eval_losses"][0]["loss"] == pytest.approx(record["losses"][-1], rel=0.05)
    _, loading = AutoModelForCausalLM.from_pretrained(record["model_dir"], output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
