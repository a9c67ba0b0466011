"""LossChunks: tokens per chunk of the fused losses, for the kernels and for the closed forms."""

from dataclasses import dataclass

_ELEMENTS = 2**24
"fp32 probabilities per chunk: 2^24 x 4 bytes = 64 MiB keep a GPU busy, and are small compared to the logits"


@dataclass(frozen=True)
class LossChunks:
    """Tokens per chunk; V is the vocabulary, h the hidden size, N the tokens of a micro-step."""

    num_tokens_asked: int | None = None
    "of --loss_chunk_tokens; None: by the rules below"

    def of_logits(self, num_tokens: int, *, vocab_size: int, hidden_size: int) -> int:
        """Return the tokens per chunk of `fused_linear`.

        The logits of a chunk take about the memory of the hidden states, so there are V / h chunks, as in
        Liger Kernel (arXiv 2410.10989, section 3.2). The tokens are rounded up to a power of two for the
        GPU's tiles: V = 32000, h = 768, N = 16384 give 42 chunks of 391 tokens, so 512. The minimum is half
        of _ELEMENTS logits, rounded down to a power of two, because every chunk reads and writes matrices of
        V x h: V = 32000 gives 262 tokens, so 256.
        """
        if self.num_tokens_asked is not None:
            return min(num_tokens, self.num_tokens_asked)
        num_chunks = -(-vocab_size // hidden_size)
        rows = -(-num_tokens // num_chunks)
        at_least = max(1, _ELEMENTS // 2 // vocab_size)
        return min(num_tokens, max(1 << (rows - 1).bit_length(), 1 << (at_least.bit_length() - 1)))

    def of_probabilities(self, num_tokens: int, *, vocab_size: int) -> int:
        """Return the tokens per chunk of `fused_logits`, whose fp32 probabilities exist at the same time."""
        return min(num_tokens, self.num_tokens_asked or max(1, _ELEMENTS // vocab_size))
