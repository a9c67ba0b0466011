"""GPUs by name: what a user types, what PyTorch reports of their memory."""

import pytest

from slm_toolkit.hardware.gpus import find_gpu, gpu_of_name, gpus

GIB = 2**30


@pytest.mark.parametrize("typed", ["h100-80gb", "H100-80GB", "h100_80gb", " H100 80GB "])
def test_a_gpu_is_found_by_its_name_in_any_case_and_with_any_separator(typed: str) -> None:
    assert gpu_of_name(typed).name == "h100-80gb"


def test_every_gpu_is_found_by_its_own_name() -> None:
    assert [gpu_of_name(gpu.name) for gpu in gpus()] == list(gpus())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("H100", "h100-80gb or h100-80gb-pcie"),
        ("rtx-409", "rtx-4090"),
    ],
)
def test_an_unknown_gpu_names_the_closest_then_all(typed: str, meant: str) -> None:
    every = ", ".join(gpu.name for gpu in gpus())
    with pytest.raises(ValueError, match=f"unknown GPU '{typed}'\nhint: did you mean {meant}[?].*{every}"):
        gpu_of_name(typed)


@pytest.mark.parametrize(
    ("name", "memory_bytes"),
    [
        ("a100-40gb", 42_298_834_944),  # deviceQuery, bottlerocket-os/bottlerocket#3873
        ("a100-80gb", 81_153 * 2**20),  # MiB of an Ultralytics banner, as below; all as gpus.csv cites
        ("h100-80gb-pcie", 81_008 * 2**20),
        ("h200", 143_155 * 2**20),  # stas00/ml-engineering @c53741b
        ("b300", 287_428_771_840),  # device_total_bytes in a public log of 2026-08-14
        ("a40", 45_416 * 2**20),
        ("rtx-5090", 31.36 * 2**30),  # an OutOfMemoryError of PyTorch's, TrajectoryCrafter#20
    ],
)
def test_memory_is_what_pytorch_was_seen_to_report(name: str, memory_bytes: int) -> None:
    assert gpu_of_name(name).memory_bytes == pytest.approx(memory_bytes, abs=0.006 * GIB)


def test_usable_memory_has_a_source_and_is_less_than_the_vendor_says() -> None:
    for gpu in gpus():
        assert gpu.memory_source
        # the vendors' GB are GiB for some GPUs (A100: 80) and 10^9 bytes for others (H200: 141)
        assert gpu.memory_bytes < gpu.vendor_memory_gb * GIB


@pytest.mark.parametrize(
    ("driver", "name"), [("NVIDIA A40", "a40"), ("NVIDIA RTX A6000", "rtx-a6000"), ("NVIDIA RTX A4000", None)]
)
def test_a_drivers_name_finds_the_newer_rows(driver: str, name: str | None) -> None:
    found = find_gpu(driver)
    assert (found.name if found else None) == name
