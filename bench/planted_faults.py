"""Plant each fault of fault_list.py in a training, and see which guard catches it.

    python bench/planted_faults.py --out /tmp/faults           # all faults; goes on where it was stopped
    python bench/planted_faults.py --out /tmp/faults --only "no causal mask"
    python bench/planted_faults.py --out /tmp/faults --sample  # three faults, --parity alone: 60 s
    python bench/planted_faults.py --out /tmp/clean --clean    # comparisons without a fault: none may be red

A fault strikes the runs that its `where` names, of slm-1m on two CPU processes. Guards: `slm compare --parity
20` and plain `slm compare` of ddp, fsdp_full_shard and ds_zero2, which turn a row red, and the probe, which
marks one. Ranks are forked from this process, so that nothing is imported twice; else they are what
`accelerate launch` starts. Needs no GPU.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed  # noqa: F401 - so that no rank imports it
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: F401 - for the lines of fault_list.py
from fault_list import ALL, FAULTS, LOW, RANK_1, SAMPLE, Fault
from memory_traces import launch_environment
from torch.optim import adam as torch_adam
from transformers.models.llama import modeling_llama as llama

from slm_toolkit import train
from slm_toolkit.compare.grid import PlannedRun, plan_runs
from slm_toolkit.compare.local import launch_command, write_resolved
from slm_toolkit.config.flags import training_config
from slm_toolkit.hardware.gpus import this_machine
from slm_toolkit.record.files import read_record
from slm_toolkit.record.numerics import differences, numerics_from
from slm_toolkit.record.parity import judge
from slm_toolkit.record.run_record import RECORD_FILE, RunRecord
from slm_toolkit.run import setup as job
from slm_toolkit.run.data import data  # noqa: F401 - for a line of fault_list.py
from slm_toolkit.run.engine import optimizer
from slm_toolkit.run.peers.launch_info import Launch
from slm_toolkit.strategy.strategy import find_strategy

STRATEGIES = ("ddp", "fsdp_full_shard", "ds_zero2")
NUM_STEPS = 20
SECONDS = 240
"for one run; a fault may make ranks wait for each other"
_ENGINES = {"ddp": "ddp", "fsdp2": "fsdp_full_shard", "deepspeed": "ds_zero2"}
_OF_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, and of the runs")
    parser.add_argument("--only", help="faults whose name holds this")
    parser.add_argument("--clean", action="store_true", help="compare runs without a fault")
    parser.add_argument("--sample", action="store_true", help="three faults, with --parity only")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / ("clean.jsonl" if args.clean else "sample.jsonl" if args.sample else "faults.jsonl")
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if args.clean:
        results = clean_results(args.out, done, args.only)
    else:
        chosen = [fault for fault in FAULTS if (fault.name, fault.where) in SAMPLE or not args.sample]
        chosen = [fault for fault in chosen if not args.only or args.only in fault.name]
        results = fault_results(args.out, done, chosen, plainly=not args.sample)
    for result in results:
        with file.open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        done.append(result)
        print(_line(result), flush=True)
    if not args.clean:
        print(fault_table(done))


def fault_results(
    out: Path, done: list[dict[str, Any]], chosen: list[Fault], *, plainly: bool
) -> Iterator[dict[str, Any]]:
    """One result for each fault that has none yet: caught by which guard, and what it said.

    `plainly`: plain `slm compare`, too, beside `--parity`. Without it, only DDP gets the faults of LOW.
    """
    names = {(result["fault"], result["where"]) for result in done}
    for fault in chosen:
        if (fault.name, fault.where) in names:
            continue
        started = time.monotonic()
        strategies = STRATEGIES if plainly or fault.where != LOW else ("ddp",)
        gate = guard(fault, out / "runs", parity=True, strategies=strategies)
        plain = guard(fault, out / "runs", parity=False) if plainly else Found(False, False, "not tried")
        yield {
            "fault": fault.name,
            "where": fault.where,
            "harmless": fault.harmless,
            "parity": gate.caught,
            "plain": plain.caught,
            "probe": gate.marked or plain.marked,
            "said": gate.said,
            "said_plain": plain.said,
            "seconds": round(time.monotonic() - started, 1),
        }


@dataclasses.dataclass(frozen=True)
class Found:
    caught: bool
    marked: bool
    "by the probe"
    said: str


def guard(fault: Fault, folder: Path, *, parity: bool, strategies: tuple[str, ...] = STRATEGIES) -> Found:
    """What `slm compare` says of the runs that a fault strikes, among clean ones."""
    runs = _planned({"model": "slm-1m", **fault.flags}, folder, parity=parity, strategies=strategies)
    records = []
    for run in runs:
        strikes = _strikes(fault, run)
        if not strikes:
            records.append(_record_of(run, folder / "clean"))
            continue
        if not parity and run.strategy.name not in (_ENGINES.get(fault.where, "ddp"), "ddp", "ds_zero2"):
            continue
        record = _record_of(run, folder / f"{fault.name} {fault.where}".replace(" ", "_"), fault)
        if record.status != "ok":
            return Found(True, True, f"{record.strategy} {record.status}: {record.reason}")
        records.append(record)
    judged = [parity for parity in judge(records) if parity is not None]
    broken = [parity for parity in judged if not parity.holds]
    ddp = next(record for record in records if record.strategy == "ddp")
    marked = any(
        differences(numerics_from(record.numerics), numerics_from(ddp.numerics))
        for record in records
        if not record.is_parity_reference
    )
    nearest = max(broken or judged, key=lambda parity: parity.excess)
    return Found(bool(broken), marked, str(nearest))


def _strikes(fault: Fault, run: PlannedRun) -> bool:
    if fault.where == ALL:
        return True
    if fault.where == LOW:
        return run.config.numerics != "fp32"
    return run.strategy.name == ("ddp" if fault.where == RANK_1 else _ENGINES[fault.where])


def clean_results(out: Path, done: list[dict[str, Any]], only: str | None) -> Iterator[dict[str, Any]]:
    """Comparisons without a fault, over seeds, models, numerics and numbers of ranks."""
    folder = out / "models"
    names = {result["name"] for result in done}
    for given, num_processes, strategies in _clean_comparisons(folder):
        name = " ".join(map(str, [*(Path(str(v)).stem for v in given.values()), num_processes]))
        if name in names or (only and only not in name):
            continue
        started = time.monotonic()
        runs = _planned(given, out / "runs", parity=True, num_processes=num_processes, strategies=strategies)
        records = [_record_of(run, out / "runs" / name.replace(" ", "_")) for run in runs]
        judged = [parity for parity in judge(records) if parity is not None]
        bad = [str(parity) for parity in judged if not parity.holds]
        bad += [f"{r.strategy} {r.status}: {r.reason}" for r in records if r.status != "ok"]
        yield {
            "name": name,
            "red": bad,
            "seconds": round(time.monotonic() - started, 1),
        }
        shutil.rmtree(out / "runs" / name.replace(" ", "_"), ignore_errors=True)


def _clean_comparisons(folder: Path) -> Iterator[tuple[dict[str, Any], int, tuple[str, ...]]]:
    """52 of them: flags, ranks and strategies."""
    two, three = ("ddp", "ds_zero2"), STRATEGIES
    models = ["slm-1m", *_own_models(folder), "slm-3m"]
    sixteen_bits = ("aligned", "stock", "pure_bf16", "fp16")
    for numerics in sixteen_bits:
        for model in models:
            for seed in (0, 1):
                yield {"model": model, "numerics": numerics, "seed": seed}, 2, three
    for model in models:
        yield {"model": model, "numerics": "fp32", "seed": 2}, 2, three
    for ranks in (3, 4):
        for numerics in sixteen_bits:
            yield {"model": "slm-1m", "numerics": numerics, "seed": ranks}, ranks, two
    others = ("fsdp_shard_grad_op", "ds_zero1", "ds_zero3")
    for seed in (5, 6, 7, 8):
        yield {"model": "slm-1m", "numerics": "aligned", "seed": seed}, 2, others
    yield {"model": "slm-1m", "numerics": "fp16", "seed": 5}, 2, others
    for numerics in sixteen_bits[:-1]:  # a CPU multiplies fp16 30 times slower than fp32
        yield {"model": "slm-10m", "numerics": numerics, "seed": 9}, 2, two


def _own_models(folder: Path) -> list[str]:
    """slm-1m with tied embeddings, and with grouped queries."""
    from transformers import LlamaConfig

    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512}
    made = {
        "tied": LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=True),
        "grouped": LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2),
    }
    for name, config in made.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(config.to_json_string(use_diff=False))
    return [str(folder / f"{name}.json") for name in made]


def _planned(
    given: dict[str, Any],
    folder: Path,
    *,
    parity: bool,
    num_processes: int = 2,
    strategies: tuple[str, ...] = STRATEGIES,
) -> list[PlannedRun]:
    length = {"parity" if parity else "max_steps": NUM_STEPS}
    still = {"save_final_model": "false", "output_dir": str(folder)}
    return plan_runs(
        {**given, **length, **still},
        [find_strategy(name) for name in strategies],
        num_processes=num_processes,
        machine=this_machine(),
    )


def _record_of(run: PlannedRun, folder: Path, fault: Fault | None = None) -> RunRecord:
    """The run's record, from `folder` if it is there."""
    path = folder / run.run_name / RECORD_FILE
    if not path.exists():
        config = dataclasses.replace(run.config, output_dir=str(folder))
        _launch(dataclasses.replace(run, config=config), fault)
    if path.exists():
        return read_record(path)
    log = (folder / run.run_name / "log.txt").read_text(errors="replace").splitlines()
    said = [line for line in log if "error" in line.lower()] or log or ["nothing"]
    return RunRecord(
        run_name=run.run_name,
        identity=run.identity,
        status="failed",
        strategy=run.strategy.name,
        asked=run.asked,
        model={},
        versions={},
        started_at="",
        reason=said[-1],
    )


def _launch(run: PlannedRun, fault: Fault | None) -> None:
    """Forks the run's ranks, as accelerate's launcher would start them, and waits for them."""
    run.folder.mkdir(parents=True, exist_ok=True)
    port = random.randint(20_000, 32_767)
    command = launch_command(run, write_resolved(run.strategy, run.folder / "launch", run.num_processes))
    words = command[command.index("slm_toolkit.train") + 1 :]
    variables = launch_environment(command[command.index("accelerate.commands.launch") + 1 :])
    ranks = []
    for rank in range(run.num_processes):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            os.environ.update(variables)
            if run.num_processes > 1:
                os.environ.update(dict.fromkeys(_OF_RANK, str(rank)))
                os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(run.num_processes)))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            _be_a_rank(run, words, fault, rank)
        ranks.append(pid)
    until = time.monotonic() + SECONDS
    left = set(ranks)
    while left and time.monotonic() < until:
        for pid in tuple(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                if status:
                    until = min(until, time.monotonic() + 10)  # for the others to fail as well
        time.sleep(0.02)
    for pid in left:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_a_rank(run: PlannedRun, words: list[str], fault: Fault | None, rank: int) -> None:
    try:
        log = os.open(run.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        job.find_launch = lambda: Launch(run.strategy, run.num_processes, ())
        if fault is not None and (fault.where != RANK_1 or rank == 1):
            plant(fault, rank)
        train.main(words)
        train.leave(0)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def plant(fault: Fault, rank: int) -> None:
    """Run the fault's line before training starts; of LOW, only where numerics are not fp32."""
    set_up = train.set_up

    def faulty(arguments: list[str], *args: Any, **options: Any) -> Any:
        train.set_up = set_up  # a fault may change it
        if fault.where != LOW or training_config(arguments).numerics != "fp32":
            exec(fault.patch, {**globals(), "rank": rank})
        return train.set_up(arguments, *args, **options)

    train.set_up = faulty


# --- what the lines of fault_list.py are made of


def after(module: Any, name: str, change: Callable[[Any], Any]) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            made = original(*args, **options)
            with torch.no_grad():
                change(made)
            return made

        return changed

    instead(module, name, make)


def instead(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(module, name, make(getattr(module, name)))


def on_gradients(change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    def hook(model: torch.nn.Module) -> None:
        for name, param in model.named_parameters():
            param.register_hook(lambda gradient, name=name: change(name, gradient))

    after(job, "build_model", hook)


def on_loss(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Where engines make parameters of their own, whose hooks nobody can set before."""

    def hook(model: torch.nn.Module, inputs: Any, output: Any) -> None:
        output.loss.register_hook(change)

    after(job, "build_model", lambda model: model.register_forward_hook(hook))


class EveryOther:
    """Each parameter's gradient of every second backward is lost."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def __call__(self, name: Any, gradient: torch.Tensor | None = None) -> torch.Tensor:
        if gradient is None:  # of the loss
            name, gradient = "", name
        self.seen[name] = self.seen.get(name, 0) + 1
        return gradient * (self.seen[name] % 2)


@dataclasses.dataclass
class Call:
    """The arguments of an update by Adam; several calls make a step."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]
    is_left_out: bool = False

    @property
    def number(self) -> int:
        return int(self.steps[0].item()) + 1

    def leave_out(self, whether: bool) -> None:
        self.is_left_out = whether
        if whether:
            for step in self.steps:
                step.add_(1)

    def use_last_gradients(self) -> None:
        for param, gradient in zip(self.params, self.grads, strict=True):
            key = param.data_ptr()
            last = _LAST.get(key)
            _LAST[key] = gradient.clone()
            if last is not None and last.shape == gradient.shape:
                gradient.copy_(last)


_LAST: dict[int, torch.Tensor] = {}


def after_step(change: Callable[[Call], Any]) -> None:
    on_step(lambda call: None, afterwards=change)


def on_step(change: Callable[[Call], Any], afterwards: Callable[[Call], Any] = lambda call: None) -> None:
    def make(update: Callable[..., Any]) -> Callable[..., Any]:
        def changed(
            params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, *rest: Any, **options: Any
        ) -> Any:
            steps = options["state_steps"] if "state_steps" in options else rest[1]
            call = Call(params, grads, exp_avgs, exp_avg_sqs, steps)
            with torch.no_grad():
                change(call)
            if not call.is_left_out:
                update(params, grads, exp_avgs, exp_avg_sqs, *rest, **options)
            with torch.no_grad():
                afterwards(call)

        return changed

    instead(optimizer, "adamw", make)
    instead(torch_adam, "adam", make)


def on_labels(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def make(inputs: Callable[..., Any]) -> Callable[..., Any]:
        def changed(batch: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
            made = inputs(batch, config)
            return {**made, "labels": change(made["labels"])}

        return changed

    instead(train, "model_inputs", make)


def keep(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that reduces nothing."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def keep_in_step(number: int) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """The same in one step only."""
    count = {"steps": 0}

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        count["steps"] += bucket.is_last()
        if count["steps"] == number or (count["steps"] == number - 1 and not bucket.is_last()):
            return keep(state, bucket)
        mean = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(mean, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    return hook


def keep_one(name: str) -> Callable[[torch.nn.Module, Any], None]:
    """In place of `set_reduction`: DDP reduces all but one parameter's gradient."""

    def reduce_others(model: torch.nn.Module, config: Any) -> None:
        kept = model.module.get_parameter(name)

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
            own = [(gradient, gradient.clone()) for param, gradient in pairs if param is kept]
            dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
            for gradient, local in own:
                gradient.copy_(local)
            return keep(state, bucket)

        model.register_comm_hook(None, hook)

    return reduce_others


def same_on_all(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        for value in batch.values():
            dist.broadcast(value, src=0)
        yield batch


def stuck(batches: Iterator[Any]) -> Iterator[Any]:
    first = next(batches)
    while True:
        yield first


def noisy(tokens: torch.Tensor) -> torch.Tensor:
    random.seed(int(tokens.sum()))
    other = tokens.clone()
    for _ in range(tokens.numel() // 100):
        other[random.randrange(len(tokens)), random.randrange(tokens.shape[1])] = 5
    return other


def windowed(query: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    places = torch.arange(query.shape[-2])
    near = (places[:, None] - places[None, :]).abs() < 32
    mask = options.get("attn_mask")
    if mask is None:
        mask = places[:, None] >= places[None, :]
    return {**options, "attn_mask": mask & near, "is_causal": False}


def set_eps(eps: float) -> None:
    def change(model: torch.nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, llama.LlamaRMSNorm):
                part.variance_epsilon = eps

    after(job, "build_model", change)


class ZLoss(torch.autograd.Function):
    """Logits, to whose gradient that of `weight` times the squared log of their sum is added."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.weight = weight
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (logits,) = ctx.saved_tensors
        size = torch.logsumexp(logits.float(), -1, keepdim=True)
        extra = 2 * ctx.weight * size * torch.softmax(logits.float(), -1) / logits[..., 0].numel()
        return gradient + extra.to(gradient.dtype), None


# --- what is printed


def _line(result: dict[str, Any]) -> str:
    if "name" in result:
        red = "RED " + "; ".join(result["red"]) if result["red"] else "clean"
        return f"{result['name']}: {red} {result['seconds']} s"
    caught = [name for name in ("parity", "plain", "probe") if result[name]]
    words = ", ".join(caught) or "NOTHING"
    return f"{result['where']}: {result['fault']}: {words} ({result['seconds']} s) {result['said'][:150]}"


def fault_table(done: list[dict[str, Any]]) -> str:
    marks = {True: "x", False: "-"}
    lines = ["| fault | where | --parity 20 | plain | probe | harmless, since |", "|---|---|---|---|---|---|"]
    for r in done:
        caught = (marks[r[name]] for name in ("parity", "plain", "probe"))
        lines.append(f"| {' | '.join((r['fault'], r['where'], *caught, r['harmless'] or ''))} |")
    counts = {name: sum(result[name] for result in done) for name in ("parity", "plain", "probe")}
    return "\n".join(
        [*lines, f"of {len(done)}: {', '.join(f'{name} {count}' for name, count in counts.items())}"]
    )


if __name__ == "__main__":
    sys.exit(main())
