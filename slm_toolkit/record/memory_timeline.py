"""MemoryTimeline: what was alive, part by part, while one training step went through its modules."""

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.base.safe_files import open_new
from slm_toolkit.base.user_files import read_text

PARTS = (
    *("parameters", "master_weights", "gradients", "optimizer", "activations", "logits_and_loss"),
    *("gathered_parameters", "communication", "temporary"),
)
"""what memory is for: the first four are the training state; activations are saved for backward; temporary is
what a layer's backward or the optimizer's step makes and frees; communication is buckets"""
OF_MODULES = ("activations", "logits_and_loss", "temporary")
"parts of which it is known which module made them"
TIMELINE_FILE = "memory_timeline.csv"
"beside the record"


@dataclass(frozen=True)
class Segment:
    """A stay in one module, in one phase of the step, at the moment when most was alive there."""

    phase: str
    module: str
    num_bytes: int
    parts: dict[str, int]


@dataclass(frozen=True)
class MemoryTimeline:
    """One rank's step, in order of time."""

    segments: tuple[Segment, ...]
    modules_at_peak: dict[str, int]
    "of activations, logits_and_loss and temporary: bytes alive at the peak by the module that made them"

    @property
    def peak(self) -> Segment:
        return max(self.segments, key=lambda segment: segment.num_bytes)

    @property
    def summary(self) -> dict[str, object]:
        """What a record holds of it."""
        return {**dataclasses.asdict(self.peak), "modules": self.modules_at_peak}


def write_timeline(timeline: MemoryTimeline, path: Path) -> Path:
    """A row per segment: phase, module, bytes in all and by part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_new(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("phase", "module", "num_bytes", *(f"{part}_bytes" for part in PARTS)))
        for segment in timeline.segments:
            parts = [segment.parts.get(part, 0) for part in PARTS]
            writer.writerow((segment.phase, segment.module, segment.num_bytes, *parts))
    return path


def read_segments(path: Path) -> list[Segment]:
    """The rows that `write_timeline` wrote. Raises ValueError for a file that holds others."""
    text = read_text(path, what="timeline", hint=_HINT, limit_bytes=_LIMIT_BYTES)
    names = ("phase", "module", "num_bytes", *(f"{part}_bytes" for part in PARTS))
    try:
        rows = list(csv.DictReader(text.splitlines()))
    except csv.Error as error:
        raise ValueError(f"can't read timeline {path}: {error}\nhint: {_HINT}") from None
    for number, row in enumerate(rows, 2):
        texts = [row.get(name) for name in names]
        if None in texts or not all(_is_count(text) for text in texts[2:]):
            raise ValueError(f"{path} holds no memory timeline at line {number}\nhint: {_HINT}")
    return [
        Segment(
            phase=row["phase"],
            module=row["module"],
            num_bytes=int(row["num_bytes"]),
            parts={part: int(row[f"{part}_bytes"]) for part in PARTS},
        )
        for row in rows
    ]


_HINT = "--trace_memory, and --rehearse without a GPU, write one beside the record"
_LIMIT_BYTES = 2**26  # a row per module and phase of one step: some hundred KB


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
