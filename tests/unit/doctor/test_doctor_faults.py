"""`slm doctor` finds each planted fault, it alone, and its corrected files are free of it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conftest import drawn
from doctor_cases import MEANT, clean, planted_case
from faulty_files import ALL, HYBRID, Planted

from slm_toolkit.doctor.case import Case, Host, read_files
from slm_toolkit.doctor.examine import Examined, examine_all
from slm_toolkit.doctor.finding import Edit, Finding
from slm_toolkit.doctor.fix import mended, write_mended
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.hardware.network import cluster_of
from slm_toolkit.predict.setup.setup import Deployment
from slm_toolkit.strategy.passed_on import JSON_SETTINGS, YAML_SETTINGS
from slm_toolkit.strategy.strategy import find_strategy


def deployment_of(gpu: Gpu) -> Deployment:
    return Deployment(cluster_of(gpu, inter_node_gbps=None))


def examined(case: Case) -> tuple[Examined, list[Finding]]:
    (one,), found, _ = examine_all([case], deployment_of=deployment_of)
    return one, found


def grave(found: list[Finding]) -> set[str]:
    return {finding.name for finding in found if finding.severity != "could be faster"}


@pytest.mark.parametrize("planted", ALL, ids=lambda row: row.row)
def test_a_planted_fault_is_found_and_it_alone(planted: Planted, tmp_path: Path) -> None:
    _, found = examined(planted_case(planted, tmp_path))
    (first, *_) = named = [finding for finding in found if finding.name == planted.name]
    is_grave = first.severity != "could be faster"
    assert grave(found) == {*planted.also, *([planted.name] if is_grave else [])}
    assert all(finding.sentence and finding.why and finding.change for finding in named)


@pytest.mark.parametrize(
    "planted", drawn([row for row in ALL if row.yaml or row.json or row.more_text], 40), ids=lambda r: r.row
)
def test_corrected_files_have_the_fault_no_more(planted: Planted, tmp_path: Path) -> None:
    case = planted_case(planted, tmp_path)
    one, found = examined(case)
    if not any(f.edits for f in found if f.name == planted.name):
        return
    write_mended(case.files, one.corrected.files, tmp_path / "fixed")
    again = dataclasses.replace(case, files=read_files(tmp_path / "fixed" / "mine.yaml"))
    _, left = examined(again)
    assert planted.name not in {finding.name for finding in left}
    assert grave(left) <= set(planted.also)
    find_strategy(str(tmp_path / "fixed" / "mine.yaml"))  # reads it, or raises


def all_keys(rules: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, rule in rules.items():
        yield (*above, key)
        if isinstance(rule, dict):
            yield from all_keys(rule, (*above, key))


_ODD = (
    *(None, True, False, 0, 2, -1, 1.5, 5e8, 10**30, "auto", "cpu", "nvme", "no", "two", "", [], {}, [1, 2]),
    *("FULL_SHARD", "0,1", "localhost", {"device": "cpu"}, {"enabled": "auto"}, {"stage": 3}),
)


@pytest.mark.parametrize("seed", drawn(range(60), 15))
def test_no_value_ends_in_a_traceback_and_corrected_files_need_no_correction(
    seed: int, tmp_path: Path
) -> None:
    random = Random(seed)
    base = random.choice(list(MEANT))
    case = planted_case(clean(base), tmp_path)
    yaml_keys, json_keys = list(all_keys(YAML_SETTINGS)), list(all_keys(JSON_SETTINGS))
    odd = [Edit("yaml", random.choice(yaml_keys), random.choice(_ODD)) for _ in range(3)]
    odd += [Edit("json", random.choice(json_keys), random.choice(_ODD)) for _ in range(3)]
    written = write_mended(case.files, mended(case, odd).files, tmp_path / "odd")
    case = dataclasses.replace(case, files=read_files(next(iter(written))), host=Host(is_meant=True))
    one, _ = examined(case)
    _, left = examined(one.corrected)
    assert not [finding for finding in left if finding.edits]


@pytest.mark.parametrize(
    "sizes",
    [{"cp": 8}, {"dp_shard": 4, "sp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}],
    ids=str,
)
def test_a_mesh_that_accelerate_accepts_is_not_called_wrong(sizes: dict[str, int], tmp_path: Path) -> None:
    prefix = "parallelism_config.parallelism_config_"
    whole = {"dp_replicate": 1, "dp_shard": 1, **sizes}
    planted = Planted("", HYBRID, {f"{prefix}{name}_size": size for name, size in whole.items()})
    one, found = examined(dataclasses.replace(planted_case(planted, tmp_path), num_gpus=8))
    assert [finding.sentence for finding in found if finding.severity == "wrong"] == []
    assert one.corrected.config == one.case.config  # nor does --fix touch it
