"""The optional packages: what to install for which feature, as pyproject.toml's extras have them.

Messages name the packages: the extras themselves install from a checkout only (`pip install -e ".[peft]"`).
"""

PACKAGES = {
    "figures": "kaleido",
    "fp8": "torchao",
    "liger": "liger-kernel",
    "lm_eval": "lm_eval",
    "peft": "peft bitsandbytes",
}


def pip_install(extra: str) -> str:
    """`pip install peft bitsandbytes` of "peft"."""
    return f"pip install {PACKAGES[extra]}"
