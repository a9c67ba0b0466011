"""What a training process does before it imports torch, which takes seconds."""

import gc
import os
import sys
from collections.abc import Callable


def begin(name: str) -> Callable[[], None]:
    """Prepare the process if `name` is "__main__", and check its command line: --help and typos end it here.

    Call it before all other imports, and what it returns after them. Between the two calls no garbage is
    collected: imported objects are never garbage, yet collecting them took a third of a rank's CPU time
    before its first step (4.6 s, and 3.0 s without; one process, slm-1m, 2026-11-22).
    """
    was_collecting = gc.isenabled()
    gc.disable()
    if name == "__main__":
        _prepare_script()

    def imported() -> None:
        gc.freeze()
        if was_collecting:
            gc.enable()

    return imported


def _prepare_script() -> None:
    from slm_toolkit.base.errors import end_at_once
    from slm_toolkit.launch.processes import end_with_launcher, leave_out_working_folder

    end_with_launcher()
    leave_out_working_folder()  # before an import that the folder could shadow

    from slm_toolkit.config.flags import training_config

    # torch.cuda.is_available() would open CUDA here otherwise, and no forked child could use a GPU
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    end_at_once()  # importing torch and building the model take seconds
    training_config(sys.argv[1:])

    from slm_toolkit.hardware.machine import use_huge_pages
    from slm_toolkit.launch.command_line import check_command_line

    use_huge_pages()
    check_command_line(sys.argv[1:])
