"""The Python API: the verbs of `slm` as functions that take its flags by name and return typed results.

    from slm_toolkit import api as slm

    print(slm.estimate(model="slm-1b", gpu="a100-40gb", num_gpus=8))
    report = slm.report(slm.read_records("runs"))

A flag takes the values that it takes on the command line: a list makes a grid, True turns a switch on, None
leaves the flag out. `slm VERB --help all` lists them. The import loads neither torch nor rich. A user's
mistake raises ValueError with the message that the command line prints.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slm_toolkit.results import Estimates, Recommendation, Records, Report, read_records

__all__ = [
    *("Estimates", "Recommendation", "Records", "Report"),
    *("compare", "estimate", "read_records", "recommend", "report"),
]
_OF_PRINTING = (
    *("json", "export", "baseline", "schema"),
    *("write", "top", "dry_run"),
)
"flags that make a verb print or write something else: a result has functions for it"


def estimate(**flags: object) -> Estimates:
    """Estimate memory, speed and cost of every combination, as `slm estimate` does. Nothing runs.

    Without `gpu`: memory only. Fields of an Estimate end in their units: bytes per GPU, seconds per step,
    dollars. Raises one ValueError with all problems.
    """
    args = _args("estimate", flags)
    from slm_toolkit.cli.estimate import estimates

    return estimates(args)


def recommend(**flags: object) -> Recommendation:
    """Rank GPUs, their number, strategies and batches for a whole training, as `slm recommend` does.

    The result has no plans if none is within the limits. Raises ValueError for a user's mistake.
    """
    args = _args("recommend", flags)
    from slm_toolkit.cli.recommend import recommendation

    return recommendation(args)


def compare(*, arguments: Sequence[object] = (), **flags: object) -> Report:
    """Run every combination, as `slm compare` does, and report on all of them.

    Each run is a separate process tree and writes its record under `output_dir` (default: runs). Finished
    runs are kept, unless `force`. Progress goes to stderr. `script`: your own training script instead of our
    trainer, with its `arguments`; `["--batch", "4,8"]` makes a grid. A run that fails or runs out of memory
    is a row with its reason. Raises ValueError for a user's mistake before anything starts,
    KeyboardInterrupt after Ctrl-C has ended the runs.
    """
    if isinstance(arguments, str):
        raise ValueError("arguments must be a list of words\nhint: arguments=['--batch', '4,8']")
    args = _args("compare", flags, arguments)
    from slm_toolkit.cli.compare import compared

    return compared(args)


def report(records: Records | str | Path | Sequence[str | Path] = "runs", **flags: object) -> Report:
    """Make ranked rows of records, as `slm report` does; launches of the same run share a row.

    `records`: the result of `read_records`, or paths. Raises ValueError for a user's mistake.
    """
    args = _args("report", flags)
    from slm_toolkit.cli.report import report_of

    return report_of(records if isinstance(records, Records) else read_records(records), args)


def _args(verb: str, flags: dict[str, object], arguments: Sequence[object] = ()) -> Namespace:
    """Parse flags as the verb's command line does. Raises ValueError in its words."""
    from slm_toolkit.config.parser import Parser, with_flags_of

    parser = with_flags_of(verb, Parser(prog=f"slm {verb}"))
    words = parser.words_of(flags, leave_out=_OF_PRINTING)
    return parser.parse_args([*words, "--", *map(str, arguments)] if arguments else words)
