"""How fast `slm estimate` is, beside what accelerate's and DeepSpeed's estimators do for the same model.

    python bench/estimate_speed.py [--no-with_deepspeed]

Everything is timed in one run, each tool in a process of its own, its peak RSS with it. accelerate's command
asks the hub before anything else: timed are the imports and the steps that come after its download, from a
local configuration. DeepSpeed's `*_all_live` count the parameters of a model that is there: its making is
included (20 s and 8 GB on slm-2b). Seconds without imports, or without the model, stand in brackets. The last
column is what the project promises: at least 10 for accelerate's, 80 for DeepSpeed's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from slm_toolkit.model.model_spec import PRESETS

MODEL = "slm-2b"
ONE = ("estimate", "--model", MODEL, "--strategy", "ds_zero3", "--num_gpus", "8", "--json")
GRID = (  # 5 strategies x 4 GPU counts x 2 GPUs x 5 lengths x 2 x 25 batches
    *("estimate", "--json", "--strategy", "ddp", "fsdp_full_shard", "ds_zero1", "ds_zero2", "ds_zero3"),
    *("--num_gpus", "8", "16", "32", "64", "--gpu", "a100-40gb", "h200", "--gradient_checkpointing", "none"),
    *("full", "--seq_len", "512", "1024", "2048", "4096", "8192", "--per_device_train_batch_size"),
    *(str(size) for size in range(1, 26)),
)
NUM_CONFIGURATIONS = 10_000

# accelerate 1.15, commands/estimate.py: create_empty_model after verify_on_hub, gather_data, the table
ACCELERATE = """
import sys, time, torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import create_ascii_table, estimate_training_usage
from accelerate.utils import calculate_maximum_sizes, convert_bytes
from transformers import AutoConfig, AutoModel
before = time.perf_counter()
config = AutoConfig.from_pretrained(sys.argv[1])
with init_empty_weights():
    model = AutoModel.from_config(config, torch_dtype=torch.float32)
total, (largest, _) = calculate_maximum_sizes(model)
rows = []
for dtype, less in (("float32", 1), ("float16", 2), ("int8", 4), ("int4", 8)):
    training = max(estimate_training_usage(total, dtype).values())
    usage = convert_bytes(training) if training != -1 else "N/A"
    rows.append([dtype, convert_bytes(largest / less), convert_bytes(total / less), usage])
print(create_ascii_table(["dtype", "Largest Layer", "Total Size", "Training using Adam"], rows, "Memory"))
print(f"{time.perf_counter() - before:.2f} s without imports", file=sys.stderr)
"""
DEEPSPEED = """
import sys, time, torch
from transformers import AutoConfig, AutoModelForCausalLM
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.float32)
before = time.perf_counter()
estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
print(f"{time.perf_counter() - before:.2f} s of it the two functions", file=sys.stderr)
"""


@dataclass(frozen=True)
class Timed:
    """A process that ended."""

    seconds: float
    peak_rss_bytes: int
    out: str
    err: str


def timed(*words: str) -> Timed:
    """Run a command; raises CalledProcessError where it fails."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(words, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        if status != 0:
            print(err.read(), file=sys.stderr)
            raise subprocess.CalledProcessError(status, words)
        return Timed(seconds, usage.ru_maxrss * 1024, out.read(), err.read())


def write_config(folder: Path) -> Path:
    """slm-2b as a Hugging Face configuration."""
    spec = PRESETS[MODEL]
    config = {
        "model_type": spec.model_type,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_size,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--with_deepspeed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="DeepSpeed's part too: 20 s and 8 GB (default: yes)",
    )
    args = parser.parse_args()
    slm = str(Path(sys.executable).with_name("slm"))

    several = [timed(slm, *ONE) for _ in range(5)]
    ours = median(run.seconds for run in several)
    grid = timed(slm, *GRID)
    assert len(json.loads(grid.out)) == NUM_CONFIGURATIONS
    measured = [
        (
            f"slm estimate, {MODEL}, ds_zero3, 8 GPUs (median of 5)",
            ours,
            max(r.peak_rss_bytes for r in several),
        ),
        (f"slm estimate, {NUM_CONFIGURATIONS:,} configurations", grid.seconds, grid.peak_rss_bytes),
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = str(write_config(Path(folder)))
        others = [("accelerate estimate-memory after its download", ACCELERATE)]
        if args.with_deepspeed:
            others.append(("DeepSpeed's *_all_live", DEEPSPEED))
        for title, program in others:
            found = timed(sys.executable, "-c", program, config)
            aside = found.err.strip().splitlines()[-1]
            measured.append((f"{title} ({aside})", found.seconds, found.peak_rss_bytes))

    table = Table(title=f"{MODEL}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    for title in ("", "seconds", "peak RSS MB", "times slm estimate"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    for title, seconds, rss_bytes in measured:
        table.add_row(title, f"{seconds:.2f}", f"{rss_bytes / 1e6:,.0f}", f"{seconds / ours:.0f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
