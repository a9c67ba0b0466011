"""`slm doctor`: what it finds wrong, and that it is silent where nothing is."""

import json
from pathlib import Path

import pytest
from conftest import own_strategy, slm_here

from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.predict.bottleneck import misaligned_widths

PLAIN = ("--kernels", "plain")


def doctored(*arguments: str, code: int) -> list[dict]:
    done = slm_here("doctor", "--json", *arguments)
    assert done.code == code, done.err
    return json.loads(done.out)


def test_it_names_the_gain_of_aligned_widths_for_each_gpu_type() -> None:
    found = doctored("--model", "slm-500m", "--per_device_train_batch_size", "16", *PLAIN, code=1)
    gains = {finding["gpu"]: finding for finding in found if finding["topic"] == "alignment"}
    assert set(gains) == {"a100-40gb", "a100-80gb", "h100-80gb"}
    assert all("with --pad_widths it should train" in finding["sentence"] for finding in gains.values())
    assert all(finding["change"] == "--pad_widths" for finding in gains.values())
    # the facts behind it: a misaligned product takes 1 / 0.152 of the time on Hopper, 1 / 0.316 on Ampere
    assert gains["h100-80gb"]["speedup"] > gains["a100-80gb"]["speedup"] > 1.25
    assert all(finding["severity"] == "wrong" for finding in gains.values())


@pytest.mark.parametrize("model", ["slm-500m-hw", "slm-1b", "llama-3.2-1b"])
def test_aligned_models_hear_nothing_of_alignment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert misaligned_widths(PRESETS[model]) == {}
    monkeypatch.setattr("slm_toolkit.doctor.case.version", {"torch": "2.13.0"}.get)
    found = doctored("--model", model, "--gpu", "h100-80gb", code=0)
    assert "alignment" not in {finding["topic"] for finding in found}


def test_what_does_not_fit_comes_with_the_batch_that_does() -> None:
    asked = ("--model", "slm-2b-hw", "--gpu", "a100-40gb", "--strategy", "ds_zero3")
    (finding,) = [
        f for f in doctored(*asked, "--per_device_train_batch_size", "64", code=1) if f["topic"] == "memory"
    ]
    assert finding["severity"] == "wrong"
    batch = finding["sentence"].split("--per_device_train_batch_size ")[1].split()[0]
    again = doctored(*asked, "--per_device_train_batch_size", batch, code=0)
    assert not any(f["severity"] == "wrong" for f in again)


def test_a_network_too_slow_to_hide_communication_is_named() -> None:
    asked = ("--model", "slm-1b", "--gpu", "h100-80gb", "--num_gpus", "64", "--strategy", "fsdp_full_shard")
    slow = doctored(*asked, "--network", "10", code=1)
    assert [f["topic"] for f in slow][0] == "network"
    fast = doctored(*asked, "--network", "100000", code=0)
    assert "network" not in {f["topic"] for f in fast}
    unknown = slm_here("doctor", *asked[:2], "--gpu", "l40s", "--num_gpus", "16", "--strategy", "ddp")
    assert "note: the network between nodes of l40s is not known: give it with --network" in unknown.err


def test_kernels_that_would_be_faster_are_named_with_what_they_give() -> None:
    asked = ("--model", "slm-1b", "--gpu", "a100-80gb", "--attn_implementation", "eager", *PLAIN)
    found = doctored(*asked, code=0)
    (sdpa,) = [f for f in found if "--attn_implementation sdpa should give" in f["sentence"]]
    assert sdpa["sentence"].startswith("bound by attention on a100-80gb")
    assert sdpa["speedup"] > 1.2


def test_it_says_so_where_there_is_nothing_to_say() -> None:
    done = slm_here(
        *("doctor", "--model", "slm-2b-hw", "--gpu", "h200", "--num_gpus", "1", "--strategy", "single"),
        *("--kernels", "compiled", "--per_device_train_batch_size", "32"),
    )
    assert done.code == 0
    assert done.out == "slm-2b-hw: no findings\n"


def test_bad_flags_end_with_a_hint() -> None:
    done = slm_here("doctor", "--model", "slm-500m", "--gpu", "h1000", "--seq_len", "0")
    assert done.code == 2
    assert "hint: " in done.err


def test_hidden_and_head_widths_off_the_multiple_of_8_are_named(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 12, "hidden_size": 780, "num_attention_heads": 13, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "intermediate_size": 2048}))
    words = ("--gpu", "h100-80gb", "--strategy", "ddp", "--per_device_train_batch_size", "32")
    found = doctored("--model", str(tmp_path), *words, code=1)
    (alignment,) = [f for f in found if f["topic"] == "alignment"]
    assert "hidden 780, heads 780" in alignment["sentence"]
    assert "hidden 768 for 780, heads of 64 for 60" in alignment["sentence"]
    assert alignment["speedup"] > 1.25


def test_a_finding_that_several_files_share_is_printed_once_with_the_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    printed = slm_here("doctor", "--gpu", "l4", "--num_gpus", "1", "--strategy", *map(str, files)).out
    assert printed.count("num_processes is 8 for 1 GPU") == 1
    assert all(f"{file}: num_processes" in printed for file in files)
    assert "1 wrong" in printed


def test_a_finding_on_several_gpus_is_printed_once_with_the_gpus() -> None:
    asked = ("doctor", "--model", "slm-500m", "--strategy", "ddp", *PLAIN)
    printed = slm_here(*asked, env={"COLUMNS": "200"}).out
    assert printed.count("[widths-off-tensor-cores]") == printed.count("change: --pad_widths") == 1
    assert "    also: a100-80gb, a100-40gb\n" in printed  # after the largest speedup, on the h100-80gb
    assert printed.count("change: --kernels compiled") == 1
    assert "1 wrong," in printed


@pytest.mark.parametrize("engine", ["MULTI_CPU\nnum_processes: 2", "'NO'\nuse_cpu: true\nnum_processes: 1"])
def test_a_yaml_of_cpus_is_judged_as_one_of_cpus(engine: str, tmp_path: Path) -> None:
    own = own_strategy(tmp_path, f"distributed_type: {engine}\n", name="cpus")
    done = slm_here("doctor", "--json", "--strategy", own, "--model", "slm-500m")
    assert {finding["topic"] for finding in json.loads(done.out)} <= {"environment"}
    assert "cpus trains on CPUs: its memory and speed are not checked" in done.err
    assert "the defaults" not in slm_here("doctor", "--strategy", own).err  # no finding depends on a GPU
    # the user's GPUs would be idle
    on_gpus = slm_here("doctor", "--json", "--strategy", own, "--model", "slm-1b-hw", "--gpu", "h100-80gb")
    assert ("use-cpu" in {finding["name"] for finding in json.loads(on_gpus.out)}) == ("use_cpu" in engine)
