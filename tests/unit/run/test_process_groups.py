"""Process groups of a run: how long their collectives wait, and which setting their failures name."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slm_toolkit.config.run_config import MOST_DDP_TIMEOUT
from slm_toolkit.run.peers.machines import interface_variable, let_collectives_wait


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


@pytest.mark.parametrize(
    ("message", "on_gpu", "variable"),
    [
        ("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error", True, "NCCL_SOCKET_IFNAME"),
        ("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144]", True, "GLOO_SOCKET_IFNAME"),
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer", False, "GLOO_SOCKET_IFNAME"),
        ("wait timed out", True, "NCCL_SOCKET_IFNAME"),
    ],
)
def test_a_failure_names_the_interface_of_the_library_that_failed(
    message: str, on_gpu: bool, variable: str
) -> None:
    assert interface_variable(RuntimeError(message), on_gpu=on_gpu) == variable
