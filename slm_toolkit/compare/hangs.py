"""What the ranks of a run that does not end are doing: which one hangs, and where."""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.compare.supervisor import processes_of
from slm_toolkit.launch.lost_ranks import place_of, waits_for_others
from slm_toolkit.record.run_record import STACK_FILES

_SECONDS_BETWEEN_LOOKS = 1.0
_HEADING = "Stack (most recent call first):"


@dataclass(frozen=True)
class RankStack:
    """A rank's Python frames at two instants, innermost first, as `file:line in function`."""

    rank: int
    frames: tuple[str, ...]
    "of the second look; empty where the rank did not answer: it is stopped, or deep in the kernel"
    has_moved: bool

    @property
    def is_waiting(self) -> bool:
        return waits_for_others(self.frames)

    @property
    def place(self) -> str:
        """The innermost frame, with the last two parts of its path."""
        return place_of(self.frames) if self.frames else "a call that does not answer signals"


def look_at_ranks(folder: Path) -> list[RankStack]:
    """Ask each living rank of the run in `folder` twice; those that end meanwhile are left out."""
    if not hasattr(signal, "SIGUSR1"):  # Windows
        return []
    files = {
        path: re.fullmatch(r"stack-rank(\d+)-(\d+)\.txt", path.name) for path in folder.glob(STACK_FILES)
    }
    looks: list[dict[Path, tuple[str, ...]]] = []
    for _ in range(2):
        sizes = {path: path.stat().st_size for path in files}
        living = {process.pid for process in processes_of(folder)}
        asked = [path for path, match in files.items() if int(match[2]) in living and _ask(int(match[2]))]
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        looks.append({path: _frames(path, sizes[path]) for path in asked})
    first, second = looks
    stacks = [
        RankStack(int(files[path][1]), second[path], has_moved=first[path] != second[path])
        for path in files
        if path in first and path in second
    ]
    return sorted(stacks, key=lambda stack: stack.rank)


def explain(stacks: list[RankStack]) -> str | None:
    """Who hung where while others waited; where that can't be told from a slow step, who was where."""
    stuck = [stack for stack in stacks if not stack.is_waiting]
    waiting = [stack for stack in stacks if stack.is_waiting]
    if stuck and waiting and not any(stack.has_moved for stack in stacks):
        hung = " and ".join(f"rank {stack.rank} hung in {stack.place}" for stack in stuck)
        return f"{hung}, while {_places(waiting)} waited"
    return f"last seen {_places(stacks)}" if stacks else None


def _places(stacks: list[RankStack]) -> str:
    by_place: dict[str, list[str]] = {}
    for stack in stacks:
        by_place.setdefault(stack.place, []).append(str(stack.rank))
    return ", ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} in {place}"
        for place, ranks in by_place.items()
    )


def _ask(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return False
    return True


def _frames(path: Path, from_byte: int) -> tuple[str, ...]:
    """What was written since, of the last stack in it."""
    written = path.read_bytes()[from_byte:].decode(errors="replace").rpartition(_HEADING)[2]
    return tuple(
        f"{file}:{line} in {function}"
        for file, line, function in re.findall(r'File "(.+)", line (\d+) in (\S+)', written)
    )
