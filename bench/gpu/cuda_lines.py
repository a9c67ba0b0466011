"""Count the lines of slm_toolkit that only a GPU reaches, and those of them that the pretended GPU runs.

    pip install coverage && python bench/gpu/cuda_lines.py

A line counts if a GPU takes the branch it is in (an `if`, a conditional expression, what follows an early
return), or if it calls torch.cuda. Each of RUNS is run under bench/gpu/pretend.py with coverage.py in all
processes; then the lines that never ran are printed. Some runs are refusals, and exit with 2.
"""

import ast
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from coverage import Coverage
from coverage.python import PythonParser
from pretend import environment

ROOT = Path(__file__).resolve().parents[2]
TINY = "--model slm-1m --seq_len 32 --max_steps 3 --per_device_train_batch_size 2"
SLM = "-m slm_toolkit.cli.main"
RUNS = (  # words of Python, GPUs, GiB of each
    *(
        (f"{SLM} train --strategy {strategy} --num_processes 1 {TINY}", 1, 1.0)
        for strategy in ("fsdp_shard_grad_op", "ds_zero1", "ds_zero2")
    ),
    (f"{SLM} train --strategy ds_zero3 --num_processes 2 {TINY} --eval_steps 2", 2, 1.0),
    (f"{SLM} train --strategy ddp --num_processes 2 {TINY} --save_steps 2 --run_name ddp --profile", 2, 1.0),
    (f"{SLM} train --strategy ddp --num_processes 2 {TINY} --max_steps 5 --save_steps 2 --run_name ddp "
     "--resume_from_checkpoint latest --async_save --reduce_dtype fp32", 2, 1.0),
    *(
        (f"{SLM} train --strategy {strategy} {TINY} --rehearse 8", 1, 1.0)
        for strategy in ("ddp", "fsdp_full_shard", "ds_zero3")
    ),
    *(
        (f"-m slm_toolkit.train {TINY} {flags}", 1, 1.0)
        for flags in (
            "--torch_compile --torch_compile_mode reduce-overhead --eval_steps 2",
            "--attn_implementation sdpa_cudnn --loss_kernel fused_linear --norm_kernel fused",
            "--numerics fp32 --tf32 --gradient_checkpointing full",
            "--numerics stock --optim adamw_torch_fused --save_final_model true",
            "--fp8 tensorwise --torch_compile",
            "--dataset README.md --packing multipack --attn_implementation sdpa_flash",
        )
    ),
    (f"{SLM} compare --strategy ddp fsdp_full_shard --num_processes 2 {TINY}", 2, 1.0),
    ("-c 'from slm_toolkit.run.faults import lost_ranks; lost_ranks._gpu_is_busy()'", 1, 1.0),
    (f"{SLM} compare --probe_network --num_processes 2 --probe_seconds 2", 2, 1.0),
)  # fmt: skip


def takes_gpu(test: ast.expr) -> bool | None:
    """True: a GPU takes the branch; False: it takes the other one; None: the test is about something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = takes_gpu(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):  # where "no GPU, and ..." is false, there may be none all the same
        return True if any(takes_gpu(value) for value in test.values) else None
    if isinstance(test, ast.Compare):
        devices = [side.value for side in test.comparators if isinstance(side, ast.Constant)]
        if devices and devices[0] in ("cuda", "cpu"):
            return (devices[0] == "cuda") == isinstance(test.ops[0], ast.Eq)
        return None
    text = ast.unparse(test)
    asks = ("torch.cuda.is_available()", "torch.cuda.is_initialized()", "on_gpu", "has_gpu", "is_cuda")
    return True if text.endswith(asks) else None


def statements_in(body: list[ast.stmt]) -> set[int]:
    return {node.lineno for part in body for node in ast.walk(part) if isinstance(node, ast.stmt)}


def lines_of_gpus(source: str) -> set[int]:
    """The lines that only a GPU reaches."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for body in (node.body,) if isinstance(getattr(node, "body", None), list) else ():
            for index, part in enumerate(body):
                if not isinstance(part, ast.If) or (answer := takes_gpu(part.test)) is None:
                    continue
                leaves = isinstance(part.body[-1], ast.Return | ast.Raise | ast.Continue)
                other = body[index + 1 :] if leaves and not part.orelse else part.orelse
                found |= statements_in(part.body if answer else other)
        if isinstance(node, ast.IfExp) and takes_gpu(node.test) is not None:
            found.add(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.cuda."):
            found.add(node.lineno)
    parser = PythonParser(text=source)
    parser.parse_source()
    return {parser.first_line(line) for line in found} & parser.statements


def lines_run(folder: Path) -> dict[Path, set[int]]:
    """Run all of RUNS; of each file of the package the lines that some process ran."""
    (folder / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
    rc = folder / "coveragerc"
    rc.write_text(
        f"[run]\nsource = {ROOT / 'slm_toolkit'}\nparallel = true\ndata_file = {folder / 'data'}\n"
        "patch = _exit\n"
    )
    for words, num_gpus, memory_gib in RUNS:
        env = {**os.environ, **environment(num_gpus=num_gpus, memory_gib=memory_gib), "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(ROOT), str(folder)])
        env["COVERAGE_PROCESS_START"] = str(rc)
        where = ("--output_dir", str(folder / "runs")) if "--model" in words else ()
        done = subprocess.run(
            [sys.executable, *shlex.split(words), *where], env=env, capture_output=True, text=True
        )
        print(f"exit {done.returncode}: python {words}", flush=True)
        if done.returncode:
            print(done.stderr[-2000:])
    coverage = Coverage(config_file=str(rc))
    coverage.combine()
    data = coverage.get_data()
    return {Path(name): set(data.lines(name)) for name in data.measured_files()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        has_run = lines_run(Path(folder))
    num_lines = num_run = 0
    for path in sorted((ROOT / "slm_toolkit").rglob("*.py")):
        if path.parent.name == "predict":  # of which no line asks for this machine's devices
            continue
        source = path.read_text()
        lines = lines_of_gpus(source)
        missing = sorted(lines - has_run.get(path, set()))
        num_lines, num_run = num_lines + len(lines), num_run + len(lines) - len(missing)
        texts = source.splitlines()
        for line in missing:
            print(f"{path.relative_to(ROOT)}:{line}: {texts[line - 1].strip()}")
    print(f"{num_lines} lines only a GPU reaches; {num_run} of them ran ({num_run / num_lines:.0%})")


if __name__ == "__main__":
    main()
