"""The learning rate of each step: by hand, and as transformers' get_scheduler has it."""

import pytest
import torch
from transformers.optimization import get_scheduler

from slm_toolkit.config.run_config import FLAGS, OWN_SCHEDULE, RunConfig
from slm_toolkit.config.schedule import learning_rate

OF_TRANSFORMERS = [kind for kind in FLAGS["lr_scheduler_type"].choices if kind != OWN_SCHEDULE]


def rates(num_steps: int, **flags: object) -> list[float]:
    config = RunConfig(learning_rate=1.0, **flags)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        # 8 steps, 2 of warm-up: 6 steps from the peak on; cos(0), cos(pi / 6), cos(2 pi / 6), ...
        ("cosine", [0, 0.5, 1, 0.933013, 0.75, 0.5, 0.25, 0.066987]),
        # 0.1 + 0.9 x the cosine above, and a warm-up that begins at 1 / 2
        (OWN_SCHEDULE, [0.5, 1, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289]),
    ],
)
def test_each_schedule_by_hand(kind: str, by_hand: list[float]) -> None:
    found = rates(8, lr_scheduler_type=kind, warmup_steps=2)
    assert found == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(40, 0), (57, 9), (7, 7)])
def test_each_step_has_the_rate_of_transformers(kind: str, num_steps: int, warmup_steps: int) -> None:
    if kind == "constant":
        warmup_steps = 0
    config = RunConfig(learning_rate=3e-4, lr_scheduler_type=kind, warmup_steps=warmup_steps)
    special = {"num_decay_steps": max(1, num_steps // 10)} if "decay" in kind else None
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    scheduler = get_scheduler(kind, optimizer, warmup_steps, num_steps, scheduler_specific_kwargs=special)
    for step in range(num_steps):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(config, step, num_steps) == pytest.approx(expected, rel=1e-12, abs=1e-18), step
        optimizer.step()
        scheduler.step()


def test_a_constant_rate_has_no_warm_up() -> None:
    (problem,) = RunConfig(lr_scheduler_type="constant", warmup_steps=2).problems()
    assert "constant_with_warmup has a warm-up" in problem
