"""LossChunks: how many tokens the fused losses take at once, for the kernels and for the closed forms."""

from dataclasses import dataclass

_ELEMENTS = 2**24
"of fp32 probabilities at once: 2^24 x 4 bytes = 64 MiB, large enough to keep a GPU busy, small beside logits"


@dataclass(frozen=True)
class LossChunks:
    """Tokens per chunk; V is the vocabulary, h the hidden size, N the tokens of a micro-step."""

    num_tokens_asked: int | None = None
    "of any chunk; None: by the rules below"

    def of_logits(self, num_tokens: int, *, vocab_size: int, hidden_size: int) -> int:
        """Tokens whose logits `fused_linear` makes at once: those take about the hidden states' memory.

        That many chunks are V / h, as in Liger Kernel (arXiv 2410.10989, section 3.2). Rounded up to a power
        of two, for the GPU's tiles: V = 32000, h = 768, N = 16384 give 42 chunks, so 391 rows, so 512. But no
        fewer than have half of _ELEMENTS logits, rounded down: every chunk reads and writes matrices of
        V x h, which a few rows don't pay for; V = 32000 gives 262, so 256.
        """
        if self.num_tokens_asked is not None:
            return min(num_tokens, self.num_tokens_asked)
        num_chunks = -(-vocab_size // hidden_size)
        rows = -(-num_tokens // num_chunks)
        at_least = max(1, _ELEMENTS // 2 // vocab_size)
        return min(num_tokens, max(1 << (rows - 1).bit_length(), 1 << (at_least.bit_length() - 1)))

    def of_probabilities(self, num_tokens: int, *, vocab_size: int) -> int:
        """Tokens whose fp32 probabilities are made at once from logits that are there."""
        return min(num_tokens, self.num_tokens_asked or max(1, _ELEMENTS // vocab_size))
