"""Compares the gradients of ZeRO-3 with those of one process, bit by bit, in a process of its own.

    python tests/zero3_gradients.py bench/data/models/olmo2-3m

DeepSpeed puts an identity function before each module's inputs (deepspeed 0.19.8,
runtime/zero/parameter_offload.py, `_post_backward_module_hook`). It changes the order in which autograd adds
the gradients of a tensor with three or more readers. In bf16 each addition rounds, so the order shows. OLMo 2
has no norm before its blocks: residual, gate and up all read one tensor. Other families' MLPs read a norm's
output, which has two readers, and a sum of two has one order.
"""

import copy
import json
import os
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Gradients = dict[str, torch.Tensor]


def main(folder: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    tokens = torch.randint(3, config.vocab_size, (2, 96))
    counts = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        plain = gradients_of(copy.deepcopy(model), tokens)
        with_identities = gradients_of(put_identities(copy.deepcopy(model)), tokens)
        sharded = zero_3_gradients_of(model, tokens, in_bf16=dtype is torch.bfloat16)
        counts[name] = {
            "num_gradients": len(sharded),
            "differ_from_plain": num_different(plain, sharded),
            "differ_from_identities": num_different(with_identities, sharded),
            "largest_error": max(error(plain[param], sharded[param]) for param in plain),
        }
    print(json.dumps(counts))


def gradients_of(model: PreTrainedModel, tokens: torch.Tensor) -> Gradients:
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: param.grad.float() for name, param in model.named_parameters()}


class Identity(torch.autograd.Function):
    """Returns its input, as DeepSpeed's PostBackwardFunctionModule does."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return upstream


def put_identities(model: PreTrainedModel) -> PreTrainedModel:
    """Put an identity before each positional input of each module, where DeepSpeed's hook puts one."""

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            Identity.apply(value) if isinstance(value, torch.Tensor) and value.requires_grad else value
            for value in inputs
        )

    for module in model.modules():
        module.register_forward_pre_hook(hook)
    return model


def zero_3_gradients_of(model: PreTrainedModel, tokens: torch.Tensor, *, in_bf16: bool) -> Gradients:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "bf16": {"enabled": in_bf16},
        "zero_optimization": {"stage": 3},
        "communication_data_type": "fp32",
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True}
    )
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    return {name: safe_get_full_grad(param).float() for name, param in engine.module.named_parameters()}


def num_different(one: Gradients, other: Gradients) -> int:
    return sum(not torch.equal(one[name], other[name]) for name in one)


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / one.norm()).item()


if __name__ == "__main__":
    import deepspeed

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    main(sys.argv[1])
