"""The task of --parity: tokens in which phrases come again, and weights that each matter for the loss."""

import pytest
import torch

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.run.data.data import CopiedPhrases
from slm_toolkit.run.model.model import build_model

TOKENS = CopiedPhrases(vocab_size=250, seq_len=64, num_sequences=10, seed=3)


def documents(index: int) -> list[list[int]]:
    """The tokens of each document of a sequence."""
    row = TOKENS[index]
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    return [row["input_ids"][a:b].tolist() for a, b in zip(starts, [*starts[1:], 64], strict=True)]


def test_sequences_hold_documents_whose_second_halves_copy_the_first_and_whose_starts_have_no_label() -> None:
    for index in range(10):
        found = documents(index)
        assert len(found) >= 2  # at most 32 tokens each
        for tokens in found:
            half = -(-len(tokens) // 2)
            assert set(tokens[half:]) <= set(tokens[:half])
    row = TOKENS[0]
    is_first = row["position_ids"] == 0
    assert (row["labels"][is_first] == -100).all()
    assert torch.equal(row["labels"][~is_first], row["input_ids"][~is_first])


@pytest.mark.parametrize("in_task", [True, False])
def test_each_part_of_the_model_moves_the_loss_where_small_random_weights_hardly_do(in_task: bool) -> None:
    config = RunConfig(model="slm-1m", seq_len=64, numerics="fp32", parity=20 if in_task else None)
    model = build_model(PRESETS["slm-1m"], config)
    tokens = torch.stack([TOKENS[index]["input_ids"] for index in range(10)])

    def loss() -> float:
        with torch.no_grad():
            return model(input_ids=tokens, labels=tokens).loss.item()

    before, layer, rope = loss(), model.model.layers[1], model.model.rotary_emb
    norm = layer.input_layernorm.weight
    for thing, field, value in (
        (layer.self_attn, "scaling", 2 * layer.self_attn.scaling),
        (norm, "data", 1.3 * norm.data.flip(0)),
        (rope, "inv_freq", 2 * rope.inv_freq),
    ):
        kept = getattr(thing, field)
        setattr(thing, field, value)
        moved = abs(loss() - before)
        setattr(thing, field, kept)
        assert moved > 0.01 if in_task else moved < 0.002, field
    assert loss() == before
