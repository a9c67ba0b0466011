"""How long `slm recommend` takes per configuration: a grid of some ten thousand, in this process, one core.

python bench/recommend_speed.py
"""

import contextlib
import io
import time

from slm_toolkit.cli.main import main as slm
from slm_toolkit.recommend import plans

ARGUMENTS = (
    *("recommend", "--model", "slm-500m", "slm-1b", "slm-2b", "--json"),
    *("--gpu", "a100-40gb", "a100-80gb", "h100-80gb", "h200"),
    *("--num_gpus", "1", "2", "4", "8", "16", "32", "64"),
    *("--per_device_train_batch_size", "1", "2", "4", "8", "16", "32", "64"),
)


def main() -> None:
    counted, estimate = 0, plans.estimate

    def counting(*args: object, **options: object) -> object:
        nonlocal counted
        counted += 1
        return estimate(*args, **options)

    plans.estimate = counting
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        slm(list(ARGUMENTS))
    seconds = time.perf_counter() - began
    print(f"{counted:,} configurations ranked in {seconds:.2f} s: {1e6 * seconds / counted:.0f} us each")


if __name__ == "__main__":
    main()
