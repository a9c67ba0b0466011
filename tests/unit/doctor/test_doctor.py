"""`slm doctor` at the command line: findings, `--fix`, exit codes, and what it prints."""

import json
import textwrap
from pathlib import Path

import pytest
from conftest import SMALL_LLAMA, own_strategy, slm_here
from doctor_cases import MEANT

from slm_toolkit.hardware.gpus import visible
from slm_toolkit.strategy.strategy import shipped_strategies

PLAIN = ("--kernels", "plain")
BATCH = "--per_device_train_batch_size"
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
H100S = ("--model", "slm-1b-hw", "--gpu", "h100-80gb", "--num_gpus", "8")


def doctored(*arguments: str, code: int = 0, **options: object) -> dict[str, dict]:
    """The findings by name; of several with one name, the first."""
    done = slm_here("doctor", "--json", *arguments, **options)
    assert done.code == code, done.err
    return {finding["name"]: finding for finding in reversed(json.loads(done.out))}


def grave(found: dict[str, dict]) -> set[str]:
    return {name for name, finding in found.items() if finding["severity"] != "could be faster"}


@pytest.mark.parametrize("strategy", shipped_strategies())
def test_a_shipped_file_is_free_of_faults(strategy: str) -> None:
    meant = MEANT[strategy]
    words = ("--model", meant.model, "--gpu", meant.gpu, "--num_gpus", str(meant.num_gpus))
    assert grave(doctored("--strict", "--strategy", strategy, *words, BATCH, str(meant.batch))) == set()


def test_it_names_the_gain_of_aligned_widths_for_each_gpu_type(tmp_path: Path) -> None:
    words = ("doctor", "--json", "--model", "slm-500m", BATCH, "16", *PLAIN)
    found = [f for f in json.loads(slm_here(*words).out) if f["name"] == "widths-off-tensor-cores"]
    gains = {f["gpu"]: f["speedup"] for f in found}
    assert {f["change"] for f in found} == {"--pad_widths"}
    # the facts behind it: a misaligned product takes 1 / 0.152 of the time on Hopper, 1 / 0.316 on Ampere
    assert gains["h100-80gb"] > gains["a100-80gb"] > 1.25
    shape = {"hidden_size": 780, "num_attention_heads": 13, "intermediate_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL_LLAMA, **shape}))
    words = ("--model", str(tmp_path), "--gpu", "h100-80gb", "--strategy", "ddp", BATCH, "32")
    finding = doctored(*words)["widths-off-tensor-cores"]
    assert finding["change"] == "another shape"
    assert "hidden 780, heads 780" in finding["sentence"]


def test_what_does_not_fit_comes_with_the_batch_that_does() -> None:
    asked = ("--model", "slm-2b-hw", "--gpu", "a100-40gb", "--strategy", "ds_zero3", BATCH)
    sentence = doctored(*asked, "64", code=1)["does-not-fit"]["sentence"]
    doctored(*asked, sentence.split(f"{BATCH} ")[1].split()[0])


def test_a_network_too_slow_to_hide_communication_is_named() -> None:
    asked = ("--model", "slm-1b", "--gpu", "h100-80gb", "--num_gpus", "64", "--strategy", "fsdp_full_shard")
    assert "network-too-slow" in doctored(*asked, "--network", "10", code=1)
    assert "network-too-slow" not in doctored(*asked, "--network", "100000")
    unknown = slm_here("doctor", *asked[:2], "--gpu", "l40s", "--num_gpus", "16", "--strategy", "ddp")
    assert "the network between nodes of l40s is not known" in unknown.err


def test_a_finding_is_printed_once_for_several_files_or_gpus(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 8\n"
    files = [own_strategy(tmp_path, text, name=name) for name in ("a", "b")]
    printed = slm_here("doctor", "--gpu", "l4", "--num_gpus", "1", "--strategy", *files).out
    assert printed.count("num_processes is 8 for 1 GPU") == 1
    assert all(f"{file}: num_processes" in printed for file in files)
    asked = ("doctor", "--model", "slm-500m", "--strategy", "ddp", *PLAIN)
    printed = slm_here(*asked, env={"COLUMNS": "200"}).out
    assert printed.count("change: --pad_widths") == printed.count("change: --kernels compiled") == 1
    assert "    also: a100-80gb, a100-40gb\n" in printed  # after the largest speedup, on the h100-80gb
    single = ("--gpu", "h200", "--num_gpus", "1", "--strategy", "single", "--kernels", "compiled")
    done = slm_here("doctor", "--model", "slm-2b-hw", *single, BATCH, "32")
    assert (done.code, done.out) == (0, "slm-2b-hw: no findings\n")


@pytest.mark.parametrize("engine", ["MULTI_CPU\nnum_processes: 2", "'NO'\nuse_cpu: true\nnum_processes: 1"])
def test_a_yaml_of_cpus_is_judged_as_one_of_cpus(engine: str, tmp_path: Path) -> None:
    own = own_strategy(tmp_path, f"distributed_type: {engine}\n", name="cpus")
    done = slm_here("doctor", "--json", "--strategy", own, "--model", "slm-500m")
    assert {finding["name"] for finding in json.loads(done.out)} <= {"one-thread-per-rank"}
    assert "cpus trains on CPUs: its memory and speed are not checked" in done.err
    # the user's GPUs would be idle
    is_idle = "use_cpu" in engine
    on_gpus = doctored("--strategy", own, "--model", "slm-1b-hw", "--gpu", "h100-80gb", code=int(is_idle))
    assert ("use-cpu" in on_gpus) == is_idle


def test_fix_writes_a_copy_that_keeps_comments_and_order(tmp_path: Path) -> None:
    faulty = tmp_path / "mine.yaml"
    faulty.write_text(MANY_FAULTS)
    found = doctored(*H100S, "--strategy", str(faulty), code=1)
    # the section's own faults come up once the engine has a name that accelerate knows
    assert grave(found) == {"unknown-key", "distributed-type", "gpu-ids", "fsdp-version-missing"}
    folder = tmp_path / "fixed"
    done = slm_here("doctor", *H100S, "--strategy", str(faulty), "--fix", str(folder))
    assert done.code == 0  # all that was wrong is corrected
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
    assert grave(doctored(*H100S, "--strict", "--strategy", str(folder / "mine.yaml"))) == set()
    faulty.write_text(MANY_FAULTS + "num_machines: 2\nmain_process_ip: localhost\n")
    done = slm_here("doctor", *H100S, "--strategy", str(faulty), "--fix", str(tmp_path / "out"))
    assert done.code == 1
    assert "by hand: main-process-ip-local: main_process_ip: the first machine's address" in done.err


def test_fix_corrects_a_json_and_the_yaml_points_to_it(tmp_path: Path) -> None:
    deepspeed = {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 5e9, "overlap_comm": True}}
    own = own_strategy(tmp_path, "  zero3_init_flag: false\nnum_processes: 8\n", deepspeed)
    words = (*H100S, "--strategy", own, "--fix", "fixed")
    finding = doctored(*words, cwd=tmp_path)["zero3-never-releases"]
    key = "zero_optimization.stage3_max_reuse_distance"
    assert finding["edits"] == [{"file": "json", "key": key, "value": 0}]
    assert finding["file"] == str(tmp_path / "mine.json")
    fixed = tmp_path / "fixed"
    assert json.loads((fixed / "mine.json").read_text())["zero_optimization"][key.split(".")[1]] == 0
    assert "deepspeed_config_file: fixed/mine.json" in (fixed / "mine.yaml").read_text()
    assert json.loads((tmp_path / "mine.json").read_text()) == deepspeed
    alone = tmp_path / "zero.json"
    alone.write_text('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}')
    doctored(*H100S, "--strategy", str(alone), "--fix", "alone", cwd=tmp_path)
    assert json.loads((tmp_path / "alone" / "zero.json").read_text())["fp16"] == {"enabled": "auto"}


def test_strict_fails_for_what_is_unwise(tmp_path: Path) -> None:
    text = "  fsdp_version: 1\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\nnum_processes: 8\n"
    words = (*H100S, "--strategy", own_strategy(tmp_path, f"distributed_type: FSDP\nfsdp_config:\n{text}"))
    doctored(*words)
    doctored(*words, "--strict", code=1)


def test_the_shell_and_the_versions_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctored(*H100S, "--strategy", "ddp", env={"NCCL_P2P_DISABLE": "1"}, code=1)
    assert grave(found) == {"nccl-p2p-disabled"}
    asked = ("--model", "smollm2-1.7b", "--gpu", "h200", "--strategy", "fsdp_full_shard")
    for torch, is_old in (("2.12.1", True), ("2.13.0", False)):
        monkeypatch.setattr("slm_toolkit.doctor.case.version", {"torch": torch}.get)
        assert ("tied-embeddings" in doctored(*asked, code=int(is_old))) == is_old
    names = ("A", "B", "C")
    assert visible(names, "2,0") == ("C", "A")
    assert visible(names, "") == ()
    assert visible(names, "1,7,0") == ("B",)  # CUDA stops at the first that is none


def test_host_ram_is_looked_at_where_it_is_known() -> None:
    # so many tokens that ZeRO-3's hooks cost nothing
    words = (*H100S, "--strategy", "ds_zero3", BATCH, "16")
    assert grave(doctored(*words)) == set()
    finding = doctored(*words, "--host_ram_gib", "24", code=1)["host-ram"]
    # a process 0.75 GiB, the model 4 bytes x 962,870,400 = 3.59 GiB: 8 x 4.34 = 34.7
    assert finding["sentence"] == "35 GiB of host RAM for 8 ranks, there are 24"
    assert finding["change"].startswith("zero3_init_flag: true")


def test_what_estimates_do_not_know_is_no_reason_to_stop() -> None:
    done = slm_here("doctor", *H100S, "--json", "--strategy", "ddp", "--kernels", "graphs")
    assert done.code == 0
    assert "note: --kernels graphs: no closed form for it" in done.err


BAD = [  # flags, the file's text, the error
    ((), "distributed_type: [", "is not YAML"),
    ((), None, "no such file"),
    (("--fix", "."), MANY_FAULTS, "mine.yaml exists: nothing was written"),
    (("--num_gpus", "7", "--gpus_per_node", "4"), MANY_FAULTS, "7 GPUs can't be the same number"),
]


@pytest.mark.parametrize(("flags", "text", "says"), BAD)
def test_bad_input_ends_with_a_hint(
    flags: tuple[str, ...], text: str | None, says: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "mine.yaml").write_text(text)
    done = slm_here("doctor", "--strategy", "mine.yaml", *flags, cwd=tmp_path)
    assert done.code == 2
    assert says in done.err
    assert "hint: " in done.err
    assert text is None or (tmp_path / "mine.yaml").read_text() == text
