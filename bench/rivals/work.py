"""Write the work of our run for another trainer: first weights, the tokens of every batch, and options."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from safetensors.torch import save_file

from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.config.schedule import learning_rate
from slm_toolkit.model.names import find_model
from slm_toolkit.run.data.batches import make_loader
from slm_toolkit.run.data.data import load_data
from slm_toolkit.run.model.model import build_model


def write_work(folder: Path, config: RunConfig, *, num_processes: int) -> dict[str, Any]:
    """Write everything that `training.py` needs into `folder`, and return the content of work.json."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = find_model(config.model)
    build_model(spec, config).save_pretrained(folder / "model")
    num_steps = config.steps_asked
    tokens = _tokens(config, num_steps * num_processes, batches_per_step=num_processes)
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    work = {
        "folder": str(folder),
        "model": str(folder / "model"),
        "tokens": str(folder / "tokens.safetensors"),
        "seq_len": config.seq_len,
        "batch_size": config.per_device_train_batch_size,
        "num_steps": num_steps,
        "numerics": "fp32" if config.numerics == "fp32" else "bf16",
        "attn_implementation": config.attn_implementation,
        "torch_compile": config.compiles,
        "learning_rates": [learning_rate(config, step, num_steps) for step in range(num_steps)],
        "betas": [config.adam_beta1, config.adam_beta2],
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
        "fused_optimizer": config.optim == "adamw_torch_fused",
        "max_grad_norm": config.max_grad_norm,
    }
    (folder / "work.json").write_text(json.dumps(work))
    return work


def _tokens(config: RunConfig, num_batches: int, *, batches_per_step: int) -> torch.Tensor:
    """Return (num_batches x batch, seq_len) synthetic tokens, in the order in which our run reads them.

    Rank r's batch number k is batch k x num_processes + r of the data. `batches_per_step`: of all ranks; an
    epoch leaves out the batches that do not fill one more step.
    """
    spec = find_model(config.model)
    assert config.dataset == SYNTHETIC
    num_sequences = num_batches * config.per_device_train_batch_size
    data = load_data(config, spec, num_sequences=num_sequences)
    set_seed(config.seed)
    loader = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False, use_seedable_sampler=True),
    ).prepare_data_loader(make_loader(data.train, config, train=True))
    in_epoch = len(loader) // batches_per_step * batches_per_step
    batches, epoch = [], 0
    while len(batches) < num_batches:
        loader.set_epoch(epoch)
        batches += [batch["input_ids"] for batch in islice(loader, in_epoch)]
        epoch += 1
    return torch.cat(batches[:num_batches])
