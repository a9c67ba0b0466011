"""Fine-tuning data: datasets mixed and told apart, the learning rate."""

from pathlib import Path

import pytest
import torch
from chats import ROWS, SPEC, config_of, write_rows
from conftest import ROOT, launch, record_under

from slm_toolkit.config.dataset_files import Source, sources_of
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.data.batches import labels_by_sequence, make_loader
from slm_toolkit.run.data.data import load_data
from slm_toolkit.run.evaluate import mean_loss


@pytest.mark.quick
def test_every_held_out_sequence_counts_once() -> None:
    config = RunConfig(per_device_train_batch_size=4)
    sequences = [{"input_ids": torch.full((8,), number)} for number in range(5)]
    batches = list(make_loader(sequences, config, train=False, num_ranks=2))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4]  # one for each of two ranks
    assert sum(labels_by_sequence(batch).sum().item() for batch in batches) == 5 * 7
    assert mean_loss({"a": (1.0, 10), "b": (float("nan"), 0)}) == 1.0


@pytest.mark.quick
def test_datasets_are_named_by_file_and_weighed() -> None:
    assert sources_of("data/a.jsonl=3,b/c4=0.5") == (
        Source("a", "data/a.jsonl", 3.0),
        Source("c4", "b/c4", 0.5),
    )
    assert [source.name for source in sources_of("x/train.jsonl,y/train.jsonl")] == [
        "x/train.jsonl",
        "y/train.jsonl",
    ]
    assert sources_of("a/b:en=3,a/b:de.1=1,./x:y.txt=2") == (
        Source("a/b:en", "a/b", 3.0, "en"),
        Source("a/b:de.1", "a/b", 1.0, "de.1"),
        Source("x:y", "./x:y.txt", 2.0),
    )
    for bad, said in {
        "a=0": "not a number above 0",
        "a,,b": "empty name between",
        "a=1,b": "or none",
    }.items():
        assert any(said in problem for problem in RunConfig(dataset=bad).problems()), bad


@pytest.mark.quick
def test_weights_say_how_often_a_dataset_is_drawn(tmp_path: Path) -> None:
    for name, letter in (("often", "a"), ("seldom", "b")):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": letter * 63}] * 400)
    mixed = f"{tmp_path / 'often.jsonl'}=3,{tmp_path / 'seldom.jsonl'}=1"
    data = load_data(config_of(mixed, seq_len=64), SPEC, num_sequences=0)
    tokens = [row["input_ids"][9].item() for row, _ in zip(data.train, range(400), strict=False)]
    assert 0.65 < tokens.count(ord("a") + 3) / 400 < 0.85  # 3 of 4, within 4.6 errors; 3 special tokens
    with pytest.raises(ValueError, match="a stream can't be mixed with other data"):
        load_data(config_of(mixed, seq_len=64, streaming=True), SPEC, num_sequences=0)
    both = load_data(config_of(mixed.replace("=3", "").replace("=1", ""), seq_len=64), SPEC, num_sequences=0)
    assert len(both.train) == 800  # without weights: all of each


@pytest.mark.slow
def test_the_losses_of_mixed_datasets_make_up_the_whole(tmp_path: Path) -> None:
    chat = write_rows(tmp_path / "chat.jsonl", [ROWS["messages"], ROWS["messages"]] * 40)
    text = write_rows(tmp_path / "text.jsonl", [{"text": "abcdefgh " * 30}] * 40)
    losses = {}
    for kernel in ("plain", "loss"):
        out = tmp_path / kernel
        flags = ["--dataset", f"{chat}=1,{text}=1", "--kernels", kernel, "--output_dir", str(out)]
        done = launch(
            *("--model", "slm-1m", "--seq_len", "128", "--max_steps", "3", "--eval_steps", "3", *flags),
            *("--gradient_accumulation_steps", "2"),
            config=ROOT / "accel_configs" / "ddp.yaml",
        )
        assert done.code == 0, done.err
        record = record_under(out)
        losses[kernel] = record["losses"]
        assert set(record["eval_losses_by_set"]) == {"chat", "text"}
        assert "perplexity" in done.err
    assert losses["plain"] == pytest.approx(losses["loss"], abs=5e-3)


@pytest.mark.quick
def test_held_out_sets_of_their_own_are_evaluated_apart(tmp_path: Path) -> None:
    texts = {name: write_rows(tmp_path / f"{name}.jsonl", [{"text": "xyz" * 90}] * 9) for name in "abc"}
    config = config_of(texts["a"], eval_dataset=f"{texts['b']},{texts['c']}", eval_steps=1)
    data = load_data(config, SPEC, num_sequences=0)
    assert list(data.held_out) == ["b", "c"]
    assert len(data.train) == len(data.held_out["b"])  # nothing is split off
    assert labels_by_sequence({"input_ids": torch.zeros(2, 128)}).tolist() == [127, 127]
