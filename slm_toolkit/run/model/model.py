"""Builds the Hugging Face model of a ModelSpec, with random or loaded weights, in the numerics' dtype."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import set_seed  # transformers' own imports peft and bitsandbytes, where they are
from safetensors import SafetensorError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import set_zero3_state

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import has_weights
from slm_toolkit.run.kernels.layer_kernels import use_fp8, use_kernels, use_liger
from slm_toolkit.run.model.adapters import add_adapter, quantize
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
    use_kernels(model, config)
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


# Registers attention with transformers: SDPA without building a mask, on the backend of the flag.

SDPA_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}
"values of --attn_implementation; sdpa itself takes the fastest backend that fits"
_ON_CPU = ("sdpa_math", "sdpa_flash")


def transformers_name(kernel: str, config: PretrainedConfig, *, documents_apart: bool = False) -> str:
    """The name by which transformers knows the attention; registers SDPA and its backends under our names.

    If every layer of `config` attends to all earlier tokens, which batches without padding allow,
    transformers gets no mask function: to find out whether it needs a mask, it would read position ids off
    the device in every forward, and the host would wait for the GPU. `documents_apart`: sequences hold
    several documents that must not see each other, so transformers has to find out.
    Raises ValueError if this machine's PyTorch has no such backend for training.
    """
    if kernel != "sdpa" and kernel not in SDPA_BACKENDS:
        return kernel
    if kernel in SDPA_BACKENDS and kernel not in _ON_CPU and not torch.cuda.is_available():
        raise ValueError(f"--attn_implementation {kernel} needs a GPU\nhint: a CPU has {', '.join(_ON_CPU)}")
    if kernel == "sdpa_flash" and documents_apart and torch.cuda.is_available():
        raise ValueError(
            "--attn_implementation sdpa_flash takes no mask on a GPU, which keeps packed documents apart\n"
            "hint: sdpa, or flash_attention_2"
        )
    backend = SDPA_BACKENDS.get(kernel)
    # with "flash" in the name, transformers would look for a package
    name = f"causal_{'sdpa' if backend is None else f'backend_{backend.value}'}"
    if documents_apart or _has_windows(config):
        name = f"masked_{name}"
        AttentionMaskInterface.register(name, sdpa_mask)
    AttentionInterface.register(name, partial(_attention, backend))
    return name


def _has_windows(config: PretrainedConfig) -> bool:
    """Whether some layers see only a part of the sequence."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - {"full_attention"}) or getattr(config, "sliding_window", None) is not None


def _attention(backend: SDPBackend | None, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    held: AbstractContextManager = nullcontext() if backend is None else sdpa_kernel(backend)
    with held:
        return sdpa_attention_forward(*args, **kwargs)


# Activation checkpointing: backward recomputes some decoder layers, or some operators in them.

# torchtitan's policy: https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/activation_checkpoint.py
_MATMULS = ("aten::mm", "aten::addmm", "aten::linear")  # a linear layer: without bias, with, or whole
_ALWAYS_SAVED = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "flash_attn::_flash_attn_forward",
    "flex_attention",
    "_c10d_functional::reduce_scatter_tensor",
)


def enable_checkpointing(model: PreTrainedModel, mode: str, *, compiled: bool) -> None:
    """Let backward recompute activations, as `--gradient_checkpointing` says.

    full: everything in every decoder layer but its input. selective_layer: everything in every second layer,
    the second, the fourth, ... as torchtitan counts. selective_op: in every layer everything but its input
    and the results of attention and of every second matrix product: query, value, gate and down are saved;
    key, output and up are recomputed. (Backward does not need down's result; torchtitan saves it, too.)
    """
    if mode == "none":
        return
    contexts = _contexts_for_compiler if compiled else _contexts
    options = {"context_fn": contexts} if mode == "selective_op" else {}
    for number, layer in enumerate(model.model.layers, start=1):
        if mode != "selective_layer" or number % 2 == 0:
            layer.forward = _checkpointed(layer.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A layer's forward that backward recomputes, inside of torch.compile's and the engine's hooks.

    transformers 5.17 puts its own checkpoint outside of them, where compiled layers can't choose operators
    ("Tensor cached during selective activation checkpoint has been mutated"). This is a function, since
    torch.compile does not look into a partial of `checkpoint`.
    """

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    return checkpointed


def _contexts() -> tuple["_Save", "_Replay"]:
    """Two contexts, for a layer's forward and for its recomputation.

    PyTorch's own pair requires the same operators in both. Under ZeRO-3 a layer's forward also gathers
    parameters, more in one than in the other, and PyTorch's pair fails.
    """
    results: deque[Any] = deque()
    return _Save(results), _Replay(results)


def _contexts_for_compiler() -> tuple[Any, Any]:
    """PyTorch's own pair, the only one from which torch.compile learns what to save."""
    # by whether it is the recomputation, for which torch 2.13 does not call the policy
    is_saved = {False: _policy(), True: _policy()}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = is_saved[context.is_recompute](op)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _policy() -> Callable[[Any], bool]:
    """A function that decides whether to save an operator's result; call it for all operators in order."""
    num_matmuls = 0

    def is_saved(op: Any) -> bool:
        nonlocal num_matmuls
        name = op.name().partition(".")[0]  # without its overload
        if name in _MATMULS:
            num_matmuls += 1
            return num_matmuls % 2 == 1
        return name in _ALWAYS_SAVED

    return is_saved


class _Save(TorchDispatchMode):
    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self.results, self.is_saved = results, _policy()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = op.name().partition(".")[0].endswith("_") and isinstance(args[0], torch.Tensor)
        if changes:  # in place, as DeepSpeed's linear layer adds its bias
            self._keep(args[0])
        result = op(*args, **(kwargs or {}))
        if self.is_saved(op):  # detached, since the tensor itself is about to join autograd's graph
            self.results.append(tree_map_only(torch.Tensor, torch.Tensor.detach, result))
        return result

    def _keep(self, changing: torch.Tensor) -> None:
        """Replace a saved result that is about to change by a copy."""
        memory = changing.untyped_storage()._cdata

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.untyped_storage()._cdata == memory else tensor

        for number, result in enumerate(self.results):
            self.results[number] = tree_map_only(torch.Tensor, kept, result)


class _Replay(TorchDispatchMode):
    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self.results, self.is_saved = results, _policy()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.results.popleft() if self.is_saved(op) else op(*args, **(kwargs or {}))
