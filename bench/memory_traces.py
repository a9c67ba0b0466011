"""Rehearse a seeded sample of configurations on fake tensors; writes what `bench/memory_accuracy.py` reads.

    python bench/memory_traces.py --half development   # some 10 minutes on two cores
    python bench/memory_traces.py --half held_out      # formulas are never changed after a look at these
    python bench/memory_traces.py --half fresh         # another draw, when formulas were done
    python bench/memory_traces.py --half adapters      # of --peft lora; looked at, as development
    python bench/memory_traces.py --half adapters_held_out
    python bench/memory_traces.py --half small_zero    # ZeRO-1 and ZeRO-2 of small models; looked at
    python bench/memory_traces.py --half small_zero_held_out
    python bench/memory_traces.py --half today         # small Qwen3, Gemma, SmolLM3, OLMo 2, ...; looked at
    python bench/memory_traces.py --half today_held_out
    python bench/memory_traces.py --half gradients     # dtypes and lifetime of gradients; looked at
    python bench/memory_traces.py --half gradients_held_out
    python bench/memory_traces.py --half adapters_today  # adapters of Qwen3, Gemma, Phi-3, ...; looked at
    python bench/memory_traces.py --half adapters_today_held_out
    python bench/memory_traces.py --half sequences       # long sequences that ranks share; looked at
    python bench/memory_traces.py --half sequences_held_out
    python bench/memory_traces.py --half optimizers      # Muon, few tokens; looked at
    python bench/memory_traces.py --half optimizers_held_out

Each configuration is a real run of `slm_toolkit.train --rehearse N` in a process of its own, forked from one
that has imported everything, with the environment that `accelerate launch` would set.
"""

import argparse
import contextlib
import csv
import importlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memory_accuracy import FLAGS_OF_GRADIENTS, config_of, model_named

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.names import find_model
from slm_toolkit.record.run_record import RECORD_FILE, installed_versions
from slm_toolkit.strategy.strategy import Strategy, contradictions, find_strategy

SEED = 20261120
HALVES = (
    *("development", "held_out", "fresh", "adapters", "adapters_held_out"),
    *("small_zero", "small_zero_held_out", "today", "today_held_out", "gradients", "gradients_held_out"),
    *("adapters_today", "adapters_today_held_out", "sequences", "sequences_held_out"),
    *("optimizers", "optimizers_held_out"),
)
NUM, FRESH, ADAPTERS, SMALL_ZERO, SMALL_ZERO_HELD_OUT = 280, 110, 140, 240, 60
GRADIENTS, GRADIENTS_HELD_OUT = 40, 30
SMALL_ZERO_SEED = 1
TODAY, ADAPTERS_TODAY, SEQUENCES, OPTIMIZERS = 96, 96, 80, 100
AXES: dict[str, tuple[Any, ...]] = {
    "model": (
        *("slm-100m", "slm-500m", "slm-1b", "slm-2b"),
        *("smollm2-135m", "tinyllama-1.1b", "llama-3.2-1b", "qwen2.5-0.5b"),  # tied, grouped-query or both
    ),
    "strategy": (
        *("single", "ddp", "fsdp_full_shard", "fsdp_shard_grad_op"),
        *("ds_zero1", "ds_zero2", "ds_zero3"),
    ),
    "num_gpus": (1, 8, 64),
    "per_device_train_batch_size": (1, 2, 4, 8, 16),
    "seq_len": (512, 1024, 2048),
    "attn_implementation": ("sdpa", "eager"),
    "gradient_checkpointing": ("none", "none", "full", "selective_layer", "selective_op"),
    "loss_kernel": ("hf", "hf", "fused_linear"),
    "norm_kernel": ("hf", "hf", "fused"),
    "numerics": ("aligned", "aligned", "stock", "stock", "pure_bf16", "fp32"),
    "optim": ("adamw_torch_fused", "adamw_torch"),
    "gradient_accumulation_steps": (1, 1, 4),
}
"a value that stands twice is drawn twice as often"
OF_ADAPTERS: dict[str, tuple[Any, ...]] = {
    **AXES,
    "model": (
        *("slm-10m", "slm-100m", "slm-100m", "slm-500m", "slm-1b"),
        *("smollm2-135m", "tinyllama-1.1b", "qwen2.5-0.5b"),
    ),
    "seq_len": (256, 512, 1024, 2048),
    "attn_implementation": ("sdpa", "sdpa", "eager"),
    "gradient_checkpointing": ("none", "none", "full", "full", "selective_layer", "selective_op"),
    "loss_kernel": ("hf", "fused_linear", "fused_linear"),
    "numerics": ("aligned", "aligned", "aligned", "stock", "pure_bf16", "fp32"),
    "peft": ("lora",),
    "lora_r": (8, 16, 64),
    "lora_dropout": (0.0, 0.0, 0.0, 0.05),
    "lora_target_modules": ("all-linear", "all-linear", "q_proj,v_proj", "gate_proj,up_proj,down_proj"),
}
"the same with adapters"
OF_SMALL_ZERO: dict[str, tuple[Any, ...]] = {
    "model": (
        *("slm-1m", "slm-3m", "slm-10m", "tied-gqa-3m", "tied-mha-1m", "gqa-6m"),
        *("tied-wide-28m", "gqa-deep-40m", "qwen-tied-3m"),
    ),
    "strategy": ("ds_zero1", "ds_zero2", "ds_zero2"),
    "num_gpus": (2, 4, 8),
    "per_device_train_batch_size": (1, 1, 2),
    "seq_len": (64, 100, 128, 200, 257),
    "gradient_checkpointing": ("none", "full"),
    "loss_kernel": ("hf", "hf", "hf", "fused_linear"),
    "optim": ("adamw_torch_fused", "adamw_torch_fused", "adamw_torch"),
    "gradient_accumulation_steps": (1, 2),
    "reduce_dtype": ("bf16", "fp32"),
}
"so little is computed that gradients and their buckets are most of the memory; ZeRO-1 reduces in bf16"
OF_TODAY: dict[str, tuple[Any, ...]] = {
    "model": (
        *("qwen3-2m", "gemma2-2m", "gemma3-2m", "smollm3-2m"),
        *("olmo2-3m", "granite-2m", "phi3-2m", "falcon3-2m"),
    ),
    "strategy": ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3"),
    "num_gpus": (2, 8),
    "per_device_train_batch_size": (1, 2, 8),
    "seq_len": (256, 512, 1024),
    "attn_implementation": ("sdpa", "sdpa", "eager"),
    "gradient_checkpointing": ("none", "none", "full", "selective_layer", "selective_op"),
    "loss_kernel": ("hf", "fused_linear"),
    "norm_kernel": ("hf", "hf", "fused"),
    "numerics": ("aligned", "aligned", "stock", "pure_bf16", "fp32"),
    "optim": ("adamw_torch_fused",),
    "gradient_accumulation_steps": (1, 4),
}
"small models of today's families, at batches that fill a GPU of their size"

OF_ADAPTERS_TODAY: dict[str, tuple[Any, ...]] = {
    **OF_TODAY,
    "strategy": ("single", *OF_TODAY["strategy"]),
    "num_gpus": (1, 2, 8),
    "peft": ("lora",),
    "lora_r": (8, 16, 64),
    "lora_dropout": (0.0, 0.0, 0.05),
    "lora_target_modules": ("all-linear", "all-linear", "q_proj,v_proj", "gate_proj,up_proj,down_proj"),
}
"the same with adapters"
_TARGETS_OF_PHI3 = {"q_proj,v_proj": "qkv_proj", "gate_proj,up_proj,down_proj": "gate_up_proj,down_proj"}

LEFT_OUT = ""
"the value of a flag that is not given"
OF_GRADIENTS: dict[str, tuple[Any, ...]] = {
    "model": ("slm-3m", "slm-10m", "tied-gqa-3m", "gqa-6m", "qwen-tied-3m", "smollm2-135m"),
    "strategy": (
        *("single", "ddp", "fsdp_full_shard", "fsdp_shard_grad_op"),
        *("ds_zero1", "ds_zero1", "ds_zero1", "ds_zero1", "ds_zero2", "ds_zero3"),
    ),
    "num_gpus": (1, 2, 8),
    "per_device_train_batch_size": (1, 2, 8),
    "seq_len": (64, 128, 257, 512),
    "gradient_checkpointing": ("none", "none", "full"),
    "loss_kernel": ("hf", "fused_linear"),
    "numerics": ("aligned", "aligned", "aligned", "stock", "pure_bf16"),
    "optim": ("adamw_torch_fused", "adamw_torch"),
    "gradient_accumulation_steps": (1, 1, 2, 3),
    "reduce_dtype": (LEFT_OUT, "fp32"),
    "grad_dtype": (LEFT_OUT, "fp32", "fp32"),
    "keep_grads": (LEFT_OUT, "true"),
}
"what is refused together is left out"
OF_SEQUENCES: dict[str, tuple[Any, ...]] = {
    "model": ("slm-10m", "slm-100m", "slm-500m", "smollm2-135m", "llama-3.2-1b", "qwen2.5-0.5b"),
    "strategy": ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3"),
    "num_gpus": (8, 16),
    "sp_size": (2, 4, 8),
    "per_device_train_batch_size": (1, 1, 2),
    "seq_len": (2048, 8192, 16384, 32768),
    "gradient_checkpointing": ("none", "none", "full", "selective_layer", "selective_op"),
    "loss_kernel": ("hf", "fused_linear", "fused_linear"),
    "norm_kernel": ("hf", "fused"),
    "numerics": ("aligned", "aligned", "stock", "pure_bf16", "fp32"),
    "optim": ("adamw_torch_fused",),
    "gradient_accumulation_steps": (1, 1, 4),
}
"ranks share each sequence"
OF_OPTIMIZERS: dict[str, tuple[Any, ...]] = {
    "model": ("slm-3m", "slm-10m", "slm-100m", "qwen-tied-3m", "smollm2-135m", "llama-3.2-1b"),
    "strategy": OF_GRADIENTS["strategy"][:4] + ("ds_zero1", "ds_zero2", "ds_zero3"),
    "num_gpus": (1, 2, 8),
    "per_device_train_batch_size": (1, 2),
    "seq_len": (16, 64, 256, 1024),
    "gradient_checkpointing": ("none", "full", "full"),
    "loss_kernel": ("hf", "fused_linear"),
    "numerics": ("aligned", "aligned", "pure_bf16"),
    "optim": ("adamw_torch_fused", "adamw_torch", "muon", "muon"),
    "gradient_accumulation_steps": (1, 2),
    "reduce_dtype": (LEFT_OUT, LEFT_OUT, "fp32"),
}
"few tokens, so that many peaks are in the optimizer's step"

_FOUND = ("status", "reason", "peak_bytes", "reserved_bytes", "peak_phase", "peak_module", "parts")
_TAKE_SECONDS_TO_IMPORT = (
    *("slm_toolkit.train", "deepspeed", "deepspeed.runtime.zero.stage3", "torch.distributed.fsdp"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2"),
    *("accelerate.commands.launch", "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"),
    "peft.tuners.lora",
)


def sample(num: int, seed: int = SEED, axes: dict[str, tuple[Any, ...]] = AXES) -> list[dict[str, Any]]:
    """`num` different configurations, the same for the same seed; what can't be is left out."""
    rng = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < num:
        drawn = {name: rng.choice(values) for name, values in axes.items()}
        if drawn["model"].startswith("phi3") and "peft" in drawn:
            targets = drawn["lora_target_modules"]
            drawn["lora_target_modules"] = _TARGETS_OF_PHI3.get(targets, targets)
        if kernel_problems(find_model(model_named(drawn["model"])), RunConfig(**_kernels_of(drawn))):
            continue
        if drawn["strategy"] == "ds_zero1" and axes is OF_SMALL_ZERO:
            drawn["reduce_dtype"] = "bf16"
        if (drawn["strategy"] == "single") != (drawn["num_gpus"] == 1) and drawn["strategy"] in (
            "single",
            "ddp",
        ):
            continue
        if "reduce_dtype" in drawn and axes is not OF_SMALL_ZERO and is_refused(drawn):
            continue
        found[str(drawn)] = drawn
    return list(found.values())


def _kernels_of(drawn: dict[str, Any]) -> dict[str, Any]:
    names = ("attn_implementation", "loss_kernel", "norm_kernel")
    return {name: drawn[name] for name in names if name in drawn}


def is_refused(configuration: dict[str, Any]) -> bool:
    """Whether flags exclude each other or the strategy, or change nothing that this half is for."""
    config, strategy = config_of(configuration), find_strategy(configuration["strategy"])
    changes = configuration["optim"] == "muon" or any(
        configuration.get(name, LEFT_OUT) != LEFT_OUT for name in ("reduce_dtype", *FLAGS_OF_GRADIENTS)
    )
    return bool(config.problems() or contradictions(strategy, config)) or not changes


def halves(configurations: list[dict[str, Any]], seed: int = SEED) -> dict[str, list[dict[str, Any]]]:
    """A random half to look at while formulas are changed, one that is only counted, and two fresh draws."""
    shuffled = random.Random(seed).sample(configurations, len(configurations))
    fresh = [found for found in sample(FRESH, seed + 1) if found not in configurations]
    adapters = sample(ADAPTERS, seed + 3, OF_ADAPTERS)
    drawn = {"development": shuffled[::2], "held_out": shuffled[1::2], "fresh": fresh}
    small = {
        "small_zero": sample(SMALL_ZERO, SMALL_ZERO_SEED, OF_SMALL_ZERO),
        "small_zero_held_out": sample(SMALL_ZERO_HELD_OUT, SMALL_ZERO_SEED + 1, OF_SMALL_ZERO),
    }
    today = sample(TODAY, seed + 4, OF_TODAY)
    small |= {"today": today[::2], "today_held_out": today[1::2]}
    gradients = {
        "gradients": sample(GRADIENTS, seed + 5, OF_GRADIENTS),
        "gradients_held_out": sample(GRADIENTS_HELD_OUT, seed + 6, OF_GRADIENTS),
    }
    of_adapters = {"adapters": adapters[::2], "adapters_held_out": adapters[1::2]}
    adapters_today = sample(ADAPTERS_TODAY, seed + 7, OF_ADAPTERS_TODAY)
    of_adapters |= {
        "adapters_today": adapters_today[::2],
        "adapters_today_held_out": adapters_today[1::2],
    }
    sequences = sample(SEQUENCES, seed + 8, OF_SEQUENCES)
    of_sequences = {"sequences": sequences[::2], "sequences_held_out": sequences[1::2]}
    optimizers = sample(OPTIMIZERS, seed + 9, OF_OPTIMIZERS)
    of_optimizers = {"optimizers": optimizers[::2], "optimizers_held_out": optimizers[1::2]}
    return {**drawn, **of_adapters, **small, **gradients, **of_sequences, **of_optimizers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=NUM, help=f"configurations (default: {NUM})")
    parser.add_argument("--half", choices=HALVES, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/memory"), help="folder")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--again",
        metavar="FLAG=VALUE",
        help="trace only rows with this value again, such as loss_kernel=fused_linear; keep the others",
    )
    args = parser.parse_args()
    configurations = halves(sample(args.num))[args.half]
    for module in _TAKE_SECONDS_TO_IMPORT:
        importlib.import_module(module)

    started = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.half}.csv"
    kept = []
    if args.again is not None:
        name, _, value = args.again.partition("=")
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if row[name] != value]
        configurations = [found for found in configurations if str(found[name]) == value]
    context = multiprocessing.get_context("fork")
    with path.open("w", newline="") as file, context.Pool(args.processes, maxtasksperchild=1) as pool:
        writer = csv.DictWriter(file, [*configurations[0], *_FOUND], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept)
        for done, row in enumerate(pool.imap_unordered(trace, configurations), start=1):
            writer.writerow(row)
            file.flush()
            print(f"{done}/{len(configurations)} {row['status']} {row['reason'] or ''}", file=sys.stderr)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python bench/memory_traces.py --num {args.num} --half {args.half}"
        + (f" --again {args.again}" if kept else ""),
        "seconds": round(time.time() - started),
        "versions": installed_versions(),
    }
    told = path.with_suffix(".json")
    if kept:
        about = {**json.loads(told.read_text()), "traced_again": about}
    told.write_text(json.dumps(about, indent=2) + "\n")


def trace(configuration: dict[str, Any]) -> dict[str, Any]:
    """One rehearsal, as a row: what was asked, status, peak, where it was, and the parts there."""
    from slm_toolkit import train

    strategy = find_strategy(configuration["strategy"])
    os.environ.update(launch_environment(strategy))
    flags = {
        name: value
        for name, value in configuration.items()
        if name not in ("strategy", "num_gpus") and value != LEFT_OUT
    }
    flags["model"] = model_named(configuration["model"])
    with tempfile.TemporaryDirectory() as folder:
        argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        argv += ["--rehearse", str(configuration["num_gpus"]), "--output_dir", folder, "--run_name", "r"]
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stderr(nowhere),
            contextlib.suppress(Exception, SystemExit),  # the record says why
        ):
            train.main(argv)
        path = Path(folder, "r", RECORD_FILE)
        record = json.loads(path.read_text()) if path.is_file() else {"status": "failed", "reason": "refused"}
    at_peak = record.get("memory_at_peak") or {}
    return {
        **configuration,
        "status": record["status"],
        "reason": record["reason"],
        "peak_bytes": at_peak.get("num_bytes"),
        "reserved_bytes": (record.get("peak_reserved_bytes") or [None])[0],
        "peak_phase": at_peak.get("phase"),
        "peak_module": at_peak.get("module"),
        "parts": json.dumps(at_peak.get("parts")),
    }


def launch_environment(strategy: Strategy) -> dict[str, str]:
    """The variables that `accelerate launch --num_processes 1 --config_file ...` sets for its process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    args = launch_command_parser().parse_args(
        ["--config_file", strategy.path, "--num_processes", "1", "script.py"]
    )
    args.deepspeed_fields_from_accelerate_config = ""
    args, _, _ = _validate_launch_command(args)
    if strategy.engine == "deepspeed":
        _, env = prepare_deepspeed_cmd_env(args)
    elif strategy.engine == "fsdp2":
        env = prepare_multi_gpu_env(args)
    else:
        _, env = prepare_simple_launcher_cmd_env(args)
    keep = ("ACCELERATE_", "FSDP_")
    return {name: value for name, value in env.items() if name.startswith(keep)} | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
