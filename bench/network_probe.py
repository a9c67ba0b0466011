"""Time all_reduce, all_gather and reduce_scatter among the ranks of a launch, by message size.

    slm launch bench/network_probe.py                          # this machine's GPUs
    slm launch --config_file accel_configs/ddp.yaml --num_machines 2 --num_processes 16 \\
        --machine_rank 0 --main_process_ip node0 \\
        bench/network_probe.py --output network.json           # on each node, with its own rank

Tensors are bfloat16, like the gradients and weights that training sends by default.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate import PartialState

from slm_toolkit.base.errors import user_errors
from slm_toolkit.hardware.network import (
    COLLECTIVES,
    NETWORK_FILE,
    CollectiveTiming,
    MeasuredNetwork,
    bus_bytes_per_second,
    write_network,
)
from slm_toolkit.record.run_record import installed_versions
from slm_toolkit.run.peers.launch_info import check_devices, find_launch
from slm_toolkit.run.peers.step_exchange import gather_to_all

_SMALLEST_BYTES = 64 * 2**10
_LARGEST_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
_GROWTH = 4
_ALIGNED_BYTES = 16  # NCCL is slower if a shard is not a multiple of this
_NUM_WARMUPS = 5
_NUM_REPEATS = 30  # so that the median is robust against other programs' noise
_REPEAT_SECONDS = 0.002  # a repeat lasts this long, so that the barrier's skew does not matter
_PROBE_SECONDS = 30.0  # limit of the time that the ranks measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(NETWORK_FILE), metavar="FILE")
    args = parser.parse_args()
    with user_errors():
        launch = find_launch()
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        check_devices(launch, num_gpus=torch.cuda.device_count(), local_processes=num_local)
        state = PartialState(cpu=not torch.cuda.is_available())
        if state.num_processes < 2:
            raise ValueError("the network probe needs two or more processes\nhint: --num_processes 2 or more")
    timings = measure(state.device)
    if state.is_main_process:
        on_gpu = state.device.type == "cuda"
        network = MeasuredNetwork(
            world_size=state.num_processes,
            num_nodes=state.num_processes // num_local,
            gpus_per_node=num_local,
            backend="nccl" if on_gpu else "gloo",
            gpu=torch.cuda.get_device_name() if on_gpu else None,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=installed_versions(),
            command=shlex.join(launch.command or ("python", *sys.argv)),
            timings=tuple(timings),
        )
        write_network(network, args.output)
        print(f"network: {args.output}")
    state.destroy_process_group()


def measure(device: torch.device) -> list[CollectiveTiming]:
    """Time the collectives at growing sizes, as long as the next size fits into 30 seconds.

    Always times the two smallest sizes: latency and bandwidth need two points. Returns the same on all ranks.
    """
    for collective in COLLECTIVES:  # the first call of each collective connects the ranks and takes seconds
        _operation(collective, _SMALLEST_BYTES, device)[0]()
    timings: list[CollectiveTiming] = []
    began, size_bytes = time.perf_counter(), _SMALLEST_BYTES
    while size_bytes <= _LARGEST_BYTES[device.type]:
        timings += [_timing(collective, size_bytes, device) for collective in COLLECTIVES]
        used_seconds = max(gather_to_all(time.perf_counter() - began))  # all ranks must decide the same
        if size_bytes > _SMALLEST_BYTES and used_seconds * _GROWTH > _PROBE_SECONDS:
            break
        size_bytes *= _GROWTH
    return timings


def _timing(collective: str, size_bytes: int, device: torch.device) -> CollectiveTiming:
    operation, num_bytes = _operation(collective, size_bytes, device)
    warmups = [_seconds_each(operation, device, num_in_a_row=1) for _ in range(_NUM_WARMUPS)]
    pilot_seconds = max(gather_to_all(min(warmups)))  # all ranks must repeat equally often
    num_in_a_row = max(round(_REPEAT_SECONDS / pilot_seconds), 1)
    rank_seconds = [_seconds_each(operation, device, num_in_a_row=num_in_a_row) for _ in range(_NUM_REPEATS)]
    all_seconds = tuple(max(of_ranks) for of_ranks in zip(*gather_to_all(rank_seconds), strict=True))
    timing = CollectiveTiming(collective, num_bytes, median(all_seconds), all_seconds)
    if dist.get_rank() == 0:
        rate = f"{bus_bytes_per_second(timing, dist.get_world_size()) / 1e9:.2f} GB/s"
        line = f"{collective} of {num_bytes:,} bytes: {timing.seconds * 1e3:.3f} ms, {rate}"
        print(line, file=sys.stderr)
    return timing


def _operation(collective: str, size_bytes: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """Return a function that runs the collective, and the bytes of its whole tensor.

    The bytes are `size_bytes` rounded down to equal, aligned shares.
    """
    world_size = dist.get_world_size()
    share_bytes = size_bytes // (world_size * _ALIGNED_BYTES) * _ALIGNED_BYTES
    share = torch.zeros(share_bytes // 2, dtype=torch.bfloat16, device=device)  # 2 bytes each
    whole = torch.zeros(share.numel() * world_size, dtype=torch.bfloat16, device=device)
    operations: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, share),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(share, whole),
    }
    return operations[collective], share_bytes * world_size


def _seconds_each(operation: Callable[[], object], device: torch.device, *, num_in_a_row: int) -> float:
    """Return this rank's mean seconds per call of `num_in_a_row` calls, which all ranks begin together."""
    dist.barrier()
    _finish(device)
    began = time.perf_counter()
    for _ in range(num_in_a_row):
        operation()
    _finish(device)
    return (time.perf_counter() - began) / num_in_a_row


def _finish(device: torch.device) -> None:
    """Wait for the GPU's queued work. On a CPU, collectives return only when they are done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
