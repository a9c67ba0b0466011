"""Train with accelerate alone, as other people's scripts do, and save with `Accelerator.save_state`.

    torchrun --nproc_per_node 2 tests/accelerate_alone.py work.json

work.json: engine (fsdp2, zero1, zero2, zero3), state_dict_type of FSDP, numerics (fp32, bf16), model (a
folder), tokens (safetensors: steps x sequences x length), first_step, save_at, learning_rate, num_groups (of
AdamW: 2 has one for norms), load (a folder or null), out. Nothing of slm_toolkit is imported, so the
checkpoint is what accelerate and DeepSpeed write. Losses go to out/losses.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def accelerator_of(work: dict) -> Accelerator:
    if work["engine"] == "fsdp2":
        # accelerate takes CPU processes for plain DDP: this makes them FSDP's
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type=work["state_dict_type"],
        )
        return Accelerator(fsdp_plugin=plugin, cpu=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(work["engine"][-1])},
        "zero_allow_untested_optimizer": True,
    }
    if work["numerics"] == "bf16":
        config["bf16"] = {"enabled": True}
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}  # as accelerate launch does
    if work["load"] is not None:
        config["checkpoint"] = {"load_universal": True}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    handler = InitProcessGroupKwargs(backend="gloo")
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[handler])


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    accelerator = accelerator_of(work)
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    groups: list[list[torch.Tensor]] = [[], []]
    for param in model.parameters():
        groups[param.dim() == 1 and work["num_groups"] == 2].append(param)
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups if group], lr=work["learning_rate"], weight_decay=0.0
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    if work["load"] is not None:
        accelerator.load_state(work["load"])
    losses = []
    batches = load_file(work["tokens"])["tokens"][work["first_step"] :]
    for step, batch in enumerate(batches, start=work["first_step"]):
        own = batch.tensor_split(ranks)[rank]
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        if work["engine"] == "fsdp2":
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if step + 1 == work["save_at"]:
            accelerator.save_state(work["out"])
    if accelerator.is_main_process:
        Path(work["out"]).mkdir(parents=True, exist_ok=True)
        Path(work["out"], "losses.json").write_text(json.dumps(losses))
    accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
