"""Host RAM that is short while every rank builds the model, or for what is offloaded to it."""

import dataclasses
from collections.abc import Iterator
from functools import partial

from slm_toolkit.checkup.case import Case, fault
from slm_toolkit.finding import Edit, Finding
from slm_toolkit.groups import fit_groups
from slm_toolkit.predict.host_memory import Placement, host_bytes_per_node, placement_of
from slm_toolkit.predict.setting import Setting

_memory = partial(fault, topic="machine")


def host_ram_faults(case: Case, setting: Setting) -> Iterator[Finding]:
    """Against the RAM of `case.host`, where that is known; `setting` is of the case."""
    total = case.host.ram_bytes
    if total is None:
        return
    strategy = fit_groups(
        setting.strategy,
        num_ranks=setting.num_gpus,
        ranks_per_node=min(setting.num_gpus, setting.gpus_per_node),
    )
    placement = placement_of(strategy)

    def needed_with(placement: Placement) -> int:
        per_node = min(setting.num_gpus, setting.gpus_per_node)
        ranks = placement.ranks_of_a_copy(num_gpus=setting.num_gpus, gpus_per_node=per_node)
        return host_bytes_per_node(
            *(setting.spec, strategy, setting.config, placement), num_ranks=ranks, gpus_per_node=per_node
        )

    needed, free = needed_with(placement), case.host.free_ram_bytes
    if needed <= (total if free is None else free):
        return
    in_pieces = needed_with(dataclasses.replace(placement, zero_init=True))
    keeps_state = placement.optimizer_device == "cpu" or placement.parameter_device == "cpu"
    edits: tuple[Edit, ...] = ()
    if strategy.zero_stage == 3 and in_pieces <= (total if free is None else free):
        edits = (Edit("yaml", ("deepspeed_config", "zero3_init_flag"), True),)
        change = "zero3_init_flag: true: rank 0 alone holds the whole model, each other rank its piece"
    elif keeps_state:
        change = "--strategy ds_zero3_nvme, more machines, or no offload: --gradient_checkpointing full first"
    elif strategy.engine == "fsdp2":
        change = "a pretrained model with fsdp_cpu_ram_efficient_loading: true, which rank 0 alone loads"
    else:
        change = "--strategy ds_zero3 with zero3_init_flag: true, which builds the model in pieces"
    ranks = min(setting.num_gpus, setting.gpus_per_node)
    yield _memory(
        *(case, "wrong" if needed > total else "unwise", "host-ram"),
        f"{needed / 2**30:.0f} GiB of host RAM for {ranks} ranks, there are {total / 2**30:.0f}"
        + ("" if needed > total else f", {free / 2**30:.0f} of them free"),
        why="the optimizer's state, and what else is offloaded, lies there"
        if keeps_state and in_pieces >= needed
        else "every rank builds the whole model in fp32 before it is sharded; the kernel then kills one",
        change=change,
        file="yaml",
        key="deepspeed_config.zero3_init_flag" if edits else None,
        edits=edits,
    )
