"""Host time of ZeRO-3's hooks on one module, from a small Llama with and without DeepSpeed on this CPU.

    python bench/zero3_hooks.py       # half a minute on a core

Both run forward and backward of one short sequence, so that they mostly dispatch operators. The CPU time of a
layer is the difference between networks of six and two layers; a layer has 13 modules with four hooks each.
`predict/speed/step.py: _ZERO_3_KERNELS` has the result.
"""

import os
import time
from collections.abc import Callable
from statistics import median

RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ.update(RANKS | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "DS_ACCELERATOR": "cpu"})

import deepspeed  # noqa: E402  its accelerator is chosen at import
import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

WARM_UP, ROUNDS = 4, 12
LAYERS = (2, 6)
ZERO_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1_000_000,  # no optimizer step
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 3686,  # "auto": 0.9 x 64 x 64
    },
}


def model_of(num_layers: int) -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 128}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=num_layers)).to(torch.bfloat16)


def cpu_seconds(step: Callable[[], None]) -> float:
    times = []
    for _ in range(WARM_UP + ROUNDS):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return median(times[WARM_UP:])


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    tokens = torch.randint(0, 128, (1, 16))
    plain, sharded = {}, {}
    for num_layers in LAYERS:
        model = model_of(num_layers)
        engine, *_ = deepspeed.initialize(model=model_of(num_layers), config=ZERO_3)

        def plain_step(model: LlamaForCausalLM = model) -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()

        def sharded_step(engine: deepspeed.DeepSpeedEngine = engine) -> None:
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)

        plain[num_layers], sharded[num_layers] = cpu_seconds(plain_step), cpu_seconds(sharded_step)
    of_plain, of_sharded = (
        (times[LAYERS[1]] - times[LAYERS[0]]) / (LAYERS[1] - LAYERS[0]) for times in (plain, sharded)
    )
    num_modules = sum(1 for _ in model_of(1).model.layers[0].modules())
    print(f"a layer without DeepSpeed: {1e3 * of_plain:.2f} ms; with ZeRO-3: {1e3 * of_sharded:.2f} ms")
    print(f"{num_modules} modules: {1e6 * (of_sharded - of_plain) / num_modules:.0f} us each")


if __name__ == "__main__":
    main()
