"""The `slm` command and its verbs."""

import argparse
import gc
import io
import os
import sys

if _COLLECTS := gc.isenabled():
    gc.disable()  # imports make no garbage: collecting it takes 15 ms

# isort: split
from slm_toolkit import __version__
from slm_toolkit.base.errors import about_path, ending_at_once, user_errors
from slm_toolkit.config.parser import Parser, with_flags_of, with_underscores

_VERBS = {  # name, which is also its module in cli/: help
    "train": "train one model under one strategy, on this machine or on several",
    "compare": "run a grid of models, batches and strategies, then print the table",
    "estimate": "estimate memory, speed and cost of a grid of models, strategies, batches, ...",
    "recommend": "find the cheapest or fastest way to train a model on the GPUs you can get",
    "doctor": "find what is wrong or unwise in a model and its configuration",
    "report": "print the table of recorded runs",
    "launch": "`accelerate launch` with clear errors; several machines wait for each other",
    "configs": "list or copy the shipped accelerate YAMLs",
    "convert": "convert accelerate YAMLs and DeepSpeed JSONs into one another",
    "recipes": "list, print or copy the shipped recipes",
}
_EPILOG = """\
examples:
  slm compare                                             six strategies on this machine, and a table
  slm estimate --model slm-2b --gpu a100-40gb             does it fit? nothing runs
  slm recommend --model slm-1b --gpu a100-40gb h100-80gb  the cheapest way to train it on these GPUs
  slm report runs --export report.html                    the table and charts as one page
"""


def main(argv: list[str] | None = None) -> None:
    """Run the `slm` command.

    Exit codes: 0 all runs ok, oom or skipped; 1 a run failed or broke parity; 2 bad input; 130 Ctrl-C.
    """
    try:
        _run(argv)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run(argv: list[str] | None) -> None:
    if sys.stdout is None:  # `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may lack characters: they become ?
            stream.reconfigure(errors="replace")
    with ending_at_once(), user_errors():  # a verb's modules are imported when it is parsed
        words = with_underscores(sys.argv[1:] if argv is None else argv)
        parser = _parser(words[0] if words else None)
        args = parser.parse_args(words)
    gc.freeze()
    if _COLLECTS:
        gc.enable()
    try:
        code = args.verb(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if (message := about_path(error)) is None:
            raise
        if error.filename is None:  # stdout failed, and is flushed again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: {message}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


def _parser(verb: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of one verb, or one that only lists them."""
    parser = Parser(
        prog="slm",
        description="Train a small language model under every sharding strategy and compare what it costs.",
        epilog=_EPILOG,
        has_config_file=False,
    )
    parser.add_argument("--version", action="version", version=f"slm_toolkit {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=Parser)
    for name in [verb] if verb in _VERBS else _VERBS:
        of_verb = verbs.add_parser(name, help=_VERBS[name])
        if name == verb:
            with_flags_of(verb, of_verb)
    return parser


if __name__ == "__main__":
    main()
