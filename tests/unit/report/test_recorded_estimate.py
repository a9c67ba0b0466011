"""The estimate of a recorded run, beside what was recorded."""

import dataclasses
from pathlib import Path

import pytest
from conftest import ROOT, made_record, own_strategy

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.predict.grid import estimates
from slm_toolkit.record.files import find_records
from slm_toolkit.record.run_record import RunRecord, everything_asked, model_facts
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.report.rows import Row
from slm_toolkit.strategy.strategy import Strategy, find_strategy

SMALL = PRESETS["slm-1m"]  # 951,424 parameters


def record_of(strategy: Strategy, config: RunConfig, *, num_ranks: int, **changes: object) -> RunRecord:
    """A run of slm-1m as it would be recorded."""
    per_rank = config.per_device_train_batch_size * config.seq_len * config.gradient_accumulation_steps
    made = made_record(
        strategy=strategy.name,
        engine=strategy.engine,
        zero_stage=strategy.zero_stage,
        reshard_after_forward=None if strategy.engine == "fsdp1" else strategy.reshard_after_forward,
        asked=everything_asked(config, strategy, num_ranks),
        model=model_facts(SMALL),
        world_size=num_ranks,
        tokens_per_step=num_ranks * per_rank,
    )
    return dataclasses.replace(made, **changes)


def config_of(**flags: object) -> RunConfig:
    return RunConfig(model="slm-1m", kernels="plain", **flags).with_defaults(has_gpu=True)


def test_a_gpus_libraries_stand_in_the_estimate_for_that_gpu() -> None:
    record = record_of(find_strategy("ddp"), config_of(), num_ranks=2)
    # cuBLAS keeps 32 MiB on an H100, and nothing where there is no GPU
    assert estimate_of(record).peak_allocated_bytes - 2 * 32 * 2**20 == (
        estimate_of(dataclasses.replace(record, gpu=None)).peak_allocated_bytes
    )
    # aligned DDP: 2 bytes of parameters, 4 of master weights, 8 of moments per parameter, 951,424 of them
    parts = estimate_of(record).parts
    state = [parts[name] for name in ("parameters", "master_weights", "optimizer")]
    assert state == [1_902_848, 3_805_696, 7_611_392]


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_users_own_yaml_decides_is_as_in_slm_estimate(version: int, tmp_path: Path) -> None:
    text = (ROOT / "accel_configs" / "fsdp_shard_grad_op.yaml").read_text()
    own = {
        1: text.replace("fsdp_version: 2", "fsdp_version: 1").replace(
            "fsdp_reshard_after_forward: false", "fsdp_sharding_strategy: SHARD_GRAD_OP"
        ),
        2: text.replace("fsdp_activation_checkpointing: false", "fsdp_activation_checkpointing: true"),
    }[version]
    assert own != text
    path = tmp_path / "own.yaml"
    path.write_text(own)
    strategy = find_strategy(str(path))
    record = record_of(strategy, config_of(gradient_accumulation_steps=2), num_ranks=8, gpu=None)
    asked = {"model": "slm-1m", "kernels": "plain", "gradient_accumulation_steps": 2}
    (expected,) = estimates(asked, [strategy], gpus=[None], num_gpus=[8])
    assert estimate_of(record).parts == expected.parts


def test_a_run_without_a_closed_form_is_reported_without_an_estimate(tmp_path: Path) -> None:
    def record(stage: int) -> RunRecord:
        section = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        config = {"zero_optimization": section, "data_types": {"grad_accum_dtype": "fp32"}}
        own = own_strategy(tmp_path, "", config, name=f"zero{stage}")
        return record_of(find_strategy(own), config_of(), num_ranks=2)

    assert Row([(Path("r"), record(2))]).estimated_peak_bytes
    assert Row([(Path("r"), record(1))]).estimated_peak_bytes is None  # offloaded fp32 sums


def test_shipped_records_hold_the_state_that_is_estimated() -> None:
    records, _ = find_records([ROOT / "results" / "cpu"])
    for _, record in records:
        parts, held = estimate_of(record).parts, record.state_bytes[0]
        for part in ("parameters", "master_weights", "optimizer"):
            assert held[part] == pytest.approx(parts[part], rel=1e-4)  # less Adam's step counters
    assert len(records) == 6
    assert Row(records[:1]).estimated_peak_bytes is None  # beside the memory of a process
