"""The modules of the package, those that may begin with torch, and the libraries that are slow to import."""

from pathlib import Path

from conftest import ROOT

PACKAGE = ROOT / "slm_toolkit"
HEAVY = {
    *("torch", "accelerate", "deepspeed", "transformers", "datasets"),
    *("pandas", "numpy", "pyarrow", "plotly"),
}
WITH_TORCH = (
    *("slm_toolkit.run", "slm_toolkit.train", "slm_toolkit.recorder", "slm_toolkit.launch.launcher"),
    "slm_toolkit.checkpoint_convert.rewrite",
)
"what trains, and the process that starts it: the only modules that begin with torch, accelerate, ..."


def modules() -> dict[str, Path]:
    """All modules by dotted name, packages without their `__init__`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
LIGHT = [name for name in MODULES if not name.startswith(WITH_TORCH)]
