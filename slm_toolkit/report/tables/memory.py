"""What uses a step's memory at its peak."""

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.record.memory_timeline import OF_MODULES
from slm_toolkit.report.tables.fitted import Column, table_of

PARTS = {
    "parameters": "parameters",
    "master_weights": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "gathered_parameters": "gathered parameters",
    "communication": "communication buckets",
    "temporary": "temporary",
}
"titles of the parts of a record's `memory_at_peak`"
_MODULES = {"loss": "logits and loss", "": "outside the layers"}


def peak_table(title: str, at_peak: dict[str, Any]) -> RenderableType:
    """Show a record's `memory_at_peak`: a sentence, its parts, and a table of what owns them."""
    peak, module = at_peak["num_bytes"], at_peak["module"]
    where = f"{at_peak['phase']} at {module}" if module else at_peak["phase"]
    parts = [
        f"{part_title} {size_text(count)}"
        for part, part_title in PARTS.items()
        if (count := at_peak["parts"].get(part))
    ]
    owners = _owners(at_peak).most_common()
    return Group(
        Text(f"{title}: peak {size_text(peak)} in {where}", style="bold"),
        Text(", ".join(parts)),
        table_of(
            [
                Column("in use at the peak", [name for name, _ in owners]),
                Column("size", [size_text(count) for _, count in owners]),
                Column("share", [f"{count / peak:.1%}" for _, count in owners]),
            ]
        ),
    )


def _owners(at_peak: dict[str, Any]) -> Counter[str]:
    """Return the bytes of each part that no module owns, and of each module; all layers are one owner."""
    owners = Counter(
        {PARTS[part]: count for part, count in at_peak["parts"].items() if part not in OF_MODULES}
    )
    for module, count in at_peak["modules"].items():
        owners["layers" if module.startswith("layers.") else _MODULES.get(module, module)] += count
    return +owners


def size_text(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB below one GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
