"""`slm convert`: convert sharding configurations, and report what became of every key."""

import argparse
import os
import shlex
import sys
import textwrap
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.base.safe_files import write_beside
from slm_toolkit.base.user_files import typed_path
from slm_toolkit.config.parser import count
from slm_toolkit.convert.convert import FATES, Converted, convert

_MODEL = "hf_model"
_FORMS = {
    "accelerate_fsdp": "an accelerate YAML for FSDP2",
    "accelerate_deepspeed": "an accelerate YAML and the DeepSpeed JSON it names",
    _MODEL: "a checkpoint as a Hugging Face model in fp32, without a tokenizer",
}
_DESCRIPTION = """\
Convert accelerate YAMLs (FSDP2, DeepSpeed) and DeepSpeed JSONs into one another. The files go to stdout, or
into --output DIR, where nothing is overwritten. stderr lists what became of each key, and why. Or write a
checkpoint of a run as a model."""
_EXAMPLES = """\
  slm convert fsdp_full_shard --to accelerate_deepspeed --output mine   the same sharding under ZeRO
  slm convert ds_zero2 --to accelerate_fsdp --num_processes 8           the nearest FSDP2 settings
  slm convert my_ds.json --to accelerate_fsdp --num_processes 8         out of a DeepSpeed JSON
"""
_EPILOG = """\
SOURCE: a shipped strategy (`slm configs`), an accelerate YAML or a DeepSpeed JSON; or a checkpoint, such as
runs/RUN/checkpoints/step_N
forms:
{forms}
more examples:
  slm convert runs/RUN/checkpoints/step_N --to hf_model --output model
The Trainer's --deepspeed takes the JSON of accelerate_deepspeed.
exit codes:
  0  every key has a counterpart
  1  at least one key has none
  2  bad input
docs/doctor_and_convert.md has the table of counterparts.
"""
_WIDTH = 110


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm convert`."""
    parser.description, parser.examples = _DESCRIPTION, _EXAMPLES
    forms = "\n".join(f"  {name:22}{what}" for name, what in _FORMS.items())
    parser.epilog = _EPILOG.format(forms=forms)
    parser.add_argument("source", metavar="SOURCE", help="what to convert; see below")
    parser.add_argument(
        "--to",
        required=True,
        choices=_FORMS,
        metavar="FORM",
        help="form to convert to; see below",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the files into DIR")
    parser.add_argument(
        "--num_processes", type=count, metavar="N", help="ranks in total (default: as in the source)"
    )
    parser.set_defaults(verb=_convert)


def _convert(args: argparse.Namespace) -> int:
    if args.to == _MODEL:
        return _write_model(args)
    with user_errors():
        written = convert(
            args.source,
            args.to.removeprefix("accelerate_"),
            num_processes=args.num_processes,
            folder=args.output,
        )
        paths = []
        if args.output is not None:
            texts = {args.output / name: text for name, text in written.files.items()}
            paths = write_beside(texts, flag="--output")
    if paths:
        print("\n".join(map(str, paths)))
    else:
        several = len(written.files) > 1
        print("\n".join(f"==> {n} <==\n{t}" if several else t.rstrip("\n") for n, t in written.files.items()))
    sys.stdout.flush()
    print("\n".join(_account(written)), file=sys.stderr)
    return int(any(row.fate == "no counterpart" for row in written.rows))


def _write_model(args: argparse.Namespace) -> int:
    with user_errors():
        if args.output is None or args.num_processes:
            raise ValueError(
                f"--to {_MODEL} takes a new folder as --output, and no --num_processes\n"
                f"hint: slm convert runs/RUN/checkpoints/step_N --to {_MODEL} --output DIR"
            )
        from slm_toolkit.checkpoint_convert.rewrite import write_model

        origin = write_model(Path(os.path.realpath(typed_path(args.source))), args.output)
    print(f"{args.output}: {_FORMS[_MODEL]}\nfrom {origin}")
    return 0


def _account(written: Converted) -> list[str]:
    """Return the lines of the account: keys grouped by their fate, with reasons; then the launch command."""
    lines = []
    for fate, title in FATES.items():
        groups: dict[tuple[str, str], list[str]] = {}  # settings that share a line, and their reason
        for row in written.rows:
            if row.fate == fate:
                changed = row.text if " -> " in row.text else ""
                groups.setdefault((row.why, changed), []).append(row.text)
        lines += [f"{title}:"] if groups else []
        for (why, _), texts in groups.items():
            lines += textwrap.wrap(
                ", ".join(texts),
                _WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
            lines += textwrap.wrap(why, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return [*lines, f"launch: {shlex.join(written.command)}"]
