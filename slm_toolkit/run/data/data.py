"""Loads the data of a run: sequences of every dataset, mixed for training, and those held out."""

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from slm_toolkit.config.dataset_files import Source
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.run.checkpoint.files import NUM_HELD_OUT
from slm_toolkit.run.data.formats import CHATS
from slm_toolkit.run.data.packing import (
    APART,
    ROWS_AT_ONCE,
    MixedStream,
    Pack,
    PackedStream,
    added_columns,
    bad_row,
    packing_of,
)
from slm_toolkit.run.data.sources import read_rows
from slm_toolkit.run.data.synthetic import CopiedPhrases, MarkovTokens
from slm_toolkit.run.data.tokenizers import CHAT_TEMPLATE, load_tokenizer
from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX


@dataclass(frozen=True)
class Data:
    """Items are {"input_ids": (seq_len,) int64}, with the columns that `packing.columns_of` adds, and
    "dataset", the number of the dataset in `names`, if there are several."""

    train: Any
    held_out: dict[str, Any]
    "by name of the set; empty without --eval_steps"
    tokenizer: Any
    "None for synthetic tokens"
    names: tuple[str, ...]
    "names of the datasets that are mixed"
    facts: list[dict[str, Any]]
    "for each dataset: name, weight, packing, format, and numbers of rows, sequences, tokens and labels"
    contents: list[dict[str, Any]]
    "for each dataset, a fingerprint of its sequences, and how many of a stream were held out"
    documents_apart: bool
    "whether some sequences hold documents that must not see each other"

    @property
    def has_labels(self) -> bool:
        """Whether some tokens have no loss."""
        return self.documents_apart or any(
            fact["packing"] != "concat" or fact["format"] == "tokens" for fact in self.facts
        )


def load_data(
    config: RunConfig, spec: ModelSpec, *, num_sequences: int, num_held_out: int | None = None
) -> Data:
    """All data of a run. `num_sequences`: how many synthetic ones to make.

    `num_held_out`: how many sequences an earlier run has held out of each stream; this run holds out as many.

    Raises ValueError, with a hint, for data that does not exist, holds no text or is too short.
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
    of_eval = [load_part(source, num_held_out=None) for source in config.eval_sources]
    for source, part in zip(config.eval_sources, of_eval, strict=True):
        is_stream = isinstance(part.train, IterableDataset)
        held_out[source.name] = list(islice(part.train, _most_held_out(config))) if is_stream else part.train
    for fact in facts:
        if fact["packing"] != "concat" and os.environ.get("RANK", "0") == "0":
            print(_described(fact), file=sys.stderr)
    names = tuple(source.name for source in sources)
    train = _mixed([part.train for part in parts], sources, config)
    apart = any(part.facts["packing"] in APART for part in (*parts, *of_eval))
    contents = [part.content for part in parts]
    return Data(train, held_out, tokenizer, names, facts, contents, documents_apart=apart)


@dataclass(frozen=True)
class _Part:
    train: Any
    held_out: Any
    facts: dict[str, Any]
    content: dict[str, Any]


def _load_part(
    source: Source, tokenizer: Any, config: RunConfig, spec: ModelSpec, *, num_held_out: int | None
) -> _Part:
    """One dataset's sequences, and the held-out ones: of a stream the first `num_held_out`, of other data a
    share at the end; None holds out none."""
    rows, streaming, kind = read_rows(source, config)
    packing = packing_of(config.packing, is_chat=kind in CHATS)
    if kind in CHATS and tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT_TEMPLATE  # saved with the model, which has learnt answers in this form
    if packing == "concat" and kind in CHATS:
        raise ValueError(
            f"--packing concat with {source.path}, which holds chats: answers would see other chats\n"
            "hint: --packing multipack"
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
    some = [packed[number] for number in (0, len(packed) // 2, len(packed) - 1)]
    content = {"num_sequences": len(packed), "digest": _digest(some)}
    if num_held_out is None:
        return _Part(packed, None, facts, content)
    num_held_out = max(1, len(packed) * config.validation_split_percentage // 100)
    if num_held_out == len(packed):
        raise ValueError(
            f"{source.path}: one sequence can't be split for evaluation\nhint: leave out --eval_steps"
        )
    num_train = len(packed) - num_held_out
    held_out = packed.select(range(num_train, len(packed)))
    return _Part(packed.select(range(num_train)), held_out, facts, content)


def _split_stream(
    source: Source, stream: PackedStream, facts: dict[str, Any], config: RunConfig, num_held_out: int | None
) -> _Part:
    """A stream whose first `num_held_out` sequences are held out, in memory."""
    if config.dataloader_num_workers > 1:  # each worker would read all of it, or the order would change
        raise ValueError(
            f"--dataloader_num_workers {config.dataloader_num_workers} with a stream, which one process "
            "reads in order\nhint: --dataloader_num_workers 1, or --streaming false"
        )
    num_skipped = num_held_out or 0
    held_out = list(islice(iter(stream), num_skipped))
    train = PackedStream(stream.rows, stream.pack, stream.path, skip=num_skipped)
    first = next(iter(train), None)
    if first is None:
        raise ValueError(_too_short(source, stream.pack.kind, config, num_skipped))
    content = {NUM_HELD_OUT: num_skipped, "digest": _digest([first])}
    return _Part(train, None if num_held_out is None else held_out, facts, content)


def _digest(sequences: Iterable[dict[str, Any]]) -> str:
    """A hash of the sequences' tokens."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(sequence["input_ids"].numpy().tobytes())
    return digest.hexdigest()


def _most_held_out(config: RunConfig) -> int:
    """The most sequences of a stream that are held in memory for evaluation."""
    return config.eval_batches * config.per_device_train_batch_size


def _too_short(source: Source, kind: str, config: RunConfig, num_held_out: int = 0) -> str:
    if kind in CHATS:
        return f"{source.path}: no answer fits in {config.seq_len} tokens\nhint: raise --seq_len"
    return (
        f"{source.path}: the text is shorter than one sequence of {config.seq_len} tokens"
        f"{f' after {num_held_out} held out' if num_held_out else ''}\n"
        "hint: lower --seq_len or --eval_batches, leave out --streaming, or give more text"
    )


def _mixed(parts: list[Any], sources: tuple[Source, ...], config: RunConfig) -> Any:
    """One dataset made of several: all of each, or by weight until every one has been read to its end."""
    if len(parts) == 1:
        return parts[0]
    weights = [source.weight for source in sources]
    if any(isinstance(part, IterableDataset) for part in parts):
        if weights[0] is None or not all(isinstance(part, IterableDataset) for part in parts):
            raise ValueError(
                f"--dataset {config.dataset}: streams are mixed with streams, by weights\n"
                "hint: --streaming true or false for all, and A=3,B=1"
            )
        return MixedStream(parts, weights, config.seed)
    from datasets import concatenate_datasets, interleave_datasets

    numbered = [
        part.with_format(None).add_column("dataset", [number] * len(part))
        for number, part in enumerate(parts)
    ]
    alike = [_with_columns(part, numbered) for part in numbered]
    if weights[0] is None:
        return concatenate_datasets(alike).with_format("torch")
    shares = [weight / sum(weights) for weight in weights]
    mixed = interleave_datasets(
        alike, probabilities=shares, seed=config.seed, stopping_strategy="all_exhausted"
    )
    return mixed.with_format("torch")


def _with_columns(part: Any, all_parts: list[Any]) -> Any:
    """Add the columns that other parts have: joined text has neither labels nor padding of its own."""
    missing = {name for other in all_parts for name in other.column_names} - set(part.column_names)
    return part.map(partial(added_columns, names=sorted(missing)), batched=True) if missing else part


def _facts_of(packed: Any, num_rows: int, seq_len: int) -> dict[str, Any]:
    """How many rows, sequences, tokens, padding and labels a dataset has; one pass over its columns."""
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


def _described(facts: dict[str, Any]) -> str:
    """One line on a packed dataset."""
    line = f"{facts['name']}: {facts['format']}, packing {facts['packing']}"
    if "num_rows" not in facts:
        return f"{line}, streamed"
    line += f", {facts['num_rows']:,} rows in {facts['num_sequences']:,} sequences"
    if "num_padding" in facts:
        line += f", {facts['num_padding'] / facts['num_tokens']:.1%} of the tokens are padding"
    return f"{line}, {facts['num_labels'] / facts['num_tokens']:.1%} have a loss"
