"""A run's memory does not grow with its steps: what is noted of each is numbers, no tensors and no events."""

import gc
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import run

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.names import find_model
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.model.model import build_model
from slm_toolkit.run.observe import watch as watch_module
from slm_toolkit.run.observe.machine_load import GpuBefore
from slm_toolkit.run.observe.measure import StepClock

COUNTING = """
import gc, sys, torch
from slm_toolkit import train
from slm_toolkit.run.after_step import AfterStep

after = AfterStep.after_step

def count_after(self, step, *arguments):
    after(self, step, *arguments)
    if step in (31, 63):
        gc.collect()
        print(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))

AfterStep.after_step = count_after
train.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_no_tensor_is_kept_of_a_step(tmp_path: Path) -> None:
    """Of 32 steps; two data sets, each of whose losses is noted, too."""
    for name in ("a", "b"):
        rows = [{"text": f"{name} {number} of some words"} for number in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "64", "--save_final_model", "false")
    data = ("--dataset", f"{tmp_path}/a.jsonl=1,{tmp_path}/b.jsonl=1", "--packing", "none")
    done = run(
        sys.executable, "-c", COUNTING, *words, *data, "--output_dir", str(tmp_path), "--run_name", "run"
    )
    assert done.code == 0, done.err
    after_32, after_64 = map(int, done.out.split())
    assert after_64 - after_32 <= 2  # one of 16 steps of both data sets
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert [len(record[name]) for name in ("losses", "grad_norms")] == [64, 64]
    assert all(norm > 0 for norm in record["grad_norms"])


@pytest.mark.quick
def test_a_step_has_the_seconds_of_its_phases() -> None:
    clock = StepClock(torch.device("cpu"))
    for phases in (("data", "forward"), ("data",), ("data", "data", "backward")):
        with clock.step():
            for name in phases:
                with clock.phase(name):
                    time.sleep(0.01)
    found = clock.phase_seconds()
    assert {name: [seconds > 0 for seconds in of_phase] for name, of_phase in found.items()} == {
        "data": [True, True, True],
        "forward": [True, False, False],
        "backward": [False, False, True],
    }
    assert found["data"][2] >= 0.02
    of_steps = zip(*found.values(), clock.seconds, strict=True)
    assert all(0.01 <= sum(of_phases) <= whole for *of_phases, whole in of_steps)


@pytest.mark.quick
def test_peaks_are_those_after_the_probed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling and probing take more than training: a GPU's peaks were counted from step 1."""
    config = RunConfig(model="slm-1m", seq_len=32, numerics="fp32")
    accelerator, model = Accelerator(cpu=True), build_model(find_model("slm-1m"), config)
    recorder = RecordedLoss(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    resets = []
    monkeypatch.setattr(watch_module, "reset_peak_memory", lambda _: resets.append(len(losses)))
    losses: list[float] = []
    watch = watch_module.RunWatch(accelerator, model, optimizer, recorder, gpu=GpuBefore())
    tokens = torch.arange(32).view(1, 32)
    for _ in range(3):
        with watch.step():
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            watch.gradients_reduced()
            optimizer.step()
        losses.append(loss.item())
    assert watch.num_probed_steps == 1
    assert resets == [0, 1]


@pytest.mark.quick
def test_a_step_begins_where_the_one_before_ended_but_after_a_pause() -> None:
    clock = StepClock(torch.device("cpu"))
    for between in ("", "losses are read", "a checkpoint"):
        time.sleep(0.05 if between else 0)
        if between == "a checkpoint":
            clock.pause()
        with clock.step():
            time.sleep(0.01)
    own, with_reading, after_checkpoint = clock.seconds
    assert 0.01 <= own < 0.04
    assert with_reading >= 0.06
    assert 0.01 <= after_checkpoint < 0.04


@pytest.mark.quick
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_of_steps_that_a_gpu_has_done_are_let_go() -> None:
    clock = StepClock(torch.device("cuda"))
    for _ in range(100):
        with clock.step(), clock.phase("forward"):
            torch.ones(1000, device="cuda").sum()
    torch.cuda.synchronize()
    with clock.step():
        pass
    assert sum(isinstance(each, torch.cuda.Event) for each in gc.get_objects()) <= 6  # of the last steps
    assert len(clock.seconds) == 101
    assert len(clock.phase_seconds()["forward"]) == 101
