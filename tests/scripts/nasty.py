"""A script that harms the comparison that runs it: what, `--does` says; else it trains as loop.py does."""

import os
import runpy
import sys
import time
from pathlib import Path

does = sys.argv[-1]
folder = Path(os.environ["SLM_TOOLKIT_RUN_DIR"])


def replaced(name: str) -> Path:
    (folder / name).unlink(missing_ok=True)
    return folder / name


if does == "pipes":  # in the place of the files that the comparison reads
    for name in ("progress.json", "log.txt"):
        os.mkfifo(replaced(name))
    time.sleep(2)
    os._exit(3)
if does == "bytes":
    replaced("progress.json").write_bytes(b"\xff\xfe{")
    time.sleep(1)
if does == "keys":
    replaced("progress.json").write_text('{"step": {"a": 1}, "rate": [1]}')
    time.sleep(1)
if does == "nested":
    replaced("progress.json").write_text("[" * 100_000)
    time.sleep(1)
if does == "record":
    replaced("record.json").write_text("{")
    os._exit(0)
if does == "signal":
    os.kill(os.getpid(), 35)
    time.sleep(5)
if does == "says":
    print("  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 7)", flush=True)
    raise ValueError("its own words:\n  width: 64 and 128")
runpy.run_path(str(Path(__file__).with_name("loop.py")), run_name="__main__")
