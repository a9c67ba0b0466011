"""A run goes on from its checkpoints: from the newest that is whole, under flags that continue it."""

import os
from pathlib import Path

import pytest
from conftest import COMPILING_SECONDS, launch, record_under

from slm_toolkit.record.saved_files import finished
from slm_toolkit.run.checkpoint.files import damage, read_manifest

SINGLE = "accel_configs/single.yaml"
SHORT = ("--model", "slm-1m", "--seq_len", "32", "--run_name", "run")


def train(folder: Path, *more: str, strategy: str = "single") -> dict:
    words = (*SHORT, "--output_dir", str(folder), *more)
    done = launch(*words, config=f"accel_configs/{strategy}.yaml", timeout=COMPILING_SECONDS)
    assert done.code == 0, done.err
    return {**record_under(folder), "said": done.err}


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("fsdp_full_shard", ("--peft", "lora", "--lora_dropout", "0.3")),
        ("ds_zero2_offload", ()),
        pytest.param("ds_zero3_nvme", (), marks=[pytest.mark.nvme, pytest.mark.slow]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(
                    (strategy, ("--numerics", numerics))
                    for strategy in ("ddp", "ds_zero1", "ds_zero3", "fsdp_full_shard")
                    for numerics in ("aligned", "stock", "pure_bf16")
                ),
                ("ds_zero2", ("--peft", "qlora")),
                ("ds_zero3_offload", ()),
                ("ds_zeropp", ()),
                ("fsdp_full_shard_offload", ()),
                ("fsdp_hybrid_shard", ("--kernels", "compile")),
                ("fsdp_shard_grad_op", ()),
                ("single", ("--optim", "adamw_torch")),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "_".join(value).replace("--", ""),
)
def test_other_engines_and_flags_resume_bit_by_bit(
    strategy: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    # from the sixth step on, the powers of AdamW's betas are rounded by how they came about
    flags += ("--max_steps", "10", "--save_steps", "8")
    whole = train(tmp_path / "a", *flags, strategy=strategy)
    checkpoint = str(tmp_path / "a" / "run" / "checkpoints" / "step_8")
    resumed = train(tmp_path / "b", "--resume_from_checkpoint", checkpoint, *flags, strategy=strategy)
    assert len(resumed["losses"]) == 2
    assert resumed["losses"] == whole["losses"][8:]


def test_a_stream_resumes_where_it_stopped(tmp_path: Path, texts: Path) -> None:
    flags = ("--max_steps", "6", "--dataset", str(texts), "--streaming", "--save_steps", "4")
    flags += ("--eval_steps", "6", "--eval_batches", "1")
    whole = train(tmp_path / "a", *flags, strategy="ddp")
    resume = ("--resume_from_checkpoint", str(tmp_path / "a/run/checkpoints/step_4"))
    resumed = train(tmp_path / "b", *flags, *resume, strategy="ddp")
    assert resumed["losses"] == whole["losses"][4:]
    assert resumed["eval_losses"] == whole["eval_losses"]


@pytest.mark.quick
def test_latest_is_the_newest_that_is_whole_and_the_others_are_named(tmp_path: Path) -> None:
    whole = train(tmp_path, "--max_steps", "8", "--save_steps", "2", "--save_total_limit", "3")
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_4", "step_6", "step_8"]
    weights = folder / "step_8" / "rank_0.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    (folder / "step_6" / "checkpoint.json").write_text("{")
    (folder / ".step_10.unfinished").mkdir()

    resumed = train(tmp_path, "--max_steps", "8", "--resume_from_checkpoint", "latest")
    assert resumed["losses"] == whole["losses"][4:]
    said = [line for line in resumed["said"].splitlines() if line.startswith("warning: ")]
    assert len(said) == 2
    skipped = "skipped the damaged checkpoint"
    assert f"{skipped} {folder}/step_6: " in said[0]
    assert f"{skipped} {folder}/step_8: {weights} has changed since it was written" in said[1]

    (folder / "step_4" / "rank_0.safetensors").write_bytes(b"")
    done = launch(*SHORT, "--output_dir", str(tmp_path), "--resume_from_checkpoint", "latest", config=SINGLE)
    assert done.code != 0
    assert f"every checkpoint under {folder} is damaged" in done.err


@pytest.mark.quick
def test_a_run_only_goes_on_from_what_it_can_continue(tmp_path: Path) -> None:
    train(tmp_path, "--max_steps", "4", "--save_steps", "4")
    run = tmp_path / "run"

    def refused(*more: str, strategy: str = "single") -> str:
        words = ("--output_dir", str(tmp_path / "new"), "--max_steps", "8", *more)
        done = launch(*SHORT, *words, config=f"accel_configs/{strategy}.yaml")
        assert done.code != 0
        assert not (tmp_path / "new").exists()
        return done.err

    assert "step_4 has all 4 steps done" in refused("--resume_from_checkpoint", str(run), "--max_steps", "4")
    other = refused("--resume_from_checkpoint", str(run), "--seed", "1", "--numerics", "fp32")
    assert "step_4 belongs to another run: numerics 'aligned' in the checkpoint, 'fp32' now; seed 0" in other
    more = refused("--resume_from_checkpoint", str(run), strategy="ddp")
    assert "sequences_per_step 4 in the checkpoint, 8 now" in more
    assert "no checkpoint under" in refused("--resume_from_checkpoint", "latest")

    # auto starts where there is no checkpoint, not where there is one of another run
    there = ("--output_dir", str(tmp_path), "--max_steps", "3", "--save_steps", "1", "--seed", "7")
    refused_too = launch(*SHORT, *there, "--resume_from_checkpoint", "auto", config=SINGLE)
    assert "step_4 belongs to another run: seed 0 in the checkpoint, 7 now" in refused_too.err


def test_a_checkpoint_is_there_at_every_moment_of_its_replacement(tmp_path: Path) -> None:
    """What the folder looks like after a kill between any two of the renames."""
    train(tmp_path, "--max_steps", "2", "--save_steps", "2")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step_2").rename(folder / ".step_2.replaced")  # the new one was to follow
    resumed = train(tmp_path, "--max_steps", "4", "--save_steps", "1", "--resume_from_checkpoint", "latest")
    assert resumed["first_step"] == 2
    assert [path.name for path in finished(folder)] == ["step_3", "step_4"]
    for checkpoint in finished(folder):
        assert damage(checkpoint, read_manifest(checkpoint).files) is None
    assert sorted(path.name for path in folder.iterdir()) == ["step_3", "step_4"]
    # killed after its last checkpoint, before its record, a run does its last steps again
    (tmp_path / "run" / "record.json").unlink()
    words = ("--max_steps", "4", "--save_steps", "1", "--resume_from_checkpoint")
    again = train(tmp_path, *words, "auto")
    assert (again["first_step"], again["losses"]) == (3, resumed["losses"][1:])
    # or what comes after them, where the checkpoint before is damaged, or where `latest` is asked for
    (tmp_path / "run" / "record.json").unlink()
    weights = folder / "step_3" / "rank_0.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    for name in (".step_2.deleted", ".step_5.0a1b.unfinished"):  # what kills leave is swept meanwhile
        (folder / name).mkdir()
    for name in ("progress.new", ".record.json.host.123"):
        (tmp_path / "run" / name).write_text("half")
    again = train(tmp_path, *words, "auto")
    assert (again["status"], again["first_step"], again["losses"]) == ("ok", 4, [])
    assert f"warning: skipped the damaged checkpoint {folder}/step_3" in again["said"]
    assert sorted(os.listdir(tmp_path / "run")) == [
        ".train.lock",
        "checkpoints",
        "record.json",
    ]
    assert sorted(os.listdir(folder)) == ["step_3", "step_4"]
    (tmp_path / "run" / "record.json").unlink()
    again = train(tmp_path, *words, "latest", "--save_final_model", "true")
    assert (again["first_step"], again["model_dir"]) == (4, f"{tmp_path}/run/model")
    done = launch(*SHORT, "--output_dir", str(tmp_path), *words, "latest", config=SINGLE)
    assert "step_4 has all 4 steps done" in done.err
