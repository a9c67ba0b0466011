"""Live settings of models, optimizers and ranks, and whether they are the ones that were asked for."""

import dataclasses

import pytest
import torch
from conftest import made_record

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.record.parity import settings_not_as_asked
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.run.model.model import build_model
from slm_toolkit.run.observe.probe import model_settings, optimizer_settings

CONFIG = RunConfig(model="slm-1m", seq_len=32, numerics="fp32")


def groups(lr: float, *decays: float) -> list[dict]:
    adam = {"lr": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    return [{**adam, "weight_decay": decay} for decay in decays]


@pytest.fixture
def model() -> torch.nn.Module:
    return build_model(PRESETS["slm-1m"], CONFIG)


def test_settings_of_a_model_are_read_off_its_modules(model: torch.nn.Module) -> None:
    settings = model_settings(model)
    # heads of 64, theta 10,000: 32 frequencies from 1 to 10,000^-(62/64) = 0.00013335
    assert settings["rope"] == [{"dtype": "float32", "first": 1, "last": 0.000133352, "sum": 3.99791}]
    alone = {name: settings[name] for name in ("dropout", "norm_eps", "tied", "frozen")}
    assert alone == {"dropout": "none", "norm_eps": "1e-06", "tied": "untied", "frozen": "none"}
    model.model.layers[0].mlp.append = torch.nn.Dropout(0.25)
    model.model.layers[1].self_attn.attention_dropout = 0.5  # which no module drops
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.variance_epsilon = 1e-5
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()
    for param in model.model.layers[1].parameters():
        param.requires_grad_(False)
    changed = model_settings(model)
    assert (changed["dropout"], changed["norm_eps"], changed["tied"]) == (
        "0.25 and 0.5",
        "1e-06 and 1e-05",
        "tied",
    )
    assert changed["rope"][0]["dtype"] == "bfloat16"
    assert changed["frozen"].startswith("9: model.layers.1.self_attn.q_proj.weight, ")


def test_settings_of_an_optimizer_are_those_of_its_next_step(model: torch.nn.Module) -> None:
    matrices = [param for param in model.parameters() if param.dim() == 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [model.model.norm.weight]}]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.0)
    adam.param_groups[1]["lr"] = 5e-4
    both = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-8}
    assert optimizer_settings(adam, None) == [
        {"elements": 950272, "lr": 1e-3, **both, "weight_decay": 0.1},
        {"elements": 128, "lr": 5e-4, **both, "weight_decay": 0},
    ]


def record_with(**numerics: object) -> RunRecord:
    """slm-1m, 33 steps of the default schedule; each keyword is a field of the probe's."""
    config = RunConfig(model="slm-1m", seq_len=128).with_defaults(has_gpu=True)
    asked = {"config": config.identity, "num_processes": 2, "files": {}}
    model = dataclasses.asdict(PRESETS["slm-1m"])
    return made_record(asked=asked, model=model, numerics=numerics)


# at the last of 33 steps: 3e-4 (0.1 + 0.45 (1 + cos(32/33 pi))) = 3.06113e-5
AS_ASKED = {
    "optimizer_settings": groups(3e-4, 0.1, 0),
    "optimizer_settings_at_end": groups(3.06113e-5, 0.1, 0),
    "dropout": "none",
    "rope": [{"dtype": "float32", "last": 0.000133352}],
    "attention_call": [{"mask": "causal", "dropout": 0, "scale": 0.125}],
    "tied": "untied",
    "frozen": "none",
    "master_weight_dtype": "float32",
}


def test_what_was_asked_for_is_no_fault_and_older_records_show_nothing() -> None:
    assert settings_not_as_asked(record_with(**AS_ASKED)) == []
    assert settings_not_as_asked(made_record()) == []
    older = {"optimizer_settings": "lr 1", "rope": "float32 1 to 2", "attention_call": "causal, scale 2"}
    assert settings_not_as_asked(record_with(clipping=1.0, **older)) == []


def call(**changes: object) -> list[dict]:
    return [{"mask": "causal", "dropout": 0, "scale": 0.125, **changes}]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("optimizer_settings", groups(4.5e-4, 0.1, 0), "lr at the first step 0.00045 (not 0.0003)"),
        ("optimizer_settings", groups(3e-4, 0.2, 0), "weight decay at the first step 0.2 (not 0.1)"),
        ("optimizer_settings", groups(3e-4, 0.1), "weight decay of norms at the first step 0.1 (not 0)"),
        ("optimizer_settings_at_end", groups(3e-4, 0.1, 0), "lr at the last step 0.0003 (not 3.06113e-05)"),
        ("optimizer_settings", [{"momentum": 0.95, "lr": 3e-4, "weight_decay": 0}], "optimizer at the first"),
        ("dropout", "0.1", "dropout 0.1 (not none)"),
        ("rope", [{"dtype": "float32", "last": 2.9e-6}], "last of RoPE's frequencies 2.9e-06 (not 0.000133"),
        ("attention_call", call(scale=0.2), "attention scale 0.2 (not 0.125)"),
        ("attention_call", call(mask="none"), "attention mask none (not causal)"),
        ("norm_eps", "1e-05", "eps of the norms 1e-05 (not 1e-06)"),
        ("frozen", "1: lm_head.weight", "not trained: 1: lm_head.weight (not none)"),
        (
            "master_weight_dtype",
            "float32 rounded to bfloat16",
            "master weights are float32 rounded to bfloat16",
        ),
    ],
)
def test_a_setting_that_nobody_asked_for_is_named(field: str, value: object, said: str) -> None:
    found = settings_not_as_asked(record_with(**{**AS_ASKED, field: value}))
    assert any(sentence.startswith(said) for sentence in found), found
