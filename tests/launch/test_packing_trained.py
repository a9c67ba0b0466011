"""Packed documents in a real training under DDP."""

from pathlib import Path

import pytest
from conftest import ROOT, launch, record_under, write_documents

SEQ_LEN = 48


def test_packings_train_alike_under_ddp_and_report_their_waste(tmp_path: Path) -> None:
    file = write_documents(tmp_path, [30, 12, 25, 18, 40, 7, 33, 10] * 8)
    flags = f"--model slm-1m --seq_len {SEQ_LEN} --max_steps 2 --dataset {file} --packing multipack".split()
    records = []
    for name, micro_steps in (("ddp", "2"), ("single", "4")):
        batch = ["--gradient_accumulation_steps", micro_steps, "--output_dir", str(tmp_path / name)]
        done = launch(*flags, *batch, config=ROOT / "accel_configs" / f"{name}.yaml")
        assert done.code == 0, done.err
        records.append(record_under(tmp_path / name))
    two, one = records
    # all 16 sequences of a step are the same on one rank and on two: every token counts alike, wherever it is
    assert two["losses"] == pytest.approx(one["losses"], abs=2e-3)
    assert 0 < two["num_padding_tokens"] == one["num_padding_tokens"]
    assert two["datasets"][0]["packing"] == "multipack"
