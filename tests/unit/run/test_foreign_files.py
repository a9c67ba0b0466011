"""Folders of accelerate and DeepSpeed are read as tensors; what runs code, or is incomplete, is refused."""

import json
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import slm_here

from slm_toolkit.run.checkpoint.foreign import ForeignReader, is_foreign, open_foreign

NAMES = {"model.norm.weight": (6,), "lm_head.weight": (4, 3)}
KINDS = ("weights", "exp_avg", "exp_avg_sq")


def tensor(kind: str, name: str) -> torch.Tensor:
    shape = NAMES[name]
    first = 100.0 * KINDS.index(kind) + 1000.0 * list(NAMES).index(name)
    return first + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def write_dcp(folder: Path) -> Path:
    state = {name: {kind: tensor(kind, name) for kind in KINDS[1:]} for name in NAMES}
    state = {name: {**moments, "step": torch.tensor(7.0)} for name, moments in state.items()}
    for part, content in (
        ("pytorch_model_fsdp_0", {"model": {name: tensor("weights", name) for name in NAMES}}),
        ("optimizer_0", {"optimizer": {"state": state, "param_groups": [{"lr": 0.5}]}}),
    ):
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder / part), no_dist=True)
    return folder


def write_zero3(folder: Path, *, num_ranks: int = 2, sub_groups: int = 2) -> Path:
    """As ranks write it: each has an equal shard of every parameter, one after the other, in sub-groups."""
    (folder / "global_step7").mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    shards = {}
    for kind in KINDS:
        for name in NAMES:
            flat = tensor(kind, name).flatten()
            size = -(-len(flat) // num_ranks)
            shards[kind, name] = torch.nn.functional.pad(flat, (0, size * num_ranks - len(flat))).split(size)
    for rank in range(num_ranks):
        of_rank = {kind: torch.cat([shards[kind, name][rank] for name in NAMES]) for kind in KINDS}
        groups = {kind: list(flat.tensor_split(sub_groups)) for kind, flat in of_rank.items()}
        moments = [{kind: groups[kind][group] for kind in KINDS[1:]} for group in range(sub_groups)]
        inner = {"state": dict(enumerate(moments)), "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}
        state = {"zero_stage": 3, "partition_count": num_ranks, "fp32_flat_groups": groups["weights"]}
        content = {"optimizer_state_dict": {**state, "optimizer_state_dict": inner}}
        torch.save(content, folder / f"global_step7/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        shapes = [OrderedDict((name, torch.Size(shape)) for name, shape in NAMES.items())]
        described = {"param_shapes": shapes, "global_steps": 9, "skipped_steps": 2, "mp_world_size": 1}
        torch.save(described, folder / f"global_step7/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return folder


def write_zero2(folder: Path) -> Path:
    """One flat buffer of both parameters, cut in the middle of the second: 18 elements for two ranks."""
    folder.mkdir()
    flat = {kind: torch.cat([tensor(kind, name).flatten() for name in NAMES]) for kind in KINDS}
    from deepspeed.utils.tensor_fragment import fragment_address

    slices = [
        {"model.norm.weight": fragment_address(6, 0), "lm_head.weight": fragment_address(3, 6)},
        {"lm_head.weight": fragment_address(9, 0)},
    ]
    for rank in range(2):
        part = {kind: whole[9 * rank : 9 * rank + 9].clone() for kind, whole in flat.items()}
        inner = {"state": {0: {kind: part[kind] for kind in KINDS[1:]}}, "param_groups": [{"lr": 0.5}]}
        state = {
            "zero_stage": 2,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [part["weights"]],
        }
        state |= {"param_slice_mappings": [slices[rank]], "base_optimizer_state": inner}
        torch.save(
            {"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
    shapes = [OrderedDict((name, torch.Size(shape)) for name, shape in NAMES.items())]
    described = {"param_shapes": shapes, "global_steps": 7, "skipped_steps": 0, "mp_world_size": 1}
    torch.save(described, folder / "mp_rank_00_model_states.pt")
    return folder


def check_all(reader: ForeignReader) -> None:
    assert reader.num_elements == {"model.norm.weight": 6, "lm_head.weight": 12}
    for kind in KINDS:
        for name in NAMES:
            whole = tensor(kind, name).flatten()
            assert torch.equal(reader.read(f"{kind}/{name}", 0, len(whole)), whole), (kind, name)
            assert torch.equal(reader.read(f"{kind}/{name}", 2, 3), whole[2:5])
    assert reader.num_optimizer_steps == 7


def test_a_dcp_folder_is_read_stretch_by_stretch(tmp_path: Path) -> None:
    reader = open_foreign(write_dcp(tmp_path / "a"))
    check_all(reader)
    assert (reader.num_steps, reader.num_processes, reader.adamw) == (7, 1, {})


def test_a_full_state_dict_is_read(tmp_path: Path) -> None:
    torch.save({name: tensor("weights", name) for name in NAMES}, tmp_path / "pytorch_model_fsdp.bin")
    state = {name: {kind: tensor(kind, name) for kind in KINDS[1:]} for name in NAMES}
    state = {name: {**moments, "step": torch.tensor(7.0)} for name, moments in state.items()}
    torch.save({"state": state, "param_groups": [{"lr": 0.5}]}, tmp_path / "optimizer.bin")
    check_all(reader := open_foreign(tmp_path))
    assert (reader.num_steps, reader.adamw) == (7, {"lr": 0.5})


@pytest.mark.parametrize(("num_ranks", "sub_groups"), [(2, 2), (2, 1), (5, 3), (1, 1)])
def test_shards_of_zero_3_are_put_together(num_ranks: int, sub_groups: int, tmp_path: Path) -> None:
    reader = open_foreign(write_zero3(tmp_path / "a", num_ranks=num_ranks, sub_groups=sub_groups))
    check_all(reader)
    assert (reader.program, reader.num_steps, reader.num_processes) == ("DeepSpeed ZeRO-3", 9, num_ranks)
    assert reader.adamw == {"lr": 0.5, "betas": (0.9, 0.99)}


def test_parts_of_zero_2s_flat_buffer_are_put_together(tmp_path: Path) -> None:
    reader = open_foreign(write_zero2(tmp_path / "a"))
    check_all(reader)
    assert (reader.program, reader.num_steps, reader.num_processes) == ("DeepSpeed ZeRO-2", 7, 2)


class Harmful:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "run")


class HarmfulByName(Harmful):
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({str(self.path)!r}, 'w').write('run')",)


@pytest.mark.parametrize("harmful", [Harmful, HarmfulByName])
@pytest.mark.parametrize("folder", ["optimizer_0", "pytorch_model_fsdp_0"])
def test_a_malicious_index_is_refused_and_runs_nothing(
    folder: str, harmful: type[Harmful], tmp_path: Path
) -> None:
    whole, target = write_dcp(tmp_path / "a"), tmp_path / "written"
    evil = pickle.dumps([harmful(target)])
    (whole / folder / ".metadata").write_bytes(evil)
    with pytest.raises(ValueError, match=r"is refused: .*\nhint: "):
        open_foreign(whole)
    assert not target.exists()
    pickle.loads(evil)  # it would have done harm
    assert target.exists()


def test_a_malicious_shard_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    whole, target = write_dcp(tmp_path / "a"), tmp_path / "written"
    folder = whole / "pytorch_model_fsdp_0"
    torch.save([Harmful(target)], folder / "__0_0.distcp")
    index = pickle.loads((folder / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.offset, info.length = 0, (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    reader = open_foreign(whole)
    with pytest.raises(ValueError, match="is refused: it contains more than tensors"):
        reader.read("weights/lm_head.weight", 0, 12)
    assert not target.exists()
    torch.load(folder / "__0_0.distcp", weights_only=False)
    assert target.exists()


def test_an_entry_that_only_looks_like_a_tensor_runs_nothing(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    whole, target = write_dcp(tmp_path / "a"), tmp_path / "written"
    folder = whole / "optimizer_0"
    index = pickle.loads((folder / ".metadata").read_bytes())
    step = "optimizer.state.model.norm.weight.step"
    index.state_dict_metadata[step] = BytesStorageMetadata()
    index.state_dict_metadata[step].__dict__["size"] = torch.Size([])
    torch.save(Harmful(target), folder / "evil.distcp")
    for place, info in index.storage_data.items():
        if place.fqn == step:
            info.relative_path, info.offset = "evil.distcp", 0
            info.length = (folder / "evil.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="is refused: it lacks optimizer.state.model.norm.weight.step"):
        open_foreign(whole)
    assert not target.exists()


@pytest.mark.parametrize("name", [b"cpathlib\nPosixPath\n", b"ctorch.serialization\n_get_layout\n"])
def test_an_index_can_change_no_class(name: bytes, tmp_path: Path) -> None:
    """A pickle's BUILD sets attributes of whatever it is given: here of a class that an index may name."""
    whole = write_dcp(tmp_path / "a")
    evil = b"\x80\x02" + name + b"N}X\x06\x00\x00\x00parentX\x04\x00\x00\x00evils\x86b."
    (whole / "optimizer_0" / ".metadata").write_bytes(evil)
    with pytest.raises(ValueError, match="is refused"):
        open_foreign(whole)
    assert Path("/a/b").parent == Path("/a")
    changed = pickle.loads(evil)  # it would have changed the class of the whole process
    assert changed.parent == "evil"
    if changed is type(Path()):
        del changed.parent


def test_small_files_claim_no_memory(tmp_path: Path) -> None:
    big = write_dcp(tmp_path / "big")
    file = big / "pytorch_model_fsdp_0" / ".metadata"
    index = pickle.loads(file.read_bytes())
    index.state_dict_metadata["model.lm_head.weight"].size = torch.Size([2**40, 3])
    file.write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="has 3,298,534,883,328 elements, not 12"):
        open_foreign(big).read("weights/lm_head.weight", 0, 12)
    wide = write_zero3(tmp_path / "wide", sub_groups=1)
    rank = wide / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(rank, weights_only=True)
    content["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(1).expand(2**40)]
    torch.save(content, rank)
    with pytest.raises(ValueError, match="claims more elements than it has"):
        open_foreign(wide).read("weights/lm_head.weight", 0, 12)
    content["optimizer_state_dict"]["partition_count"] = 3 * 10**9
    torch.save(content, rank)
    with pytest.raises(ValueError, match="3000000000 ranks wrote it"):
        open_foreign(wide)


def test_a_pipe_or_a_parent_folder_is_no_tag(tmp_path: Path) -> None:
    write_zero3(tmp_path / "other")
    for tag in ("..", "../other/global_step7"):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "latest").write_text(tag)
        assert not is_foreign(tmp_path / "a"), tag
    for file in (tmp_path / "other" / "global_step7").iterdir():
        shutil.copy(file, tmp_path)  # what .. would have reached
    assert not is_foreign(tmp_path / "a")
    (tmp_path / "a" / "latest").unlink()
    os.mkfifo(tmp_path / "a" / "latest")
    assert not is_foreign(tmp_path / "a")


def test_steps_that_nobody_does_are_refused(tmp_path: Path) -> None:
    folder = write_zero3(tmp_path / "a") / "global_step7"
    file = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=True), "global_steps": -5}, file)
    with pytest.raises(ValueError, match="it says that -5 steps are done"):
        open_foreign(tmp_path / "a")


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    folder = write_zero3(tmp_path / "a") / "global_step7"
    old = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", old)
    with pytest.raises(ValueError, match="has two files of rank 0"):
        open_foreign(tmp_path / "a")


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "a")
    file = folder / "optimizer_0" / ".metadata"
    index = pickle.loads(file.read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../../secret.distcp"
    file.write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="which is not in its folder"):
        open_foreign(folder)


@pytest.mark.parametrize("which", ["optim", "model"])
def test_a_malicious_file_of_deepspeed_is_refused_and_runs_nothing(which: str, tmp_path: Path) -> None:
    folder, target = write_zero3(tmp_path / "a"), tmp_path / "written"
    file = next((folder / "global_step7").glob(f"*rank_0_*{which}_states.pt"))
    content = torch.load(file, weights_only=True)
    torch.save({**content, "more": Harmful(target)}, file)
    with pytest.raises(ValueError, match="is refused") as refused:
        open_foreign(folder)
    assert "hint: " in str(refused.value)
    assert not target.exists()
    torch.load(file, weights_only=False)
    assert target.exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_zero3(tmp_path / "zero")
    (folder / "global_step7" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match="2 ranks wrote it, but it has 1 files"):
        open_foreign(folder)
    weights_only = write_dcp(tmp_path / "dcp")
    shutil.rmtree(weights_only / "optimizer_0")
    with pytest.raises(ValueError, match="no moments of AdamW"):
        open_foreign(weights_only)
    cut = write_dcp(tmp_path / "cut")
    shards = cut / "pytorch_model_fsdp_0" / "__0_0.distcp"
    shards.write_bytes(shards.read_bytes()[:100])
    with pytest.raises(ValueError, match="can't be read|is refused"):
        check_all(open_foreign(cut))
    with pytest.raises(ValueError, match="lacks 3 elements of weights/lm_head.weight"):
        open_foreign(write_dcp(tmp_path / "whole")).read("weights/lm_head.weight", 10, 5)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, Path]:
    """A model's folder, and a checkpoint of it as FSDP with FULL_STATE_DICT writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=16, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "model")
    folder = tmp_path / "their"
    folder.mkdir()
    weights = {name: param.detach().bfloat16() for name, param in model.named_parameters()}
    state = {
        name: {"exp_avg": value + 1, "exp_avg_sq": value + 2, "step": torch.tensor(3.0)}
        for name, value in weights.items()
    }
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    torch.save(
        {"state": state, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}, folder / "optimizer.bin"
    )
    return tmp_path / "model", folder


def test_a_rewritten_checkpoint_has_the_same_tensors(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model, folder = tiny
    words = ("convert", str(folder), "--to", "fsdp_checkpoint", "--model", str(model))
    words += ("--output", str(tmp_path / "made"))
    assert slm_here(*words).code == 0
    theirs, made = open_foreign(folder), open_foreign(tmp_path / "made")
    assert made.num_elements == theirs.num_elements
    index = pickle.loads((tmp_path / "made" / "pytorch_model_fsdp_0" / ".metadata").read_bytes())
    # FSDP2 asks for tied weights by both names
    assert {"model.lm_head.weight", "model.model.embed_tokens.weight"} <= index.state_dict_metadata.keys()
    assert made.num_optimizer_steps == theirs.num_optimizer_steps == 3
    for name, size in theirs.num_elements.items():
        for kind in KINDS:
            ours = made.read(f"{kind}/{name}", 0, size)
            assert torch.equal(ours, theirs.read(f"{kind}/{name}", 0, size)), (kind, name)
    again = slm_here(*words)
    assert (again.code, "nothing is overwritten" in again.err) == (2, True)


def test_a_universal_checkpoint_has_a_folder_for_each_parameter(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    model, folder = tiny
    words = ("convert", str(folder), "--to", "ds_universal", "--model", str(model))
    assert slm_here(*words, "--output", str(tmp_path / "made")).code == 0
    theirs, zero = open_foreign(folder), tmp_path / "made" / "pytorch_model" / "zero"
    for name, size in theirs.num_elements.items():
        for kind, file in zip(KINDS, ("fp32", "exp_avg", "exp_avg_sq"), strict=True):
            ours = torch.load(zero / name / f"{file}.pt", weights_only=True)["param"]
            assert torch.equal(ours.flatten(), theirs.read(f"{kind}/{name}", 0, size)), (kind, name)


def test_a_model_comes_out_of_a_checkpoint(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, folder = tiny
    to = ("--to", "hf_model", "--output", str(tmp_path / "made"))
    done = slm_here("convert", str(folder), *to, "--model", str(model), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["step"] == 3
    weights, theirs = load_file(tmp_path / "made" / "model.safetensors"), open_foreign(folder)
    for name, size in theirs.num_elements.items():
        assert torch.equal(weights[name].flatten(), theirs.read(f"weights/{name}", 0, size))
    assert "lm_head.weight" not in weights  # tied
    to = ("--to", "hf_model", "--output", str(tmp_path / "b"))
    other = slm_here("convert", str(folder), *to, "--model", "slm-1m")
    assert (other.code, "is not of slm-1m" in other.err) == (2, True)
    smaller = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**smaller, "num_hidden_layers": 2}))
    lacks = slm_here(
        "convert", str(folder), "--to", "hf_model", "--output", str(tmp_path / "b"), "--model", str(model)
    )
    assert (lacks.code, "model.layers.1.input_layernorm.weight" in lacks.err) == (2, True)
    (model / "config.json").write_text(json.dumps({**smaller, "tie_word_embeddings": False}))
    untied = slm_here(
        "convert", str(folder), "--to", "hf_model", "--output", str(tmp_path / "b"), "--model", str(model)
    )
    assert (untied.code, "lm_head.weight" in untied.err) == (2, True)
    unnamed = slm_here("convert", str(folder), "--to", "hf_model", "--output", str(tmp_path / "b"))
    assert (unnamed.code, "does not say which model it is of" in unnamed.err) == (2, True)


def test_a_failed_write_leaves_nothing(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    model, folder = tiny
    state = torch.load(folder / "optimizer.bin", weights_only=True)
    del state["state"]["model.norm.weight"]["exp_avg_sq"]
    torch.save(state, folder / "optimizer.bin")
    words = ("convert", str(folder), "--to", "ds_universal", "--model", str(model))
    done = slm_here(*words, "--output", str(tmp_path / "made"))
    assert (done.code, "it lacks the entry 'exp_avg_sq'" in done.err) == (2, True), done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "their"]
