"""The parts of a training process: engine, data, loss, clocks, checkpoints."""

import logging
import os
import warnings

from slm_toolkit.hardware.gpus import has_driver

if not has_driver():
    # without this, DeepSpeed (which accelerate imports) warns on every rank
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
for name in ("torchao", "torch.utils._pytree"):  # they warn about parts that float8 training does not use
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)
