"""What docs/ shows is what the commands beside it print, and what results/ keeps."""

import json
import subprocess
import sys

from conftest import ROOT

FAST_PATH = (ROOT / "docs" / "fast_path.md").read_text()
LABELS = {
    "plain": "no flag",
    "eager_attention": "`--attn_implementation eager`",
    "fused_norm": "`--norm_kernel fused`",
    "fused_mlp": "`--mlp_kernel fused`",
    "fused_loss": "`--loss_kernel fused_linear`",
    "all_fused": "all three",
    "compile": "`--torch_compile`",
    "ours_compile": "`--torch_compile --loss_kernel fused_linear`",
    "unfused_adamw": "`--optim adamw_torch`",
    "pure_bf16": "`--numerics pure_bf16`",
}


def test_the_predicted_table_is_what_its_command_prints() -> None:
    command = (sys.executable, "bench/features.py")
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed in FAST_PATH


def test_the_measured_table_is_what_was_kept() -> None:
    kept = ROOT / "results" / "throughput" / "features-cpu-glibc-bf16.json"
    (model,) = json.loads(kept.read_text())
    for row in model["rows"]:
        middle, low, high = row["against"]["plain"]["speed"]
        cells = f"{row['step_seconds']:.3f} | {middle:.2f} ({low:.2f}-{high:.2f}) | "
        assert f"| {LABELS[row['arm']]} | {cells}{row['peak_bytes'] / 2**20:,.0f} |" in FAST_PATH
    assert {row["arm"] for row in model["rows"]} == LABELS.keys()
