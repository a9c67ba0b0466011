"""`slm recommend`: GPUs, their number, strategy and batch for a job, and the commands to start it."""

import argparse
import itertools
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slm_toolkit.base.errors import user_errors
from slm_toolkit.cli.deployment_flags import add_network_flags, add_price_flags, deployments_of
from slm_toolkit.config.flag_pairs import Pair, check_pairs, flags_given
from slm_toolkit.config.flags import add_flags, given_flags
from slm_toolkit.config.parser import count, positive_number
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.from_config import position_problem
from slm_toolkit.predict.flag_checks import (
    NOT_OF_AN_ESTIMATE,
    add_software_flag,
    all_of,
    check_grid,
    model_to_estimate,
)
from slm_toolkit.predict.setup.setup import unlike_the_model
from slm_toolkit.strategy.strategy import (
    STUDIED_STRATEGIES,
    Strategy,
    find_strategy,
    notes_on,
    shipped_strategies,
)

if TYPE_CHECKING:
    from slm_toolkit.recommend.plans import GpuOffer, Plan, Workload


GRID: dict[str, list[Any]] = {
    "per_device_train_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
    "gradient_checkpointing": ["none", "selective_op", "full"],
    "loss_kernel": ["hf", "fused_linear"],
    "norm_kernel": ["fused"],
}
"values to try for flags that are not given; the kernels change results only by rounding"
GLOBAL_BATCH_TOKENS = 524_288
"0.5M, as GPT-3's 125M to 760M models took (Brown et al., arXiv 2005.14165, table 2.1)"
_LAWS = ("besiroglu", "hoffmann", "hoffmann-unrounded", "kaplan", "kaplan-joint")  # scaling_laws.LAWS
_DEFAULT_MODEL = "slm-100m"
_DECIDED_HERE = ("gradient_accumulation_steps", "max_steps", "seed")
_DEFAULT_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def add_recommend_flags(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("job")
    job.add_argument(
        "--tokens", type=_tokens, metavar="N", help="tokens to train on, such as 20B or 300M"
    ).basic = True
    job.add_argument(
        "--target_loss",
        type=positive_number,
        metavar="L",
        help="train until a scaling law predicts this loss",
    ).basic = True
    job.add_argument(
        "--law",
        choices=_LAWS,
        default="besiroglu",
        help="scaling law for the predicted loss. Without --tokens and --target_loss it also gives the "
        "compute-optimal number of tokens (default: besiroglu)",
    )
    job.add_argument(
        "--global_batch_tokens",
        type=_tokens,
        default=GLOBAL_BATCH_TOKENS,
        metavar="N",
        help="tokens per optimizer step; the micro-steps follow from it (default: 524288, as GPT-3's "
        "small models)",
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
    parser.add_argument(
        "--gpu",
        nargs="+",
        required=True,
        metavar="NAME[:N,N][@USD]",
        help="GPU types you can get, with their numbers and price per GPU-hour: h100-80gb:8,16@2.49",
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
        default=["single", *STUDIED_STRATEGIES],
        metavar="NAME|YAML|JSON",
        help="shipped strategies, YAMLs or DeepSpeed JSONs (default: single, "
        f"{', '.join(STUDIED_STRATEGIES)}). Shipped: {', '.join(shipped_strategies())}",
    )
    parser.add_argument(
        "--records",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="folders with records of your runs and rehearsals. A matching record replaces the estimate",
    ).basic = True
    add_software_flag(parser)
    parser.add_argument("--top", type=count, default=10, metavar="N", help="rows to show (default: 10)")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="DIR",
        help="write the YAML, launch script and SkyPilot task of the first row into DIR",
    ).basic = True
    parser.add_argument(
        "--json", action="store_true", help="print a list of rows; unknown values are null"
    ).basic = True
    add_price_flags(parser)
    add_network_flags(parser)
    add_flags(parser, grid=True, leave_out=(*NOT_OF_AN_ESTIMATE, *_DECIDED_HERE))


def offers_of(args: argparse.Namespace) -> list["GpuOffer"]:
    """Return the offers of --gpu. Raises one ValueError with all offers that are invalid."""
    from slm_toolkit.hardware.gpus import gpu_and_count, gpu_of_name
    from slm_toolkit.hardware.prices import Price
    from slm_toolkit.predict.setup.setup import Deployment
    from slm_toolkit.recommend.plans import GpuOffer

    deployment_of = deployments_of(args)
    found, problems = [], []
    for text in args.gpu:
        asked = gpu_and_count(text)
        if asked is None:
            problems.append(f"--gpu {text}: not NAME, NAME:COUNTS or NAME:COUNTS@USD")
            continue
        name, counts, usd = asked
        gpu = gpu_of_name(name)
        per_node = args.gpus_per_node
        usual = args.num_gpus or [n for n in _DEFAULT_COUNTS if n <= per_node or n % per_node == 0]
        counts = list(counts) or usual
        deployment = deployment_of(gpu)
        if usd is not None:
            if usd <= 0:
                problems.append(f"--gpu {text}: the price must be above 0")
                continue
            deployment = Deployment(deployment.cluster, Price(usd, "given by --gpu"))
        for number in counts:
            if number < 1 or (number > args.gpus_per_node and number % args.gpus_per_node):
                problems.append(
                    f"--gpu {text}: {number} GPUs: at least 1, and only full nodes of {args.gpus_per_node}"
                )
        found.append(GpuOffer(gpu, tuple(sorted(set(counts))), deployment))
    if problems:
        raise ValueError(
            "\n".join(problems) + "\nhint: write h100-80gb:8,16@2.49; --gpus_per_node sets the size of a node"
        )
    return found


def workloads_of(args: argparse.Namespace) -> tuple[list["Workload"], list[str]]:
    """Return a Workload for each model, and notes on models that never reach the target.

    Raises ValueError if no model does.
    """
    from slm_toolkit.recommend.plans import Workload
    from slm_toolkit.recommend.scaling_laws import (
        LAWS,
        compute_optimal_tokens,
        num_params_of,
        tokens_for_loss,
    )

    check_pairs(flags_given(args), [Pair("tokens", "target_loss", ": both set the length of the training")])
    adapters = [name for name in args.peft or () if name != "none"]
    if adapters and args.tokens is None:
        raise ValueError(
            f"--peft {adapters[0]} without --tokens: scaling laws are about training from scratch\n"
            "hint: --tokens 50M, the tokens to train the adapter on"
        )
    law = LAWS[args.law]
    found, unreached, notes = [], [], []
    lengths = args.seq_len or [RunConfig().with_defaults(has_gpu=True).seq_len]
    for name in dict.fromkeys(args.model or [_DEFAULT_MODEL]):
        spec = model_to_estimate(name)
        if problems := [problem for n in lengths if (problem := position_problem(spec, n)) is not None]:
            raise all_of(problems, verb="recommend")
        notes += [note for n in lengths for note in unlike_the_model(spec, n)]
        num_params = num_params_of(law, spec)
        num_tokens = args.tokens
        if args.target_loss is not None:
            try:
                num_tokens = tokens_for_loss(law, num_params, args.target_loss)
            except ValueError as error:
                unreached.append(f"{name}: {error}")
                continue
        if num_tokens is None:
            num_tokens = compute_optimal_tokens(law, num_params)
        found.append(Workload(name, spec, num_tokens, args.global_batch_tokens, law))
    if not found:
        raise ValueError("\n".join(unreached))
    return found, [*notes, *(f"left out: {problem.splitlines()[0]}" for problem in unreached)]


def configs_of(args: argparse.Namespace) -> list[RunConfig]:
    """Return the grid of the given flags, and of GRID for the rest; batches ascending."""
    several = {
        name: list(dict.fromkeys(value)) if isinstance(value, list) else [value]
        for name, value in {**GRID, **given_flags(args)}.items()
    }
    check_grid(several, num_gpus=[1], gpus_per_node=args.gpus_per_node)
    several["per_device_train_batch_size"].sort()
    several.setdefault("model", [_DEFAULT_MODEL])
    found = [
        RunConfig(**dict(zip(several, values, strict=True))).with_defaults(has_gpu=True)
        for values in itertools.product(*several.values())
    ]
    return sorted(found, key=lambda config: config.per_device_train_batch_size)


def _tokens(text: str) -> float:
    """Parse 20B, 300M, 1.5T, 2e10 or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), flags=re.IGNORECASE)
    value = (
        float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0
    )
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 20B, 300M or 2e10")
    return value


_MOST_LEFT_OUT = 6
"most reasons to print"
_DESCRIPTION = """\
Find the cheapest or fastest way to train a model on the GPUs you can get. Ranks GPU types and numbers,
strategies, batches and checkpointing by estimate, or by your own records if they match."""
_EXAMPLES = """\
  slm recommend --model slm-1b --gpu a100-40gb h100-80gb
  slm recommend --model slm-2b --tokens 40B --gpu h100-80gb:8,16@2.49 a100-80gb:8 --deadline_hours 72
  slm recommend --model slm-500m slm-1b --target_loss 2.9 --gpu l40s:1,2,4,8 --budget_usd 500 --write plan/
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm recommend`."""
    parser.description, parser.examples = _DESCRIPTION, _EXAMPLES
    add_recommend_flags(parser)
    parser.set_defaults(verb=_recommend)


def _recommend(args: argparse.Namespace) -> int:
    """Return exit code 0 if a plan was found, 1 if no plan is within the limits."""
    with user_errors():
        offers = offers_of(args)
        workloads, notes = workloads_of(args)
        strategies = [find_strategy(name) for name in dict.fromkeys(args.strategy)]
        notes += notes_on(strategies)
        configs = configs_of(args)
        if args.write is not None:
            from slm_toolkit.recommend.launch_files import check_folder

            check_folder(args.write)
        found, left_out = _search(args, workloads, offers, strategies, configs)
        from slm_toolkit.recommend.plans import best_plans

        limits = {"deadline_hours": args.deadline_hours, "budget_usd": args.budget_usd}
        ranked = best_plans(found, objective=args.objective, **limits)
        if ranked and args.write is not None:
            from slm_toolkit.recommend.launch_files import SKYPILOT_FILE, write_launch

            written = write_launch(ranked[0], args.write)
            notes += [f"written: {path}" for path in written]
            if args.write / SKYPILOT_FILE not in written:
                notes.append(f"no {SKYPILOT_FILE}: SkyPilot's name for this GPU is unknown")
    notes += [f"left out: {reason}" for reason in left_out[:_MOST_LEFT_OUT]]
    if len(left_out) > _MOST_LEFT_OUT:
        notes.append(f"left out: {len(left_out) - _MOST_LEFT_OUT} more")
    notes += [
        f"{offer.gpu.name}: the price is unknown: give it as {offer.gpu.name}@USD, or with --prices"
        for offer in offers
        if offer.deployment.price is None
    ]
    if args.json:
        from slm_toolkit.recommend.plans import as_json

        print("[" + ",\n ".join(json.dumps(as_json(plan), allow_nan=False) for plan in ranked) + "]")
    else:
        from slm_toolkit.recommend.plan_table import nothing_found, plan_report
        from slm_toolkit.report.tables.fitted import console_of_stdout

        console = console_of_stdout()
        if ranked:
            advice = _advice(ranked, offers, args)
            shown = plan_report(ranked, advice, top=args.top, objective=args.objective, width=console.width)
        else:
            shown = nothing_found(found, left_out, **limits)
        console.print(shown, crop=False, soft_wrap=True)
    for note in dict.fromkeys(notes):
        print(note, file=sys.stderr)
    return 0 if ranked else 1


def _advice(ranked: list["Plan"], offers: list["GpuOffer"], args: argparse.Namespace) -> list[str]:
    """Return lines on the gain of aligned widths, and on changes that speed up the first plan."""
    from slm_toolkit.predict.bottleneck import WORTH_SAYING, alignment_gain, levers
    from slm_toolkit.predict.setup.setup import Setup

    def setup_of(plan: "Plan") -> Setup:
        return Setup(
            plan.spec,
            plan.strategy,
            plan.config,
            num_gpus=plan.estimate.num_gpus,
            gpus_per_node=args.gpus_per_node,
            gpu=next(offer.gpu for offer in offers if offer.gpu.name == plan.estimate.gpu),
            software=args.software,
            deployment=plan.deployment,
        )

    lines = []
    for name in dict.fromkeys(plan.estimate.gpu for plan in ranked):
        gain = alignment_gain(setup_of(next(plan for plan in ranked if plan.estimate.gpu == name)))
        if gain is not None and gain.speedup >= WORTH_SAYING:
            lines.append(f"on {name} {gain.sibling} should train {gain.speedup:.2f} times as fast")
    if (hub_id := ranked[0].spec.hub_id) is not None:
        name = ranked[0].spec.name
        lines.append(
            f"the command starts from the weights of {hub_id}; from random ones: --model {name} "
            f"--tokenizer_name {hub_id}"
        )
    bound = ranked[0].estimate.bottleneck.replace("_", " ")
    for lever in [lever for lever in levers(setup_of(ranked[0])) if lever.change.startswith("--")][:2]:
        if not lever.change.startswith("--per_device"):  # another batch would make other steps
            lines.append(
                f"the first is bound by {bound}: {lever.change} should give {lever.speedup - 1:+.0%}"
            )
    return lines


def _search(
    args: argparse.Namespace,
    workloads: list["Workload"],
    offers: list["GpuOffer"],
    strategies: list[Strategy],
    configs: list[RunConfig],
) -> tuple[list["Plan"], list[str]]:
    """Return all plans that fit, and reasons for those left out."""
    from slm_toolkit.recommend.plans import observations_of, search

    observations = observations_of(args.records)
    found, left_out = [], []
    for workload in workloads:
        of_job = search(
            workload,
            offers,
            strategies,
            [config for config in configs if config.model == workload.asked_model],
            gpus_per_node=args.gpus_per_node,
            observations=observations,
            software=args.software,
        )
        found += of_job.plans
        left_out += of_job.left_out
    return found, list(dict.fromkeys(left_out))
