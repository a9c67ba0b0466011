"""Models with and without the fused kernels, and their losses and gradients."""

import torch
from transformers import PreTrainedModel

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.names import find_model
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.model.model import build_model

ALL = {
    **{"kernels": "loss+norm"},
    "gradient_checkpointing": "selective_op",
}


def made(model: str = "slm-1m", numerics: str = "fp32", **flags: str) -> PreTrainedModel:
    return build_model(find_model(model), RunConfig(model=model, seq_len=64, numerics=numerics, **flags))


def two_micro_steps(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The recorded loss and all gradients, some labels of the first sequence left out."""
    recorder = RecordedLoss(model)
    tokens = torch.randint(0, model.config.vocab_size, (2, 64), generator=torch.manual_seed(0))
    labels = tokens.clone()
    labels[0, 5:40] = -100
    for part in (slice(0, 1), slice(1, 2)):
        (model(input_ids=tokens[part], labels=labels[part]).loss / 3).backward()
    assert recorder.num_tokens == 2 * 64
    assert recorder.last.dtype == torch.float32
    return recorder.last, torch.cat([param.grad.flatten().float() for param in model.parameters()])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()
