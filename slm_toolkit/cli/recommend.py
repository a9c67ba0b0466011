"""`slm recommend`: GPUs, their number, strategy and batch for a job, and the commands to start it."""

import argparse
import json
import sys
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.deployment_flags import add_network_flag, add_price_flag, deployments, typed
from slm_toolkit.config.flags import add_flags, given_flags
from slm_toolkit.config.parser import count, positive_number
from slm_toolkit.config.run_config import number_of_tokens
from slm_toolkit.predict.flag_checks import NOT_OF_AN_ESTIMATE
from slm_toolkit.results import Recommendation
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, shipped_strategies

_FOLLOW_FROM_TOKENS = ("gradient_accumulation_steps", "max_steps", "max_tokens", "seed")
_DESCRIPTION = """\
Find the cheapest or fastest way to train a model on the GPUs you can get. Ranks GPU types and numbers,
strategies, batches, checkpointing and kernels by estimate. A flag that you give is fixed."""
_EXAMPLES = """\
  slm recommend --model slm-1b                            every GPU type with a known price
  slm recommend --model slm-2b --tokens 40B --gpu h100-80gb:8,16@2.49 a100-80gb:8 --deadline_hours 72
  slm recommend --model slm-500m slm-1b --target_loss 2.9 --gpu l40s:1,2,4,8 --budget_usd 500 --write plan/
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm recommend`."""
    parser.description, parser.examples = _DESCRIPTION, _EXAMPLES
    _add_job_flags(parser)
    parser.add_argument(
        "--gpu",
        nargs="+",
        metavar="NAME[:N,N][@USD]",
        help="GPU types you can get, with their numbers and price per GPU-hour: h100-80gb:8,16@2.49. "
        "all or all:1,8: every type that slm_toolkit knows (default: every type with a known price)",
    ).basic = True
    parser.add_argument(
        "--num_gpus",
        nargs="+",
        type=count,
        metavar="N",
        help="numbers of GPUs, if --gpu has none (default: 1 2 4 ... 64)",
    )
    parser.add_argument(
        "--gpus_per_node", type=count, default=8, metavar="K", help="most GPUs in one node (default: 8)"
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        metavar="NAME|YAML|JSON",
        help="shipped strategies, YAMLs or DeepSpeed JSONs (default: single, "
        f"{', '.join(STUDIED_STRATEGIES)}). Shipped: {', '.join(shipped_strategies())}",
    )
    parser.add_argument("--top", type=count, default=10, metavar="N", help="rows to show (default: 10)")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="DIR",
        help="write the YAML and the launch script of the first row into DIR",
    ).basic = True
    parser.add_argument(
        "--json", action="store_true", help="print a list of rows; unknown values are null"
    ).basic = True
    add_price_flag(parser)
    add_network_flag(parser)
    add_flags(parser, grid=True, leave_out=(*NOT_OF_AN_ESTIMATE, *_FOLLOW_FROM_TOKENS))
    parser.set_defaults(verb=_recommend)


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("job")
    length = job.add_mutually_exclusive_group()
    length.add_argument(
        "--tokens",
        "--max_tokens",
        type=_tokens,
        metavar="N",
        help="tokens to train on, such as 20B or 300M. A model with weights needs this",
    ).basic = True
    length.add_argument(
        "--target_loss",
        type=positive_number,
        metavar="L",
        help="train until a scaling law predicts this loss",
    ).basic = True
    job.add_argument(
        "--global_batch_tokens",
        type=_tokens,
        metavar="N",
        help="tokens per optimizer step; the micro-steps follow from it (default: 524288, as GPT-3's "
        "small models; for fine-tuning 128 sequences, as Alpaca)",
    )
    job.add_argument(
        "--deadline_hours", type=positive_number, metavar="H", help="longest time of the training"
    ).basic = True
    job.add_argument(
        "--budget_usd", type=positive_number, metavar="USD", help="highest cost of the training"
    ).basic = True
    job.add_argument(
        "--objective",
        choices=("cost", "time"),
        default="cost",
        help="rank by cost or by time (default: cost)",
    ).basic = True


def _tokens(text: str) -> float:
    return typed(number_of_tokens, text)


_MOST_LEFT_OUT = 6
"most reasons to print"


def recommendation(args: argparse.Namespace) -> Recommendation:
    """Return the plans that the flags ask for. Raises ValueError for a user's mistake."""
    from slm_toolkit.recommend.job import configs_of, offers_of, workloads_of
    from slm_toolkit.recommend.plans import search
    from slm_toolkit.recommend.ranking import best_plans
    from slm_toolkit.strategy.groups import strategies_asked

    given = given_flags(args)
    offers = offers_of(
        args.gpu,
        num_gpus=args.num_gpus,
        gpus_per_node=args.gpus_per_node,
        deployment_of=deployments(args),
    )
    workloads, notes = workloads_of(given, args)
    names = args.strategy or ["single", *STUDIED_STRATEGIES]
    strategies, of_strategies = strategies_asked(names, given, has_gpu=True)
    found = search(
        workloads,
        offers,
        strategies,
        configs_of(given, gpus_per_node=args.gpus_per_node),
        gpus_per_node=args.gpus_per_node,
    )
    limits = {"deadline_hours": args.deadline_hours, "budget_usd": args.budget_usd}
    return Recommendation(
        plans=best_plans(found.plans, objective=args.objective, **limits),
        considered=found.plans,
        left_out=found.left_out,
        notes=[*notes, *of_strategies],
        offers=offers,
        objective=args.objective,
        **limits,
    )


def _recommend(args: argparse.Namespace) -> int:
    """Return exit code 0 if a plan was found, 1 if no plan is within the limits."""
    with user_errors():
        from slm_toolkit.recommend.launch_files import check_folder

        if args.write is not None:
            check_folder(args.write)
        found = recommendation(args)
        written = found.write(args.write) if found.plans and args.write is not None else []
    notes = [*found.notes, *(f"written: {path}" for path in written)]
    notes += [f"left out: {reason}" for reason in found.left_out[:_MOST_LEFT_OUT]]
    if (more := len(found.left_out) - _MOST_LEFT_OUT) > 0:
        notes.append(f"left out: {more} more")
    notes += [
        f"{name}: the price is unknown: give it as {name}@USD, or with --prices" for name in found.unpriced
    ]
    if args.json:
        print("[" + ",\n ".join(json.dumps(plan, allow_nan=False) for plan in found.to_dicts()) + "]")
    else:
        from slm_toolkit.report.tables.fitted import console_of_stdout

        console = console_of_stdout()
        console.print(found.table(width=console.width, top=args.top), crop=False)
    for note in dict.fromkeys(notes):
        print(note, file=sys.stderr)
    return 0 if found.plans else 1
