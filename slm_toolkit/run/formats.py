"""Rows of text, of chats in four formats and of tokens, each made a document: tokens and their labels."""

from dataclasses import dataclass
from typing import Any

from slm_toolkit.run.loss_kernels import IGNORE_INDEX

_COLUMNS = {  # format: columns that it needs; `auto` takes the first that a row has
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
CHATS = ("messages", "sharegpt", "prompt_completion", "alpaca")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


@dataclass(frozen=True)
class Document:
    """Tokens, and for each the label that the token before it predicts: itself, or IGNORE_INDEX."""

    tokens: list[int]
    labels: list[int]


def format_of(row: dict[str, Any], path: str, *, asked: str, text_column: str) -> str:
    """The format of a dataset from its first row. Raises ValueError where it is not what was asked."""
    found = asked
    if asked == "auto":
        chosen = text_column != "text" and text_column in row
        fitting = [kind for kind, needed in _COLUMNS.items() if all(column in row for column in needed)]
        found = "text" if chosen or not fitting else fitting[0]
    needed = _COLUMNS.get(found, (text_column,))
    missing = [column for column in needed if column not in row]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]!r} (columns: {', '.join(row) or 'none'})\n"
            + (
                "hint: --text_column names it"
                if found == "text"
                else "hint: --dataset_format says what it holds"
            )
        )
    kinds = {"text": str, "tokens": list, "messages": list, "sharegpt": list, "alpaca": str}
    value = row[needed[0]]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if found in kinds and not isinstance(value, kinds[found]):
        raise ValueError(
            f"{path}: column {needed[0]!r} holds {type(value).__name__}, not "
            f"{'text' if kinds[found] is str else 'a list'}\n"
            + ("hint: --text_column names another" if found == "text" else "hint: see --dataset_format")
        )
    return found


def documents_of(
    rows: dict[str, list[Any]], kind: str, tokenizer: Any, *, text_column: str, loss_on: str
) -> list[Document]:
    """The documents of some rows, given by column; blank ones and those without any label are left out.

    Raises ValueError for a row that is not what its format wants.
    """
    if kind == "tokens":
        return _of_tokens(rows)
    if kind == "text":
        texts = [text for text in rows[text_column] if text and text.strip()]
        pieces = [[(text, True)] for text in texts]
        return _tokenized(pieces, tokenizer, end=True)
    names = list(rows)
    chats = [dict(zip(names, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    pieces, raw = [], kind == "prompt_completion" and isinstance(rows["prompt"][0], str)
    for chat in chats:
        if raw:  # no conversation: taken as it is, as TRL takes it
            pieces.append([(chat["prompt"], False), (chat["completion"], True)])
        else:
            pieces.append(_turns(_messages(chat, kind), tokenizer))
    if loss_on == "all":
        pieces = [[(text, True) for text, _ in document] for document in pieces]
    found = _tokenized(pieces, tokenizer, end=raw)
    return [document for document in found if any(label != IGNORE_INDEX for label in document.labels[1:])]


def _messages(row: dict[str, Any], kind: str) -> list[dict[str, str]]:
    """A row's conversation as roles and contents. Raises ValueError where it is none."""
    if kind == "alpaca":
        asked = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    if kind == "prompt_completion":
        return [*row["prompt"], *row["completion"]]
    role, content = ("from", "value") if kind == "sharegpt" else ("role", "content")
    turns = row["conversations" if kind == "sharegpt" else "messages"]
    try:
        return [
            {"role": _SHAREGPT_ROLES.get(turn[role], turn[role]), "content": turn[content]} for turn in turns
        ]
    except (KeyError, TypeError):
        raise ValueError(
            f"a conversation has a turn without {role!r} and {content!r}: {str(turns)[:80]}\n"
            "hint: --dataset_format names the format"
        ) from None


def _turns(messages: list[dict[str, str]], tokenizer: Any) -> list[tuple[str, bool]]:
    """A conversation by its chat template, cut where answers begin and end: text, and is it an answer.

    An answer begins where generation would, and ends with its last mark that is no blank.
    Raises ValueError for a template that writes earlier turns in another way once later ones are there.
    """
    pieces: list[tuple[str, bool]] = []
    whole, done = _rendered(messages, tokenizer), 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number == 0:
            continue
        before = _rendered(messages[:number], tokenizer, add_generation_prompt=True)
        after = _rendered(messages[: number + 1], tokenizer).rstrip()
        if not (after.startswith(before) and whole.startswith(after)):
            raise ValueError(
                "the chat template changes earlier turns, so that answers can't be told from the rest\n"
                "hint: --loss_on all, or a tokenizer with a template that only appends"
            )
        pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [*pieces, (whole[done:], False)]


def _rendered(messages: list[dict[str, str]], tokenizer: Any, **options: bool) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the chat template refuses a conversation: {error}\nhint: its first turns: {str(messages)[:80]}"
        ) from None


def _tokenized(pieces: list[list[tuple[str, bool]]], tokenizer: Any, *, end: bool) -> list[Document]:
    """Each document's pieces tokenized one by one, as a prompt is when a model answers it.

    `end`: with an end-of-text token, which has a label.
    """
    texts = [text for document in pieces for text, _ in document]
    tokenized = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    documents = []
    for document in pieces:
        tokens: list[int] = []
        labels: list[int] = []
        for _, has_loss in document:
            piece = next(tokenized)
            tokens += piece
            labels += piece if has_loss else [IGNORE_INDEX] * len(piece)
        if end:
            tokens.append(tokenizer.eos_token_id)
            labels.append(tokenizer.eos_token_id)
        documents.append(Document(tokens, labels))
    return documents


def _of_tokens(rows: dict[str, list[Any]]) -> list[Document]:
    """Rows that are tokens already, taken as they are."""
    given = rows.get("labels") or [None] * len(rows["input_ids"])
    found = []
    for tokens, labels in zip(rows["input_ids"], given, strict=True):
        if labels is not None and len(labels) != len(tokens):
            raise ValueError(f"a row has {len(tokens)} input_ids and {len(labels)} labels")
        if len(tokens):
            found.append(Document(list(tokens), list(tokens if labels is None else labels)))
    return found
