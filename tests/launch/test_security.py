"""What somebody else's file, name or record may not do: run code, leave its folder, keep one waiting."""

import ast
import json
import os
import pickle
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, SMALL_LLAMA, plans_of, slm

from slm_toolkit.base.user_files import YAML_LOADER
from slm_toolkit.compare.slurm import slurm_nodes
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.model.names import find_model
from slm_toolkit.recommend.launch_files import write_launch
from slm_toolkit.record.files import find_records
from slm_toolkit.record.run_record import run_name_of
from slm_toolkit.strategy.strategy import find_strategy

SOURCES = sorted((ROOT / "slm_toolkit").rglob("*.py"))


class Payload:
    """Unpickled, it touches a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.system, (f"touch {shlex.quote(str(self.marker))}",))


NEVER = {
    *("pickle.load", "pickle.loads", "np.load", "numpy.load", "eval", "exec", "os.system", "os.popen"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.UnsafeLoader", "yaml.FullLoader"),
}
SAFE = {"shell": "False", "trust_remote_code": "False", "weights_only": "True", "allow_pickle": "False"}
"values of arguments; another one runs what a file holds"


@pytest.mark.quick
def test_the_source_reads_no_pickle_and_no_yaml_with_objects_and_gives_no_shell_a_string() -> None:
    assert YAML_LOADER in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", None))
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, where = ast.unparse(node.func), f"{path.name}:{node.lineno}"
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert name not in NEVER, where
            assert all(said.get(argument, value) == value for argument, value in SAFE.items()), where
            if name in ("yaml.load", "yaml.parse", "yaml.scan", "yaml.load_all"):
                loaders = {said.get("Loader"), *map(ast.unparse, node.args[1:])} - {None}
                assert loaders, where
                assert loaders <= {"YAML_LOADER", "yaml.SafeLoader", "yaml.CSafeLoader"}, where
            if name.endswith("torch.load"):
                assert "weights_only" in said, where
            if name.rpartition(".")[2] == "from_pretrained" and name.startswith("Auto"):
                assert "trust_remote_code" in said, where


@pytest.mark.quick
def test_a_model_folder_with_a_pickle_runs_nothing_of_it(tmp_path: Path) -> None:
    from slm_toolkit.run.model.model import build_model

    folder, marker = tmp_path / "evil", tmp_path / "marker"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Payload(marker)}))
    pickle.loads((folder / "pytorch_model.bin").read_bytes())  # by itself it does touch the file
    assert marker.exists()
    marker.unlink()
    config = RunConfig(model=str(folder), seq_len=8).with_defaults(has_gpu=False)
    with pytest.raises(ValueError, match="can't load model"):
        build_model(find_model(str(folder)), config)
    assert not marker.exists()


@pytest.mark.quick
def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    from slm_toolkit.run.data.documents import load_tokenizer
    from slm_toolkit.run.model.model import build_model

    folder, marker = tmp_path / "evil", tmp_path / "marker"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil:\n    pass\n")
    auto = {
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", None],
    }
    (folder / "config.json").write_text(json.dumps({**SMALL_LLAMA, "auto_map": auto}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto, "tokenizer_class": "Evil"}))
    spec, config = (
        find_model(str(folder)),
        RunConfig(model=str(folder), seq_len=8).with_defaults(has_gpu=False),
    )
    build_model(spec, config)
    with pytest.raises(ValueError, match="can't load tokenizer"):
        load_tokenizer(config, spec)
    assert not marker.exists()
    (folder / "config.json").write_text(json.dumps({**SMALL_LLAMA, "model_type": "evil", "auto_map": auto}))
    with pytest.raises(ValueError, match="model_type 'evil' is not supported"):
        find_model(str(folder))
    assert not marker.exists()


@pytest.mark.quick
def test_a_dataset_script_is_not_run(tmp_path: Path) -> None:
    from slm_toolkit.config.dataset_files import Source
    from slm_toolkit.run.data.documents import read_rows

    marker = tmp_path / "marker"
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    for name in (tmp_path / "evil", tmp_path / "evil" / "evil.py"):
        with pytest.raises(ValueError, match="hint: "):
            read_rows(Source("evil", str(name), ()), RunConfig(dataset=str(name)))
    assert not marker.exists()


# paths


@pytest.mark.quick
@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "..", ".", "", "a/b", "a\nb", "a\0b"])
def test_a_run_name_leads_nowhere_else(name: str) -> None:
    assert any("--run_name" in problem for problem in RunConfig(run_name=name).problems())


@pytest.mark.quick
def test_the_folder_of_a_run_is_one_name_whatever_the_model_and_the_yaml_are_called(tmp_path: Path) -> None:
    import dataclasses

    for name in ("../../x", "..", "a b$(touch x)", "x" * 300, "ä" * 300):
        spec = dataclasses.replace(PRESETS["slm-1m"], name=name)
        strategy = dataclasses.replace(find_strategy("ddp"), name=name)
        made = run_name_of(spec, strategy, "0123456789ab")
        assert Path(made).name == made
        (tmp_path / made).mkdir()  # which a name of over 255 bytes could not be
        assert (tmp_path / made).parent == tmp_path


# shells

HOSTILE = (
    "$(touch pwned)",
    "x; touch pwned",
    "`touch pwned`",
    "a'b\"; touch pwned #",
    "-e touch pwned",
    "a b*",
)


def _plan(folder: Path, dataset: str) -> object:
    import dataclasses

    (plan,) = plans_of("ddp", num_gpus=2)[:1]
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, dataset=dataset))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_launch_script_says_hostile_names_and_runs_none(name: str, tmp_path: Path) -> None:
    """By bash, with an `slm` that only prints its words."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "slm").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (commands / "slm").chmod(0o755)
    written = write_launch(_plan(tmp_path, name), tmp_path / "plan")
    env = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", written[1]], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[words.index("--dataset") + 1] == name
    assert not list(tmp_path.rglob("pwned"))


def test_an_sbatch_script_is_one_command_whatever_is_in_its_flags(tmp_path: Path) -> None:
    from slm_toolkit.compare.grid import plan_runs
    from slm_toolkit.compare.slurm import write_script

    nodes = slurm_nodes(
        num_nodes=1,
        gpus_per_node=2,
        options="--comment='$(touch pwned)'",
    )
    machine = nodes.machine
    text = tmp_path / "a $(touch pwned); touch pwned.txt"
    text.write_text("words")
    given = {"model": "slm-1m", "dataset": str(text), "output_dir": str(tmp_path / "$(touch pwned)")}
    (run,) = plan_runs(given, [find_strategy("ddp")], num_processes=2, machine=machine)
    script = write_script(run, nodes, timeout_seconds=60)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "2"}
    env |= {"SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}
    (tmp_path / "bin").mkdir()
    for name, body in (("scontrol", "echo n"), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(["bash", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(text) in done.stdout.splitlines()
    assert [path.name for path in tmp_path.rglob("pwned")] == []


@pytest.mark.quick
def test_a_newline_ends_no_line_of_an_sbatch_script(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be shown"):
        slurm_nodes(num_nodes=1, gpus_per_node=1, options="--comment='a\ntouch x'")
    evil = tmp_path / "x\ntouch pwned\n#.yaml"
    evil.write_text("distributed_type: NO\n")
    with pytest.raises(ValueError, match="unprintable characters"):
        find_strategy(str(evil))
    assert RunConfig(output_dir="a\nb").problems()


# what is no file


@pytest.mark.quick
def test_a_pipe_a_socket_a_device_and_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    from slm_toolkit.base.user_files import read_text

    pipe, link, at = tmp_path / "pipe", tmp_path / "loop", tmp_path / "socket"
    os.mkfifo(pipe)
    link.symlink_to(link)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(at))
    for path in (
        pipe,
        link,
        at,
        Path("/dev/zero"),
        tmp_path,
        tmp_path / "nothing",
        Path("a\0b"),
        Path("x" * 5000),
    ):
        with pytest.raises(ValueError, match="hint: give a file"):
            read_text(path, hint="give a file")
    listener.close()
    (tmp_path / "runs").mkdir()
    os.mkfifo(tmp_path / "runs" / "record.json")
    assert "it is a pipe" in find_records([tmp_path / "runs"])[1][0]


def test_a_file_of_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    for name, words in (
        ("config.json", ("estimate", "--model", "config.json")),
        ("mine.yaml", ("estimate", "--strategy", "mine.yaml")),
        ("prices.yaml", ("estimate", "--gpu", "l4", "--prices", "prices.yaml")),
        ("network.json", ("estimate", "--gpu", "l4", "--network", "network.json")),
        ("record.json", ("report", "record.json")),
        ("ds.json", ("convert", "ds.json", "--to", "accelerate_fsdp")),
    ):
        with open(tmp_path / name, "wb") as file:
            file.truncate(2**30)  # which takes no room on the disk
        limited = ["bash", "-c", f"ulimit -v {2**21}; exec slm {shlex.join(words)}"]  # 2 GiB of addresses
        done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, "bytes" in done.stderr, "hint: " in done.stderr) == (2, True, True), (
            done.stderr
        )


def test_python_files_of_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    """A model repository that was cloned, with modules called as packages are that a run imports."""
    for name in ("yaml", "psutil", "tokenizers", "safetensors"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    tiny = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "1", "--output_dir", "runs")
    # a warm process has imported all of them
    done = slm("compare", "--strategy", "ds_zero2", *tiny, cwd=tmp_path, cold=True)
    assert done.code == 0, done.err
    assert not (tmp_path / "ran").exists()
