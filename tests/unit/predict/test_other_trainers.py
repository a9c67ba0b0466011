"""`--like`: presets of other trainers, and the flags of gradients that they need."""

import pytest

from slm_toolkit import api
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.peak import MemoryEstimate, peak
from slm_toolkit.predict.setup.other_trainers import NAMES, as_liked, notes_like, trainer_named
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import find_strategy

TINY = ModelSpec("tiny", 2, 8, 2, 2, 4, 16, 40)  # 2 layers, h = q = v = 8, i = 16, V = 40
P = 1960  # 2 x 320 of the vocabulary, 2 x (4 x 64 + 3 x 128 + 2 x 8) of layers, 8 of the final norm
STATE = ("parameters", "master_weights", "gradients", "optimizer", "communication")


def estimate(strategy: str, *, num_gpus: int = 4, like: str | None = None, **flags: object) -> MemoryEstimate:
    trainer = trainer_named(like)
    given = as_liked(trainer, {"seq_len": 1000, **flags})
    single = {name: value[0] if isinstance(value, list) else value for name, value in given.items()}
    config = RunConfig(model="tiny", **single).with_defaults(has_gpu=True)
    setup = Setup(TINY, find_strategy(strategy), config, num_gpus=num_gpus, like=trainer)
    return peak(setup)


def state_bytes(found: MemoryEstimate) -> int:
    return sum(found.parts[name] for name in STATE)


def test_gradients_summed_in_fp32_need_no_copy_in_the_optimizers_step() -> None:
    for like, copied in ((None, 4 * P), ("nanotron", 0)):  # all of them are one chunk
        assert estimate("single", num_gpus=1, seq_len=2, like=like).parts["temporary"] == copied


def test_the_flags_of_nanotron_are_its_gradients_and_its_loss_has_no_flag() -> None:
    # at the loss of 4 x 1000 tokens: forward has fp32 logits and their softmax, 8 bytes of 40 logits a token
    found = estimate("ddp", like="nanotron")
    assert found.peak_instant == "forward: the loss"
    final_norm = 4 * 8 + 4  # a fused norm keeps its input, 2 x 8, and the stream's gradient 2 x 8
    assert found.parts["logits_and_loss"] == 4000 * (8 * 40 + final_norm)
    assert state_bytes(found) == 20 * P
    # ZeRO-1: weights 2, sums 4, a quarter of 12, and the 2 of DDP's buckets
    assert state_bytes(estimate("ds_zero1", like="nanotron")) == 11 * P


def test_a_root_that_holds_the_vocabulary_is_gathered_at_the_loss() -> None:
    # the head and the final norm, 2 x 328 bytes; torchtune's root also has the embedding, 2 x 320
    for like, elements in ((None, 328), ("torchtune", 328 + 320)):
        found = estimate("fsdp_full_shard", like=like, numerics="pure_bf16")
        assert found.parts["gathered_parameters"] == 2 * elements


def test_flags_of_the_user_win_over_the_preset() -> None:
    given = as_liked(trainer_named("torchtitan"), {"optim": ["adamw_torch"]})
    assert given["optim"] == ["adamw_torch"]
    # a fused loss replaces the trainer's own. Per token: the final norm's 4 x 8 + 4, bf16 logits and fp32
    # probabilities, and the gradient of the head's input; besides the head's gradient
    fused = estimate("ddp", like="nanotron", kernels="loss+norm")
    assert fused.parts["logits_and_loss"] == 4000 * (36 + 6 * 40 + 2 * 8) + 2 * 40 * 8


def test_notes_name_the_preset_what_it_set_and_what_is_not_followed() -> None:
    notes = notes_like(trainer_named("torchtitan"), {"optim": ["adamw_torch"]})
    assert (
        notes[0] == "like torchtitan: --numerics stock --kernels norm --gradient_checkpointing selective_op"
    )
    assert "not followed: tensor, context" in " ".join(notes)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_estimates_its_own_strategies(name: str) -> None:
    rows = api.estimate(model="slm-100m", like=name)
    assert {row.strategy for row in rows} == set(trainer_named(name).strategies)
    assert {row.like for row in rows} == {name}
    assert f"as {name} trains" in " ".join(str(rows).split())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"like": "nanotron", "strategy": "fsdp_full_shard"}, "which nanotron does not have"),
        ({"like": "torchtune", "peft": "lora"}, "no closed form for adapters as torchtune trains them"),
    ],
)
def test_what_the_trainer_does_not_have_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        api.estimate(**asked)
