"""The figures in the heads of recipes/*.sh, computed again by the command that stands in each.

python bench/recipe_figures.py            # which are not what the command gives now; exit code 1 if any
python bench/recipe_figures.py --write    # and write those in, with today's date
"""

import argparse
import contextlib
import io
import json
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

from slm_toolkit.cli.main import main as slm
from slm_toolkit.cli.recipes import Recipe, shipped_recipes
from slm_toolkit.hardware.gpus import gpu_of_name

FOLDER = Path(__file__).parent.parent / "recipes"


def figures_of(recipe: Recipe) -> dict[str, str | None]:
    """hardware, memory, time and cost as a head has them; None for time and cost that no estimate knows."""
    words, rows = recipe.estimate, rows_of(recipe)
    steps = int(words[words.index("--max_steps") + 1]) if "--max_steps" in words else None
    return figures_of_rows(rows, num_steps=steps)


def rows_of(recipe: Recipe) -> list[dict[str, Any]]:
    """What the recipe's first command prints with --json."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        slm([*recipe.estimate[1:], "--json"])
    return json.loads(out.getvalue())


def figures_of_rows(rows: list[dict[str, Any]], *, num_steps: int | None) -> dict[str, str | None]:
    """Of `slm recommend`: its first row, the whole job. Of `slm estimate`: `num_steps` of each row that fits,
    one after another or, on fewer GPUs than the largest has, side by side."""
    if "hours" in rows[0]:
        rows = rows[:1]
        hours, usd = rows[0]["hours"], rows[0]["usd"]
    else:
        rows = [row for row in rows if row["fits"]]
        if not rows:
            raise ValueError("nothing that the recipe's first command asks for fits")
        hours = usd = None
        if num_steps and all(row["step_seconds"] for row in rows):
            gpu_hours = sum(row["step_seconds"] * row["num_gpus"] for row in rows) * num_steps / 3600
            hours = gpu_hours / max(row["num_gpus"] for row in rows)
            usd = gpu_hours * rows[0]["usd_per_gpu_hour"]
    fullest = max(rows, key=lambda row: (row["num_gpus"], row["peak_allocated_bytes"]))
    gpu, num_nodes = gpu_of_name(fullest["gpu"]), fullest["num_gpus"] // fullest["gpus_per_node"]
    gib = [fullest["peak_allocated_bytes"] / 2**30, gpu.memory_bytes / 2**30]
    host_gib = fullest["host_bytes_per_node"] / 2**30
    return {
        "hardware": f"{fullest['num_gpus']} x {gpu.name}" + f" in {num_nodes} nodes" * (num_nodes > 1),
        "memory": f"{gib[0]:.1f} of {gib[1]:.1f} GiB per GPU, {host_gib:.0f} GiB of host RAM per node",
        "time": None if hours is None else _duration(hours),
        "cost": None if usd is None else f"${usd:,.2f}" if usd < 100 else f"${usd:,.0f}",
    }


def written(recipe: Recipe, figures: dict[str, str | None], today: str) -> str:
    """The script with these figures; what stands in parentheses stays, and so do a dash's reasons."""
    text = recipe.text
    for name, value in figures.items():
        if value is not None:
            text = re.sub(rf"^(# {name}: )[^(\n]*?( \(.*)?$", rf"\g<1>{value}\g<2>", text, flags=re.M)
    return re.sub(r"^(# estimated on )\S+", rf"\g<1>{today}", text, flags=re.M)


def stale(recipe: Recipe, figures: dict[str, str | None]) -> list[str]:
    """The lines of the head that are not what was computed."""
    found = []
    for name, value in figures.items():
        said = getattr(recipe, name).partition(" (")[0]
        if said != (value or "-"):
            found.append(f"{recipe.name}: {name} is {value or 'unknown'}, its head says {said}")
    return found


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{max(1, round(hours * 60))} min"
    return f"{hours:.1f} h" if hours < 100 else f"{hours:.0f} h"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the new figures into recipes/*.sh")
    args = parser.parse_args()
    lines = []
    for recipe in shipped_recipes():
        try:
            figures = figures_of(recipe)
        except ValueError as error:
            lines.append(f"{recipe.name}: {error}")
            continue
        if found := stale(recipe, figures):
            lines += found
            if args.write:
                text = written(recipe, figures, date.today().isoformat())
                (FOLDER / f"{recipe.name}.sh").write_text(text)
    print("\n".join(lines) or "every head is what its command gives")
    return 1 if lines and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
