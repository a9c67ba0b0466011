"""Python reads this file when it starts, and pretends to have a GPU from then on (bench/gpu/pretend.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import pretend

pretend.install()
