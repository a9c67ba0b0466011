"""Tokens per chunk of the fused loss, for the kernels and for the closed forms."""

# fp32 probabilities per chunk: 2^24 x 4 bytes = 64 MiB keep a GPU busy, and are small compared to the
# logits
_ELEMENTS = 2**24
# tokens with which a chunk's matrix products fill a GPU: with 512 tokens and 768 hidden units, the
# gradient of the hidden states has 12 tiles of 256 x 128 for the 132 multiprocessors of an H200
_FULL_WAVES = 4096
# logits of a chunk of so many tokens, at most: 512 MiB in bf16
_MOST_LOGITS = 2**28
# 16 MiB in bf16, small enough for a core's caches: a model of 256 units and a vocabulary of 32,000 takes
# 1.30 s a step with chunks of 256 tokens, 1.48 with 512, 1.57 with 2048 (bench/throughput.py, 2026-11-26)
_LOGITS_ON_CPU = _ELEMENTS // 2


def tokens_of_chunk(num_tokens: int, *, vocab_size: int, hidden_size: int, on_cpu: bool = False) -> int:
    """Return the tokens per chunk of logits, of N tokens in a micro-step.

    Liger's chunks take little memory. But their matrix products may be too small for a GPU, and every chunk
    reads and writes matrices of V x h. So a chunk has at least _FULL_WAVES tokens, or fewer if their logits
    would be more than _MOST_LOGITS: V = 151936 gives 1766 tokens, so 1024, a power of two for the GPU's
    tiles. On a CPU it has at least the tokens of _LOGITS_ON_CPU: V = 32000 gives 256.
    """
    as_in_liger = tokens_of_ligers_chunk(num_tokens, vocab_size=vocab_size, hidden_size=hidden_size)
    full_waves = min(_FULL_WAVES, _MOST_LOGITS // vocab_size)
    at_least = max(1, _LOGITS_ON_CPU // vocab_size if on_cpu else full_waves)
    return min(num_tokens, max(as_in_liger, 1 << (at_least.bit_length() - 1)))


def tokens_of_probabilities(num_tokens: int, *, vocab_size: int) -> int:
    """Return the tokens whose fp32 probabilities exist at the same time."""
    return min(num_tokens, max(1, _ELEMENTS // vocab_size))


def tokens_of_ligers_chunk(num_tokens: int, *, vocab_size: int, hidden_size: int) -> int:
    """Return the tokens of a chunk in Liger Kernel (arXiv 2410.10989, section 3.2), a power of two.

    With V / h chunks, a chunk's logits are as large as the hidden states: V = 32000, h = 768, N = 2^18 give
    42 chunks of 6242 tokens, so 8192.
    """
    rows = -(-num_tokens // -(-vocab_size // hidden_size))
    return 1 << (rows - 1).bit_length()
