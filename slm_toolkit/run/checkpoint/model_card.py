"""Writes the model card of a saved model: its data, strategy, tokens, losses, versions and command."""

import os
import re
from pathlib import Path

from huggingface_hub import ModelCardData

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.run_record import RunRecord

CARD_FILE = "README.md"
"the name under which the Hugging Face Hub shows a model card"


def model_card(record: RunRecord, config: RunConfig) -> str:
    """Return the card as Markdown. `record` has the losses and datasets of the training.

    The card may be published, so paths below the home folder begin with ~ instead of the user's name.
    """
    card = f"---\n{_metadata(record, config).to_yaml()}\n---\n\n{_text(record, config)}"
    home = os.path.expanduser("~").rstrip("/")
    return re.sub(rf"(?<![\w./~-]){re.escape(home)}/", "~/", card) if home.startswith("/") else card


_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this file
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("The", add_special_tokens=False, return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(prompt, max_new_tokens=50)[0]))
```
"""
"how to load the model; training adds no special tokens before a text"


def _metadata(record: RunRecord, config: RunConfig) -> ModelCardData:
    """The header that the Hub reads. Local folders and files are left out: they mean nothing elsewhere."""
    return ModelCardData(
        library_name="transformers" if config.peft == "none" else "peft",
        pipeline_tag="text-generation",
        base_model=_hub_id(record.weights),
        datasets=[name for facts in record.datasets if (name := _hub_id(facts["name"]))] or None,
        tags=["slm_toolkit", record.strategy, *([config.peft] if config.peft != "none" else [])],
    )


def _hub_id(place: str | None) -> str | None:
    """`place` if it is an id of the Hub, such as HuggingFaceTB/SmolLM2-135M."""
    is_id = place is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", place) is not None
    return place if is_id and not Path(place).exists() else None


def _text(record: RunRecord, config: RunConfig) -> str:
    num_tokens = (record.tokens_counted or {}).get("drawn")
    steps = enumerate(record.losses, record.first_step + 1)
    losses = [f"{loss:.4f} at step {step}" for step, loss in steps if loss is not None]
    start = f", from step {record.first_step + 1} on" if record.first_step else ""
    held_out = [point for point in record.eval_losses[-1:] if point["loss"] is not None]
    rows = {
        "parameters": f"{record.model['num_params']:,}",
        "first weights": record.weights,
        "tokenizer": record.tokenizer,
        "data": ", ".join(facts["name"] for facts in record.datasets) or "generated tokens",
        "tokens in this run": f"{num_tokens:,}{start}" if num_tokens else None,
        "steps": f"{record.first_step + len(record.losses)}, sequences of {config.seq_len} tokens",
        "strategy": f"{record.strategy}, {record.world_size} processes",
        "numerics": config.numerics,
        "adapter": config.peft if config.peft != "none" else None,
        "training loss": ", ".join(dict.fromkeys([*losses[:1], *losses[-1:]])),
        "evaluation loss": held_out and f"{held_out[0]['loss']:.4f} at step {held_out[0]['step']}",
        "hardware": record.gpu or record.cpu,
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    command = f"\n```bash\n{record.command}\n```\n" if record.command else ""
    return "\n".join(
        [
            f"# {record.run_name}",
            "",
            f"A {record.model['name']} language model, trained on {record.started_at[:10]} with slm_toolkit.",
            "",
            "| | |",
            "|---|---|",
            *lines,
            command,
            *([_USE] if record.tokenizer and config.peft == "none" else []),
            "The numbers are those that the training run observed; nothing else was evaluated.",
            "",
        ]
    )
