"""What must start at once does not wait for torch."""

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


def test_arrows_between_rooms_point_one_way() -> None:
    program = (
        "import sys, {module}; "
        "print([name for name in sys.modules if name.startswith('slm_toolkit.{forbidden}')])"
    )
    for module, forbidden in (
        ("slm_toolkit.compare.local", "run"),
        ("slm_toolkit.compare.local", "report"),
        ("slm_toolkit.compare.slurm", "run"),
        ("slm_toolkit.compare.slurm", "report"),
        ("slm_toolkit.compare.slurm", "train"),
        ("slm_toolkit.compare.largest_batch", "run"),
        ("slm_toolkit.compare.display", "run"),
        ("slm_toolkit.compare.display", "report"),
        ("slm_toolkit.compare.predicted", "report"),
        ("slm_toolkit.compare.largest_batch", "report"),
        ("slm_toolkit.report.ledger_table", "compare"),
        ("slm_toolkit.report.ledger_table", "run"),
        ("slm_toolkit.report.table", "compare"),
        ("slm_toolkit.report.html", "compare"),
        ("slm_toolkit.report.figures", "run"),
        ("slm_toolkit.report.memory_figures", "compare"),
        ("slm_toolkit.report.ranking", "compare"),
        ("slm_toolkit.report.export", "compare"),
        ("slm_toolkit.report.trackers", "compare"),
        ("slm_toolkit.report.trackers", "run"),
        ("slm_toolkit.report.baseline", "compare"),
        ("slm_toolkit.predict.estimate", "report"),
        ("slm_toolkit.predict.estimate", "run"),
        ("slm_toolkit.predict.plan_ranking", "report"),
        ("slm_toolkit.predict.advice", "report"),
        ("slm_toolkit.predict.advice", "checkup"),
        ("slm_toolkit.checkup.examine", "report"),
        ("slm_toolkit.checkup.examine", "compare"),
        ("slm_toolkit.checkup.examine", "run"),
        ("slm_toolkit.predict.paper", "report"),
        ("slm_toolkit.report.plan_table", "compare"),
        ("slm_toolkit.report.plan_table", "run"),
        ("slm_toolkit.report.paper_table", "compare"),
        ("slm_toolkit.compare.probe_network", "run"),
        ("slm_toolkit.compare.probe_network", "report"),
        ("slm_toolkit.estimate", "run"),
        ("slm_toolkit.report.estimate_table", "compare"),
        ("slm_toolkit.report.estimate_table", "run"),
        ("slm_toolkit.train", "compare"),
        ("slm_toolkit.train", "report"),
    ):
        text = program.format(module=module, forbidden=forbidden)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
        assert done.stdout.strip().splitlines()[-1] == "[]", f"{module} imports {forbidden}"
