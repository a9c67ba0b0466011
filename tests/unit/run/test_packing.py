"""Documents in sequences: nothing is lost, nothing sees another document, and what is padding is known."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import write_documents

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.run.data.batches import model_inputs
from slm_toolkit.run.data.data import Data, Pack, columns_of, load_data
from slm_toolkit.run.data.documents import Document
from slm_toolkit.run.model.model import build_model

SPEC = PRESETS["slm-1m"]
SEQ_LEN = 48


def document(first: int, length: int) -> Document:
    tokens = list(range(first, first + length))
    return Document(tokens, tokens)


def pack(packing: str, seq_len: int, kind: str = "text") -> Pack:
    tokenizer = SimpleNamespace(pad_token_id=0)
    return Pack(tokenizer, kind, packing, seq_len, "text", "answers", 384, tuple(columns_of(kind, packing)))


def load(file: Path, packing: str, **options: object) -> Data:
    config = RunConfig(model="slm-1m", seq_len=SEQ_LEN, dataset=str(file), packing=packing, **options)
    return load_data(config.with_defaults(has_gpu=False), SPEC, num_sequences=0)


def losses_by_document(data: Data, attention: str = "sdpa") -> dict[tuple[int, ...], torch.Tensor]:
    """The loss of each document's tokens but the first, by its tokens: what a first step sees."""
    options = {"model": "slm-1m", "seq_len": SEQ_LEN, "numerics": "fp32", "attn_implementation": attention}
    config = RunConfig(**options)
    model = build_model(SPEC, config, documents_apart=data.documents_apart)
    batch = {name: torch.stack([row[name] for row in data.train]) for name in data.train.column_names}
    inputs = model_inputs(batch, config)
    with torch.no_grad():
        logits = model(**inputs).logits[:, :-1].transpose(1, 2)
        found = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:], reduction="none")
    documents = {}
    for tokens, losses in zip(batch["input_ids"].tolist(), found, strict=True):
        start = 0
        for end, token in enumerate(tokens, start=1):
            if token == 1:  # ByT5's end of text
                documents[tuple(tokens[start:end])] = losses[start : end - 1]
                start = end
    return documents


def test_best_fit_puts_the_longest_first_and_each_where_it_leaves_least() -> None:
    # 10 tokens: 7 opens a bin (3 free), 6 another (4 free), 4 fills the second, 3 the first, 2 opens a third
    sizes = [4, 7, 2, 6, 3]
    bins, rest = pack("multipack", 10).fill([document(0, size) for size in sizes])
    assert sorted(sorted(len(piece.tokens) for piece in pieces) for pieces in bins) == [[2], [3, 7], [4, 6]]
    assert rest == []


def test_joined_documents_are_cut_where_a_sequence_is_full_and_the_rest_waits() -> None:
    sequences, rest = pack("concat", 8).fill([document(0, 5), document(10, 7)])
    assert [[piece.tokens for piece in pieces] for pieces in sequences] == [[[0, 1, 2, 3, 4], [10, 11, 12]]]
    assert [piece.tokens for piece in rest] == [[13, 14, 15, 16]]


def test_a_long_text_goes_on_in_the_next_sequence_and_a_long_chat_ends() -> None:
    (text, _) = pack("none", 8).fill([document(0, 10)])
    assert [piece.tokens for (piece,) in text] == [list(range(8)), [8, 9]]
    (chat, _) = pack("none", 8, kind="messages").fill([document(0, 10)])
    assert [piece.tokens for (piece,) in chat] == [list(range(8))]


def test_columns_say_where_documents_begin_and_what_is_padding() -> None:
    assert pack("multipack", 8).sequence([document(5, 3), document(20, 2)]) == {
        "input_ids": [5, 6, 7, 20, 21, 0, 0, 0],
        "labels": [-100, 6, 7, -100, 21, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
        "padding": 3,
    }
    whole = pack("concat", 8).sequence([document(5, 8)])
    assert whole == {"input_ids": list(range(5, 13))}  # nothing to say: each token is its own label


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", ["multipack", "block_diagonal"])
def test_packed_documents_have_the_losses_that_each_has_alone(
    packing: str, attention: str, tmp_path: Path
) -> None:
    # with their ends 20 + 28, 16 + 32 and 10 + 38: full sequences, so that none is cut
    file = write_documents(tmp_path, [19, 27, 15, 31, 9, 37])
    alone = losses_by_document(load(file, "none"), attention)
    packed = losses_by_document(load(file, packing), attention)
    assert len(alone) == 6
    assert alone.keys() == packed.keys()
    for tokens, losses in alone.items():
        assert torch.allclose(losses, packed[tokens], atol=2e-6, rtol=0)
        assert losses.min() > 1  # of real tokens: nothing is predicted that well by fresh weights


def test_joined_documents_see_what_came_before_them(tmp_path: Path) -> None:
    """What the others are kept from: so the comparison above can fail."""
    file = write_documents(tmp_path, [19, 27])
    alone, joined = losses_by_document(load(file, "none")), losses_by_document(load(file, "concat"))
    differences = [(alone[tokens] - joined[tokens]).abs().max() for tokens in alone]
    assert max(differences) > 1e-3


def test_the_padding_is_counted_by_hand(tmp_path: Path) -> None:
    file = write_documents(tmp_path, [39, 39, 7])  # 40, 40 and 8 tokens: 40 + 8 fill one of 48
    (facts,) = load(file, "multipack").facts
    assert (facts["num_sequences"], facts["num_padding"]) == (2, 8)
    assert facts["num_labels"] == 39 + 39 + 7  # none predicts a document's first token
    (facts,) = load(file, "none").facts
    assert (facts["num_sequences"], facts["num_padding"]) == (3, 8 + 8 + 40)


def test_a_stream_is_packed_as_a_file_is(tmp_path: Path) -> None:
    file = write_documents(tmp_path, [19, 27, 15, 31, 9, 37, 5])
    for packing in ("multipack", "block_diagonal", "none", "concat"):
        whole, stream = load(file, packing, streaming=False).train, load(file, packing, streaming=True).train
        rows = list(stream)
        assert len(rows) == len(whole)
        for row, wanted in zip(rows, whole, strict=True):
            assert all(torch.equal(row[name], wanted[name]) for name in whole.column_names)
