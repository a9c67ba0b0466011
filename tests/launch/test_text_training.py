"""Real text: the loss falls, the saved model loads and computes what the trainer computed."""

from pathlib import Path

import pytest
import torch
from conftest import launch, record_under
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.run.data.data import load_data

BATCHES = 6


@pytest.mark.quick
@pytest.mark.parametrize(
    ("strategy", "numerics"), [("ddp", "aligned"), ("fsdp_full_shard", "fp32"), ("ds_zero3", "aligned")]
)
def test_training_on_text_files_lowers_the_loss_and_the_saved_model_agrees(
    strategy: str, numerics: str, tmp_path: Path, texts: Path
) -> None:
    options = {"dataset": str(texts), "seq_len": 64, "eval_steps": 15, "eval_batches": BATCHES}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    more = ("--model", "slm-1m", "--max_steps", "30", "--learning_rate", "1e-3", "--numerics", numerics)
    done = launch(*flags, *more, "--output_dir", str(tmp_path), config=f"accel_configs/{strategy}.yaml")
    assert done.code == 0, done.err
    record = record_under(tmp_path)
    first, last = record["eval_losses"]
    assert (first["step"], last["step"]) == (15, 30)
    assert record["losses"][0] - record["losses"][-1] > 1.0
    assert last["loss"] < first["loss"]

    model = AutoModelForCausalLM.from_pretrained(record["model_dir"], dtype="auto")
    assert model.dtype == (torch.bfloat16 if numerics == "aligned" else torch.float32)
    config = RunConfig(model="slm-1m", **options).with_defaults(has_gpu=False)
    data = load_data(config, PRESETS["slm-1m"], num_sequences=0)
    (held_out,) = data.held_out.values()
    losses = []
    with torch.no_grad():
        # two ranks took 6 batches of 4 each, in turn: together the first 12
        for _, batch in zip(range(2 * BATCHES), DataLoader(held_out, batch_size=4), strict=False):
            losses.append(model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.item())
    assert len(losses) == 2 * BATCHES
    assert sum(losses) / len(losses) == pytest.approx(last["loss"], rel=1e-5 if numerics == "fp32" else 1e-3)
    tokenizer = AutoTokenizer.from_pretrained(record["model_dir"])
    assert tokenizer.decode(tokenizer("héllo", add_special_tokens=False)["input_ids"]) == "héllo"


def test_a_saved_model_is_fine_tuned_from_its_weights(tmp_path: Path, texts: Path) -> None:
    common = ("--dataset", str(texts), "--seq_len", "64", "--learning_rate", "1e-3")
    losses, model = [], "slm-1m"
    for name, steps in (("first", "15"), ("second", "2")):
        words = (*common, "--model", model, "--max_steps", steps, "--output_dir", str(tmp_path / name))
        done = launch(*words, config="accel_configs/single.yaml")
        assert done.code == 0, done.err
        record = record_under(tmp_path / name)
        losses.append(record["losses"][0])
        model = record["model_dir"]
    assert losses[1] < losses[0] - 0.5


def test_epochs_count_the_dataset_once_over(tmp_path: Path, texts: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_text((texts / "licence.txt").read_text()[:3000])  # 46 sequences of 64, 11 whole batches of 4
    done = launch(
        *("--model", "slm-1m", "--dataset", str(small), "--seq_len", "64", "--num_train_epochs", "2"),
        *("--save_final_model", "false", "--output_dir", str(tmp_path / "runs")),
        config="accel_configs/ddp.yaml",
    )
    assert done.code == 0, done.err
    record = record_under(tmp_path / "runs")
    assert len(record["losses"]) == 10  # 5 batches per rank and epoch
    assert record["model_dir"] is None
