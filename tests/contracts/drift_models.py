"""What we lean on in transformers."""

import inspect
from typing import Any
from unittest.mock import patch

import torch
from drift import Leaning


def small_llama(**options: Any) -> Any:
    """Two layers of 16 wide, 32 tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 8, "intermediate_size": 32, "vocab_size": 32, "max_position_embeddings": 16}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **sizes, **rope, tie_word_embeddings=True, use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)


_TOKENS = torch.arange(8).view(1, 8)


def _model_parts() -> None:
    model = small_llama()
    assert len(model.model.layers) == 2
    assert model.base_model is model.model
    assert model.get_output_embeddings() is model.lm_head
    assert type(model.lm_head) is torch.nn.Linear
    assert set(model.all_tied_weights_keys) == {"lm_head.weight"}, model.all_tied_weights_keys
    assert model.config.rope_parameters["rope_theta"] == 1e4
    names = [name for name, _ in model.named_modules()]
    assert {"model.embed_tokens", "model.norm", "lm_head", "model.layers.1.mlp"} <= set(names)
    norms = [
        type(part).__name__ for part in model.base_model.modules() if "norm" in type(part).__name__.lower()
    ]
    assert len(norms) == 5, f"two in each of two layers and one at the end: {norms}"


def _layer_classes() -> None:
    import importlib

    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from slm_toolkit.run.kernels.layer_kernels import FusedRMSNorm, computes_like

    copies = {"Qwen2": "qwen2", "Mistral": "mistral", "Qwen3": "qwen3", "SmolLM3": "smollm3"}
    copies |= {"Granite": "granite"}
    for prefix, family in copies.items():
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        theirs = getattr(module, f"{prefix}RMSNorm")
        assert computes_like(theirs.__new__(theirs), LlamaRMSNorm), f"{theirs.__name__} computes otherwise"
        kinds = (FusedRMSNorm, theirs)
        wanted, found = (list(inspect.signature(kind.forward).parameters) for kind in kinds)
        assert len(found) == len(wanted) == 2, f"{theirs.__name__}.forward takes {found}"
    norm = small_llama().model.layers[0].input_layernorm
    assert isinstance(norm.variance_epsilon, float)
    assert tuple(norm.weight.shape) == (16,)


class _HeadOfOneNumber(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).sum()


def _loss_function() -> None:
    model, calls = small_llama(), []

    def loss(**arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return arguments["logits"].sum()

    assert callable(model.loss_function)
    model.loss_function = loss
    out = model(input_ids=_TOKENS, labels=_TOKENS)
    assert out.loss is not None
    assert calls, "the loss is no longer asked of model.loss_function"
    (arguments,) = calls
    assert {"logits", "labels", "vocab_size"} <= set(arguments), sorted(arguments)
    unknown = set(arguments) - {"logits", "labels", "vocab_size", "num_items_in_batch"}
    assert not unknown, f"our loss functions take no {', '.join(sorted(unknown))}"
    assert tuple(arguments["logits"].shape) == (1, 8, 32)
    model.lm_head.__class__ = _HeadOfOneNumber
    out = model(input_ids=_TOKENS, labels=_TOKENS)
    assert out.logits.dim() == 0, "what the head returns is not handed on as logits"


def _loss_value() -> None:
    model = small_llama()
    logits = model(input_ids=_TOKENS).logits
    labels = _TOKENS.clone()
    labels[0, 3] = -100  # no loss at the token before it: 6 of 7 are left
    by_hand = -torch.log_softmax(logits[0, :-1], dim=-1)[range(7), labels[0, 1:].clamp(min=0)]
    by_hand = by_hand[labels[0, 1:] != -100]
    for divisor in (None, torch.tensor(3.0)):
        options = {} if divisor is None else {"num_items_in_batch": divisor}
        found = model.loss_function(logits=logits, labels=labels, vocab_size=32, **options)
        wanted = by_hand.sum() / (6 if divisor is None else 3)
        assert torch.allclose(found, wanted, rtol=1e-5), (
            f"num_items_in_batch {divisor}: {found}, not {wanted}"
        )


def _attention_registry() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    seen: list[Any] = []

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        assert module.attention_dropout == 0.0, "the layer has no attention_dropout"
        seen.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("drift_bare", attention)
    AttentionInterface.register("drift_masked", attention)
    AttentionMaskInterface.register("drift_masked", sdpa_mask)
    plain = small_llama(attn_implementation="sdpa")(input_ids=_TOKENS).logits
    own = small_llama(attn_implementation="drift_bare")(input_ids=_TOKENS).logits
    assert len(seen) == 2, f"an attention by our name ran {len(seen)} times in two layers"
    assert seen == [None, None], "a mask is made for a name that has no mask function"
    assert torch.equal(plain, own), "without a mask, sdpa_attention_forward is not causal"
    seen.clear()
    apart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    small_llama(attn_implementation="drift_masked")(input_ids=_TOKENS, position_ids=apart)
    assert seen[0] is not None, "positions that start again make no mask"
    allowed = seen[0][0, 0] if seen[0].dtype == torch.bool else seen[0][0, 0] == 0
    assert not allowed[4, 3], "position_ids that start again do not keep documents apart"
    assert allowed[4, 4]
    assert allowed[3, 0]


def _packed_sequences() -> None:
    from transformers import masking_utils

    calls = []
    found = masking_utils.find_packed_sequence_indices
    with patch.object(
        masking_utils, "find_packed_sequence_indices", lambda *_, **__: calls.append(1) or found(*_, **__)
    ):
        small_llama(attn_implementation="sdpa")(input_ids=_TOKENS, position_ids=torch.arange(8).view(1, 8))
    assert calls, "masks are made without find_packed_sequence_indices"


def _whole_models() -> None:
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
    from transformers.modeling_utils import set_zero3_state

    held = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled()
    with torch.device("meta"), set_zero3_state():
        model = small_llama()
    assert not hasattr(model.lm_head.weight, "ds_tensor"), "set_zero3_state no longer keeps a model whole"
    assert held is not None


def _tokenizer() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    ids = tokenizer(["ab"], add_special_tokens=False)["input_ids"]
    assert ids == [[100, 101]], f"bytes of ByT5 are {ids}"  # ord("a") + 3 special tokens
    assert tokenizer.eos_token_id == 1
    assert len(tokenizer) <= 384
    assert tokenizer.chat_template is None
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    turn = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "x"


def _windows() -> None:
    from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config

    from slm_toolkit.run.model.model import _has_windows

    small = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    assert _has_windows(MistralConfig(sliding_window=4, **small)), "Mistral's windows have another name"
    windowed = Qwen2Config(use_sliding_window=True, sliding_window=4, max_window_layers=1, **small)
    assert _has_windows(windowed), "Qwen2's windows have another name"
    assert not _has_windows(LlamaConfig(**small))
    assert not _has_windows(GemmaConfig(**small))


def _trainer_methods() -> None:
    from transformers import Trainer

    assert "_get_train_sampler" in inspect.getsource(Trainer.get_train_dataloader)
    assert list(inspect.signature(Trainer.training_step).parameters)[:3] == ["self", "model", "inputs"]
    assert "loss / self.current_gradient_accumulation_steps" in inspect.getsource(Trainer.training_step)
    assert "self.model_accepts_loss_kwargs" in inspect.getsource(Trainer.__init__)
    created = inspect.signature(Trainer.create_scheduler).parameters
    assert list(created) == ["self", "num_training_steps", "optimizer"]


MODELS = (
    Leaning(
        "transformers: the parts of a causal language model",
        ("all_tied_weights_keys", "get_output_embeddings", "base_model"),
        "find layers, norms, head and tied weights",
        "run/model/model.py (hf_config), run/observe/probe.py, run/observe/allocations.py "
        "(following_modules), run/model/adapters.py",
        _model_parts,
    ),
    Leaning(
        "transformers: classes of norms",
        ("LlamaRMSNorm", "variance_epsilon"),
        "put the fused norm in place of modules whose forward is Llama's",
        "run/kernels/layer_kernels.py: computes_like, and the modules' attributes",
        _layer_classes,
    ),
    Leaning(
        "transformers: how the loss is called",
        ("loss_function",),
        "replace it, keep its value, and let the head compute it",
        "run/model/loss_recorder.py, run/kernels/loss_kernels.py: arguments of loss_of_head",
        _loss_function,
    ),
    Leaning(
        "transformers: what the loss is",
        ("num_items_in_batch", "IGNORE_INDEX"),
        "weigh labels alike over ranks, and compute the same in fused kernels",
        "run/model/loss_recorder.py (divide_by), run/kernels/loss_kernels.py (IGNORE_INDEX)",
        _loss_value,
    ),
    Leaning(
        "transformers: attention and masks by name",
        ("AttentionInterface", "AttentionMaskInterface", "sdpa_attention_forward", "attention_dropout"),
        "run SDPA without a mask, on one backend, or with documents kept apart",
        "run/model/model.py: what is registered under which name; run/observe/probe.py: attention's dropout",
        _attention_registry,
    ),
    Leaning(
        "transformers: packed documents looked for in masks",
        ("find_packed_sequence_indices",),
        "keep fake tensors from being read in a rehearsal",
        "run/rehearse.py: what reads values there now",
        _packed_sequences,
    ),
    Leaning(
        "transformers: a model built whole though ZeRO-3 is announced",
        ("set_zero3_state", "ds_tensor"),
        "check attention kernels on a model that nothing takes apart",
        "run/model/model.py: check_attention",
        _whole_models,
    ),
    Leaning(
        "transformers: a tokenizer of bytes without a download",
        ("ByT5Tokenizer", "apply_chat_template"),
        "read text where no tokenizer is named",
        "run/data/documents.py, run/data/documents.py",
        _tokenizer,
    ),
    Leaning(
        "transformers: windows of attention in a configuration",
        ("layer_types", "sliding_window"),
        "build masks for models that see a part of the sequence only",
        "run/model/model.py: `_has_windows`",
        _windows,
    ),
    Leaning(
        "transformers: what Trainer calls to read, step and schedule",
        ("_get_train_sampler", "create_scheduler", "training_step", "model_accepts_loss_kwargs"),
        "give another trainer's row our batches, losses and learning rates",
        "bench/rivals/training.py: the methods of InOrder",
        _trainer_methods,
    ),
)
