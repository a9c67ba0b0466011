"""Take turns with the other runs of a comparison: `slm compare --take_turns`."""

import os

from slm_toolkit.base.turns import TURNS_VARIABLE, OwnTurns, own_turns
from slm_toolkit.run.faults.watchdog import Watchdog
from slm_toolkit.run.observe.launch_times import LaunchNotes, NoLaunchNotes
from slm_toolkit.run.observe.watch import RunWatch
from slm_toolkit.run.peers.step_exchange import gather_to_all


class NoTurns:
    """A run that does not share the machine."""

    are_taken = False

    def before_step(self, watch: RunWatch, notes: LaunchNotes | NoLaunchNotes, watchdog: Watchdog) -> None:
        pass

    def end_turn(self) -> None:
        pass


class StepTurns(NoTurns):
    """The turns of a run: its ranks wait together, then do a few steps. Every rank must make one."""

    are_taken = True

    def __init__(self, own: OwnTurns | None) -> None:
        self._own, self._steps_left = own, 0

    def before_step(self, watch: RunWatch, notes: LaunchNotes | NoLaunchNotes, watchdog: Watchdog) -> None:
        """If this run's turn has ended, wait for the next one. The wait counts as no step's time."""
        if self._steps_left == 0:
            notes.begin("other")
            with watchdog.waiting("while other runs compute (--take_turns)"), watch.left_out():
                gather_to_all(None)  # the turn ends when all ranks have ended their step
                steps = None if self._own is None else self._own.wait(watch.clock.last_seconds)
                self._steps_left = gather_to_all(steps)[0] or 1
            notes.begin("steps")
        self._steps_left -= 1

    def end_turn(self) -> None:
        """End the turn, because this run did something else than steps, for an unknown time."""
        self._steps_left = 0


def turns_of_run(*, is_main: bool) -> NoTurns:
    """Return how this run takes turns. The main process requests them."""
    if TURNS_VARIABLE not in os.environ:
        return NoTurns()
    return StepTurns(own_turns() if is_main else None)
