"""Token sequences generated from a seed, the same on every machine."""

import numpy as np
import torch
from torch.utils.data import Dataset


class MarkovTokens(Dataset):
    """Sequences of a Markov chain over the whole vocabulary, the same for the same seed everywhere.

    With probability 0.5 the next token is the present one's fixed successor, else one drawn from a Zipf law.
    A model first learns how often each token comes, then who follows whom, so that losses fall from the
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
        places = np.searchsorted(
            self.cumulative, rng.random(self.seq_len)
        )  # where on the cycle a drawn token sits
        last_draw = np.maximum.accumulate(np.where(drawn, np.arange(self.seq_len), 0))
        places = places[last_draw] + np.arange(self.seq_len) - last_draw
        return {"input_ids": torch.from_numpy(self.cycle[places % len(self.cycle)])}
