"""Each rank says where it is when `slm compare` asks: SIGUSR1 writes its Python stack beside the record."""

import faulthandler
import os
import signal
from pathlib import Path

from slm_toolkit.record import RUN_DIR_VARIABLE, STACK_FILES


def answer_signals() -> None:
    """In a process that `slm compare` started; elsewhere nothing happens."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir is None or not hasattr(signal, "SIGUSR1"):  # Windows
        return
    before, between, after = STACK_FILES.split("*")
    name = f"{before}{os.environ.get('RANK', '0')}{between}{os.getpid()}{after}"
    # stays open: written to from within a signal handler; one thread only, the one that trains
    file = os.open(Path(run_dir, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
