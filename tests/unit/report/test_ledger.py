"""The prediction ledger: estimates held against records, made by hand, shipped, and rehearsed here."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import H100, ROOT, made_record, own_strategy, slm_here
from rich.console import Console

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.grid import estimates
from slm_toolkit.record.files import find_records, write_record
from slm_toolkit.record.run_record import RunRecord, everything_asked, model_facts
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.report.rows import row_of
from slm_toolkit.report.tables.ledger import LedgerEntry, ledger_of, ledger_table, summaries
from slm_toolkit.strategy.strategy import Strategy, find_strategy

SMALL = PRESETS["slm-1m"]  # 951,424 parameters


def test_a_padded_run_is_estimated_padded() -> None:
    def estimated(**flags: object) -> Estimate:
        config = {**made_record().asked["config"], "per_device_train_batch_size": 16, **flags}
        return estimate_of(made_record(asked={"config": config, "num_processes": 2, "files": {}}))

    plain, padded = estimated(), estimated(pad_widths=True)
    assert padded.tokens_per_second > 1.2 * plain.tokens_per_second
    assert padded.num_trainable_params == plain.num_trainable_params == 130_569_920
    # FFN 2332 to 2368 in three bf16 matrices of nine layers
    assert padded.parts["parameters"] - plain.parts["parameters"] == 2 * 9 * 3 * 36 * 832


def record_of(strategy: Strategy, config: RunConfig, *, num_ranks: int, **changes: object) -> RunRecord:
    """A run of slm-1m as it would be recorded."""
    made = made_record(
        strategy=strategy.name,
        engine=strategy.engine,
        zero_stage=strategy.zero_stage,
        reshard_after_forward=None if strategy.engine == "fsdp1" else strategy.reshard_after_forward,
        asked=everything_asked(config, strategy, num_ranks),
        model=model_facts(SMALL),
        world_size=num_ranks,
        tokens_per_step=num_ranks
        * config.per_device_train_batch_size
        * config.seq_len
        * config.gradient_accumulation_steps,
    )
    return dataclasses.replace(made, **changes)


def config_of(**flags: object) -> RunConfig:
    return RunConfig(model="slm-1m", **flags).with_defaults(has_gpu=True)


def entries_of(record: RunRecord) -> dict[str, LedgerEntry]:
    return {entry.what: entry for entry in ledger_of([(Path("r/record.json"), record)])[0]}


def test_errors_of_a_traced_record_by_hand() -> None:
    # aligned DDP: 2 bytes of parameters, 4 of master weights, 8 of moments per parameter, 951,424 of them
    parts = {"parameters": 1_902_848, "master_weights": 4_000_000, "gradients": 0, "optimizer": 7_611_392}
    peak = {
        "phase": "backward",
        "module": "loss",
        "num_bytes": 213_514_240,  # the state, 13,514,240, and 200,000,000 of all else
        "parts": {**parts, "activations": 150_000_000, "logits_and_loss": 50_000_000},
        "modules": {},
    }
    asked = config_of(rehearse=2)
    record = record_of(find_strategy("ddp"), asked, num_ranks=2, gpu=None, memory_at_peak=peak)
    found = entries_of(record)
    assert "gradients" not in found  # neither predicted nor observed
    assert found["parameters"].error == 0
    assert found["master_weights"].error == pytest.approx(3_805_696 / 4_000_000 - 1)  # -4.86 %
    assert found["optimizer"].error == 0
    assert found["activations_and_temporaries"].observed_bytes == 200_000_000
    whole = found["peak_allocated"]
    assert whole.observed_bytes == 213_514_240
    assert whole.error == pytest.approx(whole.predicted_bytes / 213_514_240 - 1)
    assert whole.within_range is None
    assert row_of([(Path("r"), record)]).estimated_peak_bytes == whole.predicted_bytes


def test_a_gpus_peaks_are_held_against_the_estimate_for_that_gpu_and_its_range() -> None:
    record = record_of(find_strategy("ddp"), config_of(), num_ranks=2)
    estimate = estimate_of(record)
    # cuBLAS keeps 32 MiB on an H100, and nothing where there is no GPU
    assert estimate.peak_allocated_bytes - 2 * 32 * 2**20 == (
        estimate_of(dataclasses.replace(record, gpu=None)).peak_allocated_bytes
    )
    high = estimate.peak_reserved_high_bytes
    allocated = [
        estimate.peak_allocated_bytes // 2,
        estimate.peak_allocated_bytes,
    ]  # the rank with most counts
    inside = entries_of(
        dataclasses.replace(record, peak_allocated_bytes=allocated, peak_reserved_bytes=[0, high])
    )
    assert (inside["peak_allocated"].gpu, inside["peak_allocated"].evidence) == (H100, "measured")
    assert inside["peak_allocated"].error == 0
    assert inside["peak_allocated"].within_range
    assert inside["peak_reserved"].within_range
    outside = entries_of(dataclasses.replace(record, peak_reserved_bytes=[0, high + 1]))
    assert not outside["peak_reserved"].within_range


def test_a_run_on_cpu_without_a_trace_has_its_state_compared_and_no_gradients() -> None:
    state = {"parameters": 1_902_848, "master_weights": 3_805_696, "optimizer": 7_611_392, "gradients": 9}
    cpu = {"gpu": None, "peak_allocated_bytes": None, "peak_reserved_bytes": None}
    found = entries_of(record_of(find_strategy("ddp"), config_of(), num_ranks=2, state_bytes=[state], **cpu))
    assert list(found) == ["training_state", "parameters", "master_weights", "optimizer"]
    # 14 bytes x 951,424
    assert found["training_state"].observed_bytes == found["training_state"].predicted_bytes == 13_319_936


def test_an_old_records_true_means_full_checkpointing() -> None:
    full = record_of(find_strategy("ddp"), config_of(gradient_checkpointing="full"), num_ranks=2)
    config = {**full.asked["config"], "gradient_checkpointing": True}
    for name in ("loss_kernel", "norm_kernel", "rehearse", "trace_memory"):  # came later
        del config[name]
    old = dataclasses.replace(full, asked={**full.asked, "config": config})
    assert estimate_of(old) == estimate_of(full)
    without = record_of(find_strategy("ddp"), config_of(), num_ranks=2)
    assert estimate_of(old).parts != estimate_of(without).parts


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
    (expected,) = estimates(
        {"model": "slm-1m", "gradient_accumulation_steps": 2}, [strategy], gpus=[None], num_gpus=[8]
    )
    assert estimate_of(record).parts == expected.parts


def test_a_run_without_a_closed_form_is_reported_without_an_estimate(tmp_path: Path) -> None:
    def record(stage: int) -> RunRecord:
        section = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        config = {"zero_optimization": section, "data_types": {"grad_accum_dtype": "fp32"}}
        own = own_strategy(tmp_path, "", config, name=f"zero{stage}")
        return record_of(find_strategy(own), config_of(), num_ranks=2)

    assert row_of([(Path("r"), record(2))]).estimated_peak_bytes
    assert row_of([(Path("r"), record(1))]).estimated_peak_bytes is None  # offloaded fp32 sums


def test_what_can_not_be_compared_is_named(tmp_path: Path) -> None:
    oom = made_record(status="oom")
    unknown = made_record(engine="deepspeed", zero_stage=0, strategy="ds_zero0")
    bare = made_record(gpu=None, state_bytes=[], peak_allocated_bytes=None)
    entries, left_out = ledger_of([(Path(str(n)), record) for n, record in enumerate((oom, unknown, bare))])
    assert entries == []
    assert left_out == [
        "0: ended oom",
        "1: this run of ds_zero0 has no estimate",
        "2: has no bytes of a GPU, of a trace or of the training state",
    ]
    write_record(bare, tmp_path)
    done = slm_here("report", str(tmp_path), "--errors")
    assert (done.code, done.out) == (1, "")
    assert "left out" in done.err


def test_a_summary_is_of_whole_figures_by_strategy_and_over_all() -> None:
    first = LedgerEntry(
        *("m", "ddp", 2, None, "measured", "training_state", 90, 100, -0.1, None, None, None, "a")
    )
    second = dataclasses.replace(first, error=0.02, record="b")
    third = dataclasses.replace(first, strategy="ds_zero2", error=0.04, record="c")
    part = dataclasses.replace(first, what="parameters", error=9.0)
    found = summaries([first, part, second, third])
    # of 0.1 and 0.02 the median is 0.06; of 0.1, 0.02 and 0.04 it is 0.04
    assert [(s.strategy, s.num_records, round(s.median_error, 9), s.worst.record) for s in found] == [
        ("ddp", 2, 0.06, "a"),
        ("ds_zero2", 1, 0.04, "c"),
        (None, 3, 0.04, "a"),
    ]


def test_a_narrow_table_cuts_no_figure_and_says_what_is_left_out() -> None:
    entries, _ = ledger_of(find_records([ROOT / "results" / "cpu"])[0])
    console = Console(width=70, color_system=None)
    with console.capture() as capture:
        table = ledger_table(entries, summaries(entries), named={}, width=70)
        console.print(table, crop=False, soft_wrap=True)
    assert "columns that did not fit: evidence, what, parameters, master weights" in capture.get()
    assert "…" not in capture.get()


def test_shipped_records_hold_the_state_that_is_estimated() -> None:
    done = slm_here("report", "results/cpu", "--errors", "--json")
    found = json.loads(done.out)
    assert done.code == 0
    assert [entry["what"] for entry in found].count("training_state") == 6
    assert {entry["evidence"] for entry in found} == {"measured"}
    assert set(found[0]) == {f.name for f in dataclasses.fields(LedgerEntry)}
    assert max(abs(entry["error"]) for entry in found) < 1e-4  # Adam's step counters are not in the estimate


def test_errors_are_printed_alone() -> None:
    done = slm_here("report", "results/cpu", "--errors", "--baseline", "results/cpu")
    assert done.code == 2
    assert "--baseline with --errors" in done.err


def test_cpu_rows_have_no_estimate_beside_the_memory_of_a_process() -> None:
    ((path, record), *_), _ = find_records([ROOT / "results" / "cpu" / "ddp"])
    assert row_of([(path, record)]).estimated_peak_bytes is None
