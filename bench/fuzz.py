"""Fuzz every reader of user input: each input must be accepted or refused by a ValueError with a hint.

    python bench/fuzz.py --inputs 20000                           with a new seed, which it prints
    python bench/fuzz.py --seconds 60 --draft                     as many inputs as a minute allows
    python bench/fuzz.py --readers record prices --inputs 5000 --seed 2

An input is a real file or command with mutated bytes or values; the same seed makes the same inputs. Another
exception, more than SECONDS, more than MEMORY_BYTES or the end of the process is a find. A find is minimised
and written to tests/corpus/<reader>/, which tests/contracts/test_fuzz.py replays. Exits with 1 on a find.
"""

import argparse
import contextlib
import dataclasses
import encodings.unicode_escape  # noqa: F401 - `_read_places` cannot import it as another user
import hashlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"
)

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "tests" / "corpus"
SECONDS = 10.0
"limit of CPU time for one input; other work on the machine does not count"
WALL_SECONDS = 60.0
"limit of waiting, and of native code, which no alarm interrupts: then the parent kills the worker"
MEMORY_BYTES = 2**30
"limit for one input, above what the worker uses before it"


# Readers


YAML_OF_JSON = (
    "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n"
)


def _write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def _kind(data: bytes) -> str:
    return "json" if data.lstrip()[:1] in (b"{", b"[", b'"') else "yaml"


def _use_strategy(strategy: Any, folder: Path) -> None:
    """Checks, estimates and writes a strategy."""
    from slm_toolkit.config.run_config import RunConfig
    from slm_toolkit.predict.grid import estimates
    from slm_toolkit.record.run_record import everything_asked, identity_of
    from slm_toolkit.strategy.strategy import contradictions, on_nodes, write_resolved

    contradictions(strategy, RunConfig())
    identity_of(everything_asked(RunConfig(), strategy, 2), {}, None)
    write_resolved(strategy, folder / "out", 2)
    on_nodes(strategy, 2)
    estimates({"model": "slm-100m"}, [strategy], gpus=["h100-80gb"], num_gpus=[8])


def _read_strategy_yaml(data: bytes, folder: Path) -> None:
    from slm_toolkit.strategy.strategy import find_strategy

    (folder / "ds_configs").mkdir()
    for source in (ROOT / "ds_configs").glob("*.json"):
        (folder / "ds_configs" / source.name).write_bytes(source.read_bytes())
    _write(folder, "mine.yaml", data)
    _use_strategy(find_strategy("mine.yaml"), folder)


def _read_deepspeed_json(data: bytes, folder: Path) -> None:
    from slm_toolkit.strategy.strategy import find_strategy

    _write(folder, "mine.json", data)
    _write(folder, "mine.yaml", YAML_OF_JSON.encode())
    _use_strategy(find_strategy("mine.yaml"), folder)


def _read_model_config(data: bytes, folder: Path) -> None:
    (folder / "m").mkdir()
    _write(folder / "m", "config.json", data)
    _use_model("m")


def _read_model_name(data: bytes, folder: Path) -> None:
    _use_model(data.decode("utf-8", "surrogateescape"))


def _use_model(name: str) -> None:
    from slm_toolkit.config.run_config import RunConfig
    from slm_toolkit.model.from_config import check_trainable
    from slm_toolkit.predict.grid import estimates
    from slm_toolkit.record.run_record import model_facts
    from slm_toolkit.strategy.strategy import find_strategy

    rows = estimates({"model": name}, [find_strategy("ds_zero3")], gpus=["h100-80gb"], num_gpus=[8])
    json.dumps([dataclasses.asdict(row) for row in rows], allow_nan=False)
    from slm_toolkit.model.names import find_model

    spec = find_model(name)
    json.dumps(model_facts(spec), allow_nan=False)
    check_trainable(spec, RunConfig(model=name))


def _read_prices(data: bytes, folder: Path) -> None:
    from slm_toolkit.hardware.prices import read_prices

    for price in read_prices(_write(folder, "prices.yaml", data)).values():
        str(price)


def _read_network(data: bytes, folder: Path) -> None:
    from slm_toolkit.hardware.network import COLLECTIVES, read_network, seconds

    network = read_network(_write(folder, "network.json", data))
    for collective in COLLECTIVES:
        seconds(network, collective, 2**30)


def _read_record(data: bytes, folder: Path) -> None:
    """`slm report` with this record and a good one: a bad record must not lose the good one's row."""
    good = ROOT / "results" / "cpu" / "ddp" / "record.json"
    for name, content in (("bad", data), ("good", good.read_bytes())):
        (folder / name).mkdir()
        _write(folder / name, "record.json", content)
    # a page with all pictures takes twenty times as long: one record in eight
    words = ["--html", "page.html", "--csv", "r.csv", "--markdown", "r.md", "--memory", "--phases"]
    _slm("report", ".", *(words if len(data) % 8 == 0 else ("--json",) if len(data) % 8 < 4 else ()))
    if len(data) % 8 == 1:
        _slm("report", ".", "--errors")
    if len(data) % 8 == 2:
        _slm("report", ".", "--baseline", "good")


def _read_record_set(data: bytes, folder: Path) -> None:
    """`slm report` with several records and options."""
    content = _object(data)
    records, options = content.get("records"), content.get("options")
    if not (isinstance(records, list) and isinstance(options, list)):
        return
    for index, record in enumerate(records):
        (folder / "runs" / str(index)).mkdir(parents=True)
        _write(folder / "runs" / str(index), "record.json", json.dumps(record).encode())
    # "/" would read all records of this machine
    if all(isinstance(word, str) and word != "/" and _is_word(word) for word in options):
        _slm("report", *([] if "--schema" in options else ["runs"]), *options)


def _is_word(text: str) -> bool:
    """True if a command line can hold the text: no half of a surrogate pair."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _read_places(data: bytes, folder: Path) -> None:
    """A command with odd, taken or forbidden paths, run as another user than root."""
    first, *words = data.decode("utf-8", "surrogateescape").split("\n")
    if not words or words[0] not in ("report", "configs", "recipes", "doctor", "convert", *_ESTIMATING):
        return
    if words[0] == "compare" and "--dry_run" not in words:
        return
    (folder / "file").write_text("a file")
    (folder / "folder").mkdir()
    (folder / "locked").mkdir()
    (folder / "locked" / "file").write_text("not for you")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    for place in (folder / "locked" / "file", folder / "locked"):
        place.chmod(0)
    for place in (folder, folder / "folder"):
        place.chmod(0o777)
    if first == "unreadable":
        folder.chmod(0)
    folder.parent.chmod(0o755)
    try:
        with contextlib.suppress(ValueError):
            _slm(*words)  # imports while Python's own files are readable
        if os.geteuid() == 0:
            os.seteuid(_NOBODY)
        _slm(*words)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        for place in (folder, folder / "locked"):
            place.chmod(0o755)


_ESTIMATING = ("estimate", "recommend", "compare")
_NOBODY = 65534


def _object(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(data)
        return content if isinstance(content, dict) else {}
    return {}


def _read_checkpoint(data: bytes, folder: Path) -> None:
    """A manifest with a correct checksum: with a wrong one, nothing after it would be read."""
    from slm_toolkit.run.checkpoint.files import MANIFEST_FILE, Reader, damage, digest_of, read_manifest
    from slm_toolkit.run.checkpoint.resume import Checkpoint, check_data, num_held_out

    with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
        content = json.loads(data)
        rest = {name: value for name, value in content.items() if name not in ("format", "sha256")}
        data = json.dumps({**content, "sha256": digest_of(rest)}).encode()
    _write(folder, MANIFEST_FILE, data)
    manifest = read_manifest(folder)
    checkpoint = Checkpoint(folder, manifest, Reader(folder, manifest))
    damage(folder, checkpoint.manifest.files)
    num_held_out(checkpoint)
    check_data(checkpoint, [{"num_held_out": 12, "digest": "0"}])


def _read_signed_checkpoint(data: bytes, folder: Path) -> None:
    """Resumes from a checkpoint that somebody changed and signed again."""
    import torch

    from slm_toolkit.run.checkpoint import resume, start
    from slm_toolkit.run.checkpoint.files import FORMAT, MANIFEST_FILE, digest_of

    run = tiny_run()
    try:
        content = json.loads(data)
        manifest = content["manifest"]
        for name, tensors in content["tensors"].items():
            _write(folder, Path(name).name, _safetensors(tensors, run.tensors.get(name, {})))
        for file in manifest["files"]:
            written = (folder / file["name"]).read_bytes()
            file.setdefault("num_bytes", len(written))
            file.setdefault("sha256", hashlib.sha256(written).hexdigest())
        signed = {"format": FORMAT, "sha256": digest_of(manifest), **manifest}
    except (ValueError, LookupError, TypeError, AttributeError, OSError, OverflowError, RecursionError):
        return  # cannot be written as a checkpoint
    _write(folder, MANIFEST_FILE, json.dumps(signed).encode())
    with contextlib.redirect_stderr(io.StringIO()):
        checkpoint = resume.choose(
            start.find_checkpoints(str(folder), folder, run.description, num_steps=None), run.accelerator
        )
    resume.num_held_out(checkpoint)
    resume.check_data(checkpoint, run.manifest["run"]["data"])
    resume.load_weights(run.model, checkpoint)
    resume.load_state(checkpoint, run.model, run.optimizer, run.accelerator)
    resume.load_random_states(checkpoint, run.accelerator)
    torch.rand(1000)
    json.dumps(resume.described(checkpoint, run.manifest["written_by"]), allow_nan=False)


def _safetensors(tensors: dict[str, Any], whole: dict[str, bytes]) -> bytes:
    """A safetensors file with these dtypes and shapes and the bytes of `whole`, padded with zeros.

    A tensor's `data_offsets` replace the right ones; its `byte` fills the whole tensor.
    """
    header, data = {}, b""
    for name, tensor in tensors.items():
        size = math.prod(tensor["shape"]) * {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(tensor["dtype"], 1)
        if not 0 <= size <= 2**20:
            raise ValueError(size)
        known = {field: value for field, value in tensor.items() if field != "byte"}
        header[name] = {"data_offsets": [len(data), len(data) + size], **known}
        content = bytes([tensor["byte"]]) * size if "byte" in tensor else whole.get(name, b"")[:size]
        data += content.ljust(size, b"\0")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _read_foreign(data: bytes, folder: Path) -> None:
    """Another program's checkpoint: an index of torch.distributed.checkpoint, or a file of torch.save."""
    from slm_toolkit.run.checkpoint.foreign import open_foreign

    if data.startswith(b"PK"):
        for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
            _write(folder, name, data)
    else:
        _write(folder, ".metadata", data)
        _write(folder, "__0_0.distcp", foreign_files()["__0_0.distcp"])
    reader = open_foreign(folder)
    for name, num_elements in reader.num_elements.items():
        for kind in ("weights", "exp_avg", "exp_avg_sq"):
            reader.read(f"{kind}/{name}", 0, num_elements)


def _read_timeline(data: bytes, folder: Path) -> None:
    from slm_toolkit.record.memory_timeline import read_segments
    from slm_toolkit.report.tables.memory import memory_picture

    path = _write(folder, "memory_timeline.csv", data)
    at_peak = {"phase": "data", "module": "", "num_bytes": 1, "parts": {}, "modules": {}}
    memory_picture(at_peak, read_segments(path))


def _read_convert_file(data: bytes, folder: Path) -> None:
    name = f"mine.{_kind(data)}"
    _write(folder, name, data)
    from slm_toolkit.cli.convert import _account, _as_json
    from slm_toolkit.convert.convert import convert

    num = (None, 1, 2, 8, 12)[len(data) % 5]
    written = convert(name, ("fsdp", "deepspeed")[sum(data) % 2], num_processes=num, folder=None)
    _account(written)
    json.dumps(_as_json(written, []))
    for name, text in written.files.items():
        _write(folder, f"out-{name}", text.encode())


def _read_doctor(data: bytes, folder: Path) -> None:
    name = f"mine.{_kind(data)}"
    _write(folder, name, data)
    if name == "mine.yaml":
        _write(folder, "mine.json", (ROOT / "ds_configs" / "zero3.json").read_bytes())
    _slm("doctor", "--strategy", name, "--gpu", "h100-80gb", "--num_gpus", "8", "--fix", "fixed")


def _read_command_line(data: bytes, folder: Path) -> None:
    """`slm` with any flags, numbers, GPU names and prices."""
    text = data.decode("utf-8", "surrogateescape").replace("\0", "")  # no command line holds NUL
    words = text.split("\n")
    if words[0] in ("estimate", "recommend", "doctor", "recipes", "configs"):
        _slm(*words)


def _read_flags(data: bytes, folder: Path) -> None:
    """The training flags, alone and together."""
    from slm_toolkit.config.flags import add_flags, config_from_args, flags_of
    from slm_toolkit.config.parser import Parser, with_underscores

    parser = Parser(prog="fuzz")
    add_flags(parser, grid=False)
    with _quiet():
        args = parser.parse_args(with_underscores(data.decode("utf-8", "surrogateescape").split("\n")))
    config = config_from_args(args)
    config.check()
    filled = config.with_defaults(has_gpu=True)
    filled.learning_rate_of(8)
    flags_of(filled)
    json.dumps(dataclasses.asdict(filled), allow_nan=False)


def _read_rows(data: bytes, folder: Path) -> None:
    """Packs rows into sequences, by column as `datasets` passes them."""
    from slm_toolkit.run.data.data import Pack
    from slm_toolkit.run.data.documents import format_of

    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) and row for row in rows)):
        return
    if any("\ud800" <= character <= "\udfff" for character in json.dumps(rows, ensure_ascii=False)):
        return  # Arrow's text is UTF-8, which has no surrogates
    rows = [{name: row.get(name) for name in rows[0]} for row in rows]  # Arrow has one schema for all rows
    formats = ("messages", "alpaca", "sharegpt", "tokens", "prompt_completion")
    dataset_format = ("auto", "auto", "auto", *formats)[len(data) % 8]
    kind = format_of(rows[0], "rows", asked=dataset_format, text_column="text")
    packing = ("block_diagonal", "multipack", "none", "multipack")[sum(data) % 4]
    pack = Pack(_tokenizer(), kind, packing, 32, "text", ("answers", "all")[sum(data) % 2], 384)
    columns = pack({name: [row[name] for row in rows] for name in rows[0]})
    import torch

    tokens = torch.as_tensor(columns["input_ids"], dtype=torch.int64)
    assert tokens.numel() == 0 or (tokens.min() >= 0 and tokens.max() < 384), "a token out of the vocabulary"


@cache
def _tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    from slm_toolkit.run.data.documents import CHAT_TEMPLATE

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _read_dataset_file(data: bytes, folder: Path) -> None:
    """Loads a whole file with `datasets`."""
    import datasets

    from slm_toolkit.config.run_config import RunConfig
    from slm_toolkit.model.model_spec import PRESETS
    from slm_toolkit.run.data.data import load_data

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(60)  # it prints to stderr before it raises
    marks = {b"PAR1": "parquet", b"\x1f\x8b\x08\x08": "jsonl.gz", b"plai": "txt"}
    name = "data." + marks.get(data[:4], ("jsonl", "json", "jsonl", "txt", "parquet")[len(data) % 5])
    _write(folder, name, data)
    config = RunConfig(dataset=name, seq_len=16, streaming=(None, True)[sum(data) % 2]).with_defaults(
        has_gpu=False
    )
    with _quiet():
        data_splits = load_data(config, PRESETS["slm-1m"], num_sequences=2)
        next(iter(data_splits.train), None)


def _read_tokenizer(data: bytes, folder: Path) -> None:
    """A tokenizer.json, used on a text."""
    _load_with_tokenizer(folder, data, None)


def _read_chat_template(data: bytes, folder: Path) -> None:
    """A chat template, used on a conversation."""
    _load_with_tokenizer(folder, json.dumps(TOKENIZER).encode(), data.decode("utf-8", "replace"))


def _load_with_tokenizer(folder: Path, tokenizer: bytes, template: str | None) -> None:
    from slm_toolkit.config.run_config import RunConfig
    from slm_toolkit.model.model_spec import PRESETS
    from slm_toolkit.run.data.data import Pack
    from slm_toolkit.run.data.documents import load_tokenizer

    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "[UNK]"}
    (folder / "mine").mkdir()
    _write(folder / "mine", "tokenizer.json", tokenizer)
    _write(
        folder / "mine", "tokenizer_config.json", json.dumps({**names, "chat_template": template}).encode()
    )
    config = RunConfig(model="slm-1m", tokenizer_name=str(folder / "mine"), seq_len=16)
    loaded = load_tokenizer(config, PRESETS["slm-1m"])
    kind, rows = (
        ("text", {"text": ["the quick brown\nfox \u00e9"]}) if template is None else ("messages", _CHAT)
    )
    loss_on = ("answers", "all")[len(template or "") % 2]
    columns = Pack(loaded, kind, "none", 16, "text", loss_on, PRESETS["slm-1m"].vocab_size)(rows)
    assert all(0 <= token < PRESETS["slm-1m"].vocab_size for row in columns["input_ids"] for token in row)


_CHAT = {
    "messages": [
        [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}] * 2
    ]
}


def _read_dataset_names(data: bytes, folder: Path) -> None:
    """Values of `--dataset` for local files."""
    from slm_toolkit.config.dataset_files import local_files
    from slm_toolkit.config.run_config import RunConfig

    _write(folder, "a.txt", b"text")
    config = RunConfig(dataset=data.decode("utf-8", "surrogateescape"))
    config.check()
    for source in config.sources:
        local_files(source.path)


def _read_slurm(data: bytes, folder: Path) -> None:
    from slm_toolkit.compare.slurm import SLURM_TEMPLATE, slurm_nodes

    options, _, template = data.partition(b"\n")
    path = _write(folder, "slurm.sh", template or SLURM_TEMPLATE.read_bytes())
    text = options.decode("utf-8", "surrogateescape")
    slurm_nodes(num_nodes=2, gpus_per_node=1, options=text, template=path)


def _read_launch(data: bytes, folder: Path) -> None:
    """Arguments of `slm launch`, up to the rendezvous."""
    from slm_toolkit.cli.launch import plan_launch

    for source in (ROOT / "accel_configs").glob("*shard.yaml"):
        _write(folder, source.name, source.read_bytes())
    words = data.decode("utf-8", "surrogateescape").split("\n")
    if not any(word.startswith("--main_process_ip") for word in words):  # a host name would need DNS
        words = ["--main_process_ip", "127.0.0.1", *words]
    with _quiet():
        plan_launch(words)


def _read_environment(data: bytes, folder: Path) -> None:
    from slm_toolkit.launch.rendezvous import PATIENCE_VARIABLE, patience_seconds
    from slm_toolkit.run.peers.launch_info import find_launch

    text = data.decode("utf-8", "surrogateescape").replace("\0", "")
    os.environ[PATIENCE_VARIABLE] = os.environ["WORLD_SIZE"] = text
    try:
        with contextlib.suppress(ValueError):
            patience_seconds()
        find_launch()
    finally:
        del os.environ[PATIENCE_VARIABLE], os.environ["WORLD_SIZE"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            yield
        except SystemExit as exited:
            if exited.code == 2 and "error: " in stderr.getvalue() and "hint: " in stderr.getvalue():
                raise ValueError(stderr.getvalue()) from None
            if exited.code not in (0, 1):
                raise AssertionError(f"exit code {exited.code}: {stderr.getvalue()}") from None


def _slm(*words: str) -> None:
    """Runs `slm` in this process; its exit code 2 becomes a ValueError with its stderr."""
    from slm_toolkit.cli.main import main

    with _quiet():
        code = main(list(words))
        assert code in (0, 1, None), code


# Seeds


def files(*patterns: str) -> list[bytes]:
    return [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def lines(*commands: str) -> list[bytes]:
    return [command.replace(" ", "\n").encode() for command in commands]


def dumped(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


YAMLS = (
    b"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
    b"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n"
    b"  gradient_clipping: 1.0\n"
    b"  offload_optimizer_device: cpu\n  offload_param_device: nvme\n  zero3_init_flag: true\n",
    b"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
    b"  fsdp_offload_params: true\n"
    b"parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    b"  parallelism_config_tp_size: 1\ndynamo_config:\n  dynamo_backend: INDUCTOR\n",
)
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 1e6},
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 100,
    "n_inner": 256,
}
NEOX = {**LLAMA, "model_type": "gpt_neox"}
MPT = {
    "model_type": "mpt",
    "n_layers": 2,
    "d_model": 64,
    "n_heads": 4,
    "max_seq_len": 128,
    "vocab_size": 100,
    "expansion_ratio": 4,
    "attn_config": {"alibi": True},
    "no_bias": True,
    "tie_word_embeddings": True,
}
SLM = (
    "estimate --model slm-100m --strategy ddp ds_zero3 --gpu h100-80gb --num_gpus 8 --seq_len 512 "
    "--usd_per_gpu_hour 2.5",
    "estimate --model slm-700m --strategy ddp --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --json",
    "estimate --peft lora --lora_r 16 --lora_alpha 32.0 --strategy ddp --gpu l4 --num_gpus 1 --largest_batch",
    "recommend --model slm-100m --gpu h100-80gb:8@2.49 --tokens 1B --strategy ddp "
    "--per_device_train_batch_size 8 "
    "--gradient_checkpointing none --loss_kernel hf --deadline_hours 10 --budget_usd 100",
    "recommend --model slm-100m --gpu l4:1 --target_loss 3.5 --global_batch_tokens 0.5M --strategy ddp "
    "--per_device_train_batch_size 8 --gradient_checkpointing none --loss_kernel hf",
    "doctor --model slm-100m --strategy ddp --gpu h100-80gb --num_gpus 8 --host_ram_gib 64 --versions "
    "torch=2.12",
    "estimate --inter_node_gbps 100 --gpus_per_node 8 --num_gpus 16 --gpu a100-80gb --provider AWS "
    "--price_kind spot",
    "recipes lora",
    "configs --copy here --num_machines 2 --gpus_per_node 4",
)
PLACED = (
    "report PLACE|report PLACE PLACE --json|report --baseline PLACE PLACE|report . --csv PLACE|"
    "report . --markdown PLACE|report . --html PLACE|"
    "configs --copy PLACE|recipes --copy PLACE|recipes PLACE|doctor --strategy PLACE|"
    "doctor --model PLACE|doctor --model slm-1m --strategy PLACE --fix PLACE|doctor --dataset PLACE|"
    "convert PLACE --to accelerate_fsdp|convert ds_zero2 --to accelerate_fsdp --output PLACE|"
    "estimate --model PLACE|estimate --strategy PLACE --gpu l4|estimate --prices PLACE --gpu l4|"
    "recommend --model slm-1m --gpu l4:1 --tokens 1e6 --strategy ddp --per_device_train_batch_size 8 "
    "--gradient_checkpointing none --loss_kernel hf --write PLACE|"
    "compare --dry_run --strategy PLACE --output_dir PLACE|compare --dry_run --output_dir PLACE|"
    "compare --dry_run --dataset PLACE --model slm-1m --strategy ddp --baseline PLACE|"
    "compare --dry_run --tokenizer_name PLACE --model slm-1m|compare --dry_run --model PLACE --csv PLACE"
)
"commands; `mutate_places` replaces each PLACE"
FLAGS = (
    "--model slm-1m --seq_len 128 --max_steps 3 --learning_rate 3e-4 --weight_decay 0.1 --max_grad_norm 1.0",
    "--num_train_epochs 1.5 --dataset a=3,b=1 --eval_steps 2 --eval_dataset c "
    "--validation_split_percentage 5",
    "--adam_beta1 0.9 --adam_beta2 0.95 --warmup_steps 2 --seed 1 --run_name x --output_dir y --rehearse 8",
    "--peft lora --lora_r 8 --lora_dropout 0.1 --lora_alpha 16 --scale_lr sqrt --base_batch_size 4 --fp8 "
    "rowwise",
    "--gradient_accumulation_steps 4 --per_device_train_batch_size 2 --save_steps 2 --timing_warmup_steps 1",
)
CHATS = (
    [{"text": "some words"}, {"text": "others"}, {"text": None}],
    [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2,
    [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 2,
    [{"instruction": "do", "input": "this", "output": "done"}] * 2,
    [{"prompt": "a", "completion": "b"}] * 2,
    [{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}],
    [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 0]}] * 2,
    [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b"},
            ]
        }
    ],
)
NETWORK = {
    "world_size": 2,
    "num_nodes": 1,
    "gpus_per_node": 2,
    "backend": "gloo",
    "gpu": None,
    "date": "d",
    "versions": {},
    "command": "c",
    "timings": [
        {"collective": name, "num_bytes": size, "seconds": size / 1e9, "all_seconds": [size / 1e9] * 3}
        for name in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (2**20, 2**24)
    ],
}


CHECKPOINT = {
    "format": 3,
    "sha256": "",
    "step": 6,
    "optimizer_steps": 6,
    "order": 3,
    "frozen": None,
    "scaler": None,
    "run": {
        "model": "slm-1m",
        "seed": 0,
        "sequences_per_step": 8,
        "data": [{"num_held_out": 12, "digest": "0"}],
    },
    "written_by": {
        "strategy": "ddp",
        "num_processes": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "base_batch_size": 4,
    },
    "num_elements": {"lm_head.weight": 100},
    "files": [
        {
            "name": f"rank_{rank}.safetensors",
            "num_bytes": 8,
            "sha256": "0",
            "starts": {"weights/lm_head.weight": 50 * rank},
            "sizes": {"weights/lm_head.weight": 50},
        }
        for rank in range(2)
    ],
}


@dataclass(frozen=True)
class TinyRun:
    """A model after one step, and everything that resumes from its checkpoint."""

    model: Any
    optimizer: Any
    accelerator: Any
    description: dict[str, Any]
    manifest: dict[str, Any]
    "of its checkpoint"
    tensors: dict[str, dict[str, bytes]]
    "flat tensors by file"


@cache
def tiny_run() -> TinyRun:
    """Two ranks wrote its checkpoint; one rank reads it."""
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from slm_toolkit.run.checkpoint.checkpoint import RANDOM_CPU
    from slm_toolkit.run.checkpoint.files import write_rank_file
    from slm_toolkit.run.engine.optimizer import AdamWWithMasterWeights
    from slm_toolkit.run.engine.training_state import num_elements, stretches, trained

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    optimizer = AdamWWithMasterWeights(model.parameters(), max_grad_norm=1.0, fused=False, foreach=True)
    tokens = torch.arange(16)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    description = {"model": "tiny", "seed": 0, "sequences_per_step": 4}
    manifest = {
        "step": 1,
        "optimizer_steps": 1,
        "order": 1,
        "frozen": None,
        "scaler": None,
        "run": {**description, "data": [{"num_sequences": 12, "digest": "0"}]},
        "written_by": {**CHECKPOINT["written_by"], "num_processes": 1},
        "num_elements": {name: num_elements(param) for name, param in trained(model)},
        "files": [],
    }
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            mine = {RANDOM_CPU: (0, torch.get_rng_state())}
            for part in stretches(model, optimizer, rank=rank, world_size=2):
                if part.is_mine:
                    mine[f"{part.kind}/{part.name}"] = (part.start, part.tensor.clone())
            file = write_rank_file(Path(folder), rank, mine)
            tensors[file.name] = {name: bytes(tensor.numpy()) for name, (_, tensor) in mine.items()}
            manifest["files"].append({"name": file.name, "starts": file.starts, "sizes": file.sizes})
    return TinyRun(model, optimizer, Accelerator(cpu=True), description, manifest, tensors)


def signed_checkpoints() -> list[bytes]:
    """A manifest and each tensor's dtype and shape; `_read_signed_checkpoint` writes and signs them."""
    run = tiny_run()
    tensors = {
        file["name"]: {
            name: {"dtype": "U8" if name.startswith("random") else "F32", "shape": [size]}
            for name, size in file["sizes"].items()
        }
        for file in run.manifest["files"]
    }
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    scaler |= {"growth_interval": 2000, "_growth_tracker": 0}
    return dumped(
        {"manifest": run.manifest, "tensors": tensors},
        {"manifest": {**run.manifest, "scaler": scaler}, "tensors": tensors},
    )


@cache
def foreign_files() -> dict[str, bytes]:
    """A checkpoint of FSDP as shards with an index, and as one file of torch.save."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"step": torch.tensor(7.0), "exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)}
    weights, optimizer = {"norm.weight": torch.ones(6)}, {"state": {"norm.weight": state}}
    with tempfile.TemporaryDirectory() as folder, _quiet():
        whole = {**weights, **optimizer, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
        torch.save(whole, f"{folder}/whole.pt")
        content = {"model": weights, "optimizer": optimizer}
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


WORDS = {"</s>": 0, "[UNK]": 1, "the": 2, "quick": 3, "brown": 4, "fox": 5}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
}
_NORMALIZER = {"type": "Replace", "pattern": {"String": "q"}, "content": "kw"}
TOKENIZERS = (
    TOKENIZER,
    {
        **TOKENIZER,
        "added_tokens": [
            {
                "id": 0,
                "content": "</s>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, _NORMALIZER, {"type": "Lowercase"}],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": "\\w+|[^\\w\\s]+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {**WORDS, "t": 6, "h": 7, "e": 8, "th": 9},
            "merges": [["t", "h"], ["th", "e"]],
        },
    },
    {
        **TOKENIZER,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "_",
            "prepend_scheme": "always",
            "split": True,
        },
        "model": {
            "type": "Unigram",
            "unk_id": 1,
            "byte_fallback": False,
            "vocab": [["</s>", 0.0], ["[UNK]", -1.0], ["_the", -2.0], ["q", -3.0]],
        },
    },
)
TEMPLATES = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "{%- set ns = namespace(x='', n=2) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.x = ns.x ~ '[INST] ' ~ m.content|trim ~ ' [/INST]' -%}{%- else -%}{%- set ns.n = ns.n * 2 -%}"
    "{%- set ns.x = ns.x ~ m.content ~ eos_token -%}{%- endif -%}{%- endfor -%}{{ ns.x }}",
    "{% macro turn(m, n) %}{% if n > 0 %}{{ m.content * n }}{{ turn(m, n - 1) }}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ turn(m, 2) }}{{ '%s' % m.role }}{{ m|tojson }}{{ 10 // 3 }}{% endfor %}",
    "{{ raise_exception('no') if messages|length > 9 else '' }}{% for i in range(9) %}{% for m in messages %}"
    "{{ m['content'][:i]|center(20)|upper }}{{ 2 ** i }}{% endfor %}{% endfor %}",
)


def records() -> list[bytes]:
    """Shipped records, and a GPU's record with a value in every field."""
    shipped = files("results/cpu/*/record.json", "results/rehearsed/*/record.json")[:12]
    whole = json.loads(shipped[0]) | {
        "gpu": "NVIDIA H100 80GB HBM3",
        "num_padding_tokens": 10,
        "other_busy_cores": 0.1,
        "host_ram": {"total_bytes": 2**34, "least_available_bytes": 2**33, "swapped_out_bytes": 0},
        "datasets": [{"name": "a", "weight": 1.0, "format": "text", "packing": "concat", "num_rows": 3}],
        "losses_by_dataset": {"a": [1.0, None]},
        "eval_losses": [{"step": 1, "loss": 2.0}],
        "eval_losses_by_set": {"a": [2.0]},
        "peak_allocated_bytes": [2**30],
        "peak_reserved_bytes": [2**30],
        "deepspeed_estimate": {"gpu_bytes": 2**30, "cpu_bytes": 2**30},
        "predicted_peak_bytes": 2**30,
        "gpu_watch": [
            {
                "energy_joules": [1.0] * 5,
                "utilization": [90] * 5,
                "clock_mhz": [1000] * 5,
                "throttle_reasons": {"hw_slowdown": 1},
                "used_bytes_before": 0,
                "num_processes_before": 0,
                "allocator": {"num_alloc_retries": 1, "num_ooms": 0},
            }
        ],
        "anatomy": {
            **dict.fromkeys(
                (
                    "matmul_seconds",
                    "attention_seconds",
                    "other_compute_seconds",
                    "optimizer_seconds",
                    "communication_exposed_seconds",
                    "data_seconds",
                    "idle_seconds",
                    "communication_overlapped_seconds",
                ),
                0.1,
            ),
            "num_steps": 3,
            "device": "cuda",
        },
    }
    return [*shipped, *dumped(whole, whole, {**whole, "schema_version": 2}, {**whole, "status": "oom"})]


def timeline_seeds() -> list[bytes]:
    from slm_toolkit.record.memory_timeline import PARTS

    head = ",".join(("phase", "module", "num_bytes", *(f"{part}_bytes" for part in PARTS)))
    rows = [
        f"{phase},layers.{n},{n + 9},{','.join('1' * len(PARTS))}"
        for n, phase in enumerate(("forward", "backward"))
    ]
    return ["\n".join((head, *rows)).encode()]


def _parquet_file() -> bytes:
    import pyarrow
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["some words of a text", "and others"]}), sink)
    return sink.getvalue()


def dataset_files() -> list[bytes]:
    import gzip

    lines = [b"\n".join(json.dumps(row).encode() for row in rows) + b"\n" for rows in CHATS]
    return [
        *lines,
        b"plain text, more than sixteen bytes of it\n" * 3,
        _parquet_file(),
        gzip.compress(lines[0], mtime=0),
    ]


# Inputs


_NUMBERS = (None, True, False, 0, -0.0, -1, 1, 2, 3, 7, 0.5, 1.5, 2**31, 2**63, 10**30, 10**400, -(10**400))
_FLOATS = (1e308, -1e308, 1e-308, 5e-324, float("nan"), float("inf"), float("-inf"), 1e18, 10**15)
_WORDS = ("", " ", "auto", "none", "None", "true", "no", "cpu", "nvme", "x" * 400, "0", "-1", "1e999", "NaN")
_MARKUP = ("\0", "\x1b[31m", "[red]", "[/]", "../../x", "/", "~nobody/x", "a\nb", "<script>", "${x}", "%s")
_SYMBOLS = ("\u202e", "é" * 50, "\ud800", "=cmd|' /C calc'!A0", "2026-99-99", "0x_", "{", "}", "&", "*")
_NESTED = ([], {}, [[]], [{}], {"": {}}, {"a": {"b": {"c": 1}}}, [None], ["a", 1, None], [0] * 50)
LEAVES: tuple[Any, ...] = (*_NUMBERS, *_FLOATS, *_WORDS, *_MARKUP, *_SYMBOLS, *_NESTED)
"replacements for a value"

_CONTROL_BYTES = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xc2\x9b",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"\r",
    b"\n",
    b"\t",
)
_SYNTAX = b"{|}|[|]|:|,|\"|'|-|#|&a |*a|<<: *a\n|!!int |? ".split(b"|")
_ODD_NUMBERS = (b"NaN", b"Infinity", b"-0", b"1e400", b"9" * 5000, b"0x" + b"f" * 5000)
_ODD_VALUES = (b"null", b"true", b"~", b"\\u", b"- " * 300, b"[" * 3000, b'{"a":' * 1500)
_ODD_YAML = (b"2026-13-01", b"1:60:60", b"---\n", b"%YAML 9.9\n", b"|\n", b">")
_PIECES = (*_CONTROL_BYTES, *_SYNTAX, *_ODD_NUMBERS, *_ODD_VALUES, *_ODD_YAML)
"bytes to insert into a file"


def _billion_laughs(first: bytes, line: bytes) -> bytes:
    """YAML in which each line has nine aliases of the line before: 9^20 values."""
    lines = [line % (letter, letter, b", ".join([b"*%c" % (letter - 1)] * 9)) for letter in range(98, 118)]
    return first + b"".join(lines)


_NO_VALUES = (
    b"",
    b"\0" * 100,
    b"\xff\xfe{\0}\0",
    "{}".encode("utf-16"),
    b"\xef\xbb\xbf{}",
    b"\x80\x81",
    b"null",
)
_LONG = (
    b"[" * 100_000,
    b"- " * 60_000,
    b'{"a":' * 20_000,
    b"1" * 100_000,
    b'"' + b"a" * 200_000,
    b"~",
    b"[]",
)
_WHOLE_FILES = (
    *_NO_VALUES,
    *_LONG,
    _billion_laughs(b"a: &a [x, x, x, x, x, x, x, x, x]\n", b"%c: &%c [%s]\n"),
    _billion_laughs(b"a: &a {x: 1}\n", b"%c: &%c {<<: [%s]}\n"),
    b"a: &a [*a]\n",
    b"&a {distributed_type: *a}\n",
    b"!!python/object/apply:os.system [touch x]\n",
    b"distributed_type: !!python/name:os.system\n",
    b"? [1, 2]\n: 3\n",
    b"on: 1\nyes: 2\n1: 3\n",
)
"files that replace the seed"


def mutate(seeds: list[bytes], rng: random.Random) -> bytes:
    """One input: a file with changed values (more than half of the time) or changed bytes."""
    chance = rng.random()
    if chance < 0.02:
        return rng.choice(_WHOLE_FILES)
    seed = rng.choice(seeds)
    if chance < 0.6 and (value := _parse(seed)) is not None:
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            value = mutate_value(value, rng)
        return _dump(value, rng)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        seed = _edit_bytes(seed, seeds, rng)
    return seed


def _dump(value: Any, rng: random.Random) -> bytes:
    """JSON or YAML; JSON where YAML cannot write the value. Surrogates stay."""
    if rng.random() < 0.5:
        return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    try:
        return yaml.safe_dump(value, allow_unicode=rng.random() < 0.5, sort_keys=False).encode()
    except (yaml.YAMLError, ValueError, RecursionError):
        return json.dumps(value).encode()


def mutate_value(value: Any, rng: random.Random) -> Any:
    """A copy in which one value is replaced, removed, renamed, doubled or wrapped."""
    paths = list(_paths(value))
    path = rng.choice(paths)
    return _mutate_at(value, path, rng)


def _paths(value: Any, before: tuple = ()) -> Any:
    yield before
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in list(pairs)[:60]:
        yield from _paths(below, (*before, key))


def _mutate_at(value: Any, path: tuple, rng: random.Random) -> Any:
    if not path:
        return _replacement(value, rng)
    copy = dict(value) if isinstance(value, dict) else list(value)
    key = path[0]
    chance = rng.random() if len(path) == 1 else 1.0
    if chance < 0.1 and isinstance(copy, dict):
        del copy[key]
    elif chance < 0.2 and isinstance(copy, dict):
        copy[rng.choice((key + "_", key.upper(), "", "\x1b", "a.b", "fsdp_" + key))] = copy.pop(key)
    elif chance < 0.25 and isinstance(copy, list):
        copy.insert(key, copy[key])
    elif chance < 0.3 and isinstance(copy, list):
        del copy[key]
    else:
        copy[key] = _mutate_at(copy[key], path[1:], rng)
    return copy


def _replacement(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.15 and isinstance(value, int | float) and abs(value) < 1e300:
        return rng.choice((-value, value + 1, value * 1000, value // 3, float(value), str(value), [value]))
    if rng.random() < 0.05:
        for _ in range(rng.choice((5, 50, 150))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return rng.choice(LEAVES)


def _parse(seed: bytes) -> Any:
    try:
        return json.loads(seed)
    except ValueError:
        pass
    try:
        value = yaml.safe_load(seed)
    except yaml.YAMLError:
        return None
    return value if isinstance(value, dict | list) else None


def _edit_bytes(seed: bytes, seeds: list[bytes], rng: random.Random) -> bytes:
    start = rng.randrange(len(seed) + 1)
    end = min(len(seed), start + rng.choice((0, 1, 1, 2, 8, 40, 400)))
    kind = rng.randrange(6)
    if kind == 0:
        return seed[:start] + seed[end:]
    if kind == 1:
        return seed[:start] + rng.choice(_PIECES) + seed[end:]
    if kind == 2:
        return seed[:start] + bytes([rng.randrange(256)]) + seed[end:]
    if kind == 3:
        return seed[:end] + seed[start:]
    if kind == 4:
        return seed[:start]
    other = rng.choice(seeds)
    return seed[:start] + other[rng.randrange(len(other) + 1) :]


def mutate_checkpoint(seeds: list[bytes], rng: random.Random) -> bytes:
    """A checkpoint with changed tensors, half of the time with a manifest that agrees; or changed values."""
    if rng.random() < 0.4:
        return mutate(seeds, rng)
    whole = json.loads(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        file = rng.choice(whole["manifest"]["files"])
        if not (tensors := whole["tensors"].get(file["name"])):
            continue
        name, agrees = rng.choice(list(tensors)), rng.random() < 0.5
        tensor, kind = tensors[name], rng.randrange(6)
        size = file["sizes"].get(name, 0) + rng.choice((-8, -1, 1, 5000))
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensor["shape"] = rng.choice(([1, *tensor["shape"]], [*tensor["shape"], 1], [2, 8], [], [0]))
        elif kind == 2:
            tensor["dtype"] = rng.choice(("F64", "F16", "BF16", "I64", "U8", "BOOL", "C64", "F8_E4M3", "F4"))
        elif kind == 3:
            tensor["byte"] = rng.choice((0, 127, 255))
        elif kind == 4:
            tensor["shape"] = [max(0, size)]
        else:
            tensors[rng.choice(list(tensors)) + rng.choice(("", "_"))] = tensors.pop(name)
        if agrees and kind == 0:
            for places in (file["sizes"], file["starts"]):
                places.pop(name, None)  # an earlier change may have renamed the tensor
        elif agrees:
            key, by = rng.choice(("starts", "sizes")), rng.choice((-8, -1, 1, 8, 2**40))
            file[key][name] = max(0, size) if kind == 4 else file[key].get(name, 0) + by
    if rng.random() < 0.1:
        whole["manifest"]["files"].append(rng.choice(whole["manifest"]["files"]))
    return json.dumps(whole).encode()


def mutate_words(seeds: list[bytes], rng: random.Random) -> bytes:
    """A command, one word a line: words replaced, left out or doubled, with odd values."""
    words = rng.choice(seeds).decode().split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(words) + 1)
        kind = rng.randrange(5)
        if kind == 0 and words:
            words = words[: max(0, at - 1)] + words[at:]
        elif kind == 1 and at < len(words):
            words.insert(at, words[at])
        elif kind == 2:
            words = words[:at] + rng.choice(seeds).decode().split("\n")[-3:] + words[at:]
        elif at < len(words):
            leaf = rng.choice(LEAVES)
            text = (
                leaf if isinstance(leaf, str) else json.dumps(leaf) if rng.random() < 0.5 else flag_text(leaf)
            )
            words[at] = words[at].partition("=")[0] + "=" + text if "=" in words[at] else text
    return "\n".join(words).encode("utf-8", "surrogatepass")


_REPORT_OPTIONS = (
    "--json|--phases|--memory|--errors|--strict|--schema|--csv -|--markdown -|"
    "--csv r.csv|--baseline runs/0|--parity_tolerance 0.1|--usd_per_gpu_hour 2.5"
)
_SLOW_REPORT_OPTIONS = ("--html r.html",)


def mutate_record_set(seeds: list[bytes], rng: random.Random) -> bytes:
    """One to five records, most of them changed, and options of `slm report`."""
    records = []
    for seed in rng.choices(seeds, k=rng.randrange(1, 6)):
        record = json.loads(seed)
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            record = mutate_value(record, rng)
        records.append(record)
    options = rng.sample(_REPORT_OPTIONS.split("|"), rng.randrange(4))
    if rng.random() < 0.03:
        options.append(rng.choice(_SLOW_REPORT_OPTIONS))
    words = " ".join(options).split()
    if words and rng.random() < 0.2:
        words[rng.randrange(len(words))] = flag_text(rng.choice(LEAVES))
    return json.dumps({"records": records, "options": words}).encode()


_TAKEN_PLACES = "gone|gone/deeper|file|file/deeper|folder|locked|locked/file|locked/gone|loop|loop/x|dangling"
_LONG_PLACES = ("n" * 300, "folder/" + "n" * 300, "/" + "d/" * 2500)
_ODD_PLACES = "/dev/full|/dev/null||.|..|/proc/self/mem|/root/x|[x]|[x]/*|*|~nobody/x|a\nb|\x1b[2J"
PLACES = (*_TAKEN_PLACES.split("|"), *_LONG_PLACES, *_ODD_PLACES.split("|"))
"replacements for PLACE in a command; `_read_places` creates the taken ones"


def mutate_places(seeds: list[bytes], rng: random.Random) -> bytes:
    """A command with odd paths, after a line with the mode of the working folder."""
    words = rng.choice(seeds).decode().split("\n")
    if rng.random() < 0.25:  # one word left out or doubled
        index = rng.randrange(1, len(words))
        words[index : index + 1] = [words[index]] * rng.choice((0, 2))
    words = [rng.choice(PLACES) if word == "PLACE" else word for word in words]
    return "\n".join([rng.choice(("open", "open", "unreadable")), *words]).encode("utf-8", "surrogatepass")


_ATOMS = (
    "0;1;-1;1.5;10**9;10**10;99999;'x';'';'%s%s';none;true;messages;m;"
    "messages[0];messages[0].content;m.content;range(9999);[1, 2];{'a': 1};ns;eos_token;"
    "namespace(x='');cycler;lipsum;dict;raise_exception;strftime_now;loop;self;().n"
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is not")
_FILTERS = (
    "list;length;sort;join;upper;trim;tojson;int;first;last;reverse;string;"
    "center(10**10);center(99);indent(9);batch(2);groupby('role');map('upper');sum;abs;"
    "replace('', 'xy');wordwrap(1);pprint;items;default('d');urlize;format(1, 2);random"
)


def mutate_template(seeds: list[bytes], rng: random.Random) -> bytes:
    """A real chat template with more statements or other expressions."""
    if rng.random() < 0.1:
        return mutate(seeds, rng)
    parts = re.split(r"(\{[{%].*?[%}]\})", rng.choice(seeds).decode())
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(parts))
        if parts[at].startswith("{{") and rng.random() < 0.5:
            parts[at] = "{{ " + _expression(rng, 3) + " }}"
        else:
            parts.insert(at, _statement(rng, 3))
    return "".join(parts).encode()


def _statement(rng: random.Random, levels: int) -> str:
    value = _expression(rng, levels)
    inside = _statement(rng, levels - 1) if levels else "x"
    forms = (
        f"{{{{ {value} }}}}",
        f"{{{{ {value} }}}}",
        f"{{% set ns = {value} %}}",
        f"{{% for m in {value} %}}{inside}{{% endfor %}}",
        f"{{% if {value} %}}{inside}{{% endif %}}",
        f"{{% set s %}}{inside}{{% endset %}}{{{{ s ~ s }}}}",
        f"{{% macro f(m) %}}{inside}{{{{ f({value}) }}}}{{% endmacro %}}{{{{ f(1) }}}}",
    )
    return rng.choice(forms)


def _expression(rng: random.Random, levels: int) -> str:
    if levels == 0 or rng.random() < 0.3:
        return rng.choice(_ATOMS.split(";"))
    left, right = _expression(rng, levels - 1), _expression(rng, levels - 1)
    forms = (f"({left} {rng.choice(_OPERATORS)} {right})",) * 3 + (f"({left})[{right}]", f"({left})({right})")
    filtered = [f"({left})|{rng.choice(_FILTERS.split(';'))}" for _ in range(2)]
    return rng.choice((*forms, *filtered))


def mutate_tokenizer(seeds: list[bytes], rng: random.Random) -> bytes:
    """A tokenizer.json with parts of another one, other ids and texts, or changed values."""
    value = json.loads(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4))):
        chance = rng.random()
        paths = [path for path in _paths(value) if path]
        if chance < 0.25:
            part = rng.choice(("normalizer", "pre_tokenizer", "model", "added_tokens"))
            value[part] = json.loads(rng.choice(seeds))[part]
        elif chance < 0.85:
            path = rng.choice(paths)
            holder = value
            for key in path[:-1]:
                holder = holder[key]
            old = holder[path[-1]]
            if isinstance(old, bool):
                holder[path[-1]] = not old
            elif isinstance(old, int | float):
                holder[path[-1]] = rng.choice((0, 1, 5, 383, 384, 10**6, 2**31, 2**32 - 1, -1.0, 1e300))
            elif isinstance(old, str):
                holder[path[-1]] = rng.choice(
                    ("", "q", "the", "kw" * 30, "\u00e9", "(q+)+$", ".*", "\\b", "[UNK]")
                )
        else:
            value = mutate_value(value, rng)
        if not isinstance(value, dict):
            break
    return json.dumps(value).encode("utf-8", "surrogatepass")


def flag_text(leaf: Any) -> str:
    """A flag's text for a value: 10**400 in full."""
    return f"{leaf:d}" if isinstance(leaf, int) and not isinstance(leaf, bool) else str(leaf)


@dataclass(frozen=True)
class Reader:
    """A function that reads one input and uses the value, and how its inputs are made."""

    name: str
    read: Callable[[bytes, Path], None]
    "reads the bytes in an empty folder, which is the working folder"
    seeds: Callable[[], list[bytes]]
    share: int
    "of all inputs, relative to the other readers"
    mutate: Callable[[list[bytes], random.Random], bytes] = mutate


READERS = (
    Reader("strategy_yaml", _read_strategy_yaml, lambda: [*files("accel_configs/*.yaml"), *YAMLS], 20),
    Reader("deepspeed_json", _read_deepspeed_json, lambda: files("ds_configs/*.json"), 14),
    Reader(
        "model_config",
        _read_model_config,
        lambda: dumped(LLAMA, GPT2, NEOX, MPT, {**LLAMA, "model_type": "qwen2"}),
        14,
    ),
    Reader(
        "model_name",
        _read_model_name,
        lambda: [b"slm-700m", b"no/where", b"slm-0.5b", b"slm-100m", b"./m", b"slm-1.5b-hw"],
        3,
    ),
    Reader(
        "prices",
        _read_prices,
        lambda: [
            b"h100-80gb: 2.49\n",
            b"l4: {usd_per_gpu_hour: 1, kind: spot, provider: X, as_of: 2026-11, source: s}\na100-40gb: 3\n",
        ],
        6,
    ),
    Reader("network", _read_network, lambda: dumped(NETWORK), 6),
    Reader("record", _read_record, records, 8),
    Reader("record_set", _read_record_set, records, 8, mutate_record_set),
    Reader("places", _read_places, lambda: lines(*PLACED.split("|")), 6, mutate_places),
    Reader("checkpoint", _read_checkpoint, lambda: dumped(CHECKPOINT), 4),
    Reader("signed_checkpoint", _read_signed_checkpoint, signed_checkpoints, 6, mutate_checkpoint),
    Reader(
        "foreign", _read_foreign, lambda: [foreign_files()[name] for name in (".metadata", "whole.pt")], 6
    ),
    Reader("timeline", _read_timeline, timeline_seeds, 2),
    Reader(
        "convert_file",
        _read_convert_file,
        lambda: [*files("accel_configs/*.yaml", "ds_configs/*.json"), *YAMLS],
        14,
    ),
    Reader("doctor", _read_doctor, lambda: [*files("accel_configs/*.yaml", "ds_configs/*.json"), *YAMLS], 4),
    Reader("command_line", _read_command_line, lambda: lines(*SLM), 3, mutate_words),
    Reader("flags", _read_flags, lambda: lines(*FLAGS), 10, mutate_words),
    Reader("rows", _read_rows, lambda: dumped(*CHATS), 10),
    Reader("dataset_file", _read_dataset_file, dataset_files, 1),
    Reader("tokenizer", _read_tokenizer, lambda: dumped(*TOKENIZERS), 6, mutate_tokenizer),
    Reader(
        "chat_template",
        _read_chat_template,
        lambda: [template.encode() for template in TEMPLATES],
        4,
        mutate_template,
    ),
    Reader(
        "dataset_names",
        _read_dataset_names,
        lambda: [b"a.txt=3,b.jsonl=1", b"x/y", b"a*.txt,~/b", b"data/"],
        3,
    ),
    Reader(
        "slurm",
        _read_slurm,
        lambda: [
            b"--partition=gpu --time 10\n",
            b"-p x --gres=gpu:1\n" + (ROOT / "slm_toolkit/compare/slurm.sh").read_bytes(),
        ],
        3,
    ),
    Reader(
        "launch",
        _read_launch,
        lambda: lines(
            "--config_file fsdp_hybrid_shard.yaml --num_machines 2 --num_processes 16 --machine_rank 1 -m "
            "slm_toolkit.train",
            "--num_machines 2 --num_processes=4 --machine_rank=0 --main_process_port 29500 train.py",
        ),
        3,
        mutate_words,
    ),
    Reader("environment", _read_environment, lambda: [b"300", b"1.5", b""], 1),
)


# Workers


class TooLongError(BaseException):
    """An input took more than SECONDS. A BaseException, so that no `except Exception` catches it."""


@dataclass
class Outcome:
    """Counts of one reader's inputs."""

    num_accepted: int = 0
    num_refused: int = 0
    num_finds: Counter[str] = field(default_factory=Counter)
    "by kind of fault"
    first_finds: dict[str, tuple[int, str]] = field(default_factory=dict)
    "by kind of fault: index of the first input, and the fault"
    seconds: float = 0.0
    slowest_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def num_inputs(self) -> int:
        return self.num_accepted + self.num_refused + self.num_finds.total()

    def add(self, more: "Outcome") -> None:
        self.num_accepted += more.num_accepted
        self.num_refused += more.num_refused
        self.num_finds += more.num_finds
        self.first_finds = more.first_finds | self.first_finds
        self.seconds += more.seconds
        self.slowest_seconds = max(self.slowest_seconds, more.slowest_seconds)
        self.peak_bytes = max(self.peak_bytes, more.peak_bytes)


def input_of(reader: Reader, seeds: list[bytes], seed: int, index: int) -> bytes:
    return reader.mutate(seeds, random.Random(f"{seed} {reader.name} {index}"))


def verdict(reader: Reader, data: bytes, folder: Path, *, seconds: float = SECONDS) -> str:
    """ "accepted", "refused" or the fault: the exception and its line. `seconds=0` sets no limit."""
    from slm_toolkit.run.data.sources import BadData

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(folder)
    previous = signal.signal(signal.SIGPROF, _raise_too_long) if seconds else None
    if seconds:
        signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        reader.read(data, folder)
    except ValueError as error:
        if type(error) in (ValueError, BadData) and "hint: " in str(error):
            return "refused"
        return _fault(error)
    except (Exception, SystemExit, TooLongError) as error:
        return _fault(error)
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, previous)
        os.chdir(before)
    return "accepted"


def _raise_too_long(number: int, frame: Any) -> None:
    raise TooLongError


def _fault(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "slm_toolkit" in frame.filename] or list(frames)
    line = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}" if ours else ""
    message = str(error).splitlines()[0][:160] if str(error) else ""
    return f"{type(error).__name__} at {line}: {message}"


def _kind_of(fault: str) -> str:
    """The fault without its message, whose values differ between inputs."""
    return fault.partition(": ")[0]


def _work(
    reader: Reader,
    seed: int,
    indices: range,
    seconds_for_all: float,
    current: Any,
    results: Any,
    folder: Path,
) -> None:
    """Runs in its own process: sends an Outcome of each input, and None at the end.

    `current`: the index of its input, and when it began.
    """
    seeds = reader.seeds()
    for warm_up in seeds[:3]:
        verdict(reader, warm_up, folder, seconds=0)  # imports
    used_bytes = _memory_bytes("VmSize")  # a reader may turn a MemoryError into a refusal: so above the limit
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 4 * MEMORY_BYTES, resource.RLIM_INFINITY))
    end = time.monotonic() + seconds_for_all
    for index in indices:
        if time.monotonic() > end:
            break
        data = input_of(reader, seeds, seed, index)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _memory_bytes("VmHWM")
        current[:] = index, time.monotonic()
        started = time.process_time()
        result = verdict(reader, data, folder)
        seconds = time.process_time() - started
        used_bytes = _memory_bytes("VmHWM") - before
        if used_bytes > MEMORY_BYTES and result in ("accepted", "refused"):
            result = f"MemoryError: {used_bytes / 2**30:.1f} GiB"
        outcome = Outcome(seconds=seconds, slowest_seconds=seconds, peak_bytes=used_bytes)
        if result == "accepted":
            outcome.num_accepted = 1
        elif result == "refused":
            outcome.num_refused = 1
        else:
            outcome.num_finds[_kind_of(result)] = 1
            outcome.first_finds[_kind_of(result)] = index, result
        results.put(outcome)
    results.put(None)


def _memory_bytes(name: str) -> int:
    """This process's VmSize, or VmHWM: its largest resident memory."""
    return 1024 * int(re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def fuzz(reader: Reader, num_inputs: int, seed: int, folder: Path, *, seconds: float) -> Outcome:
    """Reads a reader's inputs, for so long, in a worker that is restarted after an input that ends it."""
    context = multiprocessing.get_context("fork")
    total, first = Outcome(), 0
    while first < num_inputs:
        current, results = context.Array("d", [first, math.inf]), context.SimpleQueue()
        arguments = (reader, seed, range(first, num_inputs), seconds, current, results, folder)
        worker = context.Process(target=_work, args=arguments)
        worker.start()
        while True:
            while results.empty() and worker.is_alive():
                time.sleep(0.02)
                if time.monotonic() > current[1] + WALL_SECONDS:
                    worker.kill()
            outcome = None if results.empty() else results.get()
            if outcome is None:
                break
            total.add(outcome)
        worker.join()
        if worker.exitcode == 0:
            break
        fault, index = f"the process ended with {worker.exitcode}", int(current[0])
        total.add(Outcome(num_finds=Counter([fault]), first_finds={fault: (index, fault)}))
        first = index + 1
    return total


_MOST_TRIES = 300  # to make one find smaller


def minimise(reader: Reader, data: bytes, kind: str, folder: Path) -> bytes:
    """A smaller input with the same kind of fault: leaves out ever smaller pieces while the fault stays."""
    size, num_tries = max(1, len(data) // 2), 0
    while size and num_tries < _MOST_TRIES:
        start, shrank = 0, False
        while start < len(data) and num_tries < _MOST_TRIES:
            num_tries += 1
            smaller = data[:start] + data[start + size :]
            if _kind_of(verdict(reader, smaller, folder)) == kind:
                data, shrank = smaller, True
            else:
                start += size
        size = size if shrank and size < len(data) else size // 2
    return data


def keep(reader: Reader, data: bytes) -> Path:
    path = CORPUS / reader.name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def fuzz_all(
    readers: list[Reader], num_inputs: int, seed: int, scratch: Path, *, seconds: float, keeps: bool
) -> dict[str, Outcome]:
    """Fuzzes one reader after another and prints finds to stderr; `keeps`: minimise and store them."""
    total_share = sum(reader.share for reader in readers)
    counts = [num_inputs * reader.share // total_share for reader in readers]
    counts[0] += num_inputs - sum(counts)  # what rounding left
    outcomes, folder = {}, scratch / "work"
    for reader in readers:
        verdict(reader, reader.seeds()[0], folder, seconds=0)  # imports, once for all workers
    for reader, count in zip(readers, counts, strict=True):
        mine = seconds * reader.share / total_share
        outcome = outcomes[reader.name] = fuzz(reader, count, seed, folder, seconds=mine)
        for kind, (index, fault) in outcome.first_finds.items():
            print(f"FIND {reader.name} x {outcome.num_finds[kind]}, first {index}: {fault}", file=sys.stderr)
            if not keeps:
                continue
            data = input_of(reader, reader.seeds(), seed, index)
            if not kind.startswith(("the process", "TooLong", "MemoryError")):
                data = minimise(reader, data, kind, folder)
            print(f"     {keep(reader, data)}", file=sys.stderr)
    return outcomes


def print_table(outcomes: dict[str, Outcome]) -> None:
    total = Outcome()
    for outcome in outcomes.values():
        total.add(outcome)
    head = f"{'reader':17} {'inputs':>7} {'accepted':>8} {'refused':>8} {'finds':>6}"
    print(f"{head} {'s':>7} {'slowest ms':>10} {'peak MiB':>8}")
    for name, counts in [*outcomes.items(), ("all", total)]:
        line = f"{name:17} {counts.num_inputs:7,} {counts.num_accepted:8,} {counts.num_refused:8,}"
        times = f"{counts.seconds:7.1f} {counts.slowest_seconds * 1e3:10,.0f}"
        print(f"{line} {counts.num_finds.total():6,} {times} {counts.peak_bytes / 2**20:8,.0f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [reader.name for reader in READERS]
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="default: 100000")
    parser.add_argument("--seconds", type=float, metavar="S", help="instead of --inputs: as many as fit")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), metavar="S", help="default: drawn from the clock"
    )
    parser.add_argument(
        "--readers", nargs="+", choices=names, default=names, metavar="NAME", help="default: all"
    )
    parser.add_argument("--draft", action="store_true", help="print finds only; write none to the corpus")
    parser.add_argument("--json", action="store_true", help="print the counts as one object")
    args = parser.parse_args(argv)
    readers = [reader for reader in READERS if reader.name in args.readers]
    started = time.perf_counter()
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory, prefix="fuzz-") as scratch:
        os.environ["HF_DATASETS_CACHE"] = f"{scratch}/cache"
        os.environ["HOME"] = scratch  # `~` is empty on every machine
        seconds, num_inputs = args.seconds or math.inf, 10**9 if args.seconds else args.inputs
        print(f"seed {args.seed}", file=sys.stderr, flush=True)
        outcomes = fuzz_all(
            readers, num_inputs, args.seed, Path(scratch), seconds=seconds, keeps=not args.draft
        )
    if args.json:
        counts = {
            name: {"inputs": outcome.num_inputs, "finds": outcome.num_finds.total()}
            for name, outcome in outcomes.items()
        }
        print(json.dumps(counts))
    else:
        print_table(outcomes)
        print(f"seed {args.seed}, {time.perf_counter() - started:.0f} s")
    return 1 if any(outcome.num_finds for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
