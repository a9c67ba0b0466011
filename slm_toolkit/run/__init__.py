"""What a training process needs: engine, data, loss, clocks, checkpoints. Imports torch."""

import logging
import os
import warnings

import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # or DeepSpeed, which accelerate imports, warns on every rank
for name in (
    "torchao",
    "torch.utils._pytree",
):  # warn of what float8 training uses none of
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
