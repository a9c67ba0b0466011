"""The recorder of a user's own loop, in one process: what it times, what it lets go of, what it survives."""

import json
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor

from slm_toolkit.record.files import read_record
from slm_toolkit.recorder import Recorder, open_recorders

pytestmark = pytest.mark.quick
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def one_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [__file__, "--lr", "1e-3"])
    monkeypatch.delenv("SLM_TOOLKIT_RUN_DIR", raising=False)
    yield
    for recorder in open_recorders():
        recorder.stop()


def prepared(optimizer: type = torch.optim.AdamW, **options: float) -> tuple:
    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SHAPE))
    return accelerator, *accelerator.prepare(model, optimizer(model.parameters(), **options))


def step(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_the_time_of_an_evaluation_is_in_no_step(tmp_path: Path) -> None:
    parts = prepared()
    recorder = Recorder(*parts, output_dir=tmp_path)
    for number in range(6):
        recorder.after_step(step(*parts))
        if number == 0:
            began = time.perf_counter()
        if number in (2, 4):
            with torch.no_grad():
                parts[1](input_ids=TOKENS)
            time.sleep(0.4)
            if number == 2:
                recorder.pause()  # after number 4, the evaluation itself tells it
    seconds = time.perf_counter() - began
    path = recorder.close()
    recorder.pause()  # as a Trainer does that evaluates after its training
    record = read_record(path)
    assert len(record.losses) == 6
    assert sum(record.step_seconds[0][1:]) <= seconds - 2 * 0.4 + 0.001  # on a busy machine, too
    assert json.loads(path.read_text())["asked"]["config"] == {"numerics": "stock", "lr": 1e-3}
    assert open_recorders() == ()


def test_a_second_run_of_the_same_name_replaces_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        parts = prepared()
        recorder = Recorder(*parts, output_dir=tmp_path, run_name="mine")
        recorder.after_step(step(*parts))
        recorder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-r2"]


def test_a_recorder_that_another_one_replaces_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = prepared()
    looks: list[int] = []
    for module in ("recorder", "run.observe.probe"):  # the hooks of both look for token ids
        monkeypatch.setattr(f"slm_toolkit.{module}.tokens_of", lambda *_: looks.append(1))
    clip = torch.nn.utils.clip_grad_norm_
    Recorder(*parts)
    Recorder(*parts).stop()
    assert torch.nn.utils.clip_grad_norm_ is clip
    step(*parts)
    assert looks == []


@pytest.mark.parametrize(
    ("optimizer", "options", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0}),
        (
            Adafactor,
            {},
            {"lr": None, "eps": [1e-30, 1e-3], "weight_decay": 0},
        ),  # transformers' defaults: it finds its own rate
    ],
)
def test_optimizers_with_other_settings_than_adam(
    optimizer: type, options: dict[str, float], settings: dict, tmp_path: Path
) -> None:
    parts = prepared(optimizer, **options)
    recorder = Recorder(*parts, output_dir=tmp_path)
    recorder.after_step(step(*parts))
    record = read_record(recorder.close())
    (group,) = record.numerics["optimizer_settings"]
    assert settings.items() <= group.items()


def test_micro_steps_that_the_accelerator_does_not_know(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    recorder = Recorder(accelerator, model, optimizer, output_dir=tmp_path)
    losses = []
    for number in range(6):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        (loss / 3).backward()
        losses.append(loss.item())
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        recorder.after_step(loss)
    record = read_record(recorder.close())
    assert record.losses == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3])
    assert (record.tokens_per_step, record.numerics["accumulation"]) == (3 * 32, 3)
