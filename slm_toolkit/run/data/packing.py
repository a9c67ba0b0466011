"""Packs documents into sequences of equal length, all at once or as a stream, and counts their padding."""

import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from slm_toolkit.run.data.bad_data import BadData
from slm_toolkit.run.data.formats import CHATS, Document, documents_of, unreadable_text
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX

Columns = dict[str, list]
APART = ("block_diagonal", "multipack")
"packings in which a sequence holds several documents that don't see each other"


def packing_of(asked: str, *, is_chat: bool) -> str:
    """The packing; `auto` joins documents of plain text, and keeps chats whole."""
    if asked != "auto":
        return asked
    return "multipack" if is_chat else "concat"


def fill(
    documents: list[Document], packing: str, seq_len: int, *, is_chat: bool
) -> tuple[list[list[Document]], list[Document]]:
    """The documents, or pieces of them, of each sequence; and the rest, which does not fill another one.

    concat and block_diagonal cut documents where a sequence is full. The others keep documents whole, unless
    one is longer than a sequence: it is cut, and the rest of a chat, without its question, is left out.
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
    """input_ids of each sequence and, where needed, labels, position_ids and padding.

    labels: with `has_labels` (not every token has a loss), and wherever documents are kept apart, since no
    token predicts the first one of a document. position_ids: counted from 0 in each document, so that
    attention sees where one begins; padding is a document of its own. padding: its number of tokens.
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
    """Bins of at most `seq_len` tokens: the longest document first, each into the bin with the least room.

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
    # or long documents would come first, and the held-out end would have only short ones
    random.Random(len(bins)).shuffle(bins)
    return bins


ROWS_AT_ONCE = 1000
"how many rows are packed together"


@dataclass(frozen=True)
class Pack:
    """Turns rows, by column, into columns of sequences; its fields are the key of `datasets`' cache."""

    tokenizer: Any
    kind: str
    packing: str
    seq_len: int
    text_column: str
    loss_on: str
    vocab_size: int
    version: int = 1
    "of formats.py and packing.py: raise it when they make other sequences, or caches return the old ones"

    def __call__(self, rows: dict[str, list[Any]]) -> Columns:
        return self.columns(self.fill(self.documents(rows))[0])

    def documents(self, rows: dict[str, list[Any]]) -> list[Any]:
        """The documents of some rows. Raises ValueError for a row that does not fit its format."""
        columns = {"text_column": self.text_column, "loss_on": self.loss_on}
        try:
            with unreadable_text():
                documents = documents_of(rows, self.kind, self.tokenizer, **columns)
        except (AttributeError, KeyError, TypeError) as error:  # for a value of another type
            raise ValueError(
                f"not what the format {self.kind} wants: {error}\nhint: mend the row, or leave it out"
            ) from error
        if self.kind == "tokens":
            most = max((max(*document.tokens, *document.labels) for document in documents), default=0)
            if most >= self.vocab_size:
                raise ValueError(
                    f"a row has token {most}, the model knows {self.vocab_size}\n"
                    "hint: the data was made with another tokenizer"
                )
        return documents

    def fill(self, documents: list[Any]) -> tuple[list[list[Any]], list[Any]]:
        return fill(documents, self.packing, self.seq_len, is_chat=self.kind in CHATS)

    def columns(self, sequences: list[list[Any]]) -> Columns:
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        has_labels = self.kind not in ("text",)
        return columns_of(sequences, self.packing, self.seq_len, has_labels=has_labels, pad_token=pad)


class PackedStream(IterableDataset):
    """Sequences of streamed rows, packed as they come; every pass reads the source again."""

    def __init__(self, rows: Any, pack: Pack, path: str, *, skip: int = 0) -> None:
        self.rows, self.pack, self.path, self.skip = rows, pack, path, skip

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return itertools.islice(self._sequences(), self.skip, None)

    def _sequences(self) -> Iterator[dict[str, torch.Tensor]]:
        rest: list[Any] = []
        joins = self.pack.packing in ("concat", "block_diagonal")
        number = 0
        for group in _groups(self.rows, 1 if joins else ROWS_AT_ONCE):
            try:
                documents = self.pack.documents(_by_column(group))
            except ValueError as error:
                raise bad_row(group, number, self.pack, self.path) or error from None
            number += len(group)
            sequences, rest = self.pack.fill([*rest, *documents])
            columns = self.pack.columns(sequences)
            for values in zip(*columns.values(), strict=True):
                yield {name: torch.as_tensor(value) for name, value in zip(columns, values, strict=True)}


def _groups(rows: Any, size: int) -> Iterator[list[dict[str, Any]]]:
    rows = iter(rows)
    while True:
        with unreadable_text():
            group = list(itertools.islice(rows, size))
        if not group:
            return
        yield group


def bad_row(rows: Iterable[dict[str, Any]], first: int, pack: Pack, path: str) -> BadData | None:
    """An error that names the first row that does not fit its format; `rows` follow `first` other rows."""
    number, rows = first, iter(rows)
    while True:
        number += 1
        try:
            with unreadable_text():
                row = next(rows, None)
            if row is None:
                return None
            pack.documents(_by_column([row]))
        except ValueError as error:
            return BadData(f"{path}, row {number:,}: {error}")


def _by_column(group: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in group for name in row)
    return {name: [row.get(name) for row in group] for name in names}


def added_columns(rows: dict[str, Any], names: list[str]) -> Columns:
    tokens = rows["input_ids"]
    made = {
        "labels": [list(row) for row in tokens],
        "position_ids": [list(range(len(row))) for row in tokens],
        "padding": [0] * len(tokens),
    }
    return {name: made[name] for name in names}


class MixedStream(IterableDataset):
    """Sequences of several streams, drawn by weight; one that ends begins again, until all have ended."""

    def __init__(self, streams: list[Any], weights: list[float], seed: int) -> None:
        self.streams, self.shares, self.seed = streams, np.array(weights) / sum(weights), seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rng = np.random.default_rng([self.seed, 2])
        items = [iter(stream) for stream in self.streams]
        ended: set[int] = set()
        names = {name for stream in self.streams for name in next(iter(stream))}
        while True:
            number = int(rng.choice(len(items), p=self.shares))
            item = next(items[number], None)
            if item is None:
                ended.add(number)
                if len(ended) == len(items):
                    return
                items[number] = iter(self.streams[number])
                item = next(items[number])
            missing = sorted(names - item.keys())
            made = added_columns({"input_ids": [item["input_ids"].tolist()]}, missing)
            added = {name: torch.as_tensor(values[0]) for name, values in made.items()}
            yield {**item, **added, "dataset": torch.tensor(number)}
