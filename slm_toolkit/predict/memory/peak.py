"""Peak memory of one training step on one rank, by closed forms without torch.

The peak is the largest of a few instants: the loss, the backward of the head and the final norm, some moments
in the backward of the first and the last layers, the embedding's backward, and the optimizer's step.

An estimate takes a few hundred microseconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from slm_toolkit.predict.memory.activations import gradients_made, layers_of
from slm_toolkit.predict.memory.engine_bytes import At, Step, step_of
from slm_toolkit.predict.memory.loss import LossMemory, loss_memory
from slm_toolkit.predict.setup.setup import BF16, Setup, unknown_to_estimates
from slm_toolkit.record.memory_parts import PARTS

BATCH_BYTES_PER_TOKEN = 24
"token ids, shifted labels and positions, 8 bytes each"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak, on the rank that needs the most memory."""

    parts: dict[str, int]
    "bytes at the peak by part, for each of `memory_parts.PARTS`"
    peak_instant: str
    largest: dict[str, int]
    "each part's bytes at the instant at which that part is largest, and the loss's blocks of both sizes"

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def peak(setup: Setup) -> MemoryEstimate:
    """Return the peak bytes that `slm_toolkit.train` allocates on one rank's GPU, without CUDA's own memory.

    Offloading the optimizer also offloads gradients and master weights; ZeRO-3's parameters may stay on the
    GPU. hpZ adds a shard of a second, 16-bit copy of the parameters. Raise ValueError for flags without a
    closed form.
    """
    spec, config = setup.spec, setup.config
    unknown = unknown_to_estimates(config, spec=spec)
    if setup.strategy.is_fsdp1 and config.peft != "none":
        unknown.append(
            f"{setup.strategy.path or setup.strategy.name}: no closed form for adapters under FSDP1\n"
            "hint: write `fsdp_version: 2` under fsdp_config"
        )
    if unknown:
        raise ValueError("\n".join(unknown))
    step, loss = step_of(setup), loss_memory(setup)
    alive = setup.own_loss.alive * spec.vocab_size * setup.num_tokens if setup.own_loss else 0
    found = [
        (
            instant,
            {
                "activations": activations,
                "logits_and_loss": logits + alive,
                "gathered_parameters": at.gathered,
                "gradients": at.gradients,
                "communication": at.communication,
                "temporary": at.temporary,
            },
        )
        for instant, at, activations, logits in _instants(setup, step, loss)
    ]
    peak_instant, highest = max(found, key=lambda each: sum(each[1].values()))
    largest = {part: max(sizes[part] for _, sizes in found) for part in highest}
    largest["logits_and_loss"] = max(largest["logits_and_loss"], loss.backward + loss.freed_logits)
    state = step.state
    always = {
        "parameters": _parameters_here(setup, round(state.parameters + setup.weights.scales_bytes)),
        "master_weights": state.master_weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "communication": state.communication,
    }
    of_peak, of_largest = (
        {part: round(always.get(part, 0) + changing.get(part, 0)) for part in PARTS}
        for changing in (highest, largest)
    )
    return MemoryEstimate(of_peak, peak_instant, of_largest)


def _instants(setup: Setup, step: Step, loss: LossMemory) -> Iterator[tuple[str, At, float, float]]:
    """Yield an instant's name, its bytes by the engine, of activations, and of logits and loss."""
    spec = setup.spec
    num_tokens, layers, made_at = setup.num_tokens, layers_of(setup), gradients_made(spec, setup.adapters)
    fixed = num_tokens * BATCH_BYTES_PER_TOKEN + _shared(setup)
    saved = sum(layer.saved for layer in layers) * num_tokens + fixed
    residual = layers[-1].residual * spec.hidden_size * num_tokens
    yield "forward: the loss", step.at_forward_loss, saved, loss.forward
    if step.at_last_layer is not None:
        yield "forward: the last layer", step.at_last_layer, saved + _not_saved(setup), 0
    yield "backward: the loss", step.at_loss, saved, loss.backward
    yield "backward: norm", step.at_norm, saved + loss.norm, 0
    last = spec.num_layers - 1
    for index in {last, max(0, last - 1), *step.crowded_layers, min(1, last), 0}:
        below = sum(layer.saved for layer in layers[:index]) * num_tokens + residual + fixed
        for moment in layers[index].moments:
            at, activations = step.at_layer(index, made_at[moment.stage]), moment.num_bytes * num_tokens
            yield f"backward: layers.{index}.{moment.where}", at, below + activations, 0
    yield "backward: embed_tokens", step.at_embedding, residual + fixed, 0
    yield "optimizer step", step.at_optimizer, 0, 0


def _parameters_here(setup: Setup, num_bytes: int) -> int:
    """Return the bytes of parameters on the GPU; without offload and hpZ these would be `num_bytes`."""
    placement, stored = setup.placement, setup.weights.total
    if placement.parameter_device != "none":
        num_bytes = 0
    elif placement.optimizer_device != "none" and setup.strategy.zero_stage == 3:
        num_bytes = stored * setup.dtypes.parameter // setup.shard_ranks
    if placement.secondary_ranks > 1:
        num_bytes += 2 * stored // placement.secondary_ranks
    return num_bytes


def _not_saved(setup: Setup) -> float:
    """Return the bytes that forward needs in a last layer that is checkpointed, so saves nothing.

    In the FFN these are the residual stream, the FFN's input, and three tensors of the FFN's width: the
    activation of the gate, up, and their product. LoRA needs four: the activation, up, and the adapter's
    output twice.
    """
    widths = 2 * setup.spec.hidden_size + (4 if setup.adapters else 3) * setup.spec.ffn_size
    return widths * (2 if setup.compute == BF16 else 4) * setup.num_tokens * setup.recomputed[-1]


def _shared(setup: Setup) -> float:
    """Return the bytes that all layers share: RoPE's sine and cosine, and attention's masks.

    Only recomputation needs the masks, backward does not. With adapters they always count, because this fits
    their traces better. SDPA gets a mask, of one byte per element, only for sliding windows. If some layers
    have a window and others not, eager attention has two masks.
    """
    config = setup.config
    e = 2 if setup.compute == BF16 else 4
    rope = 2 * config.seq_len * setup.spec.head_dim * e
    recomputes = config.gradient_checkpointing != "none" or config.peft != "none"
    if not recomputes:
        return rope
    window, of_mask = setup.spec.sliding_window, config.per_device_train_batch_size * config.seq_len**2
    if config.attn_implementation != "eager":
        return rope + of_mask * (window is not None and window < config.seq_len)
    num_masks = 2 if 0 < setup.spec.num_window_layers < setup.spec.num_layers else 1
    return rope + num_masks * of_mask * e
