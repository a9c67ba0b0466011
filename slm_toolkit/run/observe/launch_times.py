"""Note how a launch spends its wall time, in a file that a kill leaves behind for the run's next launch."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.record.goodput import LaunchTimes, SavedAt
from slm_toolkit.record.saved_files import LAUNCHES_FILE
from slm_toolkit.run.peers.failure import seconds_since_start

Activity = Literal["starting", "steps", "saving", "other"]
_SECONDS_BETWEEN_NOTES = 0.25
"a kill hides at most this much of a launch; writing a note takes 0.1 ms"


class LaunchNotes:
    """The wall time of this launch and of the run's earlier launches, by activity.

    If the file can't be read or written, the times are unknown, and `launches` is empty.
    """

    def __init__(self, run_dir: Path, *, first_step: int, resumed: bool, goes_on: bool, keep: int) -> None:
        """Begin the notes of this launch.

        `resumed`: a checkpoint of this folder was loaded. `goes_on`: this launch does the work of earlier
        launches in this folder, whether one of them left a checkpoint or not. `keep`: the number of newest
        checkpoints to note.
        """
        self._path, self._keep = run_dir / LAUNCHES_FILE, keep
        self._is_known = True
        self._earlier: list[LaunchTimes] = []
        if resumed or (goes_on and self._path.exists()):
            try:
                self._earlier = _DECODER.decode(self._path.read_bytes())
            except (OSError, msgspec.DecodeError):  # an older version wrote the checkpoint, or a damaged file
                self._is_known = False
        self._first_step = self._last_step = first_step
        started_at = datetime.now(UTC) - timedelta(seconds=seconds_since_start())
        self._started_at = started_at.isoformat(timespec="seconds")
        self._seconds: dict[Activity, float] = {"starting": 0.0, "steps": 0.0, "saving": 0.0, "other": 0.0}
        self._activity: Activity = "starting"
        self._since = 0.0
        "seconds since the start of this process when the activity began"
        self._saved_at: list[SavedAt] = []
        self.write()

    @property
    def launches(self) -> list[LaunchTimes]:
        """Return the times of all launches of the run until now; empty if unknown."""
        return [*self._earlier, self._this_launch()] if self._is_known else []

    def begin(self, activity: Activity) -> None:
        """Count the time from now on as this activity."""
        now = seconds_since_start()
        self._seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now

    def end_step(self, num_steps: int) -> None:
        """Note that `num_steps` steps of the run are done."""
        self._last_step = num_steps
        if time.monotonic() - self._written >= _SECONDS_BETWEEN_NOTES:
            self.write()

    def save(self, step: int) -> None:
        """Note that a checkpoint of the state after `step` is being written; the activity is saving."""
        self._last_step = step
        self._saved_at = [*self._saved_at, SavedAt(step=step, step_seconds=self._seconds["steps"])]
        self._saved_at = self._saved_at[-self._keep :]
        self.write()

    def _this_launch(self) -> LaunchTimes:
        self.begin(self._activity)
        return LaunchTimes(
            started_at=self._started_at,
            first_step=self._first_step,
            last_step=self._last_step,
            seconds=sum(self._seconds.values()),
            start_seconds=self._seconds["starting"],
            step_seconds=self._seconds["steps"],
            saving_seconds=self._seconds["saving"],
            saved_at=self._saved_at,
        )

    def write(self) -> None:
        """Write the file, so that a later launch of the run knows the times until now."""
        self._written = time.monotonic()
        if not self._is_known:
            return
        unfinished = self._path.with_suffix(".new")
        try:
            write_new(unfinished, json.dumps(self.launches))
            unfinished.replace(self._path)
        except OSError:  # only a report needs the file
            self._is_known = False


class NoLaunchNotes:
    """The notes of ranks other than 0, and of a run whose times are not known: none."""

    launches: tuple[()] = ()

    def begin(self, activity: Activity) -> None:
        pass

    def end_step(self, num_steps: int) -> None:
        pass

    def save(self, step: int) -> None:
        pass

    def write(self) -> None:
        pass


_DECODER = msgspec.json.Decoder(list[LaunchTimes])
