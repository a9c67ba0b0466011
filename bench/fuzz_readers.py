"""Every reader of what a user gives: how its inputs are made, how often, and what reads them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz_inputs import (
    made,
    made_checkpoint,
    made_places,
    made_record_set,
    made_template,
    made_tokenizer,
    made_words,
)
from fuzz_reading import (
    chat_template_input,
    checkpoint_input,
    command_line_input,
    convert_command_input,
    convert_file_input,
    dataset_file_input,
    dataset_names_input,
    deepspeed_json_input,
    doctor_input,
    environment_input,
    flags_input,
    launch_input,
    lm_eval_task_input,
    meeting_input,
    model_config_input,
    model_name_input,
    network_input,
    places_input,
    prices_input,
    record_input,
    record_set_input,
    rows_input,
    signed_checkpoint_input,
    slurm_input,
    strategy_yaml_input,
    timeline_input,
    tokenizer_input,
)
from fuzz_seeds import (
    CHATS,
    CHECKPOINT,
    COMMANDS,
    FLAGS,
    GPT2,
    LLAMA,
    MPT,
    NEOX,
    NETWORK,
    PLACED,
    ROOT,
    SLM,
    TEMPLATES,
    TOKENIZERS,
    TRAINER,
    YAMLS,
    dataset_files,
    dumped,
    files,
    lines,
    records,
    signed_checkpoints,
    timeline_seeds,
)


@dataclass(frozen=True)
class Reader:
    """How inputs for one reader are made, and what reads them, and what uses what was read."""

    name: str
    read: Callable[[bytes, Path], None]
    "in an empty folder that is the working folder"
    seeds: Callable[[], list[bytes]]
    share: int
    "of the inputs, in parts of all readers' shares"
    make: Callable[[list[bytes], random.Random], bytes] = made


READERS = (
    Reader("strategy_yaml", strategy_yaml_input, lambda: [*files("accel_configs/*.yaml"), *YAMLS], 20),
    Reader("deepspeed_json", deepspeed_json_input, lambda: files("ds_configs/*.json"), 14),
    Reader(
        "model_config",
        model_config_input,
        lambda: dumped(LLAMA, GPT2, NEOX, MPT, {**LLAMA, "model_type": "qwen2"}),
        14,
    ),
    Reader(
        "model_name",
        model_name_input,
        lambda: [b"slm-700m", b"no/where", b"slm-0.5b", b"slm-100m", b"./m", b"slm-1.5b-hw"],
        3,
    ),
    Reader(
        "prices",
        prices_input,
        lambda: [
            b"h100-80gb: 2.49\n",
            b"l4: {usd_per_gpu_hour: 1, kind: spot, provider: X, as_of: 2026-11, source: s}\na100-40gb: 3\n",
        ],
        6,
    ),
    Reader("network", network_input, lambda: dumped(NETWORK), 6),
    Reader("record", record_input, records, 8),
    Reader("record_set", record_set_input, records, 8, made_record_set),
    Reader("places", places_input, lambda: lines(*PLACED), 6, made_places),
    Reader("checkpoint", checkpoint_input, lambda: dumped(CHECKPOINT), 4),
    Reader("signed_checkpoint", signed_checkpoint_input, signed_checkpoints, 6, made_checkpoint),
    Reader("timeline", timeline_input, timeline_seeds, 2),
    Reader(
        "convert_file",
        convert_file_input,
        lambda: [*files("accel_configs/*.yaml", "ds_configs/*.json"), *YAMLS, *dumped(*TRAINER)],
        14,
    ),
    Reader("convert_command", convert_command_input, lambda: lines(*COMMANDS), 6, made_words),
    Reader("doctor", doctor_input, lambda: [*files("accel_configs/*.yaml", "ds_configs/*.json"), *YAMLS], 4),
    Reader("command_line", command_line_input, lambda: lines(*SLM), 3, made_words),
    Reader("flags", flags_input, lambda: lines(*FLAGS), 10, made_words),
    Reader("rows", rows_input, lambda: dumped(*CHATS), 10),
    Reader("dataset_file", dataset_file_input, dataset_files, 1),
    Reader("tokenizer", tokenizer_input, lambda: dumped(*TOKENIZERS), 6, made_tokenizer),
    Reader(
        "chat_template",
        chat_template_input,
        lambda: [template.encode() for template in TEMPLATES],
        4,
        made_template,
    ),
    Reader(
        "dataset_names",
        dataset_names_input,
        lambda: [b"a.txt=3,b.jsonl=1", b"x/y", b"a*.txt,~/b", b"data/"],
        3,
    ),
    Reader(
        "slurm",
        slurm_input,
        lambda: [
            b"--partition=gpu --time 10\n",
            b"-p x --gres=gpu:1\n" + (ROOT / "slm_toolkit/compare/slurm.sh").read_bytes(),
        ],
        3,
    ),
    Reader(
        "lm_eval_task",
        lm_eval_task_input,
        lambda: [b"task: mine\ndataset_path: json\ndoc_to_text: !function x.y\n"],
        2,
    ),
    Reader(
        "launch",
        launch_input,
        lambda: lines(
            "--config_file fsdp_hybrid_shard.yaml --num_machines 2 --num_processes 16 --machine_rank 1 -m "
            "slm_toolkit.train",
            "--num_machines 2 --num_processes=4 --machine_rank=0 --main_process_port 29500 train.py",
        ),
        3,
        made_words,
    ),
    Reader(
        "meeting",
        meeting_input,
        lambda: dumped({"machine_rank": 1, "said": {"num_machines": 2}}, {"problem": None}),
        3,
    ),
    Reader("environment", environment_input, lambda: [b"300", b"1.5", b""], 1),
)
