"""What `throughput.py` makes of its runs: ratios taken round by round, and the table of them."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

FIRST_LOSS_TOLERANCE = {"bf16": 0.02, "fp32": 0.002}
"of the first step's loss, some 10, from the same weights: bf16 itself moves it by 0.001 to 0.01"
LATER_LOSS_TOLERANCE = {"bf16": 0.02, "fp32": 0.0002}
"as a share: each step's rounding moves the weights of all later ones, those of larger models further"


@dataclass(frozen=True)
class Result:
    """What one launch of an arm told of itself."""

    step_seconds: list[float]
    losses: list[float]
    peak_rss_bytes: int
    peak_allocated_bytes: int | None

    @property
    def seconds(self) -> float:
        return median(self.step_seconds)


def ratios(of: list[Result], to: list[Result]) -> list[float]:
    """How often `of` does a step while `to` does one, round by round."""
    return [theirs.seconds / ours.seconds for ours, theirs in zip(of, to, strict=True)]


def farthest_loss(of: list[Result], to: list[Result]) -> float:
    """The largest difference of a step's loss in any round."""
    return max(
        abs(a - b)
        for one, other in zip(of, to, strict=True)
        for a, b in zip(one.losses, other.losses, strict=True)
    )


def tells_apart(of: list[Result], to: list[Result], numerics: str) -> bool:
    """Whether losses differ by more than rounding: the first step's, or a later one's by a larger share."""
    first, later = FIRST_LOSS_TOLERANCE[numerics], LATER_LOSS_TOLERANCE[numerics]
    return any(
        abs(a - b) > (later * abs(b) if step else first)
        for one, other in zip(of, to, strict=True)
        for step, (a, b) in enumerate(zip(one.losses, other.losses, strict=True))
    )


def peak_bytes(results: list[Result]) -> float:
    """The median peak: of GPU memory where there is a GPU, else of resident memory."""
    return median(result.peak_allocated_bytes or result.peak_rss_bytes for result in results)


def rows_of(
    results: dict[str, list[Result]], baselines: tuple[str, ...], tokens: int
) -> list[dict[str, Any]]:
    """One row per arm, with its speed and memory against each baseline that ran."""
    rows = []
    for arm, mine in results.items():
        row: dict[str, Any] = {
            "arm": arm,
            "step_seconds": median(result.seconds for result in mine),
            "tokens_per_second": tokens / median(result.seconds for result in mine),
            "peak_bytes": peak_bytes(mine),
            "final_loss": mine[-1].losses[-1],
            "against": {},
        }
        for baseline in baselines:
            theirs = results[baseline]
            found = ratios(mine, theirs)
            row["against"][baseline] = {
                "speed": [median(found), min(found), max(found)],
                "memory": peak_bytes(mine) / peak_bytes(theirs),
                "loss_difference": farthest_loss(mine, theirs),
            }
        rows.append(row)
    return rows


def table_of(rows: list[dict[str, Any]], baselines: tuple[str, ...], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("arm", "s/step", "tokens/s", "peak MiB", "final loss"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for baseline in baselines:
        table.add_column(f"speed against\n{baseline}", justify="right")
        table.add_column("peak", justify="right")
    if baselines:
        table.add_column(f"farthest loss\nfrom {baselines[0]}", justify="right")
    for row in rows:
        cells = [row["arm"], f"{row['step_seconds']:.3f}", f"{row['tokens_per_second']:,.0f}"]
        cells += [f"{row['peak_bytes'] / 2**20:,.0f}", f"{row['final_loss']:.4f}"]
        for baseline in baselines:
            middle, low, high = row["against"][baseline]["speed"]
            memory = row["against"][baseline]["memory"] - 1
            cells += [f"{middle:.2f}x ({low:.2f}-{high:.2f})", f"{memory:+.0%}"]
        cells += [f"{row['against'][name]['loss_difference']:.4f}" for name in baselines[:1]]
        table.add_row(*cells)
    return table
