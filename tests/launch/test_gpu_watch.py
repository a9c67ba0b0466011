"""What others do with a rank's GPU and cores is told, or told to be unknown; NVML is a stand-in in C."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run

from slm_toolkit.run.observe.machine_load import GpuWatch, allocator_retries, driver_version, open_gpu

ASK = """
import json, sys
from slm_toolkit.run.observe import machine_load
from slm_toolkit.run.observe.machine_load import GpuWatch, driver_version, gpu_state, open_gpu

if "--one_reading" in sys.argv:
    sys.argv.remove("--one_reading")
else:
    machine_load.SECONDS_BETWEEN_READINGS = 0
answers = {"driver": driver_version()}
for uuid in sys.argv[1:]:
    handle = open_gpu(uuid)
    if handle is None:
        answers[uuid] = None
        continue
    state, watch = gpu_state(handle), GpuWatch(handle)
    watch.sample()  # the stand-in has answered once
    watch = GpuWatch(handle)
    for _ in range(4):
        watch.sample()
    if machine_load.SECONDS_BETWEEN_READINGS:
        watch.sample_last_again()
    answers[uuid] = {
        "num_processes": state.num_processes, "used_bytes": state.used_bytes,
        "energy_joules": watch.energy_joules, "throttle_reasons": watch.throttle_reasons,
        "clock_mhz": watch.clock_mhz,
    }
print(json.dumps(answers))
"""

FULL = {
    "num_processes": 2,
    "used_bytes": 3 * 1024**3,  # version 2 of the query; version 1 says 4 GiB, with 1 GiB of the driver's
    "energy_joules": [250.0] * 4,  # the counter gains 250,000 mJ at each reading
    # The stand-in answers 1: idle; 2: power cap and application clocks; 3: sync boost and display clocks;
    # 4: power cap, hardware slowdown and hardware thermal slowdown. The warm-up gets 1, the steps 2, 3, 4, 1.
    "throttle_reasons": {"sw_power_cap": 2, "hw_slowdown": 1, "hw_thermal_slowdown": 1},
    "clock_mhz": [1425, 1440, 1455, 1470],  # 1395 and 15 at each reading; the warm-up had 1410
}
NOTHING = dict.fromkeys(FULL)

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
MIG = "MIG-dddddddd-0000-0000-0000-000000000000"
SPLIT_BOARD = "GPU-cccccccc-0000-0000-0000-000000000000"


def ask(folder: Path, *, uuids: list[str]) -> dict[str, dict | None]:
    """The answers of our module in a process whose NVML is the stand-in."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("no C compiler to build the stand-in for NVML with")
    library = folder / "libnvidia-ml.so.1"
    command = (compiler, "-shared", "-fPIC", "-o", str(library), str(ROOT / "tests/launch/nvml.c"))
    subprocess.run(command, check=True)
    env = {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}  # a real GPU stays out of it
    done = run(sys.executable, "-c", ASK, *uuids, env=env)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_nvml_is_read_step_by_step_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    uuids = [A, A.removeprefix("GPU-"), B, MIG, MIG.removeprefix("MIG-"), SPLIT_BOARD, "GPU-of-nobody"]
    answers = ask(tmp_path, uuids=uuids)
    assert answers["driver"] == {"NVIDIA driver": "580.00"}
    assert answers[A] == FULL
    # The same board again goes on from 1470 MHz; the new warm-up had 1485.
    unprefixed = answers[A.removeprefix("GPU-")]
    assert unprefixed["energy_joules"] == [250.0] * 4
    assert unprefixed["clock_mhz"] == [1500, 1515, 1530, 1545]
    assert answers[B] == answers[MIG] == answers[MIG.removeprefix("MIG-")] == NOTHING
    assert answers[SPLIT_BOARD] is None
    assert answers["GPU-of-nobody"] is None


def test_short_steps_share_a_reading_and_the_sum_of_their_energy_is_whole(tmp_path: Path) -> None:
    answer = ask(tmp_path, uuids=["--one_reading", A])[A]
    assert answer["energy_joules"] == [250.0, 0.0, 0.0, 250.0]  # the last step's energy is read again
    assert answer["clock_mhz"] == [1425] * 4
    assert answer["throttle_reasons"] == {"sw_power_cap": 4}


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has NVML")
def test_without_nvml_all_is_unknown() -> None:
    assert open_gpu(A) is open_gpu(None) is None
    assert driver_version() == {}
    watch = GpuWatch(None)
    watch.sample()
    assert watch.energy_joules is watch.throttle_reasons is watch.clock_mhz is None
    assert allocator_retries(torch.device("cpu")) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_is_found_by_torchs_uuid_before_it_has_a_context() -> None:
    program = (
        "import torch; from slm_toolkit.run.observe.machine_load import *; "
        "handle = open_gpu(str(torch.cuda.get_device_properties(0).uuid)); before = gpu_state(handle); "
        "assert not torch._C._cuda_hasPrimaryContext(0); watch = GpuWatch(handle); "
        "x = torch.ones(2**28, device='cuda'); torch.cuda.synchronize(); watch.sample(); "
        "after = gpu_state(handle); "
        "assert after.used_bytes - before.used_bytes >= 2**30, (before, after); "  # 2^28 x 4 bytes
        "assert len(watch.clock_mhz) == 1; print(before, after, watch.energy_joules, watch.throttle_reasons)"
    )
    done = run(sys.executable, "-c", program)
    assert done.code == 0, done.err


BURN = """
import os
os.nice(5)  # or importing torch beside it takes the test's time
while True:
    pass
"""

# Works and prints what it saw, once as one of two ranks and once as the only one: HostWatch's answer, and by
# its own reading of /proc the seconds that the cores, this process, its sibling and the outsider were busy.
RANK = """
import json, os, sys, time
import psutil
from slm_toolkit.run.observe.machine_load import HostWatch

def seconds():
    ticks = map(int, open("/proc/stat").readline().split()[1:9])
    user, nice, system, idle, iowait, irq, softirq, steal = ticks
    pids = [psutil.Process(), *(psutil.Process(int(pid)) for pid in sys.argv[1:])]
    of_processes = [sum(process.cpu_times()[:2]) for process in pids]
    return [time.monotonic(), (user + nice + system + irq + softirq + steal) / 100, *of_processes]

def cores_and_seconds(world_size):
    os.environ["WORLD_SIZE"] = world_size
    watch = HostWatch()
    before = seconds()
    while time.monotonic() - before[0] < 1.2:
        pass
    return [watch.other_busy_cores(), *(after - b for after, b in zip(seconds(), before))]

print(json.dumps([cores_and_seconds("2"), cores_and_seconds("1")]))
"""

LAUNCHER = f"""
import subprocess, sys
sibling = subprocess.Popen([sys.executable, "-c", {BURN!r}])
try:
    subprocess.run([sys.executable, "-c", {RANK!r}, str(sibling.pid), *sys.argv[1:]], check=True)
finally:
    sibling.kill()
"""


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc/stat")
def test_the_cores_of_others_are_counted_and_those_of_the_launch_are_not() -> None:
    """On a machine that others use too: each number is compared with what the machine really did."""
    outsider = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        done = run(sys.executable, "-c", LAUNCHER, str(outsider.pid))
    finally:
        outsider.kill()
        outsider.wait()
    assert done.code == 0, done.err
    of_two, of_one = json.loads(done.out)

    cores, elapsed, busy, rank, sibling, outsider_seconds = of_two
    assert min(rank, sibling, outsider_seconds) > 0  # all three worked, however little CPU time they got
    assert cores == pytest.approx((busy - rank - sibling) / elapsed, abs=0.15)
    assert cores >= outsider_seconds / elapsed - 0.15  # 1.0 where three cores are free

    # Without other ranks, what the parent started beside this process is a job of the same shell.
    cores, elapsed, busy, rank, sibling, outsider_seconds = of_one
    assert cores == pytest.approx((busy - rank) / elapsed, abs=0.15)
    assert cores >= (outsider_seconds + sibling) / elapsed - 0.15
