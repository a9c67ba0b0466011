"""Python reads this file when it starts, and pretends to have a GPU from then on (bench/gpu/pretend.py)."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("pretend", Path(__file__).parents[1] / "pretend.py")
_pretend = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_pretend)
_pretend.install_with_torch()
_pretend.import_next_sitecustomize(Path(__file__).parent)
