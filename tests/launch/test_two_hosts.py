"""Two machines train as one does, and each says what it waits for, whom it lost, and why nothing goes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Finished, launch, planted, record_under, slm
from hosts import Hosts, two_hosts

from slm_toolkit.compare.local import last_step_of

BIN = Path(sys.executable).parent
SLM, ACCELERATE = (str(BIN / "slm"), "launch"), (str(BIN / "accelerate"), "launch")
SHIPPED = "accel_configs/{}.yaml"
FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "5", "--numerics", "fp32")
NUM_PARAMS = 951_424
"of slm-1m"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of DDP on two ranks of this machine, of 2 x 4 sequences per step."""
    folder = tmp_path_factory.mktemp("one")
    done = launch(*FEW, "--output_dir", str(folder), config=SHIPPED.format("ddp"))
    assert done.code == 0, done.err
    return record_under(folder)["losses"]


def started(
    hosts: Hosts,
    folder: Path,
    *words: str,
    launcher: tuple[str, ...] = SLM,
    envs: tuple[dict[str, str], dict[str, str]] = ({}, {}),
) -> list[subprocess.Popen]:
    """What somebody types on both; `words` begin with the YAML and the number of ranks."""
    folder.mkdir(exist_ok=True)
    config, num_processes, *script = words
    asked = ("--config_file", config, "--num_machines", "2", "--num_processes", num_processes)
    return [
        hosts.start(
            name,
            *(*launcher, *asked, "--machine_rank", str(rank), "--main_process_ip", hosts.addresses[0]),
            *("-m", "slm_toolkit.train", *FEW, "--output_dir", str(folder / "runs"), *script),
            log=folder / f"host{rank}.log",
            env=env,
        )
        for rank, (name, env) in enumerate(zip(hosts.names, envs, strict=True))
    ]


def ended(hosts: Hosts, processes: list[subprocess.Popen], folder: Path) -> list[Finished]:
    try:
        codes = [process.wait(200) for process in processes]
    finally:
        for name in hosts.names:
            hosts.kill(name)
    return [Finished(code, "", (folder / f"host{rank}.log").read_text()) for rank, code in enumerate(codes)]


def on_both(hosts: Hosts, folder: Path, *words: str, **options: object) -> list[Finished]:
    return ended(hosts, started(hosts, folder, *words, **options), folder)


def test_ddp_by_accelerates_own_command_loses_what_one_machine_loses(
    hosts: Hosts, on_one: list[float], tmp_path: Path
) -> None:
    first, second = on_both(
        *(hosts, tmp_path, SHIPPED.format("ddp"), "2"),
        launcher=(*ACCELERATE, "--main_process_port", "29500"),
        envs=({"GLOO_SOCKET_IFNAME": "eth0"},) * 2,
    )
    assert (first.code, second.code) == (0, 0), first.err + second.err
    record = record_under(tmp_path)
    assert (record["world_size"], record["num_machines"]) == (2, 2)
    assert record["asked"]["accelerate_config"]["num_machines"] == 2
    assert record["losses"] == pytest.approx(on_one, abs=1e-4)
    assert "record: " in first.err
    assert "record: " not in second.err  # rank 0 alone writes


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("ds_zero3", 2),
        *(
            pytest.param(name, 4, marks=pytest.mark.slow)
            for name in ("fsdp_full_shard", "ds_zero1", "ds_zeropp")
        ),
    ],
)
def test_no_strategy_needs_another_file_and_all_lose_what_one_machine_loses(
    strategy: str, num_ranks: int, hosts: Hosts, on_one: list[float], tmp_path: Path
) -> None:
    batch = str(8 // num_ranks)
    words = (SHIPPED.format(strategy), str(num_ranks), "--per_device_train_batch_size", batch)
    first, second = on_both(hosts, tmp_path, *words)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    standard = "accelerate launch --deepspeed_multinode_launcher standard --config_file"
    assert (standard in first.err) == strategy.startswith("ds_")
    record = record_under(tmp_path)
    assert (record["world_size"], record["num_machines"]) == (num_ranks, 2)
    assert record["losses"] == pytest.approx(on_one, abs=1e-4)


def test_a_hybrid_shard_of_two_ranks_on_each_host_loses_what_one_machine_loses(
    hosts: Hosts, on_one: list[float], tmp_path: Path
) -> None:
    config = SHIPPED.format("fsdp_hybrid_shard")
    # 4 ranks x 2 sequences: the same 8 in every step
    first, second = on_both(hosts, tmp_path, config, "4", "--per_device_train_batch_size", "2")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    record = record_under(tmp_path)
    assert (record["world_size"], record["num_machines"]) == (4, 2)
    assert list(record["asked"]["accelerate_config"]["parallelism_config"].values()) == [2, 2]
    # a shard is half of everything: 4 bytes per parameter, gradient and each of Adam's two in fp32
    assert record["state_bytes"][0]["optimizer"] == pytest.approx(NUM_PARAMS / 2 * 8, rel=0.01)
    assert record["losses"] == pytest.approx(on_one, abs=1e-4)
    shown = slm("report", str(tmp_path))
    assert "4 CPU processes on 2 machines" in shown.out
    (row,) = json.loads(slm("report", str(tmp_path), "--json").out)
    assert row["num_machines"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_never_comes_is_named_and_nothing_is_started(
    rank: int, hosts: Hosts, tmp_path: Path
) -> None:
    address = hosts.addresses[0]
    words = ("--config_file", SHIPPED.format("ddp"), "--num_machines", "2", "--num_processes", "2")
    words += ("--machine_rank", str(rank), "--main_process_ip", address, "-m", "slm_toolkit.train", *FEW)
    env = {"SLM_PATIENCE_SECONDS": "2"}
    log = tmp_path / "host0.log"
    alone = hosts.start(
        hosts.names[rank], *SLM, *words, "--output_dir", str(tmp_path / "runs"), log=log, env=env
    )
    (done,) = ended(hosts, [alone], tmp_path)
    assert done.code == 2
    reason = "" if rank == 0 else " (Connection refused)"
    waited = f"error: machine {rank} of 2 waited 2 s for machine {1 - rank} at {address}:29500{reason}\n"
    assert f"{waited}hint: run the same command there" in done.err
    if rank == 0:
        shown = done.err[done.err.index("error: ") :].replace(address, "10.0.0.1").replace(" 2 s", " 300 s")
        assert shown in (ROOT / "docs" / "clusters.md").read_text()
    assert not (tmp_path / "runs").exists()


def in_training(hosts: Hosts, folder: Path, **env: str) -> list[subprocess.Popen]:
    """Both hosts in the middle of a run that would take long."""
    words = (SHIPPED.format("ddp"), "2", "--kernels", "fused", "--max_steps", "100000", "--run_name", "long")
    processes = started(hosts, folder, *words, envs=(env, env))
    deadline = time.monotonic() + 120
    while not last_step_of(folder / "runs" / "long"):
        assert time.monotonic() < deadline, (folder / "host0.log").read_text()
        time.sleep(0.2)
    return processes


def test_when_the_second_host_dies_the_first_ends_and_says_so(hosts: Hosts, tmp_path: Path) -> None:
    processes = in_training(hosts, tmp_path)
    hosts.kill(hosts.names[1])
    first, _ = ended(hosts, processes, tmp_path)
    assert first.code == 1
    lost = f"machine 1 ({hosts.addresses[1]}) ended before the run did: read its output for the cause"
    assert first.err.count(f"error: {lost}\n") == 1
    record = record_under(tmp_path)
    assert (record["status"], record["reason"], record["num_machines"]) == ("failed", lost, 2)


@pytest.mark.slow
def test_a_host_that_falls_silent_ends_the_run_after_the_patience_asked_for(
    hosts: Hosts, tmp_path: Path
) -> None:
    # in it the launchers import torch, too, and one of them may be slower than the other
    processes = in_training(hosts, tmp_path, SLM_PATIENCE_SECONDS="18")
    with hosts.unplugged(hosts.names[1]):
        first, second = ended(hosts, processes, tmp_path)
    assert (first.code, second.code) == (1, 1)
    for done, rank in ((first, 1), (second, 0)):
        silent = f"error: machine {rank} ({hosts.addresses[rank]}) does not answer any more"
        assert done.err.count(silent) == 1, done.err
    assert "machine 1" in record_under(tmp_path)["reason"]


@pytest.mark.slow
def test_ranks_that_do_not_reach_each_other_name_the_interface(hosts: Hosts, tmp_path: Path) -> None:
    env = {"GLOO_SOCKET_IFNAME": "lo", "SLM_PATIENCE_SECONDS": "5"}
    both = on_both(hosts, tmp_path, SHIPPED.format("ddp"), "2", envs=(env, env))
    assert sorted(done.code for done in both) == [1, 2]
    said = "error: the machines met, but their ranks can't reach each other: "
    (done,) = [done for done in both if said in done.err]  # the other is told that its partner ended
    assert done.code == 2
    assert (
        "hint: set GLOO_SOCKET_IFNAME, and on GPUs NCCL_SOCKET_IFNAME, to the network interface" in done.err
    )


@pytest.mark.slow
def test_a_first_checkpoint_in_a_folder_that_is_not_shared_ends_the_run(hosts: Hosts, tmp_path: Path) -> None:
    own = tmp_path / "runs"
    own.mkdir()
    disk_of_its_own = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {own} && exec "$@"', "sh")
    both = on_both(
        *(hosts, tmp_path, SHIPPED.format("ddp"), "2", "--save_steps", "2"), launcher=(*disk_of_its_own, *SLM)
    )
    assert [done.code for done in both] == [1, 1]
    assert "error: the checkpoint could not be written: rank 1: " in both[0].err


@pytest.mark.slow
def test_a_run_on_both_goes_on_from_its_checkpoint(hosts: Hosts, on_one: list[float], tmp_path: Path) -> None:
    words = (SHIPPED.format("ds_zero3"), "2", "--run_name", "kept")
    both = on_both(hosts, tmp_path / "whole", *words, "--save_steps", "3")
    assert [done.code for done in both] == [0, 0], both[0].err + both[1].err
    checkpoint = tmp_path / "whole" / "runs" / "kept" / "checkpoints" / "step_3"
    both = on_both(hosts, tmp_path / "again", *words, "--resume_from_checkpoint", str(checkpoint))
    assert [done.code for done in both] == [0, 0], both[0].err + both[1].err
    record = record_under(tmp_path / "again" / "runs")
    assert record["first_step"] == 3
    assert record["losses"] == pytest.approx(on_one[3:], abs=1e-4)


@pytest.mark.slow
def test_ranks_that_fail_as_they_start_are_missed_on_the_other_host(hosts: Hosts, tmp_path: Path) -> None:
    env = planted(
        tmp_path,
        "import os\n"
        "if os.environ.get('GROUP_RANK') == '1':\n"  # in ranks alone: the launchers have met
        "    os.write(2, b'error: planted\\n')\n"
        "    os._exit(2)\n",
    )
    env["SLM_PATIENCE_SECONDS"] = "12"
    first, second = on_both(hosts, tmp_path, SHIPPED.format("ddp"), "2", envs=(env, env))
    assert (first.code, second.code) == (2, 2)
    assert "error: planted\n" in second.err
    assert "error: machine 0 of 2 waited 12 s for machine 1 at " in first.err
    assert "\nhint: read its output, because its launcher came" in first.err
