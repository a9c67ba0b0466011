"""The estimate's setup of a planned run."""

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.setup.setup import Setup, placement_of, unknown_to_estimates


def setup_of(run: PlannedRun) -> Setup | None:
    """Return the setup of a planned run; None if no closed form covers its GPU, flags or strategy."""
    gpu = find_gpu(run.gpu)
    if gpu is None or unknown_to_estimates(run.config, gpu=gpu, spec=run.spec):
        return None
    try:
        placement_of(run.strategy)
    except ValueError:  # ZeRO-0, tensor parallelism, ...
        return None
    num_gpus = run.asked["num_processes"]
    return Setup(
        run.spec,
        run.strategy,
        run.config,
        num_gpus=num_gpus,
        gpus_per_node=REHEARSED_RANKS_PER_NODE
        if run.config.rehearse
        else max(1, num_gpus // run.strategy.num_machines),
        gpu=gpu,
    ).launched
