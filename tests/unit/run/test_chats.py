"""Chats, instructions and tokens as training data: loss on the answers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from chats import CHAT, EOS, ROWS, SPEC, TEXT, config_of, write_rows

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run.data.data import load_data
from slm_toolkit.run.data.documents import CHAT_TEMPLATE, documents_of, load_tokenizer


@pytest.mark.parametrize("kind", ROWS)
def test_every_chat_format_has_its_loss_on_the_answers(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(RunConfig(), SPEC)
    tokenizer.chat_template = CHAT_TEMPLATE
    rows = {name: [value] for name, value in ROWS[kind].items()}
    text, answers = TEXT[kind]
    (found,) = documents_of(rows, kind, tokenizer, text_column="text", loss_on="answers")
    assert tokenizer.decode(found.tokens) == text
    assert tokenizer.decode([label for label in found.labels if label != -100]) == answers
    (whole,) = documents_of(rows, kind, tokenizer, text_column="text", loss_on="all")
    assert whole.labels == whole.tokens == found.tokens
    data = load_data(config_of(write_rows(tmp_path / "chat.jsonl", [ROWS[kind]] * 3)), SPEC, num_sequences=0)
    assert data.facts[0]["format"] == kind
    assert data.facts[0]["packing"] == "multipack"
    # the end of text is one token, every other character one byte
    assert data.facts[0]["num_labels"] == 3 * (len(answers) - answers.count(EOS) * (len(EOS) - 1))


def test_rows_of_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 3], "labels": [-100, -100, 7, 8, 3], "attention_mask": [1, 1, 1, 1, 0]},
        {"input_ids": [9, 10], "labels": [9, 10], "attention_mask": [1, 1]},
    ]
    file = write_rows(tmp_path / "tokens.jsonl", rows)
    data = load_data(config_of(file, seq_len=6, packing="multipack"), SPEC, num_sequences=0)
    (row,) = data.train
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 10]
    assert row["labels"].tolist() == [-100, -100, 7, 8, -100, 10]
    bad = write_rows(tmp_path / "bad.jsonl", [{"input_ids": [5, 100_000]}])
    said = r"token 100000, but the model's vocabulary has 384 tokens\nhint: .*another tokenizer"
    with pytest.raises(ValueError, match=said):
        load_data(config_of(bad, seq_len=2), SPEC, num_sequences=0)


def answered(turn: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [CHAT[0], {"role": "assistant", **turn}]}


@pytest.mark.parametrize(
    ("options", "rows", "said"),
    [
        ({"packing": "concat"}, [ROWS["messages"]], "answers would see other chats"),
        ({"dataset_format": "alpaca"}, [ROWS["messages"]], "no column 'instruction'"),
        ({"seq_len": 8}, [ROWS["prompt_completion"]], "no answer fits in 8 tokens"),
        ({}, [answered({"content": "", "tool_calls": [{"id": 1}]})], "or with tool calls"),
        ({}, [answered({"content": None})], "without text in 'role' and 'content'"),
    ],
    ids=str,
)
def test_chats_that_cannot_be_trained_on_are_named(
    options: dict[str, Any], rows: list, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        load_data(config_of(write_rows(tmp_path / "chat.jsonl", rows), **options), SPEC, num_sequences=0)


def test_given_turns_are_not_learnt_and_a_template_that_rewrites_can_be_learnt_whole() -> None:
    tokenizer = load_tokenizer(RunConfig(), SPEC)
    tokenizer.chat_template = CHAT_TEMPLATE
    rows = {"prompt": [CHAT[:3]], "completion": [CHAT[3:]]}
    options = {"tokenizer": tokenizer, "text_column": "text"}
    (found,) = documents_of(rows, "prompt_completion", loss_on="answers", **options)
    assert tokenizer.decode([label for label in found.labels if label != -100]) == f"Five.{EOS}"
    tokenizer.chat_template = "{{ messages | length }}: " + CHAT_TEMPLATE  # how many turns there are in all
    with pytest.raises(ValueError, match="changes earlier turns"):
        documents_of({"messages": [CHAT]}, "messages", loss_on="answers", **options)
    (whole,) = documents_of({"messages": [CHAT]}, "messages", loss_on="all", **options)
    assert whole.labels == whole.tokens
