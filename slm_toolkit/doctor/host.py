"""Host: what a launch from here would find, seen without torch: GPUs, RAM, interfaces, packages."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    *("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes", "torchao"),
    *("liger-kernel", "flash-attn", "flash-attn-3", "flash-attn-4", "kernels"),
)
_INCLUDE, _LIBRARIES = ("/usr/include", "/usr/local/include"), ("/usr/lib", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True)
class Host:
    """A machine and the shell on it. None is unknown, and nothing is said of it."""

    is_meant: bool = False
    "whether the strategies are to run here; else its disks, RAM and interfaces say nothing"
    gpu_names: tuple[str, ...] = ()
    "as the driver has them"
    num_cores: int | None = None
    ram_bytes: int | None = None
    "that a job may use: of the machine, or of its cgroup"
    free_ram_bytes: int | None = None
    shm_bytes: int | None = None
    "of /dev/shm"
    interfaces: tuple[str, ...] | None = None
    has_libaio: bool | None = None
    "with which DeepSpeed compiles async_io, or it has been compiled"
    has_compiler: bool | None = None
    "for DeepSpeed's CPU Adam, or it has been compiled"
    versions: Mapping[str, str | None] = field(default_factory=dict)
    "of PACKAGES; None: not installed; a package that is no key is unknown"
    variables: Mapping[str, str] = field(default_factory=dict)
    "the environment of the shell"


def look_here(
    *, is_meant: bool, ram_bytes: int | None, free_ram_bytes: int | None, versions: Mapping[str, str]
) -> Host:
    """This machine; `versions`: what to take for installed in place of what is."""
    import psutil

    from slm_toolkit.hardware.gpus import gpus_here, num_cores
    from slm_toolkit.launch.torch_extensions import extensions_folder

    built = {library.stem for library in extensions_folder().rglob("*.so")}
    "that torch compiled here before: DeepSpeed takes them as they are"
    return Host(
        is_meant=is_meant,
        gpu_names=gpus_here(),
        num_cores=num_cores(),
        ram_bytes=ram_bytes,
        free_ram_bytes=free_ram_bytes,
        shm_bytes=_size_of("/dev/shm"),
        interfaces=tuple(psutil.net_if_addrs()),
        has_libaio="async_io" in built or (_finds(_INCLUDE, "libaio.h") and _finds(_LIBRARIES, "libaio.so*")),
        has_compiler="cpu_adam" in built or shutil.which(os.environ.get("CXX", "c++")) is not None,
        versions={**installed(), **versions},
        variables=dict(os.environ),
    )


def installed() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def parsed_version(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu": enough to compare releases."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", text)[0]))


def is_older(host: Host, package: str, than: str) -> bool:
    """False where the package is not installed or not known."""
    found = host.versions.get(package)
    return found is not None and parsed_version(found) < parsed_version(than)


def _finds(folders: tuple[str, ...], name: str) -> bool:
    patterns = (name, f"*/{name}")  # /usr/lib/x86_64-linux-gnu
    return any(next(Path(folder).glob(pattern), None) for folder in folders for pattern in patterns)


def _size_of(folder: str) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:  # no such file system
        return None
    return status.f_frsize * status.f_blocks
