"""`slm convert`: convert sharding configurations, and report what became of every key."""

import argparse
import json
import os
import shlex
import sys
import textwrap
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.base.safe_files import write_beside
from slm_toolkit.base.user_files import typed_path
from slm_toolkit.config.parser import count, positive_number
from slm_toolkit.convert.convert import FATES, Converted, convert

_FORMS = {
    "accelerate_fsdp": "an accelerate YAML for FSDP2",
    "accelerate_deepspeed": "an accelerate YAML and the DeepSpeed JSON it names",
}
_CHECKPOINT_FORMS = {
    "hf_model": "a checkpoint as a Hugging Face model in fp32, without a tokenizer",
    "fsdp_checkpoint": "a checkpoint for Accelerator.load_state under FSDP2, SHARDED_STATE_DICT",
    "ds_universal": "a checkpoint for DeepSpeed with checkpoint: {load_universal: true}",
}
_DESCRIPTION = """\
Convert accelerate YAMLs (FSDP2, DeepSpeed) and DeepSpeed JSONs into one another. The files go to stdout, or
into --output DIR, where nothing is overwritten. stderr lists what became of each key, and why. Or rewrite a
checkpoint of a run, of accelerate's FSDP or of DeepSpeed."""
_EXAMPLES = """\
  slm convert fsdp_full_shard --to accelerate_deepspeed --output mine   the same sharding under ZeRO
  slm convert ds_zero2 --to accelerate_fsdp --num_processes 8           the nearest FSDP2 settings
  slm convert my_ds.json --to accelerate_deepspeed                      a YAML that names the JSON
"""
_EPILOG = """\
SOURCE: a shipped strategy (`slm configs`), an accelerate YAML or a DeepSpeed JSON; or the folder of a
checkpoint, such as runs/RUN/checkpoints/step_N or what Accelerator.save_state or DeepSpeed wrote. No code in
a folder is run
forms:
{forms}
more examples:
  slm convert zero3_folder --to hf_model --model slm-1b --output model   weights out of a ZeRO checkpoint
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
    forms = "\n".join(f"  {name:22}{what}" for name, what in {**_FORMS, **_CHECKPOINT_FORMS}.items())
    parser.epilog = _EPILOG.format(forms=forms)
    parser.add_argument("source", metavar="SOURCE", help="what to convert; see below")
    parser.add_argument(
        "--to",
        required=True,
        choices=[*_FORMS, *_CHECKPOINT_FORMS],
        metavar="FORM",
        help="form to convert to; see below",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the files into DIR")
    parser.add_argument(
        "--num_processes", type=count, metavar="N", help="ranks in total (default: as in the source)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="of a checkpoint: preset, folder or config.json (default: as in a run's)",
    )
    parser.add_argument(
        "--learning_rate",
        type=positive_number,
        metavar="LR",
        help="of AdamW in a rewritten checkpoint (default: as of the run)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print files, launch command and account as one JSON object"
    )
    parser.set_defaults(verb=_convert)


def _convert(args: argparse.Namespace) -> int:
    if args.to in _CHECKPOINT_FORMS:
        return _convert_checkpoint(args)
    with user_errors():
        for name in ("model", "learning_rate"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} is for checkpoints, not for --to {args.to}\nhint: leave it out")
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
    code = int(any(row.fate == "no counterpart" for row in written.rows))
    if args.json:
        rows = [{**vars(row), "to": row.result} for row in written.rows]
        print(json.dumps({**vars(written), "written": [str(path) for path in paths], "rows": rows}, indent=2))
        return code
    if paths:
        print("\n".join(map(str, paths)))
    else:
        several = len(written.files) > 1
        print("\n".join(f"==> {n} <==\n{t}" if several else t.rstrip("\n") for n, t in written.files.items()))
    sys.stdout.flush()
    print("\n".join(_account(written)), file=sys.stderr)
    return code


def _convert_checkpoint(args: argparse.Namespace) -> int:
    with user_errors():
        if args.output is None:
            raise ValueError(
                f"--to {args.to} takes a new folder as --output\n"
                f"hint: slm convert runs/RUN/checkpoints/step_N --to {args.to} --output DIR"
            )
        unused = {"learning_rate": args.to == "hf_model", "num_processes": args.to != "ds_universal"}
        for name, is_unused in unused.items():
            if is_unused and getattr(args, name) is not None:
                raise ValueError(f"--{name} has no meaning with --to {args.to}\nhint: leave it out")
        from slm_toolkit.checkpoint_convert.rewrite import rewrite

        facts = rewrite(
            Path(os.path.realpath(typed_path(args.source))),
            args.output,
            form=args.to,
            model=args.model,
            learning_rate=args.learning_rate,
            num_processes=args.num_processes,
        )
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"{facts['output']}: {_CHECKPOINT_FORMS[args.to]}")
        print(
            f"from {facts['source']}: step {facts['step']}, {facts['num_parameters']:,} parameters, "
            f"written under {facts['written_by']} x {facts['num_processes']}"
        )
    if args.to != "hf_model":
        print(
            "note: AdamW is written as one group of parameters. A script with several groups sets their "
            "options again after it has loaded",
            file=sys.stderr,
        )
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
