"""Read the rows of a dataset, and turn them into documents: tokens with labels.

Rows come from local files, from a folder that `datasets` saved, or from the hub. They contain text, chats in
four formats, or tokens.
"""

import glob
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import DISK_FULL, first_line
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.dataset_files import FILE_FORMATS, Source, is_saved_dataset, local_files
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import check_hub, tokenizer_of
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX

STREAM_ABOVE_BYTES = 2**30


def read_rows(source: Source, config: RunConfig) -> tuple[Any, bool, str]:
    """Return the rows of one dataset, read by `datasets`; True if they are streamed; and their format.

    Raises ValueError, with a hint, for data that does not exist, can't be read or is empty.
    """
    files = [] if is_saved_dataset(source.path) else local_files(source.path)
    try:
        rows, streaming = _load(source, files, config)
        if streaming:
            rows = StreamedRows(rows, source.path)
        first = next(iter(rows), None)
    except Exception as error:  # datasets raises its own errors and pyarrow's
        if "\nhint: " in str(error):
            raise
        cause = error if isinstance(error, OSError) else error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            raise cause from None  # the cache's disk is full
        raise ValueError(
            f"can't read dataset {source.path!r}: {first_line(cause)}\n"
            "hint: give a hub id, or well-formed .txt (UTF-8), .jsonl or .parquet files"
        ) from None
    if first is None:
        raise ValueError(f"{source.path} contains no text: it has no rows\nhint: give files with text")
    kind = format_of(first, source.path, asked=config.dataset_format, text_column=config.text_column)
    return rows, streaming, kind


def _load(source: Source, files: list[str], config: RunConfig) -> tuple[Any, bool]:
    from datasets import load_dataset, load_dataset_builder, load_from_disk

    path = source.path
    if is_saved_dataset(path):
        rows = load_from_disk(str(typed_path(path))).with_format(None)
        return (rows.to_iterable_dataset(), True) if config.streaming else (rows, False)
    if files:
        kinds = sorted({FILE_FORMATS[Path(file).suffix.lower()] for file in files})
        if len(kinds) > 1:
            raise ValueError(f"{path} mixes {', '.join(kinds)} files\nhint: select one kind with a glob")
        origin = {"path": kinds[0], "data_files": [glob.escape(file) for file in files]}
        if kinds == ["text"]:
            origin["sample_by"] = "document"  # one row per file
        size_bytes = sum(Path(file).stat().st_size for file in files)
    else:
        check_hub(path, "dataset")
        origin = {"path": path, "name": source.configuration}
        size_bytes = load_dataset_builder(**origin).info.download_size or math.inf  # unknown: may be huge
    streaming = config.streaming if config.streaming is not None else size_bytes > STREAM_ABOVE_BYTES
    return load_dataset(**origin, split="train", streaming=streaming), streaming


class BadData(ValueError):
    """A dataset can't be read; the message names the file and the place, with a hint."""


@dataclass(frozen=True)
class StreamedRows:
    """Rows of a stream; every pass reads them again. Raises BadData, which names the place of the error."""

    rows: Any
    path: str
    "as the user gave it"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        try:
            for number, row in enumerate(self.rows, start=1):  # noqa: B007 - for the error
                yield row
        except Exception as error:  # datasets raises its own errors, pyarrow's and Python's
            raise BadData(
                f"{self.path}, after {number:,} rows: {type(error).__name__}: {first_line(error)}\n"
                "hint: correct or remove that row or file, then start again; a resumed stream reads the same "
                "rows again"
            ) from error


# Documents of rows

_COLUMNS = {  # format: the columns that it needs; `auto` takes the first format that fits a row
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
CHATS = ("messages", "sharegpt", "prompt_completion", "alpaca")
_SHAREGPT_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "model"), "assistant")}


@dataclass(frozen=True)
class Document:
    """Tokens with labels. A label is its own token, predicted by the token before, or IGNORE_INDEX."""

    tokens: list[int]
    labels: list[int]


def format_of(row: dict[str, Any], path: str, *, asked: str, text_column: str) -> str:
    """Return the format of a dataset, found in its first row. Raises ValueError if the row lacks a column.

    `asked`: the value of --dataset_format.
    """
    if asked == "auto":
        fitting = (kind for kind, needed in _COLUMNS.items() if row.keys() >= set(needed))
        asked = "text" if text_column != "text" else next(fitting, "text")
    if missing := [column for column in _COLUMNS.get(asked, (text_column,)) if column not in row]:
        raise ValueError(
            f"{path} has no column {missing[0]!r} (columns: {', '.join(row) or 'none'})\n"
            "hint: name the column of the text with --text_column, or the format with --dataset_format"
        )
    return asked


def documents_of(
    rows: dict[str, list[Any]], kind: str, tokenizer: Any, *, text_column: str, loss_on: str
) -> list[Document]:
    """Return the documents of rows, which are given by column. Leave out blank rows and chats without labels.

    Raises ValueError for a row that does not fit its format, or that the tokenizer can't read.
    """
    if kind == "tokens":
        return _of_tokens(rows)
    if kind == "text":
        if not_text := [text for text in rows[text_column] if not isinstance(text, str | None)]:
            raise ValueError(
                f"column {text_column!r} contains {str(not_text[0])[:80]}, which is not text\n"
                "hint: name another column with --text_column"
            )
        texts = [text for text in rows[text_column] if text and text.strip()]
        return _tokenized([([(text, True)], True) for text in texts], tokenizer)
    chats = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    documents = _tokenized([_pieces(chat, kind, tokenizer, loss_on=loss_on) for chat in chats], tokenizer)
    return [document for document in documents if any(label != IGNORE_INDEX for label in document.labels[1:])]


def _pieces(
    row: dict[str, Any], kind: str, tokenizer: Any, *, loss_on: str
) -> tuple[list[tuple[str, bool]], bool]:
    """Return a chat's pieces, each (text, has a loss), and True if the row is two plain texts.

    Raises ValueError if the row is not a conversation, or contains more than text.
    """
    if kind == "prompt_completion" and isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return [(row["prompt"], loss_on == "all"), (row["completion"], True)], True  # as in TRL
    role, content, num_given = "role", "content", 1  # a first answer has no loss
    if kind == "alpaca":
        question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    elif kind == "prompt_completion":
        turns, num_given = [*row["prompt"], *row["completion"]], len(row["prompt"])
    elif kind == "sharegpt":
        turns, role, content = row["conversations"], "from", "value"
    else:
        turns = row["messages"]
    if not turns:
        raise _not_a_chat("a conversation has no turns", row)
    messages = [_turn(turn, role, content) for turn in turns]
    if loss_on == "all":
        return [(_rendered(messages, tokenizer), True)], False
    return _turns(messages, tokenizer, first=num_given), False


def _turn(turn: Any, role: str, content: str) -> dict[str, str]:
    text = turn.get(content) if isinstance(turn, dict) else None
    if isinstance(text, list):
        parts = [part.get("text") for part in text]
        text = "".join(parts) if all(parts) else None
    if not isinstance(text, str) or not isinstance(turn.get(role), str) or turn.get("tool_calls"):
        raise _not_a_chat(
            f"a conversation has a turn without text in {role!r} and {content!r}, or with tool calls", turn
        )
    return {"role": _SHAREGPT_ROLES.get(turn[role], turn[role]), "content": text}


def _not_a_chat(problem: str, row: Any) -> ValueError:
    hint = "remove such rows, or name the format with --dataset_format"
    return ValueError(f"{problem}: {str(row)[:80]}\nhint: {hint}")


def _turns(messages: list[dict[str, str]], tokenizer: Any, *, first: int) -> list[tuple[str, bool]]:
    """Render a conversation with the chat template and cut it into pieces: (text, is an answer).

    An answer begins where generation would begin, and ends with its last character that is not blank.
    Answers before turn `first` have no loss, nor has an answer that is the first turn.
    Raises ValueError for a template that changes earlier turns when later turns are added.
    """
    pieces: list[tuple[str, bool]] = []
    whole, done = _rendered(messages, tokenizer), 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < max(1, first):
            continue
        before = _rendered(messages[:number], tokenizer, add_generation_prompt=True)
        after = _rendered(messages[: number + 1], tokenizer).rstrip()
        after = after if len(after) >= len(before) else before  # an empty answer
        if not (after.startswith(before) and whole.startswith(after)):
            raise ValueError(
                "the chat template changes earlier turns, so the answers can't be located in the text\n"
                "hint: use --loss_on all, or a tokenizer whose template only appends"
            )
        pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [*pieces, (whole[done:], False)]


def _rendered(messages: list[dict[str, str]], tokenizer: Any, **options: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template is a program: it may divide by zero, recurse, raise
        raise ValueError(
            f"the chat template fails on a conversation: {(str(error) or type(error).__name__)[:200]}\n"
            f"hint: correct the template, or remove the conversation, which begins: {str(messages)[:80]}"
        ) from None


def _tokenized(pieces: list[tuple[list[tuple[str, bool]], bool]], tokenizer: Any) -> list[Document]:
    """Tokenize documents. Tokenize each piece alone, as a prompt is tokenized when a model answers it.

    `pieces`: of each document, and True to append an end-of-text token, which has a label.
    """
    texts = [text for document, _ in pieces for text, _ in document]
    with tokenizer_errors("the tokenizer fails"):
        tokenized = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    documents = []
    for document, is_ended in pieces:
        tokens, labels = [], []
        for _, has_loss in document:
            piece = next(tokenized)
            tokens += piece
            labels += piece if has_loss else [IGNORE_INDEX] * len(piece)
        end = [tokenizer.eos_token_id] * is_ended
        documents.append(Document(tokens + end, labels + end))
    return documents


def _of_tokens(rows: dict[str, list[Any]]) -> list[Document]:
    """Return the documents of rows that are tokens already, without the tokens that attention_mask masks."""
    documents = []
    for index, tokens in enumerate(rows["input_ids"]):
        if tokens is None:
            continue
        labels, mask = (
            rows[name][index] if rows.get(name) else None for name in ("labels", "attention_mask")
        )
        labels = tokens if labels is None else labels
        mask = [1] * len(tokens) if mask is None else mask
        if not len(tokens) == len(labels) == len(mask) or min([*tokens, *mask], default=0) < 0:
            raise ValueError(
                f"a row has {len(tokens)} input_ids, {len(labels)} labels and {len(mask)} values of "
                "attention_mask\nhint: give equally many whole numbers, tokens of at least 0"
            )
        if kept := list(compress(tokens, mask)):
            documents.append(Document(kept, list(compress(labels, mask))))
    return documents


# Load the tokenizer of a run. Refuse a tokenizer that the model or this machine can't use.

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"used if the tokenizer has no template; every turn ends with the end-of-text token, where generation stops"


def load_tokenizer(config: RunConfig, spec: ModelSpec) -> Any:
    """Load the tokenizer: --tokenizer_name's, the model's, or ByT5's bytes, which need no download."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    name = tokenizer_of(config, spec)
    if name is None:
        tokenizer = ByT5Tokenizer()
    else:
        if not exists(typed_path(name)):
            check_hub(name, "tokenizer")
        with tokenizer_errors(f"can't load tokenizer {name!r}"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    vocabulary = tokenizer.get_vocab()
    if tokenizer.eos_token_id is None or vocabulary.keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"tokenizer {name!r} has no tokens for text, or no end-of-text token to put between documents\n"
            "hint: set its eos_token, or use --tokenizer_name byte"
        )
    token, largest = max(vocabulary.items(), key=lambda pair: pair[1])
    if largest >= spec.vocab_size:  # ids may have gaps
        raise ValueError(
            f"tokenizer {name or 'byte'!r} has the id {largest} for {token!r}, but model {spec.name} "
            f"only ids below {spec.vocab_size}\n"
            "hint: choose a model with a larger vocabulary, or --tokenizer_name byte"
        )
    return tokenizer


@contextmanager
def tokenizer_errors(problem: str) -> Iterator[None]:
    """Turn a tokenizer's errors into ValueError: bare Exceptions and Rust's panics (BaseExceptions)."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"{problem}: {first_line(error)}\nhint: use --tokenizer_name byte, which needs no tokenizer files"
        ) from None
