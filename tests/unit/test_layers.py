"""Each room of the package imports only rooms below it, and only what trains imports torch."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from modules import HEAVY, MODULES, PACKAGE, WITH_TORCH

LAYERS = (
    *("base", "hardware", "config", "model", "strategy", "record"),
    *("predict/setup", "predict/memory", "predict/speed", "predict", "launch"),
    *("run/peers", "run/kernels", "run/model", "run/engine", "run/checkpoint", "run/data", "run/observe"),
    *("run/faults", "run"),
    *("report", "report/tables", "report/charts", "compare"),
    *("recommend", "doctor", "convert", "checkpoint_convert"),
    *("train.py", "recorder.py", "run_script.py", "results.py", "cli", "api.py"),
)
"from the lowest to the highest: a folder's own files, or a file of the package's root"
SATELLITES = ("recommend", "doctor", "convert", "checkpoint_convert")
ABOVE_SATELLITES = {
    "recommend": {"recommend", "results"},
    "doctor": {"doctor"},
    "convert": {"convert"},
    "checkpoint_convert": {"convert"},
}
"by satellite, the files of cli, and results.py, that import it: nothing else of the package does"


def layer(path: Path) -> str:
    """The entry of LAYERS that a file belongs to, by its folder alone."""
    inside = path.relative_to(PACKAGE)
    return inside.parent.as_posix() if len(inside.parts) > 1 else inside.name


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Dotted names that a file imports, those in functions too, and whether they stand at its top."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(path.read_text())
    at_top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports whole"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else node.module, node in at_top)


def own_imports(path: Path) -> set[str]:
    return {name for name, _ in imports(path) if name in MODULES and name != "slm_toolkit"}


def test_every_folder_has_its_layer() -> None:
    files = [path for name, path in MODULES.items() if name != "slm_toolkit"]
    assert {layer(path) for path in files} == set(LAYERS)


def test_a_module_imports_only_its_own_layer_and_those_below() -> None:
    height = {name: LAYERS.index(layer(path)) for name, path in MODULES.items() if name != "slm_toolkit"}
    upward = [
        f"{name} imports {one}"
        for name in height
        for one in own_imports(MODULES[name])
        if height[one] > height[name]
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    below = {name: own_imports(path) for name, path in MODULES.items()}
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in finished:
            for one in below[name]:
                visit(one, (*trail, name))
            finished.add(name)

    for name in below:
        visit(name, ())


def test_satellites_are_imported_by_their_own_verbs_and_inside_functions_of_results_alone() -> None:
    for satellite in SATELLITES:
        importers = {
            path.stem
            for path in MODULES.values()
            if layer(path) != satellite and any(layer(MODULES[one]) == satellite for one in own_imports(path))
        }
        assert importers <= ABOVE_SATELLITES[satellite]
    at_top = {
        name for name, is_at_top in imports(MODULES["slm_toolkit.results"]) if is_at_top and name in MODULES
    }
    assert at_top == set()


def test_training_and_comparing_meet_in_records_alone() -> None:
    """What compare starts is a process: comparison alone looks into run, once its imports are paid for."""
    for name, path in MODULES.items():
        if name.startswith("slm_toolkit.compare.") and path.stem != "comparison":
            assert not [one for one in own_imports(path) if one.startswith("slm_toolkit.run.")], name
        if name.startswith("slm_toolkit.run.") or name == "slm_toolkit.train":
            rooms = {one.split(".")[1] for one in own_imports(path)}
            assert not rooms & {"compare", "report", *SATELLITES, "cli"}, name


LIGHT = [name for name in MODULES if not name.startswith(WITH_TORCH)]


def test_only_what_trains_begins_with_torch() -> None:
    heavy = [
        f"{name} imports {imported}"
        for name in LIGHT
        for imported, is_at_top in imports(MODULES[name])
        if is_at_top and imported.split(".")[0] in HEAVY
    ]
    assert heavy == []
