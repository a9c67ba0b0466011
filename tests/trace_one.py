"""Rehearse one configuration of `bench/memory_traces.py`, a JSON in the command line, and print its row."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from memory_traces import trace

if __name__ == "__main__":
    print(json.dumps(trace(json.loads(sys.argv[1]))))
