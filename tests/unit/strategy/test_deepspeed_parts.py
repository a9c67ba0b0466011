"""Parts of a DeepSpeed JSON that slm_toolkit does not run are refused by name, also by estimates."""

import json
from pathlib import Path

import pytest
from conftest import slm_here
from slm_toolkit.strategy.deepspeed_parts import part_problems

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.strategy import find_strategy, shipped_strategies

ON_HOST = {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}
ON = [
    ({"compile": {"deepcompile": True}}, "compile.deepcompile: DeepCompile begins when a script calls"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size: slm_toolkit does not run tensor"),
    ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "zero_optimization.zenflow: ZenFlow applies most"),
    ({"zero_optimization": ON_HOST}, "zero_optimization.offload_optimizer.super_offload: SuperOffload has"),
]
OFF = [
    {},
    {"compile": {"deepcompile": False}},
    {"tensor_parallel": {"autotp_size": 1}},
    {"zero_optimization": {"stage": 2, "zenflow": None}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": False}}},
    {"zero_optimization": {"offload_optimizer": None}, "compile": None},
]


@pytest.mark.parametrize(("settings", "says"), ON)
def test_a_part_that_is_on_is_named(settings: dict, says: str, tmp_path: Path) -> None:
    (problem,) = part_problems(settings)
    assert problem.startswith(f"the DeepSpeed JSON has {says}")
    file = tmp_path / "parts.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, **settings}))
    for words in (("compare", "--dry_run", "--model", "slm-1m"), ("estimate", "--model", "slm-100m")):
        done = slm_here(*words, "--strategy", str(file))
        assert done.code == 2, words
        assert says in done.err


@pytest.mark.parametrize("settings", OFF)
def test_a_part_that_is_off_is_not(settings: dict) -> None:
    assert part_problems(settings) == []


def test_no_shipped_strategy_has_any() -> None:
    for name in shipped_strategies():
        assert part_problems(find_strategy(name).deepspeed_config or {}) == []
        assert not any(
            "does not run" in problem for problem in contradictions(find_strategy(name), RunConfig())
        )
