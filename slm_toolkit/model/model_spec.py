"""ModelSpec: the shape of a language model, its parameter counts and its FLOPs, without torch.

The paper is Ashkboos et al., "Computational Bottlenecks of Training Small-scale Large Language Models"
(PMLR v262, arXiv 2410.19456); its appendix B gives the family and the fit behind it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from slm_toolkit.hardware.gpus import Gpu

# of ByT5's tokenizer: 256 bytes, 3 special tokens and 125 that nothing uses
NUM_BYTE_TOKENS = 384


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only model. Models with RMSNorm, a gated FFN and RoPE can be trained.

    gated_ffn, layer_norm and learned_positions describe GPT-2, of which there are published speeds.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool = False
    "the input embedding and the output head share one matrix"
    qkv_bias: bool = False
    "query, key and value projections carry a bias (Qwen2, Llama's attention_bias)"
    model_type: str = "llama"
    "transformers' name of the architecture"
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    path: str | None = None
    "a local folder or hub id, whose weights are loaded if there are any, or a config.json"
    gated_ffn: bool = True
    "True: three matrices, down(silu(gate) * up); False: two matrices with a GELU between them"
    layer_norm: bool = False
    "LayerNorm with weight and bias instead of RMSNorm"
    learned_positions: int = 0
    "rows of the learned position embedding; 0: RoPE, ALiBi or no positions"
    output_bias: bool = False
    "the attention's output projection carries a bias (Llama's attention_bias)"
    ffn_bias: bool = False
    "every projection of the feed-forward carries a bias (Llama's mlp_bias)"
    sliding_window: int | None = None
    "tokens that the layers with a window attend to; None: all layers attend to the whole sequence"
    num_window_layers: int = 0
    "layers with a window"
    hidden_act: str = "silu"
    attention_dropout: float = 0.0
    norms: str = "before"
    "where a layer's norms are: before attention and FFN, after each of them (OLMo 2), or both (Gemma)"
    qk_norm: str = "none"
    "norms of queries and keys: none, head (over each head: Qwen3, Gemma 3) or all_heads (OLMo 2)"
    norm_scales_in_fp32: bool = False
    "RMSNorm multiplies by its weight before it rounds to the input's dtype (Gemma, OLMo 2), not after"
    fused_projections: bool = False
    "one matrix for query, key and value, and one for gate and up (Phi-3)"
    attention_softcap: bool = False
    "attention logits are capped with tanh (Gemma 2)"
    after_head: str = "nothing"
    "what changes the head's logits before the loss: nothing, softcap (Gemma 2) or scaling (Granite)"
    hub_id: str | None = None
    "the published model of a preset's shape, with weights and a tokenizer"

    @property
    def matmul_params_per_layer(self) -> int:
        """Weights of one layer's matrix products."""
        return sum(tensor.num_elements for tensor in layer_tensors(self) if tensor.is_matrix)

    @property
    def num_ffn_matrices(self) -> int:
        return 3 if self.gated_ffn else 2

    @property
    def params_per_layer(self) -> int:
        return sum(tensor.num_elements for tensor in layer_tensors(self))

    @property
    def norm_params(self) -> int:
        return 2 * self.hidden_size if self.layer_norm else self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Parameters of one vocabulary matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters, a tied matrix counted once."""
        vocabulary = (1 if self.tied else 2) * self.embedding_params
        positions = self.learned_positions * self.hidden_size
        layers = self.num_layers * self.params_per_layer
        return vocabulary + positions + layers + self.norm_params

    @property
    def largest_layer_params(self) -> int:
        """Parameters of the largest single module, as DeepSpeed's ZeRO-3 estimator means it."""
        projection = self.hidden_size * max(self.ffn_size, self.num_heads * self.head_dim)
        return max(self.embedding_params, projection)


@dataclass(frozen=True)
class LayerTensor:
    """A parameter of a decoder layer."""

    name: str
    "of its module, as in transformers"
    num_elements: int
    is_matrix: bool = True


@lru_cache(maxsize=4096)
def layer_tensors(spec: ModelSpec) -> tuple[LayerTensor, ...]:
    """Return the parameters of one decoder layer in transformers' order."""
    q, v = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors = []
    for name, (inputs, outputs) in hidden_matrices(spec).items():
        tensors.append(LayerTensor(name, inputs * outputs))
        if _has_bias(spec, name):
            tensors.append(LayerTensor(name, outputs, is_matrix=False))
        if name == "o_proj" and spec.qk_norm != "none":
            widths = (q, v) if spec.qk_norm == "all_heads" else (spec.head_dim, spec.head_dim)
            norms = zip(("q_norm", "k_norm"), widths, strict=True)
            tensors += [LayerTensor(norm, width, is_matrix=False) for norm, width in norms]
    norms = {
        "before": ("input_layernorm", "post_attention_layernorm"),
        "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    }
    norms["both"] = (*norms["before"], "pre_feedforward_layernorm", "post_feedforward_layernorm")
    tensors += [LayerTensor(name, spec.norm_params, is_matrix=False) for name in norms[spec.norms]]
    return tuple(tensors)


def hidden_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each matrix of a layer."""
    h, f = spec.hidden_size, spec.ffn_size
    q, v = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.fused_projections:
        return {"o_proj": (q, h), "qkv_proj": (h, q + 2 * v), "gate_up_proj": (h, 2 * f), "down_proj": (f, h)}
    gate = {"gate_proj": (h, f)} if spec.gated_ffn else {}
    attention = {"q_proj": (h, q), "k_proj": (h, v), "v_proj": (h, v), "o_proj": (q, h)}
    return attention | gate | {"up_proj": (h, f), "down_proj": (f, h)}


def _has_bias(spec: ModelSpec, name: str) -> bool:
    if name in ("q_proj", "k_proj", "v_proj"):
        return spec.qkv_bias
    return spec.output_bias if name == "o_proj" else spec.ffn_bias


def _paper(name: str, num_layers: int, hidden_size: int, ffn_size: int) -> ModelSpec:
    """A model of the paper's family: vocabulary 32000, untied, full attention, heads 64 wide."""
    heads = hidden_size // 64
    return ModelSpec(name, num_layers, hidden_size, heads, heads, 64, ffn_size, 32_000)


def _byte_level(name: str, num_layers: int, hidden_size: int, ffn_size: int) -> ModelSpec:
    """A model small enough for a CPU."""
    heads = hidden_size // 64
    shape = (num_layers, hidden_size, heads, heads, 64, ffn_size)
    return ModelSpec(name, *shape, NUM_BYTE_TOKENS)


PRESETS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        # the paper, appendix B, table 2; heads and FFN recovered from its printed parameter counts
        _paper("slm-100m", 9, 832, 2332),  # the paper prints 864; its 130,569,920 parameters say 832
        _paper("slm-500m", 15, 1536, 4147),
        _paper("slm-1b", 19, 1920, 5184),
        _paper("slm-2b", 24, 2496, 6739),
        # the paper's sizes with widths in multiples of 128
        _paper("slm-100m-hw", 9, 896, 2432),
        _paper("slm-500m-hw", 15, 1536, 4096),
        _paper("slm-1b-hw", 19, 1920, 5120),
        _paper("slm-2b-hw", 24, 2560, 6912),
        _byte_level("slm-1m", 4, 128, 384),  # 951,424 parameters
        _byte_level("slm-3m", 4, 256, 640),  # 3,213,568
        _byte_level("slm-10m", 8, 320, 864),  # 10,163,520
        _byte_level("slm-30m", 10, 512, 1344),  # 31,533,568
        # published shapes, from litgpt config.py @26857050fe
        ModelSpec(
            *("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49_152, True),
            max_position_embeddings=8192,
            rope_theta=100_000.0,
            hub_id="HuggingFaceTB/SmolLM2-135M",
        ),
        ModelSpec(
            *("smollm2-360m", 32, 960, 15, 5, 64, 2560, 49_152, True),
            max_position_embeddings=8192,
            rope_theta=100_000.0,
            hub_id="HuggingFaceTB/SmolLM2-360M",
        ),
        ModelSpec(
            *("smollm2-1.7b", 24, 2048, 32, 32, 64, 8192, 49_152, True),
            max_position_embeddings=8192,
            rope_theta=130_000.0,
            hub_id="HuggingFaceTB/SmolLM2-1.7B",
        ),
        ModelSpec(
            *("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32_000),
            hub_id="TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        ),
        ModelSpec(
            *("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, True),
            max_position_embeddings=131_072,
            rope_theta=500_000.0,
            hub_id="meta-llama/Llama-3.2-1B",
        ),
        ModelSpec(
            *("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151_936, True, True, "qwen2"),
            max_position_embeddings=32_768,
            rope_theta=1_000_000.0,
            hub_id="Qwen/Qwen2.5-0.5B",
        ),
        ModelSpec(
            *("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151_936, True, True, "qwen2"),
            max_position_embeddings=32_768,
            rope_theta=1_000_000.0,
            hub_id="Qwen/Qwen2.5-1.5B",
        ),
    )
}

SMALLEST_FIT_BILLIONS, LARGEST_FIT_BILLIONS = 0.05, 100.0


def fitted_hidden_size(billions: float) -> float:
    """Return the fit of figure 5 for the hidden size."""
    return 1951.37 * billions**0.353


def fitted_num_layers(billions: float) -> float:
    """Return the fit of figure 5 for the number of layers."""
    return 18.93 * billions**0.318


def spec_from_size(billions: float, name: str) -> ModelSpec:
    """Return a model of the paper's family with any nominal size, by the fit of appendix B (figure 5).

    hidden = 1951.37 x^0.353 and layers = 18.93 x^0.318, x in billions. Layers are rounded. The width is the
    nearest multiple of 96; the FFN is int(2.7 x width). Heads are 64 wide: the hidden size is then rounded
    down to a multiple of 64. As in the paper, a small model's nominal size excludes its vocabulary matrices.
    """
    if not SMALLEST_FIT_BILLIONS <= billions <= LARGEST_FIT_BILLIONS:
        raise ValueError(
            f"model {name!r}: the paper's fit covers "
            f"{SMALLEST_FIT_BILLIONS:g}b to {LARGEST_FIT_BILLIONS:g}b\n"
            f"hint: smaller models are {', '.join(small_models())}"
        )
    width = 96 * round(fitted_hidden_size(billions) / 96)
    num_layers = round(fitted_num_layers(billions))
    return _paper(name, num_layers, 64 * (width // 64), int(2.7 * width))


def small_models() -> list[str]:
    """Return the names of the byte-level models, which a CPU trains in seconds."""
    return [spec.name for spec in PRESETS.values() if spec.vocab_size == 384]


# elements to which widths are padded or rounded: the edge of a tile; tensor cores need multiples of 8
ALIGNED_TO = 64


def padded_spec(spec: ModelSpec) -> ModelSpec:
    """Return the shape that `--pad_widths` gives a model: FFN and vocabulary in multiples of 64."""
    ffn, vocabulary = (-(-width // ALIGNED_TO) * ALIGNED_TO for width in (spec.ffn_size, spec.vocab_size))
    return replace(spec, ffn_size=ffn, vocab_size=vocabulary)


# Training FLOPs per token, and MFU.


def flops_per_token(spec: ModelSpec, *, seq_len: int, adapter_params: int | None = None) -> float:
    """Return FLOPs of one token's forward and backward, 6 N + 12 L H S (PaLM, arXiv 2204.02311, appendix B).

    N counts the weights of matrix products: the output head is included, the input embedding is not. H is the
    width of all heads together. The attention term counts the whole square, not its causal half.
    Recomputation is not counted: it is work without progress. With `adapter_params`, the N weights are frozen
    and need no weight gradient: 4 N + 6 N_adapters + 12 L H S.
    """
    attention = 12.0 * spec.num_layers * spec.num_heads * spec.head_dim * seq_len
    return flops_per_token_without_attention(spec, adapter_params=adapter_params) + attention


def flops_per_token_without_attention(spec: ModelSpec, *, adapter_params: int | None = None) -> float:
    """Return 6 N, with the same N but no attention term (Kaplan et al., arXiv 2001.08361, section 2.1).

    With frozen weights: 4 N + 6 N_adapters, because forward takes 2 N and activation gradients 2 N.
    """
    matmul_params = spec.num_layers * spec.matmul_params_per_layer + spec.embedding_params  # the head
    if adapter_params is None:
        return 6.0 * matmul_params
    return 4.0 * matmul_params + 6.0 * adapter_params


def model_flops_utilization(
    spec: ModelSpec,
    *,
    seq_len: int,
    gpu: Gpu,
    tokens_per_second_per_gpu: float,
    adapter_params: int | None = None,
) -> float:
    """Return MFU by PaLM's convention: a fraction of the dense bf16 peak, without recomputation."""
    per_token = flops_per_token(spec, seq_len=seq_len, adapter_params=adapter_params)
    flops = per_token * tokens_per_second_per_gpu
    return flops / gpu.dense_bf16_flops_per_second
