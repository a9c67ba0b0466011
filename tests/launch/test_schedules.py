"""--lr_scheduler_type, --adam_epsilon and --logging_steps, read off the live optimizers of two engines."""

import json
import re
from pathlib import Path

import pytest
from conftest import Comparison, compare

FLAGS = (
    *("--lr_scheduler_type", "cosine", "--warmup_steps", "2"),
    *("--max_steps", "8", "--learning_rate", "1e-3", "--adam_epsilon", "1e-6", "--model", "slm-1m"),
    *("--seq_len", "32", "--logging_steps", "2"),
    *("--report_to", "tensorboard"),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("schedules")
    return compare("--strategy", "ddp", "ds_zero2", *FLAGS, folder=folder)


def test_each_engine_steps_with_the_rate_and_epsilon_asked(both: Comparison) -> None:
    for row in both.rows.values():
        assert row["status"] == "ok", row["reason"]
        assert row["losses"] == pytest.approx(both.rows["ddp"]["losses"], abs=0.01)
        # a warm-up from 0; at the last step, half of 1 + cos(5 pi / 6) of the peak
        for line, rate in (("optimizer_settings", 0), ("optimizer_settings_at_end", 6.69873e-5)):
            groups = json.loads(Path(row["record"]).read_text())["numerics"][line]
            assert len(groups) == 2
            for group in groups:
                assert group["lr"] == pytest.approx(rate, rel=1e-5)
                assert group["eps"] == 1e-6


def test_every_second_step_is_logged_with_the_mean_loss(both: Comparison) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for row in both.rows.values():
        folder = Path(row["record"]).parent
        log = events.EventAccumulator(str(folder / "slm_toolkit"))
        log.Reload()
        assert [event.step for event in log.Scalars("loss")] == [2, 4, 6, 8]
        pairs = zip(row["losses"][::2], row["losses"][1::2], strict=True)
        expected = [sum(pair) / 2 for pair in pairs]
        assert [event.value for event in log.Scalars("loss")] == pytest.approx(expected, rel=1e-5)
        # steps 2, 4, 6 and 8: the warm-up's middle, and cosines of pi / 6, pi / 2 and 5 pi / 6
        rates = [event.value for event in log.Scalars("learning_rate")]
        assert rates == pytest.approx([5e-4, 9.33013e-4, 5e-4, 6.69873e-5], rel=1e-5)
        lines = re.findall(r"^step (\d)/8 ", (folder / "log.txt").read_text(), re.M)
        assert lines == ["2", "4", "6", "8"]
