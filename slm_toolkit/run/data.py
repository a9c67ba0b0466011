"""Token sequences for training: generated from a seed, or documents packed into full sequences."""

import glob
import itertools
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from slm_toolkit.config import SYNTHETIC, RunConfig
from slm_toolkit.models import ModelSpec

STREAM_ABOVE_BYTES = 2**30
_FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


class MarkovTokens(Dataset):
    """Sequences of a Markov chain over the whole vocabulary, the same for the same seed everywhere.

    With probability 0.5 the next token is the present one's fixed successor, else one drawn from a Zipf law.
    A model first learns how often each token comes, then who follows whom, so that losses fall from the
    first steps on.
    Item i is (seq_len,) int64 and depends on seed, i and vocabulary only.
    """

    FOLLOW = 0.5

    def __init__(
        self, *, vocab_size: int, seq_len: int, num_sequences: int, seed: int, first: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.cycle = rng.permutation(vocab_size)  # the successor of a token is the next one on this cycle
        law = 1.0 / np.arange(1, vocab_size + 1)
        self.cumulative = np.cumsum(law / law.sum())
        self.seq_len, self.num_sequences, self.seed, self.first = seq_len, num_sequences, seed, first

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([self.seed, 1, self.first + index])
        drawn = rng.random(self.seq_len) >= self.FOLLOW
        drawn[0] = True
        places = np.searchsorted(
            self.cumulative, rng.random(self.seq_len)
        )  # where on the cycle a drawn token sits
        last_draw = np.maximum.accumulate(np.where(drawn, np.arange(self.seq_len), 0))
        places = places[last_draw] + np.arange(self.seq_len) - last_draw
        return {"input_ids": torch.from_numpy(self.cycle[places % len(self.cycle)])}


def load_datasets(config: RunConfig, spec: ModelSpec, *, num_sequences: int) -> tuple[Any, Any, Any]:
    """Training sequences, held-out ones (None without --eval_steps) and the tokenizer (None for synthetic).

    Each sequence is {"input_ids": (seq_len,) int64}. `num_sequences` is how many the run can use, for data
    that never ends. Raises ValueError, with a hint, for data that isn't there or holds no text.
    """
    evaluate = config.eval_steps is not None
    if config.dataset == SYNTHETIC:
        common = {"vocab_size": spec.vocab_size, "seq_len": config.seq_len, "seed": config.seed}
        train = MarkovTokens(num_sequences=num_sequences, **common)
        held_out = MarkovTokens(num_sequences=4096, first=2**40, **common) if evaluate else None
        return train, held_out, None
    tokenizer = load_tokenizer(config, spec)
    documents, streaming = _load_documents(config)
    if streaming:
        return _split_stream(documents, tokenizer, config, evaluate)
    packed = documents.map(
        _pack,  # with arguments of its own: the cache's key must not depend on the rest of the configuration
        fn_kwargs={"tokenizer": tokenizer, "seq_len": config.seq_len},
        input_columns=config.text_column,
        batched=True,
        batch_size=1000,
        remove_columns=documents.column_names,
        desc="packing documents",
    ).with_format("torch")
    if len(packed) == 0:
        raise ValueError(
            f"{config.dataset}: the text is shorter than one sequence of {config.seq_len} tokens\n"
            "hint: lower --seq_len or give more text"
        )
    if not evaluate:
        return packed, None, tokenizer
    num_held_out = max(1, len(packed) * config.validation_split_percentage // 100)
    if num_held_out == len(packed):
        raise ValueError(
            f"{config.dataset}: one sequence can't be split for evaluation\nhint: leave out --eval_steps"
        )
    num_train = len(packed) - num_held_out
    return packed.select(range(num_train)), packed.select(range(num_train, len(packed))), tokenizer


def load_tokenizer(config: RunConfig, spec: ModelSpec) -> Any:
    """The tokenizer asked for, the model's own, or ByT5's bytes, which need no download."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    name = config.tokenizer_name
    if name is None and spec.path is not None:
        folder = Path(spec.path).parent if spec.path.endswith(".json") else Path(spec.path)
        has_own = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
        name = str(folder) if has_own or not folder.exists() else None
    if name in (None, "byte"):
        tokenizer = ByT5Tokenizer()
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"can't load tokenizer {name!r}: {str(error).splitlines()[0]}\n"
                "hint: --tokenizer_name byte needs none"
            ) from None
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {name!r} has no end-of-text token to put between documents\n"
            "hint: set its eos_token, or use --tokenizer_name byte"
        )
    if len(tokenizer) > spec.vocab_size:
        raise ValueError(
            f"tokenizer {name or 'byte'!r} has {len(tokenizer)} tokens, "
            f"model {spec.name} only {spec.vocab_size}\n"
            "hint: choose a model with a larger vocabulary, or --tokenizer_name byte"
        )
    return tokenizer


def _load_documents(config: RunConfig) -> tuple[Any, bool]:
    """The raw documents through `datasets`, and whether they are streamed."""
    from datasets import load_dataset, load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError

    files = _local_files(config.dataset)
    if files:
        kinds = {_FORMATS[Path(file).suffix.lower()] for file in files}
        if len(kinds) > 1:
            raise ValueError(
                f"{config.dataset} mixes {', '.join(sorted(kinds))} files\nhint: give one kind by a glob"
            )
        size_bytes = sum(Path(file).stat().st_size for file in files)
        if size_bytes == 0:
            raise ValueError(
                f"{config.dataset} holds no text: {len(files)} empty files\nhint: give files with text"
            )
        source = {"path": kinds.pop(), "data_files": files}
        if source["path"] == "text":
            source["sample_by"] = (
                "document"  # a file is a document: packing joins them with the end-of-text token
            )
    else:
        source = {"path": config.dataset, "name": config.dataset_config_name}
        size_bytes = 0
    try:
        if not files:
            size_bytes = load_dataset_builder(**source).info.download_size or math.inf  # unknown: may be huge
        streaming = config.streaming if config.streaming is not None else size_bytes > STREAM_ABOVE_BYTES
        documents = load_dataset(**source, split="train", streaming=streaming)
        first = next(iter(documents), None)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"can't find dataset {config.dataset!r}: {str(error).splitlines()[0]}\n"
            "hint: give a hub id, or .txt, .jsonl or .parquet files by path, folder or glob"
        ) from None
    except (
        Exception
    ) as error:  # datasets raises its own and pyarrow's for files that are not what their names say
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(
            f"can't read dataset {config.dataset!r}: {reason}\nhint: is it UTF-8 and well-formed?"
        ) from None
    if first is None or config.text_column not in first:
        columns = ", ".join(first) if first else "none"
        raise ValueError(
            f"{config.dataset} has no column {config.text_column!r} (columns: {columns})\n"
            "hint: --text_column names it"
        )
    if not isinstance(first[config.text_column], str):
        kind = type(first[config.text_column]).__name__
        raise ValueError(
            f"{config.dataset}: column {config.text_column!r} holds {kind}, not text\n"
            "hint: --text_column names another"
        )
    if not streaming and not any(text and text.strip() for text in documents[config.text_column]):
        raise ValueError(
            f"{config.dataset} holds no text\nhint: column {config.text_column!r} is blank throughout"
        )
    return documents, streaming


def _local_files(dataset: str) -> list[str]:
    """Files that a path, a folder or a glob names; empty for what can only be a hub id."""
    path = Path(dataset).expanduser()
    if path.is_dir():
        found = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in _FORMATS)
        if not found:
            raise ValueError(
                f"{dataset} holds no .txt, .jsonl or .parquet file\nhint: give a folder that does"
            )
        return found
    found = sorted(glob.glob(str(path), recursive=True))
    if odd := [file for file in found if Path(file).suffix.lower() not in _FORMATS]:
        raise ValueError(f"{odd[0]}: not one of {', '.join(_FORMATS)}\nhint: rename or convert the file")
    looks_local = (
        path.suffix.lower() in _FORMATS or any(sign in dataset for sign in "*?[~") or dataset[:1] in "./"
    )
    if not found and looks_local:
        raise ValueError(f"no such file: {dataset}\nhint: paths are relative to {Path.cwd()}")
    return found


def _pack(texts: list[Any], tokenizer: Any, seq_len: int) -> dict[str, list[list[int]]]:
    """Join documents, end-of-text after each, and cut full sequences; the rest of a batch is dropped."""
    tokens = list(chain.from_iterable(_tokens_of(texts, tokenizer)))
    last_start = len(tokens) - seq_len
    return {"input_ids": [tokens[start : start + seq_len] for start in range(0, last_start + 1, seq_len)]}


def _tokens_of(texts: list[Any], tokenizer: Any) -> list[list[int]]:
    """Each document's tokens and an end-of-text token; blank documents are left out."""
    texts = [text for text in texts if text and text.strip()]
    documents = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [[*document, tokenizer.eos_token_id] for document in documents]


class _PackedStream(IterableDataset):
    """Sequences of streamed documents, packed as they come; every pass reads the source again."""

    def __init__(self, source: Any, tokenizer: Any, config: RunConfig, *, skip: int = 0) -> None:
        self.source, self.tokenizer, self.config, self.skip = source, tokenizer, config, skip

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return itertools.islice(self._sequences(), self.skip, None)

    def _sequences(self) -> Iterator[dict[str, torch.Tensor]]:
        column, seq_len, tokens = self.config.text_column, self.config.seq_len, []
        for document in self.source:
            tokens += chain.from_iterable(_tokens_of([document[column]], self.tokenizer))
            while len(tokens) >= seq_len:
                yield {"input_ids": torch.tensor(tokens[:seq_len])}
                tokens = tokens[seq_len:]


def _split_stream(documents: Any, tokenizer: Any, config: RunConfig, evaluate: bool) -> tuple[Any, Any, Any]:
    """Streamed documents: the first sequences, as many as `eval_batches` hold, are held out in memory."""
    if config.dataloader_num_workers > 1:  # each would read it whole, or in another order
        raise ValueError(
            f"--dataloader_num_workers {config.dataloader_num_workers} with a stream, which one process "
            "reads in order\nhint: --dataloader_num_workers 1, or --streaming false"
        )
    num_held_out = config.eval_batches * config.per_device_train_batch_size if evaluate else 0
    stream = _PackedStream(documents, tokenizer, config)
    held_out = list(itertools.islice(iter(stream), num_held_out))
    train = _PackedStream(documents, tokenizer, config, skip=num_held_out)
    if next(iter(train), None) is None:
        raise ValueError(
            f"{config.dataset}: the text is shorter than one sequence of {config.seq_len} tokens"
            f"{f' after {num_held_out} held out' if evaluate else ''}\n"
            "hint: lower --seq_len or --eval_batches, leave out --streaming, or give more text"
        )
    return train, held_out if evaluate else None, tokenizer
