"""The kernels and batch that a verb chooses: the same in every verb, and near the best measured ones."""

import json

import pytest
from conftest import H100, ROOT, slm_here

from slm_toolkit import api
from slm_toolkit.compare import comparison
from slm_toolkit.config.run_config import FLAGS, RunConfig, in_todays_names
from slm_toolkit.hardware import machine
from slm_toolkit.hardware.gpus import Machine, gpu_of_name
from slm_toolkit.predict import choices as module
from slm_toolkit.predict.choices import choices, completed
from slm_toolkit.strategy.strategy import find_strategy

DDP = find_strategy("ddp")


def chosen(config: RunConfig, *, gpu: str | None = None, **options: object) -> tuple[str, int]:
    found = gpu and gpu_of_name(gpu)
    asked = {"gpu": found, "has_gpu": True, "num_gpus": 1, "is_comparison": True, **options}
    values, _ = choices([config], [DDP], **asked)
    return values.get("kernels"), values.get("per_device_train_batch_size")


@pytest.mark.parametrize("card", ["h100-80gb", "h200"])
def test_the_default_is_within_5_percent_of_the_best_measured_row(card: str) -> None:
    measured: dict[str, dict[tuple, float]] = {}
    for line in (ROOT / "results" / card / "arms.jsonl").read_text().splitlines():
        arm = json.loads(line)
        rate = (arm.get("result") or {}).get("tokens_per_second")
        if arm["part"] not in ("ladder", "rungs") or not rate or "padded" in arm["name"]:
            continue  # --pad_widths makes another model
        words = arm["command"]
        asked = {name: f"--{name}" in words for name in ("torch_compile", "triton_loss")}
        for name in ("loss_kernel", "norm_kernel", "optim", "model", "per_device_train_batch_size"):
            asked[name] = words[words.index(f"--{name}") + 1] if f"--{name}" in words else None
        batch = int(asked["per_device_train_batch_size"])
        parts = frozenset(FLAGS["kernels"].parts_of(in_todays_names(asked)["kernels"]))
        measured.setdefault(asked["model"], {})[parts, batch] = rate
    assert len(measured) >= 5
    for model, rates in measured.items():
        kernels, batch = chosen(RunConfig(model=model), gpu=card)
        parts = frozenset(FLAGS["kernels"].parts_of(kernels))
        # the presets without -hw were not measured with Triton's kernels, which are faster
        found = rates.get((parts, batch)) or rates.get((parts - {"triton"}, batch))
        best = max(rates, key=rates.get)
        if found is None:  # a batch that was not measured: by the estimates of both
            asked = {"model": model, "gpu": card, "num_gpus": 1, "strategy": "single"}
            chosen_one, best_one = (
                api.estimate(**asked, kernels="+".join(names), per_device_train_batch_size=size)[0]
                for names, size in ((parts, batch), best)
            )
            found = rates[best] * chosen_one.tokens_per_second / best_one.tokens_per_second
        assert found >= 0.95 * rates[best], (model, kernels, batch)


def test_all_verbs_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = api.estimate(model="slm-1b", gpu="h100-80gb", num_gpus=1, strategy="single")
    of_estimate = (row.kernels, row.per_device_train_batch_size)
    assert of_estimate == ("compiled", 32)

    monkeypatch.setattr(module, "find_spec", lambda name: True)  # Triton, as on a GPU
    monkeypatch.setattr(comparison, "this_machine", lambda: Machine(1, H100))
    planned = slm_here("compare", "--dry_run", "--strategy", "single", "--model", "slm-1b")
    assert planned.code == 0, planned.err
    assert "--kernels compiled --per_device_train_batch_size 32" in planned.out.replace("--seq_len 1024 ", "")

    monkeypatch.setattr(module, "gpus_here", lambda: (H100,))
    asked = RunConfig(model="slm-1b", max_steps=2000)
    config, notes = completed(asked, find_strategy("single"), has_gpu=True, num_ranks=1)
    assert (config.kernels, config.per_device_train_batch_size) == of_estimate
    assert len(notes) == 2

    assert api.recommend(model="slm-1b", gpu="h100-80gb:1", tokens=1e9)[0].config.kernels == "compiled"


def test_the_batch_fits_with_the_kernels_that_are_chosen() -> None:
    for max_steps in (20, 5000):
        config = RunConfig(model="slm-500m", max_steps=max_steps)
        kernels, batch = chosen(config, gpu="a100-40gb", is_comparison=False)
        size = {"kernels": kernels, "per_device_train_batch_size": batch}
        (row,) = api.estimate(model="slm-500m", gpu="a100-40gb", num_gpus=1, strategy="ddp", **size)
        assert row.fit_probability >= 0.95


def test_what_is_given_stays_and_decides_about_the_rest() -> None:
    one = RunConfig(model="slm-1b", kernels="plain")
    assert chosen(one, gpu="h100-80gb") == (None, 16)
    assert chosen(RunConfig(model="slm-1b", per_device_train_batch_size=2), gpu="h100-80gb")[1] is None
    assert chosen(RunConfig(numerics="fp16"), gpu="a100-80gb")[0] == "norm+triton+compile"
    assert chosen(RunConfig(model="slm-1b", rehearse=8), gpu="h100-80gb")[0] == "fused"
    assert chosen(RunConfig(model="slm-1b")) == ("compiled", 4)  # an unknown GPU


def test_a_short_run_does_not_pay_for_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = {"model": "slm-1b"}, {"gpu": "h100-80gb", "is_comparison": False}
    on_cpu = {"model": "slm-10m"}, {"has_gpu": False, "num_gpus": 2}
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    for (model, run), length, kernels in (
        *((on_gpu, {"max_steps": 20}, "fused"), (on_gpu, {"max_steps": 5000}, "compiled")),
        *((on_gpu, {"max_tokens": "2M"}, "fused"), (on_gpu, {}, "compiled")),  # nobody said how long
        *((on_cpu, {"max_steps": 33}, "fused"), (on_cpu, {"max_steps": 5000}, "compiled")),
    ):
        assert chosen(RunConfig(**model, **length), **run)[0] == kernels, (model, length)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)  # no compiler
    assert chosen(RunConfig(model="slm-1b"), gpu="h100-80gb", runs_here=True)[0] == "loss+norm"
