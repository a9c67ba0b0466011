"""`slm recommend`: which GPUs, how many, which strategy and batch for a job, and the commands to start it."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from slm_toolkit.config import RunConfig
from slm_toolkit.errors import user_errors
from slm_toolkit.recommend_flags import add_recommend_flags, configs_of, jobs_of, offers_of
from slm_toolkit.strategy import Strategy, find_strategy, notes_on

if TYPE_CHECKING:
    from slm_toolkit.predict.plans import GpuOffer, Job, Plan

_MOST_LEFT_OUT = 6
"reasons that are printed"
_EPILOG = """\
examples:
  slm recommend --model slm-1b --gpu a100-40gb h100-80gb
  slm recommend --model slm-2b --tokens 40B --gpu h100-80gb:8,16@2.49 a100-80gb:8 --deadline_hours 72
  slm recommend --model slm-500m slm-1b --target_loss 2.9 --gpu l40s:1,2,4,8 --budget_usd 500 --write plan/
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """The flags of `slm recommend`, and what it does."""
    parser.description = (
        "Ranks GPU types and counts, strategies, batches and checkpointing for a whole training "
        "run, by estimate, or by records of your own runs where there are any; says why, and writes what to "
        "launch."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_recommend_flags(parser)
    parser.set_defaults(verb=_recommend)


def _recommend(args: argparse.Namespace) -> int:
    """Exit code 0: a plan was found; 1: none is within the limits."""
    with user_errors():
        offers = offers_of(args)
        jobs, notes = jobs_of(args)
        strategies = [find_strategy(name) for name in dict.fromkeys(args.strategy)]
        notes += notes_on(strategies)
        configs = configs_of(args)
        if args.write is not None:
            from slm_toolkit.launch_files import check_folder

            check_folder(args.write)
        found, left_out = _search(args, jobs, offers, strategies, configs)
        from slm_toolkit.predict.plan_ranking import best_plans

        limits = {"deadline_hours": args.deadline_hours, "budget_usd": args.budget_usd}
        ranked = best_plans(found, objective=args.objective, **limits)
        if ranked and args.write is not None:
            from slm_toolkit.launch_files import write_launch
            from slm_toolkit.skypilot import SKYPILOT_FILE

            written = write_launch(ranked[0], args.write)
            notes += [f"written: {path}" for path in written]
            if args.write / SKYPILOT_FILE not in written:
                notes.append(f"no {SKYPILOT_FILE}: no name of SkyPilot's is known for this GPU")
    notes += [f"left out: {reason}" for reason in left_out[:_MOST_LEFT_OUT]]
    if len(left_out) > _MOST_LEFT_OUT:
        notes.append(f"left out: {len(left_out) - _MOST_LEFT_OUT} more")
    notes += [
        f"{offer.gpu.name}: no price known: give one as {offer.gpu.name}@USD, or with --prices"
        for offer in offers
        if offer.site.price is None
    ]
    if args.json:
        from slm_toolkit.predict.plans import row_of

        print("[" + ",\n ".join(json.dumps(row_of(plan), allow_nan=False) for plan in ranked) + "]")
    else:
        from rich.console import Console

        from slm_toolkit.report.plan_table import nothing_found, plan_report
        from slm_toolkit.report.widths import PIPE_WIDTH

        console = Console(markup=False, emoji=False)
        console.width = console.width if console.is_terminal else PIPE_WIDTH
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
    """What aligned widths would give on each GPU type, and what else would move the first plan."""
    from slm_toolkit.predict.bottleneck import WORTH_SAYING, levers
    from slm_toolkit.predict.setting import Setting, alignment_gain

    def setting_of(plan: "Plan") -> Setting:
        gpu = next(offer.gpu for offer in offers if offer.gpu.name == plan.estimate.gpu)
        shape = (plan.estimate.num_gpus, args.gpus_per_node)
        return Setting(plan.spec, plan.config, plan.strategy, gpu, *shape, plan.site, args.software)

    lines = []
    for name in dict.fromkeys(plan.estimate.gpu for plan in ranked):
        gain = alignment_gain(setting_of(next(plan for plan in ranked if plan.estimate.gpu == name)))
        if gain is not None and gain.speedup >= WORTH_SAYING:
            lines.append(f"on {name} {gain.sibling} should train {gain.speedup:.2f} times as fast")
    if (hub_id := ranked[0].spec.hub_id) is not None:
        name = ranked[0].spec.name
        lines.append(
            f"the command starts from the weights of {hub_id}; from random ones: --model {name} "
            f"--tokenizer_name {hub_id}"
        )
    winner = setting_of(ranked[0])
    bound = ranked[0].estimate.bottleneck.replace("_", " ")
    found = levers(lambda spec, config: winner.estimate(spec, config), winner.spec, winner.config)
    for lever in [lever for lever in found if lever.change.startswith("--")][:2]:
        if not lever.change.startswith("--per_device"):  # that would make other steps of it
            lines.append(
                f"the first is bound by {bound}: {lever.change} should give {lever.speedup - 1:+.0%}"
            )
    return lines


def _search(
    args: argparse.Namespace,
    jobs: list["Job"],
    offers: list["GpuOffer"],
    strategies: list[Strategy],
    configs: list[RunConfig],
) -> tuple[list["Plan"], list[str]]:
    """All plans that fit, and what was left out and why."""
    from slm_toolkit.predict.plans import search
    from slm_toolkit.report.observations import observations_of

    observations = observations_of(args.records)
    found, left_out = [], []
    for job in jobs:
        of_job = search(
            job,
            offers,
            strategies,
            [config for config in configs if config.model == job.asked_model],
            gpus_per_node=args.gpus_per_node,
            observations=observations,
            software=args.software,
        )
        found += of_job.plans
        left_out += of_job.left_out
    return found, list(dict.fromkeys(left_out))
