"""What reads an input of each kind, and uses what was read: returns, or raises ValueError with a hint."""

import contextlib
import dataclasses
import encodings.unicode_escape  # noqa: F401 - which another user may not be able to import later
import hashlib
import io
import json
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_seeds import ROOT

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.strategy.strategy import config_dir

YAML_OF_JSON = (
    "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n"
)


def _written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def _kind(data: bytes) -> str:
    return "json" if data.lstrip()[:1] in (b"{", b"[", b'"') else "yaml"


def _use_strategy(strategy: Any, folder: Path) -> None:
    """All that is done with a strategy that was read: checked, counted, estimated, written out."""
    from slm_toolkit.predict.grid import estimates
    from slm_toolkit.record.run_record import everything_asked, identity_of
    from slm_toolkit.strategy.strategy import contradictions, on_nodes, write_resolved

    contradictions(strategy, RunConfig())
    identity_of(everything_asked(RunConfig(), strategy, 2), {}, None)
    write_resolved(strategy, folder / "out", 2)
    on_nodes(strategy, 2)
    estimates({"model": "slm-100m"}, [strategy], gpus=["h100-80gb"], num_gpus=[8])


def strategy_yaml_input(data: bytes, folder: Path) -> None:
    from slm_toolkit.strategy.strategy import find_strategy

    (folder / "ds_configs").mkdir()
    for source in config_dir("ds_configs").glob("*.json"):
        (folder / "ds_configs" / source.name).write_bytes(source.read_bytes())
    _written(folder, "mine.yaml", data)
    _use_strategy(find_strategy("mine.yaml"), folder)


def deepspeed_json_input(data: bytes, folder: Path) -> None:
    from slm_toolkit.strategy.strategy import find_strategy

    _written(folder, "mine.json", data)
    _written(folder, "mine.yaml", YAML_OF_JSON.encode())
    _use_strategy(find_strategy("mine.yaml"), folder)


def model_config_input(data: bytes, folder: Path) -> None:
    (folder / "m").mkdir()
    _written(folder / "m", "config.json", data)
    _use_model("m")


def model_name_input(data: bytes, folder: Path) -> None:
    _use_model(data.decode("utf-8", "surrogateescape"))


def _use_model(name: str) -> None:
    from slm_toolkit.model.from_config import check_trainable
    from slm_toolkit.predict.grid import estimates
    from slm_toolkit.record.run_record import model_facts
    from slm_toolkit.strategy.strategy import find_strategy

    found = estimates({"model": name}, [find_strategy("ds_zero3")], gpus=["h100-80gb"], num_gpus=[8])
    json.dumps([vars(row) for row in found], allow_nan=False)
    from slm_toolkit.model.names import find_model

    spec = find_model(name)
    json.dumps(model_facts(spec), allow_nan=False)
    check_trainable(spec)


def prices_input(data: bytes, folder: Path) -> None:
    from slm_toolkit.hardware.prices import read_prices

    for price in read_prices(_written(folder, "prices.yaml", data)).values():
        str(price)


def network_input(data: bytes, folder: Path) -> None:
    from slm_toolkit.hardware.network import COLLECTIVES, read_network, seconds

    network = read_network(_written(folder, "network.json", data))
    for collective in COLLECTIVES:
        seconds(network, collective, 2**30)


def record_input(data: bytes, folder: Path) -> None:
    """A record through `slm report`: beside a good one, so that what it breaks is more than itself."""
    good = ROOT / "results" / "cpu" / "ddp" / "record.json"
    for name, content in (("bad", data), ("good", good.read_bytes())):
        (folder / name).mkdir()
        _written(folder / name, "record.json", content)
    # one in eight as a page with all pictures: that takes twenty times as long
    words = ["--html", "page.html", "--csv", "r.csv", "--markdown", "r.md", "--latex", "r.tex"]
    words += ["--parquet", "r.parquet", "--memory", "--phases"]
    _slm("report", ".", *(words if len(data) % 8 == 0 else ("--json",) if len(data) % 8 < 4 else ()))
    if len(data) % 8 == 1:
        _slm("report", ".", "--errors")
    if len(data) % 8 == 2:
        _slm("report", ".", "--baseline", "good")


def record_set_input(data: bytes, folder: Path) -> None:
    """Several records through `slm report` with options."""
    asked = _object(data)
    records, options = asked.get("records"), asked.get("options")
    if not (isinstance(records, list) and isinstance(options, list)):
        return
    for index, record in enumerate(records):
        (folder / "runs" / str(index)).mkdir(parents=True)
        _written(folder / "runs" / str(index), "record.json", json.dumps(record).encode())
    # "/" would be all records of this machine
    if all(isinstance(word, str) and word != "/" and _is_word(word) for word in options):
        _slm("report", *([] if "--paper" in options or "--schema" in options else ["runs"]), *options)


def _is_word(text: str) -> bool:
    """Whether a command line can hold it: no half of a surrogate pair."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def places_input(data: bytes, folder: Path) -> None:
    """A command with paths that are odd, taken or not for us, as another user than root."""
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
            _slm(*words)  # imports what it needs while all of Python's files are for us
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


def checkpoint_input(data: bytes, folder: Path) -> None:
    """A manifest; with its checksum put right, or next to none would be looked at further."""
    from slm_toolkit.run.checkpoint.files import MANIFEST_FILE, damage, digest_of, read_manifest
    from slm_toolkit.run.checkpoint.resume import Checkpoint, check_data, num_held_out

    with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
        content = json.loads(data)
        rest = {name: value for name, value in content.items() if name not in ("format", "sha256")}
        data = json.dumps({**content, "sha256": digest_of(rest)}).encode()
    _written(folder, MANIFEST_FILE, data)
    checkpoint = Checkpoint(folder, read_manifest(folder))
    damage(folder, checkpoint.manifest.files)
    num_held_out(checkpoint)
    check_data(checkpoint, [{"num_held_out": 12, "digest": "0"}])


def signed_checkpoint_input(data: bytes, folder: Path) -> None:
    """A checkpoint that somebody changed and signed anew: what a run that goes on from it does."""
    import torch
    from fuzz_seeds import tiny_run

    from slm_toolkit.run.checkpoint import resume
    from slm_toolkit.run.checkpoint.files import FORMAT, MANIFEST_FILE, digest_of

    run = tiny_run()
    try:
        content = json.loads(data)
        manifest = content["manifest"]
        for name, tensors in content["tensors"].items():
            _written(folder, Path(name).name, _safetensors(tensors, run.tensors.get(name, {})))
        for file in manifest["files"]:
            written = (folder / file["name"]).read_bytes()
            file.setdefault("num_bytes", len(written))
            file.setdefault("sha256", hashlib.sha256(written).hexdigest())
        signed = {"format": FORMAT, "sha256": digest_of(manifest), **manifest}
    except (ValueError, LookupError, TypeError, AttributeError, OSError, OverflowError, RecursionError):
        return  # no checkpoint that could be written
    _written(folder, MANIFEST_FILE, json.dumps(signed).encode())
    with contextlib.redirect_stderr(io.StringIO()):
        checkpoint = resume.choose(
            resume.find_checkpoints(str(folder), folder, run.description, num_steps=None), run.accelerator
        )
    resume.num_held_out(checkpoint)
    resume.check_data(checkpoint, run.manifest["run"]["data"])
    resume.load_weights(run.model, checkpoint)
    resume.load_state(checkpoint, run.model, run.optimizer, run.accelerator)
    resume.load_random_states(checkpoint, run.accelerator)
    torch.rand(1000)
    json.dumps(resume.described(checkpoint, run.manifest["written_by"]), allow_nan=False)


def _safetensors(tensors: dict[str, Any], whole: dict[str, bytes]) -> bytes:
    """A file of these dtypes and shapes, in which each tensor has the bytes that it has in `whole`, as far as
    they go; `data_offsets`, where given, stay, and a single `byte` fills all of a tensor."""
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


def timeline_input(data: bytes, folder: Path) -> None:
    from slm_toolkit.record.memory_timeline import read_segments
    from slm_toolkit.report.tables.memory import memory_picture

    path = _written(folder, "memory_timeline.csv", data)
    at_peak = {"phase": "data", "module": "", "num_bytes": 1, "parts": {}, "modules": {}}
    memory_picture(at_peak, read_segments(path))


def convert_file_input(data: bytes, folder: Path) -> None:
    name = f"mine.{_kind(data)}"
    _written(folder, name, data)
    _convert([name], data, folder)


def convert_command_input(data: bytes, folder: Path) -> None:
    _written(folder, "ds.json", (config_dir("ds_configs") / "zero3.json").read_bytes())
    _convert(["--", *data.decode("utf-8", "surrogateescape").split("\n")], data, folder)


def _convert(source: list[str], data: bytes, folder: Path) -> None:
    from slm_toolkit.cli.convert import _FORMS, _account, _as_json, convert

    form = list(_FORMS)[sum(data) % len(_FORMS)]
    num = (None, 1, 2, 8, 12)[len(data) % 5]
    written = convert(source, form, num_processes=num, gpus_per_node=None if num == 2 else 4, folder=None)
    _account(written)
    json.dumps(_as_json(written, []))
    for name, text in written.files.items():
        _written(folder, f"out-{name}", text.encode())


def doctor_input(data: bytes, folder: Path) -> None:
    name = f"mine.{_kind(data)}"
    _written(folder, name, data)
    if name == "mine.yaml":
        _written(folder, "mine.json", (config_dir("ds_configs") / "zero3.json").read_bytes())
    _slm("doctor", "--strategy", name, "--gpu", "h100-80gb", "--num_gpus", "8", "--fix", "fixed")


def command_line_input(data: bytes, folder: Path) -> None:
    """Words of `slm`, whatever they are: flags, numbers, names of GPUs, prices."""
    words = data.decode("utf-8", "surrogateescape").split("\n")
    if words[0] in ("estimate", "recommend", "doctor", "recipes", "configs"):
        _slm(*words)


def flags_input(data: bytes, folder: Path) -> None:
    """The flags of training, one by one and together."""
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


def rows_input(data: bytes, folder: Path) -> None:
    """Rows of a dataset, by column, as `datasets` hands them over; made into sequences in every packing."""
    from slm_toolkit.run.data.formats import format_of
    from slm_toolkit.run.data.packing import Pack

    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) and row for row in rows)):
        return
    if any("\ud800" <= character <= "\udfff" for character in json.dumps(rows, ensure_ascii=False)):
        return  # Arrow's text is UTF-8, which has no halves
    rows = [{name: row.get(name) for name in rows[0]} for row in rows]  # one schema, as Arrow has
    asked = ("auto", "auto", "auto", "messages", "alpaca", "sharegpt", "tokens", "prompt_completion")[
        len(data) % 8
    ]
    kind = format_of(rows[0], "rows", asked=asked, text_column="text")
    packing = ("block_diagonal", "multipack", "none", "multipack")[sum(data) % 4]
    pack = Pack(_tokenizer(), kind, packing, 32, "text", ("answers", "all")[sum(data) % 2], 384)
    columns = pack({name: [row[name] for row in rows] for name in rows[0]})
    import torch

    tokens = torch.as_tensor(columns["input_ids"], dtype=torch.int64)
    assert tokens.numel() == 0 or (tokens.min() >= 0 and tokens.max() < 384), "a token out of the vocabulary"


@cache
def _tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    from slm_toolkit.run.data.tokenizers import CHAT_TEMPLATE

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def dataset_file_input(data: bytes, folder: Path) -> None:
    """A whole file through `datasets`."""
    import datasets

    from slm_toolkit.model.model_spec import PRESETS
    from slm_toolkit.run.data.data import load_data

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(60)  # its own lines on stderr, before it raises
    marks = {b"PAR1": "parquet", b"\x1f\x8b\x08\x08": "jsonl.gz", b"plai": "txt"}
    name = "data." + marks.get(data[:4], ("jsonl", "json", "jsonl", "txt", "parquet")[len(data) % 5])
    _written(folder, name, data)
    config = RunConfig(dataset=name, seq_len=16, streaming=(None, True)[sum(data) % 2]).with_defaults(
        has_gpu=False
    )
    with _quiet():
        found = load_data(config, PRESETS["slm-1m"], num_sequences=2)
        next(iter(found.train), None)


def tokenizer_input(data: bytes, folder: Path) -> None:
    """A tokenizer.json, and what it makes of some text."""
    _load_with_tokenizer(folder, data, None)


def chat_template_input(data: bytes, folder: Path) -> None:
    """A chat template, and what it makes of a conversation."""
    from fuzz_seeds import TOKENIZER

    _load_with_tokenizer(folder, json.dumps(TOKENIZER).encode(), data.decode("utf-8", "replace"))


def _load_with_tokenizer(folder: Path, tokenizer: bytes, template: str | None) -> None:
    from slm_toolkit.model.model_spec import PRESETS
    from slm_toolkit.run.data.packing import Pack
    from slm_toolkit.run.data.tokenizers import load_tokenizer

    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "[UNK]"}
    (folder / "mine").mkdir()
    _written(folder / "mine", "tokenizer.json", tokenizer)
    _written(
        folder / "mine", "tokenizer_config.json", json.dumps({**names, "chat_template": template}).encode()
    )
    config = RunConfig(model="slm-1m", tokenizer_name=str(folder / "mine"), seq_len=16)
    found = load_tokenizer(config, PRESETS["slm-1m"])
    kind, rows = (
        ("text", {"text": ["the quick brown\nfox \u00e9"]}) if template is None else ("messages", _CHAT)
    )
    loss_on = ("answers", "all")[len(template or "") % 2]
    columns = Pack(found, kind, "none", 16, "text", loss_on, PRESETS["slm-1m"].vocab_size)(rows)
    assert all(0 <= token < PRESETS["slm-1m"].vocab_size for row in columns["input_ids"] for token in row)


_CHAT = {
    "messages": [
        [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}] * 2
    ]
}


def dataset_names_input(data: bytes, folder: Path) -> None:
    """What `--dataset` may say, as far as local files go."""
    from slm_toolkit.config.dataset_files import local_files

    _written(folder, "a.txt", b"text")
    config = RunConfig(dataset=data.decode("utf-8", "surrogateescape"))
    config.check()
    for source in config.sources:
        local_files(source.path)


def slurm_input(data: bytes, folder: Path) -> None:
    from slm_toolkit.compare.slurm_script import SLURM_TEMPLATE, slurm_nodes

    options, _, template = data.partition(b"\n")
    path = _written(folder, "slurm.sh", template or SLURM_TEMPLATE.read_bytes())
    text = options.decode("utf-8", "surrogateescape")
    slurm_nodes(num_nodes=2, gpus_per_node=1, options=text, template=path)


def lm_eval_task_input(data: bytes, folder: Path) -> None:
    from slm_toolkit.run.lm_eval import lm_eval_command

    _written(folder, "task.yaml", data)
    lm_eval_command("task.yaml", folder / "model", folder / "out")


def launch_input(data: bytes, folder: Path) -> None:
    """Words of `slm launch` up to the meeting."""
    from slm_toolkit.cli.launch import plan_launch

    for source in config_dir("accel_configs").glob("*shard.yaml"):
        _written(folder, source.name, source.read_bytes())
    words = data.decode("utf-8", "surrogateescape").split("\n")
    if not any(word.startswith("--main_process_ip") for word in words):  # a name would be asked of the DNS
        words = ["--main_process_ip", "127.0.0.1", *words]
    with _quiet():
        plan_launch(words)


def meeting_input(data: bytes, folder: Path) -> None:
    """What a stranger sends to the port where machines meet."""
    from slm_toolkit.launch.rendezvous import answer_of, hello_of

    with contextlib.suppress(ValueError):
        hello_of(data)
    answer_of(data)


def environment_input(data: bytes, folder: Path) -> None:
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
def _quiet() -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            yield
        except SystemExit as ended:
            if ended.code == 2 and "error: " in said.getvalue() and "hint: " in said.getvalue():
                raise ValueError(said.getvalue()) from None
            if ended.code not in (0, 1):
                raise AssertionError(f"exit code {ended.code}: {said.getvalue()}") from None


def _slm(*words: str) -> None:
    """`slm` in this process, with its exit code 2 and what it said as a ValueError."""
    from slm_toolkit.cli.main import main

    with _quiet():
        code = main(list(words))
        assert code in (0, 1, None), code
