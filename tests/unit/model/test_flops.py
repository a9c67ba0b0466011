"""FLOPs per token, by hand and against PyTorch's counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS, flops_per_token
from slm_toolkit.run.model.model import build_model


def test_the_paper_100m_model_by_hand() -> None:
    # a layer: 4 * 832^2 + 3 * 832 * 2332 = 2,768,896 + 5,820,672 = 8,589,568
    # 9 layers and the head, 32000 * 832 = 26,624,000, make N = 103,930,112;
    # 6 N = 623,580,672; attention 12 * 9 * 832 * 1024 = 92,012,544
    spec = PRESETS["slm-100m"]
    assert flops_per_token(spec, seq_len=1024) == 623_580_672 + 92_012_544


def test_pytorch_counts_the_same_for_a_step_with_eager_attention() -> None:
    spec, batch, seq_len = PRESETS["slm-1m"], 2, 64
    model = build_model(spec, RunConfig(attn_implementation="eager", numerics="fp32", seq_len=seq_len))
    tokens = torch.randint(0, spec.vocab_size, (batch, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert counter.get_total_flops() == flops_per_token(spec, seq_len=seq_len) * batch * seq_len
