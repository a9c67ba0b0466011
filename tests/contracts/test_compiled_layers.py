"""What AOTAutograd's partitioner saves of a compiled layer is what the closed forms count.

The partitioner is the one of torch.compile's default backend; the backend here runs its graphs eagerly.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.activations import Kernels, layer_memory
from slm_toolkit.predict.setup.adapters import KNOWN, Adapters
from slm_toolkit.predict.setup.setup import AUTOCAST, BF16, FP32

SHAPE = ModelSpec("tiny", 2, 64, 4, 2, 16, 160, 128)
BATCH, SEQ_LEN, RANK = 3, 24, 8
ALL = tuple(name for name in KNOWN if name not in ("qkv_proj", "gate_up_proj"))


def saved_of_compiled_layer(
    compute: str, targets: tuple[str, ...], *, dropout: float, has_input_gradient: bool
) -> float:
    """The bytes per token that a compiled Llama layer saves for backward, without weights."""
    dtype = torch.bfloat16 if compute == BF16 else torch.float32
    layer, model = compiled_layer(dtype, targets, dropout=dropout)
    hidden = torch.randn(BATCH, SEQ_LEN, SHAPE.hidden_size, dtype=dtype, requires_grad=has_input_gradient)
    positions = torch.arange(SEQ_LEN)[None].expand(BATCH, SEQ_LEN)
    rotary = tuple(part.to(dtype) for part in model.rotary_emb(hidden, positions))
    autocast = torch.autocast("cpu", torch.bfloat16) if compute == AUTOCAST else contextlib.nullcontext()
    with autocast:
        out = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    out = out[0] if isinstance(out, tuple) else out
    tokens = BATCH * SEQ_LEN
    known = {tensor.data_ptr() for tensor in (*model.parameters(), *rotary)}
    saved = {tensor.data_ptr(): tensor for tensor in saved_tensors(out.grad_fn)}
    return (
        sum(
            tensor.untyped_storage().nbytes()
            for address, tensor in saved.items()
            if address not in known and is_of_tokens(tensor)
        )
        / tokens
    )


def is_of_tokens(tensor: torch.Tensor) -> bool:
    """False for autocast's copies of weights: no weight has a dimension of BATCH or BATCH x SEQ_LEN."""
    return tensor.shape[0] in (BATCH, BATCH * SEQ_LEN)


def compiled_layer(
    dtype: torch.dtype, targets: tuple[str, ...], *, dropout: float
) -> tuple[torch.nn.Module, torch.nn.Module]:
    config = LlamaConfig(
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.ffn_size,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        vocab_size=SHAPE.vocab_size,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    if targets:
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=RANK, target_modules=list(targets), lora_dropout=dropout)
        model = peft.get_peft_model(model, adapters).base_model.model
    model.to(dtype).train()
    torch._dynamo.reset()
    return torch.compile(model.model.layers[1], backend="aot_eager_decomp_partition"), model.model


def saved_tensors(node: torch.autograd.graph.Node | None) -> Iterator[torch.Tensor]:
    yield from (tensor for tensor in getattr(node, "saved_tensors", None) or () if tensor is not None)


@pytest.mark.parametrize(
    ("compute", "targets", "dropout", "has_input_gradient"),
    [
        (BF16, (), 0.0, True),
        (BF16, ALL, 0.0, True),
        pytest.param(BF16, ("q_proj", "v_proj"), 0.0, True, marks=pytest.mark.full),
        pytest.param(BF16, ALL, 0.1, True, marks=pytest.mark.full),
        pytest.param(BF16, ("down_proj",), 0.0, True, marks=pytest.mark.full),
        pytest.param(BF16, ALL, 0.0, False, marks=pytest.mark.full),
        pytest.param(AUTOCAST, (), 0.0, True, marks=pytest.mark.full),
        (AUTOCAST, ALL, 0.0, True),
        pytest.param(AUTOCAST, ("q_proj", "v_proj"), 0.0, True, marks=pytest.mark.full),
        pytest.param(AUTOCAST, ALL, 0.1, True, marks=pytest.mark.full),
        pytest.param(AUTOCAST, ALL, 0.0, False, marks=pytest.mark.full),
        pytest.param(FP32, ALL, 0.1, True, marks=pytest.mark.full),
    ],
)
def test_a_compiled_layer_saves_what_the_closed_form_counts(
    compute: str, targets: tuple[str, ...], dropout: float, has_input_gradient: bool
) -> None:
    saved = saved_of_compiled_layer(compute, targets, dropout=dropout, has_input_gradient=has_input_gradient)
    assert saved == closed_form(compute, targets, RANK, dropout, has_input_gradient=has_input_gradient)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_layer_in_float8_saves_less(recipe: str) -> None:
    float8 = pytest.importorskip("torchao.float8")
    layer, model = compiled_layer(torch.bfloat16, (), dropout=0.0)
    float8.convert_to_float8_training(
        model.layers[1], config=float8.Float8LinearConfig.from_recipe_name(recipe)
    )
    hidden = torch.randn(BATCH, SEQ_LEN, SHAPE.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(SEQ_LEN)[None].expand(BATCH, SEQ_LEN)
    rotary = tuple(part.to(torch.bfloat16) for part in model.rotary_emb(hidden, positions))
    out = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    known = {tensor.data_ptr() for tensor in (*model.parameters(), *rotary)}
    out = out[0] if isinstance(out, tuple) else out
    saved = {tensor.data_ptr(): tensor for tensor in saved_tensors(out.grad_fn)}
    num_bytes = sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in saved.items()
        if address not in known
        and tensor.numel() >= BATCH * SEQ_LEN  # smaller: scales of tensors and columns
    )
    kernels = Kernels(SEQ_LEN, BF16, eager=False, fused_norm=True, compiled=True, float8=True)
    assert num_bytes / (BATCH * SEQ_LEN) == layer_memory(SHAPE, kernels, checkpointing="none").saved


def closed_form(
    compute: str, targets: tuple[str, ...], rank: int, dropout: float, *, has_input_gradient: bool
) -> float:
    kernels = Kernels(SEQ_LEN, compute, eager=False, fused_norm=True, compiled=True)
    adapters = Adapters(targets, rank, drops=dropout > 0, is_quantized=False) if targets else None
    return layer_memory(
        SHAPE, kernels, adapters, checkpointing="none", has_input_gradient=has_input_gradient
    ).saved
