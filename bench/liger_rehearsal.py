"""Rehearse a run with Liger's kernels on a machine without a GPU: they allocate, but are not launched.

pip install --no-deps --target FOLDER triton liger-kernel
PYTHONPATH=FOLDER accelerate launch --num_processes 1 --config_file accel_configs/ddp.yaml \\
    bench/liger_rehearsal.py --use_liger_kernel --rehearse 2 --model slm-100m --loss_kernel fused_linear

The traced peak in the record is that of a GPU. tests/unit/predict/test_traced_kernels.py has such peaks.
"""

from unittest.mock import patch

from triton.runtime.jit import KernelInterface

import slm_toolkit.run.setup as setup
from slm_toolkit.train import main

not_launched = patch.object(KernelInterface, "__getitem__", lambda kernel, grid: lambda *a, **k: None)
without_a_gpu = patch.object(setup, "check_optional", lambda config: None)

if __name__ == "__main__":
    with not_launched, without_a_gpu:
        main()
