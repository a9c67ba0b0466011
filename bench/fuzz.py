"""Fuzz every reader of user input: an input must be accepted, or refused by a ValueError with a hint.

    python bench/fuzz.py                                     # 1,000 new inputs for each reader
    python bench/fuzz.py records chat_template --inputs 20000

Hypothesis changes values, words and bytes of the files in tests/corpus/<reader>/, and minimises a find. Write
the find into its folder finds/, which tests/contracts/test_fuzz.py reads. Exits with 1 on a find.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.cli.main import main as slm_main
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).parent.parent
LIMITS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
CORPUS = ROOT / "tests" / "corpus"
"for each reader, files like those of users; in finds/, inputs that it once could not read"


# Readers: each reads the bytes in an empty folder, which is the working folder


def read_file(data: bytes, folder: Path, *, commands: str) -> None:
    """One of the commands reads the file FILE. A DeepSpeed JSON is named by a YAML."""
    name = "mine.json" if data.lstrip()[:1] in (b"{", b"[") else "mine.yaml"
    (folder / name).write_bytes(data)
    if name == "mine.json" and "--strategy" in commands:
        name = "mine.yaml"
        text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n"
        (folder / name).write_text(text)
    choice = commands.split("; ")
    _slm(*choice[len(data) % len(choice)].replace("FILE", name).split())


def _slm(*words: str) -> None:
    with _quiet():
        slm_main(list(words))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Catches what a command prints; its exit code 2 becomes a ValueError with its stderr."""
    err = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            yield
    except SystemExit as exited:
        if exited.code not in (0, 1, None):
            raise ValueError(err.getvalue()) from None


def read_command_line(data: bytes, folder: Path) -> None:
    """`slm` with any words, one a line; `compare` and `launch` start nothing."""
    first, *words = _text(data).split("\n")
    if first == "launch":
        with _quiet():
            plan_launch(["--main_process_ip", "127.0.0.1", *words])
    elif first in ("estimate", "recommend", "doctor", "recipes", "configs", "compare"):
        _slm(first, *["--dry_run"] * (first == "compare"), *words)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape").replace("\0", "")  # no command line holds NUL


def read_records(data: bytes, folder: Path) -> None:
    """`slm report` of a good record and another; or, as a JSON list, its options and its records."""
    options, records = ["."], [(ROOT / "results/cpu/ddp/record.json").read_bytes(), data]
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        options, *values = json.loads(data)
        records = [json.dumps(value).encode() for value in values]
    for index, record in enumerate(records):
        (folder / str(index)).mkdir()
        (folder / str(index) / "record.json").write_bytes(record)
    if isinstance(options, list) and "/" not in options:  # "/" would read all records of this machine
        _slm("report", *(_text(_as_word(word)) for word in options))


def read_checkpoint(data: bytes, folder: Path) -> None:
    from slm_toolkit.run.checkpoint.files import MANIFEST_FILE, read_manifest

    (folder / MANIFEST_FILE).write_bytes(data)
    read_manifest(folder)


def read_dataset(data: bytes, folder: Path) -> None:
    marks = {b"PAR1": "parquet", b"plai": "txt", b"[{": "json"}
    name = "data." + next((marks[mark] for mark in marks if data.startswith(mark)), "jsonl")
    (folder / name).write_bytes(data)
    packing = ("block_diagonal", "multipack", "none")[len(data) % 3]
    _load(RunConfig(dataset=name, packing=packing, streaming=(None, True)[sum(data) % 2]), folder)


def _load(config: RunConfig, folder: Path) -> None:
    import datasets

    from slm_toolkit.run.data.data import load_data

    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    datasets.logging.set_verbosity(60)  # it prints to stderr before it raises
    config = dataclasses.replace(config, seq_len=64).with_defaults(has_gpu=False)
    with _quiet():
        next(iter(load_data(config, PRESETS["slm-1m"], num_sequences=2).train), None)


def read_tokenizer(data: bytes, folder: Path, *, is_template: bool = False) -> None:
    """A tokenizer.json, or a chat template, used on a conversation."""
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "[UNK]"}
    template = {"chat_template": data.decode("utf-8", "replace")} if is_template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **template}))
    words = (CORPUS / "tokenizer" / "words").read_bytes()
    (folder / "tokenizer.json").write_bytes(words if is_template else data)
    chats = f"{CORPUS}/dataset/messages.json"
    _load(RunConfig(dataset=chats, tokenizer_name="."), folder)


COMMANDS = {
    "strategy": "estimate --strategy FILE --gpu h100-80gb --num_gpus 8; "
    "compare --dry_run --strategy FILE --num_processes 8 --output_dir out",
    "convert_file": "convert FILE --to accelerate_fsdp --num_processes 8; "
    "convert FILE --to accelerate_deepspeed --output out",
    "doctor": "doctor --strategy FILE --gpu h100-80gb --num_gpus 8 --fix fixed",
    "model": "estimate --model FILE --gpu l4 --json; compare --dry_run --model FILE --output_dir out",
    "prices": "estimate --gpu l4 --prices FILE",
    "network": "estimate --gpu l4 --num_gpus 2 --network FILE",
    "config": "compare --launcher slurm --dry_run --output_dir out --config FILE; "
    "compare --dry_run --output_dir out --config FILE",
}
READERS: dict[str, Callable[[bytes, Path], None]] = {
    **{name: partial(read_file, commands=commands) for name, commands in COMMANDS.items()},
    "command_line": read_command_line,
    "records": read_records,
    "checkpoint": read_checkpoint,
    "dataset": read_dataset,
    "tokenizer": read_tokenizer,
    "chat_template": partial(read_tokenizer, is_template=True),
}


# Inputs

ODD = st.sampled_from(
    ("auto", "none", "cpu", "-1", "1e999", "\0", "\x1b[2J", "[/]", "../x", "=1+1", "2026-99-99", 10**400)
)
VALUES = st.recursive(
    ODD | st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4),
)


def seeds(name: str) -> list[bytes]:
    files = [file for file in sorted((CORPUS / name).iterdir()) if file.is_file()]
    if name in ("strategy", "convert_file", "doctor"):
        files += sorted(ROOT.glob("accel_configs/*.yaml")) + sorted(ROOT.glob("ds_configs/*.json"))
    return [file.read_bytes() for file in files]


@st.composite
def inputs(draw: st.DrawFn, of: list[bytes]) -> bytes:
    """A file of `of` in which one to three values, or words and signs, are others; or any bytes."""
    if not draw(st.integers(0, 9)):
        return draw(st.binary(max_size=400))
    seed, values = draw(st.sampled_from(of)), VALUES
    value = _parsed(seed)
    if is_text := value is None:
        value = _PIECES.findall(seed)
        values |= st.sampled_from(_PIECES.findall(draw(st.sampled_from(of))))
    for _ in range(draw(st.integers(1, 3))):
        value = _changed(draw, value, values)
    if is_text:
        return b"".join(map(_as_word, value if isinstance(value, list) else [value]))
    return (json.dumps(value) if seed[:1] in b"[{" else yaml.safe_dump(value)).encode()


_PIECES = re.compile(rb"\w+|\W")


def _parsed(seed: bytes) -> dict | list | None:
    with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):
        value = yaml.safe_load(seed)
        return value if isinstance(value, dict | list) else None


def _as_word(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _changed(draw: st.DrawFn, value: Any, others: st.SearchStrategy) -> Any:
    """A copy in which one value is another, or left out."""
    if not isinstance(value, dict | list):
        return draw(st.from_type(type(value)) | others)
    if not value or not (what := draw(st.integers(0, 9))):
        return draw(others)
    copy = value.copy()
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    if what == 1:
        del copy[key]
    else:
        copy[key] = _changed(draw, value[key], others)
    return copy


def accepts(name: str, data: bytes) -> bool:
    """False if the reader refuses the input with a hint; what else it raises is a find."""
    with tempfile.TemporaryDirectory() as above, contextlib.chdir(above):
        os.mkdir("work")
        os.chdir("work")
        try:
            READERS[name](data, Path.cwd())
        except ValueError as error:
            if "hint: " not in str(error):
                raise
            return False
        except BaseException as error:  # a panic of Rust, which hypothesis would not catch
            raise AssertionError(repr(error)) from error
    return True


def fuzz(name: str, limits: settings) -> Counter[bool]:
    """Number of inputs that were accepted (True) and refused (False). Raises the minimised find.

    More than 10 s of processor time are a find, too.
    """
    counts: Counter[bool] = Counter()

    @limits
    @given(inputs(seeds(name)))
    def reads(data: bytes) -> None:
        began = time.process_time()
        counts[accepts(name, data)] += 1
        assert time.process_time() - began < 10

    reads()
    return counts


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", default=READERS, help=", ".join(READERS))
    parser.add_argument("--inputs", type=int, default=1000, help="for each reader (default: 1000)")
    args = parser.parse_args()
    limits = settings(LIMITS, max_examples=args.inputs)
    has_find = False
    for name in args.readers:
        try:
            counts = fuzz(name, limits)
            print(f"{name:14} {counts[True]:6,} accepted {counts[False]:6,} refused", flush=True)
        except Exception:
            has_find = True
            print(f"{name:14} FIND\n{traceback.format_exc()}", flush=True)
    return has_find


if __name__ == "__main__":
    raise SystemExit(main())
