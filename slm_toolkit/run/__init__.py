"""The parts of a training process: engine, data, loss, clocks, checkpoints. Imports torch."""

import logging
import os
import warnings

import torch

if not torch.cuda.is_available():
    # without this, DeepSpeed (which accelerate imports) warns on every rank
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
for name in ("torchao", "torch.utils._pytree"):  # they warn about parts that float8 training does not use
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)
