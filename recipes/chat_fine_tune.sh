#!/usr/bin/env bash
# How do I fine-tune all weights of a small model on chats?
# hardware: 1 x rtx-4090
# memory: 14.1 of 23.5 GiB per GPU, 2 GiB of host RAM per node
# time: 1.9 h
# cost: $1.38
# estimated on 2026-11-28 by the first command below
set -euo pipefail

# 1. Full fine-tuning of 360M parameters fits a card of 24 GB without adapters, checkpointing or offload.
#    The estimate is for padded batches: it leaves out what --packing multipack (below) saves, and its mask.
slm estimate --model smollm2-360m --gpu rtx-4090 --num_gpus 1 --strategy single --seq_len 2048 \
  --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --kernels fused --max_steps 3000

if [[ -z ${TRY:-} ]] && nvidia-smi -L &>/dev/null; then # with a GPU: the real thing
  : "${MODEL:=HuggingFaceTB/SmolLM2-360M}" "${SEQ_LEN:=2048}" "${BATCH:=4}" "${ACCUMULATE:=8}"
  : "${STEPS:=3000}" "${TOKENIZER:=HuggingFaceTB/SmolLM2-360M-Instruct}" # the base has no chat template
  data=(--dataset teknium/OpenHermes-2.5 --dataset_format sharegpt) # or your own .jsonl with rows as below
else # without a GPU, or with TRY=1: two steps of a tiny model, on chats made here
  : "${MODEL:=slm-1m}" "${SEQ_LEN:=128}" "${BATCH:=2}" "${ACCUMULATE:=1}" "${STEPS:=2}" "${TOKENIZER:=byte}"
  turns='{"role": "user", "content": "What is & and nothing?"}, {"role": "assistant", "content": "It is &."}'
  seq 200 | sed "s/.*/{\"messages\": [$turns]}/" >chats.jsonl
  data=(--dataset chats.jsonl --dataset_format messages)
fi

# 2. The loss is on answers only. The learning rate is for 32 sequences per step: with more cards or another
#    batch, multiply it by the square root of the ratio, as is usual for AdamW. With `pip install flash-attn`,
#    --attn_implementation flash_attention_2 separates packed chats without a mask.
# Runs `accelerate launch --config_file .../accel_configs/single.yaml -m slm_toolkit.train ...`.
slm train --strategy single --model "$MODEL" "${data[@]}" \
  --tokenizer_name "$TOKENIZER" --loss_on answers --packing multipack --seq_len "$SEQ_LEN" \
  --per_device_train_batch_size "$BATCH" --gradient_accumulation_steps "$ACCUMULATE" \
  --kernels fused --learning_rate 3e-5 --weight_decay 0 \
  --max_steps "$STEPS" --warmup_steps $((STEPS / 20)) --eval_steps 500 --save_steps 500 \
  --run_name chat-fine-tune
