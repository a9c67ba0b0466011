"""Documents into sequences of equal length, and what is padding in them."""

import random
from bisect import bisect_left, insort
from collections.abc import Iterable

from slm_toolkit.run.formats import Document
from slm_toolkit.run.loss_kernels import IGNORE_INDEX

Columns = dict[str, list]
APART = ("block_diagonal", "multipack")
"packings in which a sequence holds several documents that don't see each other"


def packing_of(asked: str, *, is_chat: bool) -> str:
    """What `auto` means: pre-training joins documents, chats are kept whole."""
    if asked != "auto":
        return asked
    return "multipack" if is_chat else "concat"


def fill(
    documents: list[Document], packing: str, seq_len: int, *, is_chat: bool
) -> tuple[list[list[Document]], list[Document]]:
    """The documents, or pieces of them, of each sequence; and what is not enough for one more.

    concat and block_diagonal cut documents where a sequence is full. The others keep them whole; one that is
    longer than a sequence is cut, a chat's end, which has lost its question, is left out.
    """
    if packing in ("concat", "block_diagonal"):
        return _joined(documents, seq_len)
    whole = [piece for document in documents for piece in _cut(document, seq_len, only_first=is_chat)]
    if is_chat:
        whole = [piece for piece in whole if any(label != IGNORE_INDEX for label in piece.labels[1:])]
    return (_best_fit(whole, seq_len) if packing == "multipack" else [[piece] for piece in whole]), []


def columns_of(
    sequences: Iterable[list[Document]], packing: str, seq_len: int, *, has_labels: bool, pad_token: int
) -> Columns:
    """input_ids of each sequence and, where they say more than those, labels, position_ids and padding.

    labels: with `has_labels` (not every token has a loss), and wherever documents are kept apart: the first
    token of each is predicted by none. position_ids: counted from 0 in each document, from which attention
    sees where one begins; padding is a document of its own. padding: tokens of it, a number.
    """
    apart = packing in APART
    columns: Columns = {"input_ids": []}
    if has_labels or packing != "concat":
        columns |= {"labels": []}
    if apart:
        columns |= {"position_ids": []}
    if packing in ("multipack", "none"):
        columns |= {"padding": []}
    for documents in sequences:
        tokens = [token for document in documents for token in document.tokens]
        padding = seq_len - len(tokens)
        columns["input_ids"].append(tokens + [pad_token] * padding)
        if "labels" in columns:
            labels: list[int] = []
            for document in documents:
                labels += [IGNORE_INDEX, *document.labels[1:]] if apart else document.labels
            columns["labels"].append(labels + [IGNORE_INDEX] * padding)
        if apart:
            lengths = [len(document.tokens) for document in documents] + [padding]
            columns["position_ids"].append([place for length in lengths for place in range(length)])
        if "padding" in columns:
            columns["padding"].append(padding)
    return columns


def _joined(documents: list[Document], seq_len: int) -> tuple[list[list[Document]], list[Document]]:
    sequences: list[list[Document]] = []
    begun: list[Document] = []
    free = seq_len
    for document in documents:
        start, length = 0, len(document.tokens)
        while start < length:
            end = min(length, start + free)
            begun.append(_piece(document, start, end))
            free -= end - start
            start = end
            if free == 0:
                sequences.append(begun)
                begun, free = [], seq_len
    return sequences, begun


def _cut(document: Document, seq_len: int, *, only_first: bool) -> list[Document]:
    ends = range(0, seq_len if only_first else len(document.tokens), seq_len)
    return [_piece(document, start, start + seq_len) for start in ends]


def _piece(document: Document, start: int, end: int) -> Document:
    if start == 0 and end >= len(document.tokens):
        return document
    return Document(document.tokens[start:end], document.labels[start:end])


def _best_fit(documents: list[Document], seq_len: int) -> list[list[Document]]:
    """Bins of at most `seq_len` tokens: the longest first, each where it leaves least free.

    Best-fit decreasing: within 11/9 of the fewest bins possible (D. S. Johnson, 1973).
    """
    bins: list[list[Document]] = []
    free: list[tuple[int, int]] = []  # tokens free, bin; sorted
    for document in sorted(documents, key=lambda document: -len(document.tokens)):
        length = len(document.tokens)
        place = bisect_left(free, (length, -1))
        if place < len(free):
            left, number = free.pop(place)
            bins[number].append(document)
        else:
            left, number = seq_len, len(bins)
            bins.append([document])
        insort(free, (left - length, number))
    # or the first were those of long documents, and the held-out last ones those of short
    random.Random(len(bins)).shuffle(bins)
    return bins
