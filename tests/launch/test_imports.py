"""What starts without torch, without records, without rich: each in a Python of its own."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run
from modules import HEAVY, LIGHT


def test_a_network_is_read_without_the_heavy_libraries() -> None:
    heavy = ("torch", "numpy", "slm_toolkit.run", "slm_toolkit.compare")
    program = (
        f"import sys, slm_toolkit.hardware.network; print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_checks_before_a_launch_need_no_torch() -> None:
    program = "import sys, slm_toolkit.cli.launch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_arithmetic_needs_no_torch() -> None:
    program = (
        "import sys; from slm_toolkit.predict.deepspeed_estimator import deepspeed_needs; "
        "deepspeed_needs(9, 3, zero_stage=3, num_gpus_per_node=1, num_nodes=1); "
        "print([name for name in ('torch', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
def test_the_command_starts_without_the_heavy_libraries() -> None:
    program = (
        "import sys, contextlib; from slm_toolkit.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['estimate', '--json', '--gpu', 'h200'])\n"
        "heavy = ('torch', 'numpy', 'pandas', 'transformers', 'deepspeed', 'accelerate')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert json.loads(done.stdout)


@pytest.mark.quick
def test_help_loads_no_verb_and_a_verb_no_other() -> None:
    program = (
        "import sys, contextlib; from slm_toolkit.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main([{words}])\n"
        "print(sorted(name for name in sys.modules if name.startswith('slm_toolkit.')), file=sys.stderr)"
    )

    def loaded(words: str) -> str:
        call = (sys.executable, "-c", program.format(words=words))
        return subprocess.run(call, capture_output=True, text=True, check=True).stderr

    help_needs = ast.literal_eval(loaded("'--help'"))
    assert sorted({name.split(".")[1] for name in help_needs}) == ["base", "cli", "config"]
    assert [name for name in help_needs if name.startswith("slm_toolkit.cli.")] == ["slm_toolkit.cli.main"]
    estimate = loaded("'estimate', '--json'")
    assert "slm_toolkit.predict.estimate" in estimate
    assert not any(
        f"slm_toolkit.{name}'" in estimate for name in ("cli.compare", "cli.output", "record.run_record")
    )


@pytest.mark.quick
def test_the_command_line_is_there_without_the_heavy_libraries() -> None:
    """All that does not train, imported together: nothing pulls torch in by way of another package."""
    program = f"import sys, {', '.join(LIGHT)}; print([n for n in {sorted(HEAVY)} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.quick
def test_the_api_is_imported_alone_and_works_without_the_heavy_libraries() -> None:
    program = (
        "import sys; before = set(sys.modules); from slm_toolkit import api\n"
        "new = {name.split('.')[0] for name in sys.modules if name not in before}\n"
        "print(sorted(new - sys.stdlib_module_names), 'slm_toolkit.base' in sys.modules)\n"
        "api.estimate(gpu='h200'); api.report('results/cpu')\n"
        f"print([name for name in {sorted(HEAVY)} if name in sys.modules])"
    )
    command = (sys.executable, "-c", program)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['slm_toolkit'] False", "[]"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_only_while_the_script_is_imported(enabled: bool) -> None:
    program = (
        f"import gc; gc.{'enable' if enabled else 'disable'}(); "
        "import slm_toolkit.train; print(gc.isenabled(), gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    is_enabled, num_frozen = done.stdout.split()
    assert is_enabled == str(enabled)
    assert int(num_frozen) > 100_000  # torch and transformers
