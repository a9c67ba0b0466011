"""State what a comparison shows: the fastest row, the cheapest, the smallest, and what dropped out."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from slm_toolkit.record.steady_rate import STEPS_PER_BLOCK
from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import MOST_UNCERTAIN, Row

SAME_MEMORY = 0.01
"share by which the memory of two rows may differ and still count as the same"
_MOST_GROUPS = 6
_MOST_NAMES = 3
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
PROBLEMS = {  # why a row is not ranked, by its status
    "unequal": "computes something else",
    "oom": "ran out of memory",
    "failed": "failed",
    "timeout": "took too long",
    "uncertain": "too uncertain",
}


def verdict(rows: list[Row]) -> list[str]:
    """Return the conclusions: a line for each sentence, or for each group if several groups compete.

    Rows of a group have one model, sequence length and machine, and rehearsals one number of ranks. No
    sentence names a winner that the intervals call a tie.
    """
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[_competition(row)].append(row)
    if len(groups) == 1:
        return _sentences(rows)
    lines = [
        f"{_subject(key, groups)}: {' '.join(sentences)}"
        for key, group in groups.items()
        if (sentences := _sentences(group))
    ]
    if hidden := len(lines) - _MOST_GROUPS:
        lines[_MOST_GROUPS:] = [f"{hidden} more groups of rows are in the table."] if hidden > 0 else []
    return lines


def _competition(row: Row) -> tuple[str, ...]:
    """Return what rows of a group share, as text."""
    ranks = f"{row.world_size} rank{'s' * (row.world_size != 1)}" if row.is_rehearsed else ""
    length = "" if row.seq_len is None else f"{row.seq_len} tokens"
    size = f"{row.num_params:,} parameters" if row.script and row.num_params else ""
    return row.model, size, length, row.gpu or row.cpu, ranks


def _subject(key: tuple[str, ...], groups: Iterable[tuple[str, ...]]) -> str:
    """Return the parts of a group's key that other groups don't share."""
    columns = zip(*groups, strict=True)
    return ", ".join(part for part, column in zip(key, columns, strict=True) if part and len(set(column)) > 1)


def _sentences(group: list[Row]) -> list[str]:
    names = {id(row): row.strategy for row in group} | {
        id(row): name for name, row in labelled(group).items()
    }
    sentences = [
        *_unlike(group, names),
        _speed(group, names),
        _cost(group),
        _memory(group, names),
        *_problems(group, names),
        _sameness(group),
    ]
    return list(filter(None, sentences))


def _unlike(group: list[Row], names: dict[int, str]) -> list[str]:
    """Return a sentence for each reason why rows computed something that others did not."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in group:
        if row.unlike and _is_good(row):
            by_reason[row.unlike].append(names[id(row)])
    return [f"Not ranked: {_joined(labels)} ({reason})." for reason, labels in by_reason.items()]


def _speed(group: list[Row], names: dict[int, str]) -> str:
    """Name the fastest row, or the rows that tie for it, and how much slower the others are."""
    ranked = sorted((row for row in group if row.rank is not None), key=_rate_of_one, reverse=True)
    if not ranked:
        timed = [row for row in group if _is_good(row) and row.tokens_per_second and not row.unlike]
        return _why_unranked(timed, names)
    fastest = [row for row in ranked if row.rank == 1]
    others = [row for row in ranked if row.rank != 1]
    if len(fastest) == 1:
        return f"{names[id(fastest[0])]} is fastest: {_rates(fastest)}, {_gains(fastest[0], others)}."
    if not others:
        return f"No row is clearly fastest: {_all(len(fastest))} tie ({_rates(fastest)})."
    return (
        f"{_joined([names[id(row)] for row in fastest])} tie for the fastest ({_rates(fastest)}); "
        f"{names[id(fastest[0])]} is {_gains(fastest[0], others)}."
    )


def _why_unranked(timed: list[Row], names: dict[int, str]) -> str:
    """State why rows with a rate have no rank."""
    if len(timed) > 1 and (uncertain := [names[id(row)] for row in timed if row.is_uncertain]):
        again = f"another run of {_joined(uncertain)} may differ by over {MOST_UNCERTAIN:.0%}"
        return f"Too uncertain to rank: {again} (--repeats 3 compares in rounds)."
    if timed and all(row.interval is None for row in timed):
        steps = min(row.num_timed_steps for row in timed)
        flag = "" if timed[0].script else " (--max_steps)"
        return f"Too few steps to rank: {steps} were timed, {STEPS_PER_BLOCK} are needed{flag}."
    if len(timed) == 1:
        return f"{names[id(timed[0])]} runs at {_rates(timed)}; there is no other row to compare it with."
    return ""


def _gains(best: Row, others: list[Row]) -> str:
    """Return by how much the best row is faster than the others, from the nearest to the farthest."""
    gains = sorted(_rate_of_one(best) / _rate_of_one(row) - 1 for row in others)
    numbers = dict.fromkeys(f"{gain:.0%}" for gain in (gains[0], gains[-1]))
    return f"{' to '.join(numbers)} faster than the {'other' if len(others) == 1 else 'others'}"


def _rates(rows: list[Row]) -> str:
    """Return the rates of rows, the lowest and the highest of several."""
    per_gpu = len({row.world_size for row in rows}) > 1
    values = [_rate_of_one(row) if per_gpu else row.tokens_per_second for row in rows]
    numbers = dict.fromkeys(f"{value:,.0f}" for value in (min(values), max(values)))
    return f"{' to '.join(numbers)} tokens/s{' per GPU' * per_gpu}"


def _cost(group: list[Row]) -> str:
    """State what a billion tokens cost. On one kind of GPU the fastest row per GPU is the cheapest."""
    priced = [row for row in group if row.usd_per_million_tokens is not None and _is_good(row)]
    fastest = [row for row in priced if row.rank == 1] or (priced if len(priced) == 1 else [])
    if not fastest:
        return ""
    usd = sorted(row.usd_per_million_tokens * 1000 for row in fastest)
    bounds = " to ".join(dict.fromkeys(f"${value:,.2f}" for value in (usd[0], usd[-1])))
    return f"A billion tokens cost {bounds} with {'it' if len(fastest) == 1 else 'these'}."


def _memory(group: list[Row], names: dict[int, str]) -> str:
    """Name the rows that need the least memory: of a GPU, or of training state on a CPU."""
    good = [row for row in group if _is_good(row)]
    on_cpu = not any(row.gpu or row.is_rehearsed for row in good)
    known = {id(row): row.compared_bytes for row in good if row.compared_bytes}
    if len(known) < 2:
        return ""
    least, most = min(known.values()), max(known.values())
    what = "of training state per rank" if on_cpu else "at the peak"
    if most <= least * (1 + SAME_MEMORY):
        return f"All need the same memory ({_gib(least)} {what})."
    smallest = [row for row in good if known.get(id(row), most) <= least * (1 + SAME_MEMORY)]
    verb = "needs" if len(smallest) == 1 else "need"
    named = _joined([names[id(row)] for row in smallest])
    size = _gib if _gib(least) != _gib(most) else _mib
    return f"{named} {verb} the least memory ({size(least)} {what}; the most is {size(most)})."


def _problems(group: list[Row], names: dict[int, str]) -> list[str]:
    """Return a sentence for each way in which rows dropped out of the comparison."""
    by_problem: dict[str, list[str]] = defaultdict(list)
    has_ranks = any(row.rank is not None for row in group)
    for row in group:
        state = "unequal" if row.parity_holds is False else row.status
        if has_ranks and row.rank is None and row.is_uncertain and not row.unlike:
            state = "uncertain"
        if state in PROBLEMS:
            by_problem[state].append(names[id(row)])
    return [f"Not ranked, {PROBLEMS[state]}: {_joined(labels)}." for state, labels in by_problem.items()]


def _sameness(group: list[Row]) -> str:
    """State that all rows computed the same, if each was checked, or others were checked against it."""
    measured = [row for row in group if _is_good(row) and not row.is_rehearsed]
    checked = [row for row in measured if row.parity_holds]
    references = {row.parity_reference for row in checked}
    unchecked = [row for row in measured if not row.parity_holds]
    if len(measured) < 2 or any(row.strategy not in references for row in unchecked):
        return ""
    largest = max(row.parity_max_loss_difference or 0.0 for row in checked)
    is_marked = any(row.numerics_differences or row.unlike for row in measured)
    same = "computed other things, with nearly the same losses" if is_marked else "computed the same"
    return f"{_capital(_all(len(measured)))} {same} (largest loss difference {largest:.1g})."


def _is_good(row: Row) -> bool:
    return row.status == "ok" and row.parity_holds is not False


def _rate_of_one(row: Row) -> float:
    """Return tokens per second of one GPU or process, by which rows are ranked."""
    return row.tokens_per_second_per_gpu


def _joined(names: Sequence[str]) -> str:
    """Join names; count those after the third. Semicolons separate names that contain a comma."""
    shown, rest = list(names[:_MOST_NAMES]), len(names) - _MOST_NAMES
    if rest > 0:
        shown.append(f"{rest} more")
    separator = "; " if any("," in name for name in names) else ", "
    return " and ".join(filter(None, (separator.join(shown[:-1]), shown[-1])))


def _all(count: int) -> str:
    return "both" if count == 2 else f"all {_NUMBERS[count] if count < len(_NUMBERS) else count}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
