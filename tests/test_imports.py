"""What must start at once does not wait for torch."""

import ast
import subprocess
import sys

import pytest

HEAVY = (
    *("torch", "accelerate", "deepspeed", "transformers", "datasets"),
    *("pandas", "numpy", "pyarrow", "plotly"),
)


@pytest.mark.parametrize(
    "module",
    [
        "slm_toolkit.cli",
        "slm_toolkit.report.table",
        "slm_toolkit.report.rows",
        "slm_toolkit.predict.cost",
        "slm_toolkit.predict.scaling_laws",
        "slm_toolkit.predict.paper",
        "slm_toolkit.predict.plan_ranking",
        "slm_toolkit.predict.advice",
        "slm_toolkit.recommend",
        "slm_toolkit.doctor",
        "slm_toolkit.convert",
        "slm_toolkit.recipes",
        "slm_toolkit.checkup.examine",
        "slm_toolkit.checkup.mend",
        "slm_toolkit.checkup.show",
        "slm_toolkit.compare_verb",
        "slm_toolkit.launch_verb",
        "slm_toolkit.configs_verb",
        "slm_toolkit.report.plan_table",
        "slm_toolkit.report.observations",
        "slm_toolkit.report.paper_table",
        "slm_toolkit.site_flags",
        "slm_toolkit.prices",
        "slm_toolkit.network",
        "slm_toolkit.predict.estimate",
        "slm_toolkit.estimate",
        "slm_toolkit.report.estimate_table",
        "slm_toolkit.compare.local",
        "slm_toolkit.compare.slurm",
        "slm_toolkit.compare.largest_batch",
        "slm_toolkit.compare.keeper",
        "slm_toolkit.compare.display",
        "slm_toolkit.compare.predicted",
        "slm_toolkit.report.ledger_table",
        "slm_toolkit.output",
        "slm_toolkit.report.anatomy",
        "slm_toolkit.report.baseline_table",
        "slm_toolkit.report.export",
        "slm_toolkit.report.trackers",
        "slm_toolkit.record_schema",
        "slm_toolkit.picture_output",
        "slm_toolkit.report.html",
        "slm_toolkit.report.memory_figures",
        "slm_toolkit.report.images",
        "slm_toolkit.report.plot",
    ],
)
def test_a_module_starts_without_the_heavy_libraries(module: str) -> None:
    program = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FORBIDDEN = {
    "checkup.examine": "compare report run",
    "compare.display": "report run",
    "compare.largest_batch": "report run",
    "compare.local": "report run",
    "compare.predicted": "report",
    "compare.probe_network": "report run",
    "compare.slurm": "report run train",
    "estimate": "run",
    "predict.advice": "checkup report",
    "predict.estimate": "report run",
    "predict.paper": "report",
    "predict.plan_ranking": "report",
    "report.baseline": "compare",
    "report.estimate_table": "compare run",
    "report.export": "compare",
    "report.figures": "run",
    "report.html": "compare",
    "report.ledger_table": "compare run",
    "report.memory_figures": "compare",
    "report.paper_table": "compare",
    "report.plan_table": "compare run",
    "report.ranking": "compare",
    "report.table": "compare",
    "report.trackers": "compare run",
    "train": "compare report",
}
"what a module may not import, by itself or through others"


@pytest.mark.parametrize("module", FORBIDDEN)
def test_arrows_between_rooms_point_one_way(module: str) -> None:
    program = (
        f"import sys, slm_toolkit.{module}; print([name for name in sys.modules if 'slm_toolkit.' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = ast.literal_eval(done.stdout.splitlines()[-1])
    assert f"slm_toolkit.{module}" in imported
    rooms = tuple(f"slm_toolkit.{room}" for room in FORBIDDEN[module].split())
    assert [name for name in imported if name.startswith(rooms)] == []


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
