"""What `slm doctor` says of accelerate and DeepSpeed holds for those that are installed here."""

import ast
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import run
from doctor_cases import MEANT, clean, planted_case
from faulty_files import ALL

from slm_toolkit.doctor.examine import examine
from slm_toolkit.doctor.fix import write_mended
from slm_toolkit.strategy.passed_on import JSON_SETTINGS, YAML_SETTINGS

ACCELERATE = Path(find_spec("accelerate").origin).parent
DEEPSPEED = Path(find_spec("deepspeed").origin).parent
PLANTED = [row for row in ALL if row.yaml or row.json or row.more_text]
REFUSED = {  # rows that accelerate or DeepSpeed refuses, or fails on
    *("unknown-key of the file", "distributed-type synonym", "distributed-type absent"),
    *("unquoted-no", "gpu-ids", "mixed-precision-unknown"),
    *("not-passed-on compute_environment", "refused reshard", "refused cut off"),
    *("set-twice", "refused stage and offload"),
    *("unknown-key of zero_optimization", "json-contradicts-flag fp16"),
}
NEED_A_GPU = {"fsdp-version-missing", "fsdp1", "fsdp1 shards otherwise"}
"FSDP1, which is what these become, is refused without one"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of launcher, plugins and DeepSpeed, by row and by clean strategy; corrected ones end on fixed."""
    folder = tmp_path_factory.mktemp("asked")
    names = {}
    for row in (*PLANTED, *map(clean, MEANT)):
        own = folder / (row.row or row.base)
        own.mkdir()
        case = planted_case(row, own)
        names[str(own / "mine.yaml")] = own.name
        corrected = examine(case).corrected.files
        if corrected != case.files:
            write_mended(case.files, corrected, own / "fixed")
            names[str(own / "fixed" / "mine.yaml")] = f"{own.name} fixed"
    done = run(sys.executable, str(Path(__file__).with_name("launcher_says.py")), *names)
    assert done.code == 0, done.err
    return {names[path]: said for path, said in json.loads(done.out.splitlines()[-1]).items()}


def test_what_is_said_to_be_refused_is_and_nothing_else(answers: dict[str, dict[str, Any]]) -> None:
    refused = {name: said["refused"] for name, said in answers.items() if said["refused"]}
    assert refused.keys() == REFUSED | NEED_A_GPU  # no clean file, and no corrected one
    assert all("no available devices" in refused[row] for row in NEED_A_GPU)
    assert len([name for name in answers if name.endswith(" fixed")]) > 30


def test_what_is_said_to_be_passed_over_is(answers: dict[str, dict[str, Any]]) -> None:
    plugins = {row: said.get("plugin") for row, said in answers.items()}
    assert plugins["sharding-strategy-ignored"] == plugins["fsdp_full_shard"]
    assert plugins["fsdp_shard_grad_op"]["reshard_after_forward"] == "False"
    without_prefix = answers["unknown-key without its prefix"]["variables"]
    assert without_prefix["PARALLELISM_CONFIG_TP_SIZE"] == "1"  # its default
    assert answers["compiled-by-yaml"]["variables"]["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    assert plugins["zero3-init-by-default"]["zero3_init_flag"] is True
    nvme = plugins["nvme-path of the yaml"]["config"]["zero_optimization"]
    assert nvme["offload_optimizer"] == {"device": "nvme", "nvme_path": "none"}


def test_the_keys_known_are_those_of_accelerate() -> None:
    source = (ACCELERATE / "commands" / "config" / "config_args.py").read_text()
    fields = {
        node.target.id
        for definition in ast.parse(source).body
        if isinstance(definition, ast.ClassDef) and definition.name in ("BaseConfig", "ClusterConfig")
        for node in definition.body
        if isinstance(node, ast.AnnAssign)
    }
    turned_into_others = {"dynamo_backend", "fp16"}  # by process_config
    assert set(YAML_SETTINGS) == fields | turned_into_others
    options = set(re.findall(r'^\s+"--(\w+)",$', (ACCELERATE / "commands" / "launch.py").read_text(), re.M))
    for section, prefix in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_")):
        known = set(YAML_SETTINGS[section]) - {"fsdp_ignored_modules"}
        assert known == {name for name in options if name.startswith(prefix)}
    assert {*YAML_SETTINGS["deepspeed_config"], *YAML_SETTINGS["dynamo_config"]} <= options
    assert "fsdp_ignored_modules" in (ACCELERATE / "utils" / "launch.py").read_text()


def test_the_keys_known_are_those_of_deepspeed() -> None:
    zero = JSON_SETTINGS["zero_optimization"]
    for section, file, model in (
        (zero, "runtime/zero/config.py", "DeepSpeedZeroConfig"),
        (zero["offload_param"], "runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
        (zero["offload_optimizer"], "runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
        (zero["leaf_module"], "runtime/zero/leaf_module_config.py", "DeepSpeedZeroLeafModuleConfig"),
        (JSON_SETTINGS["bf16"], "runtime/precision_config.py", "DeepSpeedBF16Config"),
        (JSON_SETTINGS["fp16"], "runtime/precision_config.py", "DeepSpeedFP16Config"),
    ):
        assert set(section) == _model_keys(file, model), model
    text = "".join(
        path.read_text()
        for path in DEEPSPEED.rglob("*.py")
        if "config" in path.name or "constants" in path.name
    )
    nowhere = [key for key in JSON_SETTINGS if f'"{key}"' not in text and f"'{key}'" not in text]
    assert nowhere == ["msamp"]  # accelerate's


def _model_keys(file: str, model: str) -> set[str]:
    """Fields of a pydantic model by the names that a JSON has for them."""
    tree = ast.parse((DEEPSPEED / file).read_text())
    (definition,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model]
    found = set()
    for node in definition.body:
        if isinstance(node, ast.AnnAssign):
            alias = re.search(r"alias=['\"](\w+)['\"]", ast.unparse(node))
            found.add(alias[1] if alias else node.target.id)
    return found
