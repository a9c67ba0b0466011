"""The model card has what the training observed, and a header that the Hugging Face Hub reads."""

import dataclasses

import pytest
from conftest import made_record
from huggingface_hub import ModelCard

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.checkpoint.model_card import model_card

RECORD = made_record(
    identity="1",
    losses=[5.5, None, 4.25],
    eval_losses=[{"step": 3, "loss": 4.5}],
    datasets=[
        {"name": "someone/stories", "packing": "concat"},
        {"name": "/home/me/own.txt", "packing": "concat"},
    ],
    weights="HuggingFaceTB/SmolLM2-135M",
    tokens_counted={"drawn": 12_345},
    command="accelerate launch -m slm_toolkit.train",
)


def test_it_has_data_tokens_losses_versions_and_command() -> None:
    card = model_card(RECORD, RunConfig(seq_len=64))
    for shown in (
        "| data | someone/stories, /home/me/own.txt |",
        "| tokens in this run | 12,345 |",
        "| steps | 3, sequences of 64 tokens |",
        "| training loss | 5.5000 at step 1, 4.2500 at step 3 |",
        "| evaluation loss | 4.5000 at step 3 |",
        f"| versions | slm_toolkit {RECORD.versions.get('slm_toolkit', '')}"
        if "slm_toolkit" in RECORD.versions
        else "",
        "```bash\naccelerate launch -m slm_toolkit.train\n```",
    ):
        assert shown in card


def test_a_resumed_run_names_its_first_step() -> None:
    card = model_card(dataclasses.replace(RECORD, first_step=40), RunConfig())
    assert "| tokens in this run | 12,345, from step 41 on |" in card
    assert "| training loss | 5.5000 at step 41, 4.2500 at step 43 |" in card


def test_it_shows_how_to_load_the_model() -> None:
    record = dataclasses.replace(RECORD, tokenizer="bytes")
    assert "AutoModelForCausalLM.from_pretrained(folder)" in model_card(record, RunConfig())


def test_its_header_names_hub_ids_only() -> None:
    data = ModelCard(model_card(RECORD, RunConfig())).data
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M"
    assert data.datasets == ["someone/stories"]
    assert data.library_name == "transformers"


def test_what_was_not_observed_has_no_row() -> None:
    card = model_card(made_record(identity="2", losses=[], datasets=[], weights=None), RunConfig(peft="lora"))
    assert "loss |" not in card
    assert "| adapter | lora |" in card
    assert ModelCard(card).data.library_name == "peft"
    assert "from_pretrained" not in card


def test_it_does_not_name_the_users_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    command = (
        "accelerate launch --config_file /home/me/ddp.yaml -m slm_toolkit.train --output_dir=/data/home/me/x"
    )
    card = model_card(dataclasses.replace(RECORD, command=command), RunConfig())
    assert "someone/stories, ~/own.txt" in card
    assert "--config_file ~/ddp.yaml" in card
    assert "--output_dir=/data/home/me/x" in card


def test_a_description_of_random_weights_is_not_a_hub_id() -> None:
    weights = "random, seed 0, because /model.json has no weights"
    card = model_card(dataclasses.replace(RECORD, weights=weights), RunConfig())
    assert ModelCard(card).data.base_model is None
