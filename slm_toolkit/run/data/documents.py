"""Turns rows of text, chats in four formats, or tokens into documents: tokens of a tokenizer, with labels."""

import contextlib
import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import first_line
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import check_hub, is_hub_id
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX

TEMPLATE_SECONDS = 2.0
"of processor time that a chat template may take for a conversation, and for each 100 turns of a longer one"
TEMPLATE_BYTES = 2**28
"more memory than a chat template may take for a conversation"
_SECONDS_TO_NEXT_TIMEOUT = 0.1
"if code of a template caught the first TimeoutError"
_COLUMNS = {  # format: columns that it needs; `auto` takes the first format that fits a row
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
    """Tokens with labels; the token before predicts a label, which is the token itself or IGNORE_INDEX."""

    tokens: list[int]
    labels: list[int]


def format_of(row: dict[str, Any], path: str, *, asked: str, text_column: str) -> str:
    """The format of a dataset, from its first row. Raises ValueError if it is not the one in `asked`."""
    found = asked
    if asked == "auto" and text_column != "text" and text_column not in row:
        found = "text"  # which then is said to be missing
    elif asked == "auto":
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
    if found in kinds and value is not None and not isinstance(value, kinds[found]):
        raise ValueError(
            f"{path}: column {needed[0]!r} holds {type(value).__name__}, not "
            f"{'text' if kinds[found] is str else 'a list'}\n"
            + ("hint: --text_column names another" if found == "text" else "hint: see --dataset_format")
        )
    return found


@contextmanager
def unreadable_text() -> Iterator[None]:
    """Raises ValueError for text that is not UTF-8: Arrow checks it only when a row is read."""
    try:
        yield
    except UnicodeError as error:
        raise ValueError(f"a row's text can't be read: {error}\nhint: is it UTF-8?") from None


def documents_of(
    rows: dict[str, list[Any]], kind: str, tokenizer: Any, *, text_column: str, loss_on: str
) -> list[Document]:
    """The documents of some rows, given by column; blank ones and those without any label are left out.

    Raises ValueError for a row that does not fit its format, or that the tokenizer can't read.
    """
    if kind == "tokens":
        return _of_tokens(rows)
    if kind == "text":
        if odd := [text for text in rows[text_column] if not isinstance(text, str | None)]:
            raise ValueError(
                f"column {text_column!r} holds {str(odd[0])[:80]}, which is no text\n"
                "hint: --text_column names another"
            )
        texts = [text for text in rows[text_column] if text and text.strip()]
        pieces = [[(text, True)] for text in texts]
        return _tokenized(pieces, tokenizer, end=True)
    names = list(rows)
    chats = [dict(zip(names, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    as_pieces = [_pieces(chat, kind, tokenizer, loss_on=loss_on) for chat in chats]
    ended = [_tokenized([pieces], tokenizer, end=True)[0] for pieces, raw in as_pieces if raw]
    chats_proper = [pieces for pieces, raw in as_pieces if not raw]
    documents = [*ended, *_tokenized(chats_proper, tokenizer, end=False)]
    return [document for document in documents if any(label != IGNORE_INDEX for label in document.labels[1:])]


def _pieces(
    row: dict[str, Any], kind: str, tokenizer: Any, *, loss_on: str
) -> tuple[list[tuple[str, bool]], bool]:
    """A chat's text in pieces, each with or without a loss; and whether the row is two plain texts."""
    if kind == "prompt_completion" and isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return [(row["prompt"], loss_on == "all"), (row["completion"], True)], True  # as in TRL
    messages, num_given = _messages(row, kind)
    with _limits(TEMPLATE_SECONDS * (1 + len(messages) // 100), TEMPLATE_BYTES):
        if loss_on == "all":
            return [(_rendered(messages, tokenizer), True)], False
        return _turns(messages, tokenizer, first=num_given), False


def _messages(row: dict[str, Any], kind: str) -> tuple[list[dict[str, str]], int]:
    """A row's conversation as roles and contents, and how many of its turns are given, not to be learnt.

    Raises ValueError if it is not a conversation, or holds more than text.
    """
    if kind == "alpaca":
        parts = [part for part in (row["instruction"], row.get("input")) if part]
        if not all(isinstance(part, str) for part in parts):
            raise _not_a_chat("instruction and input are not text", row)
        question = "\n\n".join(parts)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
        return [_turn(turn, "role", "content") for turn in turns], 1
    if kind == "prompt_completion":
        if not (isinstance(row["prompt"], list) and isinstance(row["completion"], list)):
            raise _not_a_chat("prompt and completion are neither two texts nor two lists", row)
        turns = [*row["prompt"], *row["completion"]]
        return [_turn(turn, "role", "content") for turn in turns], len(row["prompt"])
    role, content = ("from", "value") if kind == "sharegpt" else ("role", "content")
    turns = row["conversations" if kind == "sharegpt" else "messages"]
    if not turns or not isinstance(turns, list):
        raise _not_a_chat("a conversation has no turns", row)
    return [_turn(turn, role, content) for turn in turns], 1


def _turn(turn: Any, role: str, content: str) -> dict[str, str]:
    if not isinstance(turn, dict) or not isinstance(turn.get(role), str):
        raise _not_a_chat(f"a conversation has a turn without {role!r} and {content!r}", turn)
    text = turn.get(content)
    if isinstance(text, list) and all(map(_is_text_part, text)):
        text = "".join(part["text"] for part in text)
    if turn.get("tool_calls"):
        raise _not_a_chat("a turn calls tools, of which only text is trained on", turn)
    if not isinstance(text, str):
        raise _not_a_chat(
            f"a conversation has a turn without {role!r} and {content!r}, or more than text", turn
        )
    return {"role": _SHAREGPT_ROLES.get(turn[role], turn[role]), "content": text}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and bool(part["text"])


def _not_a_chat(what: str, row: Any) -> ValueError:
    hint = "leave such rows out, or name the format by --dataset_format"
    return ValueError(f"{what}: {str(row)[:80]}\nhint: {hint}")


def _turns(messages: list[dict[str, str]], tokenizer: Any, *, first: int) -> list[tuple[str, bool]]:
    """A conversation as the chat template writes it, cut into pieces: text, and whether it is an answer.

    An answer begins where generation would begin, and ends with its last character that is not blank.
    Answers before turn number `first`, and one that comes before any question, are not learnt.
    Raises ValueError for a template that changes earlier turns once there are later ones.
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
                "the chat template changes earlier turns, so that answers can't be told from the rest\n"
                "hint: --loss_on all, or a tokenizer with a template that only appends"
            )
        pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [*pieces, (whole[done:], False)]


def _rendered(messages: list[dict[str, str]], tokenizer: Any, **options: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template is a program: it divides by zero, recurses, takes all memory
        reason = {
            TimeoutError: "it takes too long",
            MemoryError: f"it needs more than {TEMPLATE_BYTES / 2**20:g} MiB",
            RecursionError: "it calls itself without end",
        }.get(type(error), str(error) or type(error).__name__)
        raise _refused(reason, messages) from None
    num_given = sum(len(message["content"]) for message in messages)
    if len(text) > 2**20 + 10 * num_given:
        raise _refused(f"it makes {len(text):,} characters of {num_given:,}", messages)
    return text


def _refused(reason: str, messages: list[dict[str, str]]) -> ValueError:
    return ValueError(
        f"the chat template refuses a conversation: {reason[:200]}\n"
        f"hint: mend the template, or leave the conversation out; its first turns: {str(messages)[:80]}"
    )


def _tokenized(pieces: list[list[tuple[str, bool]]], tokenizer: Any, *, end: bool) -> list[Document]:
    """Documents from their pieces, each piece tokenized alone, as a prompt is when a model answers it.

    `end`: append an end-of-text token, which has a label.
    """
    texts = [text for document in pieces for text, _ in document]
    with tokenizer_errors("the tokenizer fails"):
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
    """Documents of rows that are tokens already, without those that the attention_mask leaves out."""
    documents = []
    for index, tokens in enumerate(rows["input_ids"]):
        if tokens is None:
            continue
        labels, mask = (
            rows[name][index] if rows.get(name) else None for name in ("labels", "attention_mask")
        )
        for name, numbers in (("input_ids", tokens), ("labels", labels), ("attention_mask", mask)):
            if not (numbers is None or _are_tokens(numbers, least=IGNORE_INDEX if name == "labels" else 0)):
                raise ValueError(f"{name} of a row is {str(numbers)[:80]}\nhint: whole numbers, not below 0")
        for name, other in (("labels", labels), ("attention_mask", mask)):
            if other is not None and len(other) != len(tokens):
                raise ValueError(
                    f"a row has {len(tokens)} input_ids and {len(other)} {name}\nhint: one for each token"
                )
        labels = tokens if labels is None else labels
        kept = [place for place in range(len(tokens)) if mask is None or mask[place]]
        if kept:
            documents.append(Document([tokens[place] for place in kept], [labels[place] for place in kept]))
    return documents


def _are_tokens(numbers: Any, *, least: int) -> bool:
    """Whether all are whole numbers from `least` on that fit in 31 bits; a mask may hold true and false."""
    return (
        isinstance(numbers, list)
        and {int, bool}.issuperset(map(type, numbers))
        and least <= min(numbers, default=0)
        and max(numbers, default=0) < 2**31
    )


@contextmanager
def _limits(seconds: float, num_bytes: int) -> Iterator[None]:
    """Limit code of others: TimeoutError after so many seconds of processor time, MemoryError after so many
    bytes more than the process has now.

    Time is limited in the main thread only, where Python handles signals; memory on Linux only.
    """
    with ExitStack() as after:
        if threading.current_thread() is threading.main_thread():
            after.callback(signal.signal, signal.SIGVTALRM, signal.signal(signal.SIGVTALRM, _too_long))
            after.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _SECONDS_TO_NEXT_TIMEOUT)
        statm = Path("/proc/self/statm")
        if statm.exists():
            import resource

            # RLIMIT_DATA counts private memory, not the files that Arrow maps nor a GPU's address space
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = int(statm.read_text().split()[5]) * os.sysconf("SC_PAGESIZE") + num_bytes
            known = [limit for limit in (most, soft, hard) if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
            after.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))
        yield


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError


# The tokenizer of a run; one that the model or this machine can't use is refused.

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"for tokenizers without one: every turn ends with the end-of-text token, so that generation stops there"
MOST_GROWTH = 10_000
"of a text by its tokenizer's replacements: 30 times `a` by `aaaa` would turn one character into 10^18"


def tokenizer_of(config: RunConfig, spec: ModelSpec) -> str | None:
    """The folder or hub id of the tokenizer in --tokenizer_name, or of the model's own; None for bytes."""
    if config.tokenizer_name is not None:
        return None if config.tokenizer_name == "byte" else config.tokenizer_name
    if spec.path is None:
        return None
    folder = Path(spec.path).parent if spec.path.endswith(".json") else Path(spec.path)
    has_own = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    return str(folder) if has_own or not folder.exists() else None


def load_tokenizer(config: RunConfig, spec: ModelSpec) -> Any:
    """The tokenizer of --tokenizer_name, the model's own, or ByT5's bytes, which need no download."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    name = tokenizer_of(config, spec)
    if name is None:
        tokenizer = ByT5Tokenizer()
    else:
        if is_hub_id(name) and not exists(typed_path(name)):
            check_hub(name, "tokenizer")
        with tokenizer_errors(f"can't load tokenizer {name!r}"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {name!r} has no end-of-text token to put between documents\n"
            "hint: set its eos_token, or use --tokenizer_name byte"
        )
    vocabulary = tokenizer.get_vocab()
    if vocabulary.keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"tokenizer {name!r} has no tokens of text\nhint: --tokenizer_name byte has one for each byte"
        )
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    if normalizer is not None and _growth(json.loads(normalizer.__getstate__())) > MOST_GROWTH:
        raise ValueError(
            f"tokenizer {name!r}: its normalizer makes over {MOST_GROWTH:,} characters of one\n"
            "hint: leave such replacements out of its tokenizer.json, or use another tokenizer"
        )
    if len(vocabulary) > spec.vocab_size:
        raise ValueError(
            f"tokenizer {name or 'byte'!r} has {len(vocabulary)} tokens, "
            f"model {spec.name} only {spec.vocab_size}\n"
            "hint: choose a model with a larger vocabulary, or --tokenizer_name byte"
        )
    token, largest = max(vocabulary.items(), key=lambda pair: pair[1])
    if largest >= spec.vocab_size:  # ids need not be without gaps
        raise ValueError(
            f"tokenizer {name!r} has the id {largest} for {token!r}, model {spec.name} only ids below "
            f"{spec.vocab_size}\nhint: choose a model with a larger vocabulary, or --tokenizer_name byte"
        )
    return tokenizer


@contextlib.contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turns a tokenizer's errors, bare Exceptions and Rust's panics (BaseExceptions), into ValueError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {first_line(error)}\nhint: --tokenizer_name byte needs none") from None


def _growth(normalizer: dict[str, Any]) -> float:
    """The most characters into which a normalizer's replacements may turn one."""
    if normalizer["type"] == "Replace":
        length = len(normalizer["content"])
        replaced = len(normalizer["pattern"].get("String", ""))
        return max(1, length / replaced) if replaced else 1 + length  # a Regex may match between characters
    return math.prod(_growth(each) for each in normalizer.get("normalizers", ()))
