"""What the project leans on and nobody promised to keep: the rows of such things, and our uses of them."""

import ast
import builtins
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "bitsandbytes", "torchao")
DOCUMENTED = {
    *("_exit", "_asdict", "__func__", "malloc_trim"),  # Python's and the C library's
    *("tolist", "to_local"),  # numpy's and DTensor's
}
"begin with an underscore, or are asked for by name, and are promised all the same"
_OF_OTHERS = {
    *(
        "device_mesh",
        "process_group",
        "cpu_offload",
        "optimizer",
        "module",
        "num_processes",
        "deepspeed_config",
    ),
    *("bias", "unregister"),
}
"public names of DTensor, DDP, accelerate, selectors, ... that DeepSpeed has too"
_OF_PACKAGES = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)+\.?")
_ENVIRONMENT = re.compile(
    r"(ACCELERATE|FSDP|TORCHELASTIC|GROUP|ROLE|LOCAL|MASTER|NCCL|GLOO)_[A-Z_]*|RANK|WORLD_SIZE"
)
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


@dataclass(frozen=True)
class Leaning:
    """One private or undocumented thing that we use."""

    thing: str
    names: tuple[str, ...]
    "as our source has them: attributes, imports, modules and variables of the environment"
    why: str
    "what we use it for"
    change: str
    "what to do where it is no longer so"
    check: Callable[[], None]
    "against what is installed; raises where it is no longer so"

    def broken(self, found: str) -> str:
        """What to say of a check that failed."""
        return (
            f"{self.thing}: no longer as we use it: {found}\n"
            f"used in: {_places(self.names)}\nwhy: {self.why}\nwhat to change: {self.change}"
        )


@dataclass(frozen=True)
class Use:
    """A place of our source that leans on a name of somebody else's."""

    place: str
    "file:line"
    name: str
    how: str


def _places(names: tuple[str, ...]) -> str:
    """Where our package uses names, lines by file: as `own_uses` sees it, else where they stand at all."""
    seen = [use.place.rpartition(":") for use in own_uses() if use.name in names]
    lines = {(file, int(line)) for file, _, line in seen}
    if not lines:
        word = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})")
        for path in sorted((ROOT / "slm_toolkit").rglob("*.py")):
            texts = enumerate(path.read_text().splitlines(), start=1)
            lines |= {(str(path.relative_to(ROOT)), line) for line, text in texts if word.search(text)}
    by_file: dict[str, list[int]] = {}
    for file, line in sorted(lines):
        by_file.setdefault(file, []).append(line)
    return "; ".join(f"{file}:{', '.join(map(str, found))}" for file, found in by_file.items())


@functools.cache
def own_uses() -> list[Use]:
    """All of them: in the package, its tests and its benchmarks."""
    found = []
    for folder in ("slm_toolkit", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.startswith("drift"):
                found += uses_in(path.read_text(), str(path.relative_to(ROOT)))
    return found


def uses_in(source: str, file: str) -> list[Use]:
    """Names that are private, DeepSpeed's or reached for as texts; private modules; a launch's variables."""
    tree = ast.parse(source)
    if not file.startswith("slm_toolkit"):
        return _used(file, [*_private(tree, _defined(tree) | _private_in_bench()), *_imports(tree)])
    own, trains = _defined(tree), "/run/" in file or file.endswith("/train.py")
    found = [*_private(tree, own), *_imports(tree), *_texts(tree, variables=trains)]
    if trains:
        found += [*_by_name(tree, own), *_of_deepspeed(tree, own)]
    return _used(file, found)


def _used(file: str, found: list[tuple[int, str, str]]) -> list[Use]:
    return [Use(f"{file}:{line}", name, how) for line, name, how in found if name not in DOCUMENTED]


_Found = Iterator[tuple[int, str, str]]


def _private(tree: ast.AST, own: set[str]) -> _Found:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            of_parent = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
            if of_parent or node.attr not in own:
                yield node.lineno, node.attr, ast.unparse(node)


def _imports(tree: ast.AST) -> _Found:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            private_module = any(part.startswith("_") for part in node.module.split("."))
            for alias in node.names:
                if private_module or _is_private(alias.name):
                    yield node.lineno, alias.name, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES and "._" in alias.name:
                    yield node.lineno, alias.name, f"import {alias.name}"


def _by_name(tree: ast.AST, own: set[str]) -> _Found:
    """Whoever asks for an attribute by its name knows that it may not be there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        called, name = ast.unparse(node.func), node.args[1]
        is_reach = called in _BY_NAME or called in ("patch.object", "mock.patch.object")
        if is_reach and isinstance(name, ast.Constant) and name.value not in own:
            yield node.lineno, name.value, ast.unparse(node)[:60]


def _texts(tree: ast.AST, *, variables: bool) -> _Found:
    """Modules by their dotted names, prefixes that wrappers put before names, environment variables."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and _is_text(node.value)
    }
    for node in ast.walk(tree):
        if not _is_text(node) or id(node) in docstrings:
            continue
        text = node.value
        if (_OF_PACKAGES.fullmatch(text) and not text.endswith(".json")) or re.fullmatch(
            r"_[a-z]\w*\.", text
        ):
            yield node.lineno, text.rstrip("."), repr(text)
        elif variables and _ENVIRONMENT.fullmatch(text):
            yield node.lineno, text, repr(text)


def _of_deepspeed(tree: ast.AST, own: set[str]) -> _Found:
    names = _deepspeed_names() - own
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield node.lineno, node.attr, ast.unparse(node)


@functools.cache
def _deepspeed_names() -> set[str]:
    """What DeepSpeed's engine, optimizers and partitioned parameters have and nothing of torch's has."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    folder = Path(find_spec("deepspeed").origin).parent
    files = [*(folder / "runtime" / "zero").glob("*.py"), folder / "runtime" / "engine.py"]
    files += [folder / "utils" / "tensor_fragment.py", folder / "ops" / "adam" / "cpu_adam.py"]
    found: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    known = {name for thing in vars(builtins).values() for name in dir(thing)}
    of_torch = (torch, torch.Tensor, torch.nn.Module, torch.optim.AdamW, torch.distributed)
    known |= {name for thing in (*of_torch, DistributedDataParallel) for name in dir(thing)}
    known |= set(vars(torch.optim.AdamW([torch.zeros(1)])))
    known |= set(vars(torch.nn.Linear(1, 1)))
    for path in (ROOT / "slm_toolkit").rglob("*.py"):
        known |= {name for name in _defined(ast.parse(path.read_text())) if not _is_private(name)}
    return found - known - _OF_OTHERS


def _defined(tree: ast.AST) -> set[str]:
    """Names that a module gives to things of its own: functions, classes, variables, fields, attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            found.add(node.attr)
    return found


@functools.cache
def _private_in_bench() -> frozenset[str]:
    """Of our own benchmarks, which tests may look into."""
    paths = (ROOT / "bench").rglob("*.py")
    return frozenset().union(*(_defined(ast.parse(path.read_text())) for path in paths))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
