"""Rehearse two training steps and write their allocations: `python rehearsed.py MODEL STRATEGY GPUS FILE`."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from memory_traces import launch_environment, model_named

from slm_toolkit import train
from slm_toolkit.run.observe.allocations import requests_of
from slm_toolkit.strategy.strategy import find_strategy

model, strategy, num_gpus, file = sys.argv[1:]
traces = []


def keep_the_trace(*arguments: object) -> object:
    traces.append(arguments[-1])
    return trace_memory(*arguments)


trace_memory, train.trace_memory = train.trace_memory, keep_the_trace
os.environ.update(launch_environment(find_strategy(strategy)))
with tempfile.TemporaryDirectory() as folder:
    words = ("--per_device_train_batch_size", "8", "--seq_len", "1024", "--rehearse", num_gpus)
    train.main(["--model", model_named(model), *words, "--output_dir", folder, "--run_name", "r"])
lines = (" ".join(map(str, request)) for request in requests_of(traces[0].events))
Path(file).write_text("\n".join(lines) + "\n")
