"""Ours against what a user would pick instead: same model, tokens, numerics and steps, in turn, one machine.

    python bench/throughput.py                                  # two cores will do: one is used
    python bench/throughput.py --numerics fp32 --allocator tcmalloc --rounds 7
    python bench/throughput.py --models slm-100m slm-500m slm-1b slm-2b    # on a GPU

Each round runs every arm once, a process each: A B C, A B C, ...; ratios are taken within a round, and their
median and range printed. Losses that differ end it with exit code 1; times never do. torchtitan
wants other packages than we do: --python torchtitan=/path/to/venv/bin/python gives an arm its environment.
torchtitan 0.2.2 is the newest that takes a released torch: pip install torchtitan==0.2.2 triton.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from throughput_rows import Result, rows_of, table_of, tells_apart

from slm_toolkit.config.flags import flags_of
from slm_toolkit.config.run_config import RunConfig

SCRIPT = Path(__file__).parent / "rivals" / "training.py"
FOR_CPU = {  # the shape of a slm-10m with the vocabulary of Llama, whose head is then half of the work
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OURS = {
    "ours": ("--kernels", "fused"),
    "ours_compile": ("--kernels", "compiled"),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # the trainer of rivals/training.py, and its options
    "trainer": ("trainer", {}),
    "trainer_compile": ("trainer", {"torch_compile": True}),
    "bare": ("bare", {}),
    "bare_compile": ("bare", {"torch_compile": True}),
    "torchtitan": ("torchtitan", {}),
    "torchtitan_compile": ("torchtitan", {"torch_compile": True}),
}
ALLOCATORS = {  # for every arm alike
    "glibc": {},
    "huge_pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    "tcmalloc": {"LD_PRELOAD": "libtcmalloc_minimal.so.4"},
}


def prepare(folder: Path, model: str, args: argparse.Namespace) -> RunConfig:
    """Write the work that all arms share, for each of the other trainers' arms; return our flags."""
    from rivals.work import write_work  # imports torch

    config = RunConfig(
        model=model,
        seq_len=args.seq_len,
        per_device_train_batch_size=args.batch_size,
        max_steps=args.steps,
        attn_implementation=args.attn_implementation,
        max_grad_norm=1.0,
        numerics="fp32",
    )
    work = write_work(folder, config, num_processes=1)
    for arm in set(args.arms) - set(OURS):
        for numerics in args.numerics:
            place = folder / arm / numerics
            place.mkdir(parents=True)
            own = {**work, **OTHERS[arm][1], "folder": str(place), "numerics": numerics}
            (place / "work.json").write_text(json.dumps(own))
    return config


def run_arm(arm: str, numerics: str, config: RunConfig, folder: Path, args: argparse.Namespace) -> Result:
    """One process of an arm. Raises RuntimeError with the end of what it wrote where it fails."""
    runs, place = folder / "runs", folder / arm / numerics
    shutil.rmtree(runs, ignore_errors=True)
    if arm in OURS:
        own = dataclasses.replace(
            config,
            # from the configuration: the seed gives the weights that the others load
            model=str(folder / "model" / "config.json"),
            numerics="fp32" if numerics == "fp32" else args.ours_numerics,
            save_final_model="false",
            output_dir=str(runs),
        )
        command = [sys.executable, "-m", "slm_toolkit.train", *flags_of(own), *OURS[arm]]
    else:
        python = args.python.get(arm, sys.executable)
        command = [python, str(SCRIPT), OTHERS[arm][0], str(place / "work.json")]
    if args.core is not None:
        command = ["taskset", "-c", str(args.core), *command]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), **ALLOCATORS[args.allocator]}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{arm}: {done.stderr.strip()[-600:]}")
    if arm in OURS:
        (path,) = runs.glob("*/record.json")
        record = json.loads(path.read_text())
        names = ("step_seconds", "peak_rss_bytes", "peak_allocated_bytes")
        observed = {name: record[name][0] if record[name] else None for name in names}
        observed["losses"] = record["losses"]
    else:
        observed = json.loads((place / "rank0.json").read_text())
    return Result(
        step_seconds=observed["step_seconds"][args.warmup :],
        losses=observed["losses"],
        peak_rss_bytes=observed["peak_rss_bytes"],
        peak_allocated_bytes=observed["peak_allocated_bytes"],
    )


def of_rounds(
    numerics: str, config: RunConfig, folder: Path, args: argparse.Namespace
) -> dict[str, list[Result]]:
    """The results of every arm, one per round; an arm that can't run is told of and left out."""
    results: dict[str, list[Result]] = {arm: [] for arm in args.arms}
    for number in range(args.rounds):
        for arm in list(results):
            try:
                result = run_arm(arm, numerics, config, folder, args)
            except RuntimeError as error:
                print(f"left out: {error}", file=sys.stderr)
                del results[arm]
                continue
            results[arm].append(result)
            print(
                f"round {number + 1}/{args.rounds}  {numerics}  {arm}: {result.seconds:.3f} s per step, "
                f"peak RSS {result.peak_rss_bytes / 2**20:,.0f} MiB",
                file=sys.stderr,
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", help="default: 6 layers, 256 wide, vocabulary 32000")
    parser.add_argument("--seq_len", type=int, help="256 on a CPU, 1024 on a GPU")
    parser.add_argument("--batch_size", type=int, help="8 on a CPU, 16 on a GPU")
    parser.add_argument("--numerics", nargs="+", choices=("bf16", "fp32"), default=["bf16"])
    parser.add_argument(
        "--ours_numerics",
        choices=("aligned", "stock"),
        default="aligned",
        help="our bf16: weights and fp32 masters, or autocast, which is what the others do",
    )
    parser.add_argument("--attn_implementation", default="sdpa")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=6, help="first steps that are not timed; they compile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["trainer", "trainer_compile", "bare", "bare_compile", *OURS],
    )
    parser.add_argument("--against", nargs="+", metavar="ARM", help="default: Trainer's")
    parser.add_argument("--allocator", choices=ALLOCATORS, default="glibc", help="of every arm")
    parser.add_argument("--core", type=int, help="the core of every arm (on a CPU: 0; -1: any)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", nargs="+", default=[], metavar="ARM=PATH", help="its interpreter")
    parser.add_argument("--out", type=Path, help="write the rows as JSON here, too")
    args = parser.parse_args()
    if unpaired := [pair for pair in args.python if "=" not in pair]:
        parser.error(f"--python {unpaired[0]}: ARM=PATH")
    args.python = dict(pair.split("=", 1) for pair in args.python)
    if unknown := set(args.arms) - {*OURS, *OTHERS}:
        parser.error(f"--arms {unknown.pop()}: choose from {', '.join([*OTHERS, *OURS])}")
    if args.steps <= args.warmup:
        parser.error(f"--steps {args.steps} leaves none to time after --warmup {args.warmup}")
    against = args.against or [arm for arm in args.arms if arm.startswith("trainer")]
    if not set(against) & set(args.arms):
        parser.error("nothing to compare with: add trainer to --arms, or name one of them --against")

    import torch

    on_gpu = torch.cuda.is_available()
    args.seq_len = args.seq_len or (1024 if on_gpu else 256)
    args.batch_size = args.batch_size or (16 if on_gpu else 8)
    if args.core is None and not on_gpu:
        args.core = 0
    if args.core == -1:
        args.core = None
    everything, all_equal = [], True
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch) / "slm-10m-32k.json"
        own.write_text(json.dumps(FOR_CPU))
        for number, model in enumerate(args.models or [str(own)]):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            config = prepare(folder, model, args)
            for numerics in args.numerics:
                results = of_rounds(numerics, config, folder, args)
                baselines = tuple(arm for arm in results if arm in against)
                rows = rows_of(results, baselines, args.batch_size * args.seq_len)
                title = f"{Path(model).stem}, {numerics}, sequence {args.seq_len}, batch {args.batch_size}, "
                title += f"{args.rounds} rounds" + ("" if on_gpu else f", allocator {args.allocator}")
                Console(width=150).print(table_of(rows, baselines, title))
                everything.append({"model": Path(model).stem, "numerics": numerics, "rows": rows})
                apart = [
                    arm
                    for arm in results
                    if any(tells_apart(results[arm], results[base], numerics) for base in baselines)
                ]
                if apart:
                    all_equal = False
                    print(f"losses differ by more than rounding: {', '.join(apart)}")
    if args.out is not None:
        args.out.write_text(json.dumps(everything, indent=1))
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
