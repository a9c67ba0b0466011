#!/usr/bin/env bash
# How do I train a 1B model on 128k tokens per sequence?
# hardware: 8 x a100-40gb
# memory: 20.9 of 39.4 GiB per GPU, 35 GiB of host RAM per node
# time: 9.8 h
# cost: $186
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. The training state is as large as ever: activations are what does not fit, so backward computes some of
#    them again (--gradient_checkpointing). Compare what fits, and how fast each is:
slm recommend --model slm-1b-hw --tokens 1B --seq_len 131072 --global_batch_tokens 1048576 --gpu a100-40gb:8 \
  --strategy fsdp_full_shard --gradient_checkpointing none selective_op full --kernels compiled
slm estimate --model slm-1b-hw --seq_len 131072 --gpu a100-40gb --num_gpus 8 --strategy fsdp_full_shard \
  --gradient_checkpointing none selective_op full --per_device_train_batch_size 1 --kernels compiled

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with GPUs: the real thing
  : "${MODEL:=slm-1b-hw}" "${SEQ_LEN:=131072}" "${RANKS:=8}"
  : "${ACCUMULATE:=1}" "${STEPS:=954}" "${KERNELS:=compiled}"
  data=(--dataset HuggingFaceFW/fineweb-edu:sample-10BT --tokenizer_name TinyLlama/TinyLlama_v1.1)
else # without GPUs, or with TRY=1: two steps of a tiny model on two processes
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=256}" "${RANKS:=2}" "${ACCUMULATE:=2}" "${STEPS:=2}" "${KERNELS:=fused}"
  data=(--dataset synthetic)
fi
: "${CHECKPOINTING:=full}"
flags=(--model "$MODEL" --seq_len "$SEQ_LEN" --per_device_train_batch_size 1
  --gradient_accumulation_steps "$ACCUMULATE" --gradient_checkpointing "$CHECKPOINTING"
  --kernels "$KERNELS")

# 2. Measure four steps, then train. A rehearsal shows the memory first, on any computer:
#    slm train --rehearse 8 --strategy fsdp_full_shard --gradient_checkpointing full ...
slm compare --strategy fsdp_full_shard --num_processes "$RANKS" "${flags[@]}" \
  --max_steps $((STEPS < 4 ? STEPS : 4)) --output_dir runs/check
slm train --strategy fsdp_full_shard --num_processes "$RANKS" "${flags[@]}" "${data[@]}" \
  --max_steps "$STEPS" --warmup_steps $((STEPS / 50)) --save_steps 200 --run_name long-sequences
