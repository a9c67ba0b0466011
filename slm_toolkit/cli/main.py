"""The `slm` command: compare runs, estimate them, report on records, write out the configurations."""

import argparse
import io
import os
import sys

from slm_toolkit import __version__
from slm_toolkit.base.errors import about_path
from slm_toolkit.base.interrupts import ending_at_once
from slm_toolkit.config.parser import Parser, VerbParser, with_underscores

_VERBS = {  # name: the module that fills it, help
    "train": ("cli.train", "train one model under one strategy, on this machine or on several"),
    "compare": ("cli.compare", "run a grid of models, batches and strategies, then print the table"),
    "estimate": (
        "cli.estimate",
        "peak memory, tokens per second and cost of a grid of models, strategies, batches, ...",
    ),
    "recommend": ("cli.recommend", "the cheapest or fastest way to train a model on the GPUs you can get"),
    "doctor": ("cli.doctor", "what is wrong or unwise in a model and its configuration"),
    "report": ("cli.report", "print the table of recorded runs"),
    "launch": (
        "cli.launch",
        "`accelerate launch` with clear ends; on several machines, once all have met",
    ),
    "configs": ("cli.configs", "list the shipped accelerate YAMLs, or write them out"),
    "convert": (
        "cli.convert",
        "turn accelerate YAMLs, DeepSpeed JSONs and TrainingArguments into one another",
    ),
    "recipes": ("cli.recipes", "list the shipped recipes, print one, or write them out"),
    "completion": ("cli.completion", "print a script for Tab completion in bash or zsh"),
}
_EPILOG = """\
examples:
  slm train --strategy ddp --model slm-1m --dataset story.txt   one run, under the strategy named
  slm compare                                             six strategies on this machine, then a table
  slm compare --strategy ddp ds_zero2 --per_device_train_batch_size 4 8 16
  slm estimate --model slm-2b --gpu a100-40gb             its peak memory, and does it fit; nothing runs
  slm recommend --model slm-1b --gpu a100-40gb h100-80gb  the cheapest way to train it on what you can get
  slm doctor --model slm-500m                             what is unwise in it, on which GPU, by how much
  slm report runs --json                                  the records of earlier runs
  slm report runs --html report.html                      the table and charts as a page to send around
  slm report --paper                                      the study behind it, rebuilt beside its figures
  slm configs --copy .                                    the YAMLs, to change and to launch
  slm convert fsdp_full_shard --to accelerate_deepspeed   the same sharding under ZeRO, and what differs
  slm recipes                                             scripts to copy: LoRA, two nodes, a small card, ...
"""


def main(argv: list[str] | None = None) -> None:
    """Entry point, `slm`. Exit codes: 0 all ok, oom or skipped, 1 one failed or lost parity, 2 bad input, 130
    Ctrl-C."""
    try:
        _run(argv)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run(argv: list[str] | None) -> None:
    if sys.stdout is None:  # `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale's letters may be few: others are shown as ?
            stream.reconfigure(errors="replace")
    with ending_at_once():  # a verb's modules are imported when its name is parsed
        args = _parser().parse_args(with_underscores(sys.argv[1:] if argv is None else argv))
    try:
        code = args.verb(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if (message := about_path(error)) is None:
            raise
        if error.filename is None:  # of stdout, which is flushed again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: {message}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="slm",
        description="Train a small language model under every sharding strategy and compare what it costs.",
        epilog=_EPILOG,
        has_config_file=False,
    )
    parser.add_argument("--version", action="version", version=f"slm_toolkit {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=VerbParser)
    for name, (module, help_text) in _VERBS.items():
        verbs.add_parser(name, help=help_text, filled_by=f"slm_toolkit.{module}")
    return parser


if __name__ == "__main__":
    main()
