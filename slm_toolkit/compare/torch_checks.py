"""Checks of planned runs that need torch, done before any launch."""

from rich.console import Console

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.config.run_config import SYNTHETIC


def check_with_torch(runs: list[PlannedRun], console: Console) -> None:
    """Raise ValueError if the data, a tracker, a kernel or a package can't be used."""
    config = runs[-1].config  # parity references, which come first, use no tracker
    if config.report_to != "none":
        from slm_toolkit.run.engine.engine import check_tracker

        check_tracker(config.report_to)
    for run in runs:
        if run.config.fp8 != "none" or run.config.compiles or run.config.peft != "none":
            from slm_toolkit.run.kernels.layer_kernels import check_optional

            check_optional(run.config)
    for run in {(run.spec.name, run.config.attn_implementation): run for run in runs}.values():
        if run.config.attn_implementation not in ("eager", "sdpa"):
            from slm_toolkit.run.model.model import check_attention

            check_attention(run.spec, run.config)
    if config.dataset != SYNTHETIC:
        from slm_toolkit.run.data.data import load_data

        with console.status("reading the dataset"):
            for run in {(run.spec.name, run.config.seq_len): run for run in runs}.values():
                load_data(run.config, run.spec, num_sequences=0)
