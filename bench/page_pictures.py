"""Take pictures of the page of `slm report --html` at the widths of a desktop and a phone, light and dark.

python bench/page_pictures.py OUT [--records results/cpu] [--num_records 24] [--usd_per_gpu_hour 2]

Writes OUT/page.html, and OUT/WIDTH-SCHEME.png of the whole page. Instead of reading --records, --num_records
makes up as many, the last tenth of them rehearsals, and --scaled makes up four models on 1, 8 and 16 GPUs.
Needs Chromium and the package websockets.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

from browser import browser  # noqa: E402
from made_records import write_records, write_scaled_records  # noqa: E402

WIDTHS_PIXELS = (1280, 390)
SCHEMES = ("light", "dark")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--records", type=Path, nargs="+", default=[ROOT / "results" / "cpu"])
    parser.add_argument("--num_records", type=int)
    parser.add_argument("--scaled", action="store_true")
    parser.add_argument("--usd_per_gpu_hour")
    parser.add_argument("--filter", default="", help="words to type into the table's filter first")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    page = (args.out / "page.html").resolve()
    with tempfile.TemporaryDirectory() as folder:
        records = args.records
        if args.scaled:
            records = [Path(folder)]
            write_scaled_records(Path(folder))
        elif args.num_records:
            records = [Path(folder)]
            write_records(Path(folder), num_records=args.num_records)
        price = ["--usd_per_gpu_hour", args.usd_per_gpu_hour] if args.usd_per_gpu_hour else []
        command = [*("slm", "report", *map(str, records), "--html", str(page)), *price]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # 1: a record can't be shown
    for path in take_pictures(page, args.out, words=args.filter):
        print(path)


def take_pictures(page: Path, out: Path, *, words: str) -> list[Path]:
    """Write a picture of the page for each width and colour scheme; return their paths."""
    paths = []
    with browser() as tab:
        for width, scheme in product(WIDTHS_PIXELS, SCHEMES):
            tab.resize(width=width)
            tab.prefer(scheme)
            tab.open(page)
            tab.wait_for("document.querySelectorAll('.chart .main-svg').length > 0")
            if words:
                tab.evaluate(
                    f"(box => {{ box.value = {json.dumps(words)}; box.dispatchEvent(new Event('input')) }})"
                    "(document.getElementById('filter'))"
                )
                tab.evaluate("new Promise(done => setTimeout(done, 2000))")  # charts follow a little later
            paths.append(out / f"{width}-{scheme}.png")
            tab.screenshot(paths[-1])
    return paths


if __name__ == "__main__":
    main()
