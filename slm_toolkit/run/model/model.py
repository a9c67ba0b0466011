"""Build the Hugging Face model of a ModelSpec, with random or loaded weights, in the dtype of --numerics."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import set_seed  # set_seed of transformers also imports peft and bitsandbytes
from safetensors import SafetensorError
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
from transformers.modeling_utils import set_zero3_state

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import has_weights
from slm_toolkit.run.kernels.layer_kernels import decoder_layers, use_fp8, use_kernels
from slm_toolkit.run.model.adapters import add_adapter, quantize
from slm_toolkit.run.model.padding import pad_widths
from slm_toolkit.run.peers.step_exchange import gather_to_all


def hf_config(spec: ModelSpec, *, seq_len: int) -> PretrainedConfig:
    """Return the transformers configuration of `spec`; a user's own configuration stays unchanged."""
    if spec.path is not None:
        try:
            return AutoConfig.from_pretrained(spec.path, trust_remote_code=False)
        except Exception as error:  # an invalid config.json raises KeyError, TypeError and others
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


_DTYPES = {"aligned": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16}
"of the module's parameters, by --numerics; fp32 otherwise"


def build_model(
    spec: ModelSpec,
    config: RunConfig,
    *,
    documents_apart: bool = False,
) -> PreTrainedModel:
    """Return the model in training mode on CPU, with the same weights on every rank and under every strategy.

    A folder or hub id with weights is fine-tuned. Any other model gets random weights from the seed, rounded
    to bf16, so that runs start from the same weights whatever their numerics. The dtype is bf16 for
    `--numerics aligned` and `pure_bf16` and fp16 for `fp16` (so master weights start from the same rounding
    under every engine), else fp32. `documents_apart`: batches have position_ids that restart with each
    document.

    Raises ValueError if the attention kernel is unknown or not installed, or if a fused kernel does not fit.
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
        model.generation_config.use_cache = True  # the saved model will generate text
    if config.pad_widths:
        pad_widths(model, spec)
    enable_checkpointing(model, config.gradient_checkpointing, compiled=config.compiles)
    use_kernels(model, config)
    if config.fp8 != "none":
        use_fp8(model, config)
    if config.peft == "qlora":
        quantize(model)
    if config.peft != "none":
        add_adapter(model, config, base=spec.path)
    dtype = _DTYPES.get(config.numerics)
    if dtype is not None:
        # only parameters: rounding RoPE's frequencies, which are a buffer, would change the model
        for param in _whole_params(model):
            param.data = param.data.to(dtype)
    if config.compiles:
        # one graph per layer's backward under DDP; by default Dynamo splits it at every 25 MB bucket
        torch._dynamo.config.optimize_ddp = False  # private
        for layer in decoder_layers(model):
            # compile in place: state dict names stay the same, and every engine wraps the same module
            layer.compile(mode="reduce-overhead" if config.records_graphs else "default")
    return model.train()


def drawn_model(shape: PretrainedConfig, config: RunConfig, options: dict[str, Any]) -> PreTrainedModel:
    """Return the model with random weights rounded to bf16, equal under every strategy for the same seed.

    Under zero3_init_flag, transformers draws each tensor in the compute dtype, on a GPU if there is one, so
    the weights differ. Rank 0 therefore draws the whole model again on its CPU, as other strategies do, and
    all ranks copy their shards of each tensor. A rehearsal has no losses, so it keeps the sharded weights.
    """
    model = AutoModelForCausalLM.from_config(shape, **options)
    draw_again = partial(_draw_sensitive, seed=config.seed) if config.parity else nullcontext
    if len(_whole_params(model)) == len(list(model.parameters())):
        draw_again(model)
        for param in model.parameters():
            param.data = param.data.bfloat16().float()
    elif config.rehearse is None:
        import deepspeed

        whole = None
        if torch.distributed.get_rank() == 0:
            set_seed(config.seed)
            with set_zero3_state():  # turns sharding off
                whole = AutoModelForCausalLM.from_config(shape, **options)
            draw_again(whole)
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                if whole is not None:
                    param.data.copy_(whole.get_parameter(name).bfloat16())
        # the next random numbers (of adapters, for example) must be the same as under other strategies
        torch.set_rng_state(gather_to_all(torch.get_rng_state())[0])
    return model


@torch.no_grad()
def _draw_sensitive(model: PreTrainedModel, *, seed: int) -> None:
    """Draw weights with which an error in any part of the model changes the loss, for `--parity`.

    With transformers' weights (standard deviation 0.02), attention is nearly uniform and norms do nothing.
    Wrong positions, masks or scales would hardly change the loss. Here the attention logits have a standard
    deviation of about 2 (queries and keys 1.5 each). Norms scale each channel by 0.5 to 1.5. Each block's
    output is about as large as its input, the residual stream.
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
    """Load the model with its weights. No code from the folder, the hub or a pickle is executed.

    Raises ValueError if weights can't be read or are missing; transformers would draw missing ones at random.
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
            f"model {path!r} has no weights for {missing[0]}{more}; they would be random\n"
            "hint: use a causal language model that was saved with its head"
        )
    return model


def _not_loaded(path: str, error: Exception) -> ValueError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ValueError(
        f"can't load model {path!r}: {reason}\nhint: the folder needs all files of a causal language model"
    )


def check_attention(spec: ModelSpec, config: RunConfig) -> None:
    """Raise ValueError if the attention kernel is unknown, not installed or not for this architecture."""
    kernel = config.attn_implementation
    if kernel == "flex_attention" and config.rehearse is None and not torch.cuda.is_available():
        raise ValueError(
            "--attn_implementation flex_attention needs a GPU: PyTorch has no backward for it on a CPU\n"
            "hint: sdpa works everywhere"
        )
    shape = hf_config(spec, seq_len=config.seq_len)
    name = transformers_name(kernel, shape)
    try:
        with torch.device("meta"), set_zero3_state():  # turns sharding off, even with zero3_init_flag
            AutoModelForCausalLM.from_config(shape, attn_implementation=name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"--attn_implementation {kernel}: {str(error).splitlines()[0]}\n"
            "hint: sdpa works everywhere; flash_attention_2 needs `pip install flash-attn`"
        ) from None


def _whole_params(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Return parameters that zero3_init_flag did not shard; sharded ones already have the JSON's dtype."""
    return [param for param in model.parameters() if not hasattr(param, "ds_tensor")]


def transformers_name(kernel: str, config: PretrainedConfig, *, documents_apart: bool = False) -> str:
    """Return the name by which transformers has the attention kernel; register our own form of `sdpa`.

    Ours has no mask function: it would read position ids from the device in every forward, and the host
    would wait for the GPU. It is used if every layer of `config` attends to all earlier tokens; batches
    have no padding. `documents_apart`: sequences have several documents that must not see each other.
    """
    if kernel != "sdpa" or documents_apart or _has_windows(config):
        return kernel
    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return "causal_sdpa"


def _has_windows(config: PretrainedConfig) -> bool:
    """Return True if some layers attend only to a part of the sequence."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - {"full_attention"}) or getattr(config, "sliding_window", None) is not None


# Activation checkpointing: backward recomputes some decoder layers, or some of their operators.

# torchtitan's policy: https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/activation_checkpoint.py
_MATMULS = ("aten::mm", "aten::addmm", "aten::linear")  # linear layers: without bias, with bias, undecomposed
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
    """Make backward recompute activations, according to `--gradient_checkpointing`.

    full: save only the input of each decoder layer. selective_layer: do so in every second layer only (the
    second, the fourth, ...), as in torchtitan. selective_op: in every layer, save the layer's input, the
    result of attention and the results of every second matrix product (query, value, gate and down).
    Recompute the rest, such as key, output and up. (Backward does not need down's result, but torchtitan
    saves it, too.)
    """
    if mode == "none":
        return
    contexts = _contexts_for_compiler if compiled else _contexts
    options = {"context_fn": contexts} if mode == "selective_op" else {}
    for number, layer in enumerate(decoder_layers(model), start=1):
        if mode != "selective_layer" or number % 2 == 0:
            layer.forward = _checkpointed(layer.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return a layer's forward that backward recomputes, inside the hooks of torch.compile and the engine.

    transformers 5.17 checkpoints outside these hooks, and compiled layers then can't choose operators
    ("Tensor cached during selective activation checkpoint has been mutated"). The result is a function,
    because torch.compile can't trace a partial of `checkpoint`.
    """

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    return checkpointed


def _contexts() -> tuple["_Save", "_Replay"]:
    """Return two contexts, for a layer's forward and for its recomputation.

    PyTorch's pair of contexts requires the same operators in both passes. Under ZeRO-3, the two passes gather
    different numbers of parameters, so PyTorch's pair fails.
    """
    results: deque[Any] = deque()
    return _Save(results), _Replay(results)


def _contexts_for_compiler() -> tuple[Any, Any]:
    """Return PyTorch's own pair of contexts, the only kind that torch.compile supports."""
    # one policy for forward, one for recomputation (for which torch 2.13 does not call the policy)
    is_saved = {False: _policy(), True: _policy()}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = is_saved[context.is_recompute](op)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _policy() -> Callable[[Any], bool]:
    """Return a function that decides whether to save an operator's result; it counts, so call it in order."""
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
        is_in_place = op.name().partition(".")[0].endswith("_") and isinstance(args[0], torch.Tensor)
        if is_in_place:  # DeepSpeed's linear layer adds its bias in place, for example
            self._copy_saved(args[0])
        result = op(*args, **(kwargs or {}))
        if self.is_saved(op):  # detach, because autograd is about to track the tensor itself
            self.results.append(tree_map_only(torch.Tensor, torch.Tensor.detach, result))
        return result

    def _copy_saved(self, changing: torch.Tensor) -> None:
        """Copy saved results that share memory with `changing`, which is about to be overwritten."""
        memory = changing.untyped_storage()._cdata

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.untyped_storage()._cdata == memory else tensor

        for number, result in enumerate(self.results):
            self.results[number] = tree_map_only(torch.Tensor, copied, result)


class _Replay(TorchDispatchMode):
    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self.results, self.is_saved = results, _policy()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.results.popleft() if self.is_saved(op) else op(*args, **(kwargs or {}))
