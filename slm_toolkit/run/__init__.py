"""What a training process needs: engine, data, loss, clocks, checkpoints. Imports torch."""

import os
import warnings

import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # or DeepSpeed, which accelerate imports, warns on every rank
warnings.filterwarnings("ignore", message=".*torch.distributed.*is deprecated", category=FutureWarning)
