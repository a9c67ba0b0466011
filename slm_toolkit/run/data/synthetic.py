"""Makes token sequences from a seed, the same on every machine."""

import numpy as np
import torch
from torch.utils.data import Dataset

from slm_toolkit.run.kernels.loss_kernels import IGNORE_INDEX


class MarkovTokens(Dataset):
    """Sequences of a Markov chain over the whole vocabulary, the same for the same seed everywhere.

    With probability 0.5 the next token is the current one's fixed successor, else one drawn from a Zipf law.
    A model first learns how often each token comes, then which token follows which, so losses fall from the
    first steps on.
    Item i is (seq_len,) int64 and depends on seed, i and vocabulary only.
    """

    FOLLOW = 0.5

    def __init__(
        self, *, vocab_size: int, seq_len: int, num_sequences: int, seed: int, first: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.cycle = rng.permutation(vocab_size)  # the successor of a token is the next one on this cycle
        law = 1.0 / np.arange(1, vocab_size + 1)
        self.cumulative = np.cumsum(law / law.sum())
        self.seq_len, self.num_sequences, self.seed, self.first = seq_len, num_sequences, seed, first

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([self.seed, 1, self.first + index])
        drawn = rng.random(self.seq_len) >= self.FOLLOW
        drawn[0] = True
        # the place of each drawn token on the cycle
        places = np.searchsorted(self.cumulative, rng.random(self.seq_len))
        last_draw = np.maximum.accumulate(np.where(drawn, np.arange(self.seq_len), 0))
        places = places[last_draw] + np.arange(self.seq_len) - last_draw
        return {"input_ids": torch.from_numpy(self.cycle[places % len(self.cycle)])}


class CopiedPhrases(Dataset):
    """Documents of random tokens with repeated phrases, which only attention to their first copy predicts.

    Item i depends on seed, i, vocabulary and length only. input_ids, labels and position_ids are (seq_len,)
    int64. A sequence holds several documents of different lengths; position_ids count from 0 in each, and the
    first token of each has no label. The first half of a document is random, the second half copies pieces of
    the first half. So ranks and micro-steps have different numbers of labels.
    """

    def __init__(
        self, *, vocab_size: int, seq_len: int, num_sequences: int, seed: int, first: int = 0
    ) -> None:
        self.vocab_size, self.seq_len, self.num_sequences = vocab_size, seq_len, num_sequences
        self.seed, self.first = seed, first

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([self.seed, 2, self.first + index])
        longest = max(2, self.seq_len // 2)
        tokens, places = [], []
        while len(tokens) < self.seq_len:
            length = min(int(rng.integers(max(1, longest // 4), longest + 1)), self.seq_len - len(tokens))
            tokens += self._document(length, rng)
            places += range(length)
        labels = [IGNORE_INDEX if place == 0 else token for token, place in zip(tokens, places, strict=True)]
        columns = {"input_ids": tokens, "labels": labels, "position_ids": places}
        return {name: torch.tensor(values) for name, values in columns.items()}

    def _document(self, length: int, rng: np.random.Generator) -> list[int]:
        half = -(-length // 2)
        tokens = rng.integers(self.vocab_size, size=half).tolist()
        while len(tokens) < length:
            begin = int(rng.integers(half))
            tokens += tokens[begin : min(begin + 8, half)]
        return tokens[:length]
