"""What tests of `slm convert` ask: a conversion, its files as a strategy, what became of a key."""

import dataclasses
from pathlib import Path

from slm_toolkit.convert.convert import Converted, KeyAccount, convert
from slm_toolkit.strategy.strategy import Strategy, read_strategy


def converted(
    source: str, to: str, *, folder: Path | None = None, num_processes: int | None = None
) -> Converted:
    """A conversion; with `folder` its files are written there."""
    written = convert(source, to, folder=folder, num_processes=num_processes)
    if folder is not None:
        folder.mkdir(exist_ok=True)
        for name, text in written.files.items():
            (folder / name).write_text(text)
    return written


def strategy_of(written: Converted, folder: Path) -> Strategy:
    (name,) = [name for name in written.files if name.endswith(".yaml")]
    return read_strategy(folder / name)


def meaning(strategy: Strategy) -> Strategy:
    """The strategy without names of files, and without what only its launcher reads on one machine."""
    of_launcher = ("gpu_ids", "rdzv_backend", "same_network")
    config = {k: v for k, v in strategy.accelerate_config.items() if k not in of_launcher}
    if "deepspeed_config" in config:
        section = {k: v for k, v in config["deepspeed_config"].items() if k != "deepspeed_config_file"}
        config["deepspeed_config"] = section
    return dataclasses.replace(strategy, name="", path=None, accelerate_config=config)


def row(written: Converted, key: str) -> KeyAccount:
    (found,) = [row for row in written.rows if row.key == key]
    return found
