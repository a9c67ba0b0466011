"""Loads the tokenizer of a run, and refuses one that the model or this machine can't use."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import first_line
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.hub import check_hub, is_hub_id
from slm_toolkit.model.model_spec import ModelSpec

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"for tokenizers without one: every turn ends with the end-of-text token, so that generation stops there"
MOST_GROWTH = 10_000
"of a text by its tokenizer's replacements: 30 times `a` by `aaaa` would turn one character into 10^18"


def tokenizer_of(config: RunConfig, spec: ModelSpec) -> str | None:
    """The folder or hub id of the tokenizer in --tokenizer_name, or of the model's own; None for bytes."""
    if config.tokenizer_name is not None:
        return None if config.tokenizer_name == "byte" else config.tokenizer_name
    if spec.path is None:
        return None
    folder = Path(spec.path).parent if spec.path.endswith(".json") else Path(spec.path)
    has_own = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    return str(folder) if has_own or not folder.exists() else None


def load_tokenizer(config: RunConfig, spec: ModelSpec) -> Any:
    """The tokenizer of --tokenizer_name, the model's own, or ByT5's bytes, which need no download."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    name = tokenizer_of(config, spec)
    if name is None:
        tokenizer = ByT5Tokenizer()
    else:
        if is_hub_id(name) and not exists(typed_path(name)):
            check_hub(name, "tokenizer")
        with tokenizer_errors(f"can't load tokenizer {name!r}"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {name!r} has no end-of-text token to put between documents\n"
            "hint: set its eos_token, or use --tokenizer_name byte"
        )
    vocabulary = tokenizer.get_vocab()
    if vocabulary.keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"tokenizer {name!r} has no tokens of text\nhint: --tokenizer_name byte has one for each byte"
        )
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    if normalizer is not None and _growth(json.loads(normalizer.__getstate__())) > MOST_GROWTH:
        raise ValueError(
            f"tokenizer {name!r}: its normalizer makes over {MOST_GROWTH:,} characters of one\n"
            "hint: leave such replacements out of its tokenizer.json, or use another tokenizer"
        )
    if len(vocabulary) > spec.vocab_size:
        raise ValueError(
            f"tokenizer {name or 'byte'!r} has {len(vocabulary)} tokens, "
            f"model {spec.name} only {spec.vocab_size}\n"
            "hint: choose a model with a larger vocabulary, or --tokenizer_name byte"
        )
    token, largest = max(vocabulary.items(), key=lambda pair: pair[1])
    if largest >= spec.vocab_size:  # ids need not be without gaps
        raise ValueError(
            f"tokenizer {name!r} has the id {largest} for {token!r}, model {spec.name} only ids below "
            f"{spec.vocab_size}\nhint: choose a model with a larger vocabulary, or --tokenizer_name byte"
        )
    return tokenizer


@contextlib.contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turns a tokenizer's errors, bare Exceptions and Rust's panics (BaseExceptions), into ValueError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {first_line(error)}\nhint: --tokenizer_name byte needs none") from None


def _growth(normalizer: dict[str, Any]) -> float:
    """The most characters into which a normalizer's replacements may turn one."""
    if normalizer["type"] == "Replace":
        length = len(normalizer["content"])
        replaced = len(normalizer["pattern"].get("String", ""))
        return max(1, length / replaced) if replaced else 1 + length  # a Regex may match between characters
    return math.prod(_growth(each) for each in normalizer.get("normalizers", ()))
