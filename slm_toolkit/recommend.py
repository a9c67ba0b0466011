"""`slm recommend`: which GPUs, how many, which strategy and batch for a job, and the commands to start it."""

import argparse
import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slm_toolkit.config import RunConfig
from slm_toolkit.errors import user_errors
from slm_toolkit.estimate_checks import NOT_OF_AN_ESTIMATE, check_grid, model_to_estimate
from slm_toolkit.flags import add_flags
from slm_toolkit.output_flags import count, positive_number
from slm_toolkit.site_flags import add_site_flags, sites_of
from slm_toolkit.strategy import STUDIED_STRATEGIES, Strategy, find_strategy, shipped_strategies

if TYPE_CHECKING:
    from slm_toolkit.predict.plans import GpuOffer, Job

GRID: dict[str, list[Any]] = {
    "per_device_train_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
    "gradient_checkpointing": ["none", "selective_op", "full"],
    "loss_kernel": ["hf", "fused_linear"],
    "norm_kernel": ["fused"],
}
"what is tried where the flags don't say; kernels that change no result but its rounding"
GLOBAL_BATCH_TOKENS = 524_288
"0.5M, as GPT-3's 125M to 760M models took (Brown et al., arXiv 2005.14165, table 2.1)"
LAWS = ("besiroglu", "hoffmann", "hoffmann-unrounded", "kaplan", "kaplan-joint")
_DECIDED_HERE = ("gradient_accumulation_steps", "max_steps", "seed")
_DEFAULT_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_EPILOG = """\
examples:
  slm recommend --model slm-1b --gpu a100-40gb h100-80gb
  slm recommend --model slm-2b --tokens 40B --gpu h100-80gb:8,16@2.49 a100-80gb:8 --deadline_hours 72
  slm recommend --model slm-500m slm-1b --target_loss 2.9 --gpu l40s:1,2,4,8 --budget_usd 500 --write plan/
"""


def add_recommend_verb(verbs: Any) -> None:
    """The `recommend` command among the `verbs` of `slm`."""
    parser = verbs.add_parser(
        "recommend",
        help="the cheapest or fastest way to train a model on the GPUs you can get",
        description="Ranks GPU types and counts, strategies, batches and checkpointing for a whole training "
        "run, by estimate, or by records of your own runs where there are any; says why, and writes what to "
        "launch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    job = parser.add_argument_group("job")
    job.add_argument("--tokens", type=_tokens, metavar="N", help="to train on, as 20B or 300M")
    job.add_argument(
        "--target_loss", type=positive_number, metavar="L", help="train until a scaling law expects this loss"
    )
    job.add_argument(
        "--law", choices=LAWS, default="besiroglu", help="scaling law of --target_loss (default: besiroglu)"
    )
    job.add_argument(
        "--global_batch_tokens",
        type=_tokens,
        default=GLOBAL_BATCH_TOKENS,
        metavar="N",
        help="per optimizer step; micro-steps follow from it (default: 524288, as GPT-3's small models)",
    )
    job.add_argument("--deadline_hours", type=positive_number, metavar="H", help="take no longer")
    job.add_argument("--budget_usd", type=positive_number, metavar="USD", help="pay no more")
    job.add_argument(
        "--objective", choices=("cost", "time"), default="cost", help="what to rank by (default: cost)"
    )
    parser.add_argument(
        "--gpu",
        nargs="+",
        required=True,
        metavar="NAME[:N,N][@USD]",
        help="offered, with how many and for how much each per hour: h100-80gb:8,16@2.49",
    )
    parser.add_argument(
        "--num_gpus",
        nargs="+",
        type=count,
        default=list(_DEFAULT_COUNTS),
        metavar="N",
        help="where --gpu doesn't say (default: 1 2 4 ... 64)",
    )
    parser.add_argument("--gpus_per_node", type=count, default=8, metavar="K", help="at most (default: 8)")
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=["single", *STUDIED_STRATEGIES],
        metavar="NAME|YAML",
        help=f"of {', '.join(shipped_strategies())}, or your own YAML (default: all)",
    )
    parser.add_argument(
        "--records",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="records of your runs and rehearsals, used before estimates where they match",
    )
    parser.add_argument("--top", type=count, default=10, metavar="N", help="rows shown (default: 10)")
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="write the first row's YAML and launch script there"
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows, unknown is null")
    add_site_flags(parser)
    add_flags(parser, grid=True, leave_out=(*NOT_OF_AN_ESTIMATE, *_DECIDED_HERE))
    parser.set_defaults(verb=_recommend, parser=parser)


def _recommend(args: argparse.Namespace) -> int:
    with user_errors():
        offers = _offers(args)
        jobs = _jobs(args)
        strategies = [find_strategy(name) for name in dict.fromkeys(args.strategy)]
        configs = _configs(args)
        found = _plans(args, jobs, offers, strategies, configs)
        from slm_toolkit.predict.plan_ranking import best_plans

        limits = {"deadline_hours": args.deadline_hours, "budget_usd": args.budget_usd}
        ranked = best_plans(found, objective=args.objective, **limits)
        written = None
        if ranked and args.write is not None:
            from slm_toolkit.launch_files import write_launch

            written = write_launch(ranked[0], args.write)
    if args.json:
        from slm_toolkit.predict.plans import row_of

        print("[" + ",\n ".join(json.dumps(row_of(plan), allow_nan=False) for plan in ranked) + "]")
    else:
        from rich.console import Console

        from slm_toolkit.output import PIPE_WIDTH
        from slm_toolkit.report.plan_table import nothing_found, plan_report

        console = Console()
        console.width = console.width if console.is_terminal else PIPE_WIDTH
        if ranked:
            advice = _advice(ranked, offers, args)
            shown = plan_report(ranked, advice, top=args.top, objective=args.objective, width=console.width)
        else:
            shown = nothing_found(found, objective=args.objective, **limits)
        console.print(shown, crop=False, soft_wrap=True)
    for note in _notes(offers, written):
        print(note, file=sys.stderr)
    return 0 if ranked else 1


def _advice(ranked: list, offers: list["GpuOffer"], args: argparse.Namespace) -> list[str]:
    """What aligned widths would give on each GPU type, and what else would move the first plan."""
    from slm_toolkit.predict.advice import Setting, alignment_gain
    from slm_toolkit.predict.bottleneck import WORTH_SAYING, levers

    def setting_of(plan: Any) -> Setting:
        gpu = next(offer.gpu for offer in offers if offer.gpu.name == plan.estimate.gpu)
        shape = (plan.estimate.num_gpus, args.gpus_per_node)
        return Setting(plan.spec, plan.config, plan.strategy, gpu, *shape, plan.site)

    lines = []
    for name in dict.fromkeys(plan.estimate.gpu for plan in ranked):
        gain = alignment_gain(setting_of(next(plan for plan in ranked if plan.estimate.gpu == name)))
        if gain is not None and gain.speedup >= WORTH_SAYING:
            lines.append(f"on {name} {gain.sibling} should train {gain.speedup:.2f} times as fast")
    winner = setting_of(ranked[0])
    bound = ranked[0].estimate.bottleneck.replace("_", " ")
    found = levers(lambda spec, config: winner.estimate(spec, config), winner.spec, winner.config)
    for lever in [lever for lever in found if lever.change.startswith("--")][:2]:
        if not lever.change.startswith("--per_device"):  # that would make other steps of it
            lines.append(
                f"the first is bound by {bound}: {lever.change} should give {lever.speedup - 1:+.0%}"
            )
    return lines


def _plans(
    args: argparse.Namespace,
    jobs: list["Job"],
    offers: list["GpuOffer"],
    strategies: list[Strategy],
    configs: list[RunConfig],
) -> list:
    from slm_toolkit.predict.plans import plans
    from slm_toolkit.report.observations import observations_of

    observations = observations_of(args.records)
    return [
        plan
        for job in jobs
        for plan in plans(
            job,
            offers,
            strategies,
            [config for config in configs if config.model == job.asked_model],
            gpus_per_node=args.gpus_per_node,
            observations=observations,
        )
    ]


def _offers(args: argparse.Namespace) -> list["GpuOffer"]:
    """Raises one ValueError with all that can't be read or had."""
    from slm_toolkit.hardware import gpu_of_name
    from slm_toolkit.predict.plans import GpuOffer
    from slm_toolkit.predict.site import Site
    from slm_toolkit.prices import Price

    site_of = sites_of(args)
    found, problems = [], []
    for text in args.gpu:
        match = re.fullmatch(r"([^:@]+)(?::(\d+(?:,\d+)*))?(?:@(\d+(?:\.\d+)?))?", text)
        if match is None:
            problems.append(f"--gpu {text}: not NAME, NAME:COUNTS or NAME:COUNTS@USD")
            continue
        gpu = gpu_of_name(match[1])
        counts = [int(number) for number in match[2].split(",")] if match[2] else args.num_gpus
        site = site_of(gpu)
        if match[3]:
            if float(match[3]) <= 0:
                problems.append(f"--gpu {text}: a price is above 0")
                continue
            site = Site(site.cluster, Price(float(match[3]), "given by --gpu"))
        if gpu.memory_bytes is None:
            problems.append(f"--gpu {text}: its memory is not known, so nobody can say what fits")
        for number in counts:
            if number < 1 or (number > args.gpus_per_node and number % args.gpus_per_node):
                problems.append(
                    f"--gpu {text}: {number} GPUs: at least 1, and full nodes of {args.gpus_per_node}"
                )
        found.append(GpuOffer(gpu, tuple(sorted(set(counts))), site))
    if problems:
        raise ValueError("\n".join(problems) + "\nhint: as in h100-80gb:8,16@2.49; --gpus_per_node")
    return found


def _jobs(args: argparse.Namespace) -> list["Job"]:
    from slm_toolkit.predict.plans import Job
    from slm_toolkit.predict.scaling_laws import LAWS as ALL_LAWS
    from slm_toolkit.predict.scaling_laws import compute_optimal_tokens, num_params_of, tokens_for_loss

    if args.tokens is not None and args.target_loss is not None:
        raise ValueError("--tokens and --target_loss both say how long to train\nhint: give one")
    law = ALL_LAWS[args.law]
    found = []
    for name in dict.fromkeys(args.model or ["slm-100m"]):
        spec = model_to_estimate(name)
        num_params = num_params_of(law, spec)
        if args.tokens is not None:
            num_tokens = args.tokens
        elif args.target_loss is not None:
            num_tokens = tokens_for_loss(law, num_params, args.target_loss)
        else:
            num_tokens = compute_optimal_tokens(law, num_params)
        found.append(Job(name, spec, num_tokens, args.global_batch_tokens, law))
    return found


def _configs(args: argparse.Namespace) -> list[RunConfig]:
    """The grid of flags given and GRID's for the rest, batches ascending."""
    names = {f.name for f in dataclasses.fields(RunConfig)}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    several = {
        name: list(dict.fromkeys(value)) if isinstance(value, list) else [value]
        for name, value in {**GRID, **given}.items()
    }
    check_grid(several, num_gpus=[1], gpus_per_node=args.gpus_per_node)
    several["per_device_train_batch_size"].sort()
    several.setdefault("model", ["slm-100m"])
    found = [
        RunConfig(**dict(zip(several, values, strict=True))).with_defaults(has_gpu=True)
        for values in itertools.product(*several.values())
    ]
    return sorted(found, key=lambda config: config.per_device_train_batch_size)


def _notes(offers: list["GpuOffer"], written: list[Path] | None) -> list[str]:
    notes = [
        f"{offer.gpu.name}: no price known: give one as {offer.gpu.name}@USD, or with --prices"
        for offer in offers
        if offer.site.price is None
    ]
    notes += [f"written: {path}" for path in written or []]
    return notes


def _tokens(text: str) -> float:
    """20B, 300M, 1.5T, 2e10 or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), flags=re.IGNORECASE)
    value = (
        float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0
    )
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: 20B, 300M, 2e10")
    return value
