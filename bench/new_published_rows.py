"""How far estimates are from published runs that nothing in the predictor was set by.

    python bench/new_published_rows.py

bench/data/new_published_rows.csv holds one figure a line: its source, the figure as published, the same run
in our flags, what was assumed (`remark`), and why a figure is not comparable. The comparable figures were
split in two halves by random.Random(26) before the first comparison. The half to look at is printed line by
line. The blind half is only counted: no change of the predictor may start from it.

Issue threads were read as excerpts. Of the OPT table in PR 33298 only the first five lines were readable;
none of its figures is comparable.
"""

import csv
import dataclasses
from collections import Counter
from pathlib import Path
from statistics import median

from published_memory import estimated_bytes
from speed_rows import predicted_tokens_per_second_per_gpu, row_of, setup_of

from slm_toolkit.predict.speed.software import TODAY

TABLE = Path(__file__).parent / "data" / "new_published_rows.csv"
SPEED = "tokens_per_second_per_gpu"


def main() -> None:
    with TABLE.open(newline="") as file:
        lines = list(csv.DictReader(file))
    comparable = [line for line in lines if not line["not_comparable"]]
    print(f"{len(lines)} figures, {len(comparable)} comparable\n")
    errors = {id(line): estimate_of(line) / float(line["published"]) - 1 for line in comparable}
    for line in comparable:
        if line["half"] == "look":
            print(_shown(line, errors[id(line)]))
    print()
    for half in ("look", "blind"):
        for name, is_in in _GROUPS.items():
            chosen = [line for line in comparable if line["half"] == half and is_in(line)]
            if chosen:
                _print_errors(f"{half}: {name}", [errors[id(line)] for line in chosen])
    print("\nnot comparable:")
    for (source, reason), count in Counter(
        (line["source"], line["not_comparable"]) for line in lines if line["not_comparable"]
    ).items():
        print(f"  {count:3} {source}: {reason}")


_GROUPS = {
    "all": lambda line: True,
    "speed": lambda line: line["metric"] == SPEED,
    "memory": lambda line: line["metric"] != SPEED,
}


def estimate_of(line: dict[str, str]) -> float:
    """Return our figure in the published unit: tokens per second and GPU, or GiB."""
    row = row_of({**line, SPEED: line["published"]})
    config = dataclasses.replace(
        row.config,
        optim=line["optim"],
        peft=line["peft"],
        lora_target_modules=line["lora_target_modules"] or row.config.lora_target_modules,
    )
    if line["metric"] == SPEED:
        return predicted_tokens_per_second_per_gpu(dataclasses.replace(row, config=config), TODAY)
    config = dataclasses.replace(config, loss_kernel=line["loss_kernel"])
    return estimated_bytes(setup_of(dataclasses.replace(row, config=config)), line) / 2**30


def _shown(line: dict[str, str], error: float) -> str:
    place = f"{line['num_gpus']}x {line['gpu']} {line['strategy']} b{line['batch']} s{line['seq_len']}"
    figures = f"{float(line['published']):9.2f} ours {(1 + error) * float(line['published']):9.2f}"
    return f"{line['model']:26} {place:42} {line['metric'][:9]:9} {figures} {error:+7.1%}"


def _print_errors(name: str, errors: list[float]) -> None:
    sizes = sorted(abs(error) for error in errors)
    print(f"{name:38} {len(sizes):3} figures: median {median(sizes):6.1%}, worst {sizes[-1]:7.1%}")


if __name__ == "__main__":
    main()
