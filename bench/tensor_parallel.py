"""Would tensor parallelism help models of 0.1 to 2B? Widths that it can split, bytes sent, activations.

    python bench/tensor_parallel.py          # half a minute on a core

torch's own tensor parallelism (with sequence-parallel norms, as torchtitan has it) computes the decoder
layers of one sequence on fake tensors, as rank 0 of a group; its collectives and allocations are counted.
Beside it stand `slm estimate`'s figures of the same group under `--sp_size`. docs/memory.md has the result.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.estimate import estimate
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.run.kernels.layer_kernels import decoder_layers
from slm_toolkit.run.model.model import hf_config
from slm_toolkit.run.observe.allocations import AllocationTrace
from slm_toolkit.run.rehearse import fake_tensors
from slm_toolkit.strategy.strategy import find_strategy

FAMILY = ("slm-100m", "slm-500m", "slm-1b", "slm-2b")
GROUPS = {"slm-500m-hw": 8, "slm-1b-hw": 5, "slm-2b-hw": 8}
"the largest groups of a node that tensor parallelism can split these models into"
LENGTHS = (2560, 10240, 40960)
"which both 5 and 8 divide"
OTHERS = ("ds_zero1", "fsdp_full_shard")
PLAN = {
    "input_layernorm": SequenceParallel(),
    "post_attention_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    ),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("self_attn.o_proj", "mlp.down_proj")},
}


class SentBytes(TorchDispatchMode):
    """Counts what one rank of a ring sends."""

    num_bytes = 0.0

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        if func.namespace == "_c10d_functional" and not name.startswith("wait"):
            whole = max(tensor.numel() * tensor.element_size() for tensor in (args[0], out))
            twice = 2 if name.startswith("all_reduce") else 1
            self.num_bytes += twice * whole * (self.num_ranks - 1) / self.num_ranks
        return out


def divisors(spec: ModelSpec) -> list[int]:
    sizes = (spec.num_heads, spec.num_kv_heads, spec.ffn_size)
    return [n for n in range(2, 9) if not any(size % n for size in sizes)]


def of_tensor_parallel(spec: ModelSpec, mesh: DeviceMesh, seq_len: int) -> tuple[float, int]:
    """Return the bytes that the layers send in a step, and those of activations after forward."""
    with fake_tensors():
        options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_config(hf_config(spec, seq_len=seq_len), **options)
        layers = decoder_layers(model)
        for layer in layers:
            parallelize_module(layer, mesh, PLAN)
        hidden = torch.zeros(1, seq_len // mesh.size(), spec.hidden_size, dtype=torch.bfloat16)
        hidden.requires_grad_()
        positions = model.model.rotary_emb(hidden, torch.arange(seq_len)[None])
        weights = sum(param.to_local().nbytes for layer in layers for param in layer.parameters())
        trace, sent = AllocationTrace(fake=True, device_type="cpu"), SentBytes(mesh.size())
        with trace, sent:
            out = hidden
            for layer in layers:
                out = layer(out, attention_mask=None, position_embeddings=positions)
            live = 0
            peak = max((live := live + event.delta_bytes) for event in trace.events)
            out.sum().backward()
    return sent.num_bytes, peak - weights  # the trace sees views of them


def main() -> None:
    print("groups of 2 to 8 ranks that divide heads and FFN:")
    for name in (*FAMILY, *(f"{name}-hw" for name in FAMILY)):
        spec = find_model(name)
        print(f"  {name:12} {spec.num_heads} heads, FFN {spec.ffn_size}: {divisors(spec) or 'none'}")
    shares = [f"--sp_size, {name}" for name in OTHERS]
    columns = ["model", "ranks", "tokens", "GB: tensor parallel", *shares]
    columns += ["GiB: tensor parallel", "--sp_size"]
    print("\nGB that a rank sends in a step of one sequence that the ranks share, and GiB of its activations")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, num_ranks in GROUPS.items():
        spec = find_model(name)
        torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (num_ranks,))
        for seq_len in LENGTHS:
            sent, activations = of_tensor_parallel(spec, mesh, seq_len)
            config = RunConfig(
                model=name, seq_len=seq_len, per_device_train_batch_size=1, sp_size=num_ranks
            ).with_defaults(has_gpu=True)
            setups = [Setup(spec, find_strategy(other), config, num_gpus=num_ranks) for other in OTHERS]
            found = [estimate(setup.launched) for setup in setups]
            of_shared = max(row.parts["activations"] for row in found)  # 0 if the peak is in the optimizer
            cells = [name, num_ranks, f"{seq_len:,}"]
            cells += [f"{n / 1e9:.1f}" for n in (sent, *(row.traffic_bytes["intra_node"] for row in found))]
            cells += [f"{n / 2**30:.1f}" for n in (activations, of_shared)]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
