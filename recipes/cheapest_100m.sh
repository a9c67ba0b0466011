#!/usr/bin/env bash
# Which GPU trains a 100M model for the least money?
# hardware: 1 x rtx-4090
# memory: 19.0 of 23.5 GiB per GPU, 1 GiB of host RAM per node
# time: 6.3 h
# cost: $4.64
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. Which GPU to rent. This only estimates, on any computer. (-hw: widths that are fast on tensor cores.)
slm recommend --model slm-100m-hw --tokens 3B --kernels compiled --top 5 \
  --gpu rtx-4090:1 l4:1 l40s:1 a100-40gb:1 h100-80gb:1

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with a GPU: the real thing
  # the largest batch that fits with some room; accumulation then gives 0.5M tokens per step
  : "${MODEL:=slm-100m-hw}" "${SEQ_LEN:=1024}" "${BATCH:=64}" "${ACCUMULATE:=8}" "${STEPS:=5723}"
  data=(--dataset HuggingFaceFW/fineweb-edu:sample-10BT --tokenizer_name TinyLlama/TinyLlama_v1.1)
  : "${KERNELS:=compiled}"
else # without a GPU, or with TRY=1: two steps of a tiny model
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=64}" "${BATCH:=2}" "${ACCUMULATE:=2}" "${STEPS:=2}"
  data=(--dataset synthetic)
  : "${KERNELS:=fused}"
fi
# Defaults: bf16 with fp32 master weights, and PyTorch's FlashAttention (for the original: `pip install
# flash-attn`, --attn_implementation flash_attention_2).
flags=(--model "$MODEL" --seq_len "$SEQ_LEN" --per_device_train_batch_size "$BATCH"
  --gradient_accumulation_steps "$ACCUMULATE" --kernels "$KERNELS")

# 2. Run a few steps on the rented GPU. Is it as fast as estimated? The table shows dollars per 1M tokens.
slm compare --strategy single "${flags[@]}" --max_steps $((STEPS < 12 ? STEPS : 12)) --output_dir runs/check

# 3. Train. To resume after a stop, add --resume_from_checkpoint latest to the same command.
# Runs `accelerate launch --config_file .../accel_configs/single.yaml -m slm_toolkit.train ...`.
slm train --strategy single "${flags[@]}" "${data[@]}" \
  --max_steps "$STEPS" --warmup_steps $((STEPS / 20)) --learning_rate 1e-3 \
  --eval_steps 500 --save_steps 500 --run_name cheapest-100m
