"""The tokenizer that a run asks for."""

from pathlib import Path
from typing import Any

from slm_toolkit.config import RunConfig
from slm_toolkit.hub import check_hub, is_hub_id
from slm_toolkit.models import ModelSpec
from slm_toolkit.user_files import exists, typed_path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"of tokenizers that have none: every turn ends with the end-of-text token, so that generation stops there"


def tokenizer_of(config: RunConfig, spec: ModelSpec) -> str | None:
    """The folder or hub id of the tokenizer asked for, or of the model's own; None: bytes."""
    if config.tokenizer_name is not None:
        return None if config.tokenizer_name == "byte" else config.tokenizer_name
    if spec.path is None:
        return None
    folder = Path(spec.path).parent if spec.path.endswith(".json") else Path(spec.path)
    has_own = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    return str(folder) if has_own or not folder.exists() else None


def load_tokenizer(config: RunConfig, spec: ModelSpec) -> Any:
    """The tokenizer asked for, the model's own, or ByT5's bytes, which need no download."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    name = tokenizer_of(config, spec)
    if name is None:
        tokenizer = ByT5Tokenizer()
    else:
        if is_hub_id(name) and not exists(typed_path(name)):
            check_hub(name, "tokenizer")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # tokenizers raises a bare Exception for a file that is none of its own
            raise ValueError(
                f"can't load tokenizer {name!r}: {(str(error) or type(error).__name__).splitlines()[0]}\n"
                "hint: --tokenizer_name byte needs none"
            ) from None
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {name!r} has no end-of-text token to put between documents\n"
            "hint: set its eos_token, or use --tokenizer_name byte"
        )
    if len(tokenizer) > spec.vocab_size:
        raise ValueError(
            f"tokenizer {name or 'byte'!r} has {len(tokenizer)} tokens, "
            f"model {spec.name} only {spec.vocab_size}\n"
            "hint: choose a model with a larger vocabulary, or --tokenizer_name byte"
        )
    return tokenizer
