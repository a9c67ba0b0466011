"""The Python API: what the verbs of `slm` compute, as functions that return typed results.

    from slm_toolkit import api as slm

    print(slm.estimate(model="slm-1b", gpu="a100-40gb", num_gpus=8))
    report = slm.report(slm.read_records("runs"))

The import loads neither torch nor rich: each function loads what it needs. A user's mistake raises ValueError
with the message that the command line prints.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType

    from slm_toolkit.predict.estimate import Estimate
    from slm_toolkit.predict.setup.other_trainers import OtherTrainer
    from slm_toolkit.recommend.job import GpuOffer
    from slm_toolkit.recommend.plans import Plan
    from slm_toolkit.record.run_record import RunRecord
    from slm_toolkit.report.charts.figures import Panel
    from slm_toolkit.report.rows import Row
    from slm_toolkit.report.tables.ledger import LedgerEntry

Names = str | Path | Sequence[str | Path]
"one name or path, or several"
NOT_OF_A_RECOMMENDATION = ("gradient_accumulation_steps", "max_steps", "max_tokens", "seed")
"flags that follow from the tokens to train on"
Item = TypeVar("Item")
_TEXT_WIDTH = 160
"columns of a table as text"
_NOTEBOOK_WIDTH = 120
"columns of a table in a notebook, whose cells are about so wide"


def estimate(
    *,
    model: str | Sequence[str] | None = None,
    strategy: Names | None = None,
    gpu: str | Sequence[str] | None = None,
    num_gpus: int | Sequence[int] | None = None,
    gpus_per_node: int = 8,
    seq_len: int | Sequence[int] | None = None,
    per_device_train_batch_size: int | Sequence[int] | None = None,
    gradient_checkpointing: str | Sequence[str] | None = None,
    numerics: str | Sequence[str] | None = None,
    peft: str | Sequence[str] | None = None,
    find_largest_batch: bool = False,
    live_deepspeed: bool = False,
    like: str | None = None,
    usd_per_gpu_hour: float | None = None,
    prices: str | Path | None = None,
    price_kind: str | None = None,
    provider: str | None = None,
    inter_node_gbps: float | None = None,
    network: str | Path | None = None,
    flags: Mapping[str, object] | None = None,
) -> "Estimates":
    """Estimate memory, speed and cost of every combination, as `slm estimate` does. Nothing runs.

    `model`: a preset such as slm-1b, a folder or a hub id. `strategy`: shipped names, YAMLs or DeepSpeed
    JSONs; None: the six of the study. `gpu`: a name such as a100-40gb or a100-40gb:8; None: memory only.
    `num_gpus` counts all nodes (default: 8). `find_largest_batch` looks for the largest batch per GPU that
    fits `gpu`. `like`: trainer, torchtune, nanotron, torchtitan or litgpt, to estimate what that trainer does
    by default. `flags`: any other field of RunConfig, with a value or a list of values. Fields of an Estimate
    end in their units: bytes per GPU, seconds per step, dollars. Raises one ValueError with all problems.
    """
    from slm_toolkit.config.parser import positive_number, price_per_hour
    from slm_toolkit.config.run_config import RunConfig
    from slm_toolkit.predict import grid
    from slm_toolkit.predict.deployments import deployments
    from slm_toolkit.predict.flag_checks import NOT_OF_AN_ESTIMATE, gpus_asked
    from slm_toolkit.predict.setup.other_trainers import as_liked, notes_like, trainer_named
    from slm_toolkit.strategy.groups import strategies_asked

    given = _flags(
        flags,
        leave_out=NOT_OF_AN_ESTIMATE,
        model=model,
        seq_len=seq_len,
        per_device_train_batch_size=per_device_train_batch_size,
        gradient_checkpointing=gradient_checkpointing,
        numerics=numerics,
        peft=peft,
    )
    _check_choices(price_kind=price_kind)
    own_flags, trainer = given, trainer_named(like)
    given, trainer = as_liked(trainer, own_flags)
    names = _list(strategy) or (list(trainer.strategies) if trainer else None)
    strategies, left_out = strategies_asked(names, given, has_gpu=True)
    gpus, counts = gpus_asked(_list(gpu), _counts(num_gpus)) if gpu else ([None], _counts(num_gpus))
    rows = grid.estimates(
        given,
        strategies,
        gpus=gpus,
        num_gpus=counts or [8],
        gpus_per_node=_number("gpus_per_node", gpus_per_node, int),
        find_largest_batch=find_largest_batch,
        search_changes=True,
        live_deepspeed=live_deepspeed,
        like=trainer,
        deployments=deployments(
            usd_per_gpu_hour=_number("usd_per_gpu_hour", usd_per_gpu_hour, price_per_hour),
            prices=_path(prices),
            price_kind=price_kind,
            provider=provider,
            inter_node_gbps=_number("inter_node_gbps", inter_node_gbps, positive_number),
            network=_path(network),
        ),
    )
    notes = [
        *notes_like(trainer_named(like), own_flags),
        *left_out,
        *grid.notes_on_models(given),
        *grid.notes_on_strategies(strategies, given.get("numerics") or [RunConfig.numerics]),
    ]
    return Estimates(rows, notes, found_largest_batch=find_largest_batch)


def recommend(
    *,
    model: str | Sequence[str] | None = None,
    gpu: str | Sequence[str] | None = None,
    tokens: float | None = None,
    target_loss: float | None = None,
    num_train_epochs: float | None = None,
    global_batch_tokens: float | None = None,
    deadline_hours: float | None = None,
    budget_usd: float | None = None,
    objective: Literal["cost", "time"] = "cost",
    num_gpus: int | Sequence[int] | None = None,
    gpus_per_node: int = 8,
    strategy: Names | None = None,
    records: str | Path | Sequence[str | Path] = (),
    like: str | None = None,
    seq_len: int | Sequence[int] | None = None,
    per_device_train_batch_size: int | Sequence[int] | None = None,
    numerics: str | Sequence[str] | None = None,
    peft: str | Sequence[str] | None = None,
    usd_per_gpu_hour: float | None = None,
    prices: str | Path | None = None,
    price_kind: str | None = None,
    provider: str | None = None,
    inter_node_gbps: float | None = None,
    network: str | Path | None = None,
    flags: Mapping[str, object] | None = None,
) -> "Recommendation":
    """Rank GPUs, their number, strategies and batches for a whole training, as `slm recommend` does.

    `gpu`: offers such as h100-80gb, h100-80gb:8,16 or h100-80gb:8,16@2.49 (dollars per GPU-hour); None:
    every GPU type with a known price. `tokens`, `target_loss` or `num_train_epochs` (over the flag `dataset`)
    sets the length of the training. Without them a scaling law sets it, but not for a model with
    weights. `global_batch_tokens`: tokens per optimizer step; None: 524,288, to fine-tune 128 sequences.
    `records`: folders of your own runs, which count more than estimates. `like`: rank what another trainer
    would do, as in `estimate`. The other arguments are those of `estimate`. The result has no plans if none
    is within the limits. Raises ValueError for a user's mistake.
    """
    from slm_toolkit.config.parser import count, positive_number, price_per_hour
    from slm_toolkit.predict.deployments import deployments
    from slm_toolkit.predict.flag_checks import NOT_OF_AN_ESTIMATE
    from slm_toolkit.predict.setup.other_trainers import as_liked, notes_like, trainer_named
    from slm_toolkit.recommend.job import Length, configs_of, offers_of, search_all, workloads_of
    from slm_toolkit.recommend.plans import observations_of
    from slm_toolkit.recommend.ranking import best_plans
    from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, find_strategy, notes_on

    given = _flags(
        flags,
        leave_out=(*NOT_OF_AN_ESTIMATE, *NOT_OF_A_RECOMMENDATION),
        model=model,
        seq_len=seq_len,
        per_device_train_batch_size=per_device_train_batch_size,
        numerics=numerics,
        peft=peft,
    )
    _check_choices(price_kind=price_kind, objective=objective)
    if like is not None and records:
        raise ValueError(
            f"--like {like} with --records: the records are slm_toolkit's own runs\nhint: give one of them"
        )
    own_flags, trainer = given, trainer_named(like)
    given, trainer = as_liked(trainer, own_flags)
    deployment_of = deployments(
        usd_per_gpu_hour=_number("usd_per_gpu_hour", usd_per_gpu_hour, price_per_hour),
        prices=_path(prices),
        price_kind=price_kind,
        provider=provider,
        inter_node_gbps=_number("inter_node_gbps", inter_node_gbps, positive_number),
        network=_path(network),
    )
    gpus_per_node = _number("gpus_per_node", gpus_per_node, count)
    offers = offers_of(
        _list(gpu),
        num_gpus=_counts(num_gpus),
        gpus_per_node=gpus_per_node,
        deployment_of=deployment_of,
    )
    length = Length(
        num_tokens=_number("tokens", tokens, positive_number),
        target_loss=_number("target_loss", target_loss, positive_number),
        num_epochs=_number("num_train_epochs", num_train_epochs, positive_number),
        global_batch_tokens=_number("global_batch_tokens", global_batch_tokens, positive_number),
    )
    workloads, notes = workloads_of(given, length)
    names = _list(strategy) or ["single", *(trainer.strategies if trainer else STUDIED_STRATEGIES)]
    strategies = [find_strategy(name) for name in dict.fromkeys(names)]
    if trainer and (problems := trainer.problems(strategies)):
        raise ValueError("\n".join(problems) + "\nhint: leave --strategy or --like out")
    found = search_all(
        workloads,
        offers,
        strategies,
        configs_of(given, gpus_per_node=gpus_per_node),
        gpus_per_node=gpus_per_node,
        observations=observations_of([Path(folder) for folder in _list(records) or []]),
        like=trainer,
    )
    limits = {
        "deadline_hours": _number("deadline_hours", deadline_hours, positive_number),
        "budget_usd": _number("budget_usd", budget_usd, positive_number),
    }
    return Recommendation(
        plans=best_plans(found.plans, objective=objective, **limits),
        considered=found.plans,
        left_out=found.left_out,
        notes=[*notes_like(trainer_named(like), own_flags), *notes, *notes_on(strategies)],
        offers=offers,
        objective=objective,
        gpus_per_node=gpus_per_node,
        like=trainer,
        **limits,
    )


def compare(
    *,
    script: str | Path | None = None,
    arguments: Sequence[str] = (),
    model: str | Sequence[str] | None = None,
    strategy: Names | None = None,
    num_processes: int | None = None,
    seq_len: int | Sequence[int] | None = None,
    per_device_train_batch_size: int | Sequence[int] | None = None,
    max_steps: int | None = None,
    numerics: str | Sequence[str] | None = None,
    dataset: str | None = None,
    output_dir: str | Path | None = None,
    repeats: int = 1,
    parity: int | None = None,
    find_largest_batch: bool = False,
    max_batch: int | None = None,
    gpus_per_run: int | None = None,
    skip_oom: bool = False,
    force: bool = False,
    timeout_seconds: float = 3600,
    usd_per_gpu_hour: float | None = None,
    parity_tolerance: float | None = None,
    strict: bool = False,
    flags: Mapping[str, object] | None = None,
) -> "Report":
    """Run every combination on this machine, as `slm compare` does, and report on all of them.

    Each run is a separate process tree and writes its record under `output_dir` (default: runs). Finished
    runs are kept, unless `force`. Progress goes to stderr. `script`: your own training script instead of our
    trainer, with its `arguments`; `["--batch", "4,8"]` makes a grid. `num_processes`: ranks (default: all
    GPUs, else two processes). `parity`: steps to check against one process. `timeout_seconds`: for each run.
    `flags`: any other field of RunConfig. A run that fails or runs out of memory is a row with its reason.
    Raises ValueError for a user's mistake before anything starts, KeyboardInterrupt after Ctrl-C has ended
    the runs.
    """
    from rich.console import Console

    from slm_toolkit.compare.comparison import Request, launch_all, prepare, prepare_script, with_searches
    from slm_toolkit.compare.scripts import PAIRS, Script
    from slm_toolkit.config.flag_pairs import check_pairs, names_given
    from slm_toolkit.config.flags import ONE_RUN_ONLY
    from slm_toolkit.config.parser import count, positive_number
    from slm_toolkit.doctor.before_launch import check_launches

    given = _flags(
        flags,
        leave_out=ONE_RUN_ONLY,
        model=model,
        seq_len=seq_len,
        per_device_train_batch_size=per_device_train_batch_size,
        max_steps=max_steps,
        numerics=numerics,
        dataset=dataset,
        output_dir=output_dir,
    )
    request = Request(
        given=given,
        strategy=_list(strategy),
        num_processes=_number("num_processes", num_processes, int),
        timeout_seconds=_number("timeout", timeout_seconds, positive_number),
        num_repeats=_number("repeats", repeats, count),
        parity_steps=_number("parity", parity, count),
        find_largest_batch=find_largest_batch,
        max_batch=_number("max_batch", max_batch, count),
        gpus_per_run=_number("gpus_per_run", gpus_per_run, count),
        skip_oom=skip_oom,
        force=force,
        usd_per_gpu_hour=usd_per_gpu_hour,
    )
    options = {
        "num_processes": num_processes,
        "repeats": repeats > 1,
        "parity": parity,
        "largest_batch": find_largest_batch,
        "max_batch": max_batch,
        "skip_oom": skip_oom,
    }
    _report_numbers(usd_per_gpu_hour, parity_tolerance)  # before the runs, not after
    is_live = False if Console().is_jupyter else None  # a notebook would keep each state of a live bar
    console = Console(stderr=True, force_jupyter=False, force_terminal=is_live)
    if script is None:
        if arguments:
            raise ValueError("arguments without a script\nhint: script='train.py'")
        prepared = prepare(
            request,
            names=names_given({**given, **options}),
            check_launches=check_launches,
            console=console,
        )
    else:
        check_pairs(names_given({**options, "script": script}), PAIRS)
        if isinstance(arguments, str):
            raise ValueError("arguments must be a list of words\nhint: arguments=['--batch', '4,8']")
        words = [str(word) for word in arguments]
        prepared = prepare_script(request, Script.of(str(script), words), console=console)
    done = launch_all(prepared, request, jobs=None, console=console)
    if done.interrupted:
        raise KeyboardInterrupt
    records = Records(done.records, [])
    made = report(
        records, usd_per_gpu_hour=usd_per_gpu_hour, parity_tolerance=parity_tolerance, strict=strict
    )
    return Report(with_searches(made.rows, done.searches), records, made.problems)


def read_records(paths: Names = "runs") -> "Records":
    """Read all record.json files in folders, at any depth, and files; in the order of a report.

    Raises ValueError for a path that does not exist, and if there is no record at all.
    """
    from slm_toolkit.record.files import find_records
    from slm_toolkit.record.run_record import RECORD_FILE
    from slm_toolkit.report.rows import report_order

    folders = [Path(path) for path in _list(paths)]
    found, problems = find_records(folders)
    if not found:
        nothing = f"no {RECORD_FILE} under {folders[0]}\nhint: `slm compare` writes records"
        raise ValueError(problems[0] if problems else nothing)
    return Records(sorted(found, key=report_order), problems)


def report(
    records: "Records | str | Path | Sequence[str | Path]" = "runs",
    *,
    usd_per_gpu_hour: float | None = None,
    parity_tolerance: float | None = None,
    strict: bool = False,
    sort: str = "rank",
) -> "Report":
    """Make ranked rows of records, as `slm report` does; launches of the same run share a row.

    `records`: the result of `read_records`, or paths. `usd_per_gpu_hour`: your price instead of the table's.
    `parity_tolerance`: the largest difference of a loss that passes. `strict`: rows with other
    numerics get no rank. `sort`: "rank" (fastest first), "strategy", "memory" or "cost". Raises ValueError
    for a user's mistake.
    """
    from slm_toolkit.report.rows import SORTS, rows_of, sorted_rows

    _check_choices(sort=(sort, SORTS))

    read = records if isinstance(records, Records) else read_records(records)
    usd_per_gpu_hour, parity_tolerance = _report_numbers(usd_per_gpu_hour, parity_tolerance)
    problems = list(read.problems)
    rows = rows_of(
        read.pairs,
        usd_per_gpu_hour=usd_per_gpu_hour,
        parity_tolerance=parity_tolerance,
        strict=strict,
        problems=problems,
    )
    return Report(sorted_rows(rows, sort), read, problems)


class _Displayed:
    """Shows a result as its table: `print(result)`, rich consoles and notebooks."""

    def table(self, *, width: int = _TEXT_WIDTH) -> "RenderableType":
        """Return what the verb prints, as a rich renderable that fits `width` columns."""
        raise NotImplementedError

    def __rich_console__(self, console: Any, options: Any) -> Iterator["RenderableType"]:
        yield self.table(width=options.max_width)

    def __str__(self) -> str:
        return _text_of(self.table(width=_TEXT_WIDTH), width=_TEXT_WIDTH)

    def _repr_html_(self) -> str:
        return _html_of(self.table(width=_NOTEBOOK_WIDTH), width=_NOTEBOOK_WIDTH)


class _Listed(_Displayed, Generic[Item]):
    """A result that is also a sequence of its rows."""

    rows: list[Item]

    @property
    def _items(self) -> list[Item]:
        return self.rows

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the objects that the verb prints with --json."""
        raise NotImplementedError

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a line for each row, with the names of `to_dicts`. Raises ValueError without pandas."""
        return _data_frame(self.to_dicts())


@dataclass(frozen=True, repr=False)
class Estimates(_Listed["Estimate"]):
    """Estimates of a grid, in its order."""

    rows: list["Estimate"]
    notes: list[str]
    "sentences on what the estimates do not follow, and on strategies that were left out"
    found_largest_batch: bool = False

    def __repr__(self) -> str:
        return f"<Estimates: {len(self)} rows>"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the objects of `slm estimate --json`."""
        return [
            {**vars(row), "changes_that_fit": row.changes_that_fit and [*map(vars, row.changes_that_fit)]}
            for row in self.rows
        ]

    def table(self, *, width: int = _TEXT_WIDTH) -> "RenderableType":
        """Return the table of `slm estimate` as a rich renderable; print it with `crop=False`."""
        from slm_toolkit.report.tables.estimate import estimate_table

        return estimate_table(self.rows, width=width, largest_batch=self.found_largest_batch)


@dataclass(frozen=True, repr=False)
class Recommendation(_Listed["Plan"]):
    """Plans for a whole training, the best first."""

    plans: list["Plan"]
    "empty: none is within the limits"
    considered: list["Plan"]
    "all that fit the GPUs"
    left_out: list[str]
    "what was not considered, as sentences with the reason"
    notes: list[str]
    offers: list["GpuOffer"]
    objective: str
    gpus_per_node: int
    like: "OtherTrainer | None" = None
    deadline_hours: float | None = None
    budget_usd: float | None = None

    @property
    def _items(self) -> list["Plan"]:
        return self.plans

    def __repr__(self) -> str:
        return f"<Recommendation: {len(self)} plans>"

    @property
    def unpriced(self) -> list[str]:
        """Names of offered GPUs without a known price."""
        return [offer.gpu.name for offer in self.offers if offer.deployment.price is None]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the objects of `slm recommend --json`."""
        from slm_toolkit.recommend.plans import as_json

        return [as_json(plan) for plan in self.plans]

    def table(self, *, width: int = _TEXT_WIDTH, top: int = 10) -> "RenderableType":
        """Return what `slm recommend` prints, with the first `top` rows; print it with `crop=False`."""
        from slm_toolkit.recommend.job import advice_on
        from slm_toolkit.recommend.plan_table import nothing_found, plan_report

        if not self.plans:
            return nothing_found(
                self.considered,
                self.left_out,
                deadline_hours=self.deadline_hours,
                budget_usd=self.budget_usd,
            )
        advice = advice_on(
            self.plans,
            offers=self.offers,
            gpus_per_node=self.gpus_per_node,
            like=self.like,
        )
        return plan_report(self.plans, advice, top=top, objective=self.objective, width=width)

    def write(self, folder: str | Path) -> list[Path]:
        """Write the first plan's YAML, launch script and SkyPilot task; return the files.

        Raises ValueError if there is no plan, and for a folder that can't be used.
        """
        from slm_toolkit.recommend.launch_files import check_folder, write_launch

        if not self.plans:
            raise ValueError("there is no plan to write\nhint: table() says what comes nearest")
        check_folder(Path(folder))
        return write_launch(self.plans[0], Path(folder))


@dataclass(frozen=True, repr=False)
class Records:
    """Records of runs with their files, in the order of a report."""

    pairs: list[tuple[Path, "RunRecord"]]
    problems: list[str] = field(default_factory=list)
    "a sentence for each file that could not be read"

    def __iter__(self) -> Iterator["RunRecord"]:
        return (record for _, record in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> "RunRecord":
        return self.pairs[index][1]

    def __repr__(self) -> str:
        return f"<Records: {len(self)} runs>"


@dataclass(frozen=True, repr=False)
class Report(_Listed["Row"]):
    """Ranked rows of recorded runs. Each row's fields are the keys of `slm report --json`."""

    rows: list["Row"]
    records: Records
    problems: list[str] = field(default_factory=list)
    "a sentence for each record that could not be read or shown"

    def __repr__(self) -> str:
        return f"<Report: {len(self)} rows of {len(self.records)} runs>"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the objects of `slm report --json`."""
        from slm_toolkit.report.tables.export import json_rows

        return json_rows(self.rows)

    def to_json(self) -> str:
        from slm_toolkit.report.tables.export import json_text

        return json_text(self.to_dicts())

    def to_csv(self) -> str:
        from slm_toolkit.report.tables.export import csv_text

        return csv_text(self.to_dicts())

    def to_markdown(self) -> str:
        from slm_toolkit.report.tables.export import markdown_text

        return markdown_text(self.rows)

    def to_html(self, path: str | Path | None = None, *, panels: list["Panel"] | None = None) -> str:
        """Return one HTML page with the table and the charts, which fetches nothing; write it to `path`.

        `panels`: charts to draw (default: all).
        """
        from slm_toolkit.report.charts.files import html_page

        panels = self.panels() if panels is None else panels
        text = html_page(self.rows, panels, left_out=[f"left out: {line}" for line in self.problems])
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
        return text

    def caption(self) -> str:
        """Return what the rows share, and the machine, the days and the versions of their runs."""
        from slm_toolkit.report.tables.comparison import heading, provenance

        return f"{heading(self.rows).plain}; {provenance(self.rows)}"

    def verdict(self) -> list[str]:
        """Return the conclusions as sentences: the fastest row, the cheapest, the smallest."""
        from slm_toolkit.report.verdict import verdict

        return verdict(self.rows)

    def panels(self, *, problems: list[str] | None = None) -> list["Panel"]:
        """Return all charts as plotly figures. `problems` takes a line for each damaged memory timeline."""
        from slm_toolkit.report.charts.panels import panels_of
        from slm_toolkit.report.rows import labelled

        problems = [] if problems is None else problems
        return panels_of(self.records.pairs, labelled(self.rows), problems=problems)

    def errors(self) -> list["LedgerEntry"]:
        """Return what `slm estimate` predicts for each run, beside what the run took, in bytes."""
        from slm_toolkit.report.tables.ledger import ledger_of

        return ledger_of(self.records.pairs)[0]

    def table(self, *, width: int = _TEXT_WIDTH) -> "RenderableType":
        """Return the tables and notes of `slm report` as a rich renderable; print it with `crop=False`."""
        from rich.console import Group

        from slm_toolkit.report.tables.sections import failed_references, sections

        unchecked = failed_references(self.records.pairs)
        return Group(*sections(self.rows, width=width, unchecked=unchecked))


def _flags(
    flags: Mapping[str, object] | None, *, leave_out: Sequence[str], **arguments: object
) -> dict[str, Any]:
    """Return all fields of RunConfig that were given, by argument or in `flags`. Raises ValueError."""
    from slm_toolkit.config.keyword_flags import checked_flags

    arguments = {name: value for name, value in arguments.items() if value is not None}
    if twice := sorted(arguments.keys() & (flags or {}).keys()):
        raise ValueError(f"given twice: {', '.join(twice)}\nhint: an argument, or an entry of flags")
    return checked_flags({**(flags or {}), **arguments}, leave_out=leave_out)


def _check_choices(**values: Any) -> None:
    """Raises ValueError for a value that is none of its choices."""
    from slm_toolkit.config.keyword_flags import check_choice
    from slm_toolkit.hardware.prices import KINDS

    known = {"price_kind": KINDS, "objective": ("cost", "time")}
    for name, value in values.items():
        value, choices = value if isinstance(value, tuple) else (value, known[name])
        check_choice(name, value, choices)


def _number(name: str, value: Any, kind: Any) -> Any:
    from slm_toolkit.config.keyword_flags import checked_value

    return checked_value(name, value, kind)


def _report_numbers(
    usd_per_gpu_hour: float | None, parity_tolerance: float | None
) -> tuple[float | None, float | None]:
    from slm_toolkit.config.parser import positive_number, price_per_hour

    usd = _number("usd_per_gpu_hour", usd_per_gpu_hour, price_per_hour)
    return usd, _number("parity_tolerance", parity_tolerance, positive_number)


def _list(names: Names | None) -> list[str] | None:
    if names is None:
        return None
    return [str(names)] if isinstance(names, str | Path) else [str(name) for name in names]


def _counts(num_gpus: int | Sequence[int] | None) -> list[int] | None:
    if num_gpus is None:
        return None
    values = num_gpus if isinstance(num_gpus, Sequence) and not isinstance(num_gpus, str) else [num_gpus]
    return [_number("num_gpus", value, int) for value in values]


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _data_frame(rows: list[dict[str, Any]]) -> "pandas.DataFrame":
    try:
        import pandas
    except ModuleNotFoundError:
        raise ValueError("to_pandas() needs pandas\nhint: pip install pandas") from None
    return pandas.DataFrame(rows)


def _text_of(content: "RenderableType", *, width: int) -> str:
    from rich.console import Console

    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(content, crop=False)
    return captured.get().rstrip("\n")


def _html_of(content: "RenderableType", *, width: int) -> str:
    """The table as preformatted text with rich's colours; a notebook scrolls what is wider than its cell."""
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False)
    console.print(content, crop=False)
    style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace;font-size:12px"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
