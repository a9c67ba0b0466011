"""Tokens that the fused losses take at once."""

from slm_toolkit.config.loss_chunks import LossChunks
from slm_toolkit.config.run_config import RunConfig


def test_chunks_of_logits_are_about_as_large_as_the_hidden_states() -> None:
    chunk_of = LossChunks().of_logits
    # V / h = 41.7, so 42 chunks; 16384 / 42 = 390.1, so 391 rows; the next power of two is 512
    assert chunk_of(16_384, vocab_size=32_000, hidden_size=768) == 512
    assert chunk_of(2**17, vocab_size=32_000, hidden_size=768) == 4096  # 131072 / 42 = 3121
    # but no fewer than hold 2^23 logits: 2^23 / 32000 = 262.1; 2^23 / 151936 = 55.2; or all there are
    assert chunk_of(2048, vocab_size=32_000, hidden_size=256) == 256
    assert chunk_of(1000, vocab_size=151_936, hidden_size=64) == 32
    assert chunk_of(10, vocab_size=151_936, hidden_size=64) == 10


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
