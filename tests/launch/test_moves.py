"""A checkpoint of any strategy and number of processes goes on under any other, as if it had stayed."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import launch, record_under, slm_here
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STEPS, STOP = 8, 4
NUM_SEQUENCES = 29
"three steps of 8, and 5 sequences that an epoch leaves out: the stop is in the middle of the second epoch"
PLACES = {  # strategy and processes: sequences per process and micro-step, micro-steps; 8 in each step
    ("ddp", 2): (2, 2),
    ("fsdp_full_shard", 2): (4, 1),
    ("ds_zero1", 2): (1, 4),
    ("ds_zero3", 2): (4, 1),
    ("single", 1): (8, 1),
}
ALWAYS = ("ddp", "ds_zero3")
"strategies whose bits are compared in every run of the tests; of the others by `-m slow`"
CIRCLE = list(zip(PLACES, [*list(PLACES)[1:], next(iter(PLACES))], strict=True))
"each place is left once and reached once"
Stayed = Callable[[tuple[str, int]], tuple[dict, Path]]


def train(place: tuple[str, int], folder: Path, text: Path, *more: str) -> dict:
    size, num_micro_steps = PLACES[place]
    words = ("--model", "slm-1m", "--numerics", "fp32", "--max_steps", str(STEPS), "--run_name", "run")
    words += ("--dataset", str(text), "--seq_len", "64", "--save_final_model", "false")
    words += ("--per_device_train_batch_size", str(size), "--output_dir", str(folder))
    words += ("--gradient_accumulation_steps", str(num_micro_steps))
    done = launch(*words, *more, config=f"accel_configs/{place[0]}.yaml")
    assert done.code == 0, done.err
    return {**record_under(folder), "said": done.err}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((texts / "licence.txt").read_text()[: 64 * NUM_SEQUENCES])  # a token is a byte
    return path


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Stayed:
    """Of a place a run to the end, and the checkpoint it wrote on the way; each place runs once."""

    @functools.cache
    def stay(place: tuple[str, int]) -> tuple[dict, Path]:
        folder = tmp_path_factory.mktemp(place[0])
        record = train(place, folder, text, "--save_steps", str(STOP))
        return record, folder / "run" / "checkpoints" / f"step_{STOP}"

    return stay


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=() if place[0] in ALWAYS else pytest.mark.slow, id=place[0])
        for place in PLACES
    ],
)
def test_a_resume_has_bit_by_bit_the_losses_of_the_run_that_never_stopped(
    place: tuple[str, int], stayed: Stayed, tmp_path: Path, text: Path
) -> None:
    whole, checkpoint = stayed(place)
    resumed = train(place, tmp_path, text, "--resume_from_checkpoint", str(checkpoint))
    assert (len(whole["losses"]), resumed["first_step"]) == (STEPS, STOP)
    assert resumed["losses"] == whole["losses"][STOP:]
    assert resumed["resumed_from"]["conversion"] is None


def how_often(*move: tuple[str, int]) -> list[pytest.MarkDecorator]:
    if move not in CIRCLE:
        return [pytest.mark.slow]
    return [pytest.mark.quick] if move == CIRCLE[0] else []


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(source, target, marks=how_often(source, target))
        for source in PLACES
        for target in PLACES
        if source != target
    ],
    ids=lambda place: f"{place[0]}_x{place[1]}",
)
def test_losses_after_a_move_are_those_of_staying(
    source: tuple[str, int], target: tuple[str, int], stayed: Stayed, tmp_path: Path, text: Path
) -> None:
    of_source, checkpoint = stayed(source)
    moved = train(target, tmp_path, text, "--resume_from_checkpoint", str(checkpoint))
    assert moved["first_step"] == STOP
    assert len(moved["losses"]) == STEPS - STOP
    assert moved["losses"] == pytest.approx(of_source["losses"][STOP:], abs=1e-5)
    # a checkpoint that was not read would start again near ln(384), which is far from there
    assert of_source["losses"][0] - of_source["losses"][STOP] > 0.1
    resumed = moved["resumed_from"]
    assert (resumed["strategy"], resumed["num_processes"], resumed["step"]) == (*source, STOP)
    assert (
        f"written under {source[0]} x {source[1]}, resumed under {target[0]} x {target[1]}" in moved["said"]
    )


def test_a_checkpoint_of_any_strategy_is_written_as_a_model(stayed: Stayed, tmp_path: Path) -> None:
    weights = {}
    for place in (("ddp", 2), ("ds_zero3", 2)):
        _, checkpoint = stayed(place)
        words = ("convert", str(checkpoint), "--to", "hf_model", "--output", str(tmp_path / place[0]))
        done = slm_here(*words)
        assert done.code == 0, done.err
        assert f"step {STOP}, 951,424 parameters, written under {place[0]} x 2" in done.out
        weights[place[0]] = load_file(tmp_path / place[0] / "model.safetensors")
        again = slm_here(*words)
        assert (again.code, "nothing is overwritten" in again.err) == (2, True)
    for name, tensor in weights["ddp"].items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, weights["ds_zero3"][name], atol=1e-4, rtol=0), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "ds_zero3")
