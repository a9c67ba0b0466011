"""Groups of ranks in hybrid shards and hpZ: fitted where the file is ours, taken as they are elsewhere."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, slm

from slm_toolkit.groups import fit_groups, group_options, is_hybrid, with_group_options
from slm_toolkit.strategy import Strategy, find_strategy


def sizes(strategy: Strategy) -> tuple[int, int]:
    found = strategy.accelerate_config["parallelism_config"]
    prefix = "parallelism_config_dp_"
    return found[f"{prefix}replicate_size"], found[f"{prefix}shard_size"]


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "wanted"),
    [
        (4, 4, (2, 2)),
        (8, 8, (2, 4)),  # two copies on one node
        (16, 8, (2, 8)),  # a copy per node
        (64, 8, (8, 8)),
    ],
)
def test_a_hybrid_shard_keeps_a_copy_on_each_node(
    num_ranks: int, ranks_per_node: int, wanted: tuple[int, int]
) -> None:
    hybrid = find_strategy("fsdp_hybrid_shard")
    assert is_hybrid(hybrid)
    fitted = fit_groups(hybrid, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    assert sizes(fitted) == wanted
    assert group_options(fitted) == [
        *("--parallelism_config_dp_replicate_size", str(wanted[0])),
        *("--parallelism_config_dp_shard_size", str(wanted[1])),
    ]
    assert group_options(find_strategy("fsdp_full_shard")) == []


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_that_cannot_be_divided_are_an_error(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"fsdp_hybrid_shard on {num_ranks} ranks: two copies or more"):
        fit_groups(find_strategy("fsdp_hybrid_shard"), num_ranks=num_ranks, ranks_per_node=8)


def test_a_users_own_groups_are_taken_as_they_are(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text((ROOT / "accel_configs" / "fsdp_hybrid_shard.yaml").read_text())
    strategy = find_strategy(str(own))
    assert fit_groups(strategy, num_ranks=64, ranks_per_node=8) == strategy
    done = slm("estimate", "--strategy", str(own), "--num_gpus", "8")
    assert done.code == 2
    assert "dp_replicate_size 2 x dp_shard_size 2 with --num_gpus 8" in done.err


def test_hpz_auto_is_the_ranks_of_a_node() -> None:
    zeropp = find_strategy("ds_zeropp")
    fitted = fit_groups(zeropp, num_ranks=16, ranks_per_node=8)
    assert fitted.deepspeed_config["zero_optimization"]["zero_hpz_partition_size"] == 8
    done = slm(
        "estimate", "--json", "--model", "slm-1b", "--num_gpus", "16", "--strategy", "ds_zero3", "ds_zeropp"
    )
    plain, second = (row["parts"]["parameters"] for row in json.loads(done.out))
    assert second - plain == 2 * 970_458_240 // 8  # a copy in 16 bits over the 8 ranks of a node


def test_the_launchers_options_go_before_the_file() -> None:
    said = {"parallelism_config_dp_replicate_size": "3"}
    strategy = with_group_options(find_strategy("fsdp_hybrid_shard"), said.get)
    assert sizes(strategy) == (3, 2)
    plain = find_strategy("ddp")
    assert with_group_options(plain, {}.get) is plain
