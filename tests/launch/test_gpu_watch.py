"""The use of a rank's GPU and cores by others is recorded, or unknown; NVML is a stand-in in C."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run

from slm_toolkit.run.observe.machine_load import GpuWatch, allocator_retries, driver_version, gpu_before

ASK = """
import json, sys
from slm_toolkit.run.observe import machine_load
from slm_toolkit.run.observe.machine_load import GpuWatch, driver_version, gpu_before

answers = {"driver": driver_version()}
for uuid in sys.argv[1:]:
    before = gpu_before(uuid)
    answers[uuid] = [before.num_processes, before.used_bytes]
    for seconds in (0, 1000):
        machine_load.SECONDS_BETWEEN_READINGS = seconds
        watch = GpuWatch(before.handle)
        watch.sample()  # the stand-in has answered once
        watch = GpuWatch(before.handle)
        for _ in range(4):
            watch.sample()
        facts = watch.facts()
        answers[uuid].append([facts["energy_joules"], facts["throttle_reasons"]])
print(json.dumps(answers))
"""
NOTHING = [None, None, *[[None] * 2] * 2]


def test_nvml_is_read_step_by_step_and_short_steps_share_a_reading(tmp_path: Path) -> None:
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("no C compiler to build the stand-in for NVML with")
    library = tmp_path / "libnvidia-ml.so.1"
    command = (compiler, "-shared", "-fPIC", "-o", str(library), str(ROOT / "tests/launch/nvml.c"))
    subprocess.run(command, check=True)
    env = {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}  # a real GPU stays out of it
    gpu, silent, mig = (f"{letter * 8}-0000-0000-0000-000000000000" for letter in "abd")
    done = run(sys.executable, "-c", ASK, gpu, silent, mig, "of-nobody", env=env)
    assert done.code == 0, done.err
    answers = json.loads(done.out)
    assert answers["driver"] == {"NVIDIA driver": "580.00"}
    num_processes, used_bytes, each, shared = answers[gpu]
    assert num_processes == 2
    assert (
        used_bytes == 3 * 1024**3
    )  # version 2 of the query; version 1 says 4 GiB, with 1 GiB of the driver's
    energy, reasons = each
    # the counter gains 250,000 mJ at each reading; the last step's energy is read again at the end
    assert energy == [250.0] * 3 + [500.0]
    # The stand-in answers 1: idle; 2: power cap and application clocks; 3: sync boost and display clocks;
    # 4: power cap, hardware slowdown and hardware thermal slowdown. The warm-up gets 1, the steps 2, 3, 4, 1.
    assert reasons == {"sw_power_cap": 2, "hw_slowdown": 1, "hw_thermal_slowdown": 1}
    assert shared[0] == [250.0, 0.0, 0.0, 250.0]  # the sum is whole
    assert answers[silent] == answers[mig] == answers["of-nobody"] == NOTHING


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has NVML")
def test_without_nvml_all_is_unknown() -> None:
    assert gpu_before("a").handle is None
    assert driver_version() == {}
    watch = GpuWatch(None)
    watch.sample()
    assert set(watch.facts().values()) == {None}
    assert allocator_retries(torch.device("cpu")) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_is_found_by_torchs_uuid_before_it_has_a_context() -> None:
    program = (
        "import torch; from slm_toolkit.run.observe.machine_load import *; "
        "before = look_at_gpu(0); assert not torch._C._cuda_hasPrimaryContext(0); "
        "x = torch.ones(2**28, device='cuda'); torch.cuda.synchronize(); after = look_at_gpu(0); "
        "assert after.used_bytes - before.used_bytes >= 2**30, (before, after)"  # 2^28 x 4 bytes
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
    return [watch.facts()["other_busy_cores"], *(after - b for after, b in zip(seconds(), before))]

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

    # Without other ranks, what the parent started beside this process is a job of the same shell.
    cores, elapsed, busy, rank, _, _ = of_one
    assert cores == pytest.approx((busy - rank) / elapsed, abs=0.15)
