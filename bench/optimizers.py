"""Each optimizer against AdamW: losses of the same training, and memory per rank against the estimate.

    python bench/optimizers.py --out results/optimizers               # an hour and a half on two cores
    python bench/optimizers.py --out results/optimizers --only Lion   # again this one; the others' rows stay

Trains slm-3m for 300 steps with each optimizer, on synthetic tokens and on the text of docs/*.md. A first run
of one seed chooses the learning rate (AdamW's for the narrower moments); then three seeds train with it. A
loss is the mean of the last 20 steps. The text is seen once, so that it is also the loss on new text. Memory:
one process plays rank 0 of 8 (`--rehearse 8`) with slm-100m.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ADAMW = "AdamW"
FLAGS = {
    ADAMW: (),
    "AdamW, moments in bf16": ("--adam_dtype", "bf16"),
    "AdamW, moments in 8 bits": ("--adam_dtype", "int8"),
    "Lion": ("--optim", "lion"),
    "Muon": ("--optim", "muon"),
}
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
LOWER_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"for Lion, as its paper says"
NUM_STEPS, NUM_LAST, SEEDS, NUM_RANKS = 300, 20, (0, 1, 2), 8
TRAINED = ("--model", "slm-3m", "--seq_len", "128", "--per_device_train_batch_size", "4")
REHEARSED = ("--model", "slm-100m", "--seq_len", "1024", "--per_device_train_batch_size", "1")
SHARDED = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3")


def compared(*words: str) -> list[dict[str, Any]]:
    """The rows of `slm compare`, each with its folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("slm")), "compare", "--json", *words]
        done = subprocess.run([*command, "--output_dir", folder], capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows = json.loads(done.stdout)
        for row in rows:
            if row["evidence"] == "measured":  # a rehearsal has no losses
                losses = json.loads(Path(row["record"]).read_text())["losses"]
                row["last_loss"] = statistics.fmean(losses[-NUM_LAST:])
        return rows


def trained(dataset: str, optimizer: str, rates: tuple[float, ...]) -> dict[str, Any]:
    """The learning rate with the lowest loss, and the losses of all seeds with it."""
    words = ("--strategy", "single", *TRAINED, "--max_steps", str(NUM_STEPS), "--warmup_steps", "30")
    words += (*FLAGS[optimizer], "--dataset", dataset)
    by_rate = {}
    for rate in rates if len(rates) > 1 else ():
        (row,) = compared(*words, "--learning_rate", str(rate))
        by_rate[rate] = row["last_loss"]
        print(optimizer, Path(dataset).name, rate, round(row["last_loss"], 4), flush=True)
    best = min(by_rate, key=by_rate.__getitem__) if by_rate else rates[0]
    rows = compared(*words, "--learning_rate", str(best), "--seed", *map(str, SEEDS))
    losses = [row["last_loss"] for row in rows]
    print(optimizer, Path(dataset).name, best, [round(loss, 4) for loss in losses], flush=True)
    return {
        "optimizer": optimizer,
        "dataset": Path(dataset).name,
        "learning_rate": best,
        "loss_by_learning_rate": by_rate,
        "losses": losses,
        "date": today(),
    }


def peaks(optimizer: str) -> list[dict[str, Any]]:
    """The peak of each strategy, traced and estimated."""
    words = ("--rehearse", str(NUM_RANKS), *REHEARSED, *FLAGS[optimizer])
    names = ("strategy", "peak_allocated_bytes", "estimated_peak_bytes")
    rows = compared("--strategy", *SHARDED, *words)
    return [{"optimizer": optimizer, **{name: row[name] for name in names}, "date": today()} for row in rows]


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for optimizers.json")
    parser.add_argument("--only", nargs="+", choices=FLAGS, default=list(FLAGS), help="these optimizers")
    args = parser.parse_args()
    file = args.out / "optimizers.json"
    before = json.loads(file.read_text()) if file.exists() else {"losses": [], "memory": []}
    kept = {
        part: [row for row in before[part] if row["optimizer"] not in args.only]
        for part in ("losses", "memory")
    }
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "docs.txt")
        text.write_text("\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
        for dataset in ("synthetic", str(text)):
            for optimizer in args.only:
                rates = LOWER_RATES if optimizer == "Lion" else LEARNING_RATES
                if optimizer.startswith(f"{ADAMW},"):
                    rates = tuple(
                        row["learning_rate"]
                        for row in kept["losses"]
                        if (row["optimizer"], row["dataset"]) == (ADAMW, Path(dataset).name)
                    )
                    if not rates:
                        parser.error(f"{optimizer} takes {ADAMW}'s learning rate: run {ADAMW} first")
                kept["losses"].append(trained(dataset, optimizer, rates))
    kept["memory"] += [row for optimizer in args.only for row in peaks(optimizer)]
    order = list(FLAGS)
    args.out.mkdir(parents=True, exist_ok=True)
    content = {
        "steps": NUM_STEPS,
        "last": NUM_LAST,
        "losses": sorted(
            kept["losses"], key=lambda row: (row["dataset"] != "synthetic", order.index(row["optimizer"]))
        ),
        "memory": sorted(kept["memory"], key=lambda row: order.index(row["optimizer"])),
    }
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
