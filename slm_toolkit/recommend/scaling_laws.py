"""The loss that published scaling laws predict from a model size and a number of tokens.

Each law was fitted to its own models, data and tokenizer, and its losses (nats per token of that tokenizer)
are valid for these. On other data the level of the loss differs; comparisons of two model sizes or token
counts are more reliable.
"""

import math
from dataclasses import dataclass

from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.cost import tokens_per_usd


@dataclass(frozen=True)
class SumLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta; N counts all parameters with embeddings, as Chinchilla does."""

    name: str
    irreducible_loss: float
    "E: the loss with infinite parameters and tokens"
    params_coefficient: float
    "A"
    tokens_coefficient: float
    "B"
    params_exponent: float
    "alpha"
    tokens_exponent: float
    "beta"
    source: str


@dataclass(frozen=True)
class KaplanLaw:
    """L(N, D) = [(Nc / N)^(alpha_N / alpha_D) + Dc / D]^alpha_D; N excludes vocabulary matrices."""

    name: str
    critical_params: float
    "Nc"
    critical_tokens: float
    "Dc"
    params_exponent: float
    "alpha_N"
    tokens_exponent: float
    "alpha_D"
    source: str


Law = SumLaw | KaplanLaw

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        SumLaw(
            *("hoffmann", 1.69, 406.4, 410.7, 0.34, 0.28),
            source="Hoffmann et al. 2022, arXiv 2203.15556, approach 3, as printed",
        ),
        SumLaw(  # rounding moves the optimum: for 5.76e23 FLOPs 40e9 parameters, as printed 32e9
            *("hoffmann-unrounded", math.exp(0.5267228), math.exp(6.0073404), math.exp(6.0179186)),
            *(0.33917084, 0.2849083),
            source="Hoffmann et al. 2022, its TeX source, by epoch-research/analyzing-chinchilla @9225883",
        ),
        SumLaw(
            *("besiroglu", 1.81686, 482.006, 2085.434, 0.34781, 0.36585),
            source="Besiroglu et al. 2024, arXiv 2404.10102, by epoch-research/analyzing-chinchilla @9225883",
        ),
        KaplanLaw(
            *("kaplan", 8.8e13, 5.4e13, 0.076, 0.095),
            source="Kaplan et al. 2020, arXiv 2001.08361, equation 1.5 with 1.1 and 1.2, fitted separately",
        ),
        KaplanLaw(
            *("kaplan-joint", 6.4e13, 1.8e13, 0.076, 0.103),
            source="Kaplan et al. 2020, arXiv 2001.08361, table 2, fitted to N and D together",
        ),
    )
}


def num_params_of(law: Law, spec: ModelSpec) -> int:
    """Return N as `law` counts it: all parameters, or for Kaplan all except the vocabulary matrices."""
    if isinstance(law, SumLaw):
        return spec.num_params
    vocabulary_matrices = 1 if spec.tied else 2
    return spec.num_params - vocabulary_matrices * spec.embedding_params


def loss(law: Law, num_params: float, num_tokens: float) -> float:
    """Return L(N, D) in nats per token, for N as `law` counts it and tokens that are seen once."""
    if isinstance(law, SumLaw):
        of_size = law.params_coefficient / num_params**law.params_exponent
        of_data = law.tokens_coefficient / num_tokens**law.tokens_exponent
        return law.irreducible_loss + of_size + of_data
    return (_kaplan_size_term(law, num_params) + law.critical_tokens / num_tokens) ** law.tokens_exponent


def lowest_loss(law: Law, num_params: float) -> float:
    """Return L(N, infinity), the loss with infinite tokens."""
    return loss(law, num_params, math.inf)


def loss_per_token(law: Law, num_params: float, num_tokens: float) -> float:
    """Return -dL/dD at D tokens: how much one token more lowers the loss."""
    if isinstance(law, SumLaw):
        beta = law.tokens_exponent
        return beta * law.tokens_coefficient / num_tokens ** (beta + 1)
    base = _kaplan_size_term(law, num_params) + law.critical_tokens / num_tokens
    inner = law.critical_tokens / num_tokens**2  # -d(base)/dD
    return law.tokens_exponent * base ** (law.tokens_exponent - 1) * inner


def loss_per_usd(
    law: Law,
    num_params: float,
    num_tokens: float,
    *,
    tokens_per_second: float,
    usd_per_gpu_hour: float,
    num_gpus: int,
) -> float:
    """Return the paper's equation 1, Loss/Dollar = Loss/Token x Token/Second x inv(Dollar/Second).

    We read it as: how much one dollar more lowers the loss after D tokens. The paper cites Kaplan et al. for
    Loss/Token but evaluates no law, and ranks by Token/Dollar only. For one model at one D the two rankings
    are the same; for two models, equation 1 also counts how much each learns from a token.
    """
    loss_over_token = loss_per_token(law, num_params, num_tokens)
    token_over_dollar = tokens_per_usd(  # Token/Second x inv(Dollar/Second)
        tokens_per_second=tokens_per_second, usd_per_gpu_hour=usd_per_gpu_hour, num_gpus=num_gpus
    )
    return loss_over_token * token_over_dollar


def compute_optimal_tokens(law: Law, num_params: float) -> float:
    """Return the D for which N has the lowest loss among all (N, D) with the same FLOPs, C = 6 N D."""
    tokens_of_one_param, exponent = _optimal_line(law)
    return tokens_of_one_param * num_params**exponent


def compute_optimal(law: Law, flops: float) -> tuple[float, float]:
    """Return the (parameters, tokens) with the lowest loss for C = 6 N D FLOPs.

    N is counted as in `law`, and C has no other parameters than N. Kaplan's L(N, D) describes training to
    convergence and gives N ~ C^0.56 to C^0.58; their advice, N ~ C^0.73, comes from runs stopped early.
    """
    tokens_of_one_param, exponent = _optimal_line(law)  # C / 6 = N D = tokens_of_one_param x N^(1 + exponent)
    num_params = (flops / 6 / tokens_of_one_param) ** (1 / (1 + exponent))
    return num_params, flops / 6 / num_params


def tokens_for_loss(law: Law, num_params: float, target_loss: float) -> float:
    """Return the D at which L(N, D) is `target_loss`; raise ValueError if no number of tokens reaches it."""
    lowest = lowest_loss(law, num_params)
    if target_loss <= lowest:
        raise ValueError(
            f"{num_params:.3g} parameters never reach a loss of {target_loss:g} by the law {law.name}\n"
            f"hint: infinite tokens give {lowest:.4f}; choose a higher loss or a larger model"
        )
    if isinstance(law, SumLaw):
        of_data = target_loss - lowest
        return (law.tokens_coefficient / of_data) ** (1 / law.tokens_exponent)
    base = target_loss ** (1 / law.tokens_exponent)
    return law.critical_tokens / (base - _kaplan_size_term(law, num_params))


def _kaplan_size_term(law: KaplanLaw, num_params: float) -> float:
    return (law.critical_params / num_params) ** (law.params_exponent / law.tokens_exponent)


def _optimal_line(law: Law) -> tuple[float, float]:
    """Return (c, p) of the line D = c N^p of compute-optimal training, where N dL/dN = D dL/dD.

    On this line, with N D fixed, changing N does not lower the loss.
    SumLaw: alpha A / N^alpha = beta B / D^beta, which is Hoffmann's N = G (C/6)^(beta / (alpha + beta)) with
    G = (alpha A / (beta B))^(1 / (alpha + beta)). Kaplan: k (Nc / N)^k = Dc / D with k = alpha_N / alpha_D.
    """
    if isinstance(law, SumLaw):
        of_size = law.params_exponent * law.params_coefficient
        of_data = law.tokens_exponent * law.tokens_coefficient
        return (of_data / of_size) ** (1 / law.tokens_exponent), law.params_exponent / law.tokens_exponent
    k = law.params_exponent / law.tokens_exponent
    return law.critical_tokens / (k * law.critical_params**k), k
