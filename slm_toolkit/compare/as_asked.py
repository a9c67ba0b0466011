"""Whether a run trained with the settings that were asked for: live ones against flags and model."""

import re

from slm_toolkit.numerics import ROUNDED, Numerics, numerics_from
from slm_toolkit.record import RunRecord, config_of, spec_of
from slm_toolkit.schedule import learning_rate

_EPS = 1e-8
"AdamW's, for which there is no flag"
_NORM_EPS = "1e-06"
"of transformers' configurations of the presets' architectures, where nothing else is given"
_CLOSE = 1e-4
"relative: settings are kept with six digits"


def settings_not_as_asked(record: RunRecord) -> list[str]:
    """A sentence for each setting that is another; empty for older records, which don't show them."""
    numerics = numerics_from(record.numerics)
    if numerics is None or record.first_step > 0 or record.is_rehearsal:
        return []
    of_state = {"master weights": numerics.master_weight_dtype}
    config = config_of(record)
    if config.adam_beta1 and config.adam_beta2:  # else a moment is the gradient, which bf16 may hold
        of_state["moments"] = numerics.optimizer_state_dtype
    rounded = [f"{name} are {dtype}" for name, dtype in of_state.items() if ROUNDED in str(dtype)]
    return [*_of_optimizer(record, numerics), *_of_model(record, numerics), *rounded]


def _of_optimizer(record: RunRecord, numerics: Numerics) -> list[str]:
    config = config_of(record)
    sequences = (
        config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * record.asked["num_processes"]
    )
    peak = config.learning_rate_of(sequences)
    num_steps = config.steps_asked or len(record.losses)
    found = []
    clipping = config.max_grad_norm
    if clipping is not None and numerics.clipping not in (None, clipping):
        found.append(f"gradients clipped at {numerics.clipping:g}, not {clipping:g}")
    steps = ((record.num_probed_steps - 1, numerics.optimizer_settings, "at the first step"),)
    if len(record.losses) == num_steps:
        steps += ((num_steps - 1, numerics.optimizer_settings_at_end, "at the last step"),)
    for step, line, when in steps:
        rate = learning_rate(peak, config.warmup_steps, step, num_steps)
        for group in line.split("; ") if line else ():
            ran = {name: float(value) for name, value in re.findall(r"(lr|eps|decay) ([-+.\de]+)", group)}
            betas = [float(beta) for beta in re.findall(r"betas (\S+) (\S+),", group)[0]]
            ran |= {"beta1": betas[0], "beta2": betas[1]}
            asked = {"lr": rate, "eps": _EPS, "beta1": config.adam_beta1, "beta2": config.adam_beta2}
            asked["decay"] = config.weight_decay if ran["decay"] else 0.0
            found += [
                f"{name} {ran[name]:g} {when}, not {value:g}"
                for name, value in asked.items()
                if not _is_close(ran[name], value)
            ]
        decays = re.findall(r"decay ([-+.\de]+)", line or "")
        if line and config.weight_decay and config.peft == "none" and "0" not in decays:
            found.append(f"weight decay on norms, too, {when}")
        if line and config.weight_decay and set(decays) == {"0"}:
            found.append(f"no weight decay {when}, not {config.weight_decay:g}")
    return list(dict.fromkeys(found))


def _of_model(record: RunRecord, numerics: Numerics) -> list[str]:
    """A user's own configuration has rope, norms and dropout of its own, so only its ties are known here."""
    spec, config = spec_of(record), config_of(record)
    found = []
    if numerics.dropout not in (None, "none") and not config.lora_dropout and spec.path is None:
        found.append(f"dropout {numerics.dropout}, which nobody asked for")
    if numerics.tied not in (None, "tied" if spec.tied else "untied"):
        found.append(f"embedding and head {numerics.tied}")
    if config.peft == "none" and numerics.frozen not in (None, "none"):
        found.append(f"not trained: {numerics.frozen}")
    if spec.path is not None:
        return found
    if numerics.norm_eps not in (None, _NORM_EPS):
        found.append(f"norms' eps {numerics.norm_eps}, not {_NORM_EPS}")
    last = spec.rope_theta ** -((spec.head_dim - 2) / spec.head_dim)
    if numerics.rope and not _is_close(float(re.findall(r"to (\S+),", numerics.rope)[0]), last):
        found.append(f"RoPE's frequencies {numerics.rope}, the last should be {last:g}")
    if numerics.rope and not numerics.rope.startswith("float32"):
        found.append(f"RoPE's frequencies in {numerics.rope.split()[0]}")
    scales = re.findall(r"scale (\S+?)(?: and|$)", numerics.attention_call or "")
    wrong = [scale for scale in scales if not _is_close(float(scale), spec.head_dim**-0.5)]
    found += [f"attention's scale {scale}, not {spec.head_dim**-0.5:g}" for scale in wrong]
    drops = re.findall(r"dropout (\S+),", numerics.attention_call or "")
    found += [f"attention drops {drop} of its weights" for drop in drops if float(drop)]
    masks = (numerics.attention_call or "").split(" and ")
    found += [f"attention {mask.split(',')[0]}" for mask in masks if mask.startswith("without a mask")]
    return found


def _is_close(value: float, other: float) -> bool:
    return abs(value - other) <= _CLOSE * abs(other)
