"""Token sequences: the generated chain, and documents packed from files."""

from pathlib import Path

import pytest
import torch

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.run.data.data import MarkovTokens, load_data
from slm_toolkit.run.data.documents import load_tokenizer

SPEC = PRESETS["slm-1m"]


def load(dataset: object, **options: object) -> tuple:
    """The training sequences, held-out ones (None without --eval_steps) and the tokenizer."""
    config = RunConfig(model="slm-1m", seq_len=16, dataset=str(dataset), **options)
    data = load_data(config.with_defaults(has_gpu=False), SPEC, num_sequences=8)
    return data.train, next(iter(data.held_out.values()), None), data.tokenizer


def text_of(sequences: object) -> str:
    tokenizer = load_tokenizer(RunConfig(), SPEC)
    return "".join(tokenizer.decode(row["input_ids"]) for row in sequences)


def test_the_chain_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    common = {"vocab_size": 384, "seq_len": 32, "num_sequences": 4}
    first, again, other = (MarkovTokens(seed=seed, **common) for seed in (1, 1, 2))
    assert torch.equal(first[3]["input_ids"], again[3]["input_ids"])
    assert not torch.equal(first[3]["input_ids"], other[3]["input_ids"])
    assert not torch.equal(first[3]["input_ids"], first[2]["input_ids"])


def test_half_of_the_chains_tokens_follow_their_predecessor() -> None:
    chain = MarkovTokens(vocab_size=384, seq_len=4096, num_sequences=4, seed=0)
    successor = {chain.cycle[i]: chain.cycle[(i + 1) % 384] for i in range(384)}
    tokens = [chain[i]["input_ids"].tolist() for i in range(4)]
    pairs = [(a, b) for row in tokens for a, b in zip(row, row[1:], strict=False)]
    followed = sum(successor[a] == b for a, b in pairs) / len(pairs)
    # 0.5 by rule, plus draws that happen to be the successor: under 0.08, the likeliest token's share is 0.15
    assert 0.49 < followed < 0.58


def test_held_out_sequences_are_none_of_the_training_ones() -> None:
    config = RunConfig(model="slm-1m", seq_len=16, eval_steps=1)
    data = load_data(config, SPEC, num_sequences=50)
    train, held_out = data.train, data.held_out["synthetic"]
    seen = {tuple(train[i]["input_ids"].tolist()) for i in range(50)}
    assert not seen & {tuple(held_out[i]["input_ids"].tolist()) for i in range(50)}


def test_documents_are_packed_end_to_end_with_an_end_of_text_between(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first document")  # 14 bytes + end of text
    (tmp_path / "b.txt").write_text(
        "the second one is longer"
    )  # 24 + 1 = 40 in all = 2 sequences of 16, 8 dropped
    train, held_out, tokenizer = load(tmp_path)
    assert held_out is None
    assert [len(row["input_ids"]) for row in train] == [16, 16]
    eos = tokenizer.eos_token
    assert text_of(train) == f"first document{eos}the second one is longer{eos}"[: 14 + len(eos) + 17]


def test_jsonl_and_parquet_files_give_the_same_tokens_as_text(tmp_path: Path) -> None:
    import pandas

    documents = ["a row of text, number one", "and here is number two of them"]
    rows = pandas.DataFrame({"body": documents})
    rows.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    rows.to_parquet(tmp_path / "rows.parquet")
    for index, document in enumerate(documents):
        (tmp_path / f"{index}.txt").write_text(document)
    texts = text_of(load(tmp_path / "*.txt")[0])
    for name in ("rows.jsonl", "rows.parquet"):
        assert text_of(load(tmp_path / name, text_column="body")[0]) == texts


def test_the_held_out_share_is_what_was_asked(texts: Path) -> None:
    every, *_ = load(texts)
    train, held_out, _ = load(texts, eval_steps=1, eval_dataset="10%")
    assert len(train) + len(held_out) == len(every)
    assert len(held_out) == len(every) // 10


@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        ({}, {}, "has no .txt"),
        ({"a.txt": "short"}, {}, "contains no text that fills a sequence of 16 tokens"),
        ({"a.jsonl": '{"body": "no such column"}\n'}, {}, "no column 'text'"),
        ({"a.jsonl": '{"text": ["x"]}\n'}, {}, "row 1: column 'text' contains .'x'., which is not text"),
        ({"a.jsonl": "{broken"}, {"streaming": True}, "after 0 rows: .*JSON parse error: Missing a name"),
        ({"a.parquet": "not parquet"}, {}, "can't read dataset .*magic bytes not found"),
        ({"a.txt": b"fine\n\xff\xfe"}, {}, "can't read dataset .*codec can't decode byte 0xff"),
        ({"a.txt": "x" * 99, "b.jsonl": '{"text": "y"}\n'}, {}, "mixes"),
        ({"a.txt": "x" * 20}, {"eval_steps": 1}, "can't be split"),
        ({"a.txt": "short"}, {"streaming": True}, "contains no text that fills"),
        ({"a.txt": "x" * 99}, {"streaming": True, "eval_steps": 1}, "after 80 held out"),
    ],
)
def test_data_that_cannot_serve_is_an_error_with_a_hint(
    tmp_path: Path, files: dict[str, str | bytes], options: dict, says: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"(?s)({says}).*\nhint: "):
        load(tmp_path, **options)
    with pytest.raises(ValueError, match="no such file"):
        load(tmp_path / "nowhere.txt")
