"""Faults to plant in shipped files, flags, machines and shells, a row each, by `slm doctor`'s names."""

from typing import Any

from msgspec import Struct

from slm_toolkit.doctor.finding import REMOVE


class Planted(Struct, frozen=True):
    """A fault: what to change in a clean case so that the finding `name` is the only grave one."""

    name: str
    base: str
    "the shipped strategy it is planted in"
    yaml: dict[str, Any] = {}
    "by key, with dots"
    json: dict[str, Any] = {}
    more_text: dict[str, str] = {}
    "appended to the yaml, or in place of the json"
    flags: dict[str, Any] = {}
    host: dict[str, Any] = {}
    case: dict[str, Any] = {}
    "fields of the Case, and model, for another ModelSpec"
    also: tuple[str, ...] = ()
    "what else is then true"
    tag: str = ""
    "tells rows of one name apart"

    @property
    def row(self) -> str:
        return f"{self.name} {self.tag}".strip()


FSDP, DDP, ZERO1, ZERO2, ZERO3 = "fsdp_full_shard", "ddp", "ds_zero1", "ds_zero2", "ds_zero3"
HYBRID, NVME, ZEROPP, OFFLOAD = "fsdp_hybrid_shard", "ds_zero3_nvme", "ds_zeropp", "ds_zero2_offload"
_F, _D, _P, _Z = (
    "fsdp_config.fsdp_",
    "deepspeed_config.",
    "parallelism_config.parallelism_config_",
    "zero_optimization.",
)
_TWO_MACHINES = {"num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1"}
_INLINE = {f"{_D}deepspeed_config_file": REMOVE, f"{_D}zero_stage": 2}
_HERE = {"is_meant": True}
_16 = {"num_gpus": 16}
_OLD_TORCH = {"torch": "2.12.1+cu129"}


def _shell(**variables: str) -> dict[str, Any]:
    return {"variables": variables}


ALL = (
    # of launches
    Planted("duplicate-key", DDP, more_text={"yaml": "num_processes: 4\n"}),
    Planted("unknown-key", DDP, {"num_nodes": 1}, tag="of the file"),
    Planted("unknown-key", HYBRID, {"parallelism_config.tp_size": 1}, tag="without its prefix"),
    Planted("distributed-type", DDP, {"distributed_type": "DDP"}, tag="synonym"),
    Planted("distributed-type", ZERO2, {"distributed_type": REMOVE}, tag="absent"),
    Planted("unquoted-no", DDP, {"mixed_precision": False}),
    Planted("ignored-section", DDP, {f"{_F}version": 2}),
    Planted("more-processes-than-gpus", DDP, {"num_processes": 9}),
    Planted("processes-without-engine", "single", {"num_processes": 2}),
    Planted("main-process-ip-local", DDP, {**_TWO_MACHINES, "main_process_ip": "127.0.0.1"}, case=_16),
    Planted("deepspeed-launcher", ZERO2, _TWO_MACHINES, case=_16),
    Planted("gpu-ids", DDP, {"gpu_ids": 0}),
    Planted("mixed-precision-unknown", DDP, {"mixed_precision": "float16"}),
    Planted("mixed-precision-differs", DDP, {"mixed_precision": "fp16"}),
    Planted("compiled-by-yaml", DDP, {"dynamo_backend": "INDUCTOR"}),
    Planted("not-passed-on", DDP, {"compute_environment": "AMAZON_SAGEMAKER"}, tag="compute_environment"),
    Planted("not-passed-on", ZERO2, {f"{_D}deepspeed_multinode_launcher": "pdsh"}, tag="launcher"),
    Planted("use-cpu", "single", {"use_cpu": True}),
    # of FSDP
    Planted("fsdp-version-missing", FSDP, {f"{_F}version": REMOVE}),
    Planted("fsdp1", FSDP, {f"{_F}version": 1}),
    Planted(
        "fsdp1",
        FSDP,
        {f"{_F}version": 1, f"{_F}reshard_after_forward": "SHARD_GRAD_OP"},
        tag="shards otherwise",
    ),
    Planted("refused", FSDP, {f"{_F}reshard_after_forward": "FULL_SHARD"}, tag="reshard"),
    Planted("sharding-strategy-ignored", FSDP, {f"{_F}sharding_strategy": "SHARD_GRAD_OP"}),
    Planted("tied-embeddings", FSDP, host=_OLD_TORCH, case={"model": "smollm2-1.7b"}),
    Planted("no-wrap-policy", FSDP, {f"{_F}auto_wrap_policy": REMOVE}),
    Planted("size-based-wrap", FSDP, {f"{_F}auto_wrap_policy": "SIZE_BASED_WRAP"}),
    Planted("groups-do-not-divide", HYBRID, {f"{_P}dp_shard_size": 6}),
    # of DeepSpeed
    Planted("refused", ZERO2, more_text={"json": '{"zero_optimization": '}, tag="cut off"),
    Planted("set-twice", ZERO2, {"mixed_precision": "bf16"}),
    Planted(
        "refused",
        ZERO3,
        {f"{_D}zero_stage": 3, f"{_D}offload_param_device": "none"},
        tag="stage and offload",
    ),
    Planted("unknown-key", ZERO3, json={f"{_Z}stage3_max_live_params": 10**8}, tag="of zero_optimization"),
    Planted("not-passed-on", ZERO2, json={"flops_profiler.output_file": "/any/file"}, tag="profile"),
    Planted("zero3-init-by-default", ZERO3, {f"{_D}zero3_init_flag": REMOVE}),
    Planted("zero-stage-0", ZERO1, json={f"{_Z}stage": 0}),
    Planted("offload-param-below-stage-3", ZERO2, json={f"{_Z}offload_param": {"device": "cpu"}}),
    Planted("json-optimizer", ZERO2, json={"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
    Planted("json-scheduler", ZERO2, json={"scheduler": {"type": "WarmupLR", "params": {}}}),
    Planted(
        *("zero3-cannot-save", ZERO3),
        json={f"{_Z}stage3_gather_16bit_weights_on_model_save": "auto"},
        flags={"save_final_model": "true"},
    ),
    # slm-100m has 130,569,920 parameters: 5e8 elements are more
    Planted(
        "bucket-larger-than-model",
        ZERO2,
        json={f"{_Z}reduce_bucket_size": 5e8},
        case={"model": "slm-100m-hw"},
    ),
    Planted("no-overlap", ZERO2, json={f"{_Z}overlap_comm": REMOVE}),
    Planted("zero3-never-releases", ZERO3, json={f"{_Z}stage3_max_reuse_distance": 5e9}),
    Planted("zero3-gathers-all", ZERO3, json={f"{_Z}stage3_max_live_parameters": 3e9}),
    # of flags
    Planted(
        "flash-attn-in-fp32", DDP, flags={"attn_implementation": "flash_attention_2", "numerics": "fp32"}
    ),
    Planted("fp8-emulated", DDP, flags={"fp8": "rowwise"}, case={"gpu_names": ("a100-80gb",)}),
    Planted(
        *("flag-contradiction", ZERO3),
        flags={"peft": "qlora"},
    ),
    Planted("json-contradicts-flag", ZERO2, json={"train_micro_batch_size_per_gpu": 2}, tag="micro-batch"),
    Planted(
        "json-contradicts-flag", ZERO2, {**_INLINE, f"{_D}gradient_clipping": 0.5}, tag="clipping in the yaml"
    ),
    Planted("json-contradicts-flag", ZERO2, json={"fp16.enabled": True}, tag="fp16"),
    Planted(
        *("communication-dtype-differs", ZERO2),
        json={"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    # of machines
    Planted("nvme-path", NVME, json={f"{_Z}offload_param.nvme_path": REMOVE}, tag="absent"),
    Planted(
        "nvme-path",
        ZERO3,
        {
            f"{_D}deepspeed_config_file": REMOVE,
            f"{_D}zero_stage": 3,
            f"{_D}offload_optimizer_device": "nvme",
            f"{_D}offload_optimizer_nvme_path": "/nvme",
        },
        case={"num_gpus": 1, "gpu_names": ("a100-40gb",)},
        also=("more-processes-than-gpus",),
        tag="of the yaml",
    ),
    Planted("gpu-without-bf16", DDP, host={**_HERE, "gpu_names": ("Tesla V100-SXM2-32GB",) * 8}),
    Planted(
        "small-shm", DDP, host={**_HERE, "gpu_names": ("NVIDIA H100 80GB HBM3",) * 8, "shm_bytes": 2**26}
    ),
    # 8 ranks x 4 bytes x 2.2e9 = 71 GB while all build the model
    Planted("host-ram", ZERO3, host={"ram_bytes": 64 * 2**30}, tag="short"),
    Planted("host-ram", FSDP, host={"ram_bytes": 128 * 2**30, "free_ram_bytes": 50 * 2**30}, tag="taken"),
    # of shells
    *(
        Planted(name, base, host=_shell(**{variable: value}))
        for name, base, variable, value in (
            ("nccl-p2p-disabled", DDP, "NCCL_P2P_DISABLE", "1"),
            ("nccl-shm-disabled", DDP, "NCCL_SHM_DISABLE", "1"),
            ("nccl-ib-disabled", ZEROPP, "NCCL_IB_DISABLE", "1"),
            ("cuda-launch-blocking", DDP, "CUDA_LAUNCH_BLOCKING", "1"),
            ("distributed-debug", DDP, "TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
            ("no-memory-caching", DDP, "PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        )
    ),
    Planted("dynamo-disabled", DDP, flags={"kernels": "loss+compile"}, host=_shell(TORCHDYNAMO_DISABLE="1")),
    Planted("one-thread-per-rank", DDP, host={**_HERE, "num_cores": 8, **_shell()}),
    # that closed forms find
    Planted("widths-off-tensor-cores", DDP, case={"model": "slm-500m"}),
    Planted("does-not-fit", DDP, case={"gpu_names": ("l4",)}, flags={"per_device_train_batch_size": 64}),
    Planted(
        "may-not-fit", DDP, flags={"per_device_train_batch_size": 12}, case={"gpu_names": ("a100-40gb",)}
    ),
    Planted(
        "sharding-of-what-fits",
        ZERO3,
        flags={"per_device_train_batch_size": 2},
        case={"model": "slm-100m-hw", "gpu_names": ("h100-80gb",)},
    ),
    Planted("offload-of-what-fits", OFFLOAD, case={"gpu_names": ("h200",)}),
)
