"""Tokens that the fused losses take at once."""

from slm_toolkit.config.loss_chunks import LossChunks
from slm_toolkit.config.run_config import RunConfig


def test_chunks_of_logits_fill_a_gpu_or_are_as_large_as_the_hidden_states() -> None:
    chunk_of = LossChunks().of_logits
    # V / h = 41.7, so 42 chunks; 2^18 / 42 = 6241.5; the next power of two is 8192
    assert chunk_of(2**18, vocab_size=32_000, hidden_size=768) == 8192
    # but at least 4096 tokens: 16384 / 42 = 391; or all there are
    assert chunk_of(16_384, vocab_size=32_000, hidden_size=768) == 4096
    assert chunk_of(2048, vocab_size=32_000, hidden_size=256) == 2048
    # or as many as have 2^28 logits: 2^28 / 151936 = 1766.8, rounded down to 1024
    assert chunk_of(16_384, vocab_size=151_936, hidden_size=896) == 1024
    assert chunk_of(10, vocab_size=2**40, hidden_size=64) == 1


def test_chunks_on_a_cpu_fit_its_caches() -> None:
    chunk_of = LossChunks(on_cpu=True).of_logits
    assert chunk_of(2048, vocab_size=32_000, hidden_size=256) == 256  # 2^23 / 32000 = 262, rounded down
    assert chunk_of(2**18, vocab_size=32_000, hidden_size=768) == 8192  # as large as the hidden states
    assert chunk_of(10, vocab_size=2**40, hidden_size=64) == 1


def test_chunks_of_probabilities_take_64_mib_in_fp32() -> None:
    assert LossChunks().of_probabilities(10_000, vocab_size=32_000) == 524  # 2^24 / 32000 = 524.3
    assert LossChunks().of_probabilities(100, vocab_size=32_000) == 100


def test_a_number_that_is_asked_for_holds_for_both() -> None:
    chunks = RunConfig(loss_kernel="fused_linear", loss_chunk_tokens=64).loss_chunks
    assert chunks.of_logits(2048, vocab_size=32_000, hidden_size=256) == 64
    assert chunks.of_probabilities(2048, vocab_size=32_000) == 64
    assert chunks.of_logits(10, vocab_size=32_000, hidden_size=256) == 10


def test_transformers_loss_has_no_chunks() -> None:
    assert RunConfig(loss_chunk_tokens=64).problems() == [
        "--loss_chunk_tokens 64 with --loss_kernel hf: it has no chunks"
    ]
