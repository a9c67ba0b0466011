"""Flags that no closed form of memory or time covers: an estimate names them instead of guessing."""

import dataclasses

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.setup.adapters import unknown_targets


def unknown_to_estimates(config: RunConfig) -> list[str]:
    """A sentence for each flag of `config` that estimates don't cover."""
    problems = []
    for name in _uncovered(config):
        value = getattr(config, name)
        typed = f"--{name}" if value is True else f"--{name} {value}"
        problems.append(f"{typed}: no closed form for it; {FLAGS[name].no_closed_form}")
    if config.peft != "none" and config.torch_compile:
        problems.append(
            f"--torch_compile with --peft {config.peft}: no closed form for what compiled adapters keep; a "
            "GPU measures it"
        )
    if problem := unknown_targets(config):
        problems.append(problem)
    return problems


def _uncovered(config: RunConfig) -> list[str]:
    """Names of the flags whose values have no closed form."""
    return [name for name, flag in FLAGS.items() if not flag.has_closed_form(getattr(config, name))]


def known_to_estimates(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The nearest config that estimates cover, and what of `config` they leave out, as sentences."""
    changes = {name: getattr(RunConfig, name) for name in _uncovered(config)}
    if config.use_liger_kernel:  # these keep as much for backward
        changes |= {"norm_kernel": "fused", "mlp_kernel": "fused"}
    return dataclasses.replace(config, **changes), unknown_to_estimates(config)


def unlike_the_model(spec: ModelSpec, seq_len: int) -> list[str]:
    """What of a model's own configuration the closed forms leave out, as sentences."""
    found = []
    if spec.sliding_window is not None and spec.sliding_window < seq_len:
        found.append(
            f"{spec.name}: sliding_window {spec.sliding_window}: estimated as if every token attended to all "
            f"{seq_len}"
        )
    if spec.gated_ffn and spec.hidden_act not in ("silu", "swish"):
        found.append(f"{spec.name}: hidden_act {spec.hidden_act}: estimated as silu")
    if spec.attention_dropout:
        found.append(f"{spec.name}: attention_dropout {spec.attention_dropout:g}: estimated without dropout")
    return found
