"""`slm train` refuses before its ranks start, and without torch, what the ranks would refuse."""

import json
from pathlib import Path

import pytest
from conftest import slm_here

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.checkpoint.files import DATA, Manifest, finish, unfinished
from slm_toolkit.run.checkpoint.start import launch_description, run_description
from slm_toolkit.strategy.strategy import find_strategy

CONFIG = RunConfig(model="slm-1m", max_steps=4, save_steps=2)
ASKED = ("train", "--model", "slm-1m", "--max_steps", "4", "--save_steps", "2", "--run_name", "r")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Folder of runs: run `r` has the checkpoint of step 4, written by two ranks with 4 sequences each."""
    folder = tmp_path / "r" / "checkpoints"
    config = CONFIG.with_defaults(has_gpu=False)
    unfinished(folder, 4, "a").mkdir(parents=True)
    manifest = Manifest(
        step=4,
        optimizer_steps=4,
        order=1,
        run=json.loads(json.dumps({**run_description(config, 8), DATA: []})),
        written_by=launch_description(config, find_strategy("ddp"), 2),
        frozen=None,
        scaler=None,
        num_elements={},
        files=(),
    )
    finish(unfinished(folder, 4, "a"), manifest)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "/r contains checkpoints of this run, and a new start would replace them\n"),
        (("--resume_from_checkpoint", "runs/none"), "runs/none contains no checkpoint of slm_toolkit\n"),
        (("--resume_from_checkpoint", "{out}/r"), "/checkpoints/step_4 has all 4 steps done\n"),
        (
            ("--resume_from_checkpoint", "latest", "--num_processes", "3"),
            "belongs to another run: sequences_per_step 8 in the checkpoint, 12 now\n",
        ),
        (("--resume_from_checkpoint", "latest", "--seed", "1"), "belongs to another run: seed 0 in the "),
        (("--run_name", "new", "--dataset", "org/none"), "no cached copy of the dataset 'org/none'\n"),
        (
            ("--run_name", "new", "--dataset", "README.md", "--tokenizer_name", "none"),
            "no cached copy of the tokenizer 'none'\n",
        ),
    ],
)
def test_what_the_ranks_would_refuse_is_refused_before_they_start(
    out: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = slm_here(*ASKED, "--output_dir", str(out), *(flag.format(out=out) for flag in flags))
    assert ended.code == 2
    assert says in ended.err
    assert ended.err.startswith("error: ")
    assert "accelerate launch" not in ended.err


def test_what_is_no_whole_model_is_not_written_as_one(out: Path) -> None:
    for source, says in (
        ("r", "step_4 is not of the model that slm-1m is now"),
        (".", "contains no checkpoint of slm_toolkit"),
    ):
        done = slm_here("convert", str(out / source), "--to", "hf_model", "--output", str(out / "model"))
        assert (done.code, says in done.err) == (2, True), done.err
    assert not (out / "model").exists()
