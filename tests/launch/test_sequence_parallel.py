"""--sp_size on real processes: ranks that share sequences have the losses of one process with whole ones."""

import re
from pathlib import Path

import pytest
from conftest import WHEN_LOADED, launch, planted, record_under, slm, slm_here

FEW = ("--model", "slm-1m", "--seq_len", "64", "--max_steps", "6", "--numerics", "fp32")
STOP = 3
SHARDED = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3")
MARKS = {"ds_zero3": pytest.mark.quick}
MARKS |= dict.fromkeys(("fsdp_shard_grad_op", "ds_zero1", "ds_zero2"), pytest.mark.slow)
OPTIONS = {
    "fsdp_full_shard": ("--gradient_checkpointing", "selective_op"),
    "ds_zero2": ("--optim", "adamw_torch"),
    "ds_zero3": ("--kernels", "loss", "--gradient_checkpointing", "full"),
}
"flags that meet the exchanges somewhere, and change no loss"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags for two files whose documents see only themselves, with padding and an evaluation."""
    folder = tmp_path_factory.mktemp("data")
    for name, length in (("short", 17), ("long", 90)):
        lines = (f'{{"text": "{"abcdefgh "[i % 7 :] * (length // 9 + i % 3)}"}}' for i in range(120))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    mixed = f"{folder}/short.jsonl=1,{folder}/long.jsonl=1"
    flags = ("--packing", "multipack", "--eval_steps", "3", "--eval_batches", "2")
    return ("--dataset", mixed, *flags, "--save_final_model", "false")


def trained(folder: Path, strategy: str, *flags: str, ranks: int = 1, sp: int = 1) -> dict:
    """Train on four sequences per step, whatever the ranks; a group of `sp` ranks shares its sequences."""
    done = launch(
        *(*FEW, "--per_device_train_batch_size", str(4 * sp // ranks), "--sp_size", str(sp)),
        *(*flags, "--output_dir", str(folder), "--run_name", "run"),
        config=f"accel_configs/{strategy}.yaml",
        launcher=("--num_processes", str(ranks)),
    )
    assert done.code == 0, done.err
    return record_under(folder)


@pytest.fixture(scope="module")
def whole(documents: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The run of one process."""
    return trained(tmp_path_factory.mktemp("whole"), "single", *documents)


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=MARKS.get(name, ())) for name in SHARDED])
def test_two_ranks_share_sequences(
    strategy: str, documents: tuple[str, ...], whole: dict, tmp_path: Path
) -> None:
    record = trained(tmp_path, strategy, *documents, *OPTIONS.get(strategy, ()), ranks=2, sp=2)
    # the gate's limit for fp32: 1e-5
    assert record["losses"] == pytest.approx(whole["losses"], abs=1e-5, rel=0)
    for name, losses in whole["losses_by_dataset"].items():
        assert record["losses_by_dataset"][name] == pytest.approx(losses, abs=1e-5, rel=0)
    of_eval = [found["loss"] for found in whole["eval_losses"]]
    assert [found["loss"] for found in record["eval_losses"]] == pytest.approx(of_eval, abs=1e-5, rel=0)
    assert record["grad_norms"] == pytest.approx(whole["grad_norms"], rel=1e-4)
    for name in ("tokens_per_step", "tokens_counted", "num_padding_tokens"):
        assert record[name] == whole[name], name
    assert record["num_padding_tokens"] > 0
    assert record["numerics"]["attention_call"] == whole["numerics"]["attention_call"]


def test_two_groups_of_two_and_a_group_that_does_not_divide_the_heads(tmp_path: Path) -> None:
    """slm-1m has two heads: of three ranks, one computes a head of zeros."""
    flags = ("--gradient_accumulation_steps", "2")
    whole = trained(tmp_path / "whole", "single", *flags)
    groups = trained(tmp_path / "groups", "fsdp_full_shard", *flags, ranks=4, sp=2)
    assert groups["losses"] == pytest.approx(whole["losses"], abs=1e-5, rel=0)
    odd = ("--seq_len", "63")
    whole = trained(tmp_path / "odd", "single", *odd)
    three = trained(tmp_path / "three", "ddp", *odd, ranks=3, sp=3)
    assert three["losses"] == pytest.approx(whole["losses"], abs=1e-5, rel=0)


@pytest.mark.parametrize("strategy", ["fsdp_full_shard", pytest.param("ds_zero2", marks=pytest.mark.slow)])
def test_in_bf16_with_a_limit_for_each_micro_steps_loss(
    strategy: str, documents: tuple[str, ...], tmp_path: Path
) -> None:
    """One micro-step's loss, and so the limit of --on_bad_step skip, is that of whole sequences."""
    flags = (*documents, "--numerics", "aligned", "--on_bad_step", "skip")
    whole = trained(tmp_path / "whole", "single", *flags)
    shared = trained(tmp_path / "shared", strategy, *flags, ranks=2, sp=2)
    assert shared["losses"] == pytest.approx(whole["losses"], abs=1e-3, rel=0)  # the gate's limit for bf16
    assert shared["numerics"]["reduction_dtype"] == "bfloat16"


def test_the_progress_shows_the_loss_of_all_tokens(documents: tuple[str, ...], tmp_path: Path) -> None:
    """Rank 0 has the beginnings, and padding has no loss: its own part would show about twice the loss."""
    done = launch(
        *(*FEW, *documents, "--sp_size", "2", "--logging_steps", "1", "--packing", "none"),
        *("--output_dir", str(tmp_path), "--run_name", "run"),
        config="accel_configs/ddp.yaml",
        launcher=("--num_processes", "2"),
    )
    assert done.code == 0, done.err
    shown = [float(loss) for loss in re.findall(r"^step \d+/6 +loss ([\d.]+)", done.err, re.MULTILINE)]
    assert shown == pytest.approx(record_under(tmp_path)["losses"], abs=1e-3)


def test_a_checkpoint_moves_between_ranks_that_share_and_ranks_that_do_not(tmp_path: Path) -> None:
    saves = ("--save_steps", str(STOP))
    shared = trained(tmp_path / "shared", "ds_zero2", *saves, ranks=2, sp=2)
    for name, ranks in (("single", 1), ("ddp", 2)):
        checkpoint = tmp_path / "shared" / "run" / "checkpoints" / f"step_{STOP}"
        resume = ("--resume_from_checkpoint", str(checkpoint))
        rest = trained(tmp_path / name, name, *resume, ranks=ranks)
        assert rest["losses"] == pytest.approx(shared["losses"][STOP:], abs=1e-5, rel=0)


def test_parity_passes_and_sees_positions_that_begin_anew_in_each_stretch(tmp_path: Path) -> None:
    flags = ("--strategy", "ddp", "--parity", "5", "--sp_size", "2", "--num_processes", "2")
    task = ("--model", "slm-1m", "--numerics", "fp32", "--seq_len", "64")
    done = slm("compare", *flags, *task, "--output_dir", str(tmp_path / "right"))
    assert done.code == 0, done.err
    plant = """
def plant(module):
    stretch_of = module.SequenceGroup.stretch_of
    def wrong(self, batch):
        part = stretch_of(self, batch)
        if self.rank:
            part["position_ids"] = part["position_ids"] - part["position_ids"][:, :1]
        return part
    module.SequenceGroup.stretch_of = wrong
when_loaded("slm_toolkit.run.model.sequence_parallel", plant)
"""
    env = planted(tmp_path, WHEN_LOADED + plant)
    wrong = slm("compare", *flags, *task, "--output_dir", str(tmp_path / "wrong"), env=env)
    assert wrong.code == 1, wrong.err
    assert "(allowed 1.0001)" in wrong.out


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--sp_size", "3", "--seq_len", "64"), "--sp_size 3 with --seq_len 64: use a multiple of 3"),
        (("--sp_size", "4"), "--sp_size 4: it must divide the number of ranks, which is 2"),
        (("--sp_size", "2", "--attn_implementation", "eager"), "attention between ranks needs sdpa"),
        (("--sp_size", "2", "--kernels", "compile"), "its exchanges between ranks are not compiled"),
        (("--sp_size", "2", "--strategy", "single"), "--sp_size 2: single is one process"),
    ],
)
def test_what_can_not_be_shared_is_refused(flags: tuple[str, ...], says: str) -> None:
    strategy = () if "--strategy" in flags else ("--strategy", "ddp")
    done = slm_here("compare", "--model", "slm-1m", *strategy, "--num_processes", "2", *flags, "--dry_run")
    assert done.code == 2, done.out
    assert says in done.err
