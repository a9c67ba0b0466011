"""Data that goes bad ends a run in one line that names rank, file and place."""

import json
import os
from pathlib import Path

import pytest
from training_faults import launch_with_fault

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.run.data.data import load_data
from slm_toolkit.run.data.documents import BadData

TEXT = "the quick brown fox jumps over the lazy dog " * 3
GOOD = json.dumps({"text": TEXT})


def lines(path: Path, odd: str, *, at_line: int, num_lines: int) -> Path:
    """A .jsonl with one odd line, counted from 1."""
    path.write_text("\n".join(odd if n == at_line else GOOD for n in range(1, num_lines + 1)) + "\n")
    return path


def config_of(path: Path, **flags: object) -> RunConfig:
    asked = {"model": "slm-1m", "dataset": str(path), "seq_len": 64, "max_steps": 4, **flags}
    return RunConfig(**asked).with_defaults(has_gpu=False)


def load_and_read(path: Path, *, streaming: bool) -> None:
    config = config_of(path, streaming=streaming)
    for _ in load_data(config, PRESETS["slm-1m"], num_sequences=0).train:
        continue


@pytest.mark.quick
def test_a_bad_conversation_is_named_by_its_row(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "hi"}
    good = {"messages": [turn, {"role": "assistant", "content": "yes"}]}
    rows = [good] * 1500 + [{"messages": []}] + [good] * 10
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    for streaming in (True, False):
        with pytest.raises(ValueError, match=r"chats\.jsonl, row 1,501: a conversation has no turns"):
            load_and_read(path, streaming=streaming)


@pytest.mark.quick
def test_a_file_that_is_gone_when_the_run_begins_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    os.symlink(tmp_path / "nowhere", tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"b\.txt is a broken link, a folder or a pipe\nhint: "):
        load_and_read(tmp_path / "*.txt", streaming=False)


@pytest.mark.quick
def test_a_streamed_file_that_vanishes_is_named_when_its_rows_are_due(tmp_path: Path) -> None:
    config = config_of(tmp_path, streaming=True)
    for name in ("a", "b"):
        lines(tmp_path / f"{name}.jsonl", GOOD, at_line=1, num_lines=50)
    sequences = iter(load_data(config, PRESETS["slm-1m"], num_sequences=0).train)
    next(sequences)
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(BadData, match=r"after 50 rows: FileNotFoundError: .*b\.jsonl"):
        list(sequences)


def test_a_row_that_breaks_a_stream_at_some_step_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    # a line has 133 bytes with its end, a step 8 sequences of 32: line 80 comes at step 80 * 133 / 256 = 41
    path = lines(tmp_path / "deep.jsonl", '{"text": ["a"]}', at_line=80, num_lines=400)
    faulty = launch_with_fault(
        *(tmp_path, "--dataset", str(path), "--streaming", "--max_steps", "100", "--save_steps", "20"),
        at_line=("checkpoints/step_40", lambda: None),  # the time is counted from there
    )
    assert faulty.code == 1
    (message,) = faulty.messages
    assert message.startswith("error: rank ")
    assert f"{path}, row 80: column 'text' contains ['a'], which is not text" in message
    assert "[rank" not in faulty.err, "no rank shows a traceback"
    assert "--resume_from_checkpoint latest resumes from" in faulty.hint
    assert (faulty.record["status"], faulty.record["reason"]) == ("failed", message.removeprefix("error: "))


def chats(path: Path) -> Path:
    turns = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown the quick"}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    return path


def tokenizer(folder: Path, *, vocab: dict[str, int], template: str = "x", **parts: object) -> Path:
    """A tokenizer of whole words, as anybody may publish one."""
    folder.mkdir()
    whole = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None},
        **{"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole | parts))
    names = {"eos_token": "</s>", "unk_token": "[UNK]", "chat_template": template}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | names))
    return folder


WORDS = {"</s>": 0, "[UNK]": 1, "the": 2, "quick": 3, "brown": 4}


def load_with_tokenizer(data: Path, folder: Path) -> None:
    config = config_of(data, tokenizer_name=str(folder), seq_len=16)
    load_data(config, PRESETS["slm-1m"], num_sequences=0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth exceeded"),
    ],
    ids=["zero", "recursion"],
)
def test_a_chat_template_that_fails_is_refused_by_row(template: str, said: str, tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "mine", vocab=WORDS, template=template)
    with pytest.raises(BadData, match=rf"chats\.jsonl, row 1: the chat template fails .*{said}.*\nhint: "):
        load_with_tokenizer(chats(tmp_path / "chats.jsonl"), folder)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("vocab", "parts", "said"),
    [
        ({**WORDS, "the": 700_000}, {}, "has the id 700000 for 'the', but model slm-1m only ids below 384"),
        ({}, {}, "has no tokens for text"),
        ({"</s>": 0, "zzz": 1}, {}, "the tokenizer fails: WordLevel error: Missing"),
    ],
    ids=["an id too large", "no vocabulary", "no unknown token"],
)
def test_a_tokenizer_that_does_not_fit_the_model_or_its_text_is_refused(
    vocab: dict[str, int], parts: dict, said: str, tmp_path: Path
) -> None:
    folder = tokenizer(tmp_path / "mine", vocab=vocab, **parts)
    with pytest.raises(ValueError, match=rf"{said}.*\nhint: "):
        load_with_tokenizer(lines(tmp_path / "a.jsonl", "", at_line=0, num_lines=4), folder)


@pytest.mark.quick
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_name_with_globs_characters_is_a_file(streaming: bool, tmp_path: Path) -> None:
    (tmp_path / "[d]").mkdir()
    for path in (tmp_path / "[x].jsonl", tmp_path / "a*b?.jsonl", tmp_path / "[d]" / "[y].jsonl"):
        load_and_read(lines(path, "", at_line=0, num_lines=10), streaming=streaming)
    load_and_read(tmp_path / "[d]", streaming=streaming)
    with pytest.raises(ValueError, match=r"a::b\.jsonl: '::' in its name\nhint: rename"):
        load_and_read(lines(tmp_path / "a::b.jsonl", "", at_line=0, num_lines=10), streaming=streaming)


@pytest.mark.quick
def test_a_json_file_is_read_the_same_whole_and_streamed(tmp_path: Path) -> None:
    """Lines, an array, objects over several lines, a byte order mark; a column that begins late is kept."""
    rows = [{"instruction": "do", "output": "yes"}, {"instruction": "do", "input": "it", "output": "no"}] * 4
    texts = {
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "b.json": json.dumps(rows),
        "c.json": "[\n" + ",\n".join(json.dumps(row, indent=2) for row in rows) + "\n]\n",
        "d.jsonl": "\n".join(json.dumps(row, indent=1) for row in rows),
        "e.jsonl": "\ufeff\n" + "\n\n".join(json.dumps(row) for row in rows),
    }
    found = set()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        for streaming in (False, True):
            config = config_of(tmp_path / name, streaming=streaming)
            train = load_data(config, PRESETS["slm-1m"], num_sequences=0).train
            found.add(tuple(tuple(sequence["input_ids"].tolist()) for sequence in train))
    assert len(found) == 1
