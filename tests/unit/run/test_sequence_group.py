"""A rank's stretch of a batch, by hand; and the exchange of heads, by the definition of its result."""

import pytest
import torch

from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX
from slm_toolkit.run.model import sequence_parallel
from slm_toolkit.run.model.sequence_parallel import WHOLE, SequenceGroup

TOKENS = torch.tensor([[10, 11, 12, 13, 14, 15]])


def test_alone_a_batch_stays_as_it_is() -> None:
    batch = {"input_ids": TOKENS}
    assert WHOLE.stretch_of(batch) is batch


def test_a_stretch_predicts_the_first_token_of_the_next() -> None:
    first, last = (SequenceGroup(2, rank).stretch_of({"input_ids": TOKENS}) for rank in (0, 1))
    assert first["input_ids"].tolist() == [[10, 11, 12]]
    assert first["shift_labels"].tolist() == [[11, 12, 13]]
    assert first["position_ids"].tolist() == [[0, 1, 2]]
    assert last["input_ids"].tolist() == [[13, 14, 15]]
    assert last["shift_labels"].tolist() == [[14, 15, IGNORE_INDEX]]
    assert last["position_ids"].tolist() == [[3, 4, 5]]
    assert "attention_mask" not in last


def test_documents_see_only_themselves_and_padding_counts_once() -> None:
    batch = {
        "input_ids": TOKENS,
        "labels": torch.tensor([[IGNORE_INDEX, 11, 12, IGNORE_INDEX, 14, IGNORE_INDEX]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]]),
        "padding": torch.tensor([4]),
        "dataset": torch.tensor([1]),
    }
    parts = [SequenceGroup(3, rank).stretch_of(batch) for rank in range(3)]
    assert [part["padding"].tolist() for part in parts] == [[0], [2], [2]]
    assert [part["shift_labels"].tolist() for part in parts] == [[[11, 12]], [[-100, 14]], [[-100, -100]]]
    assert all(part["dataset"].tolist() == [1] for part in parts)
    (mask,) = parts[0]["attention_mask"][0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 2), (6, 2, 2), (5, 5, 2), (6, 3, 4)])
def test_a_rank_gets_its_heads_of_all_tokens(
    heads: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that each rank sends are kept; rank r receives every rank's part r, in their order."""
    batch, stretch, width = 2, 3, 4
    whole = [torch.randn(batch, number, size * stretch, width) for number in (heads, kv_heads, kv_heads)]
    sent: list[torch.Tensor] = []

    def received_by(rank: int) -> object:
        def all_to_all(received: torch.Tensor, parts: torch.Tensor, group: object) -> None:
            sent.append(parts.clone())
            if len(sent) == size:
                received.copy_(torch.stack([parts[rank] for parts in sent]))

        return all_to_all

    missing = -kv_heads % size
    per_kv = heads // kv_heads
    for rank in range(size):
        sent.clear()
        monkeypatch.setattr(torch.distributed, "all_to_all_single", received_by(rank))
        for other in range(size):
            part = slice(other * stretch, (other + 1) * stretch)
            found = SequenceGroup(size, other).heads_for_tokens(*(states[:, :, part] for states in whole))
        for states, got, times in zip(whole, found, (per_kv, 1, 1), strict=True):
            padded = torch.cat([states, torch.zeros(batch, missing * times, size * stretch, width)], dim=1)
            share = padded.shape[1] // size
            assert torch.equal(got, padded[:, rank * share : (rank + 1) * share])


def test_the_output_returns_to_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two heads and two ranks, rank 1's stretch of both heads."""
    by_head = torch.arange(2 * 4 * 3.0).view(1, 2, 4, 3)  # [batch, heads, tokens, width]
    sent = []

    def all_to_all(received: torch.Tensor, parts: torch.Tensor, group: object) -> None:
        sent.append(parts.clone())
        received.copy_(torch.stack([parts[1] for parts in sent]) if len(sent) == 2 else parts)

    monkeypatch.setattr(sequence_parallel.torch.distributed, "all_to_all_single", all_to_all)
    for rank in range(2):  # attention's output is [batch, tokens, heads, width]
        got = SequenceGroup(2, rank).tokens_for_heads(by_head[:, rank, :, None], 2)
    assert torch.equal(got, by_head[:, :, 2:].transpose(1, 2))
