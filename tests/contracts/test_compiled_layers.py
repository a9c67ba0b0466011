"""What AOTAutograd's partitioner saves of a compiled layer is what the closed forms count.

The partitioner is the one of torch.compile's default backend; the backend here runs its graphs eagerly.
"""

import contextlib

import pytest
import torch
from transformers import LlamaForCausalLM

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.activations import Kernels, layer_memory
from slm_toolkit.predict.setup.adapters import KNOWN, Adapters
from slm_toolkit.predict.setup.setup import AUTOCAST, BF16, FP32
from slm_toolkit.run.model.model import hf_config

SHAPE = ModelSpec("tiny", 2, 64, 4, 2, 16, 160, 128)
BATCH, SEQ_LEN, RANK = 3, 24, 8
TOKENS = BATCH * SEQ_LEN
ALL = tuple(name for name in KNOWN if name not in ("qkv_proj", "gate_up_proj"))


def saved_of_compiled_layer(
    compute: str, targets: tuple[str, ...] = (), *, dropout: float = 0.0, recipe: str | None = None
) -> float:
    """The bytes per token that a compiled Llama layer saves for backward, without weights."""
    dtype = torch.bfloat16 if compute == BF16 else torch.float32
    model = LlamaForCausalLM(hf_config(SHAPE, seq_len=SEQ_LEN))
    if targets:
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=RANK, target_modules=list(targets), lora_dropout=dropout)
        model = peft.get_peft_model(model, adapters).base_model.model
    model = model.to(dtype).train().model
    if recipe is not None:
        float8 = pytest.importorskip("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(model.layers[1], config=config)
    torch._dynamo.reset()
    layer = torch.compile(model.layers[1], backend="aot_eager_decomp_partition")
    hidden = torch.randn(BATCH, SEQ_LEN, SHAPE.hidden_size, dtype=dtype, requires_grad=True)
    positions = torch.arange(SEQ_LEN)[None].expand(BATCH, SEQ_LEN)
    rotary = tuple(part.to(dtype) for part in model.rotary_emb(hidden, positions))
    autocast = torch.autocast("cpu", torch.bfloat16) if compute == AUTOCAST else contextlib.nullcontext()
    with autocast:
        out = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    out = out[0] if isinstance(out, tuple) else out
    known = {tensor.data_ptr() for tensor in (*model.parameters(), *rotary)}
    kept = [tensor for tensor in out.grad_fn.saved_tensors if tensor is not None]
    # others are autocast's copies of weights, and scales of float8
    kept = [t for t in kept if t.numel() >= TOKENS and t.shape[0] in (BATCH, TOKENS) or recipe is not None]
    kept = [t for t in kept if t.numel() >= TOKENS and t.data_ptr() not in known]
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()) / TOKENS


@pytest.mark.parametrize(
    ("compute", "targets", "dropout"),
    [
        (BF16, (), 0.0),
        (BF16, ALL, 0.0),
        pytest.param(BF16, ALL, 0.1, marks=pytest.mark.full),
        (AUTOCAST, ALL, 0.0),
        pytest.param(FP32, ALL, 0.1, marks=pytest.mark.full),
    ],
)
def test_a_compiled_layer_saves_what_the_closed_form_counts(
    compute: str, targets: tuple[str, ...], dropout: float
) -> None:
    kernels = Kernels(SEQ_LEN, compute, eager=False, fused_norm=True, compiled=True)
    adapters = Adapters(targets, RANK, drops=dropout > 0, is_quantized=False) if targets else None
    closed_form = layer_memory(SHAPE, kernels, adapters, checkpointing="none").saved
    assert saved_of_compiled_layer(compute, targets, dropout=dropout) == closed_form


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_layer_in_float8_saves_less(recipe: str) -> None:
    kernels = Kernels(SEQ_LEN, BF16, eager=False, fused_norm=True, compiled=True, float8=True)
    closed_form = layer_memory(SHAPE, kernels, checkpointing="none").saved
    assert saved_of_compiled_layer(BF16, recipe=recipe) == closed_form
