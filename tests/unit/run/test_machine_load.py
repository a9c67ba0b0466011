"""What a watch of the machine's load counts, by hand."""

from __future__ import annotations

import pytest

from slm_toolkit.run.observe import machine_load


def test_the_load_of_other_programs_is_without_that_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"seconds": 0.0, "busy": 0.0, "launch": 0.0}

    def pass_five_seconds(*, busy_cores: float, of_the_launch: float) -> None:
        now["seconds"] += 5
        now["busy"] += 5 * busy_cores
        now["launch"] += 5 * of_the_launch

    monkeypatch.setattr(machine_load.time, "monotonic", lambda: now["seconds"])
    monkeypatch.setattr(machine_load, "_system_busy_seconds", lambda: now["busy"])
    monkeypatch.setattr(machine_load, "_launch_busy_seconds", lambda: now["launch"])
    watch = machine_load.HostWatch()
    pass_five_seconds(busy_cores=1.5, of_the_launch=1)
    assert watch.other_busy_cores() == pytest.approx(0.5)
