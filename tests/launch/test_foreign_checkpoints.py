"""Checkpoints of accelerate and DeepSpeed, written without this package, continue here under any engine."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import COMPILING_SECONDS, ROOT, Finished, launch, record_under, run, slm
from safetensors.torch import load_file, save_file

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.names import find_model
from slm_toolkit.run.model.model import build_model

sys.path.insert(0, str(ROOT / "bench"))
from rivals.work import write_work

SAVED_AT, NUM_STEPS = 5, 15
WITHIN = 1e-5
"of the losses in fp32: sums over ranks are rounded in another order"
FLAGS = {
    **{"model": "slm-1m", "seq_len": 32, "numerics": "fp32", "seed": 3, "max_steps": NUM_STEPS},
    **{"learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0},
    **{"adam_beta2": 0.999, "max_grad_norm": 1.0, "per_device_train_batch_size": 2},
}


@dataclasses.dataclass(frozen=True)
class Theirs:
    """A training by accelerate alone: its checkpoint and the loss of every step."""

    folder: Path
    losses: list[float]


def trained_by_accelerate(folder: Path, engine: str, **more: object) -> Theirs:
    config = RunConfig(**FLAGS).with_defaults(has_gpu=False)
    work = write_work(folder / "work", config, num_processes=2)
    tokens = load_file(work["tokens"])["tokens"].reshape(NUM_STEPS, -1, FLAGS["seq_len"])
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    asked = {
        **{"engine": engine, "state_dict_type": "SHARDED_STATE_DICT", "numerics": "fp32"},
        **{"model": work["model"], "tokens": str(folder / "tokens.safetensors"), "first_step": 0},
        **{"save_at": SAVED_AT, "learning_rate": FLAGS["learning_rate"], "load": None},
        "num_groups": 1,
        **{"out": str(folder / "saved"), **more},
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    command = (*torchrun, str(ROOT / "tests" / "accelerate_alone.py"), str(folder / "asked.json"))
    done = run(*command, cold=True)
    if done.code != 0:  # torchrun picks a port that another launch may take before it does
        done = run(*command, cold=True)
    assert done.code == 0, done.err
    return Theirs(folder / "saved", json.loads((folder / "saved" / "losses.json").read_text()))


def trained_here(folder: Path, strategy: str, *more: str) -> tuple[Finished, dict]:
    words = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    words += ["--output_dir", str(folder), "--run_name", "run", *more]
    done = launch(*words, config=f"accel_configs/{strategy}.yaml", timeout=COMPILING_SECONDS)
    assert done.code == 0, done.err
    return done, record_under(folder)


@pytest.mark.parametrize(
    ("engine", "num_groups", "strategy"),
    [
        ("fsdp2", 2, "ddp"),
        ("zero3", 2, "ddp"),
        pytest.param("zero2", 2, "fsdp_full_shard", marks=pytest.mark.slow),
        pytest.param("zero1", 1, "ds_zero3", marks=pytest.mark.slow),
        pytest.param("zero3", 1, "ds_zero2", marks=pytest.mark.slow),
    ],
)
def test_their_checkpoint_continues_here_with_their_losses(
    engine: str, num_groups: int, strategy: str, tmp_path: Path
) -> None:
    theirs = trained_by_accelerate(tmp_path, engine, num_groups=num_groups)
    resume = ("--resume_from_checkpoint", str(theirs.folder))
    done, record = trained_here(tmp_path / "runs", strategy, *resume)
    assert record["first_step"] == SAVED_AT
    assert record["losses"] == pytest.approx(theirs.losses[SAVED_AT:], abs=WITHIN)
    assert len(record["losses"]) == NUM_STEPS - SAVED_AT
    (row,) = json.loads(slm("report", str(tmp_path / "runs"), "--json").out)
    assert (row["status"], row["first_step"]) == ("ok", SAVED_AT)
    assert f"note: {theirs.folder} is of " in done.err


@pytest.mark.parametrize(
    ("strategy", "form", "engine"),
    [
        pytest.param("ds_zero2", "fsdp_checkpoint", "fsdp2", marks=pytest.mark.slow),
        pytest.param("fsdp_full_shard", "ds_universal", "zero3", marks=pytest.mark.slow),
        pytest.param("ddp", "ds_universal", "zero2", marks=pytest.mark.slow),
    ],
)
def test_our_checkpoint_continues_with_accelerate_alone(
    strategy: str, form: str, engine: str, tmp_path: Path
) -> None:
    _, record = trained_here(
        tmp_path / "runs", strategy, "--save_steps", str(SAVED_AT), "--save_total_limit", "9"
    )
    ours = tmp_path / "runs" / "run" / "checkpoints" / f"step_{SAVED_AT}"
    done = slm("convert", str(ours), "--to", form, "--output", str(tmp_path / "theirs"))
    assert done.code == 0, done.err
    assert f"step {SAVED_AT}, 951,424 parameters, written under {strategy} x 2" in done.out
    theirs = trained_by_accelerate(tmp_path, engine, load=str(tmp_path / "theirs"), first_step=SAVED_AT)
    assert theirs.losses == pytest.approx(record["losses"][SAVED_AT:], abs=WITHIN)


def test_the_same_command_again_replaces_no_checkpoint(tmp_path: Path) -> None:
    """A folder as FSDP with FULL_STATE_DICT writes it, of the model that `--model slm-1m` is."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    config = RunConfig(**FLAGS).with_defaults(has_gpu=False)
    params = dict(build_model(find_model("slm-1m"), config).named_parameters())
    weights = {name: param.detach().clone() for name, param in params.items()}
    state = {
        name: {
            "exp_avg": torch.zeros_like(value),
            "exp_avg_sq": torch.ones_like(value),
            "step": torch.tensor(9.0),
        }
        for name, value in weights.items()
    }
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    torch.save({"state": state, "param_groups": [{"lr": 1e-3}]}, folder / "optimizer.bin")
    more = ("--save_steps", "2", "--resume_from_checkpoint", str(folder))
    _, record = trained_here(tmp_path / "runs", "single", *more)
    assert record["first_step"] == 9
    saved = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    words = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    words += ["--output_dir", str(tmp_path / "runs"), "--run_name", "run", *more]
    again = launch(*words, config="accel_configs/single.yaml")
    assert again.code != 0
    assert "a new start would replace them" in again.err
    assert "--resume_from_checkpoint latest" in again.err
    newest = [path for path in saved if "checkpoints" in path.parts]
    assert newest
    assert all(path.stat().st_mtime_ns == saved[path] for path in newest)
