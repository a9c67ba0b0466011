"""Process groups of a run: how long their collectives wait."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slm_toolkit.config.run_config import MOST_DDP_TIMEOUT
from slm_toolkit.run.peers.machines import let_collectives_wait


def test_no_group_gives_up_before_ddp_timeout() -> None:
    """The control group and HSDP's own waited 30 minutes, NCCL's 10."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        control = dist.new_group(backend="gloo")
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        let_collectives_wait()
        groups = [dist.group.WORLD, control, *mesh.get_all_groups()]
        waits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    finally:
        dist.destroy_process_group()
    assert waits == [timedelta(seconds=MOST_DDP_TIMEOUT)] * 4
