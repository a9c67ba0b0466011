"""Compare `predict/memory/allocator.py` with torch's own compiled allocator, on a machine without a GPU.

    python bench/torch_allocator/compare.py --folder /tmp/torch_allocator

It downloads torch's CUDA wheel (0.5 GB, Linux x86-64) and CUDA's headers from PyPI into the folder, and
unpacks `libc10_cuda.so`, which contains the allocator. That library runs on a CUDA runtime that has no GPU
(`no_gpu.cpp`). Then random sequences of allocations and the allocations of ten rehearsed steps run through
both allocators. g++ must be installed. Takes about 5 minutes on two cores.
"""

import argparse
import csv
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from slm_toolkit.predict.memory.allocator import Block, CachingAllocator, Request

HERE = Path(__file__).parent
WHEELS = ("torch==2.13.0", "nvidia-cuda-runtime", "nvidia-cuda-crt")
NEEDED = re.compile(
    r"torch/lib/libc10(_cuda)?\.so|torch/include/(c10|torch/headeronly)/.*|nvidia/cu13/include/.*"
)
NUM_RANDOM = 200
MODELS_AND_STRATEGIES = (
    *(("slm-500m", "single", 1), ("slm-500m", "ddp", 8), ("slm-1b", "fsdp_full_shard", 8)),
    *(("slm-2b", "fsdp_full_shard", 64), ("slm-500m", "fsdp_shard_grad_op", 8), ("slm-500m", "ds_zero1", 8)),
    *(("slm-500m", "ds_zero2", 8), ("slm-1b", "ds_zero3", 8), ("smollm2-135m", "ddp", 2)),
    ("qwen2.5-0.5b", "fsdp_full_shard", 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for downloads and the compiled program")
    args = parser.parse_args()
    program = build(args.folder)
    sequences = map(random_requests, range(NUM_RANDOM))
    equal = sum(ours(requests) == torchs(program, requests) for requests in sequences)
    print(f"random sequences: {equal} of {NUM_RANDOM} equal after each request")
    print("model,strategy,GPUs,peak allocated,torch's peak reserved,ours")
    writer = csv.writer(sys.stdout)
    for model, strategy, num_gpus in MODELS_AND_STRATEGIES:
        requests = traced_requests(model, strategy, num_gpus)
        their_last, our_last = torchs(program, requests)[-1], ours(requests)[-1]
        writer.writerow((model, strategy, num_gpus, their_last[1], their_last[3], our_last[3]))


def build(folder: Path) -> Path:
    """Download, unpack and compile what is not there yet. Return the path of the compiled program."""
    program = folder.resolve() / "repeat"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    # the project's own index has a torch without CUDA
    pypi = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    download = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--index-url",
        "https://pypi.org/simple",
    )
    subprocess.run((*download, "--dest", folder, *WHEELS), check=True, env=pypi)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if NEEDED.fullmatch(name)])
    headers = ("-I", folder / "torch/include", "-I", folder / "nvidia/cu13/include")
    libraries = folder / "nvidia/cu13/lib"  # where libc10_cuda.so looks for its CUDA runtime
    libraries.mkdir(parents=True, exist_ok=True)
    runtime, versions = libraries / "libcudart.so.13", folder / "versions.map"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    rest = returning_zero(unused_functions(folder), folder / "rest.cpp")
    shared = ("-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}")
    subprocess.run(("g++", "-O1", *shared, HERE / "no_gpu.cpp", rest, *headers, "-o", runtime), check=True)
    # expandable segments ask NVML for other ways between GPUs
    names = re.findall(r"\b_\((nvml\w+)\)", (folder / "torch/include/c10/cuda/driver_api.h").read_text())
    nvml = returning_zero(names, folder / "nvml.cpp")
    subprocess.run(("g++", "-shared", "-fPIC", nvml, "-o", libraries / "libnvidia-ml.so.1"), check=True)
    torch = folder.resolve() / "torch/lib"
    links = ("-L", torch, "-lc10_cuda", "-lc10", runtime, f"-Wl,-rpath,{torch}:{libraries.resolve()}")
    subprocess.run(
        ("g++", "-O1", "-std=c++20", HERE / "repeat.cpp", *headers, *links, "-o", program), check=True
    )
    return program


def returning_zero(names: list[str], file: Path) -> Path:
    """Write C functions that do nothing and succeed."""
    file.write_text("".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in names))
    return file


def unused_functions(folder: Path) -> list[str]:
    """Return the functions of CUDA's runtime that the library names and `no_gpu.cpp` does not define."""
    listing = subprocess.run(
        ("nm", "-D", "--undefined-only", folder / "torch/lib/libc10_cuda.so"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    defined = (HERE / "no_gpu.cpp").read_text()
    return [name for name in re.findall(r"\bcuda\w+(?=@libcudart)", listing) if f" {name}(" not in defined]


def random_requests(seed: int) -> list[Request]:
    draw = random.Random(seed)
    requests: list[Request] = []
    in_use: list[int] = []
    for number in range(draw.randrange(50, 2000)):
        if in_use and draw.random() < 0.48:
            requests.append(("f", in_use.pop(draw.randrange(len(in_use)))))
        else:
            in_use.append(number)
            requests.append(("a", number, int(2 ** draw.uniform(3, 28)), draw.choice((0, 0, 0, 1, 2))))
    return requests


def traced_requests(model: str, strategy: str, num_gpus: int) -> list[Request]:
    """Rehearse two steps in a process of their own and return their allocations."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests"
        words = (model, strategy, str(num_gpus), str(path))
        subprocess.run((sys.executable, HERE / "rehearsed.py", *words), check=True, stderr=subprocess.DEVNULL)
        lines = [line.split() for line in path.read_text().splitlines()]
    return [(line[0], *map(int, line[1:])) for line in lines]


def ours(requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """Return our allocator's statistics after each request, as `repeat.cpp` prints torch's."""
    allocator = CachingAllocator()
    blocks, statistics = dict[int, Block](), []
    for action, number, *size_and_stream in requests:
        if action == "a":
            blocks[number] = allocator.allocate(*size_and_stream)
        else:
            allocator.free(blocks.pop(number))
        allocated = allocator.allocated_bytes, allocator.peak_allocated_bytes
        statistics.append((*allocated, allocator.reserved_bytes, allocator.reserved_bytes, 0))
    return statistics


def torchs(program: Path, requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """Return the statistics of torch's allocator after each request."""
    text = "".join(" ".join(map(str, request)) + "\n" for request in requests)
    printed = subprocess.run(
        (program, "all"),
        input=text,
        capture_output=True,
        text=True,
        check=True,
        env={"FAKE_GPU_BYTES": str(2**40)},
    ).stdout.splitlines()
    return [tuple(map(int, line.split())) for line in printed]


if __name__ == "__main__":
    main()
