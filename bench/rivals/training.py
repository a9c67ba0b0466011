"""Train with another trainer on given work, in one process, and write what it observed.

    python bench/rivals/training.py trainer WORK.json

The script imports nothing of slm_toolkit, so that it also runs in another environment. `work.py` writes
WORK.json: the folder of a Hugging Face model with its first weights, the tokens of every batch, and options.
The result is rank0.json beside it.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


class Watch:
    """The clock and the losses: a step lasts from the end of the step before it to its own end.

    On a GPU events on its stream measure it, which nobody waits for before the last step.
    """

    def __init__(self) -> None:
        self.times: list[Any] = []
        "start of the first step, then the end of each: seconds on a CPU, events on a GPU"
        self.losses: list[torch.Tensor] = []

    def note_time(self) -> None:
        if ON_GPU:
            self.times.append(torch.cuda.Event(enable_timing=True))
            self.times[-1].record()
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if ON_GPU:
            torch.cuda.synchronize()
            return [before.elapsed_time(end) / 1e3 for before, end in pairwise(self.times)]
        return [end - before for before, end in pairwise(self.times)]

    def observed(self) -> dict[str, Any]:
        return {
            "step_seconds": self.seconds(),
            "losses": torch.stack(self.losses).float().tolist(),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None,
        }


def parameter_groups(model: torch.nn.Module, work: dict[str, Any]) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": work["weight_decay"]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(model: torch.nn.Module, work: dict[str, Any]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameter_groups(model, work),
        lr=work["learning_rates"][0],
        betas=tuple(work["betas"]),
        eps=work["eps"],
        fused=work["fused_optimizer"],
    )


def batches(work: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield micro-batches, (batch, seq_len) int64 on the device, from a DataLoader."""
    tokens = load_file(work["tokens"])["tokens"]
    loader = torch.utils.data.DataLoader(tokens, batch_size=work["batch_size"], pin_memory=ON_GPU)
    for batch in loader:
        yield batch.to(DEVICE, non_blocking=True) if ON_GPU else batch


def is_autocast(work: dict[str, Any]) -> bool:
    return work["numerics"] == "bf16"


def hf_model(work: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        work["model"],
        attn_implementation=work["attn_implementation"],
        dtype=torch.float32,
        trust_remote_code=False,
    )
    model.config.use_cache = False
    return model.train()


def bare(work: dict[str, Any]) -> Watch:
    """transformers' model in a bare PyTorch loop: autocast, AdamW, clipping."""
    model = hf_model(work).to(DEVICE)
    compiled = torch.compile(model) if work["torch_compile"] else model
    return _plain_loop(work, compiled, lambda forward, tokens: forward(input_ids=tokens, labels=tokens).loss)


def torchtitan(work: dict[str, Any]) -> Watch:
    """torchtitan's Llama, each layer and the loss compiled as its trainer does, in the same bare loop."""
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3.infra.parallelize import apply_compile

    if work["attn_implementation"] != "sdpa":
        sys.exit("error: the torchtitan row has sdpa attention")
    job = JobConfig()
    job.compile.enable, job.compile.components = work["torch_compile"], ["model", "loss"]
    model, sum_of_losses = torchtitan_model(work), build_cross_entropy_loss(job)
    if work["torch_compile"]:
        apply_compile(model, job.compile)

    def mean_loss(forward: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        nothing = tokens.new_full((len(tokens), 1), -100)  # the last token has no next one
        labels = torch.cat([tokens[:, 1:], nothing], dim=1)
        return sum_of_losses(forward(tokens), labels) / tokens[:, 1:].numel()

    return _plain_loop(work, model, mean_loss)


def _plain_loop(
    work: dict[str, Any],
    forward: torch.nn.Module,
    loss_of: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
) -> Watch:
    """Train with PyTorch alone: `loss_of` returns the mean loss that a model has on a batch of tokens."""
    watch, params = Watch(), list(forward.parameters())
    optimizer = adamw(forward, work)
    watch.note_time()
    for rate, tokens in zip(work["learning_rates"], batches(work), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=is_autocast(work)):
            loss = loss_of(forward, tokens)
        loss.backward()
        if work["max_grad_norm"]:
            torch.nn.utils.clip_grad_norm_(params, work["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        watch.losses.append(loss.detach())
        watch.note_time()
    return watch


def trainer(work: dict[str, Any]) -> Watch:
    """Hugging Face's Trainer, with the flags that make it fastest."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    watch = Watch()

    class Steps(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.note_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.note_time()

    class InOrder(Trainer):
        """The work's order of batches, learning rates and weight decay."""

        def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
            self.optimizer = adamw(self.model, work)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            rates = work["learning_rates"]
            of_step = [rate / (rates[0] or 1.0) for rate in rates]  # a warm-up may begin at 0
            for group in self.optimizer.param_groups:
                group["initial_lr"] = rates[0] or 1.0
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: of_step[min(step, len(of_step) - 1)]
            )
            return self.lr_scheduler

        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
            loss = super().training_step(model, inputs, *args)
            watch.losses.append(loss.detach())
            return loss

    arguments = TrainingArguments(
        output_dir=str(Path(work["folder"]) / "trainer"),
        per_device_train_batch_size=work["batch_size"],
        max_steps=work["num_steps"],
        bf16=is_autocast(work),
        max_grad_norm=work["max_grad_norm"],
        torch_compile=work["torch_compile"],
        use_cpu=not ON_GPU,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=ON_GPU,
    )
    tokens = load_file(work["tokens"])["tokens"]
    run = InOrder(
        model=hf_model(work),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        data_collator=default_data_collator,
        callbacks=[Steps()],
    )
    # else it divides the loss by all tokens, the first of each sequence among them, which has none
    run.model_accepts_loss_kwargs = False
    run.train()
    return watch


def torchtitan_model(work: dict[str, Any]) -> torch.nn.Module:
    """Return torchtitan's own model with the work's first weights; of untied embeddings only."""
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    llama = json.loads(Path(work["model"], "config.json").read_text())
    if llama["model_type"] != "llama" or llama["rope_parameters"]["rope_type"] != "default":
        sys.exit("error: the torchtitan row trains Llama models with plain RoPE only")
    if llama["tie_word_embeddings"]:
        sys.exit("error: torchtitan's Llama 3 has an output head of its own, not the embedding's weights")
    width, heads, ffn = (llama[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    args = TransformerModelArgs(
        dim=width,
        n_layers=llama["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=llama["num_key_value_heads"],
        vocab_size=llama["vocab_size"],
        multiple_of=ffn,  # it rounds up 8/3 of the width, by a factor that makes it less
        ffn_dim_multiplier=0.5 * ffn / int(8 * width / 3),
        norm_eps=llama["rms_norm_eps"],
        rope_theta=llama["rope_parameters"]["rope_theta"],
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),  # else those of Llama 3.1
        max_seq_len=work["seq_len"],
    )
    model = Transformer(args)
    weights = load_file(Path(work["model"], "model.safetensors"))
    model.load_state_dict(Llama3StateDictAdapter(args, None).from_hf(weights))
    return model.to(DEVICE)


TRAINERS: dict[str, Callable[[dict[str, Any]], Watch]] = {
    "trainer": trainer,
    "bare": bare,
    "torchtitan": torchtitan,
}

if __name__ == "__main__":
    work_file = Path(sys.argv[2])
    finished = TRAINERS[sys.argv[1]](json.loads(work_file.read_text()))
    work_file.with_name("rank0.json").write_text(json.dumps(finished.observed()))
