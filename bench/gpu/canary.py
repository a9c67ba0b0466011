"""Look at the machine before anything is measured: its GPU, driver and libraries, and what NVML costs.

python bench/gpu/canary.py         # the last line of stdout is JSON
"""

import json
import platform
import statistics
import time
from typing import Any

import psutil
import torch


def nvml() -> dict[str, Any]:
    """The driver, and the median of 20 calls of each query that a run makes every step."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError as error:
        return {"driver": None, "nvml_error": str(error)}
    queries = {
        "power": lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        "energy": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "sm_clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle),
        "processes": lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
    }
    driver = pynvml.nvmlSystemGetDriverVersion()
    seconds = {name: _median_seconds(query) for name, query in queries.items()}
    return {"driver": driver if isinstance(driver, str) else driver.decode(), "nvml_seconds": seconds}


def _median_seconds(query: Any) -> float | None:
    import pynvml

    samples = []
    for _ in range(20):
        began = time.perf_counter()
        try:
            query()
        except pynvml.NVMLError:  # this GPU can't say
            return None
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def gpu() -> dict[str, Any]:
    """A product on the GPU proves that it computes; None where there is none."""
    if not torch.cuda.is_available():
        return {"gpu": None, "memory_bytes": None}
    properties = torch.cuda.get_device_properties(0)
    a = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    assert (a @ a).float().sum().item() == 64.0**3
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "num_multiprocessors": properties.multi_processor_count,
        "capability": list(torch.cuda.get_device_capability(0)),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def main() -> None:
    host = {
        "python": platform.python_version(),
        "num_cores": psutil.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
    }
    print(json.dumps({**gpu(), **nvml(), **host}))


if __name__ == "__main__":
    main()
