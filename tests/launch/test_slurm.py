"""`slm compare --launcher slurm` against a real Slurm, whose two nodes are network namespaces here."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, WARM, Finished, free_port, planted, run, slm
from hosts import Hosts, two_hosts

from slm_toolkit.launch.torch_extensions import extensions_folder

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={this_host}({address})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} CPUs=2 RealMemory=4000\n"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands reach a Slurm started for this module."""
    path = f"{os.environ['PATH']}:/usr/sbin"  # where Debian has daemons, which not everybody's PATH has
    munged, slurmctld, slurmd = (shutil.which(name, path=path) for name in ("munged", "slurmctld", "slurmd"))
    if not (munged and slurmctld and slurmd and shutil.which("sbatch")):
        pytest.skip("no Slurm here: apt-get install slurm-wlm munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has 108 characters at most
    for name in ("munge", "state", *(f"spool-{node}" for node in hosts.names)):
        (folder / name).mkdir(mode=0o700)
    key, configuration = folder / "munge" / "key", folder / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    this_host = {"this_host": socket.gethostname(), "address": hosts.bridge_address}
    places = {"folder": folder, **this_host, "port": free_port()}
    nodes = [
        NODE.format(name=name, address=address, port=free_port())
        for name, address in zip(hosts.names, hosts.addresses, strict=True)
    ]
    *before, partition = CONFIGURATION.format(**places).splitlines(keepends=True)
    configuration.write_text("".join([*before, *nodes, partition]))
    env = {"SLURM_CONF": str(configuration)}
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    started = [
        run(munged, "--force", *(f"--{option}={folder}/munge/{name}" for option, name in munge.items())),
        run(slurmctld, "-f", str(configuration), env=env),
    ]
    compiled = extensions_folder()  # by this machine, which the nodes are: they need not compile the same
    compiled.mkdir(parents=True, exist_ok=True)
    of_nodes = [compiled.with_name(compiled.name.replace(socket.gethostname(), node)) for node in hosts.names]
    for link in of_nodes:
        link.symlink_to(compiled)
    names = hosts.write_names(folder / "hosts")
    for name in hosts.names:
        daemon = (slurmd, "-N", name, "-f", str(configuration))
        started.append(run(*hosts.inside(name, names), *daemon, env=env))
    try:
        assert [done.code for done in started] == [0] * 4, [
            *started,
            *(log.read_text() for log in folder.glob("*.log")),
        ]
        wait_for(lambda: both_idle(env))
        yield env
    finally:
        run("scancel", "--user=root", env=env)
        deadline = time.monotonic() + 30  # a failed test's ranks must end while somebody can end them
        while run("squeue", "--noheader", env=env).out and time.monotonic() < deadline:
            time.sleep(0.2)
        for file in (*folder.glob("*.pid"), folder / "munge" / "pid"):
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGTERM)
        time.sleep(1)
        for path in of_nodes:
            path.unlink()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def failing(
    cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """A comparison whose job fails; it waits a minute for a record while others are tested."""
    folder = tmp_path_factory.mktemp("failing")
    fails = whose_ranks(folder, "os.write(1, b'ValueError: no such sky\\n')", "os._exit(3)")
    process = start(folder, "--strategy", "ddp", env={**cluster, **fails})
    yield process
    process.kill()


@pytest.fixture
def queue_alone(failing: subprocess.Popen[str]) -> None:
    """Nobody else submits any more."""
    wait_for(lambda: failing.poll() is not None, seconds=900)


def slurm(*words: str, env: dict[str, str]) -> str:
    done = run(*words, env=env, cold=True)
    assert done.code == 0, done.err
    return done.out


def both_idle(env: dict[str, str]) -> bool:
    return slurm("sinfo", "-h", "-N", "-o", "%T", env=env).split() == ["idle", "idle"]


def wait_for(truth: object, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def on_slurm(folder: Path, *words: str, env: dict[str, str]) -> tuple[Finished, dict[str, dict]]:
    """A comparison's end and its rows by strategy."""
    done = slm(*comparison(folder, *words), env=env)
    assert done.out, done.err
    return done, {row["strategy"]: row for row in json.loads(done.out)}


def comparison(folder: Path, *words: str) -> tuple[str, ...]:
    asked = ("compare", "--json", "--launcher", "slurm", "--model", "slm-1m", "--max_steps", "4")
    return (*asked, "--output_dir", str(folder / "my runs"), *words)


def whose_ranks(folder: Path, *does: str) -> dict[str, str]:
    """The environment in which the Python of a job does this instead of a launch."""
    lines = "".join(f"    {line}\n" for line in does)
    return planted(folder, f"import os, time\nif 'SLURM_PROCID' in os.environ:\n{lines}")


def test_two_strategies_are_queued_run_and_collected_on_one_node_and_on_two(
    cluster: dict[str, str], hosts: Hosts, failing: subprocess.Popen[str], tmp_path: Path
) -> None:
    words = ("--strategy", "ddp", "ds_zero2", "--max_steps", "5")
    done, rows = on_slurm(tmp_path, *words, env=cluster)
    assert done.code == 0, done.err
    assert "submitted Slurm job " in done.err
    assert [(row["status"], row["engine"], row["world_size"]) for row in rows.values()] == [
        ("ok", "ddp", 2),
        ("ok", "deepspeed", 2),
    ]

    again, kept = on_slurm(tmp_path, *words, env=cluster)  # nothing is done twice
    assert again.err.count("kept from ") == 2
    assert "submitted" not in again.err
    assert kept["ddp"]["losses"] == rows["ddp"]["losses"]

    words = ("--strategy", "fsdp_full_shard", "ds_zero2", "--max_steps", "5", "--num_nodes", "2")
    done, on_two = on_slurm(tmp_path, *words, env=cluster)
    assert done.code == 0, done.err
    for row in on_two.values():
        record = json.loads(Path(row["record"]).read_text())
        assert (row["status"], row["world_size"], len(record["step_seconds"])) == ("ok", 2, 2)
        assert record["asked"]["accelerate_config"]["num_machines"] == 2
        assert row["losses"] == pytest.approx(rows["ddp"]["losses"], abs=0.01)  # the tolerance of aligned
    assert on_two["ds_zero2"]["losses"] == pytest.approx(rows["ds_zero2"]["losses"], abs=1e-4)
    shown = slurm("squeue", "--states=all", "-h", "-o", "%N", env=cluster).splitlines()
    assert shown.count(",".join(hosts.names)) == 2


@pytest.mark.quick
def test_an_option_that_slurm_refuses_is_said_in_its_words(cluster: dict[str, str], tmp_path: Path) -> None:
    done = slm(*comparison(tmp_path, "--strategy", "ddp", "--slurm_options=--partition=nope"), env=cluster)
    assert done.code == 2
    assert "invalid partition specified: nope" in done.err


def start(folder: Path, *words: str, env: dict[str, str]) -> subprocess.Popen:
    command = [str(Path(sys.executable).with_name("slm")), *comparison(folder, *words)]
    pipe = subprocess.PIPE
    heeds_ctrl_c = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # tests in a shell's background do not
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**WARM.env(), **env},
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=heeds_ctrl_c,
    )


@pytest.mark.quick
def test_the_recipe_submits_its_comparison_and_its_training(cluster: dict[str, str], tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**cluster, "PATH": path, "TRY": "1"}
    done = run("bash", str(ROOT / "recipes" / "slurm.sh"), cwd=tmp_path, env=env)
    assert done.code == 0, done.err
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("record.json")]
    assert [len(record["losses"]) for record in records] == [2, 2]


def test_a_job_that_fails_is_a_row_with_its_log(failing: subprocess.Popen[str]) -> None:
    out, err = failing.communicate(timeout=180)
    (row,) = json.loads(out)
    assert (failing.returncode, row["status"]) == (1, "failed")
    assert re.search("FAILED: .*; ValueError: no such sky", row["reason"])
    assert err.count("submitted Slurm job ") == 1


def test_jobs_outlive_a_killed_comparison_and_are_found_again_but_end_with_ctrl_c(
    cluster: dict[str, str], queue_alone: None, tmp_path: Path
) -> None:
    asked, env = ("--strategy", "ddp"), {**cluster, **whose_ranks(tmp_path, "time.sleep(60)")}
    process = start(tmp_path, *asked, env=env)
    wait_for(lambda: "R" in slurm("squeue", "-h", "-o", "%t", env=cluster).split())
    process.kill()
    process.communicate()
    (job,) = slurm("squeue", "-h", "-o", "%i", env=cluster).split()
    process = start(tmp_path, *asked, env=env)
    assert process.stderr.readline().startswith("kernels: fused")
    assert process.stderr.readline() == f"found Slurm job {job} of an earlier comparison\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "submitted" not in err
    assert f"cancelled Slurm job {job}" in err
    wait_for(lambda: slurm("squeue", "-h", "-o", "%i", env=cluster) == "")
