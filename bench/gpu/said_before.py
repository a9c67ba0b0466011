"""Write into results/GPU/arms.jsonl what `slm estimate` printed for each arm on the day of its measurement.

    python bench/gpu/said_before.py results/h200 results/h100-80gb

"Before" means the last commit before an arm began, with the calibration that was in it. The command of that
commit runs in a worktree of its own. It fills `estimated_*` and `estimated_by` (commit and day) of each arm
with a closed form, so that tables show what the command said, not what today's forms say.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ESTIMATED, words_of_estimate

ROOT = Path(__file__).resolve().parent.parent.parent


def git(*words: str) -> str:
    ended = subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True)
    return ended.stdout.strip()


def answer(worktree: Path, words: list[str]) -> dict[str, Any] | None:
    """Return what the command of a worktree prints; None without a closed form."""
    run = "from slm_toolkit.cli.main import main; main()"
    variables = {name: value for name, value in os.environ.items() if name != "SLM_CALIBRATION"}
    env = {**variables, "PYTHONPATH": str(worktree)}
    ended = subprocess.run(
        (sys.executable, "-c", run, "estimate", *words), cwd=worktree, env=env, capture_output=True, text=True
    )
    return json.loads(ended.stdout)[0] if ended.returncode == 0 else None


def replay(file: Path, worktrees: dict[str, Path], folder: Path) -> None:
    arms = [json.loads(line) for line in file.read_text().splitlines()]
    for arm in arms:
        result = arm["result"]
        if "slm_toolkit.train" not in arm["command"] or "started_at" not in result:
            continue
        commit, day = git("log", "-1", f"--before={result['started_at']}", "--format=%h %cs").split()
        if commit not in worktrees:
            worktrees[commit] = folder / commit
            git("worktree", "add", "--detach", str(worktrees[commit]), commit)
        flags = tuple(arm["command"][arm["command"].index("slm_toolkit.train") + 1 :])
        on = (result["strategy"], str(result["world_size"]), file.parent.name)
        said = answer(worktrees[commit], words_of_estimate(flags, *on))
        if said is not None:
            result |= {f"estimated_{name}": said[name] for name in ESTIMATED}
            result["estimated_by"] = f"{commit} {day}"
    file.write_text("".join(json.dumps(arm) + "\n" for arm in arms))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="folders of results/ with an arms.jsonl")
    args = parser.parse_args()
    worktrees: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for each in args.folders:
                replay(each.resolve() / "arms.jsonl", worktrees, Path(folder))
        finally:
            for worktree in worktrees.values():
                git("worktree", "remove", "--force", str(worktree))


if __name__ == "__main__":
    main()
