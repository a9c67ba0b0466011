"""Rows of every format of chats, what of them has a loss, and files and configurations of them."""

import json
from pathlib import Path
from typing import Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS

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
    config = RunConfig(model="slm-1m", dataset=str(dataset), **options)
    return config.with_defaults(has_gpu=False)  # 128 tokens
