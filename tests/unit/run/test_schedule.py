"""The learning rate of each step: by hand, and as transformers' get_scheduler has it."""

import pytest
import torch
from transformers.optimization import get_scheduler

from slm_toolkit.config.run_config import FLAGS, OWN_SCHEDULE, RunConfig
from slm_toolkit.config.schedule import learning_rate, num_decay_steps

OF_TRANSFORMERS = [kind for kind in FLAGS["lr_scheduler_type"].choices if kind != OWN_SCHEDULE]


def rates(num_steps: int, **flags: object) -> list[float]:
    config = RunConfig(learning_rate=1.0, **flags)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        # 8 steps, 2 of warm-up: 6 steps from the peak on; cos(0), cos(pi / 6), cos(2 pi / 6), ...
        ("cosine", [0, 0.5, 1, 0.933013, 0.75, 0.5, 0.25, 0.066987]),
        ("linear", [0, 0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("constant_with_warmup", [0, 0.5, 1, 1, 1, 1, 1, 1]),
        # sqrt(2 / step) from step 2 on
        ("inverse_sqrt", [0, 0.5, 1, 0.816497, 0.707107, 0.632456, 0.577350, 0.534522]),
        # 4 steps of decay: half of 1 + cos(0), cos(pi / 4), cos(pi / 2), cos(3 pi / 4)
        ("warmup_stable_decay", [0, 0.5, 1, 1, 1, 0.853553, 0.5, 0.146447]),
        # 0.1 + 0.9 x the cosine above, and a warm-up that begins at 1 / 2
        (OWN_SCHEDULE, [0.5, 1, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289]),
    ],
)
def test_each_schedule_by_hand(kind: str, by_hand: list[float]) -> None:
    decay = {"lr_decay_steps": 4} if kind == "warmup_stable_decay" else {}
    found = rates(8, lr_scheduler_type=kind, warmup_steps=2, **decay)
    assert found == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
@pytest.mark.parametrize(
    ("num_steps", "warmup_steps", "decay_steps"), [(40, 0, None), (57, 9, 20), (7, 7, 3)]
)
def test_each_step_has_the_rate_of_transformers(
    kind: str, num_steps: int, warmup_steps: int, decay_steps: int | None
) -> None:
    if kind == "constant":
        warmup_steps = 0
    config = RunConfig(
        learning_rate=3e-4,
        lr_scheduler_type=kind,
        warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps if kind == "warmup_stable_decay" else None,
    )
    special = {"num_decay_steps": num_decay_steps(config, num_steps)} if "decay" in kind else None
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    scheduler = get_scheduler(kind, optimizer, warmup_steps, num_steps, scheduler_specific_kwargs=special)
    for step in range(num_steps):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(config, step, num_steps) == pytest.approx(expected, rel=1e-12, abs=1e-18), step
        optimizer.step()
        scheduler.step()


def test_the_decay_takes_a_tenth_of_the_steps_by_default() -> None:
    assert num_decay_steps(RunConfig(), 1000) == 100
    assert num_decay_steps(RunConfig(), 5) == 1
    assert rates(20, lr_scheduler_type="warmup_stable_decay") == pytest.approx([1.0] * 19 + [0.5])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 2},
            "--lr_scheduler_type constant with --warmup_steps 2: constant_with_warmup has a warm-up",
        ),
        ({"lr_decay_steps": 2}, "--lr_decay_steps 2 without --lr_scheduler_type"),
        (
            {"lr_decay_steps": 2, "lr_scheduler_type": "linear"},
            "--lr_decay_steps 2 with --lr_scheduler_type linear: only warmup_stable_decay has such steps",
        ),
        (
            {"lr_decay_steps": 6, "warmup_steps": 5, "max_steps": 10}
            | {"lr_scheduler_type": "warmup_stable_decay"},
            "--warmup_steps 5 and --lr_decay_steps 6 with --max_steps 10: together they are at most as many",
        ),
        (  # 3 steps of warm-up and 30 timed ones by default
            {"lr_decay_steps": 34, "lr_scheduler_type": "warmup_stable_decay"},
            "--warmup_steps 0 and --lr_decay_steps 34 with 33 steps: together they are at most as many",
        ),
        ({"save_strategy": "no", "save_steps": 5}, "--save_strategy no with --save_steps"),
        ({"eval_strategy": "steps"}, "--eval_strategy steps without --eval_steps"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict, says: str) -> None:
    assert RunConfig(**flags).problems() == [says]
