"""Load the data of a run: the training sequences of all datasets, mixed, and the held-out sequences."""

import dataclasses
import hashlib
import os
import random
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

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
    BadData,
    Document,
    StreamedRows,
    documents_of,
    load_tokenizer,
    read_rows,
)
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX


@dataclass(frozen=True)
class Data:
    """The sequences of a run.

    Items are {"input_ids": (seq_len,) int64} plus the columns of `columns_of`.
    """

    train: Any
    held_out: dict[str, Any]
    "held-out sequences by name of the dataset; empty without --eval_steps"
    tokenizer: Any
    "None for synthetic tokens"
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
        tokens = CopiedPhrases if config.parity else MarkovTokens
        train = tokens(num_sequences=num_sequences, **common)
        held_out = {SYNTHETIC: tokens(num_sequences=4096, first=2**40, **common)} if evaluate else {}
        return Data(train, held_out, None, [], [], documents_apart=config.parity is not None)
    tokenizer = load_tokenizer(config, spec)
    split_here = evaluate and not config.eval_sources
    most_held_out = config.eval_batches * config.per_device_train_batch_size
    if num_held_out is None:
        num_held_out = most_held_out
    parts = _load_parts(config.sources, tokenizer, config, spec, num_held_out if split_here else None)
    trained, split_off, facts, contents = map(list, zip(*parts, strict=True))
    names = [fact["name"] for fact in facts]
    held_out = dict(zip(names, split_off, strict=True)) if split_here else {}
    eval_parts = _load_parts(config.eval_sources, tokenizer, config, spec, None)
    for part in eval_parts:
        is_stream = isinstance(part.train, IterableDataset)
        held_out[part.facts["name"]] = list(islice(part.train, most_held_out)) if is_stream else part.train
    is_separated = any(part.facts["packing"] in SEPARATED_PACKINGS for part in (*parts, *eval_parts))
    train = _mixed(trained, config)
    return Data(train, held_out, tokenizer, facts, contents, documents_apart=is_separated)


class _LoadedSource(NamedTuple):
    train: Any
    held_out: Any
    facts: dict[str, Any]
    content: dict[str, Any]


def _load_parts(
    sources: tuple[Source, ...], tokenizer: Any, config: RunConfig, spec: ModelSpec, num_held_out: int | None
) -> list[_LoadedSource]:
    """Load datasets whose sequences have the same columns; with num_held_out=None no sequence is held out."""
    all_rows = [read_rows(source, config) for source in sources]
    columns = {name for *_, kind in all_rows for name in columns_of(kind, packing_of(config.packing, kind))}
    parts = []
    for source, (rows, streaming, kind) in zip(sources, all_rows, strict=True):
        packing = packing_of(config.packing, kind)
        if kind in CHATS:
            if packing == "concat":
                raise ValueError(
                    f"--packing concat does not fit {source.path}, which contains chats: "
                    "answers would see other chats\n"
                    "hint: use --packing multipack"
                )
            # saved with the model, because the model learns answers in this form
            tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
        names = tuple(sorted(columns))
        flags = config.seq_len, config.text_column, config.loss_on
        pack = Pack(tokenizer, kind, packing, *flags, spec.vocab_size, names)
        facts = {"name": source.name, "weight": source.weight, "format": kind, "packing": packing}
        split = _split_stream if streaming else _split_rows
        parts.append(split(PackedStream(rows, pack, source.path), facts, config, num_held_out))
        if packing != "concat" and os.environ.get("RANK", "0") == "0":
            print(_describe(parts[-1].facts), file=sys.stderr)
    return parts


def _split_rows(
    stream: "PackedStream", facts: dict[str, Any], config: RunConfig, num_held_out: int | None
) -> _LoadedSource:
    """Pack all rows. Hold out a share of the sequences, at the end."""
    from datasets import Features, List, Value

    rows, pack, number = stream.rows, stream.pack, Value("int32")
    try:
        packed = rows.map(
            pack,
            batched=True,
            batch_size=ROWS_AT_ONCE,
            remove_columns=rows.column_names,
            features=Features({name: number if name == "padding" else List(number) for name in pack.names}),
            desc=f"packing {facts['name']}",
        )
    except ValueError:
        for _ in PackedStream(StreamedRows(rows, stream.path), pack, stream.path):
            continue  # raises an error that names the row
        raise
    if len(packed) == 0:
        raise ValueError(_too_short(stream))
    facts |= _facts_of(packed, len(rows), config.seq_len)
    packed = packed.with_format("torch")
    samples = [packed[index] for index in (0, len(packed) // 2, len(packed) - 1)]
    content = {"num_sequences": len(packed), "digest": _digest(samples)}
    if num_held_out is None:
        return _LoadedSource(packed, None, facts, content)
    num_train = len(packed) - max(1, len(packed) * config.held_out_percent // 100)
    if num_train == 0:
        raise ValueError(
            f"{stream.path}: a single sequence can't be split into training and evaluation\n"
            "hint: leave out --eval_steps, or give more text"
        )
    held_out = packed.select(range(num_train, len(packed)))
    return _LoadedSource(packed.select(range(num_train)), held_out, facts, content)


def _split_stream(
    stream: "PackedStream", facts: dict[str, Any], config: RunConfig, num_held_out: int | None
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
    held_out = list(islice(stream, num_skipped))
    train = dataclasses.replace(stream, skip=num_skipped)
    samples = list(islice(train, 1))
    if not samples:
        raise ValueError(_too_short(train))
    return _LoadedSource(train, held_out, facts, {NUM_HELD_OUT: num_skipped, "digest": _digest(samples)})


def _digest(sequences: list[dict[str, Any]]) -> str:
    """Return a hash of the sequences' tokens."""
    tokens = b"".join(sequence["input_ids"].numpy().tobytes() for sequence in sequences)
    return hashlib.sha256(tokens).hexdigest()


def _too_short(stream: "PackedStream") -> str:
    seq_len = stream.pack.seq_len
    if stream.pack.kind in CHATS:
        return f"{stream.path}: no answer fits in {seq_len} tokens\nhint: raise --seq_len"
    return (
        f"{stream.path} contains no text that fills a sequence of {seq_len} tokens"
        f"{f' after {stream.skip} held out' if stream.skip else ''}\n"
        "hint: lower --seq_len or --eval_batches, leave out --streaming, or give more text"
    )


def _mixed(parts: list[Any], config: RunConfig) -> Any:
    """Mix several datasets into one: joined, or by weight until each has been read to its end."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, IterableDataset) for part in parts):
        raise ValueError(
            f"--dataset {config.dataset}: a stream can't be mixed with other data\n"
            "hint: --streaming false reads all of it first"
        )
    from datasets import concatenate_datasets, interleave_datasets

    weights = [source.weight for source in config.sources]
    if None in weights:
        mixed = concatenate_datasets(parts)
    else:
        mixed = interleave_datasets(
            parts,
            probabilities=[weight / sum(weights) for weight in weights],
            seed=config.seed,
            stopping_strategy="all_exhausted",
        )
    return mixed.with_format("torch")


def _facts_of(packed: Any, num_rows: int, seq_len: int) -> dict[str, Any]:
    """Count a dataset's rows, sequences, tokens, padding and labels in one pass over its columns."""
    facts = {"num_rows": num_rows, "num_sequences": len(packed), "num_tokens": len(packed) * seq_len}
    if "padding" in packed.column_names:
        facts["num_padding"] = sum(packed["padding"])
    if "labels" in packed.column_names:
        batches = packed.with_format("numpy").iter(ROWS_AT_ONCE)
        facts["num_labels"] = sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in batches)
    return facts


def _describe(facts: dict[str, Any]) -> str:
    """Return a line about a packed dataset."""
    line = f"{facts['name']}: {facts['format']}, packing {facts['packing']}"
    if "num_rows" not in facts:
        return f"{line}, streamed"
    return (
        f"{line}, {facts['num_rows']:,} rows in {facts['num_sequences']:,} sequences, "
        f"{facts.get('num_padding', 0) / facts['num_tokens']:.1%} of the tokens are padding, "
        f"{facts['num_labels'] / facts['num_tokens']:.1%} have a loss"
    )


# Pack documents into sequences of equal length, all at once or as a stream, and count their padding.

SEPARATED_PACKINGS = ("block_diagonal", "multipack")
"packings whose sequences contain several documents that don't see each other"
JOINED_PACKINGS = ("concat", "block_diagonal")
"packings that cut a document where a sequence is full"
ROWS_AT_ONCE = 1000
"number of rows that are packed together into sequences"


def packing_of(flag: str, kind: str) -> str:
    """Return the packing for the value of --packing; `auto` joins plain text and keeps chats whole."""
    if flag != "auto":
        return flag
    return "multipack" if kind in CHATS else "concat"


def columns_of(kind: str, packing: str) -> list[str]:
    """Return the columns that sequences need; see `Pack.sequence`."""
    needed = {
        "input_ids": True,
        "labels": kind != "text" or packing != "concat",
        "position_ids": packing in SEPARATED_PACKINGS,
        "padding": packing not in JOINED_PACKINGS,
    }
    return [name for name, is_needed in needed.items() if is_needed]


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
    names: tuple[str, ...]
    "columns of the sequences"
    version: int = 1
    "raise it when this file or documents.py makes other sequences; otherwise the cache returns old sequences"

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        sequences = [self.sequence(pieces) for pieces in self.fill(self.documents(rows))[0]]
        return {name: [sequence[name] for sequence in sequences] for name in self.names}

    def documents(self, rows: dict[str, list[Any]]) -> list[Document]:
        """Return the documents of these rows. Raises ValueError for a row that does not fit its format."""
        try:
            documents = documents_of(
                rows, self.kind, self.tokenizer, text_column=self.text_column, loss_on=self.loss_on
            )
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

    def fill(self, documents: list[Document]) -> tuple[list[list[Document]], list[Document]]:
        """Distribute documents over sequences. Return each sequence's pieces, and the pieces left at the end.

        concat and block_diagonal cut a document where a sequence is full; the last pieces may not fill one.
        Other packings keep documents whole and cut only a document that is longer than a sequence. The rest
        of a long chat is dropped, because it lacks its question.
        """
        if self.packing in JOINED_PACKINGS:
            sequences, unfilled, free = [], [], self.seq_len
            for document in documents:
                start = 0
                while start < len(document.tokens):
                    unfilled.append(_piece(document, start, free))
                    length = len(unfilled[-1].tokens)
                    start += length
                    free -= length
                    if free == 0:
                        sequences.append(unfilled)
                        unfilled, free = [], self.seq_len
            return sequences, unfilled
        is_chat = self.kind in CHATS
        whole = [
            _piece(document, start, self.seq_len)
            for document in documents
            for start in range(0, 1 if is_chat else len(document.tokens), self.seq_len)
        ]
        if is_chat:
            whole = [piece for piece in whole if any(label != IGNORE_INDEX for label in piece.labels[1:])]
        return (_best_fit(whole, self.seq_len) if self.packing == "multipack" else [[d] for d in whole]), []

    def sequence(self, documents: list[Document]) -> dict[str, Any]:
        """Return the columns `names` of one sequence.

        labels: if documents are kept separate, the first token of each has no label, because no token
        predicts it. position_ids: count from 0 in each document, so that attention sees where a document
        begins; padding counts as another document. padding: the number of padding tokens.
        """
        is_separated = self.packing in SEPARATED_PACKINGS
        tokens, labels = [], []
        for document in documents:
            tokens += document.tokens
            labels += [IGNORE_INDEX, *document.labels[1:]] if is_separated else document.labels
        padding = self.seq_len - len(tokens)
        lengths = [len(document.tokens) for document in documents] if is_separated else []
        lengths.append(self.seq_len - sum(lengths))
        columns = {
            "input_ids": tokens + [self.tokenizer.pad_token_id or 0] * padding,
            "labels": labels + [IGNORE_INDEX] * padding,
            "position_ids": [place for length in lengths for place in range(length)],
            "padding": padding,
        }
        return {name: columns[name] for name in self.names}


def _piece(document: Document, start: int, length: int) -> Document:
    return Document(document.tokens[start : start + length], document.labels[start : start + length])


def _best_fit(documents: list[Document], seq_len: int) -> list[list[Document]]:
    """Fill bins of `seq_len` tokens: longest document first, each into the fullest bin where it fits.

    Best-fit decreasing needs at most 11/9 of the smallest possible number of bins (D. S. Johnson, 1973).
    """
    bins, free = [], []  # of each bin: its documents; (tokens free, bin), sorted
    for document in sorted(documents, key=lambda document: -len(document.tokens)):
        length = len(document.tokens)
        place = bisect_left(free, (length,))
        left, number = free.pop(place) if place < len(free) else (seq_len, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(document)
        insort(free, (left - length, number))
    # without this, the longest documents would come first, and only short ones would be held out at the end
    random.Random(len(bins)).shuffle(bins)
    return bins


@dataclass(frozen=True)
class PackedStream(IterableDataset):
    """Sequences packed from rows while the rows are streamed. Every pass reads the source again."""

    rows: Any
    pack: Pack
    path: str
    skip: int = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return islice(self._sequences(), self.skip, None)

    def _sequences(self) -> Iterator[dict[str, torch.Tensor]]:
        documents_by_row = self._documents_by_row()
        rows_at_once = 1 if self.pack.packing in JOINED_PACKINGS else ROWS_AT_ONCE
        rest: list[Document] = []
        while group := list(islice(documents_by_row, rows_at_once)):
            sequences, rest = self.pack.fill([*rest, *chain.from_iterable(group)])
            for pieces in sequences:
                columns = self.pack.sequence(pieces)
                yield {name: torch.as_tensor(value) for name, value in columns.items()}

    def _documents_by_row(self) -> Iterator[list[Document]]:
        for number, row in enumerate(self.rows, start=1):
            try:
                yield self.pack.documents({name: [value] for name, value in row.items()})
            except ValueError as error:
                raise BadData(f"{self.path}, row {number:,}: {error}") from None


# Make token sequences from a seed. They are the same on every machine.


@dataclass(kw_only=True)
class _Generated(Dataset):
    """Items `first`, `first` + 1, ... of the sequences of a seed."""

    vocab_size: int
    seq_len: int
    num_sequences: int
    seed: int
    first: int = 0

    def __len__(self) -> int:
        return self.num_sequences


@dataclass(kw_only=True)
class MarkovTokens(_Generated):
    """Sequences of a Markov chain over the whole vocabulary.

    With probability 0.5 the next token is the current token's fixed successor; otherwise it is drawn from a
    Zipf law. A model first learns how frequent each token is, then the successors, so losses fall from the
    first steps on. Item i is (seq_len,) int64 and depends only on seed, i and vocabulary.
    """

    def __post_init__(self) -> None:
        # a token's successor is the next token on this cycle
        self.cycle = np.random.default_rng(self.seed).permutation(self.vocab_size)
        law = 1.0 / np.arange(1, self.vocab_size + 1)
        self.cumulative = np.cumsum(law / law.sum())

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([self.seed, 1, self.first + index])
        drawn = rng.random(self.seq_len) >= 0.5
        drawn[0] = True
        # the place of each drawn token on the cycle
        places = np.searchsorted(self.cumulative, rng.random(self.seq_len))
        last_draw = np.maximum.accumulate(np.where(drawn, np.arange(self.seq_len), 0))
        places = places[last_draw] + np.arange(self.seq_len) - last_draw
        return {"input_ids": torch.from_numpy(self.cycle[places % len(self.cycle)])}


class CopiedPhrases(_Generated):
    """Documents of random tokens with repeated phrases, predictable only by attending to their first copy.

    Item i depends only on seed, i, vocabulary and length. input_ids, labels and position_ids are (seq_len,)
    int64. A sequence contains several documents of different lengths. In each document position_ids count
    from 0, and the first token has no label, so ranks and micro-steps have different numbers of labels. The
    first half of a document is random; the second half copies pieces of the first half.
    """

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([self.seed, 2, self.first + index])
        longest = max(2, self.seq_len // 2)
        tokens, places = [], []
        while len(tokens) < self.seq_len:
            length = min(rng.integers(max(1, longest // 4), longest + 1), self.seq_len - len(tokens))
            half = -(-length // 2)
            document = rng.integers(self.vocab_size, size=half).tolist()
            while len(document) < length:
                begin = rng.integers(half)
                document += document[begin : min(begin + 8, half)]
            tokens += document[:length]
            places += range(length)
        labels = [IGNORE_INDEX if place == 0 else token for token, place in zip(tokens, places, strict=True)]
        columns = {"input_ids": tokens, "labels": labels, "position_ids": places}
        return {name: torch.tensor(values) for name, values in columns.items()}
