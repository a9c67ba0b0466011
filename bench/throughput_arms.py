"""One arm of `throughput.py`: what a user would pick instead of slm_toolkit, training on the same work.

    python bench/throughput_arms.py ARM WORK.json        # the last line of stdout: seconds, losses, peaks

Each arm is its own process and imports nothing of slm_toolkit. All share `WORK.json`: the folder of a Hugging
Face model with its first weights, the tokens of every batch, and the options of AdamW.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch


@dataclass
class Watch:
    """The clock of an arm: seconds from the end of each step to the next one's, as slm_toolkit's.

    On a GPU by events on its stream, which nobody waits for before the last step.
    """

    num_steps: int
    num_warmup: int
    ends: list[Any] = field(default_factory=list)
    "seconds on a CPU, events on a GPU"
    losses: list[torch.Tensor] = field(default_factory=list)

    def step_ended(self) -> None:
        if torch.cuda.is_available():
            self.ends.append(torch.cuda.Event(enable_timing=True))
            self.ends[-1].record()
        else:
            self.ends.append(time.perf_counter())

    def result(self) -> dict[str, Any]:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        timed = pairwise(self.ends[self.num_warmup - 1 :])
        return {
            "step_seconds": [
                before.elapsed_time(end) / 1e3 if on_gpu else end - before for before, end in timed
            ],
            "losses": torch.stack(self.losses).float().tolist(),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        }


def rate(work: dict[str, Any], step: int) -> float:
    """The learning rate as a share of its peak: a cosine down to a tenth, as slm_toolkit has it."""
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / work["num_steps"]))


def parameter_groups(model: torch.nn.Module, work: dict[str, Any]) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": work["weight_decay"]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def batches(work: dict[str, Any]) -> Iterator[torch.Tensor]:
    """(batch, seq_len) int64 on the device, one per step, from a DataLoader as a user would write it."""
    on_gpu = torch.cuda.is_available()
    tokens = torch.from_numpy(np.load(work["tokens"]))
    loader = torch.utils.data.DataLoader(tokens, batch_size=work["batch_size"], pin_memory=on_gpu)
    for batch in loader:
        yield batch.to("cuda", non_blocking=True) if on_gpu else batch


def loop(
    work: dict[str, Any], model: torch.nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """A bare PyTorch loop: autocast, fused AdamW, clipping."""
    watch = Watch(work["num_steps"], work["num_warmup"])
    device = next(model.parameters()).device.type
    optimizer = torch.optim.AdamW(
        parameter_groups(model, work), lr=work["learning_rate"], betas=tuple(work["betas"]), fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(work, step))
    for tokens in batches(work):
        with torch.autocast(device, torch.bfloat16, enabled=work["numerics"] == "bf16"):
            loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work["max_grad_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        watch.losses.append(loss.detach())
        watch.step_ended()
    return watch.result()


def hf_model(work: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        work["model"], attn_implementation=work["attn_implementation"], dtype=torch.float32
    )
    model.config.use_cache = False
    return model.to("cuda" if torch.cuda.is_available() else "cpu").train()


def bare(work: dict[str, Any], *, compiled: bool) -> dict[str, Any]:
    """transformers' model in the loop above."""
    model = hf_model(work)
    forward = torch.compile(model) if compiled else model
    return loop(work, model, lambda tokens: forward(input_ids=tokens, labels=tokens).loss)


def trainer(work: dict[str, Any], *, compiled: bool, liger: bool = False) -> dict[str, Any]:
    """Hugging Face's Trainer, with the flags that make it fastest."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    watch = Watch(work["num_steps"], work["num_warmup"])

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step_ended()

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            watch.losses.append(loss.detach())
            return loss

    model = hf_model(work)
    arguments = TrainingArguments(
        output_dir=work["folder"] + "/trainer",
        per_device_train_batch_size=work["batch_size"],
        max_steps=work["num_steps"],
        bf16=work["numerics"] == "bf16",
        optim="adamw_torch_fused",
        learning_rate=work["learning_rate"],
        adam_beta1=work["betas"][0],
        adam_beta2=work["betas"][1],
        weight_decay=work["weight_decay"],
        max_grad_norm=work["max_grad_norm"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        torch_compile=compiled,
        use_liger_kernel=liger,
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    tokens = torch.from_numpy(np.load(work["tokens"]))
    run = InOrder(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        data_collator=default_data_collator,
        callbacks=[Steps()],
    )
    # else it divides the loss by all tokens, the first of each sequence among them, which has none
    run.model_accepts_loss_kwargs = False
    run.train()
    return watch.result()


def litgpt(work: dict[str, Any], *, compiled: bool) -> dict[str, Any]:
    """LitGPT's model and loss as its `pretrain` has them, in the loop above."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy
    from safetensors.torch import load_file

    with open(work["model"] + "/config.json") as file:
        llama = json.load(file)
    config = Config(
        name="slm",
        block_size=work["seq_len"],
        vocab_size=llama["vocab_size"],
        padded_vocab_size=llama["vocab_size"],
        n_layer=llama["num_hidden_layers"],
        n_head=llama["num_attention_heads"],
        n_query_groups=llama["num_key_value_heads"],
        n_embd=llama["hidden_size"],
        intermediate_size=llama["intermediate_size"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=llama["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
    )
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(work["model"] + "/model.safetensors"))
    model = GPT(config)
    model.load_state_dict(weights)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    forward = torch.compile(model) if compiled else model
    # its `pretrain` calls it so, in chunks of 128 tokens by default
    return loop(work, model, lambda tokens: chunked_cross_entropy(forward(tokens)[:, :-1, :], tokens[:, 1:]))


ARMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "trainer": lambda work: trainer(work, compiled=False),
    "trainer_compile": lambda work: trainer(work, compiled=True),
    "trainer_liger": lambda work: trainer(work, compiled=False, liger=True),
    "trainer_compile_liger": lambda work: trainer(work, compiled=True, liger=True),
    "bare": lambda work: bare(work, compiled=False),
    "bare_compile": lambda work: bare(work, compiled=True),
    "litgpt_compile": lambda work: litgpt(work, compiled=True),
}

if __name__ == "__main__":
    with open(sys.argv[2]) as file:
        found = ARMS[sys.argv[1]](json.load(file))
    print(json.dumps(found))
