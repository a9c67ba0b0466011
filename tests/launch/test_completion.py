"""`slm completion`: its script, tried in a real bash with a terminal."""

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, slm_here

from slm_toolkit.cli import completion

pytestmark = pytest.mark.quick


def typed_in_bash(script: Path, keys: str, *, until: str) -> str:
    """What a terminal shows after `keys` were typed at the prompt of a bash that sourced the script."""
    main, other = pty.openpty()
    env = {**os.environ, "PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null"}
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=other, stdout=other, stderr=other, env=env, cwd=ROOT
    )
    os.close(other)
    try:
        os.write(main, f"source {script}; echo rea''dy\n".encode())
        shown_until(main, "ready\r\n$ ")
        os.write(main, keys.encode())
        return shown_until(main, until)
    finally:
        bash.kill()
        bash.wait()
        os.close(main)


def shown_until(terminal: int, text: str) -> str:
    """What the terminal shows until `text`, or for 20 seconds."""
    shown, deadline = "", time.monotonic() + 20
    while text not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096).decode()
    return shown


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab")
    path = tmp_path_factory.mktemp("completion") / "slm.bash"
    path.write_text(slm_here("completion", "bash").out)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("keys", "completed"),
    [
        ("slm est\t", "slm estimate "),
        ("slm train --gradient_ch\t", "slm train --gradient_checkpointing "),
        ("slm train --peft ql\t", "slm train --peft qlora "),
        ("slm compare --strategy ddp fsdp_h\t", "fsdp_hybrid_shard "),
        ("slm estimate --gpu h2\t", "h200 "),
        ("slm train --dataset READ\t", "README.md "),
        ("slm estimate --prices pypr\t", "pyproject.toml "),
    ],
)
def test_tab_completes_verbs_flags_values_and_files(script: Path, keys: str, completed: str) -> None:
    assert completed in typed_in_bash(script, keys, until=completed)


def test_the_script_for_zsh_names_every_verb() -> None:
    pytest.importorskip("shtab")
    text = slm_here("completion", "zsh").out
    assert text.startswith("#compdef slm\n")
    assert all(f"    {verb}:" in text for verb in ("train", "compare", "doctor"))


def test_without_shtab_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion.importlib.util, "find_spec", lambda name: None)
    done = slm_here("completion", "bash")
    assert (done.code, done.err) == (2, "error: shtab is not installed\nhint: pip install shtab\n")
