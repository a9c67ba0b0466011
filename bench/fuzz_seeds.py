"""Real files and commands of every reader, of which bench/fuzz_inputs.py makes others."""

import io
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def files(*patterns: str) -> list[bytes]:
    return [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def lines(*commands: str) -> list[bytes]:
    return [command.replace(" ", "\n").encode() for command in commands]


def dumped(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


YAMLS = (
    b"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
    b"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n"
    b"  gradient_clipping: 1.0\n"
    b"  offload_optimizer_device: cpu\n  offload_param_device: nvme\n  zero3_init_flag: true\n",
    b"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
    b"  fsdp_offload_params: true\n"
    b"parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    b"  parallelism_config_tp_size: 1\ndynamo_config:\n  dynamo_backend: INDUCTOR\n",
)
LLAMA = {
    **{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8},
    **{"intermediate_size": 256, "vocab_size": 1000, "num_key_value_heads": 2, "head_dim": 16},
    **{"tie_word_embeddings": True, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    **{"rope_parameters": {"rope_theta": 1e6}},
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 100,
    "n_inner": 256,
}
NEOX = {**LLAMA, "model_type": "gpt_neox"}
MPT = {
    **{
        "model_type": "mpt",
        "n_layers": 2,
        "d_model": 64,
        "n_heads": 4,
        "max_seq_len": 128,
        "vocab_size": 100,
    },
    **{"expansion_ratio": 4, "attn_config": {"alibi": True}, "no_bias": True, "tie_word_embeddings": True},
}
TRAINER = (
    {
        "fsdp": "full_shard offload",
        "fsdp_config": {"version": 2, "reshard_after_forward": True},
        "bf16": True,
    },
    {
        "fsdp": True,
        "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "version": 1},
    },
    {
        "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}},
        "output_dir": "x",
        "fp16": False,
    },
    {"torch_compile": True, "torch_compile_backend": "inductor", "use_cpu": False, "learning_rate": 1e-3},
    {
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    },
)
COMMANDS = (
    "torchrun --nproc_per_node 8 --nnodes 2 --rdzv_backend c10d --rdzv_endpoint a:29500 train.py --fsdp "
    "full_shard --bf16",
    "deepspeed --num_gpus 8 --hostfile h train.py --deepspeed ds.json --fp16 true --learning_rate 1e-3",
    "python -m torch.distributed.run --nproc_per_node=4 -m my.train --fsdp_config {} --fsdp true",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE=4 FSDP_VERSION=2 ACCELERATE_USE_FSDP=true A=b python train.py "
    "--torch_compile",
    "--fsdp full_shard offload --bf16 true --deepspeed ds.json",
)
SLM = (
    "estimate --model slm-100m --strategy ddp ds_zero3 --gpu h100-80gb --num_gpus 8 --seq_len 512 "
    "--usd_per_gpu_hour 2.5",
    "estimate --model slm-700m --strategy ddp --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --json",
    "estimate --peft lora --lora_r 16 --lora_alpha 32.0 --strategy ddp --gpu l4 --num_gpus 1 --largest_batch",
    "recommend --model slm-100m --gpu h100-80gb:8@2.49 --tokens 1B --strategy ddp "
    "--per_device_train_batch_size 8 "
    "--gradient_checkpointing none --loss_kernel hf --deadline_hours 10 --budget_usd 100",
    "recommend --model slm-100m --gpu l4:1 --target_loss 3.5 --global_batch_tokens 0.5M --strategy ddp "
    "--per_device_train_batch_size 8 --gradient_checkpointing none --loss_kernel hf",
    "doctor --model slm-100m --strategy ddp --gpu h100-80gb --num_gpus 8 --host_ram_gib 64 --versions "
    "torch=2.12",
    "estimate --inter_node_gbps 100 --gpus_per_node 8 --num_gpus 16 --gpu a100-80gb --provider AWS "
    "--price_kind spot",
    "recipes lora",
    "configs --copy here --num_machines 2 --gpus_per_node 4",
)
PLACED = (
    *("report PLACE", "report PLACE PLACE --json", "report --baseline PLACE PLACE", "report . --csv PLACE"),
    *(
        "report . --markdown PLACE",
        "report . --latex PLACE",
        "report . --parquet PLACE",
        "report . --html PLACE",
    ),
    *("configs --copy PLACE", "recipes --copy PLACE", "recipes PLACE", "doctor --strategy PLACE"),
    *("doctor --model PLACE", "doctor --model slm-1m --strategy PLACE --fix PLACE", "doctor --dataset PLACE"),
    *("convert PLACE --to accelerate_fsdp", "convert ddp --to accelerate_deepspeed --output PLACE"),
    *("estimate --model PLACE", "estimate --strategy PLACE --gpu l4", "estimate --prices PLACE --gpu l4"),
    "recommend --model slm-1m --gpu l4:1 --tokens 1e6 --strategy ddp --per_device_train_batch_size 8 "
    "--gradient_checkpointing none --loss_kernel hf --write PLACE",
    *("compare --dry_run --strategy PLACE --output_dir PLACE", "compare --dry_run --output_dir PLACE"),
    "compare --dry_run --dataset PLACE --model slm-1m --strategy ddp --baseline PLACE",
    *(
        "compare --dry_run --tokenizer_name PLACE --model slm-1m",
        "compare --dry_run --model PLACE --csv PLACE",
    ),
)
"commands of which each PLACE is replaced by a path that is odd, taken or not for us"
FLAGS = (
    "--model slm-1m --seq_len 128 --max_steps 3 --learning_rate 3e-4 --weight_decay 0.1 --max_grad_norm 1.0",
    "--num_train_epochs 1.5 --dataset a=3,b=1 --eval_steps 2 --eval_dataset c "
    "--validation_split_percentage 5",
    "--adam_beta1 0.9 --adam_beta2 0.95 --warmup_steps 2 --seed 1 --run_name x --output_dir y --rehearse 8",
    "--peft lora --lora_r 8 --lora_dropout 0.1 --lora_alpha 16 --scale_lr sqrt --base_batch_size 4 --fp8 "
    "rowwise",
    "--gradient_accumulation_steps 4 --per_device_train_batch_size 2 --save_steps 2 --timing_warmup_steps 1",
)
CHATS = (
    [{"text": "some words"}, {"text": "others"}, {"text": None}],
    [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2,
    [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 2,
    [{"instruction": "do", "input": "this", "output": "done"}] * 2,
    [{"prompt": "a", "completion": "b"}] * 2,
    [{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}],
    [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 0]}] * 2,
    [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b"},
            ]
        }
    ],
)
NETWORK = {
    **{"world_size": 2, "num_nodes": 1, "gpus_per_node": 2, "backend": "gloo", "gpu": None, "date": "d"},
    **{"versions": {}, "command": "c"},
    "timings": [
        {"collective": name, "num_bytes": size, "seconds": size / 1e9, "all_seconds": [size / 1e9] * 3}
        for name in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (2**20, 2**24)
    ],
}


CHECKPOINT = {
    **{
        "format": 3,
        "sha256": "",
        "step": 6,
        "optimizer_steps": 6,
        "order": 3,
        "frozen": None,
        "scaler": None,
    },
    "run": {
        **{"model": "slm-1m", "seed": 0, "sequences_per_step": 8},
        "data": [{"num_held_out": 12, "digest": "0"}],
    },
    "written_by": {
        **{"strategy": "ddp", "num_processes": 2, "per_device_train_batch_size": 4},
        **{"gradient_accumulation_steps": 1, "base_batch_size": 4},
    },
    "num_elements": {"lm_head.weight": 100},
    "files": [
        {
            **{"name": f"rank_{rank}.safetensors", "num_bytes": 8, "sha256": "0"},
            "starts": {"weights/lm_head.weight": 50 * rank},
            "sizes": {"weights/lm_head.weight": 50},
        }
        for rank in range(2)
    ],
}


@dataclass(frozen=True)
class TinyRun:
    """A model that has done a step, and what goes on from its checkpoints."""

    model: Any
    optimizer: Any
    accelerator: Any
    description: dict[str, Any]
    manifest: dict[str, Any]
    "of its checkpoint, without files"
    tensors: dict[str, dict[str, bytes]]
    "of each file, flat ones"


@cache
def tiny_run() -> TinyRun:
    """Its checkpoint has the files of two ranks, and is read by one."""
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from slm_toolkit.run.checkpoint.checkpoint import RANDOM_CPU
    from slm_toolkit.run.checkpoint.files import write_rank_file
    from slm_toolkit.run.engine.optimizer import AdamWWithMasterWeights
    from slm_toolkit.run.engine.training_state import num_elements, stretches, trained

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    optimizer = AdamWWithMasterWeights(model.parameters(), max_grad_norm=1.0, fused=False, foreach=True)
    tokens = torch.arange(16)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    description = {"model": "tiny", "seed": 0, "sequences_per_step": 4}
    manifest = {
        **{"step": 1, "optimizer_steps": 1, "order": 1, "frozen": None, "scaler": None},
        "run": {**description, "data": [{"num_sequences": 12, "digest": "0"}]},
        "written_by": {**CHECKPOINT["written_by"], "num_processes": 1},
        "num_elements": {name: num_elements(param) for name, param in trained(model)},
        "files": [],
    }
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            mine = {RANDOM_CPU: (0, torch.get_rng_state())}
            for part in stretches(model, optimizer, rank=rank, world_size=2):
                if part.is_mine:
                    mine[f"{part.kind}/{part.name}"] = (part.start, part.tensor.clone())
            file = write_rank_file(Path(folder), rank, mine)
            tensors[file.name] = {name: bytes(tensor.numpy()) for name, (_, tensor) in mine.items()}
            manifest["files"].append({"name": file.name, "starts": file.starts, "sizes": file.sizes})
    return TinyRun(model, optimizer, Accelerator(cpu=True), description, manifest, tensors)


def signed_checkpoints() -> list[bytes]:
    """A manifest, and dtype and shape of each file's tensors: what is changed, then written and signed."""
    run = tiny_run()
    tensors = {
        file["name"]: {
            name: {"dtype": "U8" if name.startswith("random") else "F32", "shape": [size]}
            for name, size in file["sizes"].items()
        }
        for file in run.manifest["files"]
    }
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    scaler |= {"growth_interval": 2000, "_growth_tracker": 0}
    return dumped(
        {"manifest": run.manifest, "tensors": tensors},
        {"manifest": {**run.manifest, "scaler": scaler}, "tensors": tensors},
    )


WORDS = {"</s>": 0, "[UNK]": 1, "the": 2, "quick": 3, "brown": 4, "fox": 5}
TOKENIZER = {
    **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None},
    **{"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None},
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
}
_REPLACE = {"type": "Replace", "pattern": {"String": "q"}, "content": "kw"}
TOKENIZERS = (
    TOKENIZER,
    {
        **TOKENIZER,
        "added_tokens": [
            {
                **{"id": 0, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False},
                **{"normalized": False, "special": True},
            }
        ],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, _REPLACE, {"type": "Lowercase"}]},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    **{"type": "Split", "pattern": {"Regex": "\\w+|[^\\w\\s]+"}},
                    **{"behavior": "Isolated", "invert": False},
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": "[UNK]", "continuing_subword_prefix": None},
            **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False},
            **{"vocab": {**WORDS, "t": 6, "h": 7, "e": 8, "th": 9}, "merges": [["t", "h"], ["th", "e"]]},
        },
    },
    {
        **TOKENIZER,
        "pre_tokenizer": {
            **{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
        },
        "model": {
            **{"type": "Unigram", "unk_id": 1, "byte_fallback": False},
            "vocab": [["</s>", 0.0], ["[UNK]", -1.0], ["_the", -2.0], ["q", -3.0]],
        },
    },
)
TEMPLATES = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "{%- set ns = namespace(x='', n=2) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.x = ns.x ~ '[INST] ' ~ m.content|trim ~ ' [/INST]' -%}{%- else -%}{%- set ns.n = ns.n * 2 -%}"
    "{%- set ns.x = ns.x ~ m.content ~ eos_token -%}{%- endif -%}{%- endfor -%}{{ ns.x }}",
    "{% macro turn(m, n) %}{% if n > 0 %}{{ m.content * n }}{{ turn(m, n - 1) }}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ turn(m, 2) }}{{ '%s' % m.role }}{{ m|tojson }}{{ 10 // 3 }}{% endfor %}",
    "{{ raise_exception('no') if messages|length > 9 else '' }}{% for i in range(9) %}{% for m in messages %}"
    "{{ m['content'][:i]|center(20)|upper }}{{ 2 ** i }}{% endfor %}{% endfor %}",
)


def records() -> list[bytes]:
    """Shipped ones, and one of a GPU that has a value in every field."""
    shipped = files("results/cpu/*/record.json", "results/rehearsed/*/record.json")[:12]
    whole = json.loads(shipped[0]) | {
        **{
            "gpu": "NVIDIA H100 80GB HBM3",
            "num_padding_tokens": 10,
            "other_busy_cores": 0.1,
            "lm_eval": {"t": {"acc": 0.5}},
        },
        **{"host_ram": {"total_bytes": 2**34, "least_available_bytes": 2**33, "swapped_out_bytes": 0}},
        **{"datasets": [{"name": "a", "weight": 1.0, "format": "text", "packing": "concat", "num_rows": 3}]},
        **{"losses_by_dataset": {"a": [1.0, None]}, "eval_losses": [{"step": 1, "loss": 2.0}]},
        **{
            "eval_losses_by_set": {"a": [2.0]},
            "peak_allocated_bytes": [2**30],
            "peak_reserved_bytes": [2**30],
        },
        **{"deepspeed_estimate": {"gpu_bytes": 2**30, "cpu_bytes": 2**30}, "predicted_peak_bytes": 2**30},
        "gpu_watch": [
            {
                **{"energy_joules": [1.0] * 5, "utilization": [90] * 5, "clock_mhz": [1000] * 5},
                **{"throttle_reasons": {"hw_slowdown": 1}, "used_bytes_before": 0, "num_processes_before": 0},
                "allocator": {"num_alloc_retries": 1, "num_ooms": 0},
            }
        ],
        "anatomy": {
            **dict.fromkeys(
                (
                    *("matmul_seconds", "attention_seconds", "other_compute_seconds", "optimizer_seconds"),
                    *("communication_exposed_seconds", "data_seconds", "idle_seconds"),
                    "communication_overlapped_seconds",
                ),
                0.1,
            ),
            **{"num_steps": 3, "device": "cuda"},
        },
    }
    return [*shipped, *dumped(whole, whole, {**whole, "schema_version": 2}, {**whole, "status": "oom"})]


def timeline_seeds() -> list[bytes]:
    from slm_toolkit.record.memory_timeline import PARTS

    head = ",".join(("phase", "module", "num_bytes", *(f"{part}_bytes" for part in PARTS)))
    rows = [
        f"{phase},layers.{n},{n + 9},{','.join('1' * len(PARTS))}"
        for n, phase in enumerate(("forward", "backward"))
    ]
    return ["\n".join((head, *rows)).encode()]


def parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["some words of a text", "and others"]}), sink)
    return sink.getvalue()


def dataset_files() -> list[bytes]:
    import gzip

    lines = [b"\n".join(json.dumps(row).encode() for row in rows) + b"\n" for rows in CHATS]
    return [*lines, b"plain text, more than sixteen bytes of it\n" * 3, parquet(), gzip.compress(lines[0])]
