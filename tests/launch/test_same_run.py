"""What tells one run's checkpoints from another's: nobody's are replaced, and the data is that of before."""

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from accelerate import Accelerator
from conftest import ENV, ROOT, launch, made_record, record_under, run, slm
from transformers import LlamaConfig, LlamaForCausalLM

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.record.files import write_record
from slm_toolkit.record.saved_files import model_damage
from slm_toolkit.run.checkpoint.files import FORMAT, Manifest, digest_of, read_manifest
from slm_toolkit.run.checkpoint.output_dir import save_model
from slm_toolkit.run.data.data import load_data

SHORT = ("--model", "slm-1m", "--seq_len", "32", "--run_name", "run", "--numerics", "fp32")


TWO = ("--max_steps", "2", "--save_steps", "2")
AUTO, LATEST = (("--resume_from_checkpoint", where) for where in ("auto", "latest"))


def train(folder: Path, *words: str, batch: tuple[int, int] = (2, 1), code: int = 0) -> str:
    """Train in `folder`/run; check the exit code, and return stderr."""
    size, micro_steps = map(str, batch)
    shape = ("--per_device_train_batch_size", size, "--gradient_accumulation_steps", micro_steps)
    flags = (*SHORT, *shape, "--output_dir", str(folder), *words)
    done = run(sys.executable, "-m", "slm_toolkit.train", *flags)
    assert done.code == code, done.err
    return done.err


def texts(file: Path, seed: int, num_rows: int = 400) -> str:
    draw = random.Random(seed)
    rows = [" ".join(str(draw.randrange(10**6)) for _ in range(12)) for _ in range(num_rows)]
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(file)


def test_another_runs_checkpoints_are_not_replaced(tmp_path: Path) -> None:
    train(tmp_path, *TWO)
    before = read_manifest(tmp_path / "run" / "checkpoints" / "step_2")
    for other in (("--seed", "7"), ("--gradient_accumulation_steps", "2")):
        said = train(tmp_path, *TWO, *other, code=2)
        assert "step_2 belongs to another run: " in said
    assert read_manifest(tmp_path / "run" / "checkpoints" / "step_2") == before


def test_a_checkpoint_from_before_a_flag_came_or_left_resumes_with_its_default(tmp_path: Path) -> None:
    train(tmp_path, *TWO)
    path = tmp_path / "run" / "checkpoints" / "step_2" / "checkpoint.json"
    content = json.loads(path.read_text())
    del content["run"]["pad_widths"]
    content["run"]["adam_dtype"] = None  # a flag that has left since
    del content["format"], content["sha256"]
    path.write_text(json.dumps({"format": FORMAT, "sha256": digest_of(content), **content}))
    again = ("--max_steps", "4", "--save_steps", "2", *LATEST)
    refused = train(tmp_path, *again, "--pad_widths", "true", code=2)
    assert "pad_widths False in the checkpoint, True now" in refused
    train(tmp_path, *again)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Of each file below a folder, but for the lock that a start takes: its size and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".train.lock"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.quick
def test_a_repeated_command_is_refused_and_names_both_ways_on(tmp_path: Path) -> None:
    words = ("--max_steps", "2", "--save_steps", "1")
    run_dir = tmp_path / "run"
    train(tmp_path, *words)
    before = contents(tmp_path)
    said = train(tmp_path, "--max_steps", "2", code=2)  # without --save_steps a model could still replace it
    assert f"error: {run_dir} contains checkpoints of this run, and a new start would replace them" in said
    assert "--resume_from_checkpoint latest resumes from step_2; --overwrite_output_dir deletes" in said
    assert "checkpoints of this run, which has ended, and a new" in train(tmp_path, *words, code=2)
    assert contents(tmp_path) == before
    manifest = run_dir / "checkpoints" / "step_2" / "checkpoint.json"
    (run_dir / "checkpoints" / "step_1" / "checkpoint.json").unlink()
    manifest.write_text("{")
    said = train(tmp_path, "--max_steps", "2", code=2)
    assert f"error: {manifest.parent} can't be read, and a new start" in said


def test_a_saved_model_is_deleted_only_by_a_run_that_may_and_can_start(tmp_path: Path) -> None:
    words = ("--max_steps", "2", "--save_final_model", "true")
    train(tmp_path, *words)
    (tmp_path / "short.txt").write_text("too short")
    before, anew = contents(tmp_path), "--overwrite_output_dir"
    said = train(tmp_path, *words, "--seed", "7", code=2)
    assert f"error: {tmp_path}/run/model is the model of an earlier run, and a new start" in said
    # found out when the engine has been built
    said = train(tmp_path, *words, anew, "--dataset", str(tmp_path / "short.txt"), code=2)
    assert "Traceback" not in said
    own = str(tmp_path / "run" / "model")
    said = train(tmp_path, "--max_steps", "1", anew, "--model", own, code=2)
    assert "this run saves its final model there" in said
    assert contents(tmp_path) == before
    train(tmp_path, "--max_steps", "1", anew)
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_that_overwrites_goes_on_from_its_own_checkpoints_alone(tmp_path: Path) -> None:
    """Two ranks; one is killed after the fifth step, and torch's launcher starts both again."""
    flags = (*SHORT, "--output_dir", str(tmp_path), "--save_steps", "5")
    config = ("--config_file", str(ROOT / "accel_configs" / "ddp.yaml"))
    assert launch(*flags, "--max_steps", "20", config=config[1]).code == 0
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = [accelerate, "launch", "--main_process_port", "0", "--max_restarts", "1", *config]
    command += ["-m", "slm_toolkit.train", *flags, "--max_steps", "15", "--seed", "7"]
    command += ["--overwrite_output_dir"]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True)
    said, was_killed = [], False
    for line in process.stderr:
        said.append(line)
        if not was_killed and line.startswith("checkpoint: "):
            was_killed = True
            assert not (tmp_path / "run" / "checkpoints" / "step_20").exists()
            psutil.Process(process.pid).children()[-1].kill()
    assert process.wait() == 0, "".join(said)
    assert was_killed
    resumed = [line for line in said if line.startswith("resumed from ")]
    assert len(resumed) == 1
    record = record_under(tmp_path)
    assert record["first_step"] in (5, 10)  # what was the newest when the kill came
    assert record["asked"]["config"]["seed"] == 7
    newest = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(newest) == ["step_10", "step_15"]


def test_a_comparison_goes_on_with_unfinished_runs_and_replaces_no_model(tmp_path: Path) -> None:
    words = ("compare", "--model", "slm-1m", "--strategy", "ddp", "--output_dir", str(tmp_path))
    (command,) = json.loads(slm(*words, "--save_steps", "5", "--dry_run", "--json").out)
    assert "--resume_from_checkpoint auto" in command
    (command,) = json.loads(slm(*words, "--dry_run", "--json").out)
    folder = tmp_path / re.search(r"--run_name (\S+)", command)[1]
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    done = slm(*words)
    assert done.code == 2
    assert f"error: this comparison would replace {folder}/model of an earlier run" in done.err
    assert "hint: --overwrite_output_dir starts such runs again from the beginning, --force" in done.err
    assert (folder / "model" / "config.json").exists()


def test_auto_ends_a_run_that_was_killed_before_its_record(tmp_path: Path) -> None:
    words = (
        "--save_steps",
        "1",
        "--save_total_limit",
        "1",
        "--eval_steps",
        "2",
        "--save_final_model",
        "true",
    )
    words += ("--dataset", texts(tmp_path / "a.jsonl", 0), "--num_train_epochs", "0.01")
    train(tmp_path / "runs", *words)
    whole = record_under(tmp_path / "runs")
    (tmp_path / "runs" / "run" / "record.json").unlink()
    train(tmp_path / "runs", *words, *AUTO)
    record = record_under(tmp_path / "runs")
    assert (record["status"], record["first_step"], record["losses"]) == ("ok", len(whole["losses"]), [])
    assert record["eval_losses"] == whole["eval_losses"][-1:]
    assert record["model_dir"] == whole["model_dir"]
    assert train(tmp_path / "runs", *words, *AUTO).count("note: this run has ended: ") == 1
    assert record_under(tmp_path / "runs") == record
    latest = train(tmp_path / "runs", *words, *LATEST, code=2)
    assert f"has all {len(whole['losses'])} steps done" in latest


def test_data_that_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    words = ("--dataset", texts(file, 0), "--save_steps", "2")
    train(tmp_path / "runs", *words, "--max_steps", "2")
    resume = (*words, "--max_steps", "4", *LATEST)
    texts(file, 1)
    assert "error: the data has changed since " in train(tmp_path / "runs", *resume, code=2)
    texts(file, 0, num_rows=100)
    assert "step_2 was written: " in train(tmp_path / "runs", *resume, code=2)
    texts(file, 0)
    train(tmp_path / "runs", *resume)


@pytest.mark.quick
@pytest.mark.parametrize("streaming", [False, True])
def test_a_stream_is_told_apart_by_its_first_sequence(streaming: bool, tmp_path: Path) -> None:
    contents = []
    for seed in (0, 0, 1):
        data = {"streaming": streaming, "dataset": texts(tmp_path / f"{seed}.jsonl", seed)}
        config = RunConfig(model="slm-1m", seq_len=32, **data).with_defaults(has_gpu=False)
        contents.append(load_data(config, PRESETS["slm-1m"], num_sequences=8).contents)
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("taken", ["runs", "runs/run"])
def test_a_place_that_takes_no_run_is_a_line(taken: str, tmp_path: Path) -> None:
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("a file")
    said = train(tmp_path / "runs", "--max_steps", "2", code=2)
    assert f"error: can't write into {tmp_path}/runs/run: " in said
    assert "Traceback" not in said.partition("hint: ")[0]


@pytest.mark.quick
def test_checkpoints_that_cannot_be_read_are_no_reason_to_start_anew(tmp_path: Path) -> None:
    train(tmp_path, *TWO)
    manifest = tmp_path / "run" / "checkpoints" / "step_2" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format": FORMAT + 1}))
    said = train(tmp_path, "--max_steps", "4", *AUTO, code=2)
    assert f"has format {FORMAT + 1}, but this version reads {FORMAT}" in said
    assert "none of the 1 checkpoints under " in said
    manifest.write_text(json.dumps(content))
    # the folder of all is the run's
    train(tmp_path, "--max_steps", "4", "--resume_from_checkpoint", str(manifest.parent.parent))


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes", [{"step": 10**17}, {"files": [{"name": "../rank_0.safetensors"}]}, {"frozen": "changed"}]
)
def test_a_manifest_that_was_changed_is_refused(changes: dict, tmp_path: Path) -> None:
    file = {
        "name": "rank_0.safetensors",
        "num_bytes": 4,
        "sha256": "0",
        "starts": {"a": 0},
        "sizes": {"a": 1},
    }
    by = {"strategy": "ddp", "num_processes": 1}
    by |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    good = dataclasses.asdict(Manifest(2, 2, 1, {"data": []}, by, None, None, {"a": 1}, ()))
    good["files"] = [file]

    def write(changes: dict) -> None:
        content = {"format": FORMAT, "sha256": digest_of(good), **good, **changes}
        (tmp_path / "checkpoint.json").write_text(json.dumps(content))

    write({})
    assert read_manifest(tmp_path).step == 2
    write(changes)
    with pytest.raises(ValueError, match="has changed since it was written"):
        read_manifest(tmp_path)


def small_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 384}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))


@pytest.mark.quick
def test_a_model_is_there_until_the_next_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, accelerator, folder = small_model(), Accelerator(cpu=True), tmp_path / "model"
    save_model(accelerator, model, None, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert json.loads(before["slm_toolkit.json"])["files"] == sorted(before)
    whole = model.save_pretrained

    def break_off(place: Path, **options: object) -> None:
        whole(place, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", break_off)
    with pytest.raises(OSError, match="No space"):
        save_model(accelerator, model, None, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    folder.rename(tmp_path / ".model.replaced")  # as a kill between two renames leaves it
    save_model(accelerator, model, None, folder)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.quick
def test_no_model_takes_the_place_of_what_no_run_wrote(tmp_path: Path) -> None:
    """A link, a folder of somebody else's, one with a file more: nothing of theirs is opened or deleted."""
    model, accelerator = small_model(), Accelerator(cpu=True)
    precious, folder = tmp_path / "precious", tmp_path / "model"
    precious.mkdir()
    (precious / "config.json").write_text("mine")
    before = contents(tmp_path)
    for name in ("model", ".model.replaced"):
        (tmp_path / name).symlink_to(precious)
        with pytest.raises(RunEnded, match=f"{name} is a link, and a run never replaces"):
            save_model(accelerator, model, None, folder)
        (tmp_path / name).unlink()
    (tmp_path / ".model.unfinished").symlink_to(precious)
    save_model(accelerator, model, None, folder)
    assert not folder.is_symlink()
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(
        RunEnded,
        match=r"model/notes/mine\.txt was not written by a run, and saving the model would delete it",
    ):
        save_model(accelerator, model, None, folder)
    with pytest.raises(RunEnded, match=r"config\.json was not written by a run"):
        save_model(accelerator, model, None, precious)
    assert (folder / "notes" / "mine.txt").read_text() == "mine"
    assert contents(precious) == before


@pytest.mark.quick
def test_model_and_record_are_on_the_disk_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loss of power would leave: every file, and every folder's names, in the order of renames."""
    happened: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        happened.append(("fsync", os.fstat(descriptor).st_ino))

    def noted_rename(source: Path, target: Path) -> None:
        rename(source, target)
        happened.append(("rename", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    monkeypatch.setattr(os, "replace", noted_rename)
    save_model(Accelerator(cpu=True), small_model(), None, tmp_path / "model")
    model = (tmp_path / "model").stat().st_ino
    files = {path.stat().st_ino for path in (tmp_path / "model").iterdir()}
    assert len(files) == 4  # config, generation_config, weights, the list of these
    assert set(happened[:4]) == {("fsync", file) for file in files}
    assert happened[4:] == [("fsync", model), ("rename", model), ("fsync", tmp_path.stat().st_ino)]
    happened.clear()
    record = write_record(made_record(), tmp_path).stat().st_ino
    assert happened == [("fsync", record), ("rename", record), ("fsync", tmp_path.stat().st_ino)]


def test_auto_saves_a_model_again_of_which_nothing_is_left(tmp_path: Path) -> None:
    words = ("--max_steps", "2", "--save_steps", "1", "--save_final_model", "true", *AUTO)
    train(tmp_path, *words)
    model = tmp_path / "run" / "model"
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for path in model.iterdir():  # as a file system leaves files that were not on the disk yet
        path.write_bytes(b"")
    assert f"note: this run has ended, but {model}/config.json is empty" in train(tmp_path, *words)
    after = {path.name: path.read_bytes() for path in model.iterdir()}
    assert after == before
    assert f"note: this run has ended: {tmp_path}" in train(tmp_path, *words)
    (model / "model.safetensors").unlink()
    assert model_damage(model) == f"{model}/model.safetensors is missing"
