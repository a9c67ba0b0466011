"""DataConfig: the part of a RunConfig that says what is trained and evaluated on."""

import math
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.config_field import flag
from slm_toolkit.user_files import exists, typed_path

SYNTHETIC = "synthetic"
DATA_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")
"of local files of data"
DATASET_FORMATS = ("auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt", "tokens")
PACKINGS = ("auto", "concat", "block_diagonal", "multipack", "none")


@dataclass(frozen=True)
class Source:
    """One dataset of several."""

    name: str
    "what its losses are reported under"
    path: str
    "hub id, file, folder or glob"
    weight: float | None
    "share of the sequences, not normalised; None: as many as it has"


@dataclass(frozen=True)
class DataConfig:
    """Which documents, as which sequences of tokens, and which of their tokens have a loss."""

    dataset: str = flag(
        SYNTHETIC,
        "hub id, or local .txt, .jsonl or .parquet files, a glob or a folder; several by commas, A=3,B=1 "
        "with weights (else all of each), and each one's loss is told; "
        "synthetic: a Markov chain, generated, the same on every machine",
        group="data",
        aliases=("dataset_name",),
    )
    parity_task: bool = flag(
        False,
        "synthetic tokens in which phrases come again, several documents in a sequence, and random weights "
        "so large that attention, positions and norms all move the loss: what `slm compare --parity` trains",
        group="data",
    )
    eval_dataset: str | None = flag(
        None,
        "held-out sets by commas, loss and perplexity of each with --eval_steps (default: a share of each "
        "--dataset)",
        group="data",
    )
    dataset_config_name: str | None = flag(None, "configuration of a hub dataset", group="data")
    dataset_format: str = flag(
        "auto",
        "what a row holds: text; messages (role, content); prompt_completion; alpaca (instruction, input, "
        "output); sharegpt (conversations); tokens (input_ids, labels too if there are); auto: by columns",
        group="data",
        choices=DATASET_FORMATS,
    )
    loss_on: str = flag(
        "answers",
        "tokens of chat data that have a loss: the answers, or all",
        group="data",
        choices=("answers", "all"),
        grid=True,
    )
    packing: str = flag(
        "auto",
        "how documents fill sequences. concat: joined and cut, tokens attend across documents; "
        "block_diagonal: the same, each document sees itself only; multipack: whole documents put together "
        "so that little is padding, each sees itself only; none: one each, padded; auto: concat for text, "
        "multipack for chat",
        group="data",
        choices=PACKINGS,
        grid=True,
    )
    text_column: str = flag("text", "column that holds the documents", group="data")
    tokenizer_name: str | None = flag(
        None, "hub id or folder; byte: needs no download (default: the model's own, else byte)", group="data"
    )
    streaming: bool | None = flag(
        None, "read documents as they are needed (default: where they are over 1 GiB)", group="data"
    )
    dataloader_num_workers: int = flag(
        0, "processes per rank that read batches ahead", group="data", grid=True
    )
    validation_split_percentage: int = flag(
        5,
        "share of the text kept for evaluation, with --eval_steps (of a stream: its first --eval_batches)",
        group="data",
    )

    @property
    def sources(self) -> tuple[Source, ...]:
        """What `--dataset` names. Raises ValueError where some have weights and some have none."""
        found = sources_of(self.dataset)
        if len({source.weight is None for source in found}) > 1:
            raise ValueError(
                f"--dataset {self.dataset}: give every dataset a weight, or none\nhint: --dataset A=3,B=1"
            )
        return found

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """What `--eval_dataset` names. Raises ValueError for weights, which mean nothing there."""
        found = sources_of(self.eval_dataset) if self.eval_dataset else ()
        if any(source.weight is not None for source in found):
            raise ValueError(f"--eval_dataset {self.eval_dataset}: held-out sets have no weights")
        return found


def sources_of(text: str) -> tuple[Source, ...]:
    """`A=3,B=1` taken apart; a path that exists as it stands is one dataset, commas or not."""
    parts = [text] if exists(typed_path(text)) else [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"--dataset {text!r} names nothing between commas\nhint: --dataset A=3,B=1")
    pairs = [_path_and_weight(part) for part in parts]
    paths = [path for path, _ in pairs]
    short = [_stem(path) for path in paths]
    names = [name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)]
    if len(set(names)) < len(names):
        raise ValueError(f"--dataset {text} names a dataset twice\nhint: one weight says how much of it")
    return tuple(Source(name, path, weight) for name, (path, weight) in zip(names, pairs, strict=True))


def _path_and_weight(part: str) -> tuple[str, float | None]:
    path, equals, number = part.rpartition("=")
    if not equals or exists(typed_path(part)):
        return part, None
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path or not 0 < weight < math.inf:
        raise ValueError(f"--dataset {part}: the weight {number!r} is not a number above 0")
    return path, weight


def _stem(path: str) -> str:
    """train of data/train.jsonl, c4 of allenai/c4, texts of texts/."""
    name = path.rstrip("/").rpartition("/")[2]
    return Path(name).stem if Path(name).suffix in DATA_SUFFIXES else name
