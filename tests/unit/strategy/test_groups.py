"""Groups of ranks in hybrid shards and hpZ: fitted where the file is ours, taken as they are elsewhere."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, own_strategy, slm_here

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.compare.grid import plan_runs
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.run.peers.launch_info import Launch, check_environment
from slm_toolkit.strategy.groups import fit_groups, group_options, with_group_options
from slm_toolkit.strategy.settings import PREFIX
from slm_toolkit.strategy.strategy import Strategy, find_strategy


def sizes(strategy: Strategy) -> tuple[int, int]:
    found = strategy.accelerate_config["parallelism_config"]
    return found[f"{PREFIX}dp_replicate_size"], found[f"{PREFIX}dp_shard_size"]


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "wanted"),
    [
        (4, 4, (2, 2)),
        (16, 8, (2, 8)),  # a copy per node
        (64, 8, (8, 8)),
    ],
)
def test_a_hybrid_shard_keeps_a_copy_on_each_node(
    num_ranks: int, ranks_per_node: int, wanted: tuple[int, int]
) -> None:
    hybrid = find_strategy("fsdp_hybrid_shard")
    assert hybrid.sharding.is_hybrid
    fitted = fit_groups(hybrid, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    assert sizes(fitted) == wanted
    options = (f"--{PREFIX}dp_replicate_size", str(wanted[0]), f"--{PREFIX}dp_shard_size", str(wanted[1]))
    assert tuple(group_options(fitted)) == options
    assert group_options(find_strategy("fsdp_full_shard")) == []


def test_ranks_that_cannot_be_divided_are_an_error() -> None:
    for num_ranks in (2, 5):
        with pytest.raises(ValueError, match=f"fsdp_hybrid_shard on {num_ranks} ranks: two or more copies"):
            fit_groups(find_strategy("fsdp_hybrid_shard"), num_ranks=num_ranks, ranks_per_node=8)


def test_a_users_own_groups_are_taken_as_they_are(tmp_path: Path) -> None:
    own = own_strategy(tmp_path, (ROOT / "accel_configs" / "fsdp_hybrid_shard.yaml").read_text())
    strategy = find_strategy(own)
    assert fit_groups(strategy, num_ranks=64, ranks_per_node=8) == strategy
    done = slm_here("estimate", "--strategy", own, "--num_gpus", "8")
    assert done.code == 2
    assert "dp_replicate_size 2 x dp_shard_size 2 with 8 ranks" in done.err


def test_hpz_auto_is_the_ranks_of_a_node() -> None:
    zeropp = find_strategy("ds_zeropp")
    fitted = fit_groups(zeropp, num_ranks=16, ranks_per_node=8)
    assert fitted.deepspeed_config["zero_optimization"]["zero_hpz_partition_size"] == 8
    done = slm_here(
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


def mesh(folder: Path, *lines: str) -> str:
    text = (ROOT / "accel_configs" / "fsdp_full_shard.yaml").read_text()
    return own_strategy(folder, "\n  ".join([f"{text}\nparallelism_config:", *lines]))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([f"{PREFIX}dp_shard_size: 4", f"{PREFIX}cp_size: 2"], "cp_size 2: slm_toolkit does not run context"),
        (["dp_shard_size: 4"], "accelerate does not read this key: write parallelism_config_dp_shard_size"),
        ([f"{PREFIX}dp_replicate_size: 3", f"{PREFIX}dp_shard_size: 4"], "dp_shard_size 4 with 8 ranks: the"),
    ],
)
def test_compare_refuses_groups_before_a_launch(lines: list[str], says: str, tmp_path: Path) -> None:
    strategy = find_strategy(mesh(tmp_path, *lines))
    with pytest.raises(ValueError, match=re.escape(says)):
        plan_runs({"model": "slm-1m"}, [strategy], num_processes=8, machine=Machine(0, None), repeats=1)


def test_launches_of_the_trainer_refuse_tensor_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the YAML, an option or a variable; another script of a user's own may well run it."""
    file = mesh(tmp_path, f"{PREFIX}dp_shard_size: 4", f"{PREFIX}tp_size: 2")
    shipped = str(ROOT / "accel_configs" / "fsdp_full_shard.yaml")
    for words in (["--config_file", file], ["--config_file", shipped, f"--{PREFIX}tp_size", "2"]):
        with pytest.raises(ValueError, match="tp_size 2: slm_toolkit does not run tensor parallelism"):
            plan_launch([*words, "-m", "slm_toolkit.train"])
        assert plan_launch([*words, "--main_process_port", "0", "mine.py"])
    with pytest.raises(ValueError, match="tp_size 2: slm_toolkit does not run"):
        check_environment(Launch(find_strategy(file), 8, ()))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ValueError, match="in the environment: tp_size 2: slm_toolkit does not run"):
        check_environment(Launch(find_strategy("fsdp_full_shard"), 8, ()))
