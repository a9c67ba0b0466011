"""How soon each fault in training is reported: the table of docs/checkpoints_and_faults.md.

python bench/fault_times.py            # all, about 8 minutes on two cores
python bench/fault_times.py -k hangs   # pytest's words choose some
"""

import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

TESTS = tuple(f"tests/launch/test_{name}.py" for name in ("training_faults", "training_data_faults", "stops"))
_ROOT = Path(__file__).parent.parent
_COLUMNS = ("fault", "message", "seconds")


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", ""]
        command += ["-o", "junit_family=legacy", f"--junitxml={report}"]
        done = subprocess.run([*command, *TESTS, *words], cwd=_ROOT, stdout=sys.stderr)
        rows = rows_of(report) if report.exists() else []
    print(f"{datetime.now(UTC).date().isoformat()}\n\n{table(rows)}")
    return done.returncode


def rows_of(report: Path) -> list[dict[str, str]]:
    """What the tests noted of each fault, in their order."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        noted = {item.get("name"): item.get("value") for item in case.iter("property")}
        if noted.keys() >= set(_COLUMNS):
            found.append(noted)
    return found


def table(rows: list[dict[str, str]]) -> str:
    """In Markdown."""
    lines = ["| fault | message | seconds until the message |", "|---|---|---:|"]
    for row in rows:
        message = row["message"].replace("|", "\\|")
        lines.append(f"| {row['fault']} | `{message}` | {float(row['seconds']):.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
