"""Load the data of a run: the training sequences of all datasets, mixed, and the held-out sequences."""

import hashlib
import itertools
import os
import random
import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from slm_toolkit.config.dataset_files import Source
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.run.checkpoint.files import NUM_HELD_OUT
from slm_toolkit.run.data.documents import (
    CHAT_TEMPLATE,
    CHATS,
    Document,
    documents_of,
    load_tokenizer,
    unreadable_text,
)
from slm_toolkit.run.data.sources import BadData, read_rows
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX


@dataclass(frozen=True)
class Data:
    """The sequences of a run.

    Items are {"input_ids": (seq_len,) int64} plus the columns of `columns_of`. With several datasets, the
    column "dataset" is the index of the item's dataset in `names`.
    """

    train: Any
    held_out: dict[str, Any]
    "held-out sequences by name of the dataset; empty without --eval_steps"
    tokenizer: Any
    "None for synthetic tokens"
    names: tuple[str, ...]
    "names of the mixed datasets"
    facts: list[dict[str, Any]]
    "for each dataset: name, weight, packing, format, and numbers of rows, sequences, tokens and labels"
    contents: list[dict[str, Any]]
    "for each dataset: a fingerprint of its sequences, and for a stream the number of held-out sequences"
    documents_apart: bool
    "True if a sequence may contain several documents that must not see each other"

    @property
    def has_labels(self) -> bool:
        """True if some tokens have no loss."""
        return self.documents_apart or any(
            fact["packing"] != "concat" or fact["format"] == "tokens" for fact in self.facts
        )


def load_data(
    config: RunConfig,
    spec: ModelSpec,
    *,
    num_sequences: int,
    num_held_out: int | None = None,
) -> Data:
    """Load all data of a run.

    `num_sequences`: how many synthetic sequences to make. `num_held_out`: if the run resumes, the number of
    sequences that the earlier run held out of each stream. Raises ValueError, with a hint, for data that does
    not exist, contains no text or is too short.
    """
    evaluate = config.eval_steps is not None
    if config.dataset == SYNTHETIC:
        common = {"vocab_size": spec.vocab_size, "seq_len": config.seq_len, "seed": config.seed}
        tokens = CopiedPhrases if config.parity_task else MarkovTokens
        train = tokens(num_sequences=num_sequences, **common)
        held_out = {SYNTHETIC: tokens(num_sequences=4096, first=2**40, **common)} if evaluate else {}
        return Data(train, held_out, None, (SYNTHETIC,), [], [], documents_apart=config.parity_task)
    tokenizer = load_tokenizer(config, spec)
    sources = config.sources
    split_here = evaluate and not config.eval_sources
    if num_held_out is None:
        num_held_out = _most_held_out(config)
    load_part = partial(_load_part, tokenizer=tokenizer, config=config, spec=spec)
    parts = [load_part(source, num_held_out=num_held_out if split_here else None) for source in sources]
    held_out = {source.name: part.held_out for source, part in zip(sources, parts, strict=True) if split_here}
    facts = [part.facts for part in parts]
    eval_parts = [load_part(source, num_held_out=None) for source in config.eval_sources]
    for source, part in zip(config.eval_sources, eval_parts, strict=True):
        is_stream = isinstance(part.train, IterableDataset)
        held_out[source.name] = list(islice(part.train, _most_held_out(config))) if is_stream else part.train
    for fact in facts:
        if fact["packing"] != "concat" and os.environ.get("RANK", "0") == "0":
            print(_describe(fact), file=sys.stderr)
    names = tuple(source.name for source in sources)
    train = _mixed([part.train for part in parts], [source.weight for source in sources], config)
    is_separated = any(part.facts["packing"] in SEPARATED_PACKINGS for part in (*parts, *eval_parts))
    contents = [part.content for part in parts]
    return Data(train, held_out, tokenizer, names, facts, contents, documents_apart=is_separated)


@dataclass(frozen=True)
class _LoadedSource:
    train: Any
    held_out: Any
    facts: dict[str, Any]
    content: dict[str, Any]


def _load_part(
    source: Source, tokenizer: Any, config: RunConfig, spec: ModelSpec, *, num_held_out: int | None
) -> _LoadedSource:
    """Load one dataset: its training sequences and its held-out sequences.

    A stream's first `num_held_out` sequences are held out. Of other data, --validation_split_percentage of
    the sequences are held out, at the end. With num_held_out=None no sequence is held out.
    """
    rows, streaming, kind = read_rows(source, config)
    packing = packing_of(config.packing, is_chat=kind in CHATS)
    if kind in CHATS and tokenizer.chat_template is None:
        # saved with the model, because the model learns answers in this form
        tokenizer.chat_template = CHAT_TEMPLATE
    if packing == "concat" and kind in CHATS:
        raise ValueError(
            f"--packing concat does not fit {source.path}, which contains chats: "
            "answers would see other chats\n"
            "hint: use --packing multipack"
        )
    pack = Pack(tokenizer, kind, packing, config.seq_len, config.text_column, config.loss_on, spec.vocab_size)
    facts = {"name": source.name, "weight": source.weight, "format": kind, "packing": packing}
    if streaming:
        return _split_stream(source, PackedStream(rows, pack, source.path), facts, config, num_held_out)
    rows = rows.with_format(None)
    try:
        packed = rows.map(
            pack,
            batched=True,
            batch_size=ROWS_AT_ONCE,
            remove_columns=rows.column_names,
            desc=f"packing {source.name}",
        )
    except ValueError as error:
        raise bad_row(rows, 0, pack, source.path) or error from None
    if len(packed) == 0:
        raise ValueError(_too_short(source, kind, config))
    facts |= _facts_of(packed, len(rows), config.seq_len)
    packed = packed.with_format("torch")
    samples = [packed[index] for index in (0, len(packed) // 2, len(packed) - 1)]
    content = {"num_sequences": len(packed), "digest": _digest(samples)}
    if num_held_out is None:
        return _LoadedSource(packed, None, facts, content)
    num_held_out = max(1, len(packed) * config.validation_split_percentage // 100)
    if num_held_out == len(packed):
        raise ValueError(
            f"{source.path}: a single sequence can't be split into training and evaluation\n"
            "hint: leave out --eval_steps, or give more text"
        )
    num_train = len(packed) - num_held_out
    held_out = packed.select(range(num_train, len(packed)))
    return _LoadedSource(packed.select(range(num_train)), held_out, facts, content)


def _split_stream(
    source: Source, stream: "PackedStream", facts: dict[str, Any], config: RunConfig, num_held_out: int | None
) -> _LoadedSource:
    """Hold out the first `num_held_out` sequences of a stream; they are kept in memory."""
    # each of several workers would read the whole stream, or the order would change
    if config.dataloader_num_workers > 1:
        raise ValueError(
            f"--dataloader_num_workers {config.dataloader_num_workers} does not fit a stream: "
            "only one process can read it in order\n"
            "hint: use --dataloader_num_workers 1, or --streaming false"
        )
    num_skipped = num_held_out or 0
    held_out = list(islice(iter(stream), num_skipped))
    train = PackedStream(stream.rows, stream.pack, stream.path, skip=num_skipped)
    first = next(iter(train), None)
    if first is None:
        raise ValueError(_too_short(source, stream.pack.kind, config, num_skipped))
    content = {NUM_HELD_OUT: num_skipped, "digest": _digest([first])}
    return _LoadedSource(train, None if num_held_out is None else held_out, facts, content)


def _digest(sequences: Iterable[dict[str, Any]]) -> str:
    """Return a hash of the sequences' tokens."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(sequence["input_ids"].numpy().tobytes())
    return digest.hexdigest()


def _most_held_out(config: RunConfig) -> int:
    """Return how many sequences of a stream are kept in memory for evaluation."""
    return config.eval_batches * config.per_device_train_batch_size


def _too_short(source: Source, kind: str, config: RunConfig, num_held_out: int = 0) -> str:
    if kind in CHATS:
        return f"{source.path}: no answer fits in {config.seq_len} tokens\nhint: raise --seq_len"
    return (
        f"{source.path}: the text is shorter than one sequence of {config.seq_len} tokens"
        f"{f' after {num_held_out} held out' if num_held_out else ''}\n"
        "hint: lower --seq_len or --eval_batches, leave out --streaming, or give more text"
    )


def _mixed(parts: list[Any], weights: list[float | None], config: RunConfig) -> Any:
    """Mix several datasets into one: joined, or by weight until each has been read to its end."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, IterableDataset) for part in parts):
        raise ValueError(
            f"--dataset {config.dataset}: a stream can't be mixed with other data\n"
            "hint: --streaming false reads all of it first"
        )
    from datasets import concatenate_datasets, interleave_datasets

    numbered = [
        part.with_format(None).add_column("dataset", [number] * len(part))
        for number, part in enumerate(parts)
    ]
    with_all_columns = [_with_columns(part, numbered) for part in numbered]
    if None in weights:
        return concatenate_datasets(with_all_columns).with_format("torch")
    mixed = interleave_datasets(
        with_all_columns,
        probabilities=[weight / sum(weights) for weight in weights],
        seed=config.seed,
        stopping_strategy="all_exhausted",
    )
    return mixed.with_format("torch")


def _with_columns(part: Any, all_parts: list[Any]) -> Any:
    """Add the columns that only other parts have; concatenated text, for example, has no labels."""
    missing = {name for other in all_parts for name in other.column_names} - set(part.column_names)
    return part.map(partial(added_columns, names=sorted(missing)), batched=True) if missing else part


def _facts_of(packed: Any, num_rows: int, seq_len: int) -> dict[str, Any]:
    """Count a dataset's rows, sequences, tokens, padding and labels in one pass over its columns."""
    facts = {"num_rows": num_rows, "num_sequences": len(packed), "num_tokens": len(packed) * seq_len}
    if "padding" in packed.column_names:
        facts["num_padding"] = sum(packed["padding"])
    if "labels" in packed.column_names:
        arrow = packed.with_format("numpy")
        counts = (
            int((arrow[start : start + ROWS_AT_ONCE]["labels"][:, 1:] != IGNORE_INDEX).sum())
            for start in range(0, len(packed), ROWS_AT_ONCE)
        )
        facts["num_labels"] = sum(counts)
    return facts


def _describe(facts: dict[str, Any]) -> str:
    """Return a line about a packed dataset."""
    line = f"{facts['name']}: {facts['format']}, packing {facts['packing']}"
    if "num_rows" not in facts:
        return f"{line}, streamed"
    line += f", {facts['num_rows']:,} rows in {facts['num_sequences']:,} sequences"
    if "num_padding" in facts:
        line += f", {facts['num_padding'] / facts['num_tokens']:.1%} of the tokens are padding"
    return f"{line}, {facts['num_labels'] / facts['num_tokens']:.1%} have a loss"


# Pack documents into sequences of equal length, all at once or as a stream, and count their padding.

Columns = dict[str, list]
SEPARATED_PACKINGS = ("block_diagonal", "multipack")
"packings whose sequences contain several documents that don't see each other"


def packing_of(flag: str, *, is_chat: bool) -> str:
    """Return the packing for the value of --packing; `auto` joins plain text and keeps chats whole."""
    if flag != "auto":
        return flag
    return "multipack" if is_chat else "concat"


def fill(
    documents: list[Document], packing: str, seq_len: int, *, is_chat: bool
) -> tuple[list[list[Document]], list[Document]]:
    """Distribute documents over sequences. Return each sequence's pieces, and the pieces left at the end.

    concat and block_diagonal cut a document where a sequence is full; the last pieces may not fill one. Other
    packings keep documents whole and cut only a document that is longer than a sequence. The rest of a long
    chat is dropped, because it lacks its question.
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
    """Return each sequence's input_ids and, where needed, labels, position_ids and padding.

    labels: present with `has_labels` (some tokens have no loss), and for every packing except concat. If
    documents are kept separate, the first token of each has no label, because no token predicts it.
    position_ids: count from 0 in each document, so that attention sees where a document begins; padding
    counts as another document. padding: the number of padding tokens.
    """
    is_separated = packing in SEPARATED_PACKINGS
    columns: Columns = {"input_ids": []}
    if has_labels or packing != "concat":
        columns |= {"labels": []}
    if is_separated:
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
                labels += [IGNORE_INDEX, *document.labels[1:]] if is_separated else document.labels
            columns["labels"].append(labels + [IGNORE_INDEX] * padding)
        if is_separated:
            lengths = [len(document.tokens) for document in documents] + [padding]
            columns["position_ids"].append([place for length in lengths for place in range(length)])
        if "padding" in columns:
            columns["padding"].append(padding)
    return columns


def _joined(documents: list[Document], seq_len: int) -> tuple[list[list[Document]], list[Document]]:
    sequences: list[list[Document]] = []
    unfilled: list[Document] = []
    free = seq_len
    for document in documents:
        start, length = 0, len(document.tokens)
        while start < length:
            end = min(length, start + free)
            unfilled.append(_piece(document, start, end))
            free -= end - start
            start = end
            if free == 0:
                sequences.append(unfilled)
                unfilled, free = [], seq_len
    return sequences, unfilled


def _cut(document: Document, seq_len: int, *, only_first: bool) -> list[Document]:
    ends = range(0, seq_len if only_first else len(document.tokens), seq_len)
    return [_piece(document, start, start + seq_len) for start in ends]


def _piece(document: Document, start: int, end: int) -> Document:
    if start == 0 and end >= len(document.tokens):
        return document
    return Document(document.tokens[start:end], document.labels[start:end])


def _best_fit(documents: list[Document], seq_len: int) -> list[list[Document]]:
    """Fill bins of `seq_len` tokens: longest document first, each into the fullest bin where it fits.

    Best-fit decreasing needs at most 11/9 of the smallest possible number of bins (D. S. Johnson, 1973).
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
    # without this, the longest documents would come first, and only short ones would be held out at the end
    random.Random(len(bins)).shuffle(bins)
    return bins


ROWS_AT_ONCE = 1000
"number of rows that are packed together into sequences"


@dataclass(frozen=True)
class Pack:
    """Turn the columns of rows into the columns of sequences. The fields are the key of `datasets`' cache."""

    tokenizer: Any
    kind: str
    packing: str
    seq_len: int
    text_column: str
    loss_on: str
    vocab_size: int
    version: int = 1
    "raise it when this file or documents.py makes other sequences; otherwise the cache returns old sequences"

    def __call__(self, rows: dict[str, list[Any]]) -> Columns:
        return self.columns(self.fill(self.documents(rows))[0])

    def documents(self, rows: dict[str, list[Any]]) -> list[Any]:
        """Return the documents of these rows. Raises ValueError for a row that does not fit its format."""
        columns = {"text_column": self.text_column, "loss_on": self.loss_on}
        try:
            with unreadable_text():
                documents = documents_of(rows, self.kind, self.tokenizer, **columns)
        except (AttributeError, KeyError, TypeError) as error:  # a value does not have the expected type
            raise ValueError(
                f"the row does not fit the format {self.kind}: {error}\nhint: correct or remove the row"
            ) from error
        if self.kind == "tokens":
            largest = max((max(*document.tokens, *document.labels) for document in documents), default=0)
            if largest >= self.vocab_size:
                raise ValueError(
                    f"a row has token {largest}, but the model's vocabulary has {self.vocab_size} tokens\n"
                    "hint: the data was made with another tokenizer; choose its model, or tokenize again"
                )
        return documents

    def fill(self, documents: list[Any]) -> tuple[list[list[Any]], list[Any]]:
        return fill(documents, self.packing, self.seq_len, is_chat=self.kind in CHATS)

    def columns(self, sequences: list[list[Any]]) -> Columns:
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        has_labels = self.kind != "text"
        return columns_of(sequences, self.packing, self.seq_len, has_labels=has_labels, pad_token=pad)


class PackedStream(IterableDataset):
    """Sequences packed from rows while the rows are streamed. Every pass reads the source again."""

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
    """Return an error that names the first row that does not fit its format; None if all fit.

    `first`: the number of rows before `rows`.
    """
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
    """Return the named columns for concatenated text: every token is a label, one document, no padding."""
    tokens = rows["input_ids"]
    columns = {
        "labels": [list(row) for row in tokens],
        "position_ids": [list(range(len(row))) for row in tokens],
        "padding": [0] * len(tokens),
    }
    return {name: columns[name] for name in names}


# Make token sequences from a seed. They are the same on every machine.


class MarkovTokens(Dataset):
    """Sequences of a Markov chain over the whole vocabulary.

    With probability 0.5 the next token is the current token's fixed successor; otherwise it is drawn from a
    Zipf law. A model first learns how frequent each token is, then the successors, so losses fall from the
    first steps on. Item i is (seq_len,) int64 and depends only on seed, i and vocabulary.
    """

    FOLLOW = 0.5

    def __init__(
        self, *, vocab_size: int, seq_len: int, num_sequences: int, seed: int, first: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.cycle = rng.permutation(vocab_size)  # a token's successor is the next token on this cycle
        law = 1.0 / np.arange(1, vocab_size + 1)
        self.cumulative = np.cumsum(law / law.sum())
        self.seq_len, self.num_sequences, self.seed, self.first = seq_len, num_sequences, seed, first

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([self.seed, 1, self.first + index])
        drawn = rng.random(self.seq_len) >= self.FOLLOW
        drawn[0] = True
        # the place of each drawn token on the cycle
        places = np.searchsorted(self.cumulative, rng.random(self.seq_len))
        last_draw = np.maximum.accumulate(np.where(drawn, np.arange(self.seq_len), 0))
        places = places[last_draw] + np.arange(self.seq_len) - last_draw
        return {"input_ids": torch.from_numpy(self.cycle[places % len(self.cycle)])}


class CopiedPhrases(Dataset):
    """Documents of random tokens with repeated phrases, predictable only by attending to their first copy.

    Item i depends only on seed, i, vocabulary and length. input_ids, labels and position_ids are (seq_len,)
    int64. A sequence contains several documents of different lengths. In each document position_ids count
    from 0, and the first token has no label, so ranks and micro-steps have different numbers of labels. The
    first half of a document is random; the second half copies pieces of the first half.
    """

    def __init__(
        self, *, vocab_size: int, seq_len: int, num_sequences: int, seed: int, first: int = 0
    ) -> None:
        self.vocab_size, self.seq_len, self.num_sequences = vocab_size, seq_len, num_sequences
        self.seed, self.first = seed, first

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([self.seed, 2, self.first + index])
        longest = max(2, self.seq_len // 2)
        tokens, places = [], []
        while len(tokens) < self.seq_len:
            length = min(int(rng.integers(max(1, longest // 4), longest + 1)), self.seq_len - len(tokens))
            tokens += self._document(length, rng)
            places += range(length)
        labels = [IGNORE_INDEX if place == 0 else token for token, place in zip(tokens, places, strict=True)]
        columns = {"input_ids": tokens, "labels": labels, "position_ids": places}
        return {name: torch.tensor(values) for name, values in columns.items()}

    def _document(self, length: int, rng: np.random.Generator) -> list[int]:
        half = -(-length // 2)
        tokens = rng.integers(self.vocab_size, size=half).tolist()
        while len(tokens) < length:
            begin = int(rng.integers(half))
            tokens += tokens[begin : min(begin + 8, half)]
        return tokens[:length]
