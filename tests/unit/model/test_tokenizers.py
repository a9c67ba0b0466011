"""Text needs the model's tokenizer: bytes under another vocabulary are refused before anything starts."""

import json
from pathlib import Path

import pytest
from conftest import SMALL_LLAMA, slm_here

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import NUM_BYTE_TOKENS, PRESETS
from slm_toolkit.model.names import check_tokenizer, find_model

TEXT = ("--dataset", "README.md")


def own_config(folder: Path, *, vocab_size: int) -> str:
    (folder / "config.json").write_text(json.dumps({**SMALL_LLAMA, "vocab_size": vocab_size}))
    return str(folder / "config.json")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("train", "--model", "qwen2.5-1.5b", "--num_machines", "2"), "Qwen/Qwen2.5-1.5B"),
        (("compare", "--model", "slm-1m", "slm-100m"), "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
        (("compare", "--model", "OWN"), "HUB_ID_OR_FOLDER"),
    ],
)
def test_text_with_a_model_of_another_vocabulary_is_refused(
    command: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    own = own_config(tmp_path, vocab_size=1000)
    done = slm_here(*(own if word == "OWN" else word for word in command), *TEXT)
    assert done.code == 2
    message, hint = done.err.strip().splitlines()[-2:]
    assert message.startswith("error: --dataset README.md: model ")
    assert message.endswith(" tokens, but no tokenizer")
    assert hint.startswith(f"hint: --tokenizer_name {named}")
    assert "; --tokenizer_name byte trains on bytes" in hint


def test_byte_insists_and_models_of_bytes_need_no_tokenizer(tmp_path: Path) -> None:
    check_tokenizer(RunConfig(dataset="a.md"), find_model(own_config(tmp_path, vocab_size=NUM_BYTE_TOKENS)))
    for flags in (
        {},  # synthetic tokens
        {"dataset": "a.md", "tokenizer_name": "byte"},
        {"dataset": "a.jsonl", "dataset_format": "tokens"},
        {"dataset": "a.md", "rehearse": 8},
    ):
        check_tokenizer(RunConfig(**flags), PRESETS["slm-2b"])


def test_a_model_with_a_tokenizer_beside_it_brings_it(tmp_path: Path) -> None:
    own = find_model(own_config(tmp_path, vocab_size=1000))
    (tmp_path / "tokenizer.json").write_text("{}")
    check_tokenizer(RunConfig(dataset="a.md"), own)
