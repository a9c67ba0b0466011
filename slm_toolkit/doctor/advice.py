"""Derive findings from estimates: what is wrong, unwise or slow on the given GPUs."""

import dataclasses
from collections.abc import Iterator

from slm_toolkit.doctor.finding import Finding, fault, slow, unwise, wrong
from slm_toolkit.predict.bottleneck import WORTH_SAYING, alignment_gain, levers, misaligned_widths
from slm_toolkit.predict.estimate import estimate, largest_batch
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import find_strategy

_CLEARLY_FASTER = 1.05
"speedup; estimates are not accurate enough to compare smaller differences"
_MUCH_FASTER = 1.15


def needless(setup: Setup) -> Iterator[Finding]:
    """Report offload and sharding that the model does not need; the paper recommends DDP first."""
    spec, strategy, gpus = setup.spec.name, setup.strategy, f"{setup.num_gpus} x {setup.gpu.name}"
    if strategy.offloads:
        shard = "full_shard" if strategy.reshard_after_forward else "shard_grad_op"
        kept = find_strategy(f"ds_zero{strategy.zero_stage}" if strategy.is_deepspeed else f"fsdp_{shard}")
        row = estimate(dataclasses.replace(setup, strategy=kept).launched)
        if row.verdict == "fits":
            yield unwise(
                "offload-of-what-fits",
                f"{spec} fits on {gpus} without offload: {row.peak_allocated_bytes / 2**30:.1f} GiB under "
                f"{kept.name}",
                why="offload moves the training state over the host's bus in every step",
                change=f"--strategy {kept.name}, or the same files without their offload keys",
            )
        return
    if not strategy.sharded_parts:
        return
    plain = find_strategy("ddp" if setup.num_gpus > 1 else "single")
    unsharded = dataclasses.replace(setup, strategy=plain)
    before, after = estimate(setup.launched), estimate(unsharded.launched)
    if after.verdict != "fits" or before.tokens_per_second is None or after.tokens_per_second is None:
        return
    speedup = after.tokens_per_second / before.tokens_per_second
    if speedup >= _CLEARLY_FASTER:
        yield fault(
            "unwise" if speedup >= _MUCH_FASTER else "could be faster",
            "sharding-of-what-fits",
            f"the whole {spec} fits on each of {gpus}: {plain.name} gives {speedup - 1:+.0%} tokens/s over "
            f"{strategy.name}",
            why="sharding adds communication; the paper recommends DDP for every small model that fits",
            change=f"--strategy {plain.name}",
            speedup=speedup,
        )


def _rate(setup: Setup) -> float:
    """Return tokens per second; 0 if they are not known, -1 for a setup that does not fit."""
    row = estimate(setup.launched)
    return (row.tokens_per_second or 0.0) if row.fits else -1.0


_MOST_LEVERS = 3


def findings(setups: list[Setup]) -> list[Finding]:
    """Return the findings of all setups; speed is checked on each GPU's fastest setup only."""
    checks = [(setup, check, topic) for setup in setups for check, topic in _OF_EACH.items()]
    checks += [(setup, check, topic) for setup in _fastest(setups) for check, topic in _OF_FASTEST.items()]
    return [
        dataclasses.replace(
            finding,
            topic=topic,
            gpu=setup.gpu.name,
            strategy=None if topic == "alignment" else setup.strategy.name,
        )
        for setup, check, topic in checks
        for finding in check(setup)
    ]


def _fastest(setups: list[Setup]) -> list[Setup]:
    gpus = dict.fromkeys(setup.gpu for setup in setups)
    return [max((setup for setup in setups if setup.gpu == gpu), key=_rate) for gpu in gpus]


def _alignment(setup: Setup) -> Iterator[Finding]:
    gain = alignment_gain(setup)
    if gain is None or gain.speedup < WORTH_SAYING:
        return
    widths = ", ".join(f"{name} {width}" for name, width in misaligned_widths(setup.launched.spec).items())
    yield fault(
        "wrong" if gain.speedup >= 1.25 else "unwise",
        "widths-off-tensor-cores",
        f"{setup.spec.name}: {widths} is not a multiple of 8, so tensor cores can't run at full "
        f"speed: with {gain.change} it should train {gain.speedup:.2f} times as fast on {setup.gpu.name}",
        why="rows of 2-byte numbers then start at addresses that are not multiples of 16 bytes, and cuBLAS "
        "uses kernels that load one number at a time",
        change=gain.change,
        speedup=gain.speedup,
    )


def _memory(setup: Setup) -> Iterator[Finding]:
    row = estimate(setup.launched)
    where, batch = f"{setup.gpu.name} under {setup.strategy.name}", "--per_device_train_batch_size"
    size = f"{row.peak_allocated_bytes / 2**30:.1f} GiB"
    if not row.fits:
        most = largest_batch(setup.launched).per_device_train_batch_size
        remedy = f"{batch} {most} fits" if most else "not even one sequence fits"
        yield wrong(
            "does-not-fit",
            f"{size} does not fit on {where}: {remedy}",
            why=f"memory peaks at {row.peak_instant}",
            change=f"{batch} {most}, or --gradient_checkpointing full"
            if most
            else "--gradient_checkpointing full, a strategy that shards more, or more GPUs",
        )
    elif row.verdict == "may fit" or row.is_nearly_full:
        yield unwise(
            "may-not-fit",
            f"{size} fits on {where} with a probability of {row.fit_probability:.0%}"
            + ("; a nearly full GPU is slower" if row.is_nearly_full else ""),
            why="a full GPU makes PyTorch's allocator wait, free its unused blocks and try again",
            change=f"a smaller {batch}, or PYTORCH_ALLOC_CONF=expandable_segments:True",
        )


def _network(setup: Setup) -> Iterator[Finding]:
    row, gpu = estimate(setup.launched), setup.gpu.name
    needed, has = row.inter_node_gbps_needed, row.inter_node_gbps
    if needed and has and needed > has:
        share = row.parts_seconds["communication"] / row.step_seconds
        yield fault(
            "wrong" if share > 0.5 else "unwise",
            "network-too-slow",
            f"{setup.strategy.name} on {row.num_gpus} {gpu} needs {needed:,.0f} Gbit/s between nodes to hide "
            f"its communication and has {has:,.0f}: {share:.0%} of a step waits for the network",
            why="communication between nodes takes longer than the compute that overlaps it",
            change="a larger batch, --gradient_accumulation_steps, or fsdp_hybrid_shard or ds_zeropp",
        )


def _kernels(setup: Setup) -> Iterator[Finding]:
    row = estimate(setup.launched)
    if not row.fits or row.tokens_per_second is None:
        return
    bound = row.bottleneck.replace("_", " ")
    for lever in levers(setup)[:_MOST_LEVERS]:
        yield slow(
            "faster-flag",
            f"bound by {bound} on {setup.gpu.name} under {setup.strategy.name}: {lever.change} "
            f"should give {lever.speedup - 1:+.0%} tokens/s",
            why=f"{bound} takes most of a step's time",
            change=lever.change,
            speedup=lever.speedup,
        )


_OF_EACH = {_memory: "memory", _network: "network", needless: "strategy"}
_OF_FASTEST = {_alignment: "alignment", _kernels: "kernels"}
