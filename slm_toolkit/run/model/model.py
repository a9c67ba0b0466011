"""Builds the Hugging Face model of a ModelSpec, with random or loaded weights, in the numerics' dtype."""

from contextlib import nullcontext
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import set_seed  # transformers' own imports peft and bitsandbytes, where they are
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import set_zero3_state

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import has_weights
from slm_toolkit.run.kernels.layer_kernels import use_kernels
from slm_toolkit.run.kernels.optional import use_fp8, use_liger
from slm_toolkit.run.model.adapters import add_adapter, quantize
from slm_toolkit.run.model.attention import transformers_name
from slm_toolkit.run.model.checkpointing import enable_checkpointing
from slm_toolkit.run.peers.step_exchange import gather_to_all


def hf_config(spec: ModelSpec, *, seq_len: int) -> PretrainedConfig:
    """The transformers configuration of `spec`; a user's own configuration stays as it is."""
    if spec.path is not None:
        try:
            return AutoConfig.from_pretrained(spec.path, trust_remote_code=False)
        except Exception as error:  # checks of a user's file raise KeyErrors, TypeErrors and others
            raise _not_loaded(spec.path, error) from None
    return AutoConfig.for_model(
        spec.model_type,
        num_hidden_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.ffn_size,
        vocab_size=spec.vocab_size,
        tie_word_embeddings=spec.tied,
        max_position_embeddings=max(spec.max_position_embeddings, seq_len),
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
    )


def build_model(spec: ModelSpec, config: RunConfig, *, documents_apart: bool = False) -> PreTrainedModel:
    """The model in training mode on CPU; the same weights on every rank and under every strategy.

    A folder or hub id that holds weights is fine-tuned; any other model starts from the seed, from weights
    that bf16 can hold, so that runs of every numerics start from the same. The dtype is bf16 for `--numerics
    aligned` and `pure_bf16` (where the master weights start from the same rounding under every engine), else
    fp32. `documents_apart`: batches have position_ids that start again with each document.
    Raises ValueError if the attention kernel is unknown or not installed, or a fused kernel does not fit.
    """
    set_seed(config.seed)
    check_attention(spec, config)
    shape = hf_config(spec, seq_len=config.seq_len)
    attention = transformers_name(config.attn_implementation, shape, documents_apart=documents_apart)
    options = {"attn_implementation": attention, "dtype": torch.float32}
    if has_weights(spec) and config.rehearse is None:
        model = _with_weights(spec.path, options)
    else:
        model = drawn_model(shape, config, options)
    model.config.use_cache = False
    if model.generation_config is not None:
        model.generation_config.use_cache = True  # in the saved model, which will generate
    enable_checkpointing(model, config.gradient_checkpointing, compiled=config.torch_compile)
    use_kernels(
        model,
        loss_kernel=config.loss_kernel,
        norm_kernel=config.norm_kernel,
        mlp_kernel=config.mlp_kernel,
        compiled=config.torch_compile,
    )
    if config.use_liger_kernel:
        use_liger(model)
    if config.fp8 != "none":
        use_fp8(model, config.fp8)
    if config.peft == "qlora":
        quantize(model)
    if config.peft != "none":
        add_adapter(model, config, base=spec.path)
    if config.numerics in ("aligned", "pure_bf16"):
        for param in _whole_params(model):  # not the buffers: RoPE's frequencies in bf16 are another model
            param.data = param.data.bfloat16()
    if config.torch_compile:
        # DDP reduces what a layer's backward gave as one graph; else Dynamo would cut each layer every 25 MB
        torch._dynamo.config.optimize_ddp = False  # private
        for layer in model.model.layers:
            # in place: names in the state dict stay, and every engine wraps the same module
            layer.compile(mode=config.torch_compile_mode)
    return model.train()


def drawn_model(shape: PretrainedConfig, config: RunConfig, options: dict[str, Any]) -> PreTrainedModel:
    """The model with random weights that bf16 can hold, the same for a seed under every strategy.

    Under zero3_init_flag, transformers draws each tensor in the compute dtype, on a GPU if there is one, so
    its numbers differ. Rank 0 then draws the whole model on its CPU, as under every other strategy, and all
    ranks take their pieces of it, tensor by tensor. A rehearsal, which has no losses, keeps its numbers.
    """
    model = AutoModelForCausalLM.from_config(shape, **options)
    draw_again = partial(_draw_apart, seed=config.seed) if config.parity_task else nullcontext
    if len(_whole_params(model)) == len(list(model.parameters())):
        draw_again(model)
        for param in model.parameters():
            param.data = param.data.bfloat16().float()
    elif config.rehearse is None:
        import deepspeed

        whole = None
        if torch.distributed.get_rank() == 0:
            set_seed(config.seed)
            with set_zero3_state():  # not in pieces
                whole = AutoModelForCausalLM.from_config(shape, **options)
            draw_again(whole)
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                if whole is not None:
                    param.data.copy_(whole.get_parameter(name).bfloat16())
        # so that the next random numbers, as of adapters, are the same as under other strategies
        torch.set_rng_state(gather_to_all(torch.get_rng_state())[0])
    return model


@torch.no_grad()
def _draw_apart(model: PreTrainedModel, *, seed: int) -> None:
    """Random weights with which every part of the model matters for the loss, for `--parity_task`.

    With transformers' own (deviation 0.02), attention is nearly uniform and norms do nothing: wrong
    positions, masks or scales would hardly change the loss. Here attention's logits have a deviation of about
    2 (queries and keys of 1.5 each), norms scale each channel by 0.5 to 1.5, and each block adds about as
    much to the residual stream as there is.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    for name, param in model.named_parameters():
        if param.dim() < 2:
            is_bias = name.endswith("bias")
            param.uniform_(-0.1 if is_bias else 0.5, 0.1 if is_bias else 1.5, generator=generator)
        elif any(param is embedding for embedding in embeddings):
            param.normal_(std=param.shape[1] ** -0.5, generator=generator)
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 0.5
            param.normal_(std=gain * param.shape[1] ** -0.5, generator=generator)


def _with_weights(path: str, options: dict[str, Any]) -> PreTrainedModel:
    """The model with its own weights; no code of the folder, the hub or a pickle runs.

    Raises ValueError for weights that can't be read or are incomplete: transformers would draw the rest.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=False, weights_only=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, UnpicklingError, SafetensorError) as error:
        raise _not_loaded(path, error) from None
    if missing := sorted(loading["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"model {path!r} holds no weights for {missing[0]}{more}, which would be random\n"
            "hint: is it a language model, with its head?"
        )
    return model


def _not_loaded(path: str, error: Exception) -> ValueError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ValueError(
        f"can't load model {path!r}: {reason}\nhint: is the folder whole, and its model a Llama?"
    )


def check_attention(spec: ModelSpec, config: RunConfig) -> None:
    """Raises ValueError if the attention kernel is unknown, not installed or not for this architecture."""
    kernel = config.attn_implementation
    if kernel == "flex_attention" and config.rehearse is None and not torch.cuda.is_available():
        raise ValueError(
            "--attn_implementation flex_attention trains on a GPU only: PyTorch has no backward for a CPU\n"
            "hint: sdpa works everywhere"
        )
    shape = hf_config(spec, seq_len=config.seq_len)
    name = transformers_name(kernel, shape)
    try:
        with torch.device("meta"), set_zero3_state():  # the state: not in pieces, even with zero3_init_flag
            AutoModelForCausalLM.from_config(shape, attn_implementation=name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"--attn_implementation {kernel}: {str(error).splitlines()[0]}\n"
            "hint: sdpa works everywhere; flash_attention_2 comes with `pip install flash-attn`"
        ) from None


def _whole_params(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Parameters that zero3_init_flag did not make in pieces; pieces have the dtype of the JSON."""
    return [param for param in model.parameters() if not hasattr(param, "ds_tensor")]
