"""Fine-tuning: adapters under every engine, chats with a loss on answers, datasets mixed and told apart."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, launch, record_under, run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slm_toolkit.config import RunConfig
from slm_toolkit.config_data import Source, sources_of
from slm_toolkit.models import PRESETS, find_model
from slm_toolkit.run.batches import make_loader, num_labels
from slm_toolkit.run.data import load_data
from slm_toolkit.run.evaluate import mean_loss
from slm_toolkit.run.formats import documents_of
from slm_toolkit.run.model import build_model
from slm_toolkit.run.tokenizers import CHAT_TEMPLATE, load_tokenizer

SPEC = PRESETS["slm-1m"]
EOS = "</s>"
CHAT = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "Five."},
]
ROWS = {
    "messages": {"messages": CHAT},
    "sharegpt": {
        "conversations": [
            {"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]} for turn in CHAT
        ]
    },
    "alpaca": {"instruction": "Add.", "input": "2 and 2", "output": "Four."},
    "prompt_completion": {"prompt": "Two and two make", "completion": " four."},
}
TEXT = {  # by the template of tokenizers without one, and what of it has a loss
    "messages": (
        f"<|user|>\nTwo and two?{EOS}<|assistant|>\nFour.{EOS}"
        f"<|user|>\nAnd one?{EOS}<|assistant|>\nFive.{EOS}",
        f"Four.{EOS}Five.{EOS}",
    ),
    "alpaca": (f"<|user|>\nAdd.\n\n2 and 2{EOS}<|assistant|>\nFour.{EOS}", f"Four.{EOS}"),
    "prompt_completion": (f"Two and two make four.{EOS}", f" four.{EOS}"),
}
TEXT["sharegpt"] = TEXT["messages"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def config_of(dataset: object, **options: Any) -> RunConfig:
    return RunConfig(model="slm-1m", dataset=str(dataset), **{"seq_len": 128, **options})


@pytest.mark.parametrize("kind", ROWS)
def test_every_chat_format_has_its_loss_on_the_answers(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(RunConfig(), SPEC)
    tokenizer.chat_template = CHAT_TEMPLATE
    rows = {name: [value] for name, value in ROWS[kind].items()}
    text, answers = TEXT[kind]
    (found,) = documents_of(rows, kind, tokenizer, text_column="text", loss_on="answers")
    assert tokenizer.decode(found.tokens) == text
    assert tokenizer.decode([label for label in found.labels if label != -100]) == answers
    (whole,) = documents_of(rows, kind, tokenizer, text_column="text", loss_on="all")
    assert whole.labels == whole.tokens == found.tokens
    data = load_data(config_of(write_rows(tmp_path / "chat.jsonl", [ROWS[kind]] * 3)), SPEC, num_sequences=0)
    assert data.facts[0]["format"] == kind
    assert data.facts[0]["packing"] == "multipack"
    # the end of text is one token, every other character one byte
    assert data.facts[0]["num_labels"] == 3 * (len(answers) - answers.count(EOS) * (len(EOS) - 1))


def test_a_chat_that_is_too_long_is_cut_and_left_out_where_its_answer_is(tmp_path: Path) -> None:
    long = {"prompt": "why " * 60, "completion": "because"}
    file = write_rows(tmp_path / "chat.jsonl", [long, ROWS["alpaca"] | ROWS["prompt_completion"]])
    config = config_of(file, dataset_format="prompt_completion", packing="none")
    (facts,) = load_data(config, SPEC, num_sequences=0).facts
    assert (facts["num_rows"], facts["num_sequences"]) == (2, 1)


def test_rows_of_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [9, 10], "labels": [9, 10]},
    ]
    file = write_rows(tmp_path / "tokens.jsonl", rows)
    data = load_data(config_of(file, seq_len=6, packing="multipack"), SPEC, num_sequences=0)
    (row,) = data.train
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 10]
    assert row["labels"].tolist() == [-100, -100, 7, 8, -100, 10]
    bad = write_rows(tmp_path / "bad.jsonl", [{"input_ids": [5, 100_000]}])
    with pytest.raises(ValueError, match=r"token 100000, the model knows 384\nhint: .*another tokenizer"):
        load_data(config_of(bad, seq_len=2), SPEC, num_sequences=0)


@pytest.mark.parametrize(
    ("options", "rows", "said"),
    [
        ({"packing": "concat"}, [ROWS["messages"]], "answers would see other chats"),
        ({"dataset_format": "alpaca"}, [ROWS["messages"]], "no column 'instruction'"),
        ({}, [{"messages": [{"who": "me"}]}], "a turn without 'role' and 'content'"),
        ({"seq_len": 8}, [ROWS["prompt_completion"]], "no answer fits in 8 tokens"),
    ],
    ids=str,
)
def test_chats_that_cannot_be_trained_on_are_named(
    options: dict[str, Any], rows: list, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        load_data(config_of(write_rows(tmp_path / "chat.jsonl", rows), **options), SPEC, num_sequences=0)


def test_given_turns_are_not_learnt_and_a_template_that_rewrites_can_be_learnt_whole() -> None:
    tokenizer = load_tokenizer(RunConfig(), SPEC)
    tokenizer.chat_template = CHAT_TEMPLATE
    rows = {"prompt": [CHAT[:3]], "completion": [CHAT[3:]]}
    options = {"tokenizer": tokenizer, "text_column": "text"}
    (found,) = documents_of(rows, "prompt_completion", loss_on="answers", **options)
    assert tokenizer.decode([label for label in found.labels if label != -100]) == f"Five.{EOS}"
    tokenizer.chat_template = "{{ messages | length }}: " + CHAT_TEMPLATE  # how many turns there are in all
    with pytest.raises(ValueError, match="changes earlier turns"):
        documents_of({"messages": [CHAT]}, "messages", loss_on="answers", **options)
    (whole,) = documents_of({"messages": [CHAT]}, "messages", loss_on="all", **options)
    assert whole.labels == whole.tokens


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}, "calls tools"),
        ({"role": "assistant", "content": None}, "or more than text"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "or more than text"),
    ],
    ids=str,
)
def test_what_is_more_than_text_is_refused(turn: dict[str, Any], said: str) -> None:
    tokenizer = load_tokenizer(RunConfig(), SPEC)
    rows = {"messages": [[CHAT[0], turn]]}
    with pytest.raises(ValueError, match=said):
        documents_of(rows, "messages", tokenizer, text_column="text", loss_on="answers")


def test_masked_tokens_are_left_out() -> None:
    rows = {"input_ids": [[5, 6, 0, 0]], "attention_mask": [[1, 1, 0, 0]]}
    (found,) = documents_of(rows, "tokens", None, text_column="text", loss_on="answers")
    assert (found.tokens, found.labels) == ([5, 6], [5, 6])


def test_every_held_out_sequence_counts_once() -> None:
    config = RunConfig(per_device_train_batch_size=4)
    sequences = [{"input_ids": torch.full((8,), number)} for number in range(5)]
    batches = list(make_loader(sequences, config, train=False, num_ranks=2))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4]  # one for each of two ranks
    assert sum(num_labels(batch).item() for batch in batches) == 5 * 7
    assert mean_loss({"a": (1.0, 10), "b": (float("nan"), 0)}) == 1.0


def test_a_tied_head_gets_no_adapter() -> None:
    config = RunConfig(model="smollm2-135m", peft="lora", lora_target_modules="q_proj,lm_head", seq_len=8)
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="tied: merged, both would change"):
        build_model(dataclasses.replace(SPEC, tied=True), config)


def test_a_quantized_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = ["python", "-m", "slm_toolkit.train", "--model", "slm-1m", "--seq_len", "32", "--peft", "qlora"]
    words += ["--output_dir", str(tmp_path), "--run_name", "q", "--save_steps", "1"]
    first = run(*words, "--max_steps", "1")
    assert first.code == 0, first.err
    again = run(*words, "--max_steps", "2", "--resume_from_checkpoint", "latest")
    assert again.code == 0, again.err
    assert record_under(tmp_path)["first_step"] == 1


def test_datasets_are_named_by_file_and_weighed() -> None:
    assert sources_of("data/a.jsonl=3,b/c4=0.5") == (
        Source("a", "data/a.jsonl", 3.0),
        Source("c4", "b/c4", 0.5),
    )
    assert [source.name for source in sources_of("x/train.jsonl,y/train.jsonl")] == [
        "x/train.jsonl",
        "y/train.jsonl",
    ]
    for bad, said in {"a=0": "not a number above 0", "a,,b": "nothing between", "a=1,b": "or none"}.items():
        assert any(said in problem for problem in RunConfig(dataset=bad).problems()), bad


def test_weights_say_how_often_a_dataset_is_drawn(tmp_path: Path) -> None:
    for name, letter in (("often", "a"), ("seldom", "b")):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": letter * 63}] * 400)
    mixed = f"{tmp_path / 'often.jsonl'}=3,{tmp_path / 'seldom.jsonl'}=1"
    for streaming in (False, True):
        data = load_data(config_of(mixed, seq_len=64, streaming=streaming), SPEC, num_sequences=0)
        rows = [row["dataset"].item() for row, _ in zip(data.train, range(400), strict=False)]
        assert data.names == ("often", "seldom")
        assert 0.65 < rows.count(0) / len(rows) < 0.85  # 3 of 4; 400 draws stay within 4.6 standard errors
        letters = {row["dataset"].item(): row["input_ids"][0].item() for row in list(data.train)[:50]}
        assert letters[0] != letters[1]
    both = load_data(config_of(mixed.replace("=3", "").replace("=1", ""), seq_len=64), SPEC, num_sequences=0)
    assert len(both.train) == 800  # without weights: all of each


def test_the_losses_of_mixed_datasets_make_up_the_whole(tmp_path: Path) -> None:
    chat = write_rows(tmp_path / "chat.jsonl", [ROWS["messages"], ROWS["messages"]] * 40)
    text = write_rows(tmp_path / "text.jsonl", [{"text": "abcdefgh " * 30}] * 40)
    losses = {}
    for kernel in ("hf", "fused_logits", "fused_linear"):
        out = tmp_path / kernel
        flags = ["--dataset", f"{chat}=1,{text}=1", "--loss_kernel", kernel, "--output_dir", str(out)]
        done = launch(
            *("--model", "slm-1m", "--seq_len", "128", "--max_steps", "3", "--eval_steps", "3", *flags),
            *("--gradient_accumulation_steps", "2"),
            config=ROOT / "accel_configs" / "ddp.yaml",
        )
        assert done.code == 0, done.err
        record = record_under(out)
        losses[kernel] = record["losses_by_dataset"]
        for step, whole in enumerate(record["losses"]):
            of_each = [record["losses_by_dataset"][name][step] for name in ("chat", "text")]
            assert min(of_each) - 1e-6 <= whole <= max(of_each) + 1e-6
        assert set(record["eval_losses_by_set"]) == {"chat", "text"}
        assert "eval loss" in done.err
        assert "perplexity" in done.err
    for name in ("chat", "text"):
        assert losses["hf"][name] == pytest.approx(losses["fused_linear"][name], abs=5e-3)
        assert losses["hf"][name] == pytest.approx(losses["fused_logits"][name], abs=5e-3)
    shown = run("slm", "report", str(tmp_path / "hf")).out
    assert "losses by dataset" in shown
    assert "perplexity" in shown


def test_held_out_sets_of_their_own_are_evaluated_apart(tmp_path: Path) -> None:
    texts = {name: write_rows(tmp_path / f"{name}.jsonl", [{"text": "xyz" * 90}] * 9) for name in "abc"}
    config = config_of(texts["a"], eval_dataset=f"{texts['b']},{texts['c']}", eval_steps=1)
    data = load_data(config, SPEC, num_sequences=0)
    assert list(data.held_out) == ["b", "c"]
    assert len(data.train) == len(data.held_out["b"])  # nothing is split off
    assert num_labels({"input_ids": torch.zeros(2, 128)}) == 2 * 127


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights to fine-tune, as one would download them."""
    folder = tmp_path_factory.mktemp("base")
    out = ["--save_final_model", "true", "--output_dir", str(folder), "--run_name", "base"]
    done = run("python", "-m", "slm_toolkit.train", "--model", "slm-1m", "--max_steps", "2", *out)
    assert done.code == 0, done.err
    return folder / "base" / "model"


def tuned(base: Path, folder: Path, strategy: str, peft: str) -> dict[str, Any]:
    flags = ["--model", str(base), "--seq_len", "64", "--max_steps", "4", "--learning_rate", "1e-2"]
    done = launch(
        *(*flags, "--peft", peft, "--merge_adapter", "--output_dir", str(folder / strategy)),
        config=ROOT / "accel_configs" / f"{strategy}.yaml",
    )
    assert done.code == 0, done.err
    return record_under(folder / strategy)


@pytest.mark.parametrize("peft", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_adapters_train_alike_under_every_engine_and_merge(base: Path, tmp_path: Path, peft: str) -> None:
    peft_package = pytest.importorskip("peft")
    if peft == "qlora":
        pytest.importorskip("bitsandbytes")
    strategies = ["ddp", "fsdp_full_shard", "ds_zero2"]
    records = {strategy: tuned(base, tmp_path, strategy, peft) for strategy in strategies}
    first = records["ddp"]
    assert first["losses"][-1] < first["losses"][0] - 0.2  # it learns
    # slm-1m: 4 layers of 128, FFN 384; rank 16 x (in + out) of q, k, v, o: 4 x 256; gate, up, down: 3 x 512
    assert first["num_trainable_params"] == 4 * 16 * (4 * 256 + 3 * 512)
    before = load_file(base / "model.safetensors")
    for strategy, record in records.items():
        assert record["losses"] == pytest.approx(first["losses"], abs=2e-3), strategy
        folder = Path(record["model_dir"])
        merged = load_file(folder / "merged" / "model.safetensors")
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted = peft_package.PeftModel.from_pretrained(loaded, folder)
        adapter = load_file(folder / "adapter_model.safetensors")
        name = "model.layers.1.self_attn.q_proj"
        a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"].float() for part in "AB")
        delta = (32 / 16) * b @ a  # lora_alpha over rank
        assert delta.abs().max() > 1e-3
        if peft == "lora":
            wanted = (before[f"{name}.weight"].float() + delta).bfloat16()
            assert torch.equal(merged[f"{name}.weight"], wanted)
        else:  # what it is added to is the base in 4 bits: 8 levels to each side
            error = merged[f"{name}.weight"].float() - before[f"{name}.weight"].float() - delta
            assert 0 < error.abs().mean() < 0.12 * before[f"{name}.weight"].float().abs().mean()
        tokens = torch.arange(3, 67)[None]
        whole = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
        if peft == "lora":
            with torch.no_grad():
                assert torch.allclose(adapted(tokens).logits, whole(tokens).logits, atol=0.05)


def test_what_cannot_be_tuned_is_refused(base: Path, tmp_path: Path) -> None:
    zero3 = ROOT / "accel_configs" / "ds_zero3.yaml"
    done = launch("--peft", "qlora", "--output_dir", str(tmp_path), config=zero3)
    assert done.code != 0
    assert "--peft qlora with ZeRO-3" in done.err
    assert "Traceback" not in done.err.partition("hint")[0]
    words = ["python", "-m", "slm_toolkit.train", "--output_dir", str(tmp_path), "--max_steps", "1"]
    done = run(*words, "--peft", "lora", "--lora_target_modules", "nothing_such", "--model", "slm-1m")
    assert (done.code, "nothing_such" in done.err) == (2, True)
    again = [
        "--run_name",
        base.parent.name,
        "--output_dir",
        str(base.parent.parent),
        "--save_final_model",
        "true",
    ]
    done = run(*words[:3], "--max_steps", "1", "--model", str(base), "--peft", "lora", *again)
    assert (done.code, "lies where this run saves its model" in done.err) == (2, True)
    assert (base / "model.safetensors").is_file()
    done = run(*words, "--lora_r", "8")
    assert "error: --lora_r without --peft" in done.err


def test_the_learning_rate_follows_the_batch() -> None:
    # 64 sequences a step for 4 of a micro-step: 16 times
    config = RunConfig(learning_rate=1e-3, per_device_train_batch_size=4)
    rates = {rule: RunConfig(**{**vars(config), "scale_lr": rule}) for rule in ("none", "sqrt", "linear")}
    assert [rate.learning_rate_of(64) for rate in rates.values()] == pytest.approx([1e-3, 4e-3, 16e-3])
    based = RunConfig(learning_rate=1e-3, scale_lr="linear", base_batch_size=128)
    assert based.learning_rate_of(64) == pytest.approx(5e-4)


def test_a_scaled_learning_rate_is_told_and_used(tmp_path: Path) -> None:
    words = ["--model", "slm-1m", "--seq_len", "32", "--max_steps", "3", "--numerics", "fp32"]
    out = {name: ["--output_dir", str(tmp_path / name)] for name in ("scaled", "plain")}
    train = ["python", "-m", "slm_toolkit.train", *words, "--gradient_accumulation_steps", "4"]
    done = run(*train, "--scale_lr", "linear", "--learning_rate", "1e-4", *out["scaled"])
    assert "learning rate 0.0004: 0.0001 for 4 sequences, scaled by linear" in done.err
    assert "a step is 16 sequences of 32 tokens: 4 x 4 micro-steps x 1 processes" in done.err
    run(*train, "--learning_rate", "4e-4", *out["plain"])
    assert record_under(tmp_path / "scaled")["losses"] == record_under(tmp_path / "plain")["losses"]
    assert find_model("slm-1m").num_layers == 4


def test_lm_eval_judges_the_saved_model(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"q": f"{n} and one is", "choices": [str(n + 1), str(n)], "gold": 0} for n in range(10)]
    questions = write_rows(tmp_path / "questions.jsonl", rows)
    (tmp_path / "sums.yaml").write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs:\n  data_files: {questions}\ntest_split: train\n"
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{gold}}"\nmetric_list:\n  - metric: acc\n'
    )
    chat = write_rows(tmp_path / "chat.jsonl", [ROWS["alpaca"]] * 40)
    words = ["python", "-m", "slm_toolkit.train", "--model", "slm-1m", "--max_steps", "1", "--seq_len", "64"]
    asked = ["--dataset", str(chat), "--lm_eval_tasks", str(tmp_path / "sums.yaml"), "--peft", "lora"]
    done = run(*words, *asked, "--output_dir", str(tmp_path / "out"))
    assert "error: --lm_eval_tasks with --peft lora: an adapter alone is no model" in done.err
    done = run(*words, *asked, "--merge_adapter", "--output_dir", str(tmp_path / "out"))
    assert done.code == 0, done.err
    results = record_under(tmp_path / "out")["lm_eval"]["sums"]
    assert results["sample_len"] == 10
    assert f"lm-eval sums: acc {results['acc,none']:.4g}" in done.err
