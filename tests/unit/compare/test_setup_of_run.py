"""What is predicted of a planned run before it is launched."""

from slm_toolkit.compare.grid import plan_runs
from slm_toolkit.compare.largest_batch import setup_of
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.strategy.strategy import find_strategy, on_nodes


def test_ranks_on_several_machines_are_not_on_one_node() -> None:
    machine = Machine(num_gpus=16, gpu="NVIDIA H100 80GB HBM3")
    for num_machines, per_node in ((1, 16), (2, 8), (4, 4)):  # 16 ranks
        strategy = on_nodes(find_strategy("fsdp_full_shard"), num_machines)
        (run,) = plan_runs({"model": "slm-100m"}, [strategy], num_processes=16, machine=machine)
        setup = setup_of(run)
        assert setup.ranks_per_node == per_node
        assert setup.num_nodes == num_machines
