"""`slm doctor` at the command line: `--fix`, exit codes, what it reads of a shell, how it prints."""

import json
import textwrap
from pathlib import Path

import pytest
from conftest import own_strategy, slm_here

from slm_toolkit.doctor.fix import as_yaml
from slm_toolkit.hardware.gpus import visible

MANY_FAULTS = """\
# my own, from an old blog
distributed_type: fsdp # lower case
fsdp_config: # how it shards
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP # by layer
  fsdp_ofload_params: false
num_processes: 8 # all of the node
gpu_ids: 0
"""
ASKED = ("--model", "slm-1b-hw", "--gpu", "h100-80gb")
H100S = (*ASKED, "--num_gpus", "8")


def names(out: str) -> list[str]:
    return [finding["name"] for finding in json.loads(out) if finding["severity"] != "could be faster"]


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MANY_FAULTS)
    return path


def test_a_file_that_a_launch_refuses_is_looked_at_to_its_end(faulty: Path) -> None:
    done = slm_here("doctor", *H100S, "--json", "--strategy", str(faulty))
    assert done.code == 1
    # the section's own faults come up once the engine has a name that accelerate knows
    assert set(names(done.out)) == {"unknown-key", "distributed-type", "gpu-ids", "fsdp-version-missing"}


def test_fix_writes_a_copy_that_keeps_comments_and_order(faulty: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fixed"
    done = slm_here("doctor", *H100S, "--strategy", str(faulty), "--fix", str(folder))
    assert done.code == 0  # all that was wrong is mended
    assert faulty.read_text() == MANY_FAULTS
    assert (folder / "mine.yaml").read_text() == textwrap.dedent(
        """\
        # my own, from an old blog
        distributed_type: FSDP # lower case
        fsdp_config: # how it shards
          fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP # by layer
          fsdp_offload_params: false
          fsdp_version: 2
          fsdp_reshard_after_forward: false
        num_processes: 8 # all of the node
        gpu_ids: all
        """
    )
    assert f"{folder / 'mine.yaml'}: corrected copy of {faulty}" in done.err
    assert "  distributed-type: distributed_type: FSDP" in done.err
    again = slm_here("doctor", *H100S, "--json", "--strict", "--strategy", str(folder / "mine.yaml"))
    assert (again.code, names(again.out)) == (0, [])


def test_fix_says_what_no_file_mends(faulty: Path, tmp_path: Path) -> None:
    faulty.write_text(MANY_FAULTS + "num_machines: 2\nmain_process_ip: localhost\n")
    done = slm_here(
        "doctor", *ASKED, "--num_gpus", "8", "--strategy", str(faulty), "--fix", str(tmp_path / "out")
    )
    assert done.code == 1
    assert "by hand: main-process-ip-local: main_process_ip: the first machine's address" in done.err


def test_fix_replaces_nothing_unless_it_is_told_to(faulty: Path, tmp_path: Path) -> None:
    words = ("doctor", *H100S, "--strategy", str(faulty), "--fix", str(tmp_path))
    done = slm_here(*words)
    assert done.code == 2
    assert f"{faulty} exists" in done.err
    assert faulty.read_text() == MANY_FAULTS
    assert slm_here(*words, "--overwrite").code == 0
    assert "distributed_type: FSDP # lower case" in faulty.read_text()


def test_fix_without_a_fault_writes_nothing(tmp_path: Path) -> None:
    done = slm_here("doctor", *H100S, "--strategy", "ddp", "--fix", cwd=tmp_path)
    assert done.code == 0
    assert "ddp.yaml: nothing to correct" in done.err
    assert list(tmp_path.iterdir()) == []


def test_fix_corrects_a_json_and_the_yaml_points_to_it(tmp_path: Path) -> None:
    deepspeed = {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 5e9, "overlap_comm": True}}
    own = own_strategy(tmp_path, "  zero3_init_flag: false\nnum_processes: 8\n", deepspeed)
    done = slm_here("doctor", *H100S, "--json", "--strategy", own)
    (finding,) = [f for f in json.loads(done.out) if f["name"] == "zero3-never-releases"]
    assert finding["edits"] == [
        {"file": "json", "key": "zero_optimization.stage3_max_reuse_distance", "value": 0}
    ]
    assert finding["file"] == str(tmp_path / "mine.json")
    slm_here("doctor", *H100S, "--strategy", own, "--fix", "fixed", cwd=tmp_path)
    fixed = tmp_path / "fixed"
    corrected = json.loads((fixed / "mine.json").read_text())
    assert corrected["zero_optimization"]["stage3_max_reuse_distance"] == 0
    assert (
        "deepspeed_config_file: fixed/mine.json" in (fixed / "mine.yaml").read_text()
    )  # as accelerate looks
    again = slm_here("doctor", *H100S, "--json", "--strategy", str(fixed / "mine.yaml"))
    assert "zero3-never-releases" not in names(again.out)
    assert json.loads((tmp_path / "mine.json").read_text()) == deepspeed


def test_a_deepspeed_json_can_be_given_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 2, "cpu_offlaod": true}, "fp16": {"enabled": true}}')
    done = slm_here("doctor", *H100S, "--json", "--strategy", str(path), "--fix", str(tmp_path / "fixed"))
    assert {"unknown-key", "json-contradicts-flag"} <= set(names(done.out))
    assert [written.name for written in (tmp_path / "fixed").iterdir()] == ["zero.json"]
    assert json.loads((tmp_path / "fixed" / "zero.json").read_text())["fp16"] == {"enabled": "auto"}


def test_strict_fails_for_what_is_unwise(tmp_path: Path) -> None:
    text = "  fsdp_version: 1\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\nnum_processes: 8\n"
    own = own_strategy(tmp_path, f"distributed_type: FSDP\nfsdp_config:\n{text}")
    words = ("doctor", *H100S, "--strategy", own)
    assert slm_here(*words).code == 0
    assert slm_here(*words, "--strict").code == 1


def test_the_shell_and_the_versions_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    done = slm_here("doctor", *H100S, "--json", "--strategy", "ddp", env={"NCCL_P2P_DISABLE": "1"})
    assert names(done.out) == ["nccl-p2p-disabled"]
    asked = ("--model", "smollm2-1.7b", "--gpu", "h200", "--strategy", "fsdp_full_shard")
    for torch, is_old in (("2.12.1", True), ("2.13.0", False)):
        monkeypatch.setattr("slm_toolkit.doctor.case.version", {"torch": torch}.get)
        assert ("tied-embeddings" in names(slm_here("doctor", *asked, "--json").out)) == is_old


def test_host_ram_is_looked_at_where_it_is_known() -> None:
    # so many tokens that ZeRO-3's hooks cost nothing
    words = ("doctor", *H100S, "--json", "--strategy", "ds_zero3", "--per_device_train_batch_size", "16")
    assert names(slm_here(*words).out) == []
    short = slm_here(*words, "--host_ram_gib", "24")
    assert "host-ram" in names(short.out)
    (finding,) = [f for f in json.loads(short.out) if f["name"] == "host-ram"]
    # a process 0.75 GiB, the model 4 bytes x 962,870,400 = 3.59 GiB: 8 x 4.34 = 34.7
    assert finding["sentence"] == "35 GiB of host RAM for 8 ranks, there are 24"
    assert finding["change"].startswith("zero3_init_flag: true")


def test_what_estimates_do_not_know_is_no_reason_to_stop() -> None:
    done = slm_here("doctor", *H100S, "--json", "--strategy", "ddp", "--attn_implementation", "sdpa_math")
    assert done.code == 0
    assert "note: --attn_implementation sdpa_math: no closed form for it" in done.err
    asked = ("--gpu", "a100-40gb", "--num_gpus", "2", "--model", "slm-2b-hw", "--fp8", "rowwise")
    asked += ("--strategy", "ddp", "--per_device_train_batch_size", "16")
    assert {"does-not-fit", "fp8-emulated"} <= set(names(slm_here("doctor", *asked, "--json").out))
    adapter = slm_here("doctor", *H100S, "--json", "--strategy", "ds_zero3", "--peft", "qlora")
    assert "flag-contradiction" in names(adapter.out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: [", "is not YAML"),
        ("just words\n", "contains no settings"),
        (None, "no such file"),
    ],
)
def test_what_is_no_configuration_is_bad_input(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    done = slm_here("doctor", "--strategy", str(path))
    assert done.code == 2
    assert message in done.err
    assert "hint: " in done.err


def test_an_idle_overwrite_is_bad_input() -> None:
    done = slm_here("doctor", "--strategy", "ddp", "--overwrite")
    assert done.code == 2
    assert "hint: " in done.err


def test_it_is_readable_at_80_columns_and_in_a_pipe(faulty: Path) -> None:
    done = slm_here("doctor", *H100S, "--strategy", faulty.name, cwd=faulty.parent, env={"COLUMNS": "80"})
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("4 wrong")
    assert "    change: distributed_type: FSDP" in lines
    assert not any(line.endswith(" ") for line in lines)


COMMENTED = """\
# head
fsdp_config: # how it shards
    # about the strategy
    fsdp_sharding_strategy: FULL_SHARD # old
    # about offload
    fsdp_offload_params: False # off
# about ranks
num_processes: 8 # all of the node
num_processes: 4 # half of it
# end
"""


def test_comments_stay_with_their_keys() -> None:
    content = {"fsdp_config": {"fsdp_offload_params": True, "fsdp_version": 2}, "num_processes": 4}
    assert as_yaml(content, COMMENTED) == (
        "# head\nfsdp_config: # how it shards\n  # about offload\n  fsdp_offload_params: true # off\n"
        "  fsdp_version: 2\n# about ranks\nnum_processes: 4 # half of it\n# end\n"
    )
    assert as_yaml({"a": 1}, "{a: 2} # in one line\n") == "a: 1\n"


def test_the_gpus_seen_are_those_that_cuda_would_see() -> None:
    names = ("A", "B", "C")
    assert visible(names, None) == names
    assert visible(names, "2,0") == ("C", "A")
    assert visible(names, "") == ()
    assert visible(names, "1,7,0") == ("B",)  # CUDA stops at the first that is none


def test_gpus_are_counted_in_the_file_or_given(tmp_path: Path) -> None:
    text = "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\nnum_processes: 6\n"
    own = own_strategy(tmp_path, f"distributed_type: FSDP\nfsdp_config:\n{text}")
    words = ("doctor", "--model", "slm-100m-hw", "--per_device_train_batch_size", "4", "--strategy", own)
    assert "fits on each of 6 x" in slm_here(*words, env={"COLUMNS": "300"}).out
    done = slm_here(*words, "--num_gpus", "7", "--gpus_per_node", "4")
    assert done.code == 2
    assert "7 GPUs can't be the same number on each node of up to 4" in done.err
