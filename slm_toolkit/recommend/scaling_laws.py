"""The loss that a published scaling law predicts from a model size and a number of tokens.

L(N, D) = E + A / N^alpha + B / D^beta: N counts all parameters with embeddings, D tokens that are seen once.
The law was fitted to its own models, data and tokenizer, and its losses (nats per token of that tokenizer)
are valid for these. On other data the level of the loss differs; comparisons of two model sizes or token
counts are more reliable.
"""

import math

LAW = "besiroglu"  # et al. 2024, arXiv 2404.10102, by epoch-research/analyzing-chinchilla @9225883
_E = 1.81686
_A, _ALPHA = 482.006, 0.34781
_B, _BETA = 2085.434, 0.36585


def loss(num_params: float, num_tokens: float) -> float:
    """Return L(N, D) in nats per token."""
    return _E + _A / num_params**_ALPHA + _B / num_tokens**_BETA


def compute_optimal_tokens(num_params: float) -> float:
    """Return the D for which N has the lowest loss among all (N, D) with the same FLOPs, C = 6 N D.

    There N dL/dN = D dL/dD, so alpha A / N^alpha = beta B / D^beta.
    """
    return (_BETA * _B / (_ALPHA * _A) * num_params**_ALPHA) ** (1 / _BETA)


def tokens_for_loss(num_params: float, target_loss: float) -> float:
    """Return the D at which L(N, D) is `target_loss`; raise ValueError if no number of tokens reaches it."""
    lowest = loss(num_params, math.inf)
    if target_loss <= lowest:
        raise ValueError(
            f"{num_params:.3g} parameters never reach a loss of {target_loss:g} by the law {LAW}\n"
            f"hint: infinite tokens give {lowest:.4f}; choose a higher loss or a larger model"
        )
    return (_B / (target_loss - lowest)) ** (1 / _BETA)
