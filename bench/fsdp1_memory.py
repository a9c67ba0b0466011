"""How far the estimate of FSDP1's peak memory is from traces of torch's FSDP1, on small models.

    python bench/fsdp1_memory.py      # about 2 minutes

FSDP1 runs on CPU tensors with a process group that sends nothing, wrapped as accelerate wraps it. Every
allocation of rank 0's second step is traced.
"""

import contextlib
import functools
import multiprocessing
from dataclasses import replace
from typing import Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.memory.peak import MemoryEstimate, peak
from slm_toolkit.predict.setup.other_trainers import trainer_named
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import Strategy

TINY = {"model": "slm-10m", "ranks": 8, "batch": 1, "seq_len": 64}
CASES: tuple[dict[str, Any], ...] = (
    TINY,
    {**TINY, "batch": 4, "seq_len": 256},
    {**TINY, "batch": 4, "seq_len": 256, "checkpointing": "full"},
    {**TINY, "prefetch": "NO_PREFETCH"},
    {**TINY, "sharding": "SHARD_GRAD_OP"},
    {**TINY, "sharding": "SHARD_GRAD_OP", "batch": 4, "seq_len": 256},
    {**TINY, "micro_steps": 3},
    {**TINY, "wrap": "NO_WRAP"},
    {**TINY, "model": "slm-30m", "ranks": 4, "batch": 2, "seq_len": 128},
    {**TINY, "model": "slm-30m", "ranks": 64, "checkpointing": "full"},
    {**TINY, "model": "bench/data/models/tied-gqa-3m"},
    {**TINY, "model": "bench/data/models/tied-wide-28m", "ranks": 2},
    # as LitGPT trains: fp32 weights are gathered in fp32, autocast makes bf16 copies
    {**TINY, "gathers": "fp32"},
    {**TINY, "gathers": "fp32", "model": "slm-30m", "batch": 4, "seq_len": 256},
    {**TINY, "gathers": "fp32", "model": "slm-30m", "ranks": 64, "checkpointing": "full"},
    {**TINY, "gathers": "fp32", "micro_steps": 3},
)


def main() -> None:
    errors = []
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process has one group of ranks
            traced_bytes, instant = pool.apply(traced, (case,))
        estimate = estimated(case)
        errors.append(estimate.peak_bytes / traced_bytes - 1)
        shown = " ".join(str(value) for value in case.values())
        print(f"{errors[-1]:+7.2%}  {shown}; traced at {instant}, estimated at {estimate.peak_instant}")
    print(f"{len(errors)} cases, worst {max(map(abs, errors)):.2%}")


def estimated(case: dict[str, Any]) -> MemoryEstimate:
    config = RunConfig(
        model=case["model"],
        seq_len=case["seq_len"],
        per_device_train_batch_size=case["batch"],
        gradient_checkpointing=case.get("checkpointing", "none"),
        gradient_accumulation_steps=case.get("micro_steps", 1),
        numerics="stock",
        optim="adamw_torch_fused",
    ).with_defaults(has_gpu=True)
    fsdp_config = {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": case.get("sharding", "FULL_SHARD"),
        "fsdp_backward_prefetch": case.get("prefetch", "BACKWARD_PRE"),
        "fsdp_auto_wrap_policy": case.get("wrap", "TRANSFORMER_BASED_WRAP"),
    }
    yaml = {"distributed_type": "FSDP", "fsdp_config": fsdp_config}
    strategy = Strategy(name="fsdp1", engine="fsdp1", num_processes=case["ranks"], accelerate_config=yaml)
    setup = Setup(find_model(case["model"]), strategy, config, num_gpus=case["ranks"])
    if "gathers" in case:  # the loss is traced as transformers computes it
        setup = replace(setup, like=replace(trainer_named("litgpt"), loss=None))
    return peak(setup)


def traced(case: dict[str, Any]) -> tuple[int, str]:
    """Return the peak bytes of the second of two steps, and its instant."""
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from slm_toolkit.run.observe.allocations import AllocationTrace, following_modules, timeline_of

    torch.distributed.init_process_group("fake", rank=0, world_size=case["ranks"], store=FakeStore())
    model = made(find_model(case["model"]), checkpoints=case.get("checkpointing") == "full")
    trace = AllocationTrace(fake=False, device_type="cpu")
    trace.adopt(model.parameters(), "parameters")
    wraps_layers = case.get("wrap") != "NO_WRAP"
    with trace:
        wrapped = FSDP(
            model,
            auto_wrap_policy=functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
            )
            if wraps_layers
            else None,
            mixed_precision=MixedPrecision(
                torch.float32 if "gathers" in case else torch.bfloat16, torch.bfloat16, torch.bfloat16
            ),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy[case.get("sharding", "FULL_SHARD")],
            backward_prefetch=getattr(BackwardPrefetch, case.get("prefetch", "BACKWARD_PRE"), None),
            use_orig_params=True,
        )
    optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
    num_micro_steps = case.get("micro_steps", 1)
    with trace, following_modules(wrapped.module, trace):
        for _ in range(2):
            first_event = len(trace.events)
            for number in range(num_micro_steps):
                is_last = number == num_micro_steps - 1
                with contextlib.nullcontext() if is_last else wrapped.no_sync():
                    trace.phase, trace.module = "forward", ""
                    tokens = torch.zeros(case["batch"], case["seq_len"], dtype=torch.long)
                    with torch.autocast("cpu", torch.bfloat16, enabled="gathers" in case):
                        loss = wrapped(input_ids=tokens, labels=tokens).loss
                    trace.phase, trace.module = "backward", "loss"
                    loss.backward()
                    del loss
            trace.phase, trace.module = "optimizer", ""
            optimizer.step()
            optimizer.zero_grad()
    highest = timeline_of(trace.events, first=first_event).peak
    return highest.num_bytes, f"{highest.phase} {highest.module}"


def made(spec: ModelSpec, *, checkpoints: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.ffn_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            tie_word_embeddings=spec.tied,
            use_cache=False,
        )
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_params
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


if __name__ == "__main__":
    main()
