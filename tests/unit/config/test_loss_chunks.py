"""Tokens that the fused losses take at once."""

from functools import partial

from slm_toolkit.config.loss_chunks import tokens_of_chunk, tokens_of_probabilities


def test_chunks_of_logits_fill_a_gpu_or_are_as_large_as_the_hidden_states() -> None:
    chunk_of = tokens_of_chunk
    # V / h = 41.7, so 42 chunks; 2^18 / 42 = 6241.5; the next power of two is 8192
    assert chunk_of(2**18, vocab_size=32_000, hidden_size=768) == 8192
    # but at least 4096 tokens: 16384 / 42 = 391; or all there are
    assert chunk_of(16_384, vocab_size=32_000, hidden_size=768) == 4096
    assert chunk_of(2048, vocab_size=32_000, hidden_size=256) == 2048
    # or as many as have 2^28 logits: 2^28 / 151936 = 1766.8, rounded down to 1024
    assert chunk_of(16_384, vocab_size=151_936, hidden_size=896) == 1024
    assert chunk_of(10, vocab_size=2**40, hidden_size=64) == 1


def test_chunks_on_a_cpu_fit_its_caches() -> None:
    chunk_of = partial(tokens_of_chunk, on_cpu=True)
    assert chunk_of(2048, vocab_size=32_000, hidden_size=256) == 256  # 2^23 / 32000 = 262, rounded down
    assert chunk_of(2**18, vocab_size=32_000, hidden_size=768) == 8192  # as large as the hidden states
    assert chunk_of(10, vocab_size=2**40, hidden_size=64) == 1


def test_chunks_of_probabilities_take_64_mib_in_fp32() -> None:
    assert tokens_of_probabilities(10_000, vocab_size=32_000) == 524  # 2^24 / 32000 = 524.3
    assert tokens_of_probabilities(100, vocab_size=32_000) == 100
