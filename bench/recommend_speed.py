"""How long `slm recommend` takes on one core: a fixed grid, and every GPU type with a price.

python bench/recommend_speed.py
"""

import contextlib
import io
import time

from slm_toolkit.cli.main import main as slm
from slm_toolkit.recommend import plans

EVERY_GPU = ("recommend", "--model", "slm-500m", "--json")
GRID = (
    *("recommend", "--model", "slm-500m", "slm-1b", "slm-2b", "--json"),
    *("--gpu", "a100-40gb", "a100-80gb", "h100-80gb", "h200"),
    *("--num_gpus", "1", "2", "4", "8", "16", "32", "64"),
    *("--per_device_train_batch_size", "1", "2", "4", "8", "16", "32", "64"),
)


def main() -> None:
    for name, arguments in (("fixed grid", GRID), ("every GPU type with a price", EVERY_GPU)):
        seconds, estimated = timed(arguments)
        print(f"{name}: {seconds:.2f} CPU seconds, {estimated:,} configurations estimated")


def timed(arguments: tuple[str, ...]) -> tuple[float, int]:
    """Return the CPU seconds of a command, and how many configurations were not skipped."""
    counted, estimate = 0, plans.estimate

    def counting(*args: object, **options: object) -> object:
        nonlocal counted
        counted += 1
        return estimate(*args, **options)

    plans.estimate = counting
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        slm(list(arguments))
    plans.estimate = estimate
    return time.process_time() - began, counted


if __name__ == "__main__":
    main()
