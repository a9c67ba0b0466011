"""How long one waits: `slm --help`, `slm estimate`, and `accelerate launch` to the end of step one.

    python bench/start_up.py [--rounds 5]

The first step is ours against a bare Accelerate script's of the same model, in turn: a whole launch of one
step each, ours with its probe and its record.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from throughput import FOR_CPU

ROOT = Path(__file__).parent.parent
BARE = """
import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator()
model = LlamaForCausalLM(LlamaConfig.from_json_file(sys.argv[1])).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
loader = torch.utils.data.DataLoader(torch.randint(32000, (8, 128)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for tokens in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    break
accelerator.end_training()
"""


def seconds(*command: str) -> float:
    """Of a whole process. Raises RuntimeError where it fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**env, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr[-600:]}")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    slm = str(Path(sys.executable).with_name("slm"))
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    for words in (("--help",), ("estimate", "--model", "slm-2b")):
        found = [seconds(slm, *words) for _ in range(2 * args.rounds + 1)][1:]  # the first compiles Python
        print(f"slm {' '.join(words)}: {median(found):.3f} s (at best {min(found):.3f})")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "bare.py").write_text(BARE)
        (folder / "model.json").write_text(json.dumps(FOR_CPU))
        yaml = str(ROOT / "accel_configs" / "ddp.yaml")
        launch = (
            accelerate,
            "launch",
            "--config_file",
            yaml,
            "--num_processes",
            "2",
            "--main_process_port",
            "0",
        )
        flags = ("--model", str(folder / "model.json"), "--seq_len", "128", "--max_steps", "1")
        bare, ours, ratios = [], [], []
        for number in range(args.rounds + 1):
            bare.append(seconds(*launch, str(folder / "bare.py"), str(folder / "model.json")))
            out = ("--output_dir", str(folder / str(number)))
            ours.append(seconds(*launch, "-m", "slm_toolkit.train", *flags, *out))
            ratios.append(ours[-1] / bare[-1])
            print(f"  bare {bare[-1]:.2f} s, ours {ours[-1]:.2f} s", file=sys.stderr)
        # the first round reads files that nobody has read yet
        print(
            f"accelerate launch, two processes, one step: bare {median(bare[1:]):.2f} s, "
            f"ours {median(ours[1:]):.2f} s, {median(ratios[1:]):.2f}x "
            f"({min(ratios[1:]):.2f}-{max(ratios[1:]):.2f})"
        )


if __name__ == "__main__":
    main()
