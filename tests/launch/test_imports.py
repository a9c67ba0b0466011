"""What starts without torch, without records, without rich: each in a Python of its own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run
from modules import HEAVY, LIGHT

ESTIMATE = (
    "import contextlib; from slm_toolkit.cli.main import main\n"
    "with contextlib.suppress(SystemExit): main(['estimate', '--json', '--gpu', 'h200'])"
)
NEEDS = (
    "from slm_toolkit.predict.deepspeed_estimator import deepspeed_needs\n"
    "deepspeed_needs(9, 3, zero_stage=3, num_gpus_per_node=1, num_nodes=1)"
)
API = "from slm_toolkit import api; api.estimate(gpu='h200'); api.report('results/cpu')"


def printed(program: str) -> list[str]:
    done = subprocess.run((sys.executable, "-c", program), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("program", "absent"),
    [
        pytest.param(
            "import slm_toolkit.hardware.network", {"slm_toolkit.run", "slm_toolkit.compare"}, id="network"
        ),
        pytest.param("import slm_toolkit.cli.launch", {"torch"}, id="checks before a launch"),
        pytest.param(NEEDS, {"torch", "deepspeed"}, id="DeepSpeed's estimate"),
        pytest.param(ESTIMATE, {"numpy", *HEAVY}, id="slm estimate"),
        # all that does not train, imported together: nothing pulls torch in by way of another package
        pytest.param(f"import {', '.join(LIGHT)}", HEAVY, id="all light modules"),
        pytest.param(API, HEAVY, id="API"),
    ],
)
def test_light_parts_load_no_heavy_library(program: str, absent: set[str]) -> None:
    found = f"[name for name in {sorted(absent)} if name in sys.modules]"
    assert printed(f"{program}\nimport sys; print({found})")[-1] == "[]"


def test_a_rank_imports_no_compiler_and_no_datasets(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import sys; from slm_toolkit import train\n"
        f"train.main(['--model', 'slm-1m', '--max_steps', '1', '--output_dir', {str(tmp_path)!r}])\n"
        "unused = ('torch._inductor.compile_fx', 'datasets', 'pandas')\n"
        "sys.stdout.write(f'imported: {[name for name in unused if name in sys.modules]}\\n')\n"
    )
    launch = ("accelerate", "launch", "--config_file", "accel_configs/ds_zero2.yaml", "--num_processes", "2")
    done = run(*launch, str(program), cold=True)
    assert done.out.count("imported: []") == 2, done.out + done.err


@pytest.mark.quick
def test_help_loads_no_verb_and_a_verb_no_other() -> None:
    def loaded(*words: str) -> list[str]:
        program = (
            "import sys, contextlib; from slm_toolkit.cli.main import main\n"
            f"with contextlib.suppress(SystemExit): main({list(words)})\n"
            "print(sorted(name for name in sys.modules if name.startswith('slm_toolkit.')))"
        )
        return ast.literal_eval(printed(program)[-1])

    help_needs = loaded("--help")
    assert sorted({name.split(".")[1] for name in help_needs}) == ["base", "cli", "config"]
    assert [name for name in help_needs if name.startswith("slm_toolkit.cli.")] == ["slm_toolkit.cli.main"]
    estimate = loaded("estimate", "--json")
    assert "slm_toolkit.predict.estimate" in estimate
    unused = ("cli.compare", "cli.output", "record.run_record")
    assert not {f"slm_toolkit.{name}" for name in unused} & set(estimate)


@pytest.mark.quick
def test_the_api_is_imported_alone() -> None:
    program = (
        "import sys; before = set(sys.modules); from slm_toolkit import api\n"
        "new = {name.split('.')[0] for name in sys.modules if name not in before}\n"
        "print(sorted(new - sys.stdlib_module_names), 'slm_toolkit.base' in sys.modules)"
    )
    assert printed(program) == ["['slm_toolkit'] False"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_only_while_the_script_is_imported(enabled: bool) -> None:
    (line,) = printed(
        f"import gc; gc.{'enable' if enabled else 'disable'}(); "
        "import slm_toolkit.train; print(gc.isenabled(), gc.get_freeze_count())"
    )
    is_enabled, num_frozen = line.split()
    assert is_enabled == str(enabled)
    assert int(num_frozen) > 100_000  # torch and transformers
