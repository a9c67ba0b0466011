"""State what a comparison shows: the fastest row, the cheapest, the smallest, and what dropped out."""

from collections import defaultdict
from collections.abc import Collection

from slm_toolkit.record.steady_rate import STEPS_PER_BLOCK
from slm_toolkit.report.labels import labelled
from slm_toolkit.report.rows import MOST_UNCERTAIN, Row

SAME_MEMORY = 0.01
"share by which the memory of two rows may differ and still count as the same"
_MOST_GROUPS = 6
_MOST_NAMES = 3
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
        f"{', '.join(filter(None, key))}: {' '.join(sentences)}"
        for key, group in groups.items()
        if (sentences := _sentences(group))
    ]
    if num_hidden := len(lines[_MOST_GROUPS:]):
        lines[_MOST_GROUPS:] = [f"{num_hidden} more groups of rows are in the table."]
    return lines


def _competition(row: Row) -> tuple[str, ...]:
    """Return what rows of a group share, as text."""
    ranks = f"{row.world_size} rank{'s' * (row.world_size != 1)}" if row.is_rehearsed else ""
    length = "" if row.seq_len is None else f"{row.seq_len} tokens"
    size = f"{row.num_params:,} parameters" if row.script and row.num_params else ""
    return row.model, size, length, row.gpu or row.cpu, ranks


def _sentences(group: list[Row]) -> list[str]:
    rows = labelled(group)
    good = {name: row for name, row in rows.items() if row.is_good}
    sentences = (_speed(rows), _cost(good), _memory(good), *_unranked(rows))
    return list(filter(None, sentences))


def _speed(rows: dict[str, Row]) -> str:
    """Name the fastest row, or the rows that tie for it, and how much slower the others are."""
    names = [name for name, row in rows.items() if row.rank]
    if not names:
        return _why_unranked(rows)
    names.sort(key=lambda name: -rows[name].tokens_per_second_per_gpu)
    fastest = {name: rows[name] for name in names if rows[name].rank == 1}
    others = [rows[name] for name in names if name not in fastest]
    best, rates = rows[names[0]], _rates(fastest.values())
    if not others:
        all_of_them = "both" if len(fastest) == 2 else f"all {len(fastest)}"
        return f"No row is clearly fastest: {all_of_them} tie ({rates})."
    if len(fastest) == 1:
        return f"{_joined(fastest)} is fastest: {rates}, {_gains(best, others)}."
    return (
        f"{_joined(fastest)} tie for the fastest ({rates}); {next(iter(fastest))} is {_gains(best, others)}."
    )


def _why_unranked(rows: dict[str, Row]) -> str:
    """State why rows with a rate have no rank."""
    timed = {
        name: row for name, row in rows.items() if row.is_good and row.tokens_per_second and not row.unlike
    }
    uncertain = [name for name, row in timed.items() if row.is_uncertain]
    if len(timed) > 1 and uncertain:
        again = f"another run of {_joined(uncertain)} may differ by over {MOST_UNCERTAIN:.0%}"
        return f"Too uncertain to rank: {again} (--repeats 3 compares in rounds)."
    if timed and all(row.interval is None for row in timed.values()):
        steps = min(row.num_timed_steps for row in timed.values())
        return f"Too few steps to rank: {steps} were timed, {STEPS_PER_BLOCK} are needed."
    if len(timed) == 1:
        return f"{_joined(timed)} runs at {_rates(timed.values())}; no other row is comparable."
    return ""


def _gains(best: Row, others: list[Row]) -> str:
    """Return by how much the best row is faster than the others, from the nearest to the farthest."""
    gains = [best.tokens_per_second_per_gpu / row.tokens_per_second_per_gpu - 1 for row in others]
    return f"{_span(gains, '{:.0%}')} faster than the {'other' if len(others) == 1 else 'others'}"


def _rates(rows: Collection[Row]) -> str:
    """Return the rates of rows, the lowest and the highest of several."""
    per_gpu = len({row.world_size for row in rows}) > 1
    values = [row.tokens_per_second_per_gpu if per_gpu else row.tokens_per_second for row in rows]
    return f"{_span(values, '{:,.0f}')} tokens/s{' per GPU' * per_gpu}"


def _span(values: Collection[float], form: str) -> str:
    """Return the lowest and the highest value, or one of them if both read the same."""
    return " to ".join(dict.fromkeys(map(form.format, (min(values), max(values)))))


def _cost(good: dict[str, Row]) -> str:
    """State what a billion tokens cost. On one kind of GPU the fastest row per GPU is the cheapest."""
    priced = [row for row in good.values() if row.usd_per_million_tokens is not None]
    fastest = [row for row in priced if row.rank == 1 or len(priced) == 1]
    if not fastest:
        return ""
    usd = [row.usd_per_million_tokens * 1000 for row in fastest]
    return f"A billion tokens cost {_span(usd, '${:,.2f}')} with {'it' if len(usd) == 1 else 'these'}."


def _memory(good: dict[str, Row]) -> str:
    """Name the rows that need the least memory: of a GPU, or of training state on a CPU."""
    known = {name: row.compared_bytes for name, row in good.items() if row.compared_bytes}
    if len(known) < 2:
        return ""
    least, most = min(known.values()), max(known.values())
    on_cpu = all(row.is_on_cpu for row in good.values())
    needed = f"{_size(least)} {'of training state per rank' if on_cpu else 'at the peak'}"
    if most <= least * (1 + SAME_MEMORY):
        return f"All need the same memory ({needed})."
    smallest = [name for name, size in known.items() if size <= least * (1 + SAME_MEMORY)]
    verb = "needs" if len(smallest) == 1 else "need"
    return f"{_joined(smallest)} {verb} the least memory ({needed}; the most is {_size(most)})."


def _unranked(rows: dict[str, Row]) -> list[str]:
    """Return a sentence for each reason why rows have no rank, or dropped out of the comparison."""
    by_reason: dict[str | None, list[str]] = defaultdict(list)
    has_ranks = any(row.rank for row in rows.values())
    for name, row in rows.items():
        is_uncertain = has_ranks and row.rank is None and row.is_uncertain
        state = "uncertain" if is_uncertain and row.is_good else row.state
        by_reason[row.unlike if row.is_good and row.unlike else PROBLEMS.get(state)].append(name)
    return [f"Not ranked, {reason}: {_joined(names)}." for reason, names in by_reason.items() if reason]


def _joined(names: Collection[str]) -> str:
    """Join names; count those after the third. Semicolons separate names that contain a comma."""
    shown, rest = [*names][:_MOST_NAMES], len(names) - _MOST_NAMES
    shown += [f"{rest} more"] * (rest > 0)
    separator = "; " if any("," in name for name in names) else ", "
    return " and ".join(filter(None, (separator.join(shown[:-1]), shown[-1])))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
