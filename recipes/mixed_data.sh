#!/usr/bin/env bash
# How much does each dataset gain from training on a mixture?
# hardware: 1 x rtx-4090
# memory: 12.8 of 23.5 GiB per GPU, 2 GiB of host RAM per node
# time: 7.7 h
# cost: $5.68
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. Continue the pretraining of a 360M model for a billion tokens.
slm recommend --model smollm2-360m --tokens 1B --seq_len 2048 --global_batch_tokens 131072 \
  --kernels compiled --gpu rtx-4090:1 --strategy single

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with a GPU: the real thing
  : "${MODEL:=HuggingFaceTB/SmolLM2-360M}" "${SEQ_LEN:=2048}" "${BATCH:=4}" "${ACCUMULATE:=16}"
  : "${STEPS:=7630}" "${EVERY:=500}"
  data=(--dataset "roneneldan/TinyStories=0.7,open-web-math/open-web-math=0.3" --streaming true)
  : "${KERNELS:=compiled}"
else # without a GPU, or with TRY=1: two steps of a tiny model, on texts made here
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=64}" "${BATCH:=4}" "${ACCUMULATE:=1}" "${STEPS:=2}" "${EVERY:=1}"
  seq 200 | sed 's/.*/{"text": "Once upon a time & children went into the wood."}/' >stories.jsonl
  seq 200 | sed 's/.*/{"text": "& + & = 2 x &, and & - & = 0."}/' >sums.jsonl
  seq 300 350 | sed 's/.*/{"text": "& x 1 = &"}/' >products.jsonl
  # a separate evaluation set; without --eval_dataset it is the last 5% of each dataset
  data=(--dataset "stories.jsonl=0.7,sums.jsonl=0.3" --eval_dataset "sums.jsonl,products.jsonl")
  : "${KERNELS:=fused}"
fi

# 2. Seven of ten sequences are stories. Each dataset has its own training loss and evaluation loss.
# Runs `accelerate launch --config_file .../accel_configs/single.yaml -m slm_toolkit.train ...`.
slm train --strategy single --model "$MODEL" "${data[@]}" \
  --seq_len "$SEQ_LEN" --per_device_train_batch_size "$BATCH" --gradient_accumulation_steps "$ACCUMULATE" \
  --kernels "$KERNELS" --learning_rate 1e-4 --max_steps "$STEPS" \
  --warmup_steps $((STEPS / 50)) --eval_steps "$EVERY" --run_name mixed-data

# 3. Which dataset's loss fell, and which rose?
slm report runs/mixed-data
