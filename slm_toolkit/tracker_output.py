"""`--report_to` of `slm report`, and of `slm compare` after its last run: the rows, to a tracker."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from slm_toolkit.record import RunRecord

if TYPE_CHECKING:
    from slm_toolkit.report.rows import Row

FOLDER = "comparisons"
"beside the folder of the first record"


def add_report_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report_to",
        choices=("trackio", "tensorboard", "wandb"),
        help="send each row to a tracker as a run, offline: all figures, losses and step_seconds by step",
    )


def check_report_to(args: argparse.Namespace) -> None:
    """Raises ValueError for a tracker that is not installed."""
    from slm_toolkit.report.trackers import TRACKERS, check_installed

    if args.report_to in TRACKERS:
        check_installed(args.report_to)


def track_rows(
    rows: dict[str, "Row"], records: list[tuple[Path, RunRecord]], args: argparse.Namespace
) -> None:
    """Each labelled row as a run; says on stderr how to look at them."""
    from slm_toolkit.report.trackers import TRACKERS, track, tracked_run

    if args.report_to not in TRACKERS:  # `slm compare` knows all of accelerate's
        known = ", ".join(TRACKERS)
        print(f"the runs are in {args.report_to}, their comparison is not: only {known}", file=sys.stderr)
        return
    by_path = {str(path): record for path, record in records}
    runs = [tracked_run(label, row, by_path[row.record]) for label, row in rows.items()]
    group = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    hint = track(runs, args.report_to, folder=records[0][0].parent.parent / FOLDER, group=group)
    print(f"{len(runs)} runs in {args.report_to}: {hint}", file=sys.stderr)
