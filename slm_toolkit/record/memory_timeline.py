"""MemoryTimeline: the memory in use, by part, while one training step runs through its modules."""

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
"""The uses of memory. The first four are the training state; activations are saved for backward; temporary
is allocated and freed again by a layer's backward or the optimizer's step; communication is buckets."""
OF_MODULES = ("activations", "logits_and_loss", "temporary")
"parts whose bytes are attributed to the module that allocated them"
TIMELINE_FILE = "memory_timeline.csv"
"file name, in the record's folder"


@dataclass(frozen=True)
class Segment:
    """The memory in use at the peak of one visit to a module, in one phase of the step."""

    phase: str
    module: str
    num_bytes: int
    parts: dict[str, int]


@dataclass(frozen=True)
class MemoryTimeline:
    """The segments of one rank's step, in order of time."""

    segments: tuple[Segment, ...]
    modules_at_peak: dict[str, int]
    "bytes in use at the peak by allocating module, for activations, logits_and_loss and temporary"
    reserved_bytes: int
    "bytes that PyTorch's allocator reserves on a GPU for the traced allocations"

    @property
    def peak(self) -> Segment:
        return max(self.segments, key=lambda segment: segment.num_bytes)

    @property
    def summary(self) -> dict[str, object]:
        """Return the part of the timeline that a record stores."""
        return {**dataclasses.asdict(self.peak), "modules": self.modules_at_peak}


def write_timeline(timeline: MemoryTimeline, path: Path) -> Path:
    """Write one row per segment: phase, module, total bytes, and bytes by part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_new(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("phase", "module", "num_bytes", *(f"{part}_bytes" for part in PARTS)))
        for segment in timeline.segments:
            parts = [segment.parts.get(part, 0) for part in PARTS]
            writer.writerow((segment.phase, segment.module, segment.num_bytes, *parts))
    return path


def read_segments(path: Path) -> list[Segment]:
    """Read the rows of `write_timeline`. Raises ValueError for any other content."""
    text = read_text(path, what="timeline", hint=_HINT, limit_bytes=_LIMIT_BYTES)
    try:
        return [
            Segment(
                phase=row["phase"],
                module=row["module"],
                num_bytes=int(row["num_bytes"]),
                parts={part: int(row[f"{part}_bytes"]) for part in PARTS},
            )
            for row in csv.DictReader(text.splitlines())
        ]
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no memory timeline: {error!r}\nhint: {_HINT}") from None


_HINT = "--profile memory, or --rehearse without a GPU, writes a timeline into the record's folder"
_LIMIT_BYTES = 2**26  # one row per module and phase of one step takes a few hundred KB
